// Package config reads the operator's settings from a strict YAML file, environment variables
// and command-line flags. Flags override variables, and variables override the file. Unknown
// keys and invalid values are errors, and all of them are reported at once.
package config

import (
	"cmp"
	"path/filepath"
	"time"
)

// Config holds every setting of berm serve. The doc tags say what each setting is for, and its
// unit. Default returns the defaults. A secret is never read from the file: its value comes
// from the environment, or from a file that a second key names.
type Config struct {
	HTTP       HTTP      `yaml:"http"`
	EngineAPI  EngineAPI `yaml:"engine_api"`
	Logging    Logging   `yaml:"logging"`
	Tracing    Tracing   `yaml:"tracing"`
	Otel       Otel      `yaml:"otel"`
	Engine     Engine    `yaml:"engine"`
	Sandbox    Sandbox   `yaml:"sandbox"`
	Storage    Storage   `yaml:"storage"`
	Security   Security  `yaml:"security"`
	StateDir   string    `yaml:"state_dir" path:"true" doc:"directory of the database, the lock, the instance's id and the bound address; absolute; one process at a time"`
	PolicyFile string    `yaml:"policy_file" path:"true" doc:"policy file, absolute, reloaded on SIGHUP and when it changes; empty is the built-in policy"`

	file   string
	source map[string]string // where a key's value came from; a missing key has its default
}

// HTTP says where and how the sandbox API is served.
type HTTP struct {
	Listen         string        `yaml:"listen" doc:"host:port, unix:///path for a unix socket, or systemd:NAME for the socket that systemd passes under that name; without tokens only loopback and unix sockets are allowed; none turns the sandbox API off, with its probes and /metrics"`
	SocketMode     string        `yaml:"socket_mode" doc:"file mode of the unix socket, octal"`
	AllowedHosts   []string      `yaml:"allowed_hosts" doc:"further names that a Host header may carry, beside loopback's and the listen address"`
	AllowedOrigins []string      `yaml:"allowed_origins" doc:"values that an Origin header may have; none are allowed by default"`
	DrainTimeout   time.Duration `yaml:"drain_timeout" doc:"how long requests in flight may go on after SIGTERM"`
}

// Logging says what is logged to standard error.
type Logging struct {
	Level  string `yaml:"level" doc:"debug, info, warn or error; read again on SIGHUP"`
	Format string `yaml:"format" doc:"text or json"`
}

// Tracing decides which requests are traced. Traces go nowhere without Otel.Endpoint.
type Tracing struct {
	SampleRatio float64 `yaml:"sample_ratio" doc:"share of the traces that are kept, 0 to 1, where the caller didn't decide; 0 keeps none at all"`
}

// Otel says where logs, metrics and traces are sent.
type Otel struct {
	Endpoint    string `yaml:"endpoint" doc:"base URL of an OTLP/HTTP collector (http://127.0.0.1:4318); empty sends nothing"`
	Headers     string `yaml:"headers" secret:"true" doc:"headers sent along, NAME=VALUE, comma-separated"`
	HeadersFile string `yaml:"headers_file" path:"true" doc:"file with those headers, absolute"`
	ServiceName string `yaml:"service_name" doc:"service.name of all that is sent"`
	Insecure    bool   `yaml:"insecure" doc:"allow http:// to a host that isn't loopback"`
}

// Engine is the container engine that runs the sandboxes.
type Engine struct {
	Kind        string        `yaml:"kind" doc:"docker or containerd"`
	Address     string        `yaml:"address" doc:"the engine's address, such as unix:///var/run/docker.sock; empty is DOCKER_HOST or CONTAINERD_ADDRESS, else the engine's default socket"`
	CallTimeout time.Duration `yaml:"call_timeout" doc:"deadline of each call to the engine, pulls and commands excepted"`
	Instance    string        `yaml:"instance" doc:"owner id on everything Berm makes, and nothing that carries another is touched; empty makes one and keeps it in state_dir"`

	RegistryAuthFile string `yaml:"registry_auth_file" path:"true" doc:"file with the credentials of registries, absolute: the auths of a Docker config.json; read at each pull; empty pulls without any"`
	AgentDir         string `yaml:"agent_dir" doc:"the directory agents of state_dir as the engine's host sees it, absolute, for a Berm that runs in a container; empty is the same path; none turns the agent off"`

	// The following fields are for containerd only.
	Namespace     string   `yaml:"namespace" doc:"containerd only: the namespace that everything is made in; empty is berm"`
	Snapshotter   string   `yaml:"snapshotter" doc:"containerd only: what makes root file systems; empty is overlayfs"`
	CgroupParent  string   `yaml:"cgroup_parent" doc:"containerd only: the cgroup that sandboxes' own are made in, absolute below the cgroup file system; empty is /berm"`
	Netns         string   `yaml:"netns" path:"true" doc:"containerd only: path of the network namespace where bridges are made; empty is Berm's own"`
	Subnets       string   `yaml:"subnets" doc:"containerd only: IPv4 pool that each network takes a /24 from; empty is 10.213.0.0/16"`
	CNIPluginDirs []string `yaml:"cni_plugin_dirs" doc:"containerd only: directories of the CNI plug-ins; empty is /opt/cni/bin, /usr/lib/cni and /usr/libexec/cni"`
}

