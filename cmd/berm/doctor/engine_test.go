package doctor

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// thisContainer is a container's id.
var thisContainer = strings.Repeat("a1", 32)

func parsePolicy(t *testing.T, text string) *policy.Policy {
	t.Helper()
	return check.Value(policy.Parse([]byte(text), policy.Options{}))(t)
}

func TestDoctorJudgesEngine(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		change func(*engineFacts)
		policy string
		id     string
		grade  grade
		found  string
	}{
		"all well":           {nil, "", "engine.reachable", gradeOK, "docker 28.0.0 at unix:///e.sock, API 1.47"},
		"nobody":             {func(e *engineFacts) { e.err = syscall.ECONNREFUSED }, "", "engine.reachable", gradeBad, "no docker listens"},
		"not for us":         {func(e *engineFacts) { e.err = syscall.EACCES }, "", "engine.reachable", gradeBad, "refuses this user"},
		"hangs":              {func(e *engineFacts) { e.err = serve.ErrStuck }, "", "engine.reachable", gradeBad, "doesn't answer in time"},
		"refused":            {func(e *engineFacts) { e.err = &refusedError{errors.New("no\nway")} }, "", "engine.reachable", gradeBad, "no; way"},
		"open":               {func(e *engineFacts) { e.open = true }, "", "engine.socket", gradeBad, "every user"},
		"open, and hangs":    {func(e *engineFacts) { e.open, e.err = true, serve.ErrStuck }, "", "engine.socket", gradeBad, "every user"},
		"plain TCP":          {func(e *engineFacts) { e.socket = "" }, "", "engine.socket", gradeSoft, "without TLS"},
		"another's mounts":   {func(e *engineFacts) { e.cfg.Engine.Kind, e.view.Mounts = "containerd", false }, "", "engine.place", gradeBad, ""},
		"a container":        {func(e *engineFacts) { e.inside, e.view.Root = true, false }, "", "engine.self", gradeSoft, "not one that the engine knows"},
		"this container":     {func(e *engineFacts) { e.self = serve.Self{ID: thisContainer} }, "", "engine.self", gradeOK, thisContainer[:12]},
		"unknown":            {func(e *engineFacts) { e.selfErr = serve.ErrStuck }, "", "engine.self", gradeSoft, "isn't known"},
		"no network":         {func(e *engineFacts) { e.settled = errors.New("which?") }, "", "engine.network", gradeBad, "which?"},
		"agent off":          {func(e *engineFacts) { e.agent = errors.New("why") }, "", "engine.agent", gradeSoft, "off: why"},
		"agent unseen":       {func(e *engineFacts) { e.hidden = true }, "", "engine.agent", gradeSoft, "can't be seen"},
		"storage driver":     {func(e *engineFacts) { e.survey.Storage = "vfs" }, "", "engine.setup", gradeSoft, "vfs"},
		"live-restore":       {func(e *engineFacts) { e.survey.LiveRestore = true }, "", "engine.setup", gradeOK, "live-restore on"},
		"no seccomp":         {func(e *engineFacts) { e.survey.Security = nil }, "", "engine.security", gradeBad, ""},
		"rootless":           {func(e *engineFacts) { e.survey.Security = []string{"rootless", "seccomp"} }, "", "engine.security", gradeOK, "rootless, seccomp"},
		"no pids":            {func(e *engineFacts) { e.survey.Unlimited = []string{"pids", "swap"} }, "", "engine.limits", gradeBad, "pids"},
		"no swap here":       {func(e *engineFacts) { e.survey.Unlimited = []string{"swap"} }, "", "engine.limits", gradeOK, ""},
		"no swap there":      {func(e *engineFacts) { e.survey.Unlimited, e.view.Root = []string{"swap"}, false }, "", "engine.limits", gradeSoft, "swap"},
		"no swap at its TCP": {func(e *engineFacts) { e.survey.Unlimited, e.socket = []string{"swap"}, "" }, "", "engine.limits", gradeSoft, "swap"},
		"clock":              {func(e *engineFacts) { e.survey.Skew = -90 * time.Second }, "", "engine.clock", gradeSoft, "-1m30s"},
		"holders": {func(e *engineFacts) {
			e.survey.Holders = []runtime.Holder{{ID: "1", Name: "ci"}, {ID: "2", Name: "ui"}}
		}, "", "engine.socket_holders", gradeSoft, "2 running containers have the engine's socket: ci, ui"},
		"only us": {func(e *engineFacts) {
			e.survey.Holders, e.self = []runtime.Holder{{ID: thisContainer, Name: "berm"}}, serve.Self{ID: thisContainer}
		}, "", "engine.socket_holders", gradeOK, "but this one"},
		"archives": {func(e *engineFacts) { e.cfg.EngineAPI.Listeners = make([]config.Listener, 1) }, "", "engine.archives", gradeSoft, "engine 28.0.0 lacks"},
		"fixed archives": {func(e *engineFacts) {
			e.cfg.EngineAPI.Listeners, e.survey.Info.Version = make([]config.Listener, 1), "29.5.1"
		}, "", "engine.archives", gradeOK, "engine 29.5.1"},
		"asserted archives": {func(e *engineFacts) {
			e.cfg.EngineAPI.Listeners, e.cfg.EngineAPI.ArchiveFixed = make([]config.Listener, 1), true
		}, "", "engine.archives", gradeOK, "archive_fixed"},
		"a class":            {nil, "version: 1\nprofiles: {default: {runtime_class: runsc}}\n", "engine.runtimes", gradeBad, "default (runsc)"},
		"an allowed class":   {nil, "version: 1\nprofiles: {default: {engine_api: {runtimes: [kata]}}}\n", "engine.runtimes", gradeSoft, "kata"},
		"its class":          {nil, "version: 1\nprofiles: {default: {runtime_class: runc}}\n", "engine.runtimes", gradeOK, "runc"},
		"no userns":          {func(e *engineFacts) { e.survey.NoUserNS = "too old" }, "version: 1\nprofiles: {apart: {userns: auto}}\n", "engine.userns", gradeBad, "too old"},
		"no userns, unasked": {func(e *engineFacts) { e.survey.NoUserNS = "too old" }, "", "engine.userns", gradeOK, "too old"},
		"userns":             {nil, "version: 1\nprofiles: {apart: {userns: auto}}\n", "engine.userns", gradeOK, "can say"},
		"no shim":            {func(e *engineFacts) { e.survey.Missing = []string{"the program runc"} }, "", "engine.parts", gradeBad, "runc"},
		"no CNI":             {func(e *engineFacts) { e.survey.MissingForNetworks = []string{"bridge"} }, "", "engine.parts", gradeSoft, "bridge"},
		"no CNI, yet asked":  {func(e *engineFacts) { e.survey.MissingForNetworks = []string{"bridge"} }, "version: 1\nprofiles: {default: {network: \"on\"}}\n", "engine.parts", gradeBad, "bridge"},
	} {
		cfg := config.Default()
		e := &engineFacts{
			cfg: cfg, asked: "unix:///e.sock", socket: "/e.sock", view: serve.View{Root: true, Mounts: true, Asked: true},
			survey: runtime.Survey{Info: runtime.Info{Backend: "docker", Version: "28.0.0", APIVersion: "1.47"}, Classes: []string{"runc"}, Security: []string{"seccomp"}},
		}
		if tt.change != nil {
			tt.change(e)
		}
		findings := e.judge(parsePolicy(t, tt.policy))
		t.Run(name, func(t *testing.T) { wantFinding(t, findings, tt.id, tt.grade, tt.found) })
	}
}

