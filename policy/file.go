package policy

import (
	"time"

	"go.yaml.in/yaml/v3"
)

// file is the policy file. Nil fields are left out and take the built-in value.
type file struct {
	Version   int64                  `yaml:"version"`
	Profiles  map[string]fileProfile `yaml:"profiles"`
	Mounts    mountsFile             `yaml:"mounts"`
	Networks  map[string]NetworkRule `yaml:"networks"`
	Env       envFile                `yaml:"env"`
	Images    imagesFile             `yaml:"images"`
	Resources resourcesFile          `yaml:"resources"`
	TTL       ttlFile                `yaml:"ttl"`
}

// fileProfile is a profile as the file has it: what it leaves out is zero.
type fileProfile struct {
	Extends string `yaml:"extends,omitempty"`
	Profile `yaml:",inline"`
}

type mountsFile struct {
	AllowedRoots     []string      `yaml:"allowed_roots"`
	SharedRoot       string        `yaml:"shared_root"`
	DefaultWorkspace string        `yaml:"default_workspace"`
	PathMap          []pathMapping `yaml:"path_map"`
	Hold             string        `yaml:"hold"`
	TrustedRoots     []string      `yaml:"trusted_roots"`
	Owner            string        `yaml:"owner"`
	Missing          string        `yaml:"missing"`
}

type pathMapping struct {
	Engine string `yaml:"engine"`
	Local  string `yaml:"local"`
}

type envFile struct {
	Allow  []string                `yaml:"allow"`
	Deny   []string                `yaml:"deny"`
	Pin    map[string]string       `yaml:"pin"`
	Inject map[string]SecretSource `yaml:"inject"`
}

// SecretSource names the place of a secret. Exactly one field is set.
type SecretSource struct {
	File string `yaml:"file,omitempty"` // absolute path
	Env  string `yaml:"env,omitempty"`  // name of an environment variable of this process
}

type imagesFile struct {
	Allow         []string          `yaml:"allow"`
	Pins          map[string]string `yaml:"pins"`
	RequireDigest bool              `yaml:"require_digest"`
	Pull          string            `yaml:"pull"`
}

type resourcesFile struct {
	OverMax string `yaml:"over_max"`
}

type ttlFile struct {
	Default     time.Duration `yaml:"default"`
	IdleDefault time.Duration `yaml:"idle_default"` // 0 is never
	MaxLifetime time.Duration `yaml:"max_lifetime"`
}

// YAML returns the policy in force with all defaults, as a policy file that parses to the same
// policy. It names only the sources of secrets.
func (p *Policy) YAML() ([]byte, error) {
	f := p.file
	f.Profiles = map[string]fileProfile{}
	for name, pr := range p.profiles {
		f.Profiles[name] = fileProfile{Profile: pr}
	}
	return yaml.Marshal(f)
}
