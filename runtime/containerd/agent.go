package containerd

import (
	"sync"

	"github.com/bermhq/berm/runtime"
)

// agentFile is where the agent's program is on the host.
type agentFile struct {
	mu   sync.Mutex
	path string // empty until it is there, and known to be what it should be
}

// agentPath returns the path of the agent's program on the host, where it is put if it
// isn't there. Containers run it as their first process, so that it is compared with
// what it should be once in the life of this process.
func (r *Runtime) agentPath() (string, error) {
	r.agent.mu.Lock()
	defer r.agent.mu.Unlock()
	if r.agent.path != "" {
		return r.agent.path, nil
	}
	path, err := runtime.PutProgram(r.root.path("bin"), r.opts.Agent)
	if err != nil {
		return "", err
	}
	r.agent.path = path
	return path, nil
}
