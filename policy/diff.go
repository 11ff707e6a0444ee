package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"slices"
	"strconv"
)

// compared is one field of a spec as Diff sees it: key is what decides, show what
// people get to see.
type compared struct {
	field string
	key   string
	show  any
}

// compared gives the fields that make two specs the same sandbox, in a fixed
// order. Host paths count by what they lead to, not by how they are spelled.
func (s Spec) compared() []compared {
	host := s.HostPath
	for _, m := range s.Mounts {
		if s.HostPath != "" && m.MountPath == s.MountPath {
			host = m.Source
		}
	}
	extra := make([]string, len(s.ExtraMounts))
	show := make([]string, len(s.ExtraMounts))
	for i, m := range s.ExtraMounts {
		extra[i] = strconv.Quote(m.Source) + strconv.Quote(m.MountPath) + m.Mode
		show[i] = m.HostPath + ":" + m.MountPath + ":" + m.Mode
	}
	slices.Sort(extra)
	slices.Sort(show)
	quoted, _ := json.Marshal(slices.Compact(extra)) // strings always marshal
	whole := func(n int64) string { return strconv.FormatInt(n, 10) }
	return []compared{
		{"profile", s.Profile, s.Profile},
		{"image", s.Image, s.Image},
		{"network", s.Network, s.Network},
		{"host_path", host, s.HostPath},
		{"host_path_mode", s.HostPathMode, s.HostPathMode},
		{"mount_path", s.MountPath, s.MountPath},
		{"extra_mounts", string(quoted), show},
		{"cpus", strconv.FormatFloat(s.CPUs, 'g', -1, 64), s.CPUs},
		{"memory_mb", whole(s.MemoryMB), s.MemoryMB},
		{"pids_limit", whole(s.PidsLimit), s.PidsLimit},
		{"read_only_rootfs", strconv.FormatBool(s.ReadOnlyRootfs), s.ReadOnlyRootfs},
		{"workspace_quota_mb", whole(s.WorkspaceQuotaMB), s.WorkspaceQuotaMB},
	}
}

// Diff names every compared field in which a requested spec differs from the
// current one, in the order of Spec's fields. None means the same sandbox.
func Diff(current, requested Spec) []Difference {
	var d []Difference
	want := requested.compared()
	for i, c := range current.compared() {
		if w := want[i]; c.key != w.key {
			d = append(d, Difference{Field: c.field, Current: c.show, Requested: w.show})
		}
	}
	return d
}

// Digest is "sha256:" and the hex digest of the compared fields: equal for two
// specs exactly when Diff finds nothing.
func (s Spec) Digest() string {
	h := sha256.New()
	for _, c := range s.compared() {
		h.Write([]byte(strconv.Quote(c.field) + strconv.Quote(c.key)))
	}
	return "sha256:" + hex.EncodeToString(h.Sum(nil))
}
