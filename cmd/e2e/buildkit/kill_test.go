package buildkit

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// killPoints are moments of a build. A relay holds what says that the build is there. WORD in
// a text or a step is the build's.
var killPoints = []struct {
	name string
	up   bool // the text is Berm's, else the engine's
	text string
	nth  int
	step string // of RUN
}{
	{name: "first source denied", up: true, text: "busybox:latest/json"},
	{name: "first source judged", up: true, text: "/tag?repo=berm.invalid"},
	{name: "between jobs with a pin", up: true, text: "/tag?repo=berm.invalid", nth: 2},
	{name: "upload", up: true, text: "WORD-payload"},
	{name: "step", text: "SAID-WORD", step: said},
	{name: "export", text: "exporting layers", step: "dd if=/dev/urandom of=/WORD bs=1M count=64"},
	{name: "exported, without a name", up: true, text: "/tag?repo=team.local"},
}

const (
	killed = 30 * time.Second // how long what a kill leaves may stay
	said   = "echo said-WORD | tr adis ADIS; sleep 1000"
)

// kills is a rig whose parts are killed.
type kills struct {
	*rig
	relay  *relay
	client string // the client's directory
	images map[string]bool
	files  map[string]bool
	made   int // builds
}

// TestSoakBuildKitKill kills Berm, the engine and the client at each moment of a build, and
// looks at what is left.
func TestSoakBuildKitKill(t *testing.T) {
	engine.Require(t, "docker")
	for _, e := range engines {
		t.Run(e.name, func(t *testing.T) {
			engine.RequireNewer(t, append([]string{"docker-cli", "buildx"}, e.programs...))
			t.Setenv("PATH", engine.NewerPath(e.programs))
			k := newKills(t, map[string]any{"features": map[string]bool{"containerd-snapshotter": e.containerd}})
			k.plant(t)
			for _, victim := range []string{"berm", "engine", "client"} {
				for i, p := range killPoints {
					t.Run(victim+"/"+p.name, func(t *testing.T) { k.kill(t, victim, i) })
				}
			}
			t.Run("engine/step without Berm", k.bare)
			k.clear(t)
		})
	}
}

func newKills(t *testing.T, config map[string]any) *kills {
	k := &kills{rig: newRig(t, config), client: t.TempDir(), images: map[string]bool{}}
	k.host = "unix://" + k.root + "/relay.sock"
	k.relay = newRelay(t, k.root+"/relay.sock", strings.TrimPrefix(k.engine.Host(), "unix://"))
	plugins := fmt.Sprintf(`{"cliPluginsExtraDirs": [%q]}`, filepath.Join(engine.NewerDir(), "buildx", "bin"))
	must(t, os.WriteFile(filepath.Join(k.client, "config.json"), []byte(plugins), 0o600))
	k.serve(t)
	must(t, k.next(t))
	for _, i := range k.list(t) {
		k.images[i.ID] = true
	}
	k.files = k.below(t)
	return k
}

// build starts a build in a process group of its own.
func (k *kills) build(t *testing.T, socket, step string, args ...string) (cmd *exec.Cmd, word string, ended chan error) {
	k.made++
	word = fmt.Sprintf("WORD%dX", k.made)
	dir := t.TempDir()
	step = strings.ReplaceAll(step, "WORD", word)
	must(t, os.WriteFile(filepath.Join(dir, "Dockerfile"), []byte("FROM "+base+"\nCOPY --from=front.local/front:1 /bin/busybox /other\nCOPY payload /payload\nRUN "+step+"\n"), 0o600))
	payload := append([]byte(word+"-payload"), make([]byte, 4<<20)...)
	must(t, os.WriteFile(filepath.Join(dir, "payload"), payload, 0o600))
	args = append([]string{"build", "--progress", "plain", "-t", "team.local/kill:" + strings.ToLower(word)}, append(args, dir)...)
	cmd = exec.Command(filepath.Join(engine.NewerDir(), "docker-cli", "bin", "docker"), args...)
	cmd.Env = append(os.Environ(), "DOCKER_HOST=unix://"+filepath.Join(k.root, socket), "DOCKER_CONTEXT=", "DOCKER_CONFIG="+k.client, "HOME="+k.client)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	must(t, cmd.Start())
	ended = make(chan error, 1)
	go func() {
		err := cmd.Wait()
		if err != nil {
			err = fmt.Errorf("%w:\n%s", err, &out)
		}
		ended <- err
	}()
	return cmd, word, ended
}

