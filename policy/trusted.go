package policy

import (
	"fmt"
	"path"
	"slices"
)

// TrustedRoots returns the roots where mounts are allowed that Berm can't hold, as the file has
// them.
func (p *Policy) TrustedRoots() []string {
	out := make([]string, len(p.mounts.trusted))
	for i, x := range p.mounts.trusted {
		out[i] = x.engine
	}
	return out
}

// trustedAround returns the trusted roots that are or contain a resolved path.
func (r *mountRules) trustedAround(source string) (out []root) {
	for _, x := range r.trusted {
		if under(source, x.source) {
			out = append(out, x)
		}
	}
	return out
}

// Unheld judges an allowed mount whose directory Berm can't hold. Others are the mounts of all
// containers that exist or are being created, by the sandbox API and the engine's, including
// this container's. The error is a *DeniedError.
//
// The path must lead to the same directory at each start of the container. So no sandbox may
// ever rename a directory on it. Open descriptors outlive the containers that opened them, so
// it isn't enough that no other container has such a mount now. With trusted roots, the
// operator vouches that no sandbox writes there.
func (p *Policy) Unheld(m Mount, others []Mount) error {
	refuse := func(why string) error {
		return &DeniedError{Reasons: []Reason{{
			Rule: ruleUnheld, Field: "host_path", Value: shorten(m.HostPath),
			Allowed: "read-only mounts at or below mounts.trusted_roots, and a root itself writable while nothing below it is mounted",
			Message: fmt.Sprintf("host path %q can't be held here while the engine mounts it, and %s: give Berm CAP_SYS_ADMIN and the engine's mount namespace, "+
				"or list the directory in mounts.trusted_roots and mount it read-only", shorten(m.HostPath), why),
		}}}
	}
	roots := p.mounts.trustedAround(m.Source)
	switch {
	case m.Operator: // only Berm makes directories in its roots
	case len(roots) == 0:
		return refuse("lies in no trusted root")
	case m.Mode == modeRW && !slices.ContainsFunc(roots, func(x root) bool { return x.source == m.Source }):
		return refuse("would be writable below a trusted root")
	}
	for _, o := range others {
		switch {
		case o.Mode == modeRW && o.Source != m.Source && under(m.Source, path.Clean(o.Source)):
			return refuse("lies in a directory that a container can write to")
		case m.Mode == modeRW && o.Source != m.Source && under(o.Source, m.Source):
			return refuse("contains a directory that a container has mounted")
		}
	}
	return nil
}