func TestOpenToAll(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(t.TempDir(), "engine")
	must(t, os.Mkdir(dir, 0o755))
	socket := filepath.Join(dir, "s")
	l := check.Value(net.Listen("unix", socket))(t)
	defer func() { _ = l.Close() }()
	closed := false // a directory above that others can't pass
	for at := filepath.Dir(dir); at != "/"; at = filepath.Dir(at) {
		fi := check.Value(os.Stat(at))(t)
		closed = closed || fi.Mode().Perm()&1 == 0
	}
	for _, tt := range []struct {
		socket, dir os.FileMode
		want        bool
	}{{0o666, 0o755, !closed}, {0o660, 0o755, false}, {0o666, 0o750, false}} {
		must(t, os.Chmod(socket, tt.socket), os.Chmod(dir, tt.dir))
		if got := openToAll(socket); got != tt.want {
			t.Errorf("mode %o in %o: %v", tt.socket, tt.dir, got)
		}
	}
	if openToAll(filepath.Join(dir, "none")) {
		t.Error("one that isn't there is open")
	}
}

func TestDoctorJudgesPolicy(t *testing.T) {
	t.Parallel()
	digest := "busybox@sha256:" + thisContainer
	root := t.TempDir()
	mounts := "version: 1\nmounts: {allowed_roots: [" + root + "]}\n"
	trusting := "version: 1\nmounts: {allowed_roots: [" + root + "], trusted_roots: [" + root + "]}\n"
	for name, tt := range map[string]struct {
		policy string
		change func(*policyFacts)
		id     string
		grade  grade
		found  string
	}{
		"all there":     {"", nil, "policy.images", gradeOK, "all 4"},
		"one absent":    {"", func(p *policyFacts) { p.images[0].err = errdefs.ErrNotFound }, "policy.images", gradeSoft, "python:3.11-slim"},
		"never pulled":  {"version: 1\nimages: {pull: never}\n", func(p *policyFacts) { p.images[0].err = errdefs.ErrNotFound }, "policy.images", gradeBad, "python:3.11-slim"},
		"not known":     {"", func(p *policyFacts) { p.images[0].err = serve.ErrStuck }, "policy.images", gradeSoft, serve.ErrStuck.Error()},
		"a tag":         {"", nil, "policy.digests", gradeSoft, "python:3.11-slim"},
		"a digest":      {"version: 1\nprofiles: {default: {image: '" + digest + "'}}\n", nil, "policy.digests", gradeOK, ""},
		"a pin":         {"version: 1\nimages: {pins: {'python:3.11-slim': 'sha256:" + thisContainer + "'}}\n", nil, "policy.digests", gradeOK, ""},
		"no network":    {"", nil, "policy.networks", gradeOK, "by default off; who asks gets on (with a way out)"},
		"a way out":     {"version: 1\nprofiles: {default: {network: \"on\"}}\n", nil, "policy.networks", gradeSoft, "default has on"},
		"internal":      {"version: 1\nnetworks: {in: {engine_network: x, internal: true}}\nprofiles: {default: {network: in}}\n", nil, "policy.networks", gradeOK, "by default in"},
		"together":      {"version: 1\nnetworks: {in: {engine_network: x, isolated: false}}\n", nil, "policy.networks", gradeSoft, "not isolated: in"},
		"no mounts":     {"", func(p *policyFacts) { p.held = serve.ErrOtherMounts }, "policy.hold", gradeOK, "no directory of the host can be mounted"},
		"mounts held":   {mounts, nil, "policy.hold", gradeOK, "mode held"},
		"not held":      {mounts, func(p *policyFacts) { p.held = serve.ErrOtherMounts }, "policy.hold", gradeSoft, "mode trusted, as mounts can't be held: " + serve.ErrOtherMounts.Error() + "; there are no mounts.trusted_roots"},
		"trusted":       {trusting, func(p *policyFacts) { p.held = serve.ErrOtherPIDs }, "policy.hold", gradeSoft, serve.ErrOtherPIDs.Error() + "; trusted: " + root},
		"must be held":  {"", func(p *policyFacts) { p.held, p.err = serve.ErrOtherMounts, errors.New("held") }, "policy.file", gradeBad, "held"},
		"can't be read": {"", func(p *policyFacts) { p.policy, p.err = nil, errors.New("line 1: a\nline 2: b") }, "policy.file", gradeBad, "line 1: a; line 2: b"},
		"what it is of": {"", nil, "policy.file", gradeOK, "the built-in policy; profiles: default,"},
	} {
		p := &policyFacts{policy: parsePolicy(t, tt.policy)}
		p.images = imagesOf(p.policy)
		if tt.change != nil {
			tt.change(p)
		}
		e := &engineFacts{cfg: config.Default(), view: serve.View{Root: true, Mounts: true, Asked: true}}
		findings := p.judge(e)
		t.Run(name, func(t *testing.T) { wantFinding(t, findings, tt.id, tt.grade, tt.found) })
	}
	for ref, want := range map[string]string{"python:3": "docker.io/library/python:3", "a/b": "docker.io/a/b", "localhost/a": "localhost/a", "r.example:5000/a": "r.example:5000/a"} {
		if got := inFull(ref, "containerd"); got != want || inFull(ref, "docker") != ref {
			t.Errorf("%s is %s, want %s", ref, got, want)
		}
	}
}
