package serve

import (
	"embed"
	"errors"
	"fmt"
	"io/fs"
)

// agentFiles holds the program berm-agent, if it was built before this one.
//
//go:embed all:agent
var agentFiles embed.FS

var errNoAgent = errors.New("this berm carries no berm-agent; build it with make build")

// builtinAgent is the berm-agent that this program was built with.
func builtinAgent() ([]byte, error) {
	program, err := agentFiles.ReadFile("agent/berm-agent")
	if errors.Is(err, fs.ErrNotExist) || err == nil && len(program) == 0 {
		return nil, errNoAgent
	}
	if err != nil {
		return nil, fmt.Errorf("read the berm-agent that is built in: %w", err)
	}
	return program, nil
}
