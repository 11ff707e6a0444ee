package containerd

import (
	"sync"

	"github.com/bermhq/berm/runtime"
)

// agentFile is the agent's program on the host.
type agentFile struct {
	mu   sync.Mutex
	path string // empty until the program was written or compared
}

// agentPath returns the path of the agent's program on the host. It writes the program if it is missing
// or differs. Containers run it as their first process, so agentPath compares it once in the life of
// this process.
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
