package docker

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"

	"github.com/bermhq/berm/runtime"
)

const (
	// createLabel has a different value for each Create. If the engine's answer is lost, Create
	// recognises its own container by it. Callers don't see the label.
	createLabel = "berm.create"

	defaultLogBytes = 10 << 20
	shmBytes        = 64 << 20
)

// containerConfig returns the part of the engine's request that describes the program. A spec
// with an Agent must have a command. ImageDir is the image's working directory.
func containerConfig(spec runtime.Spec, imageDir, nonce string) *container.Config {
	labels := maps.Clone(spec.Labels)
	if labels == nil {
		labels = map[string]string{}
	}
	labels[createLabel] = nonce
	cfg := &container.Config{
		Image:       spec.Image,
		Env:         slices.Concat(spec.Env, spec.Unset), // the engine unsets a name without a value
		Labels:      labels,
		User:        spec.User,
		Hostname:    spec.Hostname,
		WorkingDir:  spec.WorkingDir,
		Healthcheck: &container.HealthConfig{Test: []string{"NONE"}}, // don't run the image's health check
	}
	switch {
	case spec.Agent != nil:
		// The engine makes the spec's working directory, and starts the agent in it. The
		// image's may be a link, so the agent enters it from inside the container instead.
		dir := cmp.Or(spec.WorkingDir, imageDir, "/")
		cfg.WorkingDir = cmp.Or(spec.WorkingDir, "/")
		cfg.Entrypoint, cfg.Cmd = []string{runtime.AgentProgram}, append([]string{"init", dir, "--"}, spec.Command...)
	case spec.Command != nil:
		// Setting the entrypoint also discards the image's command.
		cfg.Entrypoint, cfg.Cmd = spec.Command[:1], spec.Command[1:]
	}
	return cfg
}

// readonlyPaths replace the engine's default (moby's oci.DefaultSpec). They are that default and
// the cgroups. In version 1, /sys/fs/cgroup is a tmpfs of up to half of the host's memory, which
// the OCI runtime leaves writable.
var readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger", "/sys/fs/cgroup"}

// hierarchies are the directories of cgroups' version 1 below /sys/fs/cgroup, with a container's
// own limits. Runtimes other than runc need them listed, too: crun leaves them writable if only
// the directory above is read-only. Missing ones are ignored.
var hierarchies = []string{
	"blkio", "cpu", "cpu,cpuacct", "cpuacct", "cpuset", "devices", "freezer", "hugetlb", "memory", "misc", "net_cls",
	"net_cls,net_prio", "net_prio", "perf_event", "pids", "rdma", "systemd",
}

// readonly returns the paths that a container can't write to.
func readonly(class string, info runtime.Info) []string {
	if class == "" || class == "runc" || info.CgroupVersion != "1" {
		return readonlyPaths
	}
	out := slices.Clone(readonlyPaths)
	for _, name := range hierarchies {
		out = append(out, path.Join("/sys/fs/cgroup", name))
	}
	return out
}

// hostConfig returns the part of the engine's request that confines the program. Volumes are the
// image's volumes that must be covered, as with a read-only root.
func hostConfig(spec runtime.Spec, s *session, volumes []string) *container.HostConfig {
	engineInit := spec.Agent == nil
	host := &container.HostConfig{
		NetworkMode:    container.NetworkMode(spec.Network),
		IpcMode:        container.IPCModePrivate,
		CgroupnsMode:   container.CgroupnsModePrivate,
		CapDrop:        []string{"ALL"},
		CapAdd:         spec.CapAdd,
		SecurityOpt:    []string{"no-new-privileges", s.seccomp},
		Init:           &engineInit,
		ReadonlyRootfs: spec.ReadOnlyRootfs,
		ReadonlyPaths:  readonly(spec.RuntimeClass, s.info),
		RestartPolicy:  container.RestartPolicy{Name: container.RestartPolicyDisabled},
		Runtime:        spec.RuntimeClass,
		ShmSize:        shmBytes,
		LogConfig:      logConfig(spec.LogMaxBytes),
		Resources: container.Resources{
			Memory:     spec.MemoryBytes,
			MemorySwap: spec.MemoryBytes, // both together, so there is no swap
			NanoCPUs:   nanoCPUs(spec.CPUs, s.info.CPUs),
		},
		Mounts: mounts(spec, volumes, s.root),
	}
	if spec.Network == "" {
		host.NetworkMode = "none"
	}
	if spec.PidsLimit > 0 {
		host.PidsLimit = &spec.PidsLimit
	}
	if len(spec.Tmpfs) > 0 {
		host.Tmpfs = map[string]string{}
	}
	for _, t := range spec.Tmpfs {
		// The engine's own default adds noexec, which would break builds in /tmp.
		host.Tmpfs[t.Target] = fmt.Sprintf("rw,exec,nosuid,nodev,mode=1777,size=%d", t.SizeBytes)
	}
	return host
}

