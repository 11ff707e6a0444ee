package runtime

import (
	"path"
	"strings"
)

// checkAgent refuses an Agent whose paths aren't absolute. It also refuses mounts at, below or
// above AgentProgram and AgentDir. With a mount above, the engine would have to make the path
// inside the mounted directory. In a tmpfs above AgentDir the engine can make it.
func checkAgent(spec Spec) error {
	a := spec.Agent
	if a == nil {
		return nil
	}
	if a.Program != "" && !path.IsAbs(a.Program) || a.Dir != "" && !path.IsAbs(a.Dir) {
		return Invalid("the agent's program %q and directory %q: both must be absolute", a.Program, a.Dir)
	}
	places := []string{AgentProgram}
	if a.Dir != "" {
		places = append(places, AgentDir)
	}
	for _, place := range places {
		for _, m := range spec.Mounts {
			if Below(m.Target, place) || Below(place, m.Target) {
				return Invalid("mount at %q: it would be in the way of %s, which is Berm's own", m.Target, place)
			}
		}
		for _, t := range spec.Tmpfs {
			if Below(t.Target, place) || Below(place, t.Target) && place != AgentDir {
				return Invalid("tmpfs at %q: it would be in the way of %s, which is Berm's own", t.Target, place)
			}
		}
	}
	return nil
}

// Below reports whether the absolute path name is dir or lies below it.
func Below(name, dir string) bool {
	name, dir = path.Clean(name), path.Clean(dir)
	return name == dir || dir == "/" || strings.HasPrefix(name, dir+"/")
}
