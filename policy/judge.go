package policy

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// judge judges one request. It has what requests of the sandbox API and of the engine's API
// have in common.
type judge struct {
	policy     *Policy
	profile    Profile
	names      map[string]string // the request's names of fields, if they aren't the sandbox API's
	overridden []Override
	denials    []Reason
}

// sandboxJudge judges a request of the sandbox API.
type sandboxJudge struct {
	judge
	spec Spec
}

// Sandbox judges a request. The verdict has all denials, not just the first, and all values
// of the request that the policy replaced.
func (p *Policy) Sandbox(req Request) Verdict {
	j := &sandboxJudge{judge: judge{policy: p}}
	if !j.takeProfile(req.Profile) {
		return Verdict{Denials: j.denials}
	}
	s := &j.spec
	s.Profile = j.profile.Name
	s.CapAdd, s.User, s.RuntimeClass, s.Agent = j.profile.CapAdd, j.profile.User, j.profile.RuntimeClass, j.profile.Agent
	if j.profile.Userns == UsernsAuto {
		s.Userns = UsernsAuto
	}
	s.Image = j.image(given(req.Image), false)
	j.network(req)
	j.resources(req)
	s.ReadOnlyRootfs = pick(&j.judge, "read_only_rootfs", req.ReadOnlyRootfs, j.profile.ReadOnlyRootfs)
	if s.ReadOnlyRootfs {
		s.TmpfsMB = tmpfsMB
	}
	j.mounts(req)
	s.Env = j.env(req.Env)
	j.times(req)
	return Verdict{Spec: j.spec, Overridden: j.overridden, Denials: j.denials}
}

// err returns nil if nothing was denied, else a *DeniedError.
func (j *judge) err() error { return denied(j.denials) }

// name returns the request's name of a field.
func (j *judge) name(field string) string { return cmp.Or(j.names[field], field) }

// takeProfile sets the profile of this name. It denies the request and returns false if there is
// none.
func (j *judge) takeProfile(name string) bool {
	var ok bool
	if j.profile, ok = j.policy.Profile(name); ok {
		return true
	}
	known := strings.Join(j.policy.Profiles(), ", ")
	j.invalid(ruleProfileUnknown, "profile", name, known, fmt.Sprintf("there is no profile %q; the policy has %s", shorten(name), known))
	return false
}

func (j *sandboxJudge) resources(req Request) {
	s, p := &j.spec, j.profile
	s.CPUs = j.cpus(req.CPUs)
	s.MemoryMB = j.memory(req.MemoryMB, 1)
	s.PidsLimit = j.pids(req.PidsLimit)
	s.WorkspaceQuotaMB = pick(&j.judge, "workspace_quota_mb", req.WorkspaceQuotaMB, p.WorkspaceQuotaMB)
	if s.WorkspaceQuotaMB < 0 || s.WorkspaceQuotaMB > maxMB {
		j.outOfRange("workspace_quota_mb", s.WorkspaceQuotaMB, fmt.Sprintf("0 (unlimited) to %d", int64(maxMB)))
	}
}

func (j *judge) cpus(asked *float64) float64 {
	v := pick(j, "cpus", asked, j.profile.CPUs)
	if !finite(v) || v < minCPUs {
		j.outOfRange("cpus", v, fmt.Sprintf("a finite number, at least %v", minCPUs))
		return v
	}
	return atMost(j, "cpus", v, j.profile.MaxCPUs)
}

// memory judges memory in a unit of which a MiB has perMB.
func (j *judge) memory(asked *int64, perMB int64) int64 {
	v := pick(j, "memory_mb", asked, j.profile.MemoryMB*perMB)
	if v < minMemoryMB*perMB {
		j.outOfRange("memory_mb", v, fmt.Sprintf("at least %d", minMemoryMB*perMB))
	}
	return atMost(j, "memory_mb", v, j.profile.MaxMemoryMB*perMB)
}

func (j *judge) pids(asked *int64) int64 {
	v := pick(j, "pids_limit", asked, j.profile.PidsLimit)
	if v < 1 {
		j.outOfRange("pids_limit", v, "at least 1")
	}
	return atMost(j, "pids_limit", v, j.profile.MaxPidsLimit)
}

func (j *judge) outOfRange(field string, v any, allowed string) {
	j.invalid(ruleRange, field, fmt.Sprint(v), allowed, fmt.Sprintf("%s %v is out of range, it must be %s", j.name(field), v, allowed))
}

func atMost[T int64 | float64](j *judge, field string, v, most T) T {
	if v <= most {
		return v
	}
	if j.policy.clamp {
		j.override(ruleOverMax, field, v, most)
		return most
	}
	j.deny(ruleOverMax, field, fmt.Sprint(v), fmt.Sprintf("at most %v", most),
		fmt.Sprintf("%s %v is over the maximum of profile %s, %v", j.name(field), v, j.profile.Name, most))
	return v
}

// pick returns the request's value, or the profile's if the request leaves the field out or the
// profile locks it.
func pick[T comparable](j *judge, field string, asked *T, own T) T {
	if asked == nil {
		return own
	}
	if *asked != own && j.profile.locked(field) {
		j.override(lockedRule(j.profile.Name), field, *asked, own)
		return own
	}
	return *asked
}

// given returns nil for a field that is empty or 0, as if it were left out.
func given[T comparable](v *T) *T {
	if v != nil && *v == *new(T) {
		return nil
	}
	return v
}

func (j *judge) override(rule, field string, requested, effective any) {
	j.overridden = append(j.overridden, Override{Field: j.name(field), Requested: shown(requested), Effective: shown(effective), Rule: rule})
}

// shown makes a value fit for people and JSON.
func shown(v any) any {
	switch v := v.(type) {
	case string:
		return shorten(v)
	case time.Duration:
		return v.String()
	case float64:
		if !finite(v) {
			return fmt.Sprint(v)
		}
	}
	return v
}

func (j *judge) deny(rule, field, value, allowed, message string) {
	j.refuse(Reason{Rule: rule, Field: field, Value: shorten(value), Allowed: allowed, Message: message})
}

// refused denies a value of a kind, and says which values are allowed.
func (j *judge) refused(rule, field, kind, value, allowed string) {
	j.deny(rule, field, value, allowed, fmt.Sprintf("%s %q is refused; allowed is %s", kind, shorten(value), allowed))
}

// tooMany reports whether n exceeds most, and denies the field then. Format is the beginning of
// the message, with a verb for n.
func (j *judge) tooMany(rule, field string, n, most int, format string) bool {
	if n > most {
		j.invalid(rule, field, fmt.Sprint(n), fmt.Sprintf("at most %d", most), fmt.Sprintf(format+", more than %d", n, most))
	}
	return n > most
}

func (j *judge) invalid(rule, field, value, allowed, message string) {
	j.refuse(Reason{Rule: rule, Field: field, Value: shorten(value), Allowed: allowed, Message: message, Invalid: true})
}

// maxReasons bounds an answer: even a small request could have a bad value every few bytes.
const maxReasons = 1024

func (j *judge) refuse(r Reason) {
	if r.Field = j.name(r.Field); len(j.denials) < maxReasons {
		j.denials = append(j.denials, r)
	}
}

const maxShown = 256

// shorten cuts a caller's string, and quotes characters that could garble a log or a terminal.
func shorten(s string) string {
	if len(s) > maxShown {
		s = s[:maxShown] + "…"
	}
	if !utf8.ValidString(s) || slices.ContainsFunc([]rune(s), func(r rune) bool { return !strconv.IsPrint(r) }) {
		s = strings.Trim(strconv.Quote(s), `"`)
	}
	return s
}
