package containerd

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/google/go-cmp/cmp"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/containerd/image"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

func testCreation(spec runtime.Spec, config ocispec.ImageConfig) *creation {
	r := &Runtime{opts: Options{Namespace: "test", CgroupParent: "/parent"}}
	r.host = runtime.Info{Architecture: "amd64", CPUs: 2}
	return &creation{
		r: r, spec: spec, id: "0123456789abcdef", image: &image.Image{Config: config},
		agent: "/agent", place: &place{dir: "/place"}, class: runtimeClasses[""],
	}
}

func TestValidate(t *testing.T) {
	good := runtime.Spec{Name: "some_name-1.x", Image: "image", Command: []string{"true"}}
	for name, tt := range map[string]struct {
		change func(*runtime.Spec)
		ok     bool
	}{
		"good":                  {func(*runtime.Spec) {}, true},
		"name like an option":   {func(s *runtime.Spec) { s.Name = "-a" }, false},
		"mount over the root":   {func(s *runtime.Spec) { s.Mounts = []runtime.Mount{{Source: "/tmp", Target: "/."}} }, false},
		"tmpfs over the root":   {func(s *runtime.Spec) { s.Tmpfs = []runtime.Tmpfs{{Target: "/", SizeBytes: 1}} }, false},
		"capability":            {func(s *runtime.Spec) { s.CapAdd = []string{"CAP_KILL"} }, true},
		"capability misspelt":   {func(s *runtime.Spec) { s.CapAdd = []string{"KILL"} }, false},
		"label of our own":      {func(s *runtime.Spec) { s.Labels = map[string]string{labelName: "x"} }, false},
		"empty label":           {func(s *runtime.Spec) { s.Labels = map[string]string{"a": ""} }, true},
		"host name with a line": {func(s *runtime.Spec) { s.Hostname = "a\n1.2.3.4 b" }, false},
		"host name":             {func(s *runtime.Spec) { s.Hostname = "a-1.b" }, true},
		"label of odd bytes":    {func(s *runtime.Spec) { s.Labels = map[string]string{"a": "\xff"} }, false},
		"env without a name":    {func(s *runtime.Spec) { s.Env = []string{"=x"} }, false},
		"env without a value":   {func(s *runtime.Spec) { s.Env = []string{"A"} }, false},
		"env with a zero byte":  {func(s *runtime.Spec) { s.Env = []string{"A=\x00"} }, false},
		"long host name":        {func(s *runtime.Spec) { s.Hostname = string(make([]byte, 65)) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			spec := good
			tt.change(&spec)
			if err := validate(spec); (err == nil) != tt.ok || err != nil && !errdefs.IsInvalidArgument(err) {
				t.Errorf("error %v", err)
			}
		})
	}
}

