package policy

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// alwaysRefused are never mounted, nor are paths below or above them.
var alwaysRefused = []string{
	"/", "/etc", "/proc", "/sys", "/dev", "/root", "/boot", "/run", "/var/run", "/var/lib/docker", "/var/lib/containerd",
}

// guarded are mounted only if a root is one of them or below one. The same is true of
// directories in them.
var guarded = []string{
	"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/var/lib", "/var/spool", "/home", "/opt",
}

// tooWide are directories that no root may name.
var tooWide = []string{"/", "/var/lib"}

// root is an allowed or trusted root: as configured, and resolved in both views.
type root struct {
	engine string // as configured, cleaned; in the engine's view
	source string // resolved, in the engine's view
	local  string // resolved, in this process's view
}

// mapping says where a directory of the engine's host is in this process's view.
type mapping struct{ engine, local, resolved string }

type mountRules struct {
	roots            []root
	trusted          []root // the operator vouches that no sandbox writes there
	refusals         []string
	guarded          []string
	maps             []mapping // the identity first; a later entry for the same directory takes precedence
	volumes          []string  // the paths, on the engine's host, of volumes that Berm's container has
	defaultWorkspace string    // empty if there is none
	holdRequired     bool
	owner            *Owner // nil: Berm's own user
	createMissing    bool
	resolve          func(string) (string, error)
	resolveFile      func(string) (string, error)
	makeDir          func(dir, rel string, owner *Owner) error
}

// HoldRequired reports whether Berm must be able to hold mounts: mounts.hold is "required", and
// an allowed root is outside of the trusted ones.
func (p *Policy) HoldRequired() bool { return p.mounts.holdRequired }

// AllowsMounts reports whether requests can mount any directory of the engine's host.
func (p *Policy) AllowsMounts() bool { return len(p.mounts.roots) > 0 }

// Owner returns the user and group of what Berm makes on the host for sandboxes, or nil if
// that stays Berm's own.
func (p *Policy) Owner() *Owner { return p.mounts.owner }

// EnginePath returns the path, on the engine's host, of a directory of this process's view. The
// directory must exist.
func (p *Policy) EnginePath(local string) (string, error) {
	resolved, err := p.mounts.resolve(local)
	if err != nil {
		return "", err
	}
	return p.mounts.toEngine(resolved), nil
}

// refused reports whether a cleaned path is always refused: it equals an entry of refusals, or
// is below or above one. It returns the entry.
func (r *mountRules) refused(p string) (string, bool) {
	for _, entry := range r.refusals {
		if under(entry, p) || r.within(p, entry) {
			return entry, true
		}
	}
	return "", false
}

// unnamed returns the guarded directory that a resolved path is below or above, unless a root
// allows the path there.
func (r *mountRules) unnamed(p string) (string, bool) {
	named := func(g string) bool {
		return slices.ContainsFunc(r.roots, func(x root) bool { return x.source == g || under(x.source, g) && under(p, x.source) })
	}
	for _, g := range r.guarded {
		if (under(p, g) || under(g, p)) && !slices.ContainsFunc(r.guarded, func(outer string) bool { return under(g, outer) && named(outer) }) {
			return g, true
		}
	}
	return "", false
}

// within reports whether a path is in a refused directory, but not in a volume there that
// Berm's container has.
func (r *mountRules) within(p, entry string) bool {
	return entry != "/" && under(p, entry) && !slices.ContainsFunc(r.volumes, func(v string) bool {
		return v != entry && under(v, entry) && under(p, v)
	})
}

func (r *mountRules) toLocal(engine string) string {
	return r.rebase(engine, func(m mapping) (from, to string) { return m.engine, m.local })
}

func (r *mountRules) toEngine(local string) string {
	return r.rebase(local, func(m mapping) (from, to string) { return m.resolved, m.engine })
}

// rebase translates a path by a mapping. It takes the innermost mapping that applies, and the
// last one of equals.
func (r *mountRules) rebase(p string, ends func(mapping) (from, to string)) string {
	from, to := ends(r.maps[0])
	for _, m := range r.maps {
		if f, t := ends(m); under(p, f) && len(f) >= len(from) {
			from, to = f, t
		}
	}
	return path.Join(to, strings.TrimPrefix(p, from))
}

