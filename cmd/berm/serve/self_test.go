package serve

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime/docker"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

var (
	ownID, otherID = strings.Repeat("a1", 32), strings.Repeat("b2", 32)
	ownUpper       = "/var/lib/docker/overlay2/" + strings.Repeat("c3", 32) + "/diff"
)

// procOf makes a directory like /proc/self of a container whose cgroup is hidden, as
// version 2 does it.
func procOf(t *testing.T, cgroup string, mounts ...string) string {
	t.Helper()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "cgroup"), cgroup)
	lines := append([]string{
		"204 108 0:55 / / rw,relatime master:4 - overlay overlay rw,lowerdir=/l/A:/l/B,upperdir=" + ownUpper + ",workdir=/w",
		"205 204 0:60 / /proc rw,nosuid - proc proc rw",
		"221 204 254:0 /data/containers/" + otherID + "/hostname /etc/hostname rw,relatime - ext4 /dev/vda rw",
	}, mounts...)
	write(t, filepath.Join(dir, "mountinfo"), strings.Join(lines, "\n")+"\n")
	return dir
}

func TestReadClues(t *testing.T) {
	t.Parallel()
	proc := procOf(t, "1:cpu:/docker/"+otherID+"/docker/"+ownID+"\n0::/system.slice/docker-"+ownID+".scope\n",
		`224 204 254:0 /srv/a\040b /var/lib/berm rw master:1 - ext4 /dev/vda rw`)
	c := check.Value(readSelf(proc, "berm"))(t)
	if want := []string{ownID, otherID}; !slices.Equal(c.ids, want) || c.upperDir != ownUpper || c.mounts["/var/lib/berm"] != "/srv/a b" {
		t.Errorf("%+v", c)
	}
	if c, err := readSelf(procOf(t, "0::/\n"), ownID[:12]); err != nil || !slices.Equal(c.ids, []string{otherID, ownID[:12]}) {
		t.Errorf("with cgroups that tell nothing: %+v, %v", c, err)
	}
	write(t, filepath.Join(proc, "mountinfo"), "nonsense\n")
	if _, err := readSelf(proc, ""); err == nil {
		t.Error("nonsense is read")
	}
}

