// Package cli has the commands: clients of the sandbox API, and tools for local files.
package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"text/template"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/proxy/client"
)

const defaultURL = "http://127.0.0.1:7070"

// clientFlags say how commands reach the server, and how they print.
type clientFlags struct {
	url, tokenFile, output string
	template               *template.Template // nil: output is no template
}

// NewCommands returns the commands that are clients of a server, and those that need no server.
func NewCommands() []*cobra.Command {
	return []*cobra.Command{
		newSandboxCommand(), newWorkspaceCommand(), newChatCommand(), newFileCommand(),
		newConfigCommand(), newPolicyCommand(), newStoreCommand(), newInitCommand(), newVersionCommand(), newManCommand(),
	}
}

// NewShortCommands returns commands of "berm sandbox" that also exist directly below "berm".
func NewShortCommands() []*cobra.Command {
	var cmds []*cobra.Command
	for _, make := range []func(*clientFlags) *cobra.Command{
		newPsCommand, newExecCommand, newProcessLogsCommand, newStatsCommand, newPauseCommand, newResumeCommand, newCpCommand,
	} {
		var flags clientFlags
		cmd := make(&flags)
		cmd.GroupID = ShortGroup
		flags.add(cmd)
		cmds = append(cmds, cmd)
	}
	return cmds
}

// ShortGroup is the group of the short commands in the program's help.
const ShortGroup = "short"

// add adds the flags to a command and its children, explains them in its help, and sets up
// completion of first arguments.
func (f *clientFlags) add(cmd *cobra.Command) {
	if cmd.Long == "" {
		cmd.Long = cmd.Short + "."
	}
	cmd.Long += `

The server is that of --url or BERM_URL (` + defaultURL + ` by default; unix:///path
for a unix socket), the token that of --token-file or BERM_TOKEN.`
	cmd.PersistentFlags().StringVar(&f.url, "url", "", "the server (default $BERM_URL, else "+defaultURL+")")
	cmd.PersistentFlags().StringVar(&f.tokenFile, "token-file", "", "file with the token (default $BERM_TOKEN)")
	cmd.PersistentFlags().StringVarP(&f.output, "output", "o", formatTable, "table, json or a Go template, like '{{.Key}} {{json .Spec}}'")
	cmd.PersistentFlags().StringVar(&f.output, "format", formatTable, "the same as --output")
	for _, name := range []string{"output", "format"} {
		_ = cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions([]cobra.Completion{formatTable, formatJSON}, cobra.ShellCompDirectiveNoFileComp))
	}
	f.complete(cmd)
}

// connect returns the client. It fails if the output format is unknown.
func (f *clientFlags) connect() (*client.Client, error) {
	if err := f.parseFormat(); err != nil {
		return nil, err
	}
	token, err := f.token()
	if err != nil {
		return nil, err
	}
	return client.New(client.Options{BaseURL: f.server(), Token: token})
}

// clientAction returns the body of a command that calls the server. It explains refusals.
func (f *clientFlags) clientAction(do func(cmd *cobra.Command, c *client.Client, args []string) error) func(*cobra.Command, []string) error {
	return config.Action(func(cmd *cobra.Command, args []string) error {
		c, err := f.connect()
		if err != nil {
			return err
		}
		return explain(do(cmd, c, args))
	})
}

// server returns the address of the server.
func (f *clientFlags) server() string { return cmp.Or(f.url, os.Getenv("BERM_URL"), defaultURL) }

func (f *clientFlags) token() (string, error) {
	if f.tokenFile == "" {
		return os.Getenv("BERM_TOKEN"), nil
	}
	data, err := os.ReadFile(f.tokenFile)
	if err != nil {
		return "", fmt.Errorf("read the token: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}

// here returns a signed URL at the server address that this program uses. Over a unix socket it
// returns the URL as the server has signed it.
func (f *clientFlags) here(signed, path string) string {
	if strings.HasPrefix(f.server(), "unix:") {
		return signed
	}
	return strings.TrimSuffix(f.server(), "/") + path
}

// explain adds the reasons of a refusal to its text.
func explain(err error) error {
	answer, ok := errors.AsType[*client.Error](err)
	if !ok {
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

// answer prints an answer of the server, as --output says or as the text that show returns.
func answer[T any](f *clientFlags, cmd *cobra.Command, v T, err error, show func(v T) string) error {
	switch {
	case err != nil:
		return err
	case f.output == formatJSON:
		return config.WriteJSON(cmd.OutOrStdout(), v)
	case f.template != nil:
		return f.execute(cmd.OutOrStdout(), v)
	}
	_, err = io.WriteString(cmd.OutOrStdout(), show(v))
	return err
}

// ask returns the body of a command that makes one call about its first argument.
func ask[T any](f *clientFlags, call func(*client.Client, context.Context, string) (T, error), show func(T) string) func(*cobra.Command, []string) error {
	return f.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
		v, err := call(c, cmd.Context(), args[0])
		return answer(f, cmd, v, err, show)
	})
}

// collect returns the values of an iterator, never nil, up to the first error.
func collect[T any](seq iter.Seq2[T, error]) ([]T, error) {
	list := []T{}
	for v, err := range seq {
		if err != nil {
			return list, err
		}
		list = append(list, v)
	}
	return list, nil
}

// each calls do for every name, and joins the errors.
func each(names []string, do func(name string) error) error {
	var errs []error
	for _, name := range names {
		errs = append(errs, explain(do(name)))
	}
	return errors.Join(errs...)
}

// lines returns a function that prints a line for each value.
func lines[T any](line func(T) string) func([]T) string {
	return func(list []T) string {
		var b strings.Builder
		for _, v := range list {
			b.WriteString(line(v) + "\n")
		}
		return b.String()
	}
}

// table returns a function that makes a table. Row returns the tab-separated cells of a value.
func table[T any](heading string, row func(T) string) func([]T) string {
	return func(list []T) string { return columns(3, heading, list, row) }
}

// columns aligns a heading, unless it is empty, and the tab-separated cells of values.
func columns[T any](gap int, heading string, list []T, row func(T) string) string {
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, gap, ' ', 0)
	if heading != "" {
		_, _ = fmt.Fprintln(w, heading)
	}
	for _, v := range list {
		_, _ = fmt.Fprintln(w, row(v))
	}
	_ = w.Flush() // a Builder returns no error
	return b.String()
}

// rows aligns names and their values, which come in turn. It leaves out empty values.
func rows(pairs ...string) string {
	named := slices.DeleteFunc(slices.Collect(slices.Chunk(pairs, 2)), func(pair []string) bool { return pair[1] == "" })
	return columns(2, "", named, func(pair []string) string { return pair[0] + ":\t" + pair[1] })
}

// usage is an error about the arguments.
func usage(format string, args ...any) error {
	return &config.ExitError{Code: config.ExitUsage, Err: fmt.Errorf(format, args...)}
}
