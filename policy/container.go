package policy

import "time"

// ContainerRequest is a client's request for a container by the engine's API, in a form
// without that API's spellings and defaults. Fields that the client left out are zero. It has
// every field that could widen what the container may do. It doesn't have others, such as the
// command, the working directory and the health check.
//
// A Field has the API's name of the field that a value came from, such as
// "HostConfig.Binds[0]". Reasons name it.
type ContainerRequest struct {
	Profile string // empty is "default"

	Image   string            // the reference that is judged
	Trusted bool              // the image is the caller's own: built or committed by it
	Env     map[string]string // as given, without the image's own
	User    string            // as given; empty is the image's own
	Groups  []string          // HostConfig.GroupAdd
	TTL     *time.Duration    // nil is the profile's

	Mounts   []ContainerMount
	Networks []ContainerNetwork // all that it joins; empty is the same as one of mode "default"
	Ports    []ContainerPort

	CapAdd, CapDrop []string
	SecurityOpt     []string
	Privileged      bool
	Namespaces      []ContainerNamespace // pid, ipc, uts, cgroup, userns as far as given
	PidOf           *ContainerPeer       // whose pid namespace it joins; nil is none, or one of Namespaces
	Devices         []string             // of Devices, DeviceRequests and DeviceCgroupRules, one text each
	Sysctls         map[string]string
	Ulimits         []ContainerUlimit
	Runtime         string // empty is the engine's default
	LogDriver       string // empty is the engine's default
	LogOptions      map[string]string
	Restart         string   // "", "no", "on-failure", "always", "unless-stopped"
	DNS             []string // servers
	DNSOptions      []string
	DNSSearch       []string
	ExtraHosts      []string // as "name:address"

	CPUs           float64 // 0 is not given
	MemoryBytes    int64   // 0 is not given
	SwapBytes      int64   // memory and swap together; 0 is not given, -1 unlimited
	PidsLimit      *int64  // nil is not given, as is 0 of a new container; else 0 and below are unlimited
	ShmBytes       int64   // 0 is not given
	OOMScoreAdj    int
	OOMKillDisable bool
	ReadOnlyRootfs bool

	// Other has the fields that were set but that no policy allows, such as "cgroup parent"
	// and "storage options".
	Other []OtherField
}

// OtherField is a field of the engine's API that no policy allows to be set.
type OtherField struct{ Field, Value string }

// ContainerMount is a mount that a container asks for.
type ContainerMount struct {
	Field     string
	Type      string // "bind", "volume" or "tmpfs"
	Source    string // a host path, or a volume's name; empty for tmpfs and for an anonymous volume
	Own       bool   // of a volume: it is the caller's, or isn't there yet
	Target    string // in the container
	ReadOnly  bool
	Create    bool  `json:"-"` // of a bind: a source that is missing is to be made
	OnlyDir   bool  `json:"-"` // of a bind: no file will do
	Socket    bool  `json:"-"` // of a bind: the caller reached Berm at Source, which stands for the engine's socket
	SizeBytes int64 // of tmpfs; 0 is not given
	// Options that no policy allows, as "propagation=rshared", by their names in the API.
	Options []string
}

// The modes of a ContainerNetwork.
const (
	NetDefault   = "default"   // nothing was said, or "bridge"
	NetNone      = "none"      // no network
	NetHost      = "host"      // the host's
	NetContainer = "container" // another container's
	NetNamed     = "named"     // the network ID
)

// ContainerNetwork is a network that a container asks to join.
type ContainerNetwork struct {
	Field string
	Asked string // as the client named it
	Mode  string
	ID    string // of the network (named) or the container, as the engine resolved Asked; empty if there is none
	Name  string // the engine's name of the network
	Own   bool   // the network, or the container, is the caller's
	// Internal says that the network is known to have no way out of the host. Own ones
	// that have one are refused where the profile allows none.
	Internal bool
	// Options that no policy allows, by their names in the API.
	Options []string
}

