package policy

import (
	"regexp"
	"slices"
)

// BuildKit is what a profile allows of builds by the engine's BuildKit. Classic builds are
// EngineAPI.Build's.
type BuildKit struct {
	Enabled      bool     `yaml:"enabled" json:"enabled"`             // false: DOCKER_BUILDKIT=0 is needed
	Network      string   `yaml:"network" json:"network"`             // of RUN: "none", or "bridge": the engine's default network
	Outputs      []string `yaml:"outputs" json:"outputs"`             // "image", "local", "tar", "docker", "oci"
	Secrets      bool     `yaml:"secrets" json:"secrets"`             // RUN --mount=type=secret
	SSH          bool     `yaml:"ssh" json:"ssh"`                     // RUN --mount=type=ssh
	Provenance   string   `yaml:"provenance" json:"provenance"`       // the most that an image tells: "off", "min", "max"
	Cache        string   `yaml:"cache" json:"cache"`                 // "tenant", "off"
	CgroupParent string   `yaml:"cgroup_parent" json:"cgroup_parent"` // whose limits all RUN of builds share; empty: the engine limits each
}

var (
	buildOutputs = []string{"image", "local", "tar", "docker", "oci"}
	cgroupPath   = regexp.MustCompile(`^/?[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)*$`)
)

func builtinBuildKit() BuildKit {
	return BuildKit{Network: "none", Outputs: slices.Clone(buildOutputs), Secrets: true, SSH: true, Provenance: "min", Cache: "tenant"}
}

func (l *loader) checkBuildKit(at string, b *BuildKit) {
	l.word(at+".network", b.Network, "none", "bridge")
	l.word(at+".provenance", b.Provenance, wordOff, "min", "max")
	l.word(at+".cache", b.Cache, "tenant", wordOff)
	if b.CgroupParent != "" && !cgroupPath.MatchString(b.CgroupParent) && l.sound[at+".cgroup_parent"] {
		l.problem(at+".cgroup_parent", "%q is not a path of a cgroup, as /builds, or a slice, as builds.slice", b.CgroupParent)
	}
}
