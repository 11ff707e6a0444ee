package main

import (
	"fmt"
	"runtime/debug"

	"github.com/spf13/cobra"
)

func newVersionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version, the commit and the Go version",
		Args:  cobra.NoArgs,
		RunE: action(func(cmd *cobra.Command, _ []string) error {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), versionLine())
			return err
		}),
	}
}

// versionLine tells what this binary was built from. The commit is known when the
// build recorded it.
func versionLine() string {
	line := "berm " + version
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return line
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			line += ", commit " + s.Value
		}
	}
	return line + ", " + info.GoVersion
}
