package policy

import (
	"fmt"
	"time"
)

// ExecTimeout returns how long a command may run in a sandbox of the profile. Nil seconds are the
// profile's default. It clamps a timeout to the profile's maximum, and lists that as an Override.
// The error is a *DeniedError.
func (p *Policy) ExecTimeout(profile string, seconds *int64) (time.Duration, []Override, error) {
	j := &judge{policy: p}
	if !j.takeProfile(profile) {
		return 0, nil, j.err()
	}
	timeout := j.profile.Timeout
	switch most := j.profile.MaxTimeout; {
	case seconds == nil:
	case *seconds <= 0:
		j.invalid(ruleTimeoutRange, "timeout", fmt.Sprint(*seconds), "at least 1", fmt.Sprintf("timeout %d is out of range, it must be at least 1 second", *seconds))
	case j.profile.locked("timeout"):
		if float64(*seconds) != timeout.Seconds() {
			j.override(lockedRule(j.profile.Name), "timeout", *seconds, timeout.Seconds())
		}
	case *seconds > int64(most/time.Second):
		j.override(ruleTimeoutMax, "timeout", *seconds, most.Seconds())
		timeout = most
	default:
		timeout = time.Duration(*seconds) * time.Second
	}
	return timeout, j.overridden, j.err()
}

// WorkingDir gives a command's working directory, cleaned. Empty is the mount
// path where a host path is mounted, and otherwise stays empty: the image's own.
// With a host path mounted it must be the mount path or below. The error is a
// *DeniedError.
func WorkingDir(s Spec, cwd string) (string, error) {
	mounted := s.HostPath != "" && s.HostPathMode != modeNone
	if cwd == "" {
		if mounted {
			return s.MountPath, nil
		}
		return "", nil
	}
	j := &judge{}
	clean, why := cleanPath(cwd)
	if why != "" {
		j.invalid(ruleCwdSyntax, "cwd", cwd, "an absolute path", fmt.Sprintf("working directory %q %s", shorten(cwd), why))
		return "", j.err()
	}
	if mounted && !under(clean, s.MountPath) {
		j.deny(ruleCwdOutside, "cwd", cwd, s.MountPath+" or below", fmt.Sprintf("working directory %q is outside of the mount; allowed is %s or below", shorten(cwd), s.MountPath))
		return "", j.err()
	}
	return clean, nil
}
