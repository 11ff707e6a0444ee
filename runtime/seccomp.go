package runtime

import specs "github.com/opencontainers/runtime-spec/specs-go"

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

// SeccompArch gives seccomp's name for an architecture in Go's terms; false if there
// is none. It is for backends.
func SeccompArch(arch string) (specs.Arch, bool) {
	native, ok := seccompArch[arch]
	return native, ok
}
