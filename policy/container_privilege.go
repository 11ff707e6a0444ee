package policy

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

const capabilityAll = "CAP_ALL"

func (j *containerJudge) capabilitiesInWords() string {
	return inList(j.api.Capabilities, "none")
}

// capabilities returns the engine's default capabilities that the profile allows, plus the added
// and minus the dropped ones. One that is both added and dropped is dropped.
func (j *containerJudge) capabilities(req ContainerRequest) {
	has, dropped := map[string]bool{}, map[string]bool{}
	for _, c := range req.CapDrop {
		name := capabilityName(c)
		if name != capabilityAll && !slices.Contains(knownCapabilities, name) {
			j.invalid(ruleCapability, "HostConfig.CapDrop", c, "ALL, and the names of capabilities", fmt.Sprintf("capability %q doesn't exist", shorten(c)))
		}
		dropped[name] = true
	}
	if !dropped[capabilityAll] {
		for _, c := range engineCapabilities {
			has[c] = slices.Contains(j.api.Capabilities, c)
		}
	}
	for _, c := range req.CapAdd {
		name, allowed := capabilityName(c), j.capabilitiesInWords()
		switch {
		case name == capabilityAll:
			j.deny(ruleCapability, "HostConfig.CapAdd", c, allowed, fmt.Sprintf("capability %q is refused, whatever the policy; allowed is %s", shorten(c), allowed))
		case !slices.Contains(knownCapabilities, name):
			j.invalid(ruleCapability, "HostConfig.CapAdd", c, allowed, fmt.Sprintf("capability %q doesn't exist; allowed is %s", shorten(c), allowed))
		case !slices.Contains(j.api.Capabilities, name):
			j.unlisted(ruleCapability, "HostConfig.CapAdd", "capability", c, allowed)
		default:
			has[name] = true
		}
	}
	j.spec.Capabilities = []string{}
	for _, c := range sortedKeys(has) {
		if has[c] && !dropped[c] {
			j.spec.Capabilities = append(j.spec.Capabilities, c)
		}
	}
}

// securityDefaults are the security options that ask for no more than the default, and
// their values. Empty is the name by itself.
var securityDefaults = map[string][]string{
	"no-new-privileges": {"", "true"},
	"seccomp":           {"builtin"},
	"apparmor":          {"docker-default"},
}

// securityOptions allows only options that ask for the default. no-new-privileges is always on.
func (j *containerJudge) securityOptions(asked []string) {
	const field, allowed = "HostConfig.SecurityOpt", "no-new-privileges, seccomp=builtin and apparmor=docker-default"
	for _, opt := range asked {
		name, value := opt, ""
		if i := strings.IndexAny(opt, "=:"); i >= 0 {
			name, value = opt[:i], opt[i+1:]
		}
		if !slices.Contains(securityDefaults[name], value) {
			// Name only a part of the option: it could be a whole seccomp profile.
			j.refused(ruleSecurityOpt, field, "security option", opt, allowed)
		}
	}
}

// namespaces allows only namespaces of the container's own.
func (j *containerJudge) namespaces(asked []ContainerNamespace) {
	for _, n := range asked {
		if n.Mode == "" || n.Mode == "private" && n.Kind != "userns" {
			continue
		}
		if n.Kind == "ipc" && n.Mode == "none" {
			j.spec.IpcNone = true
			continue
		}
		j.refused(ruleNamespace, n.Field, shorten(n.Kind)+" namespace", n.Mode, "the container's own: leave it out")
	}
	j.userns("HostConfig.UsernsMode")
}

