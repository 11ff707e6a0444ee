package policy

import (
	"fmt"
	"time"
)

const minTTL = time.Second

type ttlRules struct{ normal, idle, maxLifetime time.Duration }

func (l *loader) loadTTL() {
	f := &l.file.TTL
	fill(&f.Default, l.opts.DefaultTTL, time.Hour)
	fill(&f.IdleDefault, l.opts.DefaultIdleTTL, 0)
	fill(&f.MaxLifetime, 24*time.Hour, 0)
	t := ttlRules{normal: *f.Default, idle: *f.IdleDefault, maxLifetime: *f.MaxLifetime}
	if t.maxLifetime < minTTL {
		l.problem("ttl.max_lifetime", "is %v, must be at least %v", t.maxLifetime, minTTL)
		t.maxLifetime = minTTL
	}
	if t.normal < minTTL || t.normal > t.maxLifetime {
		l.problem("ttl.default", "is %v, must be from %v to ttl.max_lifetime, %v", t.normal, minTTL, t.maxLifetime)
	}
	if t.idle != 0 && (t.idle < minTTL || t.idle > t.maxLifetime) {
		l.problem("ttl.idle_default", "is %v, must be 0 (never), or from %v to ttl.max_lifetime, %v", t.idle, minTTL, t.maxLifetime)
	}
	l.policy.ttl = t
}

// fill gives a value that the file leaves out: the operator's, else the built-in.
func fill(v **time.Duration, operator, builtin time.Duration) {
	if *v != nil {
		return
	}
	if operator == 0 {
		operator = builtin
	}
	*v = &operator
}

func (j *sandboxJudge) times(req Request) {
	j.spec.MaxLifetime = j.policy.ttl.maxLifetime
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
	if most := j.policy.ttl.maxLifetime; v > most {
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
	return ttl, p.ttl.maxLifetime, j.err()
}
