package policy

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"
)

// Options are what a policy file is read with: the operator's defaults, and the
// only ways for this package to reach the outside.
type Options struct {
	// Resolve gives a local path with every symbolic link resolved, and an error if
	// that isn't an existing directory. It is called for every judged mount, from
	// many goroutines. Nil is ResolveDir.
	Resolve func(path string) (string, error)
	// ResolveFile is Resolve for a regular file. Nil is the function ResolveFile.
	ResolveFile func(path string) (string, error)
	// MakeDir makes the default workspace, and sources of binds with mounts.missing, when
	// they are missing and under an allowed root. Nil is the function MakeDir.
	MakeDir func(dir, rel string, owner *Owner) error
	// Secret reads a secret at load. Nil is ReadSecret.
	Secret func(SecretSource) (string, error)
	// InContainer says that this process runs in a container, so that a root on its
	// own root file system can't be the engine's.
	InContainer bool
	// OnRootFS tells whether a local path lies on this process's own root file
	// system; asked only with InContainer. Nil is the function OnRootFS.
	OnRootFS func(path string) (bool, error)

	// PathMap says where directories of this process's view are on the engine's host, as
	// far as the file doesn't: its own entries go first. One whose Local isn't there is
	// passed over.
	PathMap []PathMapping

	// Refuse holds further paths, in the engine's terms, that are never mounted,
	// nor is anything below or above them: the engine's socket, Berm's own state. A
	// socket that is a symbolic link needs both paths here.
	Refuse []string

	DefaultImage   string        // the profiles' image unless the file says; empty is python:3.11-slim
	DefaultTTL     time.Duration // unless the file says; 0 is one hour
	DefaultIdleTTL time.Duration // unless the file says; 0 is never
	EngineNetwork  string        // what network "on" is to the engine unless the file says; empty is berm-sandbox

	ExternalNetwork bool // an operator makes the network EngineNetwork, and not Berm
}

// PathMapping is a directory that is mounted into this process's container.
type PathMapping struct {
	Engine string // where the engine's host has it, absolute and clean
	Local  string // where it is here, absolute
	// Volume says that it is a volume. The engine keeps those where nothing may be mounted
	// from; below this one it may be, as far as the file allows it as a root.
	Volume bool
}

// Problem is one thing that is wrong with a policy file.
type Problem struct {
	Line    int    // 0 when it isn't known
	Path    string // of the key: "profiles.ci.cpus"; empty for the file as a whole
	Message string
}

// String gives line, path and message, as far as they are known.
func (p Problem) String() string {
	s := p.Message
	if p.Path != "" {
		s = p.Path + ": " + s
	}
	if p.Line > 0 {
		s = fmt.Sprintf("line %d: %s", p.Line, s)
	}
	return s
}

// LoadError says everything that is wrong with a policy file.
type LoadError struct{ Problems []Problem }

// Error gives one problem per line.
func (e *LoadError) Error() string {
	s := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		s[i] = p.String()
	}
	return "policy: " + strings.Join(s, "\n")
}

// InvalidParameter puts the error into errdefs' InvalidArgument class.
func (*LoadError) InvalidParameter() {}

// Policy is a loaded policy: immutable, safe for many goroutines. It keeps
// secrets, and so never prints what is in it.
type Policy struct {
	profiles map[string]Profile
	mounts   mountRules
	networks map[string]NetworkRule
	env      envRules
	images   imageRules
	ttl      ttlFile
	clamp    bool
	file     file // all defaults filled in, but for the profiles
}

// Format keeps the policy's secrets out of whatever prints it.
func (*Policy) Format(s fmt.State, _ rune) { _, _ = io.WriteString(s, "policy") }

const maxFileBytes = 1 << 20

// Parse reads a policy file. Nil or empty data is the built-in policy. The error
// is a *LoadError with everything that is wrong, not just the first.
func Parse(data []byte, opts Options) (*Policy, error) {
	if opts.Resolve == nil {
		opts.Resolve = ResolveDir
	}
	if opts.ResolveFile == nil {
		opts.ResolveFile = ResolveFile
	}
	if opts.MakeDir == nil {
		opts.MakeDir = MakeDir
	}
	if opts.Secret == nil {
		opts.Secret = ReadSecret
	}
	if opts.OnRootFS == nil {
		opts.OnRootFS = OnRootFS
	}
	if len(data) > maxFileBytes {
		return nil, &LoadError{Problems: []Problem{{Message: fmt.Sprintf("the file is over %d bytes", maxFileBytes)}}}
	}
	l := &loader{opts: opts, policy: &Policy{}}
	l.file.Version = -1
	l.file.Env.Allow = []string{"*"}
	l.file.TTL = ttlFile{Default: cmp.Or(opts.DefaultTTL, time.Hour), IdleDefault: opts.DefaultIdleTTL, MaxLifetime: 24 * time.Hour}
	l.Document = Decode(data, &l.file)
	for _, path := range l.Nulls { // left out, some lists allow everything
		l.problem(path, "has no value: give it one, such as [] for an empty list, or leave the key out")
	}
	switch {
	case l.file.Version == 1:
	case l.file.Version != -1 || len(l.Lines) > 0:
		l.problem("version", "must be 1")
	default:
		l.file.Version = 1
	}
	l.loadTTL()
	l.loadNetworks()
	l.loadImages()
	l.loadProfiles()
	l.loadEnv()
	l.loadMounts()
	l.policy.clamp = l.choice("resources.over_max", &l.file.Resources.OverMax, "refuse", "clamp") == "clamp"
	if len(l.Problems) > 0 {
		slices.SortStableFunc(l.Problems, func(a, b Problem) int { return a.Line - b.Line })
		return nil, &LoadError{Problems: l.Problems}
	}
	l.policy.file = l.file
	return l.policy, nil
}

// loader turns a file into a policy, and gathers what is wrong with it.
type loader struct {
	*Document
	opts   Options
	file   file
	policy *Policy

	builtin *Document // of builtinProfiles
}

// choice checks a word against those allowed; the first one is the default.
func (l *loader) choice(path string, v *string, allowed ...string) string {
	if *v == "" {
		*v = allowed[0]
	}
	if !slices.Contains(allowed, *v) {
		l.problem(path, "is %q, must be %s", *v, orList(allowed))
	}
	return *v
}

func orList(words []string) string {
	if len(words) < 2 {
		return strings.Join(words, "")
	}
	return strings.Join(words[:len(words)-1], ", ") + " or " + words[len(words)-1]
}

func sortedKeys[V any](m map[string]V) []string {
	return slices.Sorted(maps.Keys(m))
}
