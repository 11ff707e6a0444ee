// Command berm stands between untrusted work and a container engine. It serves sandboxes by
// key over HTTP, and the Docker Engine API, and refuses requests that its policy doesn't allow.
package main

import (
	"context"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/cli"
	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/doctor"
	"github.com/bermhq/berm/cmd/berm/serve"
)

func main() {
	os.Exit(run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// run is the whole program. It returns the exit code.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	return config.Run(ctx, newRootCommand(), args, stdin, stdout, stderr)
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "berm",
		Short: "Sandboxes for untrusted work on a container engine",
		Long: `Sandboxes for untrusted work on a container engine.

Exit codes: 0 success, 1 failure or a refusal, 2 wrong usage or configuration. A command that
runs in a sandbox hands on its own exit code, or 124 if it ran out of time, 125 if it couldn't
be run, 137 if it was killed, and 128 plus the signal's number if a signal ended it.`,
		Version: config.Version,
		Example: `  berm serve --listen 127.0.0.1:7070
  berm sandbox create demo
  berm sandbox exec demo -- echo hello
  berm sandbox rm demo`,
	}
	root.SetVersionTemplate(config.VersionLine() + "\n")
	root.AddGroup(&cobra.Group{ID: cli.ShortGroup, Title: "Short for the commands of \"berm sandbox\":"})
	config.Add(root, serve.NewCommand(), serve.NewHealthcheckCommand(), doctor.NewCommand())
	config.Add(root, cli.NewCommands()...)
	config.Add(root, cli.NewShortCommands()...)
	return root
}