func (r *mountRules) rootsInWords() string {
	if len(r.roots) == 0 {
		return "no host path, as long as the policy names no mounts.allowed_roots"
	}
	names := make([]string, len(r.roots))
	for i, x := range r.roots {
		names[i] = x.engine
	}
	return orList(names) + " and below"
}

func (l *loader) loadMounts() {
	f := &l.file.Mounts
	r := &l.policy.mounts
	cleanly := func(resolve func(string) (string, error)) func(string) (string, error) {
		return func(p string) (string, error) {
			resolved, err := resolve(p)
			if clean, why := cleanPath(resolved); err != nil || why != "" || clean != resolved {
				return "", fmt.Errorf("%s is not an existing directory", p)
			}
			return resolved, nil
		}
	}
	r.resolve, r.resolveFile, r.makeDir = cleanly(l.opts.Resolve), cleanly(l.opts.ResolveFile), l.opts.MakeDir
	r.createMissing = l.choice("mounts.missing", &f.Missing, "refuse", "create") == "create"
	r.maps = []mapping{{engine: "/", local: "/", resolved: "/"}}
	for _, m := range l.opts.PathMap {
		l.given(m)
	}
	given := len(r.maps)
	for i := range f.PathMap {
		l.mapping(fmt.Sprintf("mounts.path_map[%d]", i), &f.PathMap[i], given)
	}
	r.refusals = l.places(append(slices.Clone(alwaysRefused), l.opts.Refuse...)...)
	r.guarded = l.places(guarded...)
	for i, asked := range f.AllowedRoots {
		r.roots = l.root(r.roots, fmt.Sprintf("mounts.allowed_roots[%d]", i), asked)
	}
	if len(f.AllowedRoots) == 0 && f.SharedRoot != "" {
		r.roots = l.root(r.roots, "mounts.shared_root", f.SharedRoot)
	}
	for i, asked := range f.TrustedRoots {
		r.trusted = l.root(r.trusted, fmt.Sprintf("mounts.trusted_roots[%d]", i), asked)
	}
	if f.Owner != "" {
		owner, err := ParseOwner(f.Owner)
		if err != nil {
			l.problem("mounts.owner", "%v", err)
		}
		r.owner = &owner
	}
	l.defaultWorkspace(f)
	untrusted := slices.ContainsFunc(r.roots, func(x root) bool { return len(r.trustedAround(x.source)) == 0 })
	r.holdRequired = l.choice("mounts.hold", &f.Hold, "required", "auto") == "required" && untrusted
}

// given adds a mapping of Options.PathMap.
func (l *loader) given(m PathMapping) {
	r := &l.policy.mounts
	engine, why := cleanPath(m.Engine)
	resolved, err := r.resolve(m.Local)
	if why != "" || err != nil {
		return
	}
	r.maps = append(r.maps, mapping{engine: engine, local: m.Local, resolved: resolved})
	if m.Volume {
		r.volumes = append(r.volumes, engine)
	}
}

// mapping checks and adds a mapping of the file. Given is how many mappings came before the
// file's.
func (l *loader) mapping(at string, m *pathMapping, given int) {
	engine, why := cleanPath(m.Engine)
	if why != "" {
		l.problem(at+".engine", "%q %s", m.Engine, why)
		return
	}
	local, why := cleanPath(m.Local)
	if why != "" {
		l.problem(at+".local", "%q %s", m.Local, why)
		return
	}
	r := &l.policy.mounts
	resolved, err := r.resolve(local)
	if err != nil {
		l.problem(at+".local", "%v", err)
		return
	}
	for _, other := range r.maps[given:] {
		if other.engine == engine || other.resolved == resolved {
			l.problem(at, "maps what another entry maps already")
			return
		}
	}
	r.maps = append(r.maps, mapping{engine: engine, local: local, resolved: resolved})
}

