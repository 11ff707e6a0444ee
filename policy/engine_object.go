package policy

// What a profile can switch off for clients of the engine's own API, by its key in
// the policy file.
const (
	OpPull    = "pull"
	OpBuild   = "build"
	OpCommit  = "commit" // and import and load
	OpArchive = "archive"
	OpExec    = "exec"
)

// NetworkCreateRequest is a network as a client of the engine's own API asks for it.
// Fields that are harmless (labels) aren't in it, and those that no policy allows are
// in Other: an ingress or config-only network, another network's configuration,
// addresses, a scope.
type NetworkCreateRequest struct {
	Name     string
	Driver   string // empty is "bridge"
	Internal bool
	Options  map[string]string
	Other    []OtherField
}

// NetworkSpec is a judged network of the engine's API. Its driver is "bridge".
type NetworkSpec struct {
	Name     string
	Internal bool
	Options  map[string]string
}

// VolumeCreateRequest is a volume as a client of the engine's own API asks for it.
type VolumeCreateRequest struct {
	Name    string // empty is one that the engine makes up
	Driver  string // empty is "local"
	Options map[string]string
	Other   []OtherField // what no policy allows: a cluster volume
}

// ImageRef judges a reference to an image that a client of the engine's own API wants
// to pull, look at or remove, as that of a container is judged. It gives the
// reference that the engine is to be asked for. The error is a *DeniedError.
func (p *Policy) ImageRef(profile, ref string) (string, []Override, error) {
	return "", nil, &DeniedError{Reasons: []Reason{{Rule: "todo"}}}
}

// TagRef judges a name that a caller wants to give to an image of its own, and gives
// it in its normal form. The error is a *DeniedError.
func (p *Policy) TagRef(profile, ref string) (string, error) {
	return "", &DeniedError{Reasons: []Reason{{Rule: "todo"}}}
}

// ListsImage tells whether an image that isn't the caller's own, but has these names
// (RepoTags and RepoDigests), may be seen with the profile.
func (p *Policy) ListsImage(profile string, refs []string) bool { return false }

// NetworkCreate judges a network that a caller wants to make. The error is a
// *DeniedError.
func (p *Policy) NetworkCreate(profile string, req NetworkCreateRequest) (NetworkSpec, []Override, error) {
	return NetworkSpec{}, nil, &DeniedError{Reasons: []Reason{{Rule: "todo"}}}
}

// VolumeCreate judges a volume that a caller wants to make. An allowed one is of the
// local driver, without options. The error is a *DeniedError.
func (p *Policy) VolumeCreate(profile string, req VolumeCreateRequest) error {
	return &DeniedError{Reasons: []Reason{{Rule: "todo"}}}
}

// Operation tells whether the profile allows an operation, one of OpPull and so on.
// The error is a *DeniedError.
func (p *Policy) Operation(profile, op string) error {
	return &DeniedError{Reasons: []Reason{{Rule: "todo"}}}
}

// Redacted tells whether a variable's value is kept from clients of the engine's own
// API: it is injected, or matches the profile's redact_env.
func (p *Policy) Redacted(profile, name string) bool { return true }
