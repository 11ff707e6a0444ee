package policy

import (
	"errors"
	"fmt"
	"strings"
	"testing"
)

const envYAML = `
env:
  allow: ["APP_*", TZ, "?"]
  deny: ["*_SECRET", LD_PRELOAD]
  pin: {TZ: UTC, LD_PRELOAD: /ours.so}
  inject: {API_KEY: {env: X}}
`

func envPolicy(t testing.TB) *Policy {
	return mustParse(t, envYAML, Options{Secret: func(SecretSource) (string, error) { return "injected-value", nil }})
}

func TestEnv(t *testing.T) {
	many, big := map[string]string{}, map[string]string{}
	for i := range 513 {
		many[fmt.Sprintf("APP_%d", i)] = ""
	}
	for i := range 5 {
		big[fmt.Sprintf("APP_%d", i)] = strings.Repeat("x", 60<<10)
	}
	tests := []struct {
		name    string
		env     map[string]string
		want    map[string]string // beside the pinned ones
		over    []string          // field rule
		denials []string          // field rule
		invalid bool
	}{
		{"none", nil, nil, nil, nil, false},
		{"allowed", map[string]string{"APP_A": "1", "X": "", "_": "é\n"}, map[string]string{"APP_A": "1", "X": "", "_": "é\n"}, nil, nil, false},
		{"of programs", map[string]string{"APP_a.b-c:d": "=1"}, map[string]string{"APP_a.b-c:d": "=1"}, nil, nil, false},
		{"denied with dots", map[string]string{"APP_a.b-c_SECRET": "canary"}, nil, nil, []string{"env.APP_a.b-c_SECRET env.deny"}, false},
		{"not allowed", map[string]string{"HOME": "/canary"}, nil, nil, []string{"env.HOME env.allow"}, false},
		{"denied", map[string]string{"APP_SECRET": "canary"}, nil, nil, []string{"env.APP_SECRET env.deny"}, false},
		{"reserved", map[string]string{"BERM_EXEC_ID": "canary"}, nil, nil, []string{"env.BERM_EXEC_ID env.reserved"}, false},
		{"pinned", map[string]string{"TZ": "canary", "LD_PRELOAD": "canary"}, nil, []string{"env.LD_PRELOAD env.pin", "env.TZ env.pin"}, nil, false},
		{"pinned, same", map[string]string{"TZ": "UTC"}, nil, nil, nil, false},
		{"injected", map[string]string{"API_KEY": "canary"}, nil, []string{"env.API_KEY env.inject"}, nil, false},
		{"bad names", map[string]string{"": "canary", "1A": "canary", "-A": "canary", "A/B": "canary", "A=B": "canary", "É": "canary", "A\nB": "canary"}, nil, nil,
			[]string{"env. env.syntax", "env.-A env.syntax", "env.1A env.syntax", `env.A\nB env.syntax`, "env.A/B env.syntax", "env.A=B env.syntax", "env.É env.syntax"}, true},
		{"long name", map[string]string{"APP_" + strings.Repeat("A", 252): "canary"}, nil, nil, []string{"env.APP_" + strings.Repeat("A", 252) + " env.syntax"}, true},
		{"nul", map[string]string{"APP_A": "canary\x00"}, nil, nil, []string{"env.APP_A env.syntax"}, true},
		{"long value", map[string]string{"APP_A": strings.Repeat("x", 64<<10+1)}, nil, nil, []string{"env.APP_A env.syntax"}, true},
		{"too many", many, nil, nil, []string{"env env.syntax"}, true},
		{"too much", big, nil, nil, []string{"env env.syntax"}, true},
	}
	p := envPolicy(t)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v := p.Sandbox(Request{Env: tt.env})
			var over, denials []string
			for _, o := range v.Overridden {
				over = append(over, o.Field+" "+o.Rule)
				if o.Requested != hidden || o.Effective != setByUs {
					t.Errorf("a value is told: %+v", o)
				}
			}
			for _, r := range v.Denials {
				denials = append(denials, r.Field+" "+r.Rule)
				if r.Invalid != tt.invalid {
					t.Errorf("%+v", r)
				}
			}
			same(t, tt.over, over)
			same(t, tt.denials, denials)
			if strings.Contains(fmt.Sprintf("%+v %+v", v.Denials, v.Overridden), "canary") {
				t.Error("a value is told")
			}
			env, over2, err := p.ExecEnv(tt.env)
			var denied *DeniedError
			if errors.As(err, &denied) != (tt.denials != nil) || len(over2) != len(tt.over) {
				t.Errorf("ExecEnv judges otherwise: %v %v", over2, err)
			}
			if tt.denials != nil {
				return
			}
			want := map[string]string{"TZ": "UTC", "LD_PRELOAD": "/ours.so"}
			for name, value := range tt.want {
				want[name] = value
			}
			same(t, want, v.Spec.Env)
			same(t, want, env)
		})
	}
}

// FuzzEnv: what is allowed can be given to an engine, is none of ours, and no
// reason tells a value.
func FuzzEnv(f *testing.F) {
	f.Add("APP_A", "x")
	f.Add("BERM_A", "x")
	f.Add("API_KEY", "x")
	f.Add("A=B", "x\x00")
	p := envPolicy(f)
	f.Fuzz(func(t *testing.T, name, value string) {
		const canary = "5f0c1a-canary-"
		env, over, err := p.ExecEnv(map[string]string{name: canary + value})
		if !strings.Contains(name, canary) && strings.Contains(fmt.Sprintf("%v %v", over, err), canary) {
			t.Errorf("the value is told: %v %v", over, err)
		}
		if err != nil {
			return
		}
		if _, ok := env["API_KEY"]; ok || env["TZ"] != "UTC" || env["LD_PRELOAD"] != "/ours.so" {
			t.Errorf("%q overrides the policy: %q", name, env)
		}
		for n, v := range env {
			if strings.ContainsAny(n, "=\x00") || strings.Contains(v, "\x00") || strings.HasPrefix(n, "BERM_") || strings.HasSuffix(n, "_SECRET") {
				t.Errorf("%q is allowed", n)
			}
		}
	})
}
