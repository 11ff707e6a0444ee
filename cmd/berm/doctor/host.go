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
	"github.com/bermhq/berm/policy"
)

// hostFacts are facts about the host, from the kernel's files.
type hostFacts struct {
	err         error  // why nothing is known
	system      string // distribution, kernel, machine
	uid         int
	caps        uint64
	cgroups     string   // "v1", "v1 (hybrid)", "v2"; empty if none can be seen
	controllers []string // the available ones of wantedControllers
	swap        bool     // the host has swap
	swapLimits  bool     // the kernel can limit swap
	seccomp     bool
	lsm         []string // AppArmor and SELinux, if they are on
	// Limits of resources that sandboxes share, by the sysctl's name. It lacks limits that can't
	// be read.
	limits map[string]int
}

// wantedLimits are the least values that sysctls should have. Those of inotify count per user:
// all sandboxes of a user share them, and Berm too if it runs as that user. The others count for
// the whole host.
var wantedLimits = []struct {
	name  string
	least int
}{{"fs.inotify.max_user_instances", 1024}, {"fs.inotify.max_user_watches", 65536}, {"kernel.pty.max", 4096}, {"fs.aio-max-nr", 65536}}

// wantedControllers are the controllers that limit sandboxes. Only engines need cpuset.
var wantedControllers = []string{"memory", "cpu", "pids", "cpuset"}

// lookAtHost reads the facts from files below root, which is / except in tests.
func lookAtHost(root string, uid int) (hostFacts, error) {
	h := hostFacts{uid: uid}
	path := func(name string) string { return filepath.Join(root, name) }
	there := func(name string) bool { _, err := os.Stat(path(name)); return err == nil }
	text := func(name string) string {
		data, _ := os.ReadFile(path(name)) // without it, nothing is known of it
		return strings.TrimSpace(string(data))
	}
	status, err := os.ReadFile(path("proc/self/status"))
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
		case "Seccomp": // a kernel with seccomp has this line for each process
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
	available, v2 := strings.Fields(text(cgroup+"cgroup.controllers")), there(cgroup+"cgroup.controllers")
	h.controllers = slices.DeleteFunc(slices.Clone(wantedControllers), func(c string) bool { return !slices.Contains(available, c) && (v2 || !there(cgroup+c)) })
	h.swapLimits = v2 || there(cgroup+"memory/memory.memsw.limit_in_bytes")
	switch {
	case v2:
		h.cgroups = "v2"
	case there(cgroup + "unified/cgroup.controllers"):
		h.cgroups = "v1 (hybrid)"
	case len(h.controllers) > 0:
		h.cgroups = "v1"
	}
	h.swap = strings.Count(text("proc/swaps"), "\n") > 0 // below a heading
	if strings.HasPrefix(text("sys/module/apparmor/parameters/enabled"), "Y") {
		h.lsm = append(h.lsm, "AppArmor")
	}
	if text("sys/fs/selinux/enforce") == "1" {
		h.lsm = append(h.lsm, "SELinux")
	}
	h.limits = map[string]int{}
	for _, l := range wantedLimits {
		if n, err := strconv.Atoi(text("proc/sys/" + strings.ReplaceAll(l.name, ".", "/"))); err == nil {
			h.limits[l.name] = n
		}
	}
	return h, nil
}

func (h hostFacts) has(capability int) bool { return h.caps&(1<<capability) != 0 }

