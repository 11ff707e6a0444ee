package policy

import (
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

const (
	modeNone      = "none"
	modeRO        = "ro"
	modeRW        = "rw"
	maxPathBytes  = 4096
	maxExtraMount = 32
	tmpfsTarget   = "/tmp"
)

var (
	modes      = []string{modeNone, modeRO, modeRW}
	mountModes = []string{modeRO, modeRW}
	// kernelDirs are file systems of the kernel, in a container too.
	kernelDirs = []string{"/proc", "/sys", "/dev"}
	// agentPlaces are where a container has Berm's own program and socket.
	agentPlaces = []string{"/sbin/berm-init", "/run/berm"}
)

// mounts judges the host path and the extra mounts, by the same rules.
func (j *sandboxJudge) mounts(req Request) {
	s := &j.spec
	s.HostPathMode = pick(&j.judge, "host_path_mode", given(req.HostPathMode), j.profile.HostPathMode)
	if !slices.Contains(modes, s.HostPathMode) {
		j.badMode("host_path_mode", s.HostPathMode, modes)
	}
	s.MountPath = j.target("mount_path", pick(&j.judge, "mount_path", given(req.MountPath), j.profile.MountPath))
	asked := pick(&j.judge, "host_path", given(req.HostPath), j.policy.mounts.defaultWorkspace)
	extra := req.ExtraMounts
	if len(extra) > 0 && j.profile.locked("extra_mounts") {
		j.override(lockedRule(j.profile.Name), "extra_mounts", showMounts(extra), []string{})
		extra = nil
	}
	if s.HostPathMode == modeNone {
		j.modeNone(req, extra)
		return
	}
	if asked != "" {
		if m, ok := j.mount("host_path", asked, sources{}); ok {
			m.MountPath, m.Mode = s.MountPath, s.HostPathMode
			s.HostPath, s.Mounts = m.HostPath, append(s.Mounts, m)
		}
	}
	j.extraMounts(extra)
	j.overlaps()
}

// modeNone mounts nothing, and records the requested mounts as overridden.
func (j *sandboxJudge) modeNone(req Request, extra []MountRequest) {
	if p := given(req.HostPath); p != nil {
		j.override(ruleModeNone, "host_path", *p, "")
	}
	if len(extra) > 0 {
		j.override(ruleModeNone, "extra_mounts", showMounts(extra), []string{})
	}
}

func showMounts(reqs []MountRequest) []string {
	s := make([]string, min(len(reqs), maxExtraMount))
	for i := range s {
		s[i] = shorten(reqs[i].HostPath + ":" + reqs[i].MountPath + ":" + reqs[i].Mode)
	}
	return s
}

func (j *sandboxJudge) extraMounts(reqs []MountRequest) {
	s := &j.spec
	if j.tooMany(ruleTooMany, "extra_mounts", len(reqs), maxExtraMount, "extra_mounts has %d entries") {
		return
	}
	for i, r := range reqs {
		field := fmt.Sprintf("extra_mounts[%d].", i)
		m, ok := j.mount(field+"host_path", r.HostPath, sources{})
		m.MountPath = j.target(field+"mount_path", r.MountPath)
		switch m.Mode = r.Mode; {
		case m.Mode == "":
			m.Mode = modeRO
		case !slices.Contains(mountModes, m.Mode):
			j.badMode(field+"mode", m.Mode, mountModes)
		case m.Mode == modeRW && s.HostPathMode == modeRO && j.profile.locked("host_path_mode"):
			j.override(lockedRule(j.profile.Name), field+"mode", modeRW, modeRO)
			m.Mode = modeRO
		}
		if ok {
			s.ExtraMounts = append(s.ExtraMounts, m)
		}
	}
	slices.SortFunc(s.ExtraMounts, func(a, b Mount) int { return strings.Compare(a.MountPath, b.MountPath) })
	s.Mounts = append(s.Mounts, s.ExtraMounts...)
}

func (j *judge) badMode(field, mode string, allowed []string) {
	j.invalid(ruleMode, field, mode, orList(allowed), fmt.Sprintf("%s %q is not %s", field, shorten(mode), orList(allowed)))
}

// target judges a path inside the container.
func (j *judge) target(field, asked string) string {
	clean, why := cleanTarget(asked)
	if why != "" {
		j.invalid(ruleTarget, field, asked, "an absolute path other than /, not in "+orList(kernelDirs)+", and neither "+orList(agentPlaces)+" nor above or below", fmt.Sprintf("%s %q %s", field, shorten(asked), why))
	}
	return clean
}

// overlaps denies targets of which one is in the other: the engine would make the inner one's
// directory in the outer mount, on the host.
func (j *sandboxJudge) overlaps() {
	s, targets := &j.spec, j.spec.Mounts
	if s.ReadOnlyRootfs {
		targets = append([]Mount{{MountPath: tmpfsTarget}}, targets...)
	}
	for i, a := range targets {
		for _, b := range targets[:i] {
			if a.MountPath != "" && b.MountPath != "" && (under(a.MountPath, b.MountPath) || under(b.MountPath, a.MountPath)) {
				field := "extra_mounts"
				if s.HostPath != "" && a.MountPath == s.MountPath {
					field = "mount_path"
				}
				j.invalid(ruleTargetOverlap, field, a.MountPath, "mount paths that don't lie in each other",
					fmt.Sprintf("mount paths %s and %s lie in each other", b.MountPath, a.MountPath))
			}
		}
	}
}

// mount judges a path of the host. It sets the Mount's HostPath, Source, Local, File and Missing.
func (j *judge) mount(field, asked string, also sources) (Mount, bool) {
	m, reason := j.policy.mounts.judge(asked, also)
	if reason != nil {
		reason.Field, reason.Value = field, shorten(asked)
		j.refuse(*reason)
		return m, false
	}
	return m, true
}

// sources says what may be mounted besides directories: regular files, and missing directories
// that will be made.
type sources struct{ files, missing bool }

func (r *mountRules) judge(asked string, also sources) (Mount, *Reason) {
	refuse := func(rule, allowed, format string, args ...any) (Mount, *Reason) {
		return Mount{}, &Reason{Rule: rule, Allowed: allowed, Message: fmt.Sprintf("host path %q ", shorten(asked)) + fmt.Sprintf(format, args...)}
	}
	clean, why := cleanPath(asked)
	if why != "" {
		_, reason := refuse(rulePathSyntax, "an absolute path", "%s", why)
		reason.Invalid = true
		return Mount{}, reason
	}
	roots := r.rootsInWords()
	if entry, ok := r.refused(clean); ok {
		return refuse(ruleAlwaysRefused, roots, "is refused whatever the allowed roots, because of %s; allowed is %s", entry, roots)
	}
	if len(r.roots) == 0 {
		return refuse(ruleDisabled, roots, "is refused: host mounts are disabled, as the policy has neither allowed roots nor a shared root")
	}
	m := Mount{HostPath: clean}
	local, err := r.resolve(r.toLocal(clean))
	if err != nil && also.files {
		local, err = r.resolveFile(r.toLocal(clean))
		m.File = err == nil
	}
	known := local // the part of local that exists
	named := slices.ContainsFunc(r.roots, func(x root) bool { return under(clean, x.engine) || under(clean, x.source) })
	if err != nil && named && also.missing {
		if dir, missing, ok := r.nearest(r.toLocal(clean)); ok {
			known, local, m.Missing, err = dir, path.Join(dir, missing), missing, nil
		}
	}
	if err != nil {
		if !named {
			return refuse(ruleAllowedRoots, roots, "is not under an allowed root; allowed is %s", roots)
		}
		kinds := "directory"
		if also.files {
			kinds = "directory or regular file"
		}
		return refuse(ruleNotADirectory, roots, "does not exist, or is no %s; allowed is one in %s", kinds, roots)
	}
	source, knownSource := r.toEngine(local), r.toEngine(known)
	// The messages below don't name what a link leads to: callers mustn't learn it.
	if entry, ok := r.refused(source); ok {
		return refuse(ruleAlwaysRefused, roots, "leads to what is refused whatever the allowed roots, because of %s; allowed is %s", entry, roots)
	}
	if !slices.ContainsFunc(r.roots, func(x root) bool { return under(knownSource, x.source) && under(known, x.local) }) {
		return refuse(ruleAllowedRoots, roots, "is not under an allowed root, or leads out of it; allowed is %s", roots)
	}
	if dir, ok := r.unnamed(source); ok {
		return refuse(ruleAllowedRoots, roots, "needs an allowed root in %s, as it is, lies in or contains that; allowed is %s", dir, roots)
	}
	m.Source, m.Local = source, local
	return m, nil
}

// cleanPath checks the syntax of an absolute path, and cleans it. Why says what is wrong, or is
// empty.
func cleanPath(p string) (clean, why string) {
	switch {
	case p == "":
		return "", "is empty"
	case len(p) > maxPathBytes:
		return "", fmt.Sprintf("is over %d bytes long", maxPathBytes)
	case !utf8.ValidString(p):
		return "", "is not UTF-8"
	case strings.ContainsFunc(p, unicode.IsControl):
		return "", "contains a control character"
	case !path.IsAbs(p):
		return "", "is not absolute"
	}
	return path.Clean(p), ""
}

// cleanTarget is cleanInner for a container with Berm's own program in it.
func cleanTarget(p string) (clean, why string) {
	if clean, why = cleanInner(p); why != "" {
		return "", why
	}
	for _, place := range agentPlaces {
		if under(clean, place) || under(place, clean) {
			return "", "is in the way of Berm's own " + place
		}
	}
	return clean, ""
}

// cleanInner is cleanPath for a mount's path in a container.
func cleanInner(p string) (clean, why string) {
	clean, why = cleanPath(p)
	if why != "" {
		return "", why
	}
	if clean == "/" {
		return "", "is the root of the container"
	}
	for _, dir := range kernelDirs {
		if under(clean, dir) {
			return "", "lies in " + dir
		}
	}
	return clean, ""
}

// under reports whether a cleaned path is dir or below it.
func under(p, dir string) bool {
	return p == dir || dir == "/" || strings.HasPrefix(p, dir+"/")
}
