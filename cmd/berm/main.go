// Command berm stands between untrusted work and a container engine: it serves
// sandboxes by key over HTTP, and refuses what the policy doesn't allow.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
)

// Stamped by the linker: the version, and the commit for builds that can't see it.
var version, revision = "devel", ""

// Exit codes. A command that runs in a sandbox hands on its own.
const (
	exitFailure = 1
	exitUsage   = 2
	exitExec    = 125 // berm sandbox exec itself failed, not the command
)

func main() {
	os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run is the whole program: it returns the exit code.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := newRootCommand()
	root.SetArgs(args)
	root.SetIn(stdin)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	var exit *exitError
	if !errors.As(err, &exit) {
		// What cobra itself says is about the arguments.
		exit = &exitError{code: exitUsage, err: err}
	}
	if exit.err != nil {
		_, _ = fmt.Fprintln(stderr, "berm: "+strings.ReplaceAll(exit.err.Error(), "\n", "\n  "))
	}
	return exit.code
}

// exitError ends the program with a code; a nil err says nothing.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// action turns a function into a cobra command's body: its errors are failures,
// not wrong usage.
func action(f func(cmd *cobra.Command, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		err := f(cmd, args)
		var exit *exitError
		if err == nil || errors.As(err, &exit) {
			return err
		}
		return &exitError{code: exitFailure, err: err}
	}
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:           "berm",
		Short:         "Sandboxes for untrusted work on a container engine",
		SilenceUsage:  true,
		SilenceErrors: true,
		Example: `  berm serve --listen 127.0.0.1:7070
  berm sandbox create demo
  berm sandbox exec demo -- echo hello
  berm sandbox rm demo`,
	}
	root.AddCommand(newServeCommand(), newConfigCommand(), newDoctorCommand(), newPolicyCommand(), newSandboxCommand(),
		newWorkspaceCommand(), newChatCommand(), newFileCommand(), newStoreCommand(), newDemoCommand(), newComposeCommand(), newHealthcheckCommand(), newVersionCommand())
	return root
}

// group is a command that only holds others.
func group(use, short string, children ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: cobra.NoArgs, RunE: func(cmd *cobra.Command, _ []string) error {
		return fmt.Errorf("say what to do: %s --help lists it", cmd.CommandPath())
	}}
	cmd.AddCommand(children...)
	return cmd
}