// ContainerPort is a port that is to be published on the host.
type ContainerPort struct {
	Field    string
	HostIP   string // empty is every address
	HostPort int    // 0 is any that is free
	HostEnd  int    `json:",omitempty"` // if not 0, any from HostPort to it that is free
	Port     int    // in the container
	Protocol string // "tcp", "udp" or "sctp"
}

// ContainerNamespace says whose namespace a container wants.
type ContainerNamespace struct {
	Field string
	Kind  string // "pid", "ipc", "uts", "cgroup" or "userns"
	Mode  string // as given: "host", "container:ID", "private", "shareable", "none"
}

// ContainerPeer is a container whose processes another one asks to see.
type ContainerPeer struct {
	Asked   string         // as the client named it
	ID      string         // as the engine resolved Asked
	Allowed *ContainerSpec // what it was allowed; nil unless it is the caller's and confined
}

// ContainerUlimit is a resource limit of a container's processes.
type ContainerUlimit struct {
	Name       string
	Soft, Hard int64
}

// ContainerSpec is a judged container of the engine's API: what it gets. Fields that it lacks
// keep the engine's defaults, or can't widen what the container may do.
type ContainerSpec struct {
	Profile string            `json:"profile"`
	Image   string            `json:"image"` // normalised, with the digest where the policy pins one
	Env     map[string]string `json:"-"`     // the request's, filtered and pinned; what is injected comes from InjectedEnv
	User    string            `json:"user,omitempty"`
	Groups  []string          `json:"groups,omitempty"`

	TTL         time.Duration `json:"ttl"`
	MaxLifetime time.Duration `json:"max_lifetime"`

	Binds   []Mount          `json:"binds,omitempty"`   // MountPath is the target
	Volumes []ContainerMount `json:"volumes,omitempty"` // of type volume
	Tmpfs   []ContainerMount `json:"tmpfs,omitempty"`   // with their size

	Network  string             `json:"network"` // see SpecNetworkNone
	Networks []ContainerNetwork `json:"networks,omitempty"`
	Ports    []ContainerPort    `json:"ports,omitempty"`

	IpcNone      bool              `json:"ipc_none,omitempty"` // no /dev/shm
	PidOf        string            `json:"pid_of,omitempty"`   // ID of the container whose processes it sees; empty is its own
	Capabilities []string          `json:"capabilities"`       // all that it has: CAP_…, sorted
	Sysctls      map[string]string `json:"sysctls,omitempty"`
	Ulimits      []ContainerUlimit `json:"ulimits,omitempty"`
	Runtime      string            `json:"runtime,omitempty"` // empty is the engine's default
	LogDriver    string            `json:"log_driver"`
	LogOptions   map[string]string `json:"log_options,omitempty"`
	Restart      string            `json:"restart"`
	DNS          []string          `json:"dns,omitempty"`
	DNSOptions   []string          `json:"dns_options,omitempty"`
	DNSSearch    []string          `json:"dns_search,omitempty"`
	ExtraHosts   []string          `json:"extra_hosts,omitempty"`

	CPUs           float64 `json:"cpus"`
	MemoryBytes    int64   `json:"memory_bytes"`
	SwapBytes      int64   `json:"swap_bytes"` // memory and swap together; never unlimited
	PidsLimit      int64   `json:"pids_limit"`
	ShmBytes       int64   `json:"shm_bytes"`
	OOMScoreAdj    int     `json:"oom_score_adj"`
	ReadOnlyRootfs bool    `json:"read_only_rootfs"`
}

// The values of ContainerSpec.Network.
const (
	SpecNetworkNone      = "none"
	SpecNetworkNetworks  = "networks"  // those of Networks; one without an ID goes by its name, and may have to be made
	SpecNetworkContainer = "container" // that of the container whose ID is in Networks[0]
)

