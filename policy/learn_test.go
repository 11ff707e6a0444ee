package policy

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

func learnHost() Options {
	h := fakeHost{"/srv": "/srv", "/srv/a": "/srv/a", "/srv/link": "/srv/a", "/srv/out": "/etc", "/srv/cut…": "/srv/cut…", "/srv/default": "/srv/default", "/home": "/home", "/data/x": "/data/x"}
	return Options{Resolve: h.resolve, MakeDir: func(string, string, *Owner) error { return nil }, Secret: func(SecretSource) (string, error) { return "hunter2", nil }}
}

// relearn judges, learns, takes over what was learnt, and judges again, until nothing
// more is learnt.
func relearn(t *testing.T, base string, judge func(*Policy) []Reason, profile string) (denials []Reason, learnt string) {
	t.Helper()
	policy := map[string]any{}
	must(t, yaml.Unmarshal([]byte(base), policy))
	for range 5 {
		data, err := yaml.Marshal(policy)
		must(t, err)
		p, err := Parse(data, learnHost())
		if err != nil {
			t.Fatalf("%v\n%s", err, data)
		}
		denials = judge(p)
		out, err := p.Learn([]LearnRecord{{Profile: profile, Reasons: denials}})
		must(t, err)
		learnt = string(out)
		more := map[string]any{}
		if err := yaml.Unmarshal(out, more); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		if len(more) == 1 { // the version
			return denials, learnt
		}
		takeOver(policy, more)
	}
	t.Errorf("there is always more to learn:\n%s", learnt)
	return denials, learnt
}

func takeOver(policy, more map[string]any) {
	for key, v := range more {
		old, ok := policy[key].(map[string]any)
		if sub, isMap := v.(map[string]any); ok && isMap {
			takeOver(old, sub)
			continue
		}
		policy[key] = v
	}
}

func TestLearn(t *testing.T) {
	container := func(r ContainerRequest) func(*Policy) []Reason {
		return func(p *Policy) []Reason {
			if r.Image == "" {
				r.Image = "python:3.11-slim"
			}
			return p.Container(r).Denials
		}
	}
	tests := []struct {
		name  string
		judge func(*Policy) []Reason
	}{
		{"image", container(ContainerRequest{Image: "ghcr.io/a/b:1"})},
		{"image by digest", container(ContainerRequest{Image: "debian@" + sum})},
		{"sandbox", func(p *Policy) []Reason {
			return p.Sandbox(Request{Image: ptr("debian"), CPUs: ptr(3.5), MemoryMB: ptr(int64(9000)), PidsLimit: ptr(int64(1000)), HostPath: ptr("/data/x")}).Denials
		}},
		{"bind", container(oneMount(ContainerMount{Type: "bind", Source: "/srv/a/", Target: "/x"}, ContainerMount{Type: "bind", Source: "/srv", Target: "/y"}))},
		{"limits", container(ContainerRequest{CPUs: 3, MemoryBytes: 3<<30 + 1, PidsLimit: ptr(int64(600)), ShmBytes: 65 << 20})},
		{"files", container(ulimit("nofile", 2<<20, 2<<20))},
		{"tmpfs", container(oneMount(ContainerMount{Type: "tmpfs", Target: "/x", SizeBytes: 100<<20 + 1}))},
		{"log", container(logs("", "max-size", "20m", "max-file", "3"))},
		{"capability", container(ContainerRequest{CapAdd: []string{"net_raw", "CAP_SYS_PTRACE"}})},
		{"port", container(onePort("", 80, 80, "tcp"))},
		{"port anywhere", container(onePort("10.0.0.1", 8080, 80, "tcp"))},
		{"own network", container(oneNet(ContainerNetwork{Mode: NetNamed, Own: true, ID: "a"}))},
		{"dns", container(ContainerRequest{DNS: []string{"1.1.1.1"}, ExtraHosts: []string{"a:1.1.1.1"}})},
		{"sysctl", container(ContainerRequest{Sysctls: map[string]string{"net.core.somaxconn": "1"}})},
		{"runtime", container(ContainerRequest{Runtime: "runsc"})},
		{"build", func(p *Policy) []Reason { return reasons(p.Operation("", OpBuild)) }},
		{"tag", func(p *Policy) []Reason { _, err := p.TagRef("", "acme/x:1"); return reasons(err) }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := mustParse(t, "", learnHost())
			if len(tt.judge(p)) == 0 {
				t.Fatal("allowed from the start")
			}
			if denials, learnt := relearn(t, "version: 1", tt.judge, ""); len(denials) > 0 {
				t.Errorf("%+v\n%s", denials, learnt)
			}
		})
	}
}

