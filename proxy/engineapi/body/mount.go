package body

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
)

// Mounted is a mount that a container asks for, with the options that affect only the container.
type Mounted struct {
	policy.ContainerMount
	noCopy bool              // of a volume: the image's files aren't copied into it
	flags  string            // of a tmpfs: "noexec,mode=755"
	labels map[string]string // of a volume that is created for the mount
	Label  bool              // it asks for an SELinux label, which isn't passed on
}

// Mounts returns the mounts of the body's Binds, Mounts, Tmpfs and Volumes. A bind of the path socket
// stands for one of the engine's socket; an empty socket matches none.
func (b *Create) Mounts(socket string) ([]Mounted, error) {
	h := b.HostConfig
	var list []Mounted
	for i, raw := range h.Binds {
		m, err := parseBind(raw)
		if err != nil {
			return nil, err
		}
		m.Field = fmt.Sprintf("HostConfig.Binds[%d]", i)
		list = append(list, m)
	}
	for i, m := range h.Mounts {
		got, err := parseMount(&m)
		if err != nil {
			return nil, err
		}
		got.Field = fmt.Sprintf("HostConfig.Mounts[%d]", i)
		list = append(list, got)
	}
	for _, target := range slices.Sorted(maps.Keys(h.Tmpfs)) {
		m := Mounted{ContainerMount: policy.ContainerMount{Type: "tmpfs", Target: path.Clean(target), Field: fmt.Sprintf("HostConfig.Tmpfs[%q]", Shorten(target))}}
		if err := m.tmpfsFlags(strings.Split(h.Tmpfs[target], ",")); err != nil {
			return nil, err
		}
		list = append(list, m)
	}
	list = Anonymous(list, b.Volumes, "Volumes")
	for i, m := range list {
		list[i].Socket = m.Type == "bind" && m.Source == socket
		if strings.Contains(m.Target, ":") {
			return nil, proxy.Malformed(fmt.Sprintf("%s: the mount path %q has a colon", m.Field, Shorten(m.Target)))
		}
	}
	return list, nil
}

// Anonymous adds an anonymous volume at each place where nothing is mounted yet.
func Anonymous(list []Mounted, places map[string]struct{}, field string) []Mounted {
	for _, place := range slices.Sorted(maps.Keys(places)) {
		target := path.Clean(place)
		if !slices.ContainsFunc(list, func(m Mounted) bool { return m.Target == target }) {
			list = append(list, Mounted{ContainerMount: policy.ContainerMount{Type: "volume", Own: true, Target: target, Field: fmt.Sprintf("%s[%q]", field, Shorten(place))}})
		}
	}
	return list
}

// VolumeLabels returns the labels that the mounts ask for, for a volume that is created for them.
func (p *Judged) VolumeLabels(name string) map[string]string {
	for _, m := range p.Mounts {
		if m.Type == "volume" && m.Source == name && len(m.labels) > 0 {
			return m.labels
		}
	}
	return nil
}

var (
	propagations = []string{"private", "rprivate", "shared", "rshared", "slave", "rslave"}
	consistency  = []string{"", "default", "consistent", "cached", "delegated"}
)

// parseBind parses "source:target:options" as the engine does. Source and options may be missing.
func parseBind(raw string) (Mounted, error) {
	bad := proxy.Malformed("invalid volume specification: '" + Shorten(raw) + "'")
	parts := strings.Split(raw, ":")
	if len(parts) > 3 || slices.Contains(parts, "") {
		return Mounted{}, bad
	}
	m := Mounted{ContainerMount: policy.ContainerMount{Type: "volume", Own: true}}
	if len(parts) == 1 {
		m.Target = path.Clean(parts[0])
		return m, nil
	}
	m.Source, m.Target = parts[0], path.Clean(parts[1])
	if path.IsAbs(m.Source) {
		m.Type, m.Source, m.Create = "bind", path.Clean(m.Source), true
	}
	if len(parts) == 2 {
		return m, nil
	}
	seen := map[string]bool{}
	for _, option := range strings.Split(parts[2], ",") {
		kind := option
		switch {
		case option == "ro" || option == "rw":
			kind, m.ReadOnly = "mode", option == "ro"
		case option == "z" || option == "Z":
			kind, m.Label = "label", true
		case option == "nocopy" && m.Type == "volume":
			m.noCopy = true
		case slices.Contains(propagations, option):
			kind = "propagation"
			m.propagation(option)
		case option != "" && slices.Contains(consistency, option):
			kind = "consistency"
		default:
			return Mounted{}, bad
		}
		if seen[kind] {
			return Mounted{}, bad
		}
		seen[kind] = true
	}
	return m, nil
}

// propagation refuses any but a private propagation, and that for binds only.
func (m *Mounted) propagation(p string) {
	if p != "" && p != "rprivate" && p != "private" || p != "" && m.Type != "bind" {
		m.Options = append(m.Options, "propagation="+p)
	}
}

