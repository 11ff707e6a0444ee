package cli

import (
	"context"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

func newChatCommand() *cobra.Command {
	var flags clientFlags
	cmd := config.Group("chat", "Make, use and delete chats, whose content outlives sandboxes",
		newChatCreateCommand(&flags), newChatListCommand(&flags), newChatHistoryCommand(&flags),
		&cobra.Command{
			Use:     "get CHAT",
			Short:   "Show which workspace a chat belongs to",
			Example: "  berm chat get chat-42 -o json",
			RunE:    ask(&flags, (*client.Client).Chat, showChat),
		},
		&cobra.Command{
			Use:     "delete CHAT...",
			Aliases: []string{"rm"},
			Short:   "Delete chats with all that they hold",
			Long: `Delete chats with all that they hold. A chat that has a live sandbox isn't: delete
that first.`,
			Example: "  berm chat delete chat-42",
			RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
				return each(args, func(id string) error { return c.DeleteChat(cmd.Context(), id) })
			}),
		},
		&cobra.Command{
			Use:   "tar CHAT [FILE]",
			Short: "Take all that a chat holds out as a tar archive",
			Long: `Write all that a chat's directory holds, its history and subdirectories as well, to a
local file as a tar archive; to standard output if none is said, or "-".`,
			Example: `  berm chat tar chat-42 chat-42.tar
  berm chat tar chat-42 | tar t`,
			RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
				return download(cmd, argument(args, 1, stdio), func() (io.ReadCloser, error) { return c.ReadChatTar(cmd.Context(), args[0]) })
			}),
		},
		&cobra.Command{
			Use:   "untar CHAT [FILE]",
			Short: "Unpack a tar archive over what a chat holds",
			Long: `Unpack a tar archive over what a chat's directory holds: all of it, or nothing. It
comes from standard input if no local file is said, or "-".`,
			Example: `  berm chat untar chat-43 chat-42.tar
  tar c notes | berm chat untar chat-42`,
			RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
				_, err := send(cmd, argument(args, 1, stdio), func(l *local) (any, error) { return nil, c.WriteChatTar(cmd.Context(), args[0], l.content) })
				return err
			}),
		})
	cmd.Long = `Make, use and delete chats, whose content outlives sandboxes.

A chat has a history and files; see "berm file". The sandbox whose key is the chat's ID
mounts them.`
	flags.add(cmd)
	return cmd
}

// owner names the workspace of a chat, by flags.
type owner struct{ workspace, user string }

func (o *owner) add(cmd *cobra.Command) {
	cmd.Flags().StringVar(&o.workspace, "workspace", "", "ID of the workspace")
	cmd.Flags().StringVar(&o.user, "user", "", "user whose workspace it is; made if there is none")
	cmd.MarkFlagsOneRequired("workspace", "user")
	cmd.MarkFlagsMutuallyExclusive("workspace", "user")
}

// workspaceID returns the ID. It asks the server for a user's.
func (o *owner) workspaceID(ctx context.Context, c *client.Client) (string, error) {
	if o.workspace != "" {
		return o.workspace, nil
	}
	w, err := c.EnsureWorkspace(ctx, o.user)
	if err != nil {
		return "", err
	}
	return w.WorkspaceID, nil
}

func showChat(ch *apitype.Chat) string {
	return rows("chat", shown(ch.ChatID), "workspace", shown(ch.WorkspaceID), "created", ch.CreatedAt.Format(time.RFC3339))
}

func newChatCreateCommand(flags *clientFlags) *cobra.Command {
	var of owner
	cmd := &cobra.Command{
		Use:   "create CHAT",
		Short: "Make a chat, or get the one that is there",
		Long: `Make a chat in a workspace, or get the one that is there. It is an error if that
belongs to another workspace.`,
		Example: `  berm chat create chat-42 --user user-7
  berm chat create chat-42 --workspace 3f0c1a9e-5d21-4c0e-9a55-0c9f4a86d1b7`,
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			id, err := of.workspaceID(cmd.Context(), c)
			if err != nil {
				return err
			}
			ch, err := c.EnsureChat(cmd.Context(), args[0], id)
			return answer(flags, cmd, ch, err, showChat)
		}),
	}
	of.add(cmd)
	return cmd
}

var showChats = table("CHAT\tCREATED", func(ch apitype.Chat) string {
	return shown(ch.ChatID) + "\t" + ch.CreatedAt.Format(time.RFC3339)
})

func newChatListCommand(flags *clientFlags) *cobra.Command {
	var of owner
	cmd := &cobra.Command{
		Use:     "list",
		Aliases: []string{"ls"},
		Short:   "List a workspace's chats",
		Example: "  berm chat list --user user-7",
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, _ []string) error {
			id, err := of.workspaceID(cmd.Context(), c)
			if err != nil {
				return err
			}
			chats, err := collect(c.Chats(cmd.Context(), id, 0))
			return answer(flags, cmd, chats, err, showChats)
		}),
	}
	of.add(cmd)
	return flags.quiet(cmd, "{{.ChatID}}")
}

func newChatHistoryCommand(flags *clientFlags) *cobra.Command {
	return &cobra.Command{
		Use:   "history CHAT [show | set FILE | append FILE]",
		Short: "Show a chat's history, replace it, or add to it",
		Long: `Show a chat's history, replace it by a local file, or add one to its end: all of the
file, or nothing. A FILE of "-" is standard input.`,
		Example: `  berm chat history chat-42
  berm chat history chat-42 set history.md
  echo '- and one more line' | berm chat history chat-42 append -`,
		Args: cobra.RangeArgs(1, 3),
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			verb := argument(args, 1, "show")
			write := map[string]func(*client.Client, context.Context, string, io.Reader) (*apitype.ChatHistory, error){
				"set": (*client.Client).PutHistory, "append": (*client.Client).AppendHistory,
			}[verb]
			switch {
			case verb == "show" && len(args) < 3:
				r, err := c.History(cmd.Context(), args[0], 0, 0)
				return copyAll(cmd.OutOrStdout(), r, err)
			case write == nil || len(args) < 3:
				return usage("say show, set FILE or append FILE after the chat")
			}
			h, err := send(cmd, args[2], func(l *local) (*apitype.ChatHistory, error) { return write(c, cmd.Context(), args[0], l.content) })
			return answer(flags, cmd, h, err, func(h *apitype.ChatHistory) string { return fmt.Sprintf("%d bytes\n", h.SizeBytes) })
		}),
	}
}
