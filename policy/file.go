package policy

import (
	"reflect"
	"time"

	"go.yaml.in/yaml/v3"
)

// file is the policy file. Nil fields are left out and take the built-in value.
type file struct {
	Version   int64                  `yaml:"version"`
	Profiles  map[string]overlay     `yaml:"profiles"`
	Mounts    mountsFile             `yaml:"mounts"`
	Networks  map[string]networkFile `yaml:"networks"`
	Env       envFile                `yaml:"env"`
	Images    imagesFile             `yaml:"images"`
	Resources resourcesFile          `yaml:"resources"`
	TTL       ttlFile                `yaml:"ttl"`
}

// overlay is what one profile says over the one that it extends.
type overlay struct {
	Extends          string         `yaml:"extends,omitempty"`
	Image            *string        `yaml:"image"`
	Network          *string        `yaml:"network"`
	HostPathMode     *string        `yaml:"host_path_mode"`
	MountPath        *string        `yaml:"mount_path"`
	Timeout          *time.Duration `yaml:"timeout"`
	MaxTimeout       *time.Duration `yaml:"max_timeout"`
	CPUs             *float64       `yaml:"cpus"`
	MaxCPUs          *float64       `yaml:"max_cpus"`
	MemoryMB         *int64         `yaml:"memory_mb"`
	MaxMemoryMB      *int64         `yaml:"max_memory_mb"`
	PidsLimit        *int64         `yaml:"pids_limit"`
	MaxPidsLimit     *int64         `yaml:"max_pids_limit"`
	ReadOnlyRootfs   *bool          `yaml:"read_only_rootfs"`
	WorkspaceQuotaMB *int64         `yaml:"workspace_quota_mb"`
	TTL              *time.Duration `yaml:"ttl"`
	IdleTTL          *time.Duration `yaml:"idle_ttl"`
	User             *string        `yaml:"user"`
	CapAdd           []string       `yaml:"cap_add"`
	RuntimeClass     *string        `yaml:"runtime_class"`
	Agent            *string        `yaml:"agent"`
	Userns           *string        `yaml:"userns"`
	EngineAPI        *engineAPIFile `yaml:"engine_api"`
	Locked           []string       `yaml:"locked"`
}

type mountsFile struct {
	AllowedRoots     []string      `yaml:"allowed_roots"`
	SharedRoot       string        `yaml:"shared_root"`
	DefaultWorkspace string        `yaml:"default_workspace"`
	PathMap          []pathMapping `yaml:"path_map"`
	Hold             string        `yaml:"hold"`
	TrustedRoots     []string      `yaml:"trusted_roots"`
	Owner            string        `yaml:"owner"`
}

type pathMapping struct {
	Engine string `yaml:"engine"`
	Local  string `yaml:"local"`
}

type networkFile struct {
	EngineNetwork string `yaml:"engine_network"`
	Internal      bool   `yaml:"internal"`
	Isolated      *bool  `yaml:"isolated"`
	External      bool   `yaml:"external"`
}

type envFile struct {
	Allow  []string                `yaml:"allow"`
	Deny   []string                `yaml:"deny"`
	Pin    map[string]string       `yaml:"pin"`
	Inject map[string]SecretSource `yaml:"inject"`
}

// SecretSource is where a secret lies: exactly one of the two is given.
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
	Default     *time.Duration `yaml:"default"`
	IdleDefault *time.Duration `yaml:"idle_default"`
	MaxLifetime *time.Duration `yaml:"max_lifetime"`
}

// give sets the fields of the struct that out points to which a struct of the file gives,
// by their names: pointers and lists that aren't nil.
func give(out, file any) {
	to, from := reflect.ValueOf(out).Elem(), reflect.ValueOf(file)
	for i := range from.NumField() {
		v, field := from.Field(i), to.FieldByName(from.Type().Field(i).Name)
		switch {
		case !field.IsValid() || v.IsNil():
		case v.Kind() == reflect.Slice:
			field.Set(reflect.AppendSlice(reflect.MakeSlice(v.Type(), 0, v.Len()), v))
		case field.Kind() == reflect.Struct:
			give(field.Addr().Interface(), v.Elem().Interface())
		default:
			field.Set(v.Elem())
		}
	}
}

// take is the opposite of give: it has a struct of the file give all of its fields.
func take(file, in any) {
	to, from := reflect.ValueOf(file).Elem(), reflect.ValueOf(in)
	for i := range to.NumField() {
		v, field := from.FieldByName(to.Type().Field(i).Name), to.Field(i)
		switch {
		case !v.IsValid():
		case v.Kind() == reflect.Slice:
			field.Set(v)
		case v.Kind() == reflect.Struct:
			field.Set(reflect.New(field.Type().Elem()))
			take(field.Interface(), v.Interface())
		default:
			field.Set(reflect.New(v.Type()))
			field.Elem().Set(v)
		}
	}
}

// YAML gives the policy in force, every default filled in, as a policy file that
// parses to the same policy. Of secrets it names the source only.
func (p *Policy) YAML() ([]byte, error) {
	f := p.file
	f.Profiles = map[string]overlay{}
	for name, pr := range p.profiles {
		f.Profiles[name] = pr.overlay()
	}
	return yaml.Marshal(f)
}
