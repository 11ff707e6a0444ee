package policy

import (
	"fmt"
	"slices"
)

// containerJudge judges one request of the engine's API.
type containerJudge struct {
	judge
	api  EngineAPI
	spec ContainerSpec
}

// containerNames are the engine's names of fields that the sandbox API has as well.
var containerNames = map[string]string{
	"image": "Image", "env": "Env", "cpus": "HostConfig.NanoCpus", "memory_mb": "HostConfig.Memory", "pids_limit": "HostConfig.PidsLimit",
	"read_only_rootfs": "HostConfig.ReadonlyRootfs", "network": "HostConfig.NetworkMode",
}

func (p *Policy) containerJudge(profile string) (*containerJudge, bool) {
	j := &containerJudge{judge: judge{policy: p, names: containerNames}}
	if !j.takeProfile(profile) {
		return j, false
	}
	j.api, j.spec.Profile = j.profile.EngineAPI, j.profile.Name
	return j, true
}

func (j *containerJudge) verdict() ContainerVerdict {
	return ContainerVerdict{Spec: j.spec, Overridden: j.overridden, Denials: j.denials}
}

// Container judges a client's request for a container by the engine's API. The verdict has all
// denials, not just the first, and all values that the policy replaced.
func (p *Policy) Container(req ContainerRequest) ContainerVerdict {
	j, ok := p.containerJudge(req.Profile)
	if !ok {
		return j.verdict()
	}
	s := &j.spec
	s.Image = j.containerImage(req)
	s.Env = j.env(req.Env)
	j.user(req.User, req.Groups)
	s.MaxLifetime = p.ttl.MaxLifetime
	s.TTL = j.lifetime("ttl", req.TTL, j.profile.TTL)
	j.mounts(req)
	networkJudge{j}.networks(req)
	j.ports(req.Ports)
	j.dns(req)
	j.capabilities(req)
	j.securityOptions(req.SecurityOpt)
	j.refusedFields(req)
	j.namespaces(req.Namespaces)
	j.pidOf(req.PidOf)
	j.runtime(req.Runtime)
	j.sysctls(req.Sysctls)
	j.ulimits(req.Ulimits)
	j.logs(req)
	s.Restart = j.restart(req.Restart)
	j.resources(req)
	s.ReadOnlyRootfs = pick(&j.judge, "read_only_rootfs", &req.ReadOnlyRootfs, j.profile.ReadOnlyRootfs)
	if !s.ReadOnlyRootfs && j.api.ReadOnlyRootfs && j.profile.ReadOnlyRootfs {
		// Docker's client sends false if its user didn't set the option.
		j.override(ruleReadOnlyRootfs, "read_only_rootfs", false, true)
		s.ReadOnlyRootfs = true
	}
	return j.verdict()
}

// containerImage judges a container's image. It also accepts the ID of the caller's own image.
func (j *containerJudge) containerImage(req ContainerRequest) string {
	if req.Trusted && sha256Sum.MatchString(req.Image) && !j.profile.locked("image") {
		return req.Image
	}
	return j.image(&req.Image, req.Trusted)
}

// ContainerUpdate judges a change of an existing container. Only resources and the restart
// policy can change. A field that the request leaves out is zero in the Spec, and must not be
// changed. No resource becomes unlimited.
func (p *Policy) ContainerUpdate(profile string, req ContainerRequest) ContainerVerdict {
	j, ok := p.containerJudge(profile)
	if !ok {
		return j.verdict()
	}
	s := &j.spec
	if req.CPUs != 0 {
		s.CPUs = j.cpus(&req.CPUs)
	}
	if req.MemoryBytes != 0 {
		s.MemoryBytes = j.memory(&req.MemoryBytes, 1<<20)
	}
	if s.SwapBytes = s.MemoryBytes; req.SwapBytes != 0 && req.SwapBytes != s.SwapBytes {
		j.swap(req.SwapBytes)
	}
	if req.PidsLimit != nil {
		s.PidsLimit = j.pidsOrUnlimited(*req.PidsLimit)
	}
	if req.Restart != "" {
		s.Restart = j.restart(req.Restart)
	}
	j.refusedFields(req)
	return j.verdict()
}

// ContainerExec judges a command in a container of the engine's API. An empty user is the
// container's own. It returns the command's environment, as ExecEnv does. The error is a
// *DeniedError.
func (p *Policy) ContainerExec(profile string, privileged bool, user string, env map[string]string) (map[string]string, []Override, error) {
	j, ok := p.containerJudge(profile)
	if !ok {
		return nil, nil, j.err()
	}
	j.operation(OpExec)
	if privileged {
		j.deny(rulePrivileged, "Privileged", "true", "false", "a command can't be privileged; allowed is one that isn't")
	}
	if user != "" {
		j.user(user, nil)
	}
	judged := j.env(env)
	return judged, j.overridden, j.err()
}

