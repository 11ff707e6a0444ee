package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

func newSandboxCommand() *cobra.Command {
	var flags clientFlags
	cmd := config.Group("sandbox", "Make, use and remove sandboxes through a server",
		newCreateCommand(&flags), newListCommand(&flags), newExecCommand(&flags), newShellCommand(&flags), newPsCommand(&flags),
		newStatsCommand(&flags), newPauseCommand(&flags), newResumeCommand(&flags), newCpCommand(&flags),
		newProcessCommand(&flags), newFilesCommand(&flags), newPortCommand(&flags), newRenewCommand(&flags), newRemoveCommand(&flags),
		&cobra.Command{
			Use:     "show KEY",
			Short:   "Show all there is to know about a sandbox",
			Example: "  berm sandbox show mine -o json",
			RunE:    ask(&flags, (*client.Client).Get, showSandbox),
		})
	flags.add(cmd)
	return cmd
}

func newListCommand(flags *clientFlags) *cobra.Command {
	var opts client.ListOptions
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List your sandboxes",
		Example: "  berm sandbox ls --status running --metadata team=blue",
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, _ []string) error {
			return flags.listSandboxes(cmd, c, opts)
		}),
	}
	flags.quiet(cmd, "{{.Key}}")
	cmd.Flags().StringVar(&opts.Status, "status", "", "only those of this status")
	cmd.Flags().StringToStringVar(&opts.Metadata, "metadata", nil, "only those with this metadata, NAME=VALUE")
	return cmd
}

func (f *clientFlags) listSandboxes(cmd *cobra.Command, c *client.Client, opts client.ListOptions) error {
	list, err := collect(c.List(cmd.Context(), opts))
	return answer(f, cmd, list, err, table("KEY\tSTATUS\tIMAGE\tCREATED\tENDS IN", func(sb apitype.Sandbox) string {
		return fmt.Sprintf("%s\t%s\t%s\t%s\t%s", sb.Key, sb.Status, sb.Spec.Image, sb.CreatedAt.Format(time.RFC3339), endsIn(sb))
	}))
}

// endsIn returns the time until the sandbox ends if nobody uses it.
func endsIn(sb apitype.Sandbox) time.Duration {
	end := sb.ExpiresAt
	if sb.IdleExpiresAt != nil && sb.IdleExpiresAt.Before(end) {
		end = *sb.IdleExpiresAt
	}
	return max(0, time.Until(end).Round(time.Second))
}

func newRenewCommand(flags *clientFlags) *cobra.Command {
	var ttl time.Duration
	cmd := &cobra.Command{
		Use:     "renew KEY",
		Short:   "Give a sandbox more time",
		Example: "  berm sandbox renew mine --ttl 1h",
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			sb, err := c.Renew(cmd.Context(), args[0], ttl)
			return answer(flags, cmd, sb, err, showSandbox)
		}),
	}
	cmd.Flags().DurationVar(&ttl, "ttl", 0, "from now (default the sandbox's own), never past its deadline")
	return cmd
}

func newRemoveCommand(flags *clientFlags) *cobra.Command {
	return &cobra.Command{
		Use:     "rm KEY...",
		Aliases: []string{"delete"},
		Short:   "Remove sandboxes",
		Example: "  berm sandbox rm mine yours",
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			results := []apitype.DeleteResult{}
			refused := each(args, func(key string) error {
				res, err := c.Delete(cmd.Context(), key)
				if err != nil {
					return fmt.Errorf("%s: %w", key, explain(err))
				}
				results = append(results, *res)
				return nil
			})
			return errors.Join(refused, answer(flags, cmd, results, nil, lines(func(res apitype.DeleteResult) string {
				return res.ChatID + ": " + strings.ReplaceAll(res.Result, "_", " ")
			})))
		}),
	}
}

func newPauseCommand(flags *clientFlags) *cobra.Command {
	return newFreezeCommand(flags, "pause", "Freeze the processes of sandboxes", (*client.Client).Pause)
}

func newResumeCommand(flags *clientFlags) *cobra.Command {
	return newFreezeCommand(flags, "resume", "Let the processes of paused sandboxes go on", (*client.Client).Resume)
}

func newFreezeCommand(flags *clientFlags, name, short string, do func(*client.Client, context.Context, string) (*apitype.Sandbox, error)) *cobra.Command {
	return &cobra.Command{
		Use:     name + " KEY...",
		Short:   short,
		Example: "  berm " + name + " mine yours",
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			return each(args, func(key string) error {
				sb, err := do(c, cmd.Context(), key)
				return answer(flags, cmd, sb, err, func(sb *apitype.Sandbox) string { return sb.Key + ": " + sb.Status + "\n" })
			})
		}),
	}
}

// keyStats is what a sandbox uses.
type keyStats struct {
	Key string `json:"key"`
	apitype.Stats
}

func newStatsCommand(flags *clientFlags) *cobra.Command {
	return &cobra.Command{
		Use:     "stats KEY...",
		Short:   "Show what sandboxes use of CPU, memory, processes and network",
		Example: "  berm stats mine yours",
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			list := []keyStats{}
			refused := each(args, func(key string) error {
				stats, err := c.Stats(cmd.Context(), key)
				if err == nil {
					list = append(list, keyStats{key, *stats})
				}
				return err
			})
			return errors.Join(refused, answer(flags, cmd, list, nil, table("KEY\tCPU SECONDS\tMEMORY\tLIMIT\tPIDS\tRECEIVED\tSENT", func(s keyStats) string {
				return fmt.Sprintf("%s\t%.2f\t%s\t%s\t%d\t%s\t%s", s.Key, s.CPUSeconds, inMiB(s.MemoryBytes), inMiB(s.MemoryLimitBytes), s.Pids, inMiB(s.RxBytes), inMiB(s.TxBytes))
			})))
		}),
	}
}

func showSandbox(sb *apitype.Sandbox) string {
	spec, _ := json.MarshalIndent(sb.Spec, "", "  ") // it has been JSON
	pairs := []string{"key", sb.Key, "result", sb.Result, "status", sb.Status, "error", sb.Error, "session", sb.SessionID, "container", sb.ContainerID}
	if sb.Endpoint != nil {
		pairs = append(pairs, "address", strings.TrimSuffix(net.JoinHostPort(sb.Endpoint.IP, strconv.Itoa(sb.Endpoint.Port)), ":0"))
	}
	pairs = append(pairs, "created", sb.CreatedAt.Format(time.RFC3339), "expires", sb.ExpiresAt.Format(time.RFC3339))
	if sb.IdleExpiresAt != nil {
		pairs = append(pairs, "idles out", sb.IdleExpiresAt.Format(time.RFC3339))
	}
	pairs = append(pairs, "deadline", sb.Deadline.Format(time.RFC3339))
	for _, name := range slices.Sorted(maps.Keys(sb.Metadata)) {
		pairs = append(pairs, "metadata", name+"="+sb.Metadata[name])
	}
	for _, o := range sb.Overridden {
		pairs = append(pairs, "overridden", fmt.Sprintf("%s: asked for %v, has %v (%s)", o.Field, o.Requested, o.Effective, o.Rule))
	}
	return rows(pairs...) + fmt.Sprintf("spec: %s\n", spec)
}
