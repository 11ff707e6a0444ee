// Package cli has the commands that are clients of the sandbox API.
package cli

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

const defaultURL = "http://127.0.0.1:7070"

// clientFlags are how the commands that need a server reach it, and how they print.
type clientFlags struct {
	url, tokenFile, output string
}

// NewCommands makes the commands that are clients of a server, and those that need none.
func NewCommands() []*cobra.Command {
	return []*cobra.Command{
		newSandboxCommand(), newWorkspaceCommand(), newChatCommand(), newFileCommand(),
		newConfigCommand(), newPolicyCommand(), newStoreCommand(), newDemoCommand(), newComposeCommand(), newVersionCommand(),
	}
}

func newSandboxCommand() *cobra.Command {
	var flags clientFlags
	cmd := config.Group("sandbox", "Make, use and remove sandboxes through a server",
		newCreateCommand(&flags), newListCommand(&flags), newShowCommand(&flags),
		newExecCommand(&flags), newShellCommand(&flags), newPsCommand(&flags), newProcessCommand(&flags), newFilesCommand(&flags),
		newPortCommand(&flags), newRenewCommand(&flags), newRemoveCommand(&flags))
	flags.add(cmd)
	return cmd
}

// add gives a group of commands the flags, and says in its help what they are for.
func (f *clientFlags) add(cmd *cobra.Command) {
	if cmd.Long == "" {
		cmd.Long = cmd.Short + "."
	}
	cmd.Long += `

The server is that of --url or BERM_URL (` + defaultURL + ` by default; unix:///path
for a unix socket), the token that of --token-file or BERM_TOKEN.`
	cmd.PersistentFlags().StringVar(&f.url, "url", "", "the server (default $BERM_URL, else "+defaultURL+")")
	cmd.PersistentFlags().StringVar(&f.tokenFile, "token-file", "", "file with the token (default $BERM_TOKEN)")
	cmd.PersistentFlags().StringVarP(&f.output, "output", "o", "table", "table or json")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]cobra.Completion{"table", "json"}, cobra.ShellCompDirectiveNoFileComp))
}

// connect makes the client, and checks how to print.
func (f *clientFlags) connect() (*client.Client, error) {
	if f.output != "table" && f.output != "json" {
		return nil, &config.ExitError{Code: config.ExitUsage, Err: fmt.Errorf("--output is %q, want table or json", f.output)}
	}
	url, token, err := f.server()
	if err != nil {
		return nil, err
	}
	return client.New(client.Options{BaseURL: url, Token: token})
}

// clientAction is the body of a command that calls the server. What the server refuses
// it with is explained.
func (f *clientFlags) clientAction(do func(cmd *cobra.Command, c *client.Client, args []string) error) func(*cobra.Command, []string) error {
	return config.Action(func(cmd *cobra.Command, args []string) error {
		c, err := f.connect()
		if err != nil {
			return err
		}
		return explain(do(cmd, c, args))
	})
}

// server is where the server is, and what to show it.
func (f *clientFlags) server() (url, token string, err error) {
	if url = cmp.Or(f.url, os.Getenv("BERM_URL"), defaultURL); f.tokenFile == "" {
		return url, os.Getenv("BERM_TOKEN"), nil
	}
	data, err := os.ReadFile(f.tokenFile)
	if err != nil {
		return "", "", fmt.Errorf("read the token: %w", err)
	}
	return url, strings.TrimSpace(string(data)), nil
}

// here gives a signed URL the name that the server is known by here.
func (f *clientFlags) here(signed, path string) string {
	base, _, err := f.server()
	if err != nil || strings.HasPrefix(base, "unix:") {
		return signed
	}
	return strings.TrimSuffix(base, "/") + path
}

// explain turns an answer's problem into what a person has to know.
func explain(err error) error {
	var answer *client.Error
	if !errors.As(err, &answer) {
		return err
	}
	text := answer.Error()
	for _, r := range answer.Problem.Reasons {
		text += fmt.Sprintf("\n%s: rule %s; allowed: %s", r.Field, r.Rule, r.Allowed)
	}
	for _, d := range answer.Problem.Differences {
		text += fmt.Sprintf("\n%s is %v, asked for %v", d.Field, d.Current, d.Requested)
	}
	return errors.New(text)
}

