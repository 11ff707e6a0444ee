package runtime

import "time"

// Survey is what an engine tells of how it is set up, and of what is beside it on its
// host. What an engine doesn't tell is the zero value.
type Survey struct {
	Info         Info
	Storage      string   // what makes root file systems: "overlay2", "overlayfs"
	CgroupDriver string   // "cgroupfs", "systemd"
	Classes      []string // what a Spec.RuntimeClass can be, beside empty; sorted
	Security     []string // such as "seccomp", "apparmor", "rootless"; sorted
	LiveRestore  bool     // containers outlive a restart of the engine
	// Unlimited are limits of a Spec that aren't held: "memory", "cpu", "pids", "swap".
	Unlimited []string
	// Missing is what no container can be made without, and isn't there, in words;
	// MissingForNetworks what none with a network can.
	Missing, MissingForNetworks []string
	// NoUserNS is why no container can have a Spec.UserNS, in words; empty if one can.
	NoUserNS string
	// Skew is how far the engine's clock is ahead of this process's; 0 for up to a second.
	Skew time.Duration
	// Holders are running containers that have the engine's socket mounted, or a
	// directory that it is in.
	Holders []Holder
}

// Holder is a container that can have the engine do whatever it likes.
type Holder struct{ ID, Name string }