// EngineAPI is what a profile allows clients of the engine's API, besides the policy's rules for
// all containers.
type EngineAPI struct {
	Capabilities []string `yaml:"capabilities" json:"capabilities"`     // a container may have these; sorted, never nil. Those of cap_add are among them
	Volumes      string   `yaml:"volumes" json:"volumes"`               // "own": it may make and use volumes of its own; "off": none
	Networks     string   `yaml:"networks" json:"networks"`             // "own": it may make networks; "internal": only such without a way out; "off": none
	Ports        string   `yaml:"ports" json:"ports"`                   // "off", "loopback": on the host's loopback address; "any"
	PortRange    string   `yaml:"port_range" json:"port_range"`         // "1024-65535": host ports that may be asked for
	LogDrivers   []string `yaml:"log_drivers" json:"log_drivers"`       // the first is the default
	LogMaxMB     int64    `yaml:"log_max_mb" json:"log_max_mb"`         // the most that one container's log may hold on the host
	Restart      []string `yaml:"restart" json:"restart"`               // restart policies that may be asked for
	Runtimes     []string `yaml:"runtimes" json:"runtimes"`             // beside the profile's runtime_class
	Sysctls      []string `yaml:"sysctls" json:"sysctls"`               // names of namespaced ones that may be set
	Users        string   `yaml:"users" json:"users"`                   // "any", or "non_root": a numeric user other than 0
	DNS          string   `yaml:"dns" json:"dns"`                       // "on": servers, options and extra hosts may be given; "off"
	TmpfsMB      int64    `yaml:"tmpfs_mb" json:"tmpfs_mb"`             // the most that one tmpfs, and /dev/shm, may hold
	MaxUlimit    int64    `yaml:"max_ulimit" json:"max_ulimit"`         // of open files and processes
	Pull         string   `yaml:"pull" json:"pull"`                     // "on", "off"
	Build        string   `yaml:"build" json:"build"`                   // "on", "off"
	BuildKit     BuildKit `yaml:"buildkit" json:"buildkit"`             // builds by BuildKit, beside classic ones; needs build
	BuildAddURL  []string `yaml:"build_add_url" json:"build_add_url"`   // prefixes of addresses that the engine may fetch for ADD
	Commit       string   `yaml:"commit" json:"commit"`                 // "on", "off": images from containers
	Tags         []string `yaml:"tags" json:"tags"`                     // patterns of images.allow: names that the caller may give to images
	Load         []string `yaml:"load" json:"load"`                     // patterns of images.allow: those of tags that an archive may give to its images; none: no archives
	Push         []string `yaml:"push" json:"push"`                     // patterns of images.allow: names by which images may be pushed
	Login        []string `yaml:"login" json:"login"`                   // registries, "registry.example.com:5000", that credentials may be tried at
	Archive      string   `yaml:"archive" json:"archive"`               // "on", "off": files in and out of containers, and export
	Exec         string   `yaml:"exec" json:"exec"`                     // "on", "off"
	DockerSocket string   `yaml:"docker_socket" json:"docker_socket"`   // "on": a bind of the engine's socket is Berm's own; "off"
	Subnets      []string `yaml:"subnets" json:"subnets"`               // pools: its networks may have subnets of these, as 10.80.0.0/16
	HostGateway  string   `yaml:"host_gateway" json:"host_gateway"`     // "on": an extra host may have the address host-gateway; "off"
	MaxMemlockMB int64    `yaml:"max_memlock_mb" json:"max_memlock_mb"` // of ulimit memlock; 0 is none
	RedactEnv    []string `yaml:"redact_env" json:"redact_env"`         // globs: variables whose values aren't shown; injected ones never are
	// ReadOnlyRootfs has the profile's read_only_rootfs count where a caller asks for none.
	ReadOnlyRootfs bool  `yaml:"read_only_rootfs" json:"read_only_rootfs"`
	ShowLabels     bool  `yaml:"show_labels" json:"show_labels"` // callers see Berm's labels
	MaxObjects     int64 `yaml:"max_objects" json:"max_objects"` // containers, networks and volumes of one caller, of each kind; 0 is no cap
	MaxExecs       int64 `yaml:"max_execs" json:"max_execs"`     // of one tenant, over all its containers; 0 is no cap
}