func newListCommand(flags *clientFlags) *cobra.Command {
	var opts client.ListOptions
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List your sandboxes",
		Example: "  berm sandbox ls --status running --metadata team=blue",
		Args:    cobra.NoArgs,
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, _ []string) error {
			sandboxes := []apitype.Sandbox{}
			for sb, err := range c.List(cmd.Context(), opts) {
				if err != nil {
					return err
				}
				sandboxes = append(sandboxes, sb)
			}
			if flags.output == "json" {
				return config.WriteJSON(cmd.OutOrStdout(), sandboxes)
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 3, ' ', 0)
			_, _ = fmt.Fprintln(w, "KEY\tSTATUS\tIMAGE\tCREATED\tENDS IN") // Flush tells of errors
			for _, sb := range sandboxes {
				_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", sb.Key, sb.Status, sb.Spec.Image, sb.CreatedAt.Format(time.RFC3339), endsIn(sb))
			}
			return w.Flush()
		}),
	}
	cmd.Flags().StringVar(&opts.Status, "status", "", "only those of this status")
	cmd.Flags().StringToStringVar(&opts.Metadata, "metadata", nil, "only those with this metadata, NAME=VALUE")
	return cmd
}

// endsIn is how long the sandbox has if nothing happens to it.
func endsIn(sb apitype.Sandbox) time.Duration {
	end := sb.ExpiresAt
	if sb.IdleExpiresAt != nil && sb.IdleExpiresAt.Before(end) {
		end = *sb.IdleExpiresAt
	}
	return max(0, time.Until(end).Round(time.Second))
}

func newShowCommand(flags *clientFlags) *cobra.Command {
	return &cobra.Command{
		Use:     "show KEY",
		Short:   "Show all there is to know about a sandbox",
		Example: "  berm sandbox show mine -o json",
		Args:    cobra.ExactArgs(1),
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			sb, err := c.Get(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return flags.print(cmd.OutOrStdout(), sb)
		}),
	}
}

func newRenewCommand(flags *clientFlags) *cobra.Command {
	var ttl time.Duration
	cmd := &cobra.Command{
		Use:     "renew KEY",
		Short:   "Give a sandbox more time",
		Example: "  berm sandbox renew mine --ttl 1h",
		Args:    cobra.ExactArgs(1),
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			sb, err := c.Renew(cmd.Context(), args[0], ttl)
			if err != nil {
				return err
			}
			return flags.print(cmd.OutOrStdout(), sb)
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
		Args:    cobra.MinimumNArgs(1),
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			var errs []error
			results := []apitype.DeleteResult{}
			for _, key := range args {
				res, err := c.Delete(cmd.Context(), key)
				if err != nil {
					errs = append(errs, fmt.Errorf("%s: %w", key, explain(err)))
					continue
				}
				results = append(results, *res)
			}
			if flags.output == "json" {
				errs = append(errs, config.WriteJSON(cmd.OutOrStdout(), results))
				return errors.Join(errs...)
			}
			for _, res := range results {
				_, err := fmt.Fprintf(cmd.OutOrStdout(), "%s: %s\n", res.ChatID, strings.ReplaceAll(res.Result, "_", " "))
				errs = append(errs, err)
			}
			return errors.Join(errs...)
		}),
	}
}

// print shows one sandbox.
func (f *clientFlags) print(out io.Writer, sb *apitype.Sandbox) error {
	if f.output == "json" {
		return config.WriteJSON(out, sb)
	}
	spec, err := json.MarshalIndent(sb.Spec, "", "  ")
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	row := func(name, value string) {
		if value != "" {
			_, _ = fmt.Fprintf(w, "%s:\t%s\n", name, value) // Flush tells of errors
		}
	}
	row("key", sb.Key)
	row("result", sb.Result)
	row("status", sb.Status)
	row("error", sb.Error)
	row("session", sb.SessionID)
	row("container", sb.ContainerID)
	if sb.Endpoint != nil {
		row("address", strings.TrimSuffix(net.JoinHostPort(sb.Endpoint.IP, strconv.Itoa(sb.Endpoint.Port)), ":0"))
	}
	row("created", sb.CreatedAt.Format(time.RFC3339))
	row("expires", sb.ExpiresAt.Format(time.RFC3339))
	if sb.IdleExpiresAt != nil {
		row("idles out", sb.IdleExpiresAt.Format(time.RFC3339))
	}
	row("deadline", sb.Deadline.Format(time.RFC3339))
	for _, name := range sortedNames(sb.Metadata) {
		row("metadata", name+"="+sb.Metadata[name])
	}
	for _, o := range sb.Overridden {
		row("overridden", fmt.Sprintf("%s: asked for %v, has %v (%s)", o.Field, o.Requested, o.Effective, o.Rule))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err = fmt.Fprintf(out, "spec: %s\n", spec)
	return err
}
