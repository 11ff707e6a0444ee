// Package buildkit attacks engines' BuildKit, straight and through Berm.
//
// Each attack is first shown to do harm on the engine itself, so that a refusal by Berm says
// something. Bob attacks what is Alice's, the operator's, or the host's.
package buildkit

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/image"
	dockerclient "github.com/docker/docker/client"

	"github.com/bermhq/berm/cmd/e2e/program"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const (
	base    = "busybox:latest"            // everybody may use it
	foreign = "secret.local/operator:1"   // nobody may
	alices  = "team.local/alice:1"        // she has built it
	marker  = "MARK-of-what-is-not-bobs-" // begins each secret
	builds  = "builds"                    // below the engine's cgroup
)

// engines are those of newer.sh, with both of their stores.
var engines = []struct {
	name       string
	programs   []string
	containerd bool
}{
	{"28 overlay2", []string{"dockerd-28", "containerd-2", "runc"}, false},
	{"28 containerd", []string{"dockerd-28", "containerd-2", "runc"}, true},
	{"29 overlay2", []string{"dockerd-29", "containerd-2", "runc"}, false},
	{"29 containerd", []string{"dockerd-29", "containerd-2", "runc"}, true},
}

// rig is an engine, and Berm before it.
type rig struct {
	name   string
	engine *engine.Docker
	docker *dockerclient.Client // of the engine itself
	berm   *program.Child
	web    *web
	root   string
	host   string // the engine's address, for Berm
}

// side is one way to the engine: straight, or through Berm.
type side struct {
	*rig
	bare       bool
	alice, bob *client
	tries      int
}

var must = check.Must // ends a test if a step of its own fails

func newRig(t *testing.T, config map[string]any) *rig {
	ctx := t.Context()
	e, err := engine.StartDocker(context.WithoutCancel(ctx), engine.Options{Config: config})
	if err != nil {
		engine.Lacking(t, "docker", err)
	}
	t.Cleanup(func() {
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	})
	r := &rig{engine: e, root: filepath.Join(e.Dir(), "root"), host: e.Host()}
	must(t, os.MkdirAll(r.root, 0o755))
	r.docker, err = dockerclient.NewClientWithOpts(dockerclient.WithHost(e.Host()), dockerclient.WithAPIVersionNegotiation())
	must(t, err)
	t.Cleanup(func() { _ = r.docker.Close() })
	must(t, e.ImportBusybox(ctx, base))
	must(t, e.ImportBusybox(ctx, foreign, "ENV SECRET="+marker+"operator"))
	must(t, e.ImportBusybox(ctx, "front.local/front:1", `ENTRYPOINT ["sh", "-c", "exit 42"]`))
	r.keep(t, base, foreign)
	r.web = newWeb(t, e.Netns())
	return r
}

// keep gives images a second name, so that they stay when an attack takes the first.
func (r *rig) keep(t *testing.T, names ...string) {
	for _, name := range names {
		must(t, r.docker.ImageTag(t.Context(), name, "keep.local/"+name))
	}
}

// policy is what both tenants may do.
const policy = `
version: 1
images: {allow: ["busybox", "front.local/front"]}
ttl: {default: 1h, max_lifetime: 2h}
profiles:
  default:
    network: "off"
    memory_mb: 512
    max_memory_mb: 1024
    engine_api:
      build: "on"
      build_add_url: ["http://WEB/pub/"]
      buildkit: {enabled: true, provenance: max, cgroup_parent: CGROUP}
      commit: "on"
      tags: ["team.local/*"]
      load: ["team.local/*"]
      max_objects: 0
      max_execs: 0
`

