package docker

import (
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/runtime"
)

func TestReadonly(t *testing.T) {
	for _, tt := range []struct {
		class, version string
		want           bool
	}{{"", "1", false}, {"runc", "1", false}, {"crun", "1", true}, {"crun", "2", false}} {
		got := readonly(tt.class, runtime.Info{CgroupVersion: tt.version})
		if !slices.Contains(got, "/sys/fs/cgroup") || slices.Contains(got, "/sys/fs/cgroup/memory") != tt.want {
			t.Errorf("class %q, version %s of cgroups: %q", tt.class, tt.version, got)
		}
	}
}

func TestHostConfig(t *testing.T) {
	yes, pids := true, int64(9)
	s := &session{seccomp: "seccomp={}", root: "/engine", info: runtime.Info{CPUs: 2}}
	base := container.HostConfig{
		NetworkMode:   "none",
		IpcMode:       "private",
		CgroupnsMode:  "private",
		CapDrop:       []string{"ALL"},
		SecurityOpt:   []string{"no-new-privileges", "seccomp={}"},
		Init:          &yes,
		RestartPolicy: container.RestartPolicy{Name: "no"},
		ReadonlyPaths: []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger", "/sys/fs/cgroup"},
		ShmSize:       64 << 20,
		LogConfig:     container.LogConfig{Type: "json-file", Config: map[string]string{"max-size": "5242880", "max-file": "2"}},
	}
	full := base
	full.NetworkMode = "net"
	full.CapAdd = []string{"CAP_CHOWN"}
	full.ReadonlyRootfs = true
	full.Runtime = "crun"
	full.LogConfig = container.LogConfig{Type: "json-file", Config: map[string]string{"max-size": "500", "max-file": "2"}}
	full.Resources = container.Resources{Memory: 64, MemorySwap: 64, NanoCPUs: 2e9, PidsLimit: &pids}
	full.Tmpfs = map[string]string{"/tmp": "rw,exec,nosuid,nodev,mode=1777,size=7"}
	full.Mounts = []mount.Mount{
		{Type: "bind", Source: "/s", Target: "/t/", ReadOnly: true, BindOptions: &mount.BindOptions{Propagation: "rprivate", NonRecursive: true}},
		{Type: "bind", Source: "/engine/volumes/v/_data", Target: "/w", BindOptions: &mount.BindOptions{Propagation: "rslave", NonRecursive: true}},
		{Type: "tmpfs", Target: "/v", ReadOnly: true, TmpfsOptions: &mount.TmpfsOptions{SizeBytes: 4096, Mode: 0o555}},
	}
	cases := []struct {
		name    string
		spec    runtime.Spec
		volumes []string
		want    container.HostConfig
	}{
		{"least", runtime.Spec{}, nil, base},
		{"full", runtime.Spec{
			Network: "net", CapAdd: []string{"CAP_CHOWN"}, ReadOnlyRootfs: true, RuntimeClass: "crun", LogMaxBytes: 1000,
			MemoryBytes: 64, CPUs: 99, PidsLimit: 9, Tmpfs: []runtime.Tmpfs{{Target: "/tmp", SizeBytes: 7}},
			Mounts: []runtime.Mount{{Source: "/s", Target: "/t/", ReadOnly: true}, {Source: "/engine/volumes/v/_data", Target: "/w"}},
		}, []string{"/t", "/tmp/", "/v", "/v/"}, full},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			if d := cmp.Diff(&tc.want, hostConfig(tc.spec, s, tc.volumes)); d != "" {
				t.Error(d)
			}
		})
	}
}

func TestValidate(t *testing.T) {
	good := runtime.Spec{Name: "n", Image: "i"}
	cases := []struct {
		name   string
		change func(*runtime.Spec)
		ok     bool
	}{
		{"good", func(*runtime.Spec) {}, true},
		{"network by name", func(s *runtime.Spec) { s.Network = "sandboxes" }, true},
		{"host network", func(s *runtime.Spec) { s.Network = "host" }, false},
		{"another's network", func(s *runtime.Spec) { s.Network = "container:x" }, false},
		{"all capabilities", func(s *runtime.Spec) { s.CapAdd = []string{"all"} }, false},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			spec := good
			tc.change(&spec)
			if err := validate(spec); (err == nil) != tc.ok || err != nil && !errdefs.IsInvalidArgument(err) {
				t.Errorf("error %v", err)
			}
		})
	}
}

// The engine refuses nothing of it, so that Berm must.
func TestUserNSRefused(t *testing.T) {
	r := newRuntime(t, shared.Get(t).Host())
	_, err := r.Create(t.Context(), runtime.Spec{Name: "berm-test-userns", Image: testImage, UserNS: true})
	if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), "userns: auto") || !strings.Contains(err.Error(), "containerd 2") {
		t.Errorf("%v", err)
	}
	if list, err := r.List(t.Context(), nil); err != nil || slices.ContainsFunc(list, func(c runtime.Container) bool { return c.Name == "berm-test-userns" }) {
		t.Errorf("a container was made: %v", err)
	}
}
