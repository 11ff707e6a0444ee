package doctor

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/policy"
)

// hostFacts are what the kernel tells this process.
type hostFacts struct {
	err         error  // why nothing is known
	system      string // distribution, kernel, machine
	uid         int
	caps        uint64
	cgroups     string   // "v1", "v1 (hybrid)", "v2"; empty if there are none to be seen
	controllers []string // of wantedControllers, those that are there
	swap        bool     // there is some
	swapLimits  bool     // and it can be limited
	seccomp     bool
	lsm         []string // of AppArmor and SELinux, those that are on
	userns      string   // most user namespaces that there may be; empty: there are none
	// Limits on what sandboxes use up, by the sysctl's name. Those that can't be read are left out.
	limits map[string]int
}

// wantedLimits are what sysctls are to be at least. Sandboxes of one user share the first
// with Berm, if it is that user, and all share the others.
var wantedLimits = []struct {
	name  string
	least int
}{{"fs.inotify.max_user_instances", 1024}, {"fs.inotify.max_user_watches", 65536}, {"kernel.pty.max", 4096}, {"fs.aio-max-nr", 65536}}

// wantedControllers hold what sandboxes are limited to; cpuset is the engine's own concern.
var wantedControllers = []string{"memory", "cpu", "pids", "cpuset"}

// lookAtHost reads what is below a root, / but in tests.
func lookAtHost(root string, uid int) (hostFacts, error) {
	h := hostFacts{uid: uid}
	path := func(name string) string { return filepath.Join(root, name) }
	there := func(name string) bool { _, err := os.Stat(path(name)); return err == nil }
	text := func(name string) string {
		data, _ := serve.ReadProc(path(name)) // without it, nothing is known of it
		return strings.TrimSpace(string(data))
	}
	status, err := serve.ReadProc(path("proc/self/status"))
	if err != nil {
		return h, err
	}
	for line := range strings.Lines(string(status)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ":")
		switch value = strings.TrimSpace(value); key {
		case "CapEff":
			if h.caps, err = strconv.ParseUint(value, 16, 64); err != nil {
				return h, fmt.Errorf("read the capabilities: %w", err)
			}
		case "Seccomp": // the kernel says it of each process if it has it
			h.seccomp = true
		}
	}
	distribution := "unknown distribution"
	for line := range strings.Lines(text("etc/os-release")) {
		if name, ok := strings.CutPrefix(line, "PRETTY_NAME="); ok {
			distribution = strings.Trim(strings.TrimSpace(name), `"'`)
		}
	}
	h.system = fmt.Sprintf("%s, Linux %s, %s, %d CPUs", distribution, cmp.Or(text("proc/sys/kernel/osrelease"), "?"), goruntime.GOARCH, goruntime.NumCPU())

	const cgroup = "sys/fs/cgroup/"
	switch {
	case there(cgroup + "cgroup.controllers"):
		h.cgroups = "v2"
		available := strings.Fields(text(cgroup + "cgroup.controllers"))
		h.controllers = slices.DeleteFunc(slices.Clone(wantedControllers), func(c string) bool { return !slices.Contains(available, c) })
		h.swapLimits = true
	default:
		h.controllers = slices.DeleteFunc(slices.Clone(wantedControllers), func(c string) bool { return !there(cgroup + c) })
		h.swapLimits = there(cgroup + "memory/memory.memsw.limit_in_bytes")
		if len(h.controllers) > 0 {
			h.cgroups = "v1"
		}
		if there(cgroup + "unified/cgroup.controllers") {
			h.cgroups = "v1 (hybrid)"
		}
	}
	h.swap = strings.Count(text("proc/swaps"), "\n") > 0 // below a heading
	if strings.HasPrefix(text("sys/module/apparmor/parameters/enabled"), "Y") {
		h.lsm = append(h.lsm, "AppArmor")
	}
	if text("sys/fs/selinux/enforce") == "1" {
		h.lsm = append(h.lsm, "SELinux")
	}
	if most := text("proc/sys/user/max_user_namespaces"); most != "0" {
		h.userns = most
	}
	h.limits = map[string]int{}
	for _, l := range wantedLimits {
		if n, err := strconv.Atoi(text("proc/sys/" + strings.ReplaceAll(l.name, ".", "/"))); err == nil {
			h.limits[l.name] = n
		}
	}
	return h, nil
}

func (h hostFacts) judgeLimits() finding {
	var found, set []string
	for _, l := range wantedLimits {
		if n, ok := h.limits[l.name]; ok {
			found = append(found, fmt.Sprintf("%s %d", l.name, n))
			if n < l.least {
				set = append(set, fmt.Sprintf("%s=%d", l.name, l.least))
			}
		}
	}
	if len(set) > 0 {
		return soft("host.limits", strings.Join(found, ", "), "a sandbox can use up what the kernel counts for a user, or for all: sandboxes of that user then can't watch files, or open terminals",
			"sysctl -w "+strings.Join(set, " ")+", and give profiles a user that isn't Berm's")
	}
	return okay("host.limits", cmp.Or(strings.Join(found, ", "), "can't be read"))
}

