package body

import (
	"testing"

	"github.com/docker/docker/api/types/container"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/policy"
)

func TestNested(t *testing.T) {
	granted := func(binds []string, volumes ...string) Granted {
		var g Granted
		for _, b := range binds {
			g.Binds = append(g.Binds, policy.Mount{MountPath: b, File: b == "/app/f", Socket: b == "/app/s"})
		}
		for _, v := range volumes {
			g.Volumes = append(g.Volumes, policy.ContainerMount{Target: v})
		}
		return g
	}
	for name, tt := range map[string]struct {
		in   Granted
		want []Nested
	}{
		"none":               {granted([]string{"/app", "/application"}, "/other"), nil},
		"volume":             {granted([]string{"/app"}, "/app/node_modules"), []Nested{{0, "/app/node_modules", "node_modules", false}}},
		"the innermost bind": {granted([]string{"/app", "/app/a"}, "/app/a/b/c"), []Nested{{0, "/app/a", "a", false}, {1, "/app/a/b/c", "b/c", false}}},
		"a volume between":   {granted([]string{"/app"}, "/app/v", "/app/v/w"), []Nested{{0, "/app/v", "v", false}}},
		"file":               {granted([]string{"/app", "/app/f"}), []Nested{{0, "/app/f", "f", true}}},
		"socket":             {granted([]string{"/app", "/app/s"}), []Nested{{0, "/app/s", "s", true}}},
		"out of order":       {granted([]string{"/app/a", "/app"}, "/app/a/b"), []Nested{{1, "/app/a", "a", false}, {0, "/app/a/b", "b", false}}},
		"below a volume":     {granted([]string{"/v/a"}, "/v"), nil},
		"the engine's":       {granted([]string{"/etc"}), []Nested{{0, "/etc/hostname", "", true}, {0, "/etc/hosts", "", true}, {0, "/etc/resolv.conf", "", true}}},
	} {
		if d := cmp.Diff(tt.want, tt.in.Nested()); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
}

// TestFrom has nothing become writable, or a file take a directory's place, by volumes from.
func TestFrom(t *testing.T) {
	of := policy.ContainerSpec{
		Binds: []policy.Mount{
			{HostPath: "/srv/rw", Source: "/really", MountPath: "/rw", Mode: "rw"}, {HostPath: "/srv/ro", MountPath: "/ro", Mode: "ro"},
			{HostPath: "/srv/f", MountPath: "/f", Mode: "ro", File: true}, {HostPath: "/taken", MountPath: "/own", Mode: "rw"},
		},
		Volumes: []policy.ContainerMount{
			{Type: "volume", Source: "v", Own: true, Target: "/v", ReadOnly: true}, {Type: "volume", Target: "/anonymous"}, {Type: "volume", Source: "gone", Target: "/gone"},
		},
		Tmpfs: []policy.ContainerMount{{Type: "tmpfs", Target: "/tmpfs"}},
	}
	mounted := []container.MountPoint{
		{Type: "volume", Name: "v", Destination: "/v"}, {Type: "volume", Name: "abc", Destination: "/anonymous"}, {Type: "bind", Name: "x", Destination: "/gone"},
	}
	own := Mounted{ContainerMount: policy.ContainerMount{Type: "volume", Source: "mine", Target: "/own"}}
	for _, readOnly := range []bool{false, true} {
		want := []Mounted{
			own,
			{ContainerMount: policy.ContainerMount{Type: "bind", Source: "/srv/rw", Target: "/rw", ReadOnly: readOnly, OnlyDir: true}},
			{ContainerMount: policy.ContainerMount{Type: "bind", Source: "/srv/ro", Target: "/ro", ReadOnly: true, OnlyDir: true}},
			{ContainerMount: policy.ContainerMount{Type: "bind", Source: "/srv/f", Target: "/f", ReadOnly: true}},
			{ContainerMount: policy.ContainerMount{Type: "volume", Source: "v", Target: "/v", ReadOnly: true}, noCopy: true},
			{ContainerMount: policy.ContainerMount{Type: "volume", Source: "abc", Target: "/anonymous", ReadOnly: readOnly}, noCopy: true},
		}
		for i := range want[1:] {
			want[i+1].Field = "F"
		}
		if d := cmp.Diff(want, From([]Mounted{own}, of, mounted, readOnly, "F"), cmp.AllowUnexported(Mounted{})); d != "" {
			t.Errorf("read-only %v: %s", readOnly, d)
		}
	}
}