// What only leads to what is never mounted isn't learnt, as the file couldn't be read.
func TestLearnNoRefusedRoot(t *testing.T) {
	judge := func(p *Policy) []Reason { return p.Sandbox(Request{HostPath: ptr("/srv/out")}).Denials }
	denials, learnt := relearn(t, "version: 1", judge, "")
	if len(denials) != 1 || !strings.Contains(learnt, "# - mounts.disabled: ") {
		t.Errorf("%+v\n%s", denials, learnt)
	}
}

func reasons(err error) []Reason {
	var denied *DeniedError
	if !errors.As(err, &denied) {
		return nil
	}
	return denied.Reasons
}

// Whatever was refused, what is learnt is a policy, gives nothing that no policy allows,
// and says of what is left why.
func TestLearnNeverBreaks(t *testing.T) {
	for _, tests := range [][]bad{privilegeTests(), mountTests(), networkTests(), hostTests(), resourceTests()} {
		for _, tt := range tests {
			if tt.req.Profile = tt.profile; tt.req.Image == "" {
				tt.req.Image = "busybox"
			}
			denials, learnt := relearn(t, "version: 1\n"+containerPolicy, func(p *Policy) []Reason { return p.Container(tt.req).Denials }, tt.profile)
			if len(denials) > 0 && !strings.Contains(learnt, "# - ") {
				t.Errorf("%s: %+v\n%s", tt.name, denials, learnt)
			}
			for _, r := range denials {
				switch tt.rule {
				case rulePrivileged, ruleDevice, ruleField, ruleSecurityOpt, ruleNamespace, ruleNetworkHost, ruleAlwaysRefused:
					if r.Rule != tt.rule {
						t.Errorf("%s: %+v", tt.name, r)
					}
				}
			}
		}
	}
}

func TestLearnPrints(t *testing.T) {
	p := mustParse(t, containerPolicy, learnHost())
	tight := p.Container(ContainerRequest{Profile: "tight", Image: "evil\n- x: *\u202e", CapAdd: []string{"CHOWN", "ALL"}, Privileged: true, Env: map[string]string{"B": "secret"}, Restart: "always",
		Mounts: []ContainerMount{{Field: "M", Type: "bind", Source: "/etc", Target: "/x"}, {Field: "M", Type: "bind", Source: "/data", Target: "/y"}}})
	open := p.Container(ContainerRequest{Profile: "open", Image: "debian", MemoryBytes: 2 << 30,
		Mounts: []ContainerMount{{Field: "M", Type: "bind", Source: "/data/x", Target: "/x"}, {Field: "M", Type: "bind", Source: "/data", Target: "/y"}}})
	out, err := p.Learn([]LearnRecord{{"tight", tight.Denials}, {"open", open.Denials}, {"", nil}, {"gone", []Reason{{Rule: ruleProfileUnknown, Message: "there is none\nmounts: {}"}}}, {"", []Reason{{Rule: ruleAllowedRoots, Value: "/srv/cut…", Message: "cut"}}}})
	must(t, err)
	want := learnHead + fmt.Sprintf(`env:
  allow:
    - A*
    - TZ
    - KEY
    - B
images:
  allow:
    - busybox
    - acme/tool
    - ghcr.io/*
    - debian:latest
mounts:
  allowed_roots:
    - /srv
    - /data
profiles:
  open:
    extends: network_basic
    max_memory_mb: 2048
  tight:
    engine_api:
      capabilities:
        - CAP_CHOWN
      restart:
        - always
    extends: default
    host_path_mode: rw
version: 1
# Not to be had by this file alone:
# - containers.capabilities: capability "ALL" is refused, whatever the policy; allowed is none
# - containers.privileged: privileged containers are refused; allowed are single capabilities of none
# - images.syntax: image "%s" is not an image reference
# - mounts.allowed_roots: cut
# - profiles.unknown: there is none?mounts: {}
`, `evil\\n- x: *\\u202e`)
	same(t, want, string(out))
}
