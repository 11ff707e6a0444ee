// Package policy judges requests for containers. It takes a description that is independent
// of any API, and returns a verdict with its reasons. It knows no engine, no HTTP and no
// clock, and does I/O only through the functions in Options.
package policy

import (
	"fmt"
	"strings"
	"time"
)

// Request is what a caller asks for. Nil and empty fields take the profile's value.
type Request struct {
	Profile          string // empty is "default"
	Image            *string
	Network          *string // "off", "on", or the name of one of the policy's networks
	HostPath         *string // "" is the default workspace, if there is one
	HostPathMode     *string // "none", "ro", "rw"
	MountPath        *string
	ExtraMounts      []MountRequest
	CPUs             *float64
	MemoryMB         *int64
	PidsLimit        *int64
	ReadOnlyRootfs   *bool
	WorkspaceQuotaMB *int64
	Env              map[string]string
	TTL              *time.Duration
	IdleTTL          *time.Duration
}

// MountRequest is one further directory that a caller asks for.
type MountRequest struct {
	HostPath  string
	MountPath string
	Mode      string // "ro" or "rw"; empty is "ro"
}

// Spec is a judged container: what a sandbox gets. Two specs mean the same sandbox if Diff
// finds no difference. Diff compares the fields down to WorkspaceQuotaMB.
type Spec struct {
	Profile          string  `json:"profile"`
	Image            string  `json:"image"` // normalised, with the digest where the policy pins one
	Network          string  `json:"network"`
	HostPath         string  `json:"host_path,omitempty"` // as asked for, cleaned; empty without one
	HostPathMode     string  `json:"host_path_mode"`
	MountPath        string  `json:"mount_path"`
	ExtraMounts      []Mount `json:"extra_mounts,omitempty"` // sorted by MountPath
	CPUs             float64 `json:"cpus"`
	MemoryMB         int64   `json:"memory_mb"`
	PidsLimit        int64   `json:"pids_limit"`
	ReadOnlyRootfs   bool    `json:"read_only_rootfs"`
	WorkspaceQuotaMB int64   `json:"workspace_quota_mb"`

	// Diff doesn't compare the fields below.
	Env           map[string]string `json:"-"`              // the caller's, filtered and pinned; InjectedEnv returns the injected variables
	TTL           time.Duration     `json:"ttl"`            // from creation, or renewal, to expiry
	IdleTTL       time.Duration     `json:"idle_ttl"`       // 0: never idles out
	MaxLifetime   time.Duration     `json:"max_lifetime"`   // from creation to the deadline, past which nothing is renewed
	EngineNetwork string            `json:"engine_network"` // the engine's name of Network; empty for "off"
	Mounts        []Mount           `json:"mounts,omitempty"`
	TmpfsMB       int64             `json:"tmpfs_mb"` // size of /tmp with a read-only root; 0 without
	CapAdd        []string          `json:"cap_add,omitempty"`
	User          string            `json:"user,omitempty"`
	RuntimeClass  string            `json:"runtime_class,omitempty"`
	Agent         string            `json:"agent,omitempty"`  // "on" or "off"; empty for a sandbox of a version without agents
	Userns        string            `json:"userns,omitempty"` // UsernsAuto, or empty for none
}

// Mount is a judged bind mount. HostPath is the requested path. Source is that path with every
// symbolic link resolved, in the engine's view of the host. Local is the same directory in
// this process's view.
type Mount struct {
	HostPath  string `json:"host_path"`
	Source    string `json:"source"`
	Local     string `json:"local"`
	MountPath string `json:"mount_path"`
	Mode      string `json:"mode"` // "ro" or "rw"
	// File says that it is a regular file. Socket says that Berm mounts its own socket in
	// place of the engine's. Otherwise it is a directory.
	File   bool `json:"file,omitempty"`
	Socket bool `json:"socket,omitempty"`
	// Missing is the end of the path that doesn't exist yet; see Policy.MakeMount.
	Missing string `json:"-"`
	// Operator says that the operator's settings give the mount to every sandbox. No
	// request can ask for it.
	Operator bool `json:"-"`
}

// Reason says why the policy denies one field of a request.
type Reason struct {
	Rule    string `json:"rule"`    // stable, dotted: "mounts.always_refused"
	Field   string `json:"field"`   // as in the request: "extra_mounts[0].host_path"
	Value   string `json:"value"`   // the requested value; never a secret
	Allowed string `json:"allowed"` // the allowed values, in words
	Message string `json:"message"` // one sentence with all of the above
	// Invalid says that the value is malformed, so that no policy would allow it.
	Invalid bool `json:"invalid,omitempty"`
}

// Override is a request's value that the policy replaced.
type Override struct {
	Field     string `json:"field"`
	Requested any    `json:"requested"`
	Effective any    `json:"effective"`
	Rule      string `json:"rule"` // "profiles.NAME.locked", "resources.over_max", "ttl.max_lifetime", …
}

// VerdictOf is the answer to a request. The request is allowed if there are no Denials. Only
// then is Spec complete.
type VerdictOf[S any] struct {
	Spec       S
	Overridden []Override // values of the request that the policy replaced
	Denials    []Reason
}

// Verdict is the answer to a Request.
type Verdict = VerdictOf[Spec]

// ContainerVerdict is the answer to a ContainerRequest.
type ContainerVerdict = VerdictOf[ContainerSpec]

// Allowed reports whether the request is allowed.
func (v VerdictOf[S]) Allowed() bool { return len(v.Denials) == 0 }

// Err returns nil if the request is allowed, else a *DeniedError.
func (v VerdictOf[S]) Err() error { return denied(v.Denials) }

func denied(reasons []Reason) error {
	if len(reasons) == 0 {
		return nil
	}
	return &DeniedError{Reasons: reasons}
}

// DeniedError is a refusal, with every reason for it.
type DeniedError struct{ Reasons []Reason }

// Error returns the reasons' messages.
func (e *DeniedError) Error() string {
	msgs := make([]string, len(e.Reasons))
	for i, r := range e.Reasons {
		msgs[i] = r.Message
	}
	return strings.Join(msgs, "; ")
}

// Invalid reports whether every reason is a malformed value, so that no policy would allow the
// request.
func (e *DeniedError) Invalid() bool {
	for _, r := range e.Reasons {
		if !r.Invalid {
			return false
		}
	}
	return true
}

// Difference is a field in which two specs differ.
type Difference struct {
	Field     string `json:"field"`
	Current   any    `json:"current"`
	Requested any    `json:"requested"`
}

// String returns the field and both values.
func (d Difference) String() string {
	return fmt.Sprintf("%s: %v, requested %v", d.Field, d.Current, d.Requested)
}
