package policy

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

const (
	mountBind   = "bind"
	mountVolume = "volume"
	mountTmpfs  = "tmpfs"
	maxMounts   = 64
)

var (
	mountTypes = []string{mountBind, mountVolume, mountTmpfs}
	volumeName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$`)
)

// mounts judges a container's mounts: binds by the rules of the sandbox API, volumes and tmpfs
// by those of the profile's engine_api.
func (j *containerJudge) mounts(req ContainerRequest) {
	binds := 0
	for _, m := range req.Mounts {
		if m.Type == mountBind {
			binds++
		}
	}
	if len(req.Mounts) > maxMounts || binds > maxExtraMount {
		allowed := fmt.Sprintf("at most %d, and %d binds among them", maxMounts, maxExtraMount)
		j.invalid(ruleTooMany, "HostConfig.Mounts", fmt.Sprint(len(req.Mounts)), allowed, fmt.Sprintf("there are %d mounts, %d of them binds; allowed is %s", len(req.Mounts), binds, allowed))
		return
	}
	for i, m := range req.Mounts {
		if len(m.Options) > 0 {
			j.refused(ruleMountOptions, m.Field, "mount option", strings.Join(m.Options, ", "), "read-only, and the size of a tmpfs")
		}
		asked := m.Target
		m.Target = j.containerTarget(m.Field, asked)
		j.nested(m, req.Mounts[:i])
		switch m.Type {
		case mountBind:
			j.bind(m)
		case mountVolume:
			j.volume(m)
		case mountTmpfs:
			m.SizeBytes, m.Source = j.tmpfsBytes(m.Field, m.SizeBytes), ""
			j.spec.Tmpfs = append(j.spec.Tmpfs, m)
		default:
			j.refused(ruleMountType, m.Field, "a mount of type", m.Type, orList(mountTypes))
		}
	}
}

// containerTarget judges a mount's path in the container. It may be that of Berm's program,
// which containers of the engine's API don't have.
func (j *containerJudge) containerTarget(field, asked string) string {
	clean, why := cleanInner(asked)
	if why != "" {
		j.invalid(ruleTarget, field, asked, "an absolute path other than /, and not in "+orList(kernelDirs), fmt.Sprintf("mount path %q %s", shorten(asked), why))
	}
	return clean
}

// nested denies a target that another mount has, or that is below a named volume's target. The
// engine would make the inner directory in the volume, and another container with that volume
// could exchange it while the engine mounts. A tmpfs or an anonymous volume belongs to the
// container alone. For targets below a bind's, see Nested.
func (j *containerJudge) nested(m ContainerMount, others []ContainerMount) {
	shared := func(m ContainerMount) bool { return m.Type == mountVolume && m.Source != "" }
	for _, o := range others {
		outer, why := cleanInner(o.Target)
		if why != "" || m.Target == "" {
			continue
		}
		if m.Target == outer || shared(o) && under(m.Target, outer) || shared(m) && under(outer, m.Target) {
			j.invalid(ruleTargetOverlap, m.Field, m.Target, "mount paths outside those of named volumes, to which other containers can write", fmt.Sprintf("mount paths %s and %s are the same, or one lies in the other, which is a named volume", outer, m.Target))
		}
	}
}

// engineSockets are the paths at which clients look for the engine.
var engineSockets = []string{"/var/run/docker.sock", "/run/docker.sock"}

// NetworkFiles are files that the engine mounts into each container. Containers that join the
// network of another one get that one's files, writable.
var NetworkFiles = []string{"/etc/hostname", "/etc/hosts", "/etc/resolv.conf"}

func (j *containerJudge) bind(m ContainerMount) {
	if slices.Contains(NetworkFiles, m.Target) {
		j.deny(ruleTarget, m.Field, m.Target, "mount paths other than "+orList(NetworkFiles),
			fmt.Sprintf("mount path %q is refused for a bind: the engine gives its file to containers that join the network", m.Target))
	}
	mode := modeRW
	if m.ReadOnly {
		mode = modeRO
	}
	if m.Socket || slices.Contains(engineSockets, m.Source) {
		if j.api.DockerSocket != wordOn {
			j.deny(ruleAlwaysRefused, m.Field, m.Source, "a socket of Berm's own in its stead, where the profile's engine_api.docker_socket is on",
				fmt.Sprintf("host path %q is the engine's socket, and refused whatever the allowed roots", m.Source))
			return
		}
		j.spec.Binds = append(j.spec.Binds, Mount{HostPath: m.Source, Source: m.Source, Local: m.Source, MountPath: m.Target, Mode: mode, Socket: true})
		return
	}
	switch {
	case j.profile.HostPathMode == modeNone:
		j.deny(ruleModeNone, m.Field, m.Source, "no binds, as long as the profile's host_path_mode is none", fmt.Sprintf("bind %q is refused: profile %s has host_path_mode none", shorten(m.Source), j.profile.Name))
		return
	case j.profile.locked("extra_mounts"):
		j.deny(lockedRule(j.profile.Name), m.Field, m.Source, "no binds, as long as the profile locks extra_mounts", fmt.Sprintf("bind %q is refused: profile %s locks extra_mounts", shorten(m.Source), j.profile.Name))
		return
	}
	onlyRead := j.profile.HostPathMode == modeRO && j.profile.locked("host_path_mode")
	judged, ok := j.mount(m.Field, m.Source, sources{files: !m.OnlyDir, missing: m.Create && j.policy.mounts.createMissing && !onlyRead})
	judged.MountPath, judged.Mode = m.Target, mode
	if judged.Mode == modeRW && onlyRead {
		j.override(lockedRule(j.profile.Name), m.Field, modeRW, modeRO)
		judged.Mode = modeRO
	}
	if ok {
		j.spec.Binds = append(j.spec.Binds, judged)
	}
}

func (j *containerJudge) volume(m ContainerMount) {
	switch anonymous := m.Source == ""; {
	case !j.volumesOn(m.Field, m.Source):
		return
	case anonymous:
	case !j.volumeName(m.Field, m.Source):
		return
	case !m.Own:
		// The answer is the same for a missing volume, so it doesn't tell that this one exists.
		j.deny(ruleVolumeForeign, m.Field, m.Source, "the caller's own volumes", fmt.Sprintf("volume %q is not one of the caller's", shorten(m.Source)))
		return
	}
	j.spec.Volumes = append(j.spec.Volumes, m)
}

// volumesOn reports whether the profile allows volumes. It denies this one otherwise.
func (j *containerJudge) volumesOn(field, name string) bool {
	on := j.api.Volumes == wordOwn
	if !on {
		j.off(ruleVolumes, field, "volume", name, "volumes", "no volumes")
	}
	return on
}

// volumeName judges a volume's name. It denies the names of the volumes for Berm's program: a
// caller that makes one first could write to what runs in all sandboxes.
func (j *containerJudge) volumeName(field, name string) bool {
	ok := volumeName.MatchString(name) && !strings.HasPrefix(name, "berm-program-")
	if !ok {
		j.invalid(ruleVolumeName, field, name, "letters, digits, _, . and -, 128 at most", fmt.Sprintf("%q is not a volume's name", shorten(name)))
	}
	return ok
}

// VolumeCreate judges a volume that a caller wants to make. It must have the local driver and no
// options. The error is a *DeniedError.
func (p *Policy) VolumeCreate(profile string, req VolumeCreateRequest) error {
	j, ok := p.containerJudge(profile)
	if !ok {
		return j.err()
	}
	j.volumesOn("Name", req.Name)
	if req.Name != "" {
		j.volumeName("Name", req.Name)
	}
	if !slices.Contains([]string{"", "local"}, req.Driver) {
		j.refused(ruleVolumeOptions, "Driver", "volume driver", req.Driver, "local")
	}
	for _, name := range sortedKeys(req.Options) {
		j.deny(ruleVolumeOptions, "DriverOpts."+shorten(name), name, "no options", fmt.Sprintf("volume option %q is refused: none is allowed", shorten(name)))
	}
	for _, o := range req.Other {
		j.otherField(o)
	}
	return j.err()
}
