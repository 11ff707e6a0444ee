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

	"github.com/bermhq/berm/cmd/berm/cli"
	"github.com/bermhq/berm/cmd/berm/config"
)

// Stamped by the linker: the version, and the commit for builds that can't see it.
var version, revision = "devel", ""

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
	var exit *config.ExitError
	if !errors.As(err, &exit) {
		// What cobra itself says is about the arguments.
		exit = &config.ExitError{Code: config.ExitUsage, Err: err}
	}
	if exit.Err != nil {
		_, _ = fmt.Fprintln(stderr, "berm: "+strings.ReplaceAll(exit.Err.Error(), "\n", "\n  "))
	}
	return exit.Code
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
	root.AddCommand(newServeCommand(), newConfigCommand(), newDoctorCommand(), newPolicyCommand(),
		newStoreCommand(), newDemoCommand(), newComposeCommand(), newHealthcheckCommand(), newVersionCommand())
	root.AddCommand(cli.NewCommands()...)
	return root
}
