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

// Options are the operator's defaults for a policy file, and the functions by which this
// package does I/O.
type Options struct {
	// Resolve returns a local path with every symbolic link resolved. It fails if that
	// isn't an existing directory. It is called for every judged mount, from many
	// goroutines. Nil is ResolveDir.
	Resolve func(path string) (string, error)
	// ResolveFile is Resolve for a regular file. Nil is the function ResolveFile.
	ResolveFile func(path string) (string, error)
	// MakeDir makes the default workspace if it is missing. With mounts.missing, it also
	// makes missing sources of binds. It is only called for directories under an allowed
	// root. Nil is the function MakeDir.
	MakeDir func(dir, rel string, owner *Owner) error
	// Secret reads a secret at load. Nil is ReadSecret.
	Secret func(SecretSource) (string, error)
	// InContainer says that this process runs in a container. A root on the container's own
	// root file system is then not on the engine's host.
	InContainer bool
	// OnRootFS reports whether a local path is on this process's own root file system. It is
	// called only with InContainer. Nil is the function OnRootFS.
	OnRootFS func(path string) (bool, error)

	// PathMap says where directories of this process's view are on the engine's host. The
	// file's own entries take precedence. An entry whose Local doesn't exist is ignored.
	PathMap []PathMapping

	// Refuse has further paths, in the engine's view, that are never mounted, nor are paths
	// below or above them: the engine's socket, Berm's own state. A socket that is a
	// symbolic link needs both paths here.
	Refuse []string

	// The defaults of keys that the file doesn't have.

	DefaultImage   string        // the profiles' image; empty is python:3.11-slim
	DefaultTTL     time.Duration // 0 is one hour
	DefaultIdleTTL time.Duration // 0 is never
	EngineNetwork  string        // the engine's name of network "on"; empty is berm-sandbox

	ExternalNetwork bool // the operator makes the network EngineNetwork, not Berm
}

// PathMapping is a directory that is mounted into this process's container.
type PathMapping struct {
	Engine string // its path on the engine's host, absolute and clean
	Local  string // its path in this process's view, absolute
	// Volume says that it is a volume. The engine keeps volumes in a directory that is always
	// refused. Mounts from this volume are allowed if the file names a root in it.
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

// LoadError has all problems of a policy file.
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

// Policy is a loaded policy. It is immutable and safe for many goroutines. It has secrets, so
// it never prints its content.
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

// Format prints only "policy", so that no format prints the policy's secrets.
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
	for _, path := range l.Nulls { // a null would count as left out, and so some lists would allow everything
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

// loader turns a file into a policy, and collects problems.
type loader struct {
	*Document
	opts   Options
	file   file
	policy *Policy

	builtin *Document // of builtinProfiles
}

// choice checks a word against the allowed ones, and returns it. The first one is the default.
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