// parseMount translates an entry of HostConfig.Mounts.
func parseMount(b *mount.Mount) (Mounted, error) {
	m := Mounted{ContainerMount: policy.ContainerMount{Type: string(b.Type), Source: b.Source, Target: path.Clean(b.Target), ReadOnly: b.ReadOnly}}
	option := func(given bool, name, value string) {
		if given {
			m.Options = append(m.Options, name+"="+value)
		}
	}
	if !slices.Contains(consistency, string(b.Consistency)) {
		return m, proxy.Malformed("a mount's consistency is none that there is")
	}
	option(b.ImageOptions != nil, "ImageOptions", "…")
	option(b.ClusterOptions != nil, "ClusterOptions", "…")
	if o := b.BindOptions; o != nil {
		m.propagation(string(o.Propagation)) // mounts below the source are left out anyway
		m.Create = o.CreateMountpoint
		option(b.Type != "bind" && *o != mount.BindOptions{}, "BindOptions", "…")
	}
	if o := b.VolumeOptions; o != nil {
		m.noCopy, m.labels = o.NoCopy, o.Labels
		option(b.Type != "volume" && (o.NoCopy || len(o.Labels) > 0), "VolumeOptions", "…")
		option(o.Subpath != "", "Subpath", o.Subpath)
		if d := o.DriverConfig; d != nil {
			option(d.Name != "" && d.Name != "local", "DriverConfig.Name", d.Name)
			option(len(d.Options) > 0, "DriverConfig.Options", strings.Join(slices.Sorted(maps.Keys(d.Options)), " "))
		}
	}
	if o := b.TmpfsOptions; o != nil {
		option(b.Type != "tmpfs", "TmpfsOptions", "…")
		m.SizeBytes = o.SizeBytes
		flags := []string{}
		for _, words := range o.Options {
			flags = append(flags, strings.Join(words, "="))
		}
		if o.Mode != 0 {
			flags = append(flags, "mode="+strconv.FormatUint(uint64(o.Mode), 8))
		}
		if err := m.tmpfsFlags(flags); err != nil {
			return m, err
		}
	}
	m.Own = m.Type == "volume"
	if m.Type == "bind" {
		m.Source = path.Clean(m.Source)
	}
	if m.Type == "tmpfs" && m.Source != "" || m.Type == "bind" && b.Source == "" {
		return m, proxy.Malformed("invalid mount config for type \"" + m.Type + "\": its source is missing, or must be")
	}
	return m, nil
}

// tmpfsFlags parses a tmpfs's flags. It keeps those that affect only its own files.
func (m *Mounted) tmpfsFlags(flags []string) error {
	var kept []string
	for _, flag := range flags {
		name, value, given := strings.Cut(flag, "=")
		n, err := strconv.ParseUint(value, 10, 31)
		mode, modeErr := strconv.ParseUint(value, 8, 16)
		switch {
		case flag == "", flag == "rw", flag == "nosuid", flag == "nodev":
		case flag == "ro":
			m.ReadOnly = true
		case flag == "exec", flag == "noexec", flag == "noatime", flag == "nodiratime", flag == "relatime":
			kept = append(kept, flag)
		case name == "size" && given:
			if m.SizeBytes, err = tmpfsSize(value); err != nil {
				return err
			}
		case name == "mode" && modeErr == nil && mode <= 0o1777:
			kept = append(kept, "mode="+strconv.FormatUint(mode, 8))
		case (name == "uid" || name == "gid") && err == nil:
			kept = append(kept, name+"="+strconv.FormatUint(n, 10))
		default:
			m.Options = append(m.Options, Shorten(flag))
		}
	}
	m.flags = strings.Join(kept, ",")
	return nil
}

// tmpfsSize parses a tmpfs's size in bytes as the kernel does. It refuses a share of the memory.
func tmpfsSize(s string) (int64, error) {
	number, shift := s, map[string]int{"k": 10, "m": 20, "g": 30}[strings.ToLower(s[max(len(s)-1, 0):])]
	if shift != 0 {
		number = s[:len(s)-1]
	}
	n, err := strconv.ParseInt(number, 10, 64)
	if err != nil || n <= 0 || n > 1<<62>>shift {
		return 0, proxy.Malformed(fmt.Sprintf("the size %q of a tmpfs is not a number of bytes", Shorten(s)))
	}
	return n << shift, nil
}

// VolumesFrom splits an entry of HostConfig.VolumesFrom into a container and its mode.
func VolumesFrom(entry string) (ref string, readOnly bool, err error) {
	ref, mode, given := strings.Cut(entry, ":")
	if given && mode != "ro" && mode != "rw" {
		return "", false, proxy.Malformed(fmt.Sprintf("invalid mode %q in volumes from a container: it must be ro or rw", Shorten(mode)))
	}
	return ref, mode == "ro", nil
}

// From adds the mounts of another container to list, as if they were asked for, where nothing is mounted
// yet. Mounted are that container's mounts at the engine, by which an anonymous volume has a name. From
// leaves out a tmpfs, since containers can't share its files.
func From(list []Mounted, of policy.ContainerSpec, mounted []container.MountPoint, readOnly bool, field string) []Mounted {
	add := func(m policy.ContainerMount, noCopy bool) {
		m.Field, m.ReadOnly = field, m.ReadOnly || readOnly
		if !slices.ContainsFunc(list, func(o Mounted) bool { return o.Target == m.Target }) {
			list = append(list, Mounted{ContainerMount: m, noCopy: noCopy})
		}
	}
	for _, b := range of.Binds {
		add(policy.ContainerMount{Type: "bind", Source: b.HostPath, Target: b.MountPath, ReadOnly: b.Mode == "ro", OnlyDir: !b.File, Socket: b.Socket}, false)
	}
	for _, v := range of.Volumes {
		for _, m := range mounted {
			if m.Type == mount.TypeVolume && m.Destination == v.Target && m.Name != "" {
				add(policy.ContainerMount{Type: "volume", Source: m.Name, Target: v.Target, ReadOnly: v.ReadOnly}, true)
			}
		}
	}
	return list
}