func (h hostFacts) has(capability int) bool { return h.caps&(1<<capability) != 0 }

// judge goes by what an engine of a kind needs, and whether that is on the same root.
func (h hostFacts) judge(kind string, local bool) []finding {
	out := []finding{okay("host.berm", config.VersionLine())}
	if h.err != nil {
		return append(out, soft("host.system", h.err.Error(), "nothing is known of this host", "mount /proc"))
	}
	out = append(out, okay("host.system", h.system), h.judgeUser(kind), h.judgeCgroups(local), h.judgeSwap(), h.judgeLimits())
	switch {
	case h.seccomp:
		out = append(out, okay("host.seccomp", "in the kernel"))
	case !local:
		out = append(out, okay("host.seccomp", "can't be seen from this container"))
	default:
		out = append(out, bad("host.seccomp", "not in the kernel", "no sandbox can be made, since each has a filter of system calls", "use a kernel with CONFIG_SECCOMP_FILTER"))
	}
	if len(h.lsm) > 0 {
		out = append(out, okay("host.lsm", strings.Join(h.lsm, ", ")))
	} else {
		out = append(out, soft("host.lsm", "neither AppArmor nor an enforcing SELinux is on",
			"namespaces, capabilities and seccomp alone stand between a sandbox and the kernel", "turn one on, where the distribution has it (apparmor=1 security=apparmor on the kernel's command line)"))
	}
	if h.userns != "" {
		return append(out, okay("host.userns", "up to "+h.userns+"; sandboxes can't make any"))
	}
	return append(out, okay("host.userns", "none; Berm needs none"))
}

// judgeOwner says whether Berm may give what it makes to the policy's owner.
func (h hostFacts) judgeOwner(o *policy.Owner, chats string) []finding {
	const id = "policy.owner"
	if o == nil || h.err != nil {
		return nil
	}
	found := fmt.Sprintf("mounts.owner is %d:%d", o.UID, o.GID)
	const fix = "run berm as root or with both, or leave mounts.owner out of the policy"
	switch {
	case o.UID == h.uid, h.has(unix.CAP_CHOWN) && h.has(unix.CAP_DAC_OVERRIDE):
		return []finding{okay(id, found)}
	case chats == "":
		return []finding{soft(id, found+", and Berm lacks CAP_CHOWN or CAP_DAC_OVERRIDE", "a default workspace that is missing can't be made", fix)}
	}
	return []finding{bad(id, found+", and Berm lacks CAP_CHOWN or CAP_DAC_OVERRIDE", "sandboxes and chats can't be made, and nothing can be uploaded", fix)}
}

func (h hostFacts) judgeUser(kind string) finding {
	found := fmt.Sprintf("uid %d", h.uid)
	var missing []string
	for _, c := range []struct {
		name string
		bit  int
	}{{"CAP_SYS_ADMIN", unix.CAP_SYS_ADMIN}, {"CAP_NET_ADMIN", unix.CAP_NET_ADMIN}} {
		if !h.has(c.bit) {
			missing = append(missing, c.name)
		}
	}
	if len(missing) == 0 {
		return okay("host.user", found+", with CAP_SYS_ADMIN and CAP_NET_ADMIN")
	}
	found += ", without " + strings.Join(missing, " and ")
	if kind == "containerd" {
		return bad("host.user", found, "no sandbox can be made on containerd", "run berm as root, with both")
	}
	return okay("host.user", found+": enough for Docker")
}

func (h hostFacts) judgeCgroups(local bool) finding {
	const id = "host.cgroups"
	found := cmp.Or(h.cgroups, "none to be seen")
	if len(h.controllers) > 0 {
		found += ": " + strings.Join(h.controllers, ", ")
	}
	var missing []string
	for _, c := range wantedControllers[:3] {
		if !slices.Contains(h.controllers, c) {
			missing = append(missing, c)
		}
	}
	return first(
		rule{len(missing) == 0, okay(id, found)},
		rule{!local, okay(id, found+", as seen from this container")},
		rule{true, bad(id, found, "sandboxes can't be limited in "+strings.Join(missing, ", "), "turn the controllers on when the kernel boots (cgroup_enable=memory, systemd.unified_cgroup_hierarchy=1)")},
	)
}

func (h hostFacts) judgeSwap() finding {
	const id = "host.swap"
	return first(
		rule{!h.swap, okay(id, "none")},
		rule{h.swapLimits, okay(id, "counted")},
		rule{true, soft(id, "there is some, and it isn't counted", "a sandbox can take swap beyond its memory limit", "boot with swapaccount=1, or turn swap off")},
	)
}

// configSource says where the configuration comes from.
func configSource(file string) string {
	if file != "" {
		return file + ", environment and flags"
	}
	return "no file: defaults, environment and flags"
}
