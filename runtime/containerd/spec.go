package containerd

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"os"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/containerd/containerd/v2/contrib/apparmor"
	"github.com/containerd/containerd/v2/contrib/seccomp"
	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/pkg/oci"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	apparmorhost "github.com/containerd/containerd/v2/pkg/apparmor"

	"github.com/bermhq/berm/runtime"
)

const (
	// ociVersion is the oldest version with all fields that are set here. Runtimes refuse
	// versions that are newer than their own.
	ociVersion = "1.0.2"

	defaultPath     = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	apparmorProfile = "berm-default"

	cpuPeriod  = 100_000 // microseconds
	minQuota   = 1000    // the kernel's own
	softNofile = 1024
	hardNofile = 524288
)

var (
	namePattern = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,254}$`)
	hostPattern = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9.-]*$`)
)

// validate returns an InvalidArgument for values that the engine or its runtime would refuse or
// misread.
func validate(spec runtime.Spec) error {
	switch {
	case !namePattern.MatchString(spec.Name):
		return runtime.Invalid("name %q: letters, digits and _.- are allowed, at most 255, the first a letter or digit", spec.Name)
	case spec.Hostname != "" && (len(spec.Hostname) > 64 || !hostPattern.MatchString(spec.Hostname)):
		return runtime.Invalid("host name %q: letters, digits, - and . are allowed, at most 64", spec.Hostname)
	}
	if err := checkEnv(spec.Env); err != nil {
		return err
	}
	for _, c := range spec.CapAdd {
		if !slices.Contains(capabilities(), c) {
			return runtime.Invalid("capability %q is unknown", c)
		}
	}
	if err := runtime.CheckSpec(spec); err != nil {
		return err
	}
	for k, v := range spec.Labels {
		if !utf8.ValidString(k) || !utf8.ValidString(v) {
			return runtime.Invalid("label %q isn't UTF-8", k)
		}
		if strings.HasPrefix(k, labelPrefix) {
			return runtime.Invalid("label %q: names that begin with %s are the backend's own", k, labelPrefix)
		}
	}
	return nil
}

// checkEnv refuses variables that no program can get. Its error doesn't repeat them, as they
// may be secret.
func checkEnv(env []string) error {
	for _, v := range env {
		if strings.IndexByte(v, '=') < 1 || strings.IndexByte(v, 0) >= 0 {
			return runtime.Invalid("the environment has an entry that isn't NAME=value, or holds a zero byte")
		}
	}
	return nil
}

// capabilities are all known capabilities. A misspelt one would be ignored otherwise.
var capabilities = sync.OnceValue(func() []string {
	var s specs.Spec
	s.Process = &specs.Process{}
	if err := oci.WithAllKnownCapabilities(context.Background(), nil, nil, &s); err != nil || s.Process.Capabilities == nil {
		return nil // then none can be added
	}
	return s.Process.Capabilities.Bounding
})

// ociSpec returns the container's OCI spec. Netns is the path of its network namespace; empty
// is a new one, with loopback only.
func (c *creation) ociSpec(netns string) (*specs.Spec, error) {
	command := c.spec.Command
	if command == nil {
		command = slices.Concat(c.image.Config.Entrypoint, c.image.Config.Cmd)
	}
	if err := checkEnv(c.image.Config.Env); err != nil {
		return nil, fmt.Errorf("the image: %w", err)
	}
	if len(command) == 0 {
		return nil, runtime.Invalid("neither the container nor its image names a command")
	}
	ctx := namespaces.WithNamespace(context.Background(), c.r.opts.Namespace)
	s, err := oci.GenerateSpec(ctx, nil, &containers.Container{ID: c.id}) // masked and read-only paths, devices
	if err != nil {
		return nil, fmt.Errorf("generate an OCI spec: %w", err)
	}
	s.Version = ociVersion
	s.Root.Readonly = c.spec.ReadOnlyRootfs
	s.Hostname = c.hostname()
	s.Process = c.process(command)
	s.Mounts = c.mounts(s.Mounts)
	s.Linux.CgroupsPath = path.Join(c.r.opts.CgroupParent, c.id)
	s.Linux.Namespaces = []specs.LinuxNamespace{
		{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.UTSNamespace},
		{Type: specs.MountNamespace}, {Type: specs.CgroupNamespace}, {Type: specs.NetworkNamespace, Path: netns},
	}
	c.mapIDs(s)
	// In version 1, cgroupRoot is a tmpfs of up to half of the host's memory. The OCI runtime
	// leaves it writable: the mount's option ro is only for the hierarchies in it.
	s.Linux.ReadonlyPaths = append(s.Linux.ReadonlyPaths, cgroupRoot)
	s.Linux.ReadonlyPaths = append(s.Linux.ReadonlyPaths, c.class.hierarchies(cgroupRoot)...)
	c.limit(s.Linux.Resources)
	native, ok := runtime.SeccompArch(c.r.host.Architecture)
	if !ok {
		return nil, fmt.Errorf("there is no seccomp profile for architecture %q", c.r.host.Architecture)
	}
	profile := seccomp.DefaultProfile(s)
	profile.Architectures = []specs.Arch{native} // as in runtime.SeccompOption
	for i := range profile.Syscalls {
		profile.Syscalls[i].Names = runtime.SeccompNames(profile.Syscalls[i].Names)
	}
	profile.Syscalls = append(profile.Syscalls, runtime.SeccompIoctls()...)
	s.Linux.Seccomp = profile
	if apparmorhost.HostSupports() {
		if err := apparmor.LoadDefaultProfile(apparmorProfile); err != nil {
			return nil, fmt.Errorf("load the AppArmor profile %s: %w", apparmorProfile, err)
		}
		s.Process.ApparmorProfile = apparmorProfile
	}
	return s, nil
}

