package policy

import (
	"fmt"
	"slices"
	"strings"
	"unicode"
)

const maxSysctlBytes = 256

func (j *containerJudge) resources(req ContainerRequest) {
	s := &j.spec
	s.CPUs = j.cpus(given(&req.CPUs))
	s.MemoryBytes = j.memory(given(&req.MemoryBytes), 1<<20)
	if s.SwapBytes = s.MemoryBytes; req.SwapBytes != 0 && req.SwapBytes != s.SwapBytes {
		j.swap(req.SwapBytes)
	}
	// Docker's own client sends 0 where nothing was asked for.
	if asked := given(req.PidsLimit); asked != nil {
		s.PidsLimit = j.pidsOrUnlimited(*asked)
	} else {
		s.PidsLimit = j.pids(nil)
	}
	s.ShmBytes = j.tmpfsBytes("HostConfig.ShmSize", req.ShmBytes)
	s.OOMScoreAdj = req.OOMScoreAdj
	if req.OOMScoreAdj < 0 || req.OOMScoreAdj > 1000 {
		j.deny(ruleOOM, "HostConfig.OomScoreAdj", fmt.Sprint(req.OOMScoreAdj), "0 to 1000", fmt.Sprintf("OomScoreAdj %d is refused; allowed is 0 to 1000", req.OOMScoreAdj))
	}
}

// swap overrides a request for swap: containers have none.
func (j *containerJudge) swap(asked int64) {
	var effective any = j.spec.SwapBytes
	if j.spec.SwapBytes == 0 {
		effective = "unchanged"
	}
	j.override(ruleSwap, "HostConfig.MemorySwap", asked, effective)
}

// pidsOrUnlimited judges a limit of processes. At 0 and below, the engine sets no limit, so that
// exceeds every maximum.
func (j *containerJudge) pidsOrUnlimited(asked int64) int64 {
	if asked > 0 || j.profile.locked("pids_limit") {
		return j.pids(&asked)
	}
	return j.unlimited("pids_limit", asked, j.profile.MaxPidsLimit)
}

// unlimited clamps or refuses a request for no limit.
func (j *containerJudge) unlimited(field string, asked, most int64) int64 {
	if j.policy.clamp {
		j.override(ruleOverMax, field, asked, most)
		return most
	}
	j.deny(ruleOverMax, field, fmt.Sprint(asked), fmt.Sprintf("at most %d", most),
		fmt.Sprintf("%s %d is unlimited, over the maximum of profile %s, %d", j.name(field), asked, j.profile.Name, most))
	return most
}

// tmpfsBytes judges the size of a tmpfs or of /dev/shm. A size of 0 is the profile's maximum, but
// for /dev/shm at most 64 MiB, the engine's default.
func (j *containerJudge) tmpfsBytes(field string, asked int64) int64 {
	most := j.api.TmpfsMB << 20
	switch {
	case asked == 0 && field == "HostConfig.ShmSize":
		return min(most, tmpfsMB<<20)
	case asked == 0:
		return most
	case asked < 0:
		j.outOfRange(field, asked, "at least 1")
	}
	return atMost(&j.judge, field, asked, most)
}

func (j *containerJudge) sysctls(asked map[string]string) {
	j.spec.Sysctls = asked
	for _, name := range sortedKeys(asked) {
		field := "HostConfig.Sysctls." + shorten(name)
		if !slices.Contains(j.api.Sysctls, name) {
			j.unlisted(ruleSysctl, field, "sysctl", name, inList(j.api.Sysctls, "none"))
			continue
		}
		if v := asked[name]; len(v) > maxSysctlBytes || strings.ContainsFunc(v, unicode.IsControl) {
			j.invalid(ruleSysctl, field, v, fmt.Sprintf("a line of at most %d bytes", maxSysctlBytes), fmt.Sprintf("the value of sysctl %s is no line of at most %d bytes", name, maxSysctlBytes))
		}
	}
}

// ownUlimits bound only the processes that have them, and engines don't set them.
var ownUlimits = []string{"cpu", "data", "fsize", "rss", "stack"}

// ulimits allows those of open files, processes and locked memory up to the profile's maxima,
// ownUlimits as they are, and no core dumps: where one goes is the host's business.
func (j *containerJudge) ulimits(asked []ContainerUlimit) {
	most := map[string]int64{"nofile": j.api.MaxUlimit, "nproc": j.api.MaxUlimit, "core": 0}
	names := append([]string{"nofile", "nproc"}, ownUlimits...)
	if mb := j.api.MaxMemlockMB; mb > 0 {
		most["memlock"] = mb << 20
		names = append(names, "memlock")
	}
	allowed := orList(names) + ", and core of 0"
	seen := map[string]bool{}
	for _, u := range asked {
		high, ok := most[u.Name]
		own := slices.Contains(ownUlimits, u.Name)
		field := "HostConfig.Ulimits." + shorten(u.Name)
		switch {
		case !ok && !own, own && min(u.Soft, u.Hard) < -1:
			j.refused(ruleUlimit, field, "ulimit", u.Name, allowed)
			continue
		case seen[u.Name]:
			j.invalid(ruleUlimit, field, u.Name, "each limit once", fmt.Sprintf("ulimit %s is there twice", u.Name))
			continue
		case u.Hard >= 0 && (u.Soft > u.Hard || u.Soft < 0):
			j.invalid(ruleUlimit, field, fmt.Sprintf("%d:%d", u.Soft, u.Hard), "a soft limit that isn't over the hard one", fmt.Sprintf("ulimit %s has a soft limit of %d, over its hard one of %d", u.Name, u.Soft, u.Hard))
			continue
		}
		if seen[u.Name] = true; !own {
			u.Soft, u.Hard = j.ulimit(field, u.Soft, high), j.ulimit(field, u.Hard, high)
		}
		j.spec.Ulimits = append(j.spec.Ulimits, u)
	}
}

func (j *containerJudge) ulimit(field string, v, most int64) int64 {
	if v < 0 {
		return j.unlimited(field, v, most)
	}
	return atMost(&j.judge, field, v, most)
}
