package body

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/policy"
)

func TestNested(t *testing.T) {
	granted := func(binds []string, volumes ...string) Granted {
		var g Granted
		for _, b := range binds {
			g.Binds = append(g.Binds, policy.Mount{MountPath: b, File: b == "/app/f"})
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
		"below a volume":     {granted([]string{"/v/a"}, "/v"), nil},
		"the engine's":       {granted([]string{"/etc"}), []Nested{{0, "/etc/hostname", "", true}, {0, "/etc/hosts", "", true}, {0, "/etc/resolv.conf", "", true}}},
	} {
		if d := cmp.Diff(tt.want, tt.in.Nested()); d != "" {
			t.Errorf("%s: %s", name, d)
		}
	}
}