func (c *creation) process(command []string) *specs.Process {
	zero := 0
	rlimits := []specs.POSIXRlimit{nofile()}
	if c.ids != 0 && !hostSetsLimits() {
		rlimits = nil // the container gets the engine's own limits
	}
	return &specs.Process{
		Args: append([]string{runtime.AgentProgram, "init", c.workingDir(), "--"}, command...),
		Env:  c.env(),
		// The agent enters the working directory, not the OCI runtime. The runtime still has
		// files of the host open then, and a path below /proc could lead to them.
		Cwd:  "/",
		User: specs.User{UID: c.account.UID, GID: c.account.GID, AdditionalGids: c.account.Groups},
		Capabilities: &specs.LinuxCapabilities{
			Bounding: c.spec.CapAdd, Permitted: c.spec.CapAdd, Effective: c.spec.CapAdd,
		},
		NoNewPrivileges: true,
		Rlimits:         rlimits,
		OOMScoreAdj:     &zero,
	}
}

func (c *creation) workingDir() string {
	return path.Join("/", cmp.Or(c.spec.WorkingDir, c.image.Config.WorkingDir))
}

// wanted returns the directories that the container needs: the working directory, and the
// volumes that the image declares. Docker makes those, so programs rely on them. With a
// read-only root, mounts covers the volumes instead.
func (c *creation) wanted() []string {
	var out []string
	if dir := c.workingDir(); dir != "/" && !c.covered(dir) {
		out = append(out, dir)
	}
	if !c.spec.ReadOnlyRootfs {
		for v := range c.image.Config.Volumes {
			if v = path.Clean(v); path.IsAbs(v) && v != "/" && !c.covered(v) {
				out = append(out, v)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// covered reports whether a directory is in a mount of the spec, or in the agent's.
func (c *creation) covered(dir string) bool {
	return c.agentDir() != "" && runtime.Below(dir, runtime.AgentDir) ||
		slices.ContainsFunc(c.spec.Mounts, func(m runtime.Mount) bool { return runtime.Below(dir, m.Target) }) ||
		slices.ContainsFunc(c.spec.Tmpfs, func(t runtime.Tmpfs) bool { return runtime.Below(dir, t.Target) })
}

// agentDir returns the agent's directory on the host, or "" if it has none.
func (c *creation) agentDir() string {
	if c.spec.Agent == nil {
		return ""
	}
	return c.spec.Agent.Dir
}

// nofile returns the limit of open files. It is at most this process's own, as the engine may
// lack the right to raise that.
var nofile = sync.OnceValue(func() specs.POSIXRlimit {
	hard := uint64(hardNofile)
	var own unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &own); err == nil {
		hard = min(hard, own.Max)
	}
	return specs.POSIXRlimit{Type: "RLIMIT_NOFILE", Soft: min(softNofile, hard), Hard: hard}
})

// hostSetsLimits reports whether services of this host can have CAP_SYS_RESOURCE, without which
// an OCI runtime can't limit processes in another user namespace at all.
var hostSetsLimits = sync.OnceValue(func() bool {
	b, err := os.ReadFile("/proc/1/status")
	_, bounding, _ := strings.Cut(string(b), "\nCapBnd:\t")
	line, _, _ := strings.Cut(bounding, "\n")
	caps, bad := strconv.ParseUint(line, 16, 64)
	return err != nil || bad != nil || caps&(1<<unix.CAP_SYS_RESOURCE) != 0
})

// env returns the image's environment, with the spec's over it.
func (c *creation) env() []string {
	image := slices.DeleteFunc(slices.Clone(c.image.Config.Env), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return slices.Contains(c.spec.Unset, name)
	})
	return runtime.MergeEnv(slices.Concat([]string{defaultPath, "HOSTNAME=" + c.hostname()}, image), c.spec.Env)
}

// limit adds the spec's limits to the resources, which have the rules for devices already.
func (c *creation) limit(res *specs.LinuxResources) {
	if m := c.spec.MemoryBytes; m > 0 {
		res.Memory = &specs.LinuxMemory{Limit: &m}
		if swapLimits() {
			res.Memory.Swap = &m // both together, so there is no swap
		}
	}
	if c.spec.CPUs > 0 {
		period := uint64(cpuPeriod)
		quota := max(int64(math.Round(min(c.spec.CPUs, float64(c.r.host.CPUs))*cpuPeriod)), minQuota)
		res.CPU = &specs.LinuxCPU{Quota: &quota, Period: &period}
	}
	if n := c.spec.PidsLimit; n > 0 {
		res.Pids = &specs.LinuxPids{Limit: &n}
	}
}

// swapLimits reports whether the kernel can limit swap. Version 1 of cgroups needs a boot
// option for that, and refuses the limit otherwise.
var swapLimits = sync.OnceValue(func() bool {
	_, v1 := os.Stat(cgroupRoot + "/memory/memory.limit_in_bytes")
	_, swap := os.Stat(cgroupRoot + "/memory/memory.memsw.limit_in_bytes")
	return v1 != nil || swap == nil
})

// mounts returns the mounts of the kernel's file systems, Berm's own files and the spec's
// mounts. Deeper ones come later.
//
// A bind doesn't include file systems that are mounted below its source, as they were never
// judged. An image's volume is an ordinary directory here. With a read-only root, an empty
// file system covers it, as with Docker.
func (c *creation) mounts(base []specs.Mount) []specs.Mount {
	out := slices.DeleteFunc(slices.Clone(base), func(m specs.Mount) bool { return m.Destination == "/run" })
	for i, m := range out {
		if m.Type == "devpts" {
			out[i].Options = append(slices.Clone(m.Options), fmt.Sprintf("max=%d", maxTerminals))
		}
	}
	out = append(out, specs.Mount{
		Destination: cgroupRoot, Type: "cgroup", Source: "cgroup", Options: []string{"nosuid", "noexec", "nodev", "relatime", "ro"},
	}, bind(c.agent, runtime.AgentProgram, true))
	var more []specs.Mount
	taken := map[string]bool{}
	for _, m := range c.spec.Mounts {
		taken[path.Clean(m.Target)] = true
		more = append(more, bind(m.Source, m.Target, m.ReadOnly))
	}
	for _, t := range c.spec.Tmpfs {
		taken[path.Clean(t.Target)] = true
		more = append(more, tmpfs(t.Target, t.SizeBytes, "1777"))
	}
	for _, name := range etcFiles {
		if target := "/etc/" + name; !taken[target] {
			more = append(more, bind(c.place.file(name), target, true)) // read-only, as a tenant's writes would fill the host's disk
		}
	}
	for i, dir := range c.dirs {
		taken[dir] = true
		more = append(more, bind(c.place.file(dirName(i)), dir, c.spec.ReadOnlyRootfs))
	}
	if dir := c.agentDir(); dir != "" {
		more = append(more, bind(dir, runtime.AgentDir, true))
	}
	if c.spec.ReadOnlyRootfs {
		for v := range c.image.Config.Volumes {
			if v = path.Clean(v); !taken[v] && path.IsAbs(v) && v != "/" && (c.agentDir() == "" || !runtime.Below(v, runtime.AgentDir)) {
				more = append(more, tmpfs(v, 4096, "0555", "ro"))
			}
		}
	}
	slices.SortStableFunc(more, func(a, b specs.Mount) int {
		x, y := path.Clean(a.Destination), path.Clean(b.Destination)
		return cmp.Or(cmp.Compare(strings.Count(x, "/"), strings.Count(y, "/")), cmp.Compare(x, y))
	})
	return append(out, more...)
}

// maxTerminals bounds the pseudo terminals of a container. The host has kernel.pty.max,
// 4096 by default, for all containers together.
const maxTerminals = 64

func bind(source, target string, readOnly bool) specs.Mount {
	mode := "rw"
	if readOnly {
		mode = "ro"
	}
	return specs.Mount{
		Destination: target, Type: "bind", Source: source, Options: []string{"bind", "rprivate", "nosuid", "nodev", mode},
	}
}

func tmpfs(target string, size int64, mode string, more ...string) specs.Mount {
	options := append([]string{"nosuid", "nodev", "mode=" + mode, fmt.Sprintf("size=%d", size)}, more...)
	return specs.Mount{Destination: target, Type: "tmpfs", Source: "tmpfs", Options: options}
}
