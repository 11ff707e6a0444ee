package cli

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

func newWorkspaceCommand() *cobra.Command {
	var flags clientFlags
	cmd := config.Group("workspace", "Give users workspaces, and look at what they hold",
		newWorkspaceEnsureCommand(&flags), newWorkspaceGetCommand(&flags), newWorkspaceUsageCommand(&flags), newWorkspaceChatsCommand(&flags))
	cmd.Long = `Give users workspaces, and look at what they hold.

A user has exactly one workspace. It holds the user's chats, and all of them together
stay below its quota.`
	flags.add(cmd)
	return cmd
}

// printRows shows one thing, a line for each of its names and values in turn.
func printRows(out io.Writer, rows ...string) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for i := 0; i+1 < len(rows); i += 2 {
		_, _ = fmt.Fprintf(w, "%s:\t%s\n", rows[i], rows[i+1]) // Flush tells of errors
	}
	return w.Flush()
}

func (f *clientFlags) printWorkspace(out io.Writer, w *apitype.Workspace) error {
	if f.output == "json" {
		return config.WriteJSON(out, w)
	}
	return printRows(out, "workspace", shown(w.WorkspaceID), "user", shown(w.UserID), "created", w.CreatedAt.Format(time.RFC3339))
}

func newWorkspaceEnsureCommand(flags *clientFlags) *cobra.Command {
	return &cobra.Command{
		Use:     "ensure USER",
		Short:   "Make a user's workspace, or get the one that is there",
		Example: "  berm workspace ensure user-7",
		Args:    cobra.ExactArgs(1),
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			w, err := c.EnsureWorkspace(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return flags.printWorkspace(cmd.OutOrStdout(), w)
		}),
	}
}

func newWorkspaceGetCommand(flags *clientFlags) *cobra.Command {
	return &cobra.Command{
		Use:     "get WORKSPACE",
		Short:   "Show whose a workspace is",
		Example: "  berm workspace get 3f0c1a9e-5d21-4c0e-9a55-0c9f4a86d1b7 -o json",
		Args:    cobra.ExactArgs(1),
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			w, err := c.Workspace(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return flags.printWorkspace(cmd.OutOrStdout(), w)
		}),
	}
}

func newWorkspaceUsageCommand(flags *clientFlags) *cobra.Command {
	return &cobra.Command{
		Use:     "usage WORKSPACE",
		Short:   "Show how much of its quota a workspace uses",
		Example: "  berm workspace usage 3f0c1a9e-5d21-4c0e-9a55-0c9f4a86d1b7",
		Args:    cobra.ExactArgs(1),
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			u, err := c.WorkspaceUsage(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			if flags.output == "json" {
				return config.WriteJSON(cmd.OutOrStdout(), u)
			}
			quota := "none"
			if u.QuotaBytes != nil {
				quota = fmt.Sprintf("%d bytes (%s)", *u.QuotaBytes, shown(u.Enforcement))
			}
			return printRows(cmd.OutOrStdout(), "workspace", shown(u.WorkspaceID), "used", strconv.FormatInt(u.UsedBytes, 10)+" bytes", "quota", quota)
		}),
	}
}

func newWorkspaceChatsCommand(flags *clientFlags) *cobra.Command {
	return &cobra.Command{
		Use:     "chats WORKSPACE",
		Short:   "List a workspace's chats",
		Example: "  berm workspace chats 3f0c1a9e-5d21-4c0e-9a55-0c9f4a86d1b7",
		Args:    cobra.ExactArgs(1),
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			return flags.listChats(cmd.Context(), cmd.OutOrStdout(), c, args[0])
		}),
	}
}

// listChats prints a workspace's chats.
func (f *clientFlags) listChats(ctx context.Context, out io.Writer, c *client.Client, workspaceID string) error {
	chats := []apitype.Chat{}
	for ch, err := range c.Chats(ctx, workspaceID, 0) {
		if err != nil {
			return err
		}
		chats = append(chats, ch)
	}
	if f.output == "json" {
		return config.WriteJSON(out, chats)
	}
	w := tabwriter.NewWriter(out, 0, 0, 3, ' ', 0)
	_, _ = fmt.Fprintln(w, "CHAT\tCREATED") // Flush tells of errors
	for _, ch := range chats {
		_, _ = fmt.Fprintf(w, "%s\t%s\n", shown(ch.ChatID), ch.CreatedAt.Format(time.RFC3339))
	}
	return w.Flush()
}