// mounts returns the spec's binds, and read-only mounts that cover the given volumes.
//
// A bind doesn't include file systems that are mounted below its source. The policy never judged them,
// and older engines would leave them writable below a read-only bind. The engine has no nosuid and
// nodev for binds; no-new-privileges and the device cgroup do the same.
//
// The engine refuses a private bind of a directory below its own, where volumes are. Such a bind
// needn't be private, as only the engine mounts there.
//
// The engine makes an anonymous volume of an image's volume, which is writable and outside of
// the root file system. With a read-only root, an empty read-only file system covers it. The
// engine can't make an anonymous volume read-only, and wouldn't remove a named one.
func mounts(spec runtime.Spec, volumes []string, engineRoot string) []mount.Mount {
	var out []mount.Mount
	taken := map[string]bool{}
	for _, m := range slices.Concat(spec.Mounts, agentMounts(spec.Agent)) {
		taken[path.Clean(m.Target)] = true
		propagation := mount.PropagationRPrivate
		if engineRoot != "" && strings.HasPrefix(m.Source, engineRoot) { // as the engine compares them
			propagation = mount.PropagationRSlave
		}
		out = append(out, mount.Mount{
			Type:        mount.TypeBind,
			Source:      m.Source,
			Target:      m.Target,
			ReadOnly:    m.ReadOnly,
			BindOptions: &mount.BindOptions{Propagation: propagation, NonRecursive: true},
		})
	}
	for _, t := range spec.Tmpfs {
		taken[path.Clean(t.Target)] = true
	}
	for _, v := range volumes {
		if v = path.Clean(v); !taken[v] {
			taken[v] = true
			out = append(out, mount.Mount{
				Type: mount.TypeTmpfs, Target: v, ReadOnly: true, TmpfsOptions: &mount.TmpfsOptions{SizeBytes: 4096, Mode: 0o555},
			})
		}
	}
	return out
}

// agentMounts returns the mounts of the agent. The engine mounts deeper targets later.
func agentMounts(a *runtime.Agent) []runtime.Mount {
	if a == nil {
		return nil
	}
	out := []runtime.Mount{{Source: a.Program, Target: runtime.AgentProgram, ReadOnly: true}}
	if a.Dir != "" {
		out = append(out, runtime.Mount{Source: a.Dir, Target: runtime.AgentDir, ReadOnly: true})
	}
	return out
}

// logConfig makes the engine keep the last limit/2 to limit bytes of output.
func logConfig(limit int64) container.LogConfig {
	if limit <= 0 {
		limit = defaultLogBytes
	}
	return container.LogConfig{Type: "json-file", Config: map[string]string{
		"max-size": strconv.FormatInt(max(limit/2, 1), 10),
		"max-file": "2",
	}}
}

// nanoCPUs returns the limit in the engine's unit. It is at most what the host has, as the engine
// refuses more.
func nanoCPUs(want float64, host int) int64 {
	return int64(math.Round(min(want, float64(host)) * 1e9))
}

// noUserNS says why the engine's containers can't have user namespaces of their own.
const noUserNS = "it needs the containerd backend, with containerd 2 or newer and runc 1.2 or newer"

// validate returns an InvalidArgument for values that the engine would refuse or misread.
func validate(spec runtime.Spec) error {
	switch {
	case spec.Name == "":
		return runtime.Invalid("the name is missing")
	case spec.UserNS:
		return runtime.Invalid("userns: auto can't be had: %s; or leave the key out of the profile", noUserNS)
	case slices.Contains([]string{"host", "none", "default"}, spec.Network), container.NetworkMode(spec.Network).IsContainer():
		return runtime.Invalid("network %q is one of the engine's own modes", spec.Network)
	}
	for _, c := range spec.CapAdd {
		if strings.EqualFold(c, "ALL") || strings.EqualFold(c, "CAP_ALL") {
			return runtime.Invalid("all capabilities can't be added at once")
		}
	}
	if runtime.KernelPath(spec.WorkingDir) {
		return runtime.Invalid("the working directory %q is in a file system of the kernel", spec.WorkingDir)
	}
	if a := spec.Agent; a != nil && a.Stored != (a.Program == "") || a != nil && a.Stored && a.Dir != "" {
		return runtime.Invalid("the agent has no program, or a stored one beside another or a directory")
	}
	return runtime.CheckSpec(spec)
}
