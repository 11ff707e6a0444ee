package body

import (
	"fmt"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
)

// VolumesFrom splits an entry of HostConfig.VolumesFrom into a container and its mode.
func VolumesFrom(entry string) (ref string, readOnly bool, err error) {
	ref, mode, given := strings.Cut(entry, ":")
	if given && mode != "ro" && mode != "rw" {
		return "", false, proxy.Malformed(fmt.Sprintf("invalid mode %q in volumes from a container: it must be ro or rw", Shorten(mode)))
	}
	return ref, mode == "ro", nil
}

// From adds to list the mounts that another container was allowed, as if they were asked for,
// where nothing is mounted yet. Mounted is what the engine says of that container: an anonymous
// volume is asked for by its name. A tmpfs is left out, as its files are nobody else's.
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