// BuildLimits judges the extra hosts and the ulimits of a build's commands.
func (p *Policy) BuildLimits(profile string, req ContainerRequest) ContainerVerdict {
	j, ok := p.containerJudge(profile)
	if ok {
		j.dns(ContainerRequest{ExtraHosts: req.ExtraHosts})
		j.ulimits(req.Ulimits)
	}
	return j.verdict()
}

// refusedFields denies the fields that no policy allows.
func (j *containerJudge) refusedFields(req ContainerRequest) {
	if req.Privileged {
		j.deny(rulePrivileged, "HostConfig.Privileged", "true", "false", "privileged containers are refused; allowed are single capabilities of "+j.capabilitiesInWords())
	}
	for _, d := range req.Devices {
		j.deny(ruleDevice, "HostConfig.Devices", d, "no devices", fmt.Sprintf("device %q is refused: no devices are allowed", shorten(d)))
	}
	for _, o := range req.Other {
		j.otherField(o)
	}
	if req.OOMKillDisable {
		j.deny(ruleOOM, "HostConfig.OomKillDisable", "true", "false", "OomKillDisable is refused; allowed is false")
	}
}

func (j *judge) otherField(o OtherField) {
	j.deny(ruleField, o.Field, o.Value, "the field left out", fmt.Sprintf("%s is refused, whatever the policy: leave it out", shorten(o.Field)))
}

// operation denies an operation that the profile switches off, or that doesn't exist.
func (j *containerJudge) operation(op string) {
	words := map[string]string{OpPull: j.api.Pull, OpBuild: j.api.Build, OpCommit: j.api.Commit, OpArchive: j.api.Archive, OpExec: j.api.Exec, OpDockerSocket: j.api.DockerSocket}
	for op, list := range map[string][]string{OpLoad: j.api.Load, OpPush: j.api.Push, OpLogin: j.api.Login} {
		if words[op] = wordOff; len(list) > 0 {
			words[op] = wordOn
		}
	}
	if words[op] != wordOn {
		j.deny(ruleOperation, "operation", op, "nothing, as long as the profile's engine_api."+op+" is off",
			fmt.Sprintf("%s is switched off by profile %s (engine_api.%s)", op, j.profile.Name, op))
	}
	if op == OpBuild {
		j.userns("operation")
	}
}

// unlisted denies a value that isn't on a list of the profile's.
func (j *containerJudge) unlisted(rule, field, kind, value, allowed string) {
	j.deny(rule, field, value, allowed, fmt.Sprintf("%s %q is not one of profile %s's; allowed is %s", kind, shorten(value), j.profile.Name, allowed))
}

// off denies a value of a kind that the profile's key switches off.
func (j *containerJudge) off(rule, field, kind, value, key, none string) {
	j.deny(rule, field, value, none+", as long as the profile's engine_api."+key+" is off",
		fmt.Sprintf("%s %q is refused: profile %s has engine_api.%s off", kind, shorten(value), j.profile.Name, key))
}

// inList returns a list in words, or none if it is empty.
func inList(list []string, none string) string {
	if len(list) == 0 {
		return none
	}
	return orList(list)
}

func (j *containerJudge) restart(asked string) string {
	if asked == "" || asked == restartNo {
		return restartNo
	}
	if !slices.Contains(j.api.Restart, asked) {
		allowed := inList(append([]string{restartNo}, slices.DeleteFunc(slices.Clone(j.api.Restart), func(s string) bool { return s == restartNo })...), "")
		j.unlisted(ruleRestart, "HostConfig.RestartPolicy.Name", "restart policy", asked, allowed)
	}
	return asked
}

// runtime judges the OCI runtime. The profile's runtime class is the default.
func (j *containerJudge) runtime(asked string) {
	class := j.profile.RuntimeClass
	j.spec.Runtime = class
	if asked == "" || asked == class {
		return
	}
	if !slices.Contains(j.api.Runtimes, asked) {
		list := j.api.Runtimes
		if class != "" {
			list = append([]string{class}, list...)
		}
		j.unlisted(ruleRuntime, "HostConfig.Runtime", "runtime", asked, inList(list, "none: leave it out"))
		return
	}
	j.spec.Runtime = asked
}