// serve starts Berm with listeners for Alice and Bob.
func (r *rig) serve(t *testing.T) {
	cgroup := filepath.Join("/", filepath.Base(r.engine.Dir()), builds) // goes with the engine
	config := strings.NewReplacer("WEB", r.web.addr, "CGROUP", cgroup).Replace(policy)
	must(t, os.WriteFile(filepath.Join(r.root, "policy.yaml"), []byte(config), 0o600))
	must(t, os.WriteFile(filepath.Join(r.root, "berm.yaml"), []byte(`
http: {listen: "unix://`+r.root+`/berm.sock"}
state_dir: `+r.root+`/state
policy_file: `+r.root+`/policy.yaml
engine: {address: "`+r.host+`", instance: `+owner+`, call_timeout: 2m}
sandbox: {image: "`+base+`", network: berm-attacks}
engine_api:
  audit_log: `+r.root+`/audit.log
  listeners:
    - address: unix://`+r.root+`/alice.sock
      callers: [{name: alice, tenant: alice}]
    - address: unix://`+r.root+`/bob.sock
      callers: [{name: bob, tenant: bob}]
`), 0o600))
	r.start(t)
	t.Cleanup(func() {
		if err := r.berm.Stop(); err != nil || strings.Contains(r.berm.Log.String(), "DATA RACE") {
			t.Errorf("Berm ended with %v:\n%s", err, r.berm.Log)
		}
	})
}

// start starts Berm, for the first time or again, and waits until it answers.
func (r *rig) start(t *testing.T) {
	bin, err := engine.Berm()
	must(t, err)
	tmp := filepath.Join(r.root, "tmp")
	must(t, os.MkdirAll(tmp, 0o700))
	berm := exec.Command(bin, "serve", "--config", filepath.Join(r.root, "berm.yaml"))
	berm.Env = append(os.Environ(), "TMPDIR="+tmp)
	r.berm, err = program.Start(berm, program.NewOutput())
	must(t, err)
	r.ready(t)
}

// ready waits until Berm and the engine behind it answer.
func (r *rig) ready(t *testing.T) {
	if err := r.berm.Ready(t.Context(), func() bool { return engine.Ping(t.Context(), "unix://"+r.root+"/bob.sock") == nil }); err != nil {
		t.Fatalf("Berm: %v:\n%s", err, r.berm.Log)
	}
}

// sides are both ways to the engine.
func (r *rig) sides(t *testing.T) []*side {
	straight := strings.TrimPrefix(r.engine.Host(), "unix://")
	return []*side{
		{rig: r, bare: true, alice: dial(t, straight), bob: dial(t, straight)},
		{rig: r, alice: dial(t, r.root+"/alice.sock"), bob: dial(t, r.root+"/bob.sock")},
	}
}

// word is a new one for each try.
func (s *side) word() string {
	s.tries++
	return fmt.Sprintf("%s%d", map[bool]string{true: "bare", false: "berm"}[s.bare], s.tries)
}

// errHarmless says that an attack was answered, and gave nothing away.
var errHarmless = errors.New("it did no harm")

// refusals are how a clean refusal reads.
var refusals = []string{
	"denied by policy", "is not allowed", "PermissionDenied", "NotFound", "InvalidArgument", "Unimplemented", "ResourceExhausted", "AlreadyExists",
	"FailedPrecondition", "no such ref", "invalid response", "invalid definition op",
	"invalid reference format", "invalid repository name", "parse error", `/f": not found`, // of a Dockerfile
	"registry-1.docker.io", // which isn't there, for an allowed name
	"exporter \"image\" could not be found", "not supported",
}

// clean fails unless an error is a refusal that gives nothing away.
func (s *side) clean(err error) error {
	text := err.Error()
	for _, secret := range []string{s.engine.Dir(), marker, "/var/lib", "s3cret"} {
		if strings.Contains(text, secret) {
			return fmt.Errorf("the error tells %q: %w", secret, err)
		}
	}
	if errors.Is(err, errHarmless) || slices.ContainsFunc(refusals, func(r string) bool { return strings.Contains(text, r) }) {
		return nil
	}
	return fmt.Errorf("no clean refusal: %w", err)
}

// pins are the names of pins that are left.
func (r *rig) pins(ctx context.Context) (left []string) {
	images, err := r.docker.ImageList(ctx, image.ListOptions{All: true})
	if err != nil {
		return []string{err.Error()}
	}
	for _, i := range images {
		for _, name := range append(i.RepoTags, i.RepoDigests...) {
			if strings.HasPrefix(name, "berm.invalid/") {
				left = append(left, name)
			}
		}
	}
	return left
}
