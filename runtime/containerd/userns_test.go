package containerd

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

func TestUserNSFreeRange(t *testing.T) {
	const last = firstRange + rangeCount*rangeSize - 1
	for name, tt := range map[string]struct {
		taken []idRange
		want  uint64
	}{
		"none taken":        {nil, firstRange},
		"below and above":   {[]idRange{{0, firstRange}, {last + 1, 1 << 20}}, firstRange},
		"the first":         {[]idRange{{firstRange, rangeSize}}, firstRange + rangeSize},
		"a gap":             {[]idRange{{firstRange, rangeSize}, {firstRange + 2*rangeSize, rangeSize}}, firstRange + rangeSize},
		"a user at its end": {[]idRange{{firstRange + rangeSize - 1, 1}}, firstRange + rangeSize},
		"across two":        {[]idRange{{firstRange + 7, rangeSize}}, firstRange + 2*rangeSize},
		"all but the last":  {[]idRange{{0, last - rangeSize + 1}}, last - rangeSize + 1},
	} {
		if got, err := freeRange(tt.taken); err != nil || got != tt.want {
			t.Errorf("%s: %d, %v; want %d", name, got, err, tt.want)
		}
	}
	if _, err := freeRange([]idRange{{0, last}}); !errdefs.IsResourceExhausted(err) || !strings.Contains(err.Error(), "userns: auto") {
		t.Errorf("without a free one: %v", err)
	}
	if last > 1<<31-1 {
		t.Errorf("the last ID is %d", last)
	}
}

func TestUserNSAccountRanges(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	got, err := accountRanges(filepath.Join(dir, "none"), file("passwd", "root:x:0:0::/:/bin/sh\n+::::::\n\n#\nbig:x:4294967294:5::/:\n"), file("subuid", "joe:100000:65536\n"))
	if want := []idRange{{0, 1}, {4294967294, 1}, {100000, 65536}}; err != nil || !slices.Equal(got, want) {
		t.Errorf("%v, %v; want %v", got, err, want)
	}
	for _, name := range []string{"subgid", "passwd"} { // a count that can't be read, a directory
		path := file(name, "joe:1:many\n")
		if name == "passwd" {
			path = dir
		}
		if got, err := accountRanges(path); err == nil {
			t.Errorf("%s: %v", path, got)
		}
	}
}

// claimer is a Runtime of which only the places are used.
func claimer(t *testing.T, dir string) *Runtime {
	t.Helper()
	return &Runtime{root: root(dir)}
}

func (r *Runtime) claim(t *testing.T, claims string) (*place, int) {
	t.Helper()
	p, err := r.root.makePlace(t.Context(), newID())
	must(t, err)
	first, err := r.root.claimRange(t.Context(), p, claims)
	must(t, err)
	return p, first
}