// pidOf refuses the processes of a container that has more than this profile gives now. Who
// sees processes can end them, and reach what they reach. Neither may have a socket of Berm's:
// other callers of the tenant, who may work in the one without, would reach it.
func (j *containerJudge) pidOf(p *ContainerPeer) {
	const field, allowed = "HostConfig.PidMode", "a container of the caller's with the same profile, no more privileges than that gives, and no socket of the engine's"
	if p == nil {
		return
	}
	if p.Allowed == nil || p.ID == "" {
		j.deny(ruleNamespace, field, p.Asked, allowed, fmt.Sprintf("container %q is not one of the caller's; allowed is %s", shorten(p.Asked), allowed))
		return
	}
	more := slices.ContainsFunc(p.Allowed.Capabilities, func(c string) bool { return !slices.Contains(j.api.Capabilities, c) })
	root := j.api.Users == wordNonRoot && !isNonRoot(p.Allowed.User)
	other := j.profile.User != "" && p.Allowed.User != j.profile.User
	socket := slices.ContainsFunc(slices.Concat(p.Allowed.Binds, j.spec.Binds), func(m Mount) bool { return m.Socket })
	if p.Allowed.Profile != j.profile.Name || p.Allowed.PidOf != "" || more || root || other || socket {
		j.deny(ruleNamespace, field, p.Asked, allowed, fmt.Sprintf("the processes of container %q are refused: it has another profile, user or capabilities than profile %s gives, or joined another container's, or one of the two has the engine's socket", shorten(p.Asked), j.profile.Name))
	}
	j.spec.PidOf = p.ID
}

// userns refuses what runs on the Docker Engine if the profile's sandboxes have IDs of their own.
func (j *containerJudge) userns(field string) {
	if j.profile.Userns == UsernsAuto {
		j.deny(ruleNamespace, field, UsernsAuto, "a profile without userns: auto",
			fmt.Sprintf("profile %s says userns: auto, which the Docker Engine API can't give: use a profile without it", j.profile.Name))
	}
}

const maxGroups = 64

var nonRootUser = regexp.MustCompile(`^([1-9][0-9]{0,9})(:([1-9][0-9]{0,9}))?$`)

// user judges the user of the container's process. An empty user is the image's own, unless the
// profile names one.
func (j *containerJudge) user(asked string, groups []string) {
	const field = "User"
	own := j.profile.User
	if own != "" && asked != "" && asked != own {
		j.deny(ruleUser, field, asked, own, fmt.Sprintf("user %q is refused: profile %s runs as %s", shorten(asked), j.profile.Name, own))
	}
	j.spec.User = asked
	if asked == "" {
		j.spec.User = own
	}
	if len(asked) > maxEnvName {
		j.invalid(ruleUser, field, asked, "a user, or two numbers as 1000:1000", fmt.Sprintf("user is over %d bytes long", maxEnvName))
	}
	if j.tooMany(ruleUser, "HostConfig.GroupAdd", len(groups), maxGroups, "GroupAdd has %d entries") {
		return
	}
	j.spec.Groups = groups
	if j.api.Users != wordNonRoot {
		return
	}
	const allowed = "a number other than 0, with or without a group's number, as 1000:1000"
	if !isNonRoot(j.spec.User) {
		message := fmt.Sprintf("user %q is refused; allowed is %s", shorten(j.spec.User), allowed)
		if j.spec.User == "" {
			message = "a user must be given, as the image's own could be root; allowed is " + allowed
		}
		j.deny(ruleUser, field, j.spec.User, allowed, message)
	}
	for _, g := range groups {
		if !isNonRoot(g) || strings.Contains(g, ":") {
			j.refused(ruleUser, "HostConfig.GroupAdd", "group", g, "a number other than 0")
		}
	}
}

// isNonRoot reports whether engines read a user as a number other than 0, and a given group
// likewise.
func isNonRoot(user string) bool {
	m := nonRootUser.FindStringSubmatch(user)
	if m == nil {
		return false
	}
	for _, id := range []string{m[1], m[3]} {
		if _, err := strconv.ParseInt(id, 10, 32); id != "" && err != nil {
			return false // too large: what an engine makes of it is anybody's guess
		}
	}
	return true
}
