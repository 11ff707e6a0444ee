package policy

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"
)

// judge is one request's judgement under way.
type judge struct {
	policy  *Policy
	profile Profile
	v       Verdict
}

// Sandbox judges a request. The verdict holds every denial, not just the first,
// and every value of the request that the policy replaced.
func (p *Policy) Sandbox(req Request) Verdict {
	j := &judge{policy: p}
	var ok bool
	if j.profile, ok = p.Profile(req.Profile); !ok {
		j.unknownProfile(req.Profile)
		return j.v
	}
	s := &j.v.Spec
	s.Profile = j.profile.Name
	s.CapAdd, s.User, s.RuntimeClass, s.Agent = j.profile.CapAdd, j.profile.User, j.profile.RuntimeClass, j.profile.Agent
	j.image(req)
	j.network(req)
	j.resources(req)
	s.ReadOnlyRootfs = pick(j, "read_only_rootfs", req.ReadOnlyRootfs, j.profile.ReadOnlyRootfs)
	if s.ReadOnlyRootfs {
		s.TmpfsMB = tmpfsMB
	}
	j.mounts(req)
	j.env(req.Env)
	j.times(req)
	return j.v
}

func (j *judge) unknownProfile(name string) {
	known := strings.Join(j.policy.Profiles(), ", ")
	j.invalid(ruleProfileUnknown, "profile", name, known, fmt.Sprintf("there is no profile %q; the policy has %s", shorten(name), known))
}

func (j *judge) resources(req Request) {
	s, p := &j.v.Spec, j.profile
	s.CPUs = pick(j, "cpus", req.CPUs, p.CPUs)
	if !finite(s.CPUs) || s.CPUs < minCPUs {
		j.outOfRange("cpus", s.CPUs, fmt.Sprintf("a finite number, at least %v", minCPUs))
	} else {
		s.CPUs = atMost(j, "cpus", s.CPUs, p.MaxCPUs)
	}
	s.MemoryMB = pick(j, "memory_mb", req.MemoryMB, p.MemoryMB)
	if s.MemoryMB < minMemoryMB {
		j.outOfRange("memory_mb", s.MemoryMB, fmt.Sprintf("at least %d", minMemoryMB))
	}
	s.MemoryMB = atMost(j, "memory_mb", s.MemoryMB, p.MaxMemoryMB)
	s.PidsLimit = pick(j, "pids_limit", req.PidsLimit, p.PidsLimit)
	if s.PidsLimit < 1 {
		j.outOfRange("pids_limit", s.PidsLimit, "at least 1")
	}
	s.PidsLimit = atMost(j, "pids_limit", s.PidsLimit, p.MaxPidsLimit)
	s.WorkspaceQuotaMB = pick(j, "workspace_quota_mb", req.WorkspaceQuotaMB, p.WorkspaceQuotaMB)
	if s.WorkspaceQuotaMB < 0 || s.WorkspaceQuotaMB > maxMB {
		j.outOfRange("workspace_quota_mb", s.WorkspaceQuotaMB, fmt.Sprintf("0 (unlimited) to %d", int64(maxMB)))
	}
}

func (j *judge) outOfRange(field string, v any, allowed string) {
	j.invalid(ruleRange, field, fmt.Sprint(v), allowed, fmt.Sprintf("%s %v is out of range, it must be %s", field, v, allowed))
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
		fmt.Sprintf("%s %v is over the maximum of profile %s, %v", field, v, j.profile.Name, most))
	return v
}

// pick takes the request's value, or the profile's where the request leaves the
// field out or the profile locks it.
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

// given makes an empty string a field that is left out.
func given(s *string) *string {
	if s != nil && *s == "" {
		return nil
	}
	return s
}

func (j *judge) override(rule, field string, requested, effective any) {
	j.v.Overridden = append(j.v.Overridden, Override{Field: field, Requested: shown(requested), Effective: shown(effective), Rule: rule})
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
	j.v.Denials = append(j.v.Denials, Reason{Rule: rule, Field: field, Value: shorten(value), Allowed: allowed, Message: message})
}

func (j *judge) invalid(rule, field, value, allowed, message string) {
	j.deny(rule, field, value, allowed, message)
	j.v.Denials[len(j.v.Denials)-1].Invalid = true
}

const maxShown = 256

// shorten makes a caller's string fit to be shown: bounded, and free of what
// could garble a log or a terminal.
func shorten(s string) string {
	if len(s) > maxShown {
		s = s[:maxShown] + "…"
	}
	if !utf8.ValidString(s) || slices.ContainsFunc([]rune(s), func(r rune) bool { return !strconv.IsPrint(r) }) {
		s = strings.Trim(strconv.Quote(s), `"`)
	}
	return s
}
