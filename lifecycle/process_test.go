package lifecycle_test

import "github.com/bermhq/berm/lifecycle"

// process is a start of a managed process in sandbox k.
func process(id string, command string, args ...string) lifecycle.ProcessRequest {
	create := request("k")
	return lifecycle.ProcessRequest{Tenant: "a", Key: "k", Create: &create, ID: id, Command: command, Args: args}
}
