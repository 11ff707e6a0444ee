package cli

import (
	"fmt"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

func newWorkspaceCommand() *cobra.Command {
	var flags clientFlags
	cmd := config.Group("workspace", "Give users workspaces, and look at what they hold",
		&cobra.Command{
			Use:     "ensure USER",
			Short:   "Make a user's workspace, or get the one that is there",
			Example: "  berm workspace ensure user-7",
			RunE:    ask(&flags, (*client.Client).EnsureWorkspace, showWorkspace),
		},
		&cobra.Command{
			Use:     "get WORKSPACE",
			Short:   "Show whose a workspace is",
			Example: "  berm workspace get 3f0c1a9e-5d21-4c0e-9a55-0c9f4a86d1b7 -o json",
			RunE:    ask(&flags, (*client.Client).Workspace, showWorkspace),
		},
		&cobra.Command{
			Use:     "usage WORKSPACE",
			Short:   "Show how much of its quota a workspace uses",
			Example: "  berm workspace usage 3f0c1a9e-5d21-4c0e-9a55-0c9f4a86d1b7",
			RunE:    ask(&flags, (*client.Client).WorkspaceUsage, showUsage),
		},
		&cobra.Command{
			Use:     "chats WORKSPACE",
			Short:   "List a workspace's chats",
			Example: "  berm workspace chats 3f0c1a9e-5d21-4c0e-9a55-0c9f4a86d1b7",
			RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
				chats, err := collect(c.Chats(cmd.Context(), args[0], 0))
				return answer(&flags, cmd, chats, err, showChats)
			}),
		})
	cmd.Long = `Give users workspaces, and look at what they hold.

A user has exactly one workspace. It holds the user's chats, and all of them together
stay below its quota.`
	flags.add(cmd)
	return cmd
}

func showWorkspace(w *apitype.Workspace) string {
	return rows("workspace", shown(w.WorkspaceID), "user", shown(w.UserID), "created", w.CreatedAt.Format(time.RFC3339))
}

func showUsage(u *apitype.WorkspaceUsage) string {
	quota := "none"
	if u.QuotaBytes != nil {
		quota = fmt.Sprintf("%d bytes (%s)", *u.QuotaBytes, shown(u.Enforcement))
	}
	return rows("workspace", shown(u.WorkspaceID), "used", strconv.FormatInt(u.UsedBytes, 10)+" bytes", "quota", quota)
}
