package policy

import (
	"encoding/json"
	"regexp"
	"testing"
	"time"
)

func someSpec() Spec {
	main := Mount{HostPath: "/srv/a", Source: "/data/a", Local: "/l/a", MountPath: "/w", Mode: "rw"}
	extra := []Mount{{HostPath: "/srv/b", Source: "/data/b", MountPath: "/b", Mode: "ro"}, {HostPath: "/srv/c", Source: "/data/c", MountPath: "/c", Mode: "rw"}}
	return Spec{
		Profile: "p", Image: "i", Network: "n", HostPath: "/srv/a", HostPathMode: "rw", MountPath: "/w", ExtraMounts: extra, CPUs: 1, MemoryMB: 2, PidsLimit: 3,
		ReadOnlyRootfs: true, WorkspaceQuotaMB: 4, Env: map[string]string{"A": "b"}, TTL: 1, Mounts: append([]Mount{main}, extra...),
	}
}

func TestDiff(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Spec)
		want   []Difference
	}{
		{"same", func(*Spec) {}, nil},
		{"not compared", func(s *Spec) {
			s.Env, s.TTL, s.IdleTTL, s.MaxLifetime, s.EngineNetwork, s.TmpfsMB, s.CapAdd, s.User, s.RuntimeClass = nil, time.Hour, 1, 2, "x", 5, []string{"x"}, "u", "r"
		}, nil},
		{"other order", func(s *Spec) { s.ExtraMounts = []Mount{s.ExtraMounts[1], s.ExtraMounts[0]} }, nil},
		{"other spelling", func(s *Spec) {
			s.HostPath = "/link/a"
			s.ExtraMounts = []Mount{{HostPath: "/link/b", Source: "/data/b", MountPath: "/b", Mode: "ro"}, s.ExtraMounts[1]}
		}, nil},
		{"profile", func(s *Spec) { s.Profile = "q" }, []Difference{{"profile", "p", "q"}}},
		{"image", func(s *Spec) { s.Image = "j" }, []Difference{{"image", "i", "j"}}},
		{"network", func(s *Spec) { s.Network = "off" }, []Difference{{"network", "n", "off"}}},
		{"host path", func(s *Spec) {
			s.HostPath, s.Mounts = "/srv/z", []Mount{{HostPath: "/srv/z", Source: "/data/z", MountPath: "/w", Mode: "rw"}}
		}, []Difference{{"host_path", "/srv/a", "/srv/z"}}},
		{"link moved", func(s *Spec) {
			s.Mounts = []Mount{{HostPath: "/srv/a", Source: "/data/z", MountPath: "/w", Mode: "rw"}}
		},
			[]Difference{{"host_path", "/data/a", "/data/z"}}},
		{"extra link moved and fewer", func(s *Spec) {
			s.ExtraMounts = []Mount{{HostPath: "/srv/b", Source: "/data/z", MountPath: "/b", Mode: "ro"}}
		}, []Difference{{"extra_mounts", []string{"/srv/b:/b:ro", "/srv/c:/c:rw"}, []string{"/srv/b:/b:ro"}}}},
		{"extra link moved", func(s *Spec) {
			s.ExtraMounts = []Mount{{HostPath: "/srv/b", Source: "/data/z", MountPath: "/b", Mode: "ro"}, s.ExtraMounts[1]}
		}, []Difference{{"extra_mounts", []string{"/data/b:/b:ro", "/data/c:/c:rw"}, []string{"/data/c:/c:rw", "/data/z:/b:ro"}}}},
		{"no host path", func(s *Spec) { s.HostPath, s.Mounts = "", nil }, []Difference{{"host_path", "/srv/a", ""}}},
		{"mode", func(s *Spec) { s.HostPathMode = "ro" }, []Difference{{"host_path_mode", "rw", "ro"}}},
		{"mount path", func(s *Spec) {
			s.MountPath, s.Mounts = "/v", []Mount{{HostPath: "/srv/a", Source: "/data/a", MountPath: "/v", Mode: "rw"}}
		}, []Difference{{"mount_path", "/w", "/v"}}},
		{"extra mode", func(s *Spec) {
			s.ExtraMounts = []Mount{{HostPath: "/srv/b", Source: "/data/b", MountPath: "/b", Mode: "rw"}, s.ExtraMounts[1]}
		}, []Difference{{"extra_mounts", []string{"/srv/b:/b:ro", "/srv/c:/c:rw"}, []string{"/srv/b:/b:rw", "/srv/c:/c:rw"}}}},
		{"fewer extra", func(s *Spec) { s.ExtraMounts = s.ExtraMounts[1:] }, []Difference{{"extra_mounts", []string{"/srv/b:/b:ro", "/srv/c:/c:rw"}, []string{"/srv/c:/c:rw"}}}},
		{"numbers", func(s *Spec) {
			s.CPUs, s.MemoryMB, s.PidsLimit, s.ReadOnlyRootfs, s.WorkspaceQuotaMB = 1.5, 20, 30, false, 40
		}, []Difference{{"cpus", 1.0, 1.5}, {"memory_mb", int64(2), int64(20)}, {"pids_limit", int64(3), int64(30)}, {"read_only_rootfs", true, false}, {"workspace_quota_mb", int64(4), int64(40)}}},
		{"userns", func(s *Spec) { s.Userns = "auto" }, nil},
		{"agent", func(s *Spec) { s.Agent = "off" }, nil},
	}
	digest := regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			a, b := someSpec(), someSpec()
			tt.change(&b)
			got := Diff(a, b)
			same(t, tt.want, got)
			if (a.Digest() == b.Digest()) != (len(got) == 0) || !digest.MatchString(b.Digest()) {
				t.Errorf("digests %s %s", a.Digest(), b.Digest())
			}
		})
	}
}

// A digest outlives the process that made it, in a label.
func TestDigestIsStable(t *testing.T) {
	const want = "sha256:10f193428266e89369bacce9e8679a14cf0088a17f0b4120408faeb63fc8a49e"
	if got := someSpec().Digest(); got != want {
		t.Errorf("the digest of a known spec changed to %s: every sandbox would be taken for another", got)
	}
	data, err := json.Marshal(someSpec())
	must(t, err)
	var again Spec
	must(t, json.Unmarshal(data, &again))
	if again.Digest() != someSpec().Digest() {
		t.Error("the digest doesn't survive JSON")
	}
}

func TestDifferenceString(t *testing.T) {
	if got := (Difference{"cpus", 1.0, 1.5}).String(); got != "cpus: 1, requested 1.5" {
		t.Error(got)
	}
}
