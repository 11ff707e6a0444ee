package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"reflect"
	"slices"
	"strconv"
	"strings"
)

// compared is one field of a spec for Diff, which compares key. People see show, or actual if show
// is the same on both sides.
type compared struct {
	field, key   string
	show, actual any
}

// compared returns the fields in which two specs of the same sandbox agree, in a fixed order. Host
// paths count as resolved, not as spelled.
func (s Spec) compared() []compared {
	host := s.HostPath
	for _, m := range s.Mounts {
		if s.HostPath != "" && m.MountPath == s.MountPath {
			host = m.Source
		}
	}
	n := len(s.ExtraMounts)
	key, show, actual := make([]string, n), make([]string, n), make([]string, n)
	for i, m := range s.ExtraMounts {
		key[i] = strconv.Quote(m.Source) + strconv.Quote(m.MountPath) + m.Mode
		show[i] = m.HostPath + ":" + m.MountPath + ":" + m.Mode
		actual[i] = m.Source + ":" + m.MountPath + ":" + m.Mode
	}
	slices.Sort(key)
	slices.Sort(show)
	slices.Sort(actual)
	text := func(field, v string) compared { return compared{field, v, v, v} }
	whole := func(field string, v int64) compared { return compared{field, strconv.FormatInt(v, 10), v, v} }
	return []compared{
		text("profile", s.Profile),
		text("image", s.Image),
		text("network", s.Network),
		{"host_path", host, s.HostPath, host},
		text("host_path_mode", s.HostPathMode),
		text("mount_path", s.MountPath),
		{"extra_mounts", strings.Join(slices.Compact(key), " "), show, actual},
		{"cpus", strconv.FormatFloat(s.CPUs, 'g', -1, 64), s.CPUs, s.CPUs},
		whole("memory_mb", s.MemoryMB),
		whole("pids_limit", s.PidsLimit),
		{"read_only_rootfs", strconv.FormatBool(s.ReadOnlyRootfs), s.ReadOnlyRootfs, s.ReadOnlyRootfs},
		whole("workspace_quota_mb", s.WorkspaceQuotaMB),
	}
}

// Diff returns every compared field in which a requested spec differs from the current one, in the
// order of Spec's fields. No difference means the same sandbox.
func Diff(current, requested Spec) []Difference {
	var d []Difference
	want := requested.compared()
	for i, c := range current.compared() {
		w := want[i]
		if c.key == w.key {
			continue
		}
		if reflect.DeepEqual(c.show, w.show) { // a path that leads elsewhere now
			c.show, w.show = c.actual, w.actual
		}
		d = append(d, Difference{Field: c.field, Current: c.show, Requested: w.show})
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