func TestOCISpec(t *testing.T) {
	c := testCreation(runtime.Spec{
		Command: []string{"run", "it"}, Env: []string{"B=spec", "C="}, CPUs: 64, MemoryBytes: 1 << 20, PidsLimit: 7,
		CapAdd: []string{"CAP_KILL"}, ReadOnlyRootfs: true,
	}, ocispec.ImageConfig{Env: []string{"A=image", "B=image", "PATH=/bin"}, WorkingDir: "/work", Volumes: map[string]struct{}{"/data": {}}})
	c.account = image.Account{UID: 1, GID: 2, Groups: []uint32{3}}
	s, err := c.ociSpec("/netns")
	must(t, err)
	p := s.Process
	if diff := cmp.Diff([]string{runtime.AgentProgram, "init", "/work", "--", "run", "it"}, p.Args); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"PATH=/bin", "HOSTNAME=0123456789ab", "A=image", "B=spec", "C="}, p.Env); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(specs.User{UID: 1, GID: 2, AdditionalGids: []uint32{3}}, p.User); diff != "" {
		t.Error(diff)
	}
	if !p.NoNewPrivileges || p.Cwd != "/" || p.Terminal {
		t.Errorf("process: %+v", p)
	}
	caps := []string{"CAP_KILL"}
	if diff := cmp.Diff(&specs.LinuxCapabilities{Bounding: caps, Permitted: caps, Effective: caps}, p.Capabilities); diff != "" {
		t.Error(diff)
	}
	if *s.Linux.Resources.CPU.Quota != 2*cpuPeriod || *s.Linux.Resources.Memory.Limit != 1<<20 || *s.Linux.Resources.Pids.Limit != 7 {
		t.Errorf("limits: %+v", s.Linux.Resources)
	}
	if !s.Root.Readonly || s.Linux.CgroupsPath != "/parent/0123456789abcdef" || s.Version != ociVersion {
		t.Errorf("%+v", s)
	}
	kinds := map[specs.LinuxNamespaceType]string{}
	for _, n := range s.Linux.Namespaces {
		kinds[n.Type] = n.Path
	}
	if diff := cmp.Diff(map[specs.LinuxNamespaceType]string{"pid": "", "ipc": "", "uts": "", "mount": "", "cgroup": "", "network": "/netns"}, kinds); diff != "" {
		t.Error(diff)
	}
	if got := s.Linux.Seccomp; got.DefaultAction != specs.ActErrno || !slices.Equal(got.Architectures, []specs.Arch{specs.ArchX86_64}) {
		t.Errorf("seccomp: %s, %s", got.DefaultAction, got.Architectures)
	}
	for _, path := range []string{"/proc/kcore", "/proc/keys", "/sys/firmware", "/proc/timer_list"} {
		if !slices.Contains(s.Linux.MaskedPaths, path) {
			t.Errorf("%s isn't masked", path)
		}
	}
	for _, m := range s.Mounts {
		if m.Destination == "/data" && (m.Type != "tmpfs" || !slices.Contains(m.Options, "ro")) {
			t.Errorf("the image's volume: %+v", m)
		}
		if m.Type == "devpts" && !slices.Contains(m.Options, "max=64") {
			t.Errorf("terminals without a bound: %+v", m)
		}
		if m.Destination == "/run" || m.Destination != "/dev" && !slices.Contains(m.Options, "nosuid") {
			t.Errorf("mount %+v", m)
		}
	}
}

