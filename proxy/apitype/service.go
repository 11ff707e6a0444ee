package apitype

import "time"

// Problem is an RFC 9457 problem, the body of every error.
type Problem struct {
	Type        string       `json:"type"`
	Title       string       `json:"title"`
	Status      int          `json:"status"`
	Detail      string       `json:"detail"`
	Instance    string       `json:"instance"` // the request's path; of a signed URL, what is before its signature
	Code        string       `json:"code"`     // stable, for programs
	RequestID   string       `json:"request_id"`
	Differences []Difference `json:"differences,omitempty"` // with code sandbox_conflict
	Reasons     []Reason     `json:"reasons,omitempty"`     // with codes policy_denied and validation
	Result      *ExecResult  `json:"result,omitempty"`      // with code quota_exceeded, if the command ran
	FirstSeq    *int64       `json:"first_seq,omitempty"`   // with code output_gone, if known: output after it is kept
}

// Difference is a field in which an existing sandbox differs from a request.
type Difference struct {
	Field     string `json:"field"`
	Current   any    `json:"current"`
	Requested any    `json:"requested"`
}

// Reason is why a field of a request was refused.
type Reason struct {
	Rule    string `json:"rule"`
	Field   string `json:"field"`
	Value   string `json:"value"`
	Allowed string `json:"allowed"`
	Message string `json:"message"`
}

// Status is the state of the service. Counts are those of the caller's tenant.
type Status struct {
	Version          string   `json:"version"`
	Tenant           string   `json:"tenant"`
	Backend          Backend  `json:"backend"`
	ActiveSandboxes  int      `json:"active_sandboxes"`
	MaxSandboxes     int      `json:"max_sandboxes"` // the token's; 0 sets no limit
	RunningProcesses int      `json:"running_processes"`
	Profile          string   `json:"profile"`  // of requests that name none
	Limits           Limits   `json:"limits"`   // that profile's
	Profiles         []string `json:"profiles"` // sorted
	RecentErrors     int      `json:"recent_errors"`
}

// Backend is the container engine.
type Backend struct {
	Name      string `json:"name"`
	Available bool   `json:"available"`
	Reason    string `json:"reason,omitempty"` // why it isn't available
	Version   string `json:"version"`
}

// Limits are a profile's defaults and maxima.
type Limits struct {
	CPUs         float64  `json:"cpus"`
	MaxCPUs      float64  `json:"max_cpus"`
	MemoryMB     int64    `json:"memory_mb"`
	MaxMemoryMB  int64    `json:"max_memory_mb"`
	PidsLimit    int64    `json:"pids_limit"`
	MaxPidsLimit int64    `json:"max_pids_limit"`
	Timeout      Duration `json:"timeout"`
	MaxTimeout   Duration `json:"max_timeout"`
	TTL          Duration `json:"ttl"`
	IdleTTL      Duration `json:"idle_ttl"` // 0: never idles out
}

// ErrorList is the tenant's recent errors, newest first.
type ErrorList struct {
	Errors []ErrorEntry `json:"errors"`
}

// ErrorEntry is one recent error.
type ErrorEntry struct {
	Time      time.Time `json:"time"`
	Type      string    `json:"type"` // the problem's code
	Status    int       `json:"status"`
	Message   string    `json:"message"`
	Route     string    `json:"route"`
	Key       string    `json:"key,omitempty"`
	RequestID string    `json:"request_id"`
}

// Health is the answer of /healthz, /readyz and /api/v1/health.
type Health struct {
	Status  string `json:"status"`
	Version string `json:"version"`
}

// LegacyCreateRequest is the body of POST /api/v1/create.
type LegacyCreateRequest struct {
	ChatID         string `json:"chat_id"` // UUID
	AgentID        string `json:"agent_id"`
	VolumeHostPath string `json:"volume_host_path"`
}

// LegacySandbox is the answer of POST /api/v1/create.
type LegacySandbox struct {
	SessionID      string    `json:"session_id"`
	ChatID         string    `json:"chat_id"`
	AgentID        string    `json:"agent_id"`
	VolumeHostPath string    `json:"volume_host_path"`
	ContainerID    string    `json:"container_id"`
	Endpoint       *Endpoint `json:"endpoint"`
	Status         string    `json:"status"`
	ExpiresAt      time.Time `json:"expires_at"`
}

// LegacyError is the body of an error of POST /api/v1/create.
type LegacyError struct {
	Detail string `json:"detail"`
}
