package policy

import (
	"bytes"
	"fmt"
	"math"
	"path"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// LearnRecord is one refused request.
type LearnRecord struct {
	Profile string // that it was judged by; empty is "default"
	Reasons []Reason
}

const learnHead = `# What the policy in force lacks to allow what it refused. Lists hold what is in force
# already. Read it before you take it over: the callers chose what is in it.
`

// Learn returns the smallest addition to the policy that would have allowed refused requests, as a
// part of a policy file. Its lists include the entries in force. Its comments have the refusals
// that no policy allows, or that don't show what to allow. A request may be refused for another
// reason with the addition.
func (p *Policy) Learn(records []LearnRecord) ([]byte, error) {
	l := &learner{policy: p, profiles: map[string]*Profile{}, notes: map[string]bool{}}
	l.images, l.env = slices.Clone(p.images.patterns), slices.Clone(p.env.allow)
	for _, r := range p.mounts.roots {
		l.roots = append(l.roots, r.engine)
	}
	for _, rec := range records {
		pr, ok := p.Profile(rec.Profile)
		if ok && l.profiles[pr.Name] == nil {
			l.profiles[pr.Name] = &pr
		}
		for _, reason := range rec.Reasons {
			if !ok || !l.learn(l.profiles[pr.Name], reason) {
				l.notes[reason.Rule+": "+reason.Message] = true
			}
		}
	}
	var out bytes.Buffer
	out.WriteString(learnHead)
	enc := yaml.NewEncoder(&out)
	enc.SetIndent(2)
	if err := enc.Encode(l.file()); err != nil {
		return nil, fmt.Errorf("write the policy: %w", err)
	}
	for i, note := range sortedKeys(l.notes) {
		if i == 0 {
			out.WriteString("# Not to be had by this file alone:\n")
		}
		fmt.Fprintf(&out, "# - %s\n", strings.Map(printable, note))
	}
	return out.Bytes(), nil
}

// learner collects the changes of a policy.
type learner struct {
	policy             *Policy
	profiles           map[string]*Profile // as they would have to be
	images, env, roots []string
	notes              map[string]bool
}

// learn changes the policy so that it allows a refused value. It returns false if no change can.
func (l *learner) learn(pr *Profile, r Reason) bool {
	if r.Invalid || strings.HasSuffix(r.Value, "…") { // it has been cut
		return false
	}
	api := &pr.EngineAPI
	switch r.Rule {
	case ruleImageAllow:
		img, err := parseImage(r.Value)
		return err == nil && add(&l.images, img.String())
	case ruleTags:
		img, err := parseImage(r.Value)
		return err == nil && !l.policy.implicit(img) && add(&api.Tags, img.String())
	case ruleEnvAllow:
		return badEnvName(r.Value) == "" && add(&l.env, r.Value)
	case ruleAllowedRoots, ruleDisabled:
		return l.root(r.Value)
	case ruleModeNone:
		pr.HostPathMode = modeRW
	case lockedRule(pr.Name):
		pr.Locked = slices.DeleteFunc(pr.Locked, func(s string) bool { return s == "extra_mounts" })
	case ruleOverMax:
		return learnMaximum(pr, r)
	case ruleUser:
		if pr.User != "" {
			return false
		}
		api.Users = wordAny
	case ruleInternal:
		if pr.locked("network") {
			return false
		}
		api.Networks = wordOwn
	default:
		return learnEngineAPI(api, r)
	}
	return true
}

// root takes a directory that could be an allowed root.
func (l *learner) root(asked string) bool {
	rules := &l.policy.mounts
	clean, why := cleanPath(asked)
	if why != "" {
		return false
	}
	local, err := rules.resolve(rules.toLocal(clean))
	if err != nil {
		return false
	}
	for _, p := range []string{clean, rules.toEngine(local)} {
		if _, refused := rules.refused(p); refused {
			return false
		}
	}
	return add(&l.roots, clean)
}

// learnMaximum raises the maximum that a value is over. What is unlimited is over all.
func learnMaximum(pr *Profile, r Reason) bool {
	v, err := strconv.ParseFloat(r.Value, 64)
	if err != nil || !finite(v) || v < 1e-9 || v > maxMB<<20 {
		return false
	}
	mb := int64(math.Ceil(v / (1 << 20)))
	raise := func(most *int64, v int64) bool {
		*most = max(*most, v)
		return true
	}
	switch field := r.Field; {
	case field == "cpus" || field == containerNames["cpus"]:
		pr.MaxCPUs = min(max(pr.MaxCPUs, v), maxCPUs)
		return v <= maxCPUs
	case field == "memory_mb":
		return v <= maxMB && raise(&pr.MaxMemoryMB, int64(v))
	case field == containerNames["memory_mb"]:
		return raise(&pr.MaxMemoryMB, mb)
	case field == "pids_limit" || field == containerNames["pids_limit"]:
		return v <= maxPids && raise(&pr.MaxPidsLimit, int64(v))
	case strings.HasPrefix(field, "HostConfig.LogConfig."):
		return raise(&pr.EngineAPI.LogMaxMB, mb)
	case field == "HostConfig.Ulimits.nofile" || field == "HostConfig.Ulimits.nproc":
		return v <= maxUlimit && raise(&pr.EngineAPI.MaxUlimit, int64(v))
	case strings.HasPrefix(field, "HostConfig.Ulimits."):
		return false
	}
	return raise(&pr.EngineAPI.TmpfsMB, mb) // of a tmpfs, or /dev/shm
}

func learnEngineAPI(api *EngineAPI, r Reason) bool {
	switch r.Rule {
	case ruleCapability:
		name := capabilityName(r.Value)
		return slices.Contains(knownCapabilities, name) && add(&api.Capabilities, name)
	case ruleVolumes:
		api.Volumes = wordOwn
	case ruleNetworkOwn:
		api.Networks = wordInternal
	case rulePorts:
		api.Ports = wordLoopback
	case rulePortAddress:
		api.Ports = wordAny
	case rulePortRange:
		low, high, _ := parsePortRange(api.PortRange)
		port, ok := wholeNumber(r.Value)
		if !ok || port < 1 || port > 65535 {
			return false
		}
		api.PortRange = fmt.Sprintf("%d-%d", min(low, int(port)), max(high, int(port)))
	case ruleLogDriver:
		return slices.Contains(logDrivers, r.Value) && add(&api.LogDrivers, r.Value)
	case ruleRestart:
		return slices.Contains(restartPolicies, r.Value) && add(&api.Restart, r.Value)
	case ruleRuntime:
		return r.Value != "" && runtimeClass.MatchString(r.Value) && add(&api.Runtimes, r.Value)
	case ruleSysctl:
		return badSysctl(r.Value) == "" && add(&api.Sysctls, r.Value)
	case ruleLoad, rulePush:
		img, err := parseImage(r.Value)
		return err == nil && add(map[string]*[]string{ruleLoad: &api.Load, rulePush: &api.Push}[r.Rule], img.String())
	case ruleLogin:
		return registryHost.MatchString(r.Value) && add(&api.Login, r.Value)
	case ruleDNS:
		api.DNS = wordOn
	case ruleOperation:
		word := map[string]*string{OpPull: &api.Pull, OpBuild: &api.Build, OpCommit: &api.Commit, OpArchive: &api.Archive, OpExec: &api.Exec}[r.Value]
		if word == nil {
			return false
		}
		*word = wordOn
	default:
		return false
	}
	return true
}

// add adds s unless the list has it. It always returns true, so that it can end a condition.
func add(list *[]string, s string) bool {
	if !slices.Contains(*list, s) {
		*list = append(*list, s)
	}
	return true
}

// file gives what has been changed, by the keys of a policy file.
func (l *learner) file() map[string]any {
	p, f := l.policy, l.policy.file
	f.Images.Allow, f.Env.Allow = l.images, l.env
	if len(l.roots) > len(p.mounts.roots) {
		f.Mounts.AllowedRoots = l.outermost()
	}
	out := changedKeys(reflect.ValueOf(p.file), reflect.ValueOf(f))
	out["version"] = 1
	profiles := map[string]any{}
	for name, pr := range l.profiles {
		was, _ := p.Profile(name)
		if changed := changedKeys(reflect.ValueOf(was), reflect.ValueOf(*pr)); len(changed) > 0 {
			if extends := p.file.Profiles[name].Extends; extends != "" {
				changed["extends"] = extends
			}
			profiles[name] = changed
		}
	}
	if len(profiles) > 0 {
		out["profiles"] = profiles
	}
	return out
}

// outermost leaves out the roots that lie in others, unless they name a guarded directory that
// those don't.
func (l *learner) outermost() []string {
	return slices.DeleteFunc(slices.Clone(l.roots), func(p string) bool {
		return p != "/" && slices.ContainsFunc(l.roots, func(dir string) bool {
			return dir != p && under(path.Dir(p), dir) &&
				!slices.ContainsFunc(l.policy.mounts.guarded, func(g string) bool { return under(p, g) && !under(dir, g) })
		})
	})
}

// changedKeys gives the fields in which two structs of a file differ, by their keys.
func changedKeys(was, is reflect.Value) map[string]any {
	out := map[string]any{}
	for key, i := range fields(was.Type()) {
		a, b := was.FieldByIndex(i), is.FieldByIndex(i)
		switch {
		case reflect.DeepEqual(a.Interface(), b.Interface()):
		case b.Kind() == reflect.Struct:
			out[key] = changedKeys(a, b)
		default:
			out[key] = b.Interface()
		}
	}
	return out
}

// printable keeps what could end a comment or garble a terminal out of it.
func printable(r rune) rune {
	if strconv.IsPrint(r) {
		return r
	}
	return '?'
}
