// Package compose holds the stacks that people deploy, for `berm compose init` to write.
package compose

import "embed"

// Files are a stack NAME.yaml for each name in Stacks, docker-api.yaml, which opens the Docker
// Engine API in those that have a place for it, and what they mount: policy/NAME.yaml,
// app for agent-app, observability for the stack of that name.
//
//go:embed *.yaml app observability policy
var Files embed.FS

// Stacks are the names of the stacks, the simplest first.
var Stacks = []string{"minimal", "agent-app", "dind", "containerd", "observability"}