// Sandbox has the operator's settings for all sandboxes.
type Sandbox struct {
	Image           string            `yaml:"image" doc:"image of profiles that name none"`
	Network         string            `yaml:"network" doc:"the engine's network for sandboxes with network on; made if missing; auto is the one network that Berm's own container is in"`
	Port            int               `yaml:"port" doc:"port of the agent's service in a sandbox, shown as its endpoint; 0 is none"`
	TTL             time.Duration     `yaml:"ttl" doc:"life of a sandbox from creation or renewal, unless the request or the policy says"`
	IdleTTL         time.Duration     `yaml:"idle_ttl" doc:"life of a sandbox that nobody uses; 0 is forever"`
	CleanupInterval time.Duration     `yaml:"cleanup_interval" doc:"time between two sweeps"`
	MaxSandboxes    int               `yaml:"max_sandboxes" doc:"most sandboxes at once, over all tenants; 0 is no cap"`
	MaxCommands     int               `yaml:"max_commands" doc:"most commands running at once in one sandbox, 1 to 512"`
	MaxProcesses    int               `yaml:"max_processes" doc:"most managed processes running at once in one sandbox, 1 to 256"`
	Command         []string          `yaml:"command" doc:"main process of every sandbox; an empty list is the image's own"`
	Env             map[string]string `yaml:"env" secret:"values" doc:"environment of every sandbox; secrets belong into the policy's env.inject"`
	AdoptLegacy     bool              `yaml:"adopt_legacy" doc:"take over containers that carry the old service's labels"`
	CreateRoots     bool              `yaml:"create_roots" doc:"make chats_root, dependencies_root and lambda_tools_root if missing"`

	ChatsRoot        string `yaml:"chats_root" path:"true" doc:"absolute; holds one directory per chat, which the sandbox of that key mounts; workspaces, chats and their files need it; empty mounts none"`
	DependenciesRoot string `yaml:"dependencies_root" path:"true" doc:"absolute; mounted read-only for POST /api/v1/create; empty mounts none"`
	LambdaToolsRoot  string `yaml:"lambda_tools_root" path:"true" doc:"absolute; mounted read-only for POST /api/v1/create; empty mounts none"`

	ChatMountPath         string `yaml:"chat_mount_path" doc:"where the chat's directory is seen in the sandbox"`
	DependenciesMountPath string `yaml:"dependencies_mount_path" doc:"where dependencies_root is seen in the sandbox"`
	LambdaToolsMountPath  string `yaml:"lambda_tools_mount_path" doc:"where lambda_tools_root is seen in the sandbox"`
	VolumeMountPath       string `yaml:"volume_mount_path" doc:"where a request's volume_host_path is seen in the sandbox"`
}

// Storage has the settings of workspaces and their chats, which outlive sandboxes. They lie in
// Sandbox.ChatsRoot.
type Storage struct {
	WorkspaceQuotaMB int    `yaml:"workspace_quota_mb" doc:"most that all chats of one user's workspace may hold together, in MiB; 0 is no limit"`
	ProjectQuotas    string `yaml:"project_quotas" doc:"auto has the kernel hold quotas where the file system offers project quotas; required refuses to start where that of chats_root doesn't; off measures"`
}

// The values of Storage.ProjectQuotas.
const (
	ProjectQuotasAuto     = "auto"
	ProjectQuotasRequired = "required"
	ProjectQuotasOff      = "off"
)

// Security has the tokens of callers, and the key of signed URLs.
type Security struct {
	TokenHeader string `yaml:"token_header" doc:"header that carries a token, beside Authorization: Bearer"`
	Tokens      string `yaml:"tokens" secret:"true" doc:"the tokens: one bare token, or the YAML of token_file"`
	TokenFile   string `yaml:"token_file" path:"true" doc:"file with the tokens, absolute"`

	SigningKey     string `yaml:"signing_key" secret:"true" doc:"key of signed URLs, at least 32 characters; without one a random key is made at each start, and what it signed ends with the process"`
	SigningKeyFile string `yaml:"signing_key_file" path:"true" doc:"file with that key, absolute"`
}

// SpoolDir returns EngineAPI.SpoolDir, or its default below StateDir.
func (c *Config) SpoolDir() string {
	return cmp.Or(c.EngineAPI.SpoolDir, filepath.Join(c.StateDir, "spool"))
}

// Default returns the default configuration.
func Default() *Config {
	return &Config{
		HTTP:      HTTP{Listen: "127.0.0.1:7070", SocketMode: "0660", DrainTimeout: 30 * time.Second},
		EngineAPI: EngineAPI{SpoolMB: 2 << 10},
		Logging:   Logging{Level: "info", Format: "text"},
		Tracing:   Tracing{SampleRatio: 1},
		Otel:      Otel{ServiceName: "berm"},
		Engine:    Engine{Kind: "docker", CallTimeout: 30 * time.Second},
		Security:  Security{TokenHeader: "X-API-Token"},
		Sandbox: Sandbox{
			Image:                 "python:3.11-slim",
			Network:               "berm-sandbox",
			TTL:                   time.Hour,
			CleanupInterval:       30 * time.Second,
			MaxCommands:           64,
			MaxProcesses:          16,
			Command:               []string{"sleep", "infinity"},
			ChatMountPath:         "/chat",
			DependenciesMountPath: "/dependencies",
			LambdaToolsMountPath:  "/lambda-tools",
			VolumeMountPath:       "/volume",
		},
		Storage:  Storage{WorkspaceQuotaMB: 10 << 10, ProjectQuotas: ProjectQuotasAuto},
		StateDir: "/var/lib/berm",
	}
}