// Instances of one host never choose a range twice, whatever they do at once, and whichever
// of them, or the host, was killed and started again.
func TestUserNSClaimRange(t *testing.T) {
	claims := filepath.Join(t.TempDir(), "claims")
	roots := []string{t.TempDir(), t.TempDir()}
	var mu sync.Mutex
	var wg sync.WaitGroup
	places := map[int]*place{}
	for i := range 40 {
		r := claimer(t, roots[i%2])
		wg.Go(func() {
			p, first := r.claim(t, claims)
			mu.Lock()
			defer mu.Unlock()
			if places[first] != nil || first < firstRange || first%rangeSize != 0 {
				t.Errorf("%d is taken, or is none", first)
			}
			places[first] = p
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	// The host is started again: /run is empty.
	must(t, os.RemoveAll(claims))
	for range 3 {
		if p, first := claimer(t, roots[0]).claim(t, claims); places[first] != nil && strings.HasPrefix(places[first].dir, roots[0]) {
			t.Errorf("%s got %d, which is that of %s", p.dir, first, places[first].dir)
		}
	}
}

func TestUserNSClaimAgain(t *testing.T) {
	claims, r := filepath.Join(t.TempDir(), "claims"), claimer(t, t.TempDir())
	p, first := r.claim(t, claims)
	// Being removed: all is gone but the directory's lock.
	must(t, os.Remove(filepath.Join(claims, strconv.Itoa(first))))
	if _, second := r.claim(t, claims); second == first {
		t.Error("the range of a container that is being removed was given away")
	}
	must(t, p.remove())
	other := claimer(t, t.TempDir())
	if _, third := other.claim(t, claims); third != first {
		t.Errorf("%d, while %d is free", third, first)
	}
	// A container whose creator was killed before it had a range, and one whose file is broken.
	q, _ := r.claim(t, claims)
	must(t, os.WriteFile(q.file(rangeFile), nil, 0o600))
	r.claim(t, claims)
	must(t, os.WriteFile(q.file(rangeFile), []byte("x"), 0o600))
	if got, err := r.root.claimRange(t.Context(), p, claims); err == nil {
		t.Errorf("%d, without knowing what is taken", got)
	}
}

func TestUserNSSpec(t *testing.T) {
	c := testCreation(runtime.Spec{
		Name: "n", Command: []string{"sh"}, Mounts: []runtime.Mount{{Source: "/a", Target: "/b"}}, Tmpfs: []runtime.Tmpfs{{Target: "/t", SizeBytes: 1}},
	}, ocispec.ImageConfig{})
	without, err := c.ociSpec("")
	must(t, err)
	c.ids = firstRange
	with, err := c.ociSpec("")
	must(t, err)
	want := []specs.LinuxIDMapping{{HostID: firstRange, Size: rangeSize}}
	if d := cmp.Diff([][]specs.LinuxIDMapping{want, want}, [][]specs.LinuxIDMapping{with.Linux.UIDMappings, with.Linux.GIDMappings}); d != "" {
		t.Error(d)
	}
	if !slices.Contains(with.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace, Path: "/place/userns"}) {
		t.Errorf("namespaces: %v", with.Linux.Namespaces)
	}
	for _, m := range with.Mounts {
		if mapped := cmp.Equal(m.UIDMappings, want) && cmp.Equal(m.GIDMappings, want); mapped != (m.Type == "bind") {
			t.Errorf("%s at %s: mapped %t", m.Type, m.Destination, mapped)
		}
	}
	if without.Linux.UIDMappings != nil || slices.ContainsFunc(without.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == specs.UserNamespace }) ||
		slices.ContainsFunc(without.Mounts, func(m specs.Mount) bool { return m.UIDMappings != nil }) {
		t.Errorf("without it: %+v", without)
	}
}

// What can't be had is refused by its name, with what would do, and nothing is made.
func TestUserNSRefused(t *testing.T) {
	c := shared.Get(t)
	r := newRuntime(t, c)
	survey, err := r.Survey(t.Context())
	must(t, err)
	for want, spec := range map[string]runtime.Spec{
		"must be runc": {RuntimeClass: "crun"},
		"group 65536":  {User: "65536:0"},
		"group 65537":  {User: "0:65537"},
		"containerd 2": {},
	} {
		if spec.RuntimeClass == "" && spec.User == "" && survey.NoUserNS == "" {
			continue
		}
		spec.Name, spec.Image, spec.UserNS = "berm-test-refused", testImage, true
		_, err := r.Create(t.Context(), spec)
		if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "userns: auto") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	wantNothingLeft(t, c)
}

// What a create made that was killed halfway is owned by the range's first user, and is swept.
func TestUserNSSwept(t *testing.T) {
	c := shared.Get(t)
	r := newRuntime(t, c)
	made := &creation{r: r, id: newID(), spec: runtime.Spec{Network: "berm-test"}}
	var err error
	if made.agent, err = r.agentPath(); err != nil {
		t.Fatal(err)
	}
	if made.place, err = r.root.makePlace(t.Context(), made.id); err != nil {
		t.Fatal(err)
	}
	netns, err := made.makeUserNS(t.Context())
	must(t, err)
	claim := filepath.Join(rangeClaims, strconv.Itoa(made.ids))
	if target, err := os.Readlink(claim); err != nil || target != made.place.file(rangeFile) {
		t.Errorf("%s leads to %s, %v", claim, target, err)
	}
	var stat unix.Statfs_t
	if err := unix.Statfs(netns, &stat); err != nil || stat.Type != unix.NSFS_MAGIC {
		t.Errorf("%s is no namespace, %v", netns, err)
	}
	ns, err := os.Open(made.place.file(usernsFile))
	must(t, err)
	var owner uint32
	const getOwner = 0xb704                                                                                                                       // NS_GET_OWNER_UID
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, ns.Fd(), getOwner, uintptr(unsafe.Pointer(&owner))); errno != 0 || owner != uint32(made.ids) { //nolint:gosec // it has 31 bits
		t.Errorf("the owner is %d, %v; want %d", owner, errno, made.ids)
	}
	_ = ns.Close()
	made.place.release() // as at this process's end
	wantNothingLeft(t, c)
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(table), made.id) {
		t.Errorf("a namespace is still mounted, %v", err)
	}
	if _, err := os.Lstat(claim); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s: %v", claim, err)
	}
}