// next builds to the end.
func (k *kills) next(t *testing.T) error {
	_, _, ended := k.build(t, "bob.sock", "true")
	return <-ended
}

func (k *kills) kill(t *testing.T, victim string, point int) {
	p := killPoints[point]
	word := fmt.Sprintf("WORD%dX", k.made+1) // of the build to come
	held := k.relay.set(p.up, strings.ReplaceAll(p.text, "WORD", word), max(1, p.nth))
	cmd, _, ended := k.build(t, "bob.sock", cmp.Or(p.step, "true"))
	select {
	case <-held.hit:
	case err := <-ended:
		t.Fatalf("the build doesn't come there: %v", err)
	}
	switch victim {
	case "berm":
		k.berm.Kill()
	case "engine":
		k.engine.Kill()
	case "client":
		must(t, syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL))
	}
	close(held.open)
	if err := <-ended; err == nil {
		t.Errorf("the client says that the build ended well")
	}
	switch victim {
	case "berm":
		k.start(t)
	case "engine":
		must(t, k.engine.Start(t.Context()))
		if p.step == said {
			k.endSteps(t) // see bare
		}
	}
	k.wantNothing(t, word)
	if err := k.next(t); err != nil {
		t.Errorf("the next build: %v", err)
	}
}

// bare shows that an engine that was killed leaves the processes of steps by itself. Nobody
// but the engine knows what they are.
func (k *kills) bare(t *testing.T) {
	held := k.relay.set(false, fmt.Sprintf("SAID-WORD%dX", k.made+1), 1)
	parent := filepath.Join("/", filepath.Base(k.engine.Dir()), builds)
	_, word, ended := k.build(t, "relay.sock", said, "--cgroup-parent", parent)
	select {
	case <-held.hit:
	case err := <-ended:
		t.Fatalf("the build doesn't come there: %v", err)
	}
	k.engine.Kill()
	close(held.open)
	if err := <-ended; err == nil {
		t.Error("the client says that the build ended well")
	}
	must(t, k.engine.Start(t.Context()))
	if k.endSteps(t) == 0 {
		t.Error("the engine ends them by now, and so must it behind Berm")
	}
	k.wantNothing(t, word)
}

// endSteps kills the processes in steps' cgroups, and returns how many there were.
func (k *kills) endSteps(t *testing.T) (n int) {
	for _, text := range k.steps(t, "pids") {
		for pid := range strings.FieldsSeq(text) {
			id, err := strconv.Atoi(pid)
			must(t, errors.Join(err, syscall.Kill(id, syscall.SIGKILL)))
			n++
		}
	}
	return n
}

// steps are the processes in steps' cgroups, by the files that tell them. A killed engine
// leaves empty cgroups.
func (k *kills) steps(t *testing.T, controller string) map[string]string {
	files, err := filepath.Glob(filepath.Join("/sys/fs/cgroup", controller, filepath.Base(k.engine.Dir()), builds, "buildkit/*/cgroup.procs"))
	must(t, err)
	found := map[string]string{}
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil && len(text) > 0 {
			found[file] = string(text)
		}
	}
	return found
}

// wantNothing fails if a kill has left something.
func (k *kills) wantNothing(t *testing.T, word string) {
	begun := time.Now()
	left := k.left(t, word)
	for tick := time.NewTicker(50 * time.Millisecond); len(left) > 0 && time.Since(begun) < killed; left = k.left(t, word) {
		<-tick.C
	}
	for _, l := range left {
		t.Errorf("left: %s", l)
	}
	t.Logf("looked for %v", time.Since(begun).Round(time.Millisecond))
}

// left lists what is there, and should not be.
func (k *kills) left(t *testing.T, word string) (left []string) {
	for _, name := range k.pins(t.Context()) {
		left = append(left, "pin "+name)
	}
	for _, i := range k.list(t) {
		if _, err := time.Parse(time.RFC3339Nano, i.Labels[lifecycle.LabelExpiresAt]); !k.images[i.ID] && (err != nil || i.Labels[lifecycle.LabelOwner] == "") {
			left = append(left, fmt.Sprintf("image %s %q without owner and expiry: %v", i.ID, i.RepoTags, i.Labels))
		}
	}
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	must(t, err)
	for _, file := range commands {
		if text, err := os.ReadFile(file); err == nil && bytes.Contains(text, []byte(word)) { // else it has ended
			left = append(left, fmt.Sprintf("process %s: %q", file, text))
		}
	}
	containers, err := k.docker.ContainerList(t.Context(), container.ListOptions{All: true})
	must(t, err)
	for _, c := range containers {
		left = append(left, fmt.Sprintf("container %q", c.Names))
	}
	for file, pids := range k.steps(t, "*") {
		left = append(left, fmt.Sprintf("processes %q of %s", pids, file))
	}
	k.relay.mu.Lock()
	if n := k.relay.sessions; n > 0 {
		left = append(left, fmt.Sprintf("%d sessions", n))
	}
	k.relay.mu.Unlock()
	for file := range k.below(t) {
		if !k.files[file] {
			left = append(left, "file "+file)
		}
	}
	return left
}