func TestMountOrder(t *testing.T) {
	c := testCreation(runtime.Spec{
		Mounts: []runtime.Mount{{Source: "/s", Target: "/a/b/c", ReadOnly: true}, {Source: "/h", Target: "/etc/hosts"}},
		Tmpfs:  []runtime.Tmpfs{{Target: "/a", SizeBytes: 1}, {Target: "/a/b/", SizeBytes: 2}},
		Agent:  &runtime.Agent{Dir: "/agents"}, ReadOnlyRootfs: true,
	}, ocispec.ImageConfig{Volumes: map[string]struct{}{"/v": {}, "/a/": {}, "/run": {}, runtime.AgentDir: {}, runtime.AgentDir + "/deeper": {}}})
	var got []string
	for _, m := range c.mounts([]specs.Mount{{Destination: "/proc"}, {Destination: "/run"}}) {
		got = append(got, m.Destination+" "+m.Source)
	}
	want := []string{
		"/proc ", "/sys/fs/cgroup cgroup", runtime.AgentProgram + " /agent", "/a tmpfs", "/run tmpfs", "/v tmpfs", "/a/b/ tmpfs",
		"/etc/hostname /place/hostname", "/etc/hosts /h", "/etc/resolv.conf /place/resolv.conf", runtime.AgentDir + " /agents", "/a/b/c /s",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestImageEnv(t *testing.T) {
	c := testCreation(runtime.Spec{Command: []string{"x"}}, ocispec.ImageConfig{Env: []string{"A"}})
	if _, err := c.ociSpec(""); !errdefs.IsInvalidArgument(err) {
		t.Errorf("an image with half a variable: %v", err)
	}
}

func TestNoCommand(t *testing.T) {
	if _, err := testCreation(runtime.Spec{}, ocispec.ImageConfig{}).ociSpec(""); !errdefs.IsInvalidArgument(err) {
		t.Errorf("without any command: %v", err)
	}
}

func TestClassOf(t *testing.T) {
	for name, want := range map[string]string{"": runcShim, "runc": runcShim, "crun": runcShim, "runsc": "io.containerd.runsc.v1", "kata": "io.containerd.kata.v2"} {
		if c, err := classOf(name); err != nil || c.name != want {
			t.Errorf("%q: %+v, %v", name, c, err)
		}
	}
	for _, name := range []string{"io.containerd.runc.v2", "/usr/bin/env", "RUNC"} {
		if _, err := classOf(name); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%q: %v", name, err)
		}
	}
}

func TestClassOptions(t *testing.T) {
	binary := func(class string) string {
		c, err := classOf(class)
		must(t, err)
		out, err := c.options(0)
		must(t, err)
		if out == nil {
			return "none"
		}
		v, err := typeurl.UnmarshalAny(out)
		must(t, err)
		return v.(*options.Options).BinaryName
	}
	for class, want := range map[string]string{"": "", "runc": "", "crun": "crun", "runsc": "none", "kata": "none"} {
		if got := binary(class); got != want {
			t.Errorf("class %q: %q, want %q", class, got, want)
		}
	}
}

func TestClassHierarchies(t *testing.T) {
	root := t.TempDir()
	put := func(name string) string {
		file := filepath.Join(root, name, "cgroup.procs")
		must(t, errors.Join(os.MkdirAll(filepath.Dir(file), 0o700), os.WriteFile(file, nil, 0o600)))
		return filepath.Dir(file)
	}
	want := []string{put("cpu,cpuacct"), put("memory")}
	must(t, os.Symlink("cpu,cpuacct", filepath.Join(root, "cpu")))
	crun, runc := runtimeClasses["crun"], runtimeClasses["runc"]
	if got := crun.hierarchies(root); !slices.Equal(got, want) {
		t.Errorf("version 1: %q, want %q", got, want)
	}
	if got := runc.hierarchies(root); len(got) > 0 {
		t.Errorf("runc: %q", got)
	}
	put("") // these are other cgroups of the one hierarchy now
	if got := crun.hierarchies(root); len(got) > 0 {
		t.Errorf("version 2: %q", got)
	}
}

func TestClassMounts(t *testing.T) {
	source := t.TempDir()
	below := filepath.Join(source, "mounted here")
	must(t, os.Mkdir(below, 0o700))
	mounts := []runtime.Mount{{Source: source, Target: "/mnt"}}
	crun, runc := runtimeClasses["crun"], runtimeClasses["runc"]
	if err := crun.mounts(mounts, false); err != nil {
		t.Errorf("crun, with nothing below: %v", err)
	}
	if err := unix.Mount("none", below, "tmpfs", 0, "size=4096"); err != nil {
		engine.Require(t, "containerd") // which needs root
		t.Fatal(err)
	}
	t.Cleanup(func() {
		must(t, unix.Unmount(below, unix.MNT_DETACH))
	})
	if err := crun.mounts(mounts, false); !errdefs.IsInvalidArgument(err) {
		t.Errorf("crun, with a mount below: %v", err)
	}
	if err := runc.mounts(mounts, false); err != nil {
		t.Errorf("runc, with a mount below: %v", err)
	}
	if err := runc.mounts(mounts, true); !errdefs.IsInvalidArgument(err) {
		t.Errorf("runc in a user namespace, with a mount below: %v", err)
	}
	if err := crun.mounts([]runtime.Mount{{Source: below, Target: "/mnt"}}, false); err != nil {
		t.Errorf("crun, with the mount itself: %v", err)
	}
}

func TestHostResolvConf(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		must(t, os.WriteFile(path, []byte(text), 0o600))
		return path
	}
	stub := file("stub", "nameserver 127.0.0.53\nsearch stub\n")
	full := file("real", "# comment\nnameserver  192.0.2.1\nnameserver ::1\nnameserver 2001:db8::1\nsearch a.test  b.test\nsortlist 1.2.3.4\noptions ndots:2\nnameserver\n")
	want := "nameserver 192.0.2.1\nsearch a.test b.test\noptions ndots:2\n"
	for name, tt := range map[string]struct {
		files []string
		want  string
	}{
		"usable":         {[]string{full}, want},
		"stub resolver":  {[]string{stub, full}, want},
		"missing first":  {[]string{filepath.Join(dir, "missing"), full}, want},
		"none is usable": {[]string{stub}, ""},
		"none at all":    {nil, ""},
	} {
		if got, err := hostResolvConf(tt.files...); err != nil || got != tt.want {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

// The kernel refuses a quota below a millisecond.
func TestLeastQuota(t *testing.T) {
	c := &creation{r: &Runtime{host: runtime.Info{CPUs: 2}}}
	for cpus, want := range map[float64]int64{0.001: 1000, 0.5: 50_000, 64: 200_000} {
		c.spec.CPUs = cpus
		var res specs.LinuxResources
		if c.limit(&res); res.CPU == nil || *res.CPU.Quota != want {
			t.Errorf("%v CPUs: %+v, want a quota of %d", cpus, res.CPU, want)
		}
	}
}
