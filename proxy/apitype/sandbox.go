// Package apitype holds the JSON shapes of Berm's REST API. The server and the
// client share them; they depend on the standard library only.
package apitype

import "time"

// SandboxRequest asks for a sandbox. A field that is left out or null takes the profile's
// value.
type SandboxRequest struct {
	Profile          *string           `json:"profile,omitempty"`
	Image            *string           `json:"image,omitempty"`
	Network          *string           `json:"network,omitempty"`        // "off", "on", or a network's name
	HostPath         *string           `json:"host_path,omitempty"`      // absolute
	HostPathMode     *string           `json:"host_path_mode,omitempty"` // "none", "ro", "rw"
	MountPath        *string           `json:"mount_path,omitempty"`
	ExtraMounts      []MountRequest    `json:"extra_mounts,omitempty"`
	CPUs             *float64          `json:"cpus,omitempty"` // cores
	MemoryMB         *int64            `json:"memory_mb,omitempty"`
	PidsLimit        *int64            `json:"pids_limit,omitempty"`
	ReadOnlyRootfs   *bool             `json:"read_only_rootfs,omitempty"`
	WorkspaceQuotaMB *int64            `json:"workspace_quota_mb,omitempty"` // 0 is unlimited
	Env              map[string]string `json:"env,omitempty"`
	TTL              *Duration         `json:"ttl,omitempty"`
	IdleTTL          *Duration         `json:"idle_ttl,omitempty"`
	Metadata         map[string]string `json:"metadata,omitempty"`
	AgentID          *string           `json:"agent_id,omitempty"`
	VolumeHostPath   *string           `json:"volume_host_path,omitempty"` // absolute
}

// MountRequest asks for one further directory.
type MountRequest struct {
	HostPath  string `json:"host_path"`
	MountPath string `json:"mount_path"`
	Mode      string `json:"mode,omitempty"` // "ro" or "rw"; empty is "ro"
}

// RenewRequest moves a sandbox's expiry.
type RenewRequest struct {
	TTL *Duration `json:"ttl,omitempty"` // from now; nil is the sandbox's own TTL
}

// Sandbox is a sandbox as the API shows it. All times are UTC.
type Sandbox struct {
	Key         string            `json:"key"`
	Tenant      string            `json:"tenant"`
	SessionID   string            `json:"session_id"`
	ContainerID string            `json:"container_id"` // empty until there is a container
	Status      string            `json:"status"`
	Error       string            `json:"error,omitempty"` // why it failed
	Spec        Spec              `json:"spec"`
	Overridden  []Override        `json:"overridden"`
	Metadata    map[string]string `json:"metadata"`

	AgentID        string `json:"agent_id,omitempty"`
	VolumeHostPath string `json:"volume_host_path,omitempty"`

	Endpoint    *Endpoint   `json:"endpoint"` // nil without an address
	Enforcement Enforcement `json:"enforcement"`

	CreatedAt     time.Time  `json:"created_at"`
	ExpiresAt     time.Time  `json:"expires_at"`
	IdleExpiresAt *time.Time `json:"idle_expires_at"` // nil: never idles out
	Deadline      time.Time  `json:"deadline"`
	LastUsedAt    time.Time  `json:"last_used_at"`

	Result    string `json:"result,omitempty"`    // "created", "reused" or "replaced", in the answer to a create
	Recreated bool   `json:"recreated,omitempty"` // the create replaced a container that had died
	Pull      *Pull  `json:"pull,omitempty"`      // while the image is being pulled
}

// Spec is a sandbox's effective configuration. It shows only the names of environment
// variables, since the values may be secrets.
type Spec struct {
	Profile          string   `json:"profile"`
	Image            string   `json:"image"`
	Network          string   `json:"network"`
	HostPath         string   `json:"host_path,omitempty"`
	HostPathMode     string   `json:"host_path_mode"`
	MountPath        string   `json:"mount_path"`
	ExtraMounts      []Mount  `json:"extra_mounts"`
	CPUs             float64  `json:"cpus"`
	MemoryMB         int64    `json:"memory_mb"`
	PidsLimit        int64    `json:"pids_limit"`
	ReadOnlyRootfs   bool     `json:"read_only_rootfs"`
	WorkspaceQuotaMB int64    `json:"workspace_quota_mb"`
	TmpfsMB          int64    `json:"tmpfs_mb"`
	EnvNames         []string `json:"env_names"` // sorted
	User             string   `json:"user,omitempty"`
	CapAdd           []string `json:"cap_add,omitempty"`
	RuntimeClass     string   `json:"runtime_class,omitempty"`
	Agent            string   `json:"agent,omitempty"`  // "on" or "off"; empty if an older Berm without agents made it
	Userns           string   `json:"userns,omitempty"` // "auto" if the sandbox has its own range of the host's IDs
	TTL              Duration `json:"ttl"`
	IdleTTL          Duration `json:"idle_ttl"` // 0: never idles out
	MaxLifetime      Duration `json:"max_lifetime"`
}

// Mount is a mounted directory.
type Mount struct {
	HostPath  string `json:"host_path"`
	MountPath string `json:"mount_path"`
	Mode      string `json:"mode"` // "ro" or "rw"
}

// Override is a request's value that the policy replaced.
type Override struct {
	Field     string `json:"field"`
	Requested any    `json:"requested"`
	Effective any    `json:"effective"`
	Rule      string `json:"rule"`
}

// Endpoint is the address of a service in a sandbox.
type Endpoint struct {
	IP   string `json:"ip"`
	Port int    `json:"port"` // 0 if none is configured
}

// Enforcement says how strictly mounts and the quota are enforced.
type Enforcement struct {
	Mounts         string `json:"mounts,omitempty"`          // "held" or "trusted"; empty without mounts
	WorkspaceQuota string `json:"workspace_quota,omitempty"` // "hard" or "soft"; empty without a quota
}

// Pull is the progress of an image pull.
type Pull struct {
	Status       string `json:"status"`
	CurrentBytes int64  `json:"current_bytes"`
	TotalBytes   int64  `json:"total_bytes"` // grows as sizes become known
}

// SandboxList is one page of sandboxes, in the order of their keys.
type SandboxList struct {
	Sandboxes  []Sandbox `json:"sandboxes"`
	NextCursor string    `json:"next_cursor,omitempty"` // empty on the last page
}

// DeleteResult is the answer to a delete, whether or not there was a sandbox.
type DeleteResult struct {
	ChatID      string  `json:"chat_id"` // the sandbox's key
	Result      string  `json:"result"`  // "deleted" or "not_found"
	SessionID   *string `json:"session_id"`
	ContainerID *string `json:"container_id"`
}

// Stats is a sandbox's use of resources at one moment.
type Stats struct {
	Time             time.Time `json:"time"`
	CPUSeconds       float64   `json:"cpu_seconds"` // since the container started, over all cores
	MemoryBytes      int64     `json:"memory_bytes"`
	MemoryLimitBytes int64     `json:"memory_limit_bytes"`
	Pids             int64     `json:"pids"`
	RxBytes          int64     `json:"rx_bytes"`
	TxBytes          int64     `json:"tx_bytes"`
}
