package cli

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/proxy/client"
)

const (
	completeTime = 2 * time.Second // nobody waits longer for a shell's completion
	maxComplete  = 1000            // keys
)

// complete lets shells complete the arguments of a command, and of those in it, that name a
// sandbox or a process, by asking the server.
func (f *clientFlags) complete(cmd *cobra.Command) {
	for _, child := range cmd.Commands() {
		f.complete(child)
	}
	names := strings.Fields(cmd.Use)[1:]
	if len(names) == 0 || cmd.ValidArgsFunction != nil {
		return
	}
	cmd.ValidArgsFunction = func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		name := names[min(len(args), len(names)-1)]
		if len(args) >= len(names) && !strings.HasSuffix(strings.Trim(name, "[]"), "...") {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var list func(context.Context, *client.Client, []string) []cobra.Completion
		switch strings.TrimSuffix(strings.Trim(name, "[]"), "...") {
		case "KEY":
			list = completeKeys
		case "ID":
			list = completeProcesses
		case "FILE":
			return nil, cobra.ShellCompDirectiveDefault
		default:
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		c, err := f.connect()
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), completeTime)
		defer cancel()
		return list(ctx, c, args), cobra.ShellCompDirectiveNoFileComp
	}
}

// completeKeys returns the keys of sandboxes, as many as come in time.
func completeKeys(ctx context.Context, c *client.Client, _ []string) []cobra.Completion {
	var keys []cobra.Completion
	for sb, err := range c.List(ctx, client.ListOptions{}) {
		if err != nil || len(keys) == maxComplete {
			break
		}
		keys = append(keys, cobra.CompletionWithDesc(sb.Key, sb.Status))
	}
	return keys
}

// completeProcesses returns the IDs of a sandbox's processes.
func completeProcesses(ctx context.Context, c *client.Client, args []string) []cobra.Completion {
	var ids []cobra.Completion
	processes, _ := c.Processes(ctx, args[0]) // none on an error
	for _, p := range processes {
		ids = append(ids, cobra.CompletionWithDesc(p.ProcessID, processStatus(p)))
	}
	return ids
}
