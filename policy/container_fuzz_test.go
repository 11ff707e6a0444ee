package policy

import (
	"encoding/json"
	"strings"
	"testing"
)

// FuzzContainer holds that whatever is asked for, what is allowed stays within the
// profile, and what is refused says why.
func FuzzContainer(f *testing.F) {
	refuse := containerPolicies(f)
	h := fakeHost{"/srv": "/srv", "/srv/a": "/srv/a", "/srv/link": "/srv/a", "/srv/out": "/etc", "/srv/default": "/srv/default"}
	clamp := mustParse(f, containerPolicy+"resources: {over_max: clamp}\n", Options{Resolve: h.resolve, Secret: func(SecretSource) (string, error) { return "hunter2", nil }})
	profiles := []string{"", "open", "tight", "numbers", "fixed", "readonly", "offline_readonly"}
	for _, tests := range [][]bad{privilegeTests(), mountTests(), networkTests(), hostTests(), resourceTests()} {
		for i, tt := range tests {
			tt.req.Image = "busybox"
			if data, err := json.Marshal(tt.req); err == nil { // not of NaN
				f.Add(uint8(i), data, []byte(`{"Networks":[{"Mode":"named","Own":true,"ID":"a","Internal":true}]}`))
				f.Add(uint8(i+128), []byte("{}"), data)
			}
		}
	}
	f.Fuzz(func(t *testing.T, n uint8, first, second []byte) {
		var req ContainerRequest
		if json.Unmarshal(first, &req) != nil || json.Unmarshal(second, &req) != nil {
			return
		}
		p := refuse
		if n >= 128 {
			p = clamp
		}
		req.Profile = profiles[int(n)%len(profiles)]
		v := p.Container(req)
		for _, r := range v.Denials {
			if r.Rule == "" || r.Message == "" || r.Allowed == "" || len(r.Value) > 8*maxShown {
				t.Errorf("%+v", r)
			}
		}
		if out, err := json.Marshal(v); err != nil || strings.Contains(string(out), "hunter2") {
			t.Errorf("%v %s", err, out)
		}
		if v.Allowed() {
			checkSpec(t, p, req.Profile, v.Spec)
		}
		if u := p.ContainerUpdate(req.Profile, req); u.Allowed() {
			pr, _ := p.Profile(req.Profile)
			if u.Spec.CPUs > pr.MaxCPUs || u.Spec.CPUs < 0 || u.Spec.MemoryBytes > pr.MaxMemoryMB<<20 || u.Spec.MemoryBytes < 0 || u.Spec.SwapBytes != u.Spec.MemoryBytes ||
				u.Spec.PidsLimit > pr.MaxPidsLimit || u.Spec.PidsLimit < 0 || req.PidsLimit != nil && u.Spec.PidsLimit == 0 {
				t.Errorf("%+v", u.Spec)
			}
		}
	})
}