// judge judges the host by the needs of a kind of engine. Local reports whether the engine shares
// this process's root file system.
func (h hostFacts) judge(kind string, local bool) []finding {
	berm := judge("host.berm", okay(true, config.VersionLine()))
	if h.err != nil {
		return append(berm, judge("host.system", soft(true, h.err.Error(), "nothing is known of this host", "mount /proc"))...)
	}
	var lacks []string // capabilities
	for _, c := range []struct {
		name string
		bit  int
	}{{"CAP_SYS_ADMIN", unix.CAP_SYS_ADMIN}, {"CAP_NET_ADMIN", unix.CAP_NET_ADMIN}} {
		if !h.has(c.bit) {
			lacks = append(lacks, c.name)
		}
	}
	user := fmt.Sprintf("uid %d", h.uid)
	without := user + ", without " + strings.Join(lacks, " and ")
	missing := slices.DeleteFunc(slices.Clone(wantedControllers[:3]), func(c string) bool { return slices.Contains(h.controllers, c) })
	cgroups := cmp.Or(h.cgroups, "none to be seen")
	if len(h.controllers) > 0 {
		cgroups += ": " + strings.Join(h.controllers, ", ")
	}
	var limits, raise []string
	for _, l := range wantedLimits {
		n, known := h.limits[l.name]
		if known {
			limits = append(limits, fmt.Sprintf("%s %d", l.name, n))
		}
		if known && n < l.least {
			raise = append(raise, fmt.Sprintf("%s=%d", l.name, l.least))
		}
	}
	return slices.Concat(berm,
		judge("host.system", okay(true, h.system)),
		judge("host.user",
			okay(len(lacks) == 0, user+", with CAP_SYS_ADMIN and CAP_NET_ADMIN"),
			bad(kind == "containerd", without, "no sandbox can be made on containerd", "run berm as root, with both"),
			okay(true, without+": enough for Docker")),
		judge("host.cgroups",
			okay(len(missing) == 0, cgroups),
			okay(!local, cgroups+", as seen from this container"),
			bad(true, cgroups, "sandboxes can't be limited in "+strings.Join(missing, ", "), "turn the controllers on when the kernel boots (cgroup_enable=memory, systemd.unified_cgroup_hierarchy=1)")),
		judge("host.swap",
			okay(!h.swap, "none"),
			okay(h.swapLimits, "counted"),
			soft(true, "there is some, and it isn't counted", "a sandbox can take swap beyond its memory limit", "boot with swapaccount=1, or turn swap off")),
		judge("host.limits",
			soft(len(raise) > 0, strings.Join(limits, ", "), "a sandbox can use up what the kernel counts for a user, or for all: sandboxes of that user then can't watch files, or open terminals",
				"sysctl -w "+strings.Join(raise, " ")+", and give profiles a user that isn't Berm's"),
			okay(true, cmp.Or(strings.Join(limits, ", "), "can't be read"))),
		judge("host.seccomp",
			okay(h.seccomp, "in the kernel"),
			okay(!local, "can't be seen from this container"),
			bad(true, "not in the kernel", "no sandbox can be made, since each has a filter of system calls", "use a kernel with CONFIG_SECCOMP_FILTER")),
		judge("host.lsm",
			okay(len(h.lsm) > 0, strings.Join(h.lsm, ", ")),
			soft(true, "neither AppArmor nor an enforcing SELinux is on", "namespaces, capabilities and seccomp alone stand between a sandbox and the kernel",
				"turn one on, where the distribution has it (apparmor=1 security=apparmor on the kernel's command line)")))
}

// judgeOwner judges whether Berm can give files and directories to the policy's owner. P may be
// nil.
func (h hostFacts) judgeOwner(p *policy.Policy, chats string) []finding {
	if p == nil || p.Owner() == nil || h.err != nil {
		return nil
	}
	o := p.Owner()
	found := fmt.Sprintf("mounts.owner is %d:%d", o.UID, o.GID)
	lacking := found + ", and Berm lacks CAP_CHOWN or CAP_DAC_OVERRIDE"
	const fix = "run berm as root or with both, or leave mounts.owner out of the policy"
	return judge("policy.owner",
		okay(o.UID == h.uid || h.has(unix.CAP_CHOWN) && h.has(unix.CAP_DAC_OVERRIDE), found),
		soft(chats == "", lacking, "a default workspace that is missing can't be made", fix),
		bad(true, lacking, "sandboxes and chats can't be made, and nothing can be uploaded", fix))
}
