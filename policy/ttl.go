package policy

import (
	"fmt"
	"time"
)

const minTTL = time.Second

func (l *loader) loadTTL() {
	t := &l.file.TTL
	if t.MaxLifetime < minTTL {
		l.problem("ttl.max_lifetime", "is %v, must be at least %v", t.MaxLifetime, minTTL)
		t.MaxLifetime = minTTL
	}
	if t.Default < minTTL || t.Default > t.MaxLifetime {
		l.problem("ttl.default", "is %v, must be from %v to ttl.max_lifetime, %v", t.Default, minTTL, t.MaxLifetime)
	}
	if t.IdleDefault != 0 && (t.IdleDefault < minTTL || t.IdleDefault > t.MaxLifetime) {
		l.problem("ttl.idle_default", "is %v, must be 0 (never), or from %v to ttl.max_lifetime, %v", t.IdleDefault, minTTL, t.MaxLifetime)
	}
	l.policy.ttl = *t
}

func (j *sandboxJudge) times(req Request) {
	j.spec.MaxLifetime = j.policy.ttl.MaxLifetime
	j.spec.TTL = j.lifetime("ttl", req.TTL, j.profile.TTL)
	j.spec.IdleTTL = j.lifetime("idle_ttl", req.IdleTTL, j.profile.IdleTTL)
}

func (j *judge) lifetime(field string, asked *time.Duration, own time.Duration) time.Duration {
	v := pick(j, field, asked, own)
	if v == 0 && field == "idle_ttl" {
		return 0
	}
	if v < minTTL {
		j.invalid(ruleTTLRange, field, v.String(), fmt.Sprintf("at least %v", minTTL), fmt.Sprintf("%s %v is too short, it must be at least %v", field, v, minTTL))
	}
	if most := j.policy.ttl.MaxLifetime; v > most {
		j.override(ruleMaxLifetime, field, v, most)
		return most
	}
	return v
}

// ObjectTTL judges how long something lives that a caller makes through the engine's own
// API, a network or a volume: ttl from now, and at most until most from now. Nil is the
// profile's. The error is a *DeniedError.
func (p *Policy) ObjectTTL(profile string, asked *time.Duration) (ttl, most time.Duration, err error) {
	j, ok := p.containerJudge(profile)
	if ok {
		ttl = j.lifetime("ttl", asked, j.profile.TTL)
	}
	return ttl, p.ttl.MaxLifetime, j.err()
}