// A guess counts for nothing unless the kernel's word agrees with the engine's.
func TestCluesFit(t *testing.T) {
	t.Parallel()
	state := docker.DescribedMount{Source: "/srv/berm", Target: "/var/lib/berm"}
	work := docker.DescribedMount{Source: "/mnt/disk/work", Target: "/work", Volume: true}
	c := &selfFacts{upperDir: ownUpper, mounts: map[string]string{
		"/": "/", "/proc": "/", "/etc/hosts": "/x/hosts", "/var/lib/berm": "/@/srv/berm", "/work": "/work", "/work/below": "/",
	}}
	overlay, other := c.upperDir, strings.Replace(ownUpper, "c3", "d4", 1)
	for name, tt := range map[string]struct {
		upper string // of the facts
		d     docker.Description
		want  bool
	}{
		"its root":               {overlay, docker.Description{Running: true, UpperDir: ownUpper}, true},
		"its root, by half":      {strings.TrimPrefix(overlay, "/var/lib/docker/overlay2/"), docker.Description{Running: true, UpperDir: ownUpper}, true},
		"another's root":         {overlay, docker.Description{Running: true, UpperDir: other, Mounts: []docker.DescribedMount{state, work}}, false},
		"not running":            {overlay, docker.Description{UpperDir: ownUpper}, false},
		"the same mounts":        {overlay, docker.Description{Running: true, Mounts: []docker.DescribedMount{state, work}}, true},
		"fewer than it has":      {overlay, docker.Description{Running: true, Mounts: []docker.DescribedMount{state}}, false},
		"none":                   {overlay, docker.Description{Running: true}, false},
		"one that it lacks":      {overlay, docker.Description{Running: true, Mounts: []docker.DescribedMount{state, work, {Source: "/b", Target: "/b"}}}, false},
		"one of another source":  {overlay, docker.Description{Running: true, Mounts: []docker.DescribedMount{state, {Source: "/elsewhere", Target: "/work"}}}, false},
		"no word of either root": {"", docker.Description{Running: true, UpperDir: ownUpper, Mounts: []docker.DescribedMount{state, work}}, true},
	} {
		c.upperDir = tt.upper
		if got := c.fits(tt.d); got != tt.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// describers is an engine that knows some containers, after failing a few times.
type describers struct {
	fail  []error
	known map[string]docker.Description
	asked []string
}

func (d *describers) Describe(_ context.Context, id string) (docker.Description, error) {
	if len(d.fail) > 0 {
		err := d.fail[0]
		d.fail = d.fail[1:]
		return docker.Description{}, err
	}
	d.asked = append(d.asked, id)
	if found, ok := d.known[id]; ok {
		return found, nil
	}
	return docker.Description{}, errdefs.ErrNotFound
}

func TestCluesFind(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	write(t, file, "")
	c := &selfFacts{ids: []string{otherID, ownID}, upperDir: ownUpper, mounts: map[string]string{dir: "/_data", file: "/file", "/gone": "/gone"}}
	own := docker.Description{
		ID: ownID, Running: true, UpperDir: ownUpper, Labels: map[string]string{labelProject: "demo"}, Networks: []string{"bridge", "demo_default"},
		Mounts: []docker.DescribedMount{
			{Source: "/v/_data", Target: dir, Volume: true}, {Source: "/srv/file", Target: file}, {Source: "/gone", Target: "/gone"},
		},
	}
	engine := &describers{
		fail:  []error{errdefs.ErrUnavailable},
		known: map[string]docker.Description{ownID: own, otherID: {ID: otherID, Running: true, UpperDir: "/another"}},
	}
	got, err := c.find(t.Context(), engine)
	want := Self{ID: ownID, project: "demo", Networks: []string{"demo_default"}, Paths: []policy.PathMapping{{Engine: "/v/_data", Local: dir, Volume: true}}}
	if err != nil || !cmp.Equal(got, want, cmp.AllowUnexported(Self{})) {
		t.Errorf("found %+v, %v", got, err)
	}
	if want := []string{otherID, ownID}; !slices.Equal(engine.asked, want) {
		t.Errorf("asked for %q", engine.asked)
	}
	delete(engine.known, ownID)
	if got, err := c.find(t.Context(), engine); got.ID != "" || err != nil {
		t.Errorf("unknown to the engine: %+v, %v", got, err)
	}
	refusal := errors.New("no")
	if got, err := c.find(t.Context(), &describers{fail: []error{refusal}}); got.ID != "" || !errors.Is(err, refusal) {
		t.Errorf("an engine that refuses: %+v, %v", got, err)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if got, err := c.find(ended, &describers{fail: []error{errdefs.ErrUnavailable}}); got.ID != "" || !errdefs.IsUnavailable(err) {
		t.Errorf("an engine that stays away: %+v, %v", got, err)
	}
}

func TestSelfSettle(t *testing.T) {
	t.Parallel()
	s := Self{ID: ownID, Networks: []string{"demo_default"}, project: "demo", Paths: []policy.PathMapping{
		{Engine: "/srv", Local: "/var"}, {Engine: "/volumes/state", Local: "/var/lib/berm"},
	}}
	cfg := config.Default()
	cfg.Sandbox.Network = config.NetworkAuto
	if err := s.Settle(cfg); err != nil || cfg.Engine.AgentDir != "/volumes/state/agents" || cfg.Sandbox.Network != "demo_default" {
		t.Errorf("%v: %q, %q", err, cfg.Engine.AgentDir, cfg.Sandbox.Network)
	}
	cfg = config.Default()
	cfg.Engine.AgentDir = config.AgentNone
	if err := s.Settle(cfg); err != nil || cfg.Engine.AgentDir != config.AgentNone || cfg.Sandbox.Network != "berm-sandbox" {
		t.Errorf("what is said goes first: %v: %q, %q", err, cfg.Engine.AgentDir, cfg.Sandbox.Network)
	}
	for want, s := range map[string]Self{
		"isn't a container of its engine": {},
		"in no network of its own":        {ID: ownID},
		"name one of a, b":                {ID: ownID, Networks: []string{"a", "b"}},
	} {
		cfg := config.Default()
		if err := s.Settle(cfg); err != nil || cfg.Engine.AgentDir != "" {
			t.Errorf("%s: %v, %q", want, err, cfg.Engine.AgentDir)
		}
		cfg.Sandbox.Network = config.NetworkAuto
		if err := s.Settle(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	if got := (Self{}).Labels(); got != nil {
		t.Errorf("labels of none: %v", got)
	}
}

// A process that shares its engine's files is in no container that matters.
func TestFindSelfOutside(t *testing.T) {
	t.Parallel()
	cfg := config.Engine{Kind: "docker", Address: "unix://" + filepath.Join(t.TempDir(), "none")}
	if s, err := FindSelf(t.Context(), cfg, View{Root: true}, 0); s.ID != "" || err != nil {
		t.Errorf("%+v, %v", s, err)
	}
}