// places returns each path cleaned, and also resolved if it, or its parent, exists.
func (l *loader) places(paths ...string) (out []string) {
	r := &l.policy.mounts
	add := func(p string) {
		if !slices.Contains(out, p) {
			out = append(out, p)
		}
	}
	for _, p := range paths {
		clean, why := cleanPath(p)
		if why != "" {
			l.problem("", "the path to be refused %q %s", p, why)
			continue
		}
		add(clean)
		resolved, err := r.resolve(r.toLocal(clean))
		if err != nil {
			resolved, err = r.resolveFile(r.toLocal(clean))
		}
		if err == nil {
			add(r.toEngine(resolved))
		} else if dir, err := r.resolve(r.toLocal(path.Dir(clean))); err == nil {
			add(path.Join(r.toEngine(dir), path.Base(clean)))
		}
	}
	return out
}

// root resolves a root and appends it to roots, unless it is a problem.
func (l *loader) root(roots []root, at, asked string) []root {
	r := &l.policy.mounts
	clean, why := cleanPath(asked)
	if why != "" {
		l.problem(at, "%q %s", asked, why)
		return roots
	}
	const remedy = "mount it into Berm's container at the same path, or map it in mounts.path_map"
	local, err := r.resolve(r.toLocal(clean))
	if err != nil {
		l.problem(at, "%s is not a directory that Berm can see: make it; if Berm runs in a container, %s", clean, remedy)
		return roots
	}
	x := root{engine: clean, source: r.toEngine(local), local: local}
	for _, p := range []string{x.engine, x.source} {
		if slices.Contains(tooWide, p) {
			l.problem(at, "%s is too wide for a root: name the directories in it", clean)
			return roots
		}
		for _, entry := range r.refusals {
			if r.within(p, entry) {
				l.problem(at, "%s lies in %s, which is always refused, so that nothing in it could be mounted", clean, entry)
				return roots
			}
		}
	}
	if l.opts.InContainer {
		own, err := l.opts.OnRootFS(local)
		if err != nil {
			l.problem(at, "%s can't be examined: %v", clean, err)
			return roots
		}
		if own {
			l.problem(at, "%s lies on the file system of Berm's own container, so that it is not the engine's %s: %s", local, clean, remedy)
			return roots
		}
	}
	return append(roots, x)
}

// defaultWorkspace sets the default workspace, and makes it if it is missing. It makes it only
// under an allowed root, and not through a link that leads out of the root.
func (l *loader) defaultWorkspace(f *mountsFile) {
	r, at := &l.policy.mounts, "mounts.default_workspace"
	if f.DefaultWorkspace == "" && f.SharedRoot != "" {
		f.DefaultWorkspace, at = path.Join(f.SharedRoot, "default"), "mounts.shared_root"
	}
	if f.DefaultWorkspace == "" || len(l.Problems) > 0 {
		return // nothing is made for a policy that is refused anyway
	}
	clean, why := cleanPath(f.DefaultWorkspace)
	if why != "" {
		l.problem(at, "%q %s", f.DefaultWorkspace, why)
		return
	}
	m, reason := r.judge(clean, sources{missing: true})
	if reason == nil && m.Missing != "" {
		if err := r.make(m); err != nil {
			l.problem(at, "the default workspace can't be made: %v", err)
			return
		}
		m, reason = r.judge(clean, sources{})
	}
	if reason != nil {
		l.problem(at, "the default workspace can't be used: %s", reason.Message)
		return
	}
	r.defaultWorkspace, f.DefaultWorkspace = m.HostPath, m.HostPath
}

// maxMissing bounds the directories that are made for one mount.
const maxMissing = 16

// nearest returns the nearest parent of a local path that exists, with links resolved, and the
// rest of the path. It looks at up to maxMissing parents.
func (r *mountRules) nearest(local string) (resolved, missing string, ok bool) {
	for range maxMissing {
		missing, local = path.Join(path.Base(local), missing), path.Dir(local)
		if resolved, err := r.resolve(local); err == nil {
			return resolved, missing, true
		}
	}
	return "", "", false
}

// make makes the missing end of a mount's path, without following a link.
func (r *mountRules) make(m Mount) error {
	return r.makeDir(strings.TrimSuffix(m.Local, "/"+m.Missing), m.Missing, r.owner)
}

// MakeMount makes the missing end of an allowed mount's path, without following a link. It
// gives the new directories to mounts.owner. If nothing is missing, it does nothing.
func (p *Policy) MakeMount(m Mount) error {
	if m.Missing == "" {
		return nil
	}
	return p.mounts.make(m)
}