func (k *kills) list(t *testing.T) []image.Summary {
	images, err := k.docker.ImageList(t.Context(), image.ListOptions{All: true})
	must(t, err)
	return images
}

// below are Berm's files.
func (k *kills) below(t *testing.T) map[string]bool {
	files := map[string]bool{}
	must(t, filepath.WalkDir(k.root, func(path string, _ fs.DirEntry, err error) error {
		files[path] = true
		if os.IsNotExist(err) {
			return nil
		}
		return err
	}))
	return files
}

// plant shows that each thing that may be left is found.
func (k *kills) plant(t *testing.T) {
	const word = "planted"
	k.wantNothing(t, word)
	ctx := t.Context()
	cgroup := filepath.Join("/sys/fs/cgroup/pids", filepath.Base(k.engine.Dir()), builds, "buildkit", word)
	file := filepath.Join(k.root, "state", word)
	named, nameless := exec.Command("sleep", "1000"), exec.Command("sleep", "1000")
	named.Args[0] = word
	end := func(cmd *exec.Cmd) error {
		err := cmd.Process.Kill()
		_ = cmd.Wait()
		return err
	}
	sessions, closeSessions := context.WithCancel(ctx)
	var id string
	for _, p := range []struct {
		what     string
		put, out func() error
	}{
		{"pin ", func() error { return k.docker.ImageTag(ctx, base, "berm.invalid/p/planted:1") }, func() error { return k.untag("berm.invalid/p/planted:1") }},
		{"image ", func() error { return k.engine.ImportBusybox(ctx, "planted:1", "ENV WORD="+word) }, func() error { return k.untag("planted:1") }},
		{"process ", named.Start, func() error { return end(named) }},
		{"processes ", func() error {
			if err := errors.Join(os.MkdirAll(cgroup, 0o755), nameless.Start()); err != nil {
				return err
			}
			return os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), fmt.Append(nil, nameless.Process.Pid), 0)
		}, func() error { return errors.Join(end(nameless), os.Remove(cgroup)) }},
		{"container ", func() error {
			c, err := k.docker.ContainerCreate(ctx, &container.Config{Image: base}, nil, nil, nil, "")
			id = c.ID
			return err
		}, func() error { return k.docker.ContainerRemove(ctx, id, container.RemoveOptions{}) }},
		{"1 sessions", func() error {
			_, err := dial(t, k.root+"/bob.sock").openSession(sessions, build{})
			return err
		}, func() error { closeSessions(); return nil }},
		{"file ", func() error { return os.WriteFile(file, nil, 0o600) }, func() error { return os.Remove(file) }},
	} {
		must(t, p.put())
		found := func() bool {
			return slices.ContainsFunc(k.left(t, word), func(l string) bool { return strings.HasPrefix(l, p.what) })
		}
		for begun := time.Now(); !found(); {
			if time.Since(begun) > killed {
				t.Fatalf("a planted %q isn't found", p.what)
			}
		}
		must(t, p.out())
		k.wantNothing(t, word)
	}
}

func (k *kills) untag(name string) error {
	_, err := k.docker.ImageRemove(context.Background(), name, image.RemoveOptions{})
	return err
}

// clear has Bob remove all that was built, of which he is the owner.
func (k *kills) clear(t *testing.T) {
	k.ready(t)
	bob, removed := dial(t, k.root+"/bob.sock"), 0
	for _, i := range k.list(t) {
		if k.images[i.ID] {
			continue
		}
		if _, err := bob.rest(t.Context(), http.MethodDelete, "/images/"+i.ID+"?force=1", nil); err != nil {
			t.Errorf("%s %q: %v", i.ID, i.RepoTags, err)
		}
		removed++
	}
	t.Logf("%d images were built", removed)
}
