package policy

// Container judges a container that a client of the engine's own API asks for. The
// verdict holds every denial, not just the first, and every value that the policy
// replaced.
func (p *Policy) Container(req ContainerRequest) ContainerVerdict {
	return ContainerVerdict{Denials: []Reason{{Rule: "todo"}}}
}

// ContainerUpdate judges a change of a container that is there. Only resources and the
// restart policy can be changed; a field of the request that isn't given stays zero in
// the Spec and is not to be changed. Nothing becomes unlimited by it.
func (p *Policy) ContainerUpdate(profile string, req ContainerRequest) ContainerVerdict {
	return ContainerVerdict{Denials: []Reason{{Rule: "todo"}}}
}

// ContainerExec judges a command in a container of the engine's API; an empty user is
// the container's own. It gives the command's environment, as ExecEnv does. The error
// is a *DeniedError.
func (p *Policy) ContainerExec(profile string, privileged bool, user string, env map[string]string) (map[string]string, []Override, error) {
	return nil, nil, &DeniedError{Reasons: []Reason{{Rule: "todo"}}}
}
