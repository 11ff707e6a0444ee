// Package compose holds the stacks and configurations that people deploy, for `berm init` to write.
package compose

import "embed"

// Files are a stack NAME.yaml for each name in Stacks, docker-api.yaml, which opens the Docker
// Engine API in those that have a place for it, and what they mount: policy/NAME.yaml,
// app for agent-app, observability for the stack of that name. Host has the configurations of
// servers outside of a container: machine and containerd, with the policies of these names.
//
//go:embed *.yaml app host observability policy
var Files embed.FS

// Stacks are the names of the stacks, the simplest first.
var Stacks = []string{"minimal", "agent-app", "dind", "containerd", "observability"}
