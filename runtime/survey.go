package runtime

import "time"

// Survey is what an engine reports of its configuration and its host. Fields that an engine
// doesn't report are zero.
type Survey struct {
	Info         Info
	Storage      string   // what makes root file systems: "overlay2", "overlayfs"
	CgroupDriver string   // "cgroupfs", "systemd"
	Classes      []string // what a Spec.RuntimeClass can be, beside empty; sorted
	Security     []string // such as "seccomp", "apparmor", "rootless"; sorted
	LiveRestore  bool     // containers outlive a restart of the engine
	// Unlimited are limits of a Spec that aren't held: "memory", "cpu", "pids", "swap".
	Unlimited []string
	// Missing says, in words, what the engine needs for every container and doesn't have.
	// MissingForNetworks says what it lacks for containers with a network.
	Missing, MissingForNetworks []string
	// NoUserNS is why no container can have a Spec.UserNS, in words; empty if one can.
	NoUserNS string
	// Skew is how far the engine's clock is ahead of this process's; 0 for up to a second.
	Skew time.Duration
	// Holders are running containers that have the engine's socket mounted, or a
	// directory that it is in.
	Holders []Holder
}

// Holder is a container that controls the engine.
type Holder struct{ ID, Name string }
