package runtime

import (
	"encoding/json"
	"fmt"
	"slices"

	"github.com/moby/profiles/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"
)

// seccompArch names architectures, given in Go's terms, as seccomp does.
var seccompArch = map[string]specs.Arch{
	"amd64":   specs.ArchX86_64,
	"arm64":   specs.ArchAARCH64,
	"arm":     specs.ArchARM,
	"loong64": specs.ArchLOONGARCH64,
	"ppc64le": specs.ArchPPC64LE,
	"riscv64": specs.ArchRISCV64,
	"s390x":   specs.ArchS390X,
}

// SeccompArch returns seccomp's name for an architecture in Go's terms; false if there is none. It is
// for backends.
func SeccompArch(arch string) (specs.Arch, bool) {
	native, ok := seccompArch[arch]
	return native, ok
}

// GoArch returns Go's name for an architecture that uname or a Docker Engine names.
func GoArch(machine string) string {
	switch machine {
	case "x86_64":
		return "amd64"
	case "aarch64":
		return "arm64"
	case "armv7l", "armv6l":
		return "arm"
	case "loongarch64":
		return "loong64"
	}
	return machine
}

// projectIoctls are the ioctl_fs(2) requests by which a file's owner could escape a project
// quota. FS_IOC_FSSETXATTR changes a file's project. FS_IOC_SETFLAGS clears the flag by which
// new files get the project of their directory.
//
// Each value is the low 16 bits of a request: its type and number. The bits above, size and
// direction, aren't compared: they differ between architectures, and the kernel ignores the
// upper half of the register.
var projectIoctls = []uint64{'X'<<8 | 32, 'f'<<8 | 2}

// SeccompNames removes system calls from those that a profile allows. With file_setattr(2)
// or ioctl(2), a process could take its files out of a project quota; SeccompIoctls allows
// the other ioctl requests again. With io_setup(2), a process could use up the host's AIO
// contexts, which the kernel counts for all users together. It is for backends.
func SeccompNames(allowed []string) []string {
	return slices.DeleteFunc(slices.Clone(allowed), func(name string) bool {
		return name == "ioctl" || name == "file_setattr" || name == "io_setup"
	})
}

// SeccompIoctls returns rules that allow all requests of ioctl(2) but projectIoctls. A
// filter can't express "all but". So each rule allows the requests that share their first
// bits with a refused one and differ in the next bit. It is for backends.
func SeccompIoctls() []specs.LinuxSyscall {
	const bits = 16
	var rules []specs.LinuxSyscall
	var split func(prefix uint64, bit int, refused []uint64)
	split = func(prefix uint64, bit int, refused []uint64) {
		if len(refused) == 0 {
			rules = append(rules, specs.LinuxSyscall{
				Names: []string{"ioctl"}, Action: specs.ActAllow,
				Args: []specs.LinuxSeccompArg{{Index: 1, Op: specs.OpMaskedEqual, Value: (1<<bits - 1) &^ (1<<bit - 1), ValueTwo: prefix}},
			})
			return
		}
		if bit == 0 {
			return
		}
		bit--
		for _, half := range []uint64{prefix, prefix | 1<<bit} {
			split(half, bit, slices.DeleteFunc(slices.Clone(refused), func(r uint64) bool { return r>>bit != half>>bit }))
		}
	}
	split(0, bits, projectIoctls)
	return rules
}

// SeccompOption returns a security option for Docker Engine: its default profile without
// what SeccompNames drops, for one architecture alone. A call made for another one (32-bit,
// x32) kills the process. The filter is smaller too, which saves about 15 ms on every
// create and every exec. Arch is in Go's terms.
func SeccompOption(arch string) (string, error) {
	native, ok := SeccompArch(arch)
	if !ok {
		return "", fmt.Errorf("there is no seccomp profile for architecture %q", arch)
	}
	profile := seccomp.DefaultProfile()
	profile.ArchMap = nil
	profile.Architectures = []specs.Arch{native}
	for _, call := range profile.Syscalls {
		call.Names = SeccompNames(call.Names)
	}
	for _, rule := range SeccompIoctls() {
		profile.Syscalls = append(profile.Syscalls, &seccomp.Syscall{LinuxSyscall: rule})
	}
	body, err := json.Marshal(profile)
	if err != nil {
		return "", fmt.Errorf("encode the seccomp profile: %w", err)
	}
	return "seccomp=" + string(body), nil
}
