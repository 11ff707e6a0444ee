package runtime

import (
	"math"
	"path"
)

// CheckSpec returns an InvalidArgument for a Spec that is invalid for every engine. An
// engine would refuse such a Spec, or take it for another. It is for backends.
func CheckSpec(spec Spec) error {
	switch {
	case spec.Image == "":
		return Invalid("the image is missing")
	case spec.Command != nil && len(spec.Command) == 0:
		return Invalid("the command is empty")
	case spec.CPUs < 0 || math.IsNaN(spec.CPUs) || spec.MemoryBytes < 0 || spec.PidsLimit < 0 || spec.LogMaxBytes < 0:
		return Invalid("a limit is negative or not a number")
	case spec.WorkingDir != "" && !path.IsAbs(spec.WorkingDir):
		return Invalid("the working directory %q is not absolute", spec.WorkingDir)
	}
	for _, m := range spec.Mounts {
		if !path.IsAbs(m.Source) || !path.IsAbs(m.Target) || path.Clean(m.Target) == "/" {
			return Invalid("mount of %q at %q: both must be absolute, and the target not the root", m.Source, m.Target)
		}
	}
	for _, t := range spec.Tmpfs {
		if !path.IsAbs(t.Target) || path.Clean(t.Target) == "/" || t.SizeBytes <= 0 {
			return Invalid("tmpfs at %q of %d bytes: an absolute path below the root and a size are needed", t.Target, t.SizeBytes)
		}
	}
	return checkAgent(spec)
}

// KernelPath reports whether a path is in /proc, /dev or /sys, where the kernel may have
// links to open files. An OCI runtime that enters a working directory there could follow a
// link to one of its own files, and leave the container (CVE-2024-21626).
func KernelPath(name string) bool {
	return name != "" && (Below(name, "/proc") || Below(name, "/dev") || Below(name, "/sys"))
}