// buildExhaust builds a program that takes inotify instances until it gets no more, says how
// many and why in a file, and keeps them.
func buildExhaust(t *testing.T, program string) {
	t.Helper()
	source := filepath.Join(t.TempDir(), "main.go")
	if err := os.WriteFile(source, []byte(`package main

import (
	"fmt"
	"os"
	"syscall"
)

func main() {
	for n := 0; ; n++ {
		if _, err := syscall.InotifyInit1(0); err != nil {
			os.WriteFile(os.Args[1]+".new", []byte(fmt.Sprint(n, " ", err)), 0o644)
			os.Rename(os.Args[1]+".new", os.Args[1])
			syscall.Pause()
		}
	}
}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", program, source)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
}

// TestUserNSAttack has one sandbox take all that the kernel gives a user, and looks at what
// that means to the host and to another sandbox.
func TestUserNSAttack(t *testing.T) {
	c := shared.Get(t)
	r := newRuntime(t, c)
	engine.RequireUserNS(t, r)
	must(t, r.EnsureNetwork(t.Context(), runtime.Network{Name: "berm-userns", Isolated: true}))
	t.Cleanup(func() { _ = r.RemoveNetwork(context.WithoutCancel(t.Context()), "berm-userns") })
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o777); err != nil { //nolint:gosec // two users write to it
		t.Fatal(err)
	}
	buildExhaust(t, filepath.Join(dir, "exhaust"))
	var boxes []runtime.Container
	var ranges []int
	for i, spec := range []runtime.Spec{{User: "1000:1000", Network: "berm-userns"}, {User: "0:0"}} {
		spec.Name, spec.Image, spec.UserNS = fmt.Sprintf("berm-test-userns-%d", i), testImage, true
		spec.Command, spec.Mounts = []string{"sh", "-c", "echo main >/dev/stdout; exec sleep 100000"}, []runtime.Mount{{Source: dir, Target: "/work"}}
		box, err := r.Create(t.Context(), spec)
		must(t, err)
		t.Cleanup(func() {
			must(t, r.Remove(context.WithoutCancel(t.Context()), box.ID))
		})
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/uid_map", box.Pid))
		must(t, err)
		var first, host, count int
		if _, err := fmt.Sscan(string(b), &first, &host, &count); err != nil || first != 0 || host < firstRange || count != rangeSize || slices.Contains(ranges, host) {
			t.Fatalf("its IDs: %q, %v; others: %v", b, err, ranges)
		}
		boxes, ranges = append(boxes, box), append(ranges, host)
	}
	run := func(box int, script string) string {
		t.Helper()
		out, said, code, err := runtimetest.Output(t.Context(), r, boxes[box].ID, "", "/bin/sh", "-c", script)
		if err != nil || code != 0 {
			t.Errorf("%s: %v, exit code %d, %q", script, err, code, out+said)
		}
		return out
	}
	for i, want := range []uint32{1000, 0} {
		name := filepath.Join(dir, strconv.Itoa(i))
		if got := run(i, fmt.Sprintf("touch /work/%d; stat -c %%u:%%g /work/%d", i, i)); got != fmt.Sprintf("%d:%d\n", want, want) {
			t.Errorf("inside its file is %s's", got)
		}
		info, err := os.Stat(name)
		must(t, err)
		if st := info.Sys().(*syscall.Stat_t); st.Uid != want || st.Gid != want {
			t.Errorf("on the host its file is %d:%d's", st.Uid, st.Gid)
		}
	}
	// Programs open their output anew, and there is no other user than those of the range.
	for i, box := range boxes {
		if got := run(i, ": </dev/stdin; echo x >/dev/stdout"); got != "x\n" {
			t.Errorf("a command's output: %q", got)
		}
		var log strings.Builder
		for log.Len() == 0 {
			must(t, r.Logs(t.Context(), box.ID, runtime.LogOptions{}, &log, &log))
		}
		if log.String() != "main\n" {
			t.Errorf("the log: %q", log.String())
		}
		_, err := r.Start(t.Context(), box.ID, runtime.Program{Command: []string{"/bin/true"}, User: "70000"})
		if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "userns: auto") {
			t.Errorf("a command of user 70000: %v", err)
		}
	}
	for _, limit := range usernsLimits {
		name, value, _ := strings.Cut(limit, "=")
		if got := run(0, "cat /proc/sys/user/"+name); got != value+"\n" {
			t.Errorf("%s is %s", name, got)
		}
	}
	open := func() {
		t.Helper()
		fd, err := unix.InotifyInit1(unix.IN_CLOEXEC)
		if err != nil {
			t.Fatalf("the host's root: %v", err)
		}
		t.Cleanup(func() { _ = unix.Close(fd) })
	}
	open() // so that a count of what root has can't stay below the limit
	attack, err := r.Start(t.Context(), boxes[0].ID, runtime.Program{Command: []string{"/work/exhaust", "/work/full"}})
	must(t, err)
	defer func() { _ = attack.Close() }()
	for !strings.HasSuffix(run(0, "cat /work/full 2>&1 || true"), " too many open files") {
		if t.Failed() {
			t.FailNow()
		}
	}
	open()
	if got := run(1, "/work/exhaust /work/other & until cat /work/other 2>/dev/null; do :; done; kill $!"); got != "128 too many open files" {
		t.Errorf("another sandbox got %s", got)
	}
	must(t, r.Pause(t.Context(), boxes[0].ID))
	must(t, r.Resume(t.Context(), boxes[0].ID))
	_ = attack.Close()
	for _, box := range boxes {
		must(t, r.Remove(t.Context(), box.ID))
	}
	wantNothingLeft(t, c)
	links, err := os.ReadDir(rangeClaims)
	must(t, err)
	for _, link := range links {
		if target, _ := os.Readlink(filepath.Join(rangeClaims, link.Name())); strings.HasPrefix(target, c.Root()) {
			t.Errorf("left: %s", target)
		}
	}
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(table), filepath.Join(c.Root(), "containers")) {
		t.Errorf("a namespace is still mounted, %v", err)
	}
}
