package policy

import (
	"fmt"
	"path"
	"path/filepath"
	"regexp"
	"strings"
)

const (
	maxEnvVars       = 512
	maxEnvName       = 255
	maxEnvValueBytes = 64 << 10
	maxEnvBytes      = 256 << 10
	// reservedEnv begins the names that Berm itself uses inside a sandbox.
	reservedEnv = "BERM_"

	hidden    = "[not shown]"
	setByUs   = "[set by policy]"
	envSyntax = "a name of letters, digits and _ . : -, beginning with a letter or _"
)

// envName has what programs take beside shells, as in discovery.type. It has no slash, which
// patterns treat as a separator.
var envName = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_.:-]*$`)

type envRules struct {
	allow, deny []string
	pin         map[string]string
	inject      map[string]string
}

// InjectedEnv gives the variables that the policy adds to every sandbox, secrets
// among them, as "NAME=value" and sorted.
func (p *Policy) InjectedEnv() []string {
	env := make([]string, 0, len(p.env.inject))
	for _, name := range sortedKeys(p.env.inject) {
		env = append(env, name+"="+p.env.inject[name])
	}
	return env
}

// DeniesEnv reports whether no sandbox may have a variable of this name: it is on the deny-list or
// reserved for Berm, and the policy itself doesn't set it.
func (p *Policy) DeniesEnv(name string) bool {
	_, pinned := p.env.pin[name]
	_, injected := p.env.inject[name]
	return !pinned && !injected && (strings.HasPrefix(name, reservedEnv) || matchAny(p.env.deny, name))
}

// ExecEnv judges the environment of a command as Sandbox does that of a sandbox:
// pinned variables are added, injected ones are left to the sandbox's own. The
// error is a *DeniedError.
func (p *Policy) ExecEnv(env map[string]string) (map[string]string, []Override, error) {
	j := &judge{policy: p}
	judged := j.env(env)
	return judged, j.overridden, j.err()
}

func (l *loader) loadEnv() {
	f := &l.file.Env
	l.globs("env.allow", f.Allow)
	l.globs("env.deny", f.Deny)
	for _, name := range sortedKeys(f.Pin) {
		l.envName(join("env.pin", name), name)
		if why := badEnvValue(f.Pin[name]); why != "" {
			l.problem(join("env.pin", name), "its value %s", why)
		}
	}
	inject := map[string]string{}
	for _, name := range sortedKeys(f.Inject) {
		at := join("env.inject", name)
		l.envName(at, name)
		if _, ok := f.Pin[name]; ok {
			l.problem(at, "is pinned as well")
		}
		inject[name] = l.secret(at, f.Inject[name])
	}
	l.policy.env = envRules{allow: f.Allow, deny: f.Deny, pin: f.Pin, inject: inject}
}

func (l *loader) secret(at string, s SecretSource) string {
	if (s.File == "") == (s.Env == "") {
		l.problem(at, "needs either file or env")
		return ""
	}
	if s.File != "" && !filepath.IsAbs(s.File) {
		l.problem(at+".file", "must be an absolute path")
		return ""
	}
	v, err := l.opts.Secret(s)
	if err != nil {
		l.problem(at, "can't be read: %v", err)
		return ""
	}
	why := badEnvValue(v)
	if v == "" {
		why = "is empty"
	}
	if why != "" {
		l.problem(at, "the secret %s", why)
	}
	return v
}

func (l *loader) envName(at, name string) {
	if why := badEnvName(name); why != "" {
		l.problem(at, "%s", why)
	}
	if strings.HasPrefix(name, reservedEnv) {
		l.problem(at, "names that begin with %s are Berm's own", reservedEnv)
	}
}

func (l *loader) globs(at string, patterns []string) {
	for i, p := range patterns {
		if _, err := path.Match(p, ""); err != nil || p == "" {
			l.problem(fmt.Sprintf("%s[%d]", at, i), "%q is not a pattern", p)
		}
	}
}

func badEnvName(name string) string {
	if !envName.MatchString(name) {
		return "needs " + envSyntax
	}
	if len(name) > maxEnvName {
		return fmt.Sprintf("is over %d bytes long", maxEnvName)
	}
	return ""
}

func badEnvValue(v string) string {
	if strings.ContainsRune(v, 0) {
		return "contains a NUL"
	}
	if len(v) > maxEnvValueBytes {
		return fmt.Sprintf("is over %d bytes", maxEnvValueBytes)
	}
	return ""
}

func matchAny(patterns []string, name string) bool {
	for _, p := range patterns {
		if ok, _ := path.Match(p, name); ok {
			return true
		}
	}
	return false
}

// env judges a request's variables, and gives those that are in force. No reason ever
// carries a value.
func (j *judge) env(asked map[string]string) map[string]string {
	rules := j.policy.env
	if j.tooMany(ruleEnvSyntax, "env", len(asked), maxEnvVars, "env has %d variables") {
		return nil
	}
	env, size := map[string]string{}, 0
	for _, name := range sortedKeys(asked) {
		value := asked[name]
		field := j.name("env") + "." + shorten(name)
		size += len(name) + len(value) + 2
		if why := badEnvName(name); why != "" {
			j.invalid(ruleEnvSyntax, field, name, envSyntax, fmt.Sprintf("env name %q %s", shorten(name), why))
			continue
		}
		if why := badEnvValue(value); why != "" {
			j.invalid(ruleEnvSyntax, field, hidden, fmt.Sprintf("no NUL, and %d bytes at most", maxEnvValueBytes), fmt.Sprintf("the value of env %s %s", name, why))
			continue
		}
		if _, ok := rules.inject[name]; ok {
			j.override(ruleEnvInject, field, hidden, setByUs)
			continue
		}
		if pinned, ok := rules.pin[name]; ok {
			if pinned != value {
				j.override(ruleEnvPin, field, hidden, setByUs)
			}
			continue
		}
		switch {
		case strings.HasPrefix(name, reservedEnv):
			j.deny(ruleEnvReserved, field, name, "names that don't begin with "+reservedEnv, fmt.Sprintf("env %s is refused: names that begin with %s are Berm's own", name, reservedEnv))
		case matchAny(rules.deny, name):
			j.deny(ruleEnvDeny, field, name, "names that match none of: "+strings.Join(rules.deny, ", "), fmt.Sprintf("env %s is on the policy's deny-list", name))
		case !matchAny(rules.allow, name):
			j.deny(ruleEnvAllow, field, name, "names that match one of: "+strings.Join(rules.allow, ", "), fmt.Sprintf("env %s is not on the policy's allow-list", name))
		default:
			env[name] = value
		}
	}
	if size > maxEnvBytes {
		j.invalid(ruleEnvSyntax, "env", fmt.Sprint(size), fmt.Sprintf("%d bytes in all", maxEnvBytes), fmt.Sprintf("env is %d bytes in all, more than %d", size, maxEnvBytes))
	}
	for name, value := range rules.pin {
		env[name] = value
	}
	return env
}
