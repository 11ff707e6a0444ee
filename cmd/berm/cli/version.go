package cli

import (
	"fmt"
	"os"
	"runtime/debug"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"

	"github.com/bermhq/berm/cmd/berm/config"
)

func newVersionCommand() *cobra.Command {
	var output string
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version, the commit and the Go version",
		Long: `Print the version, the commit and the Go version. With -o json also the platform
and the commit's time. "go version -m" prints the modules that a binary was built from;
the berm-agent in it is built from the same ones.`,
		Example: "  berm version\n  berm version -o json\n  go version -m $(command -v berm)",
		Args:    cobra.NoArgs,
		RunE: config.Action(func(cmd *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return usage("--output is %q, want text or json", output)
			}
			if output == "text" {
				_, err := fmt.Fprintln(cmd.OutOrStdout(), config.VersionLine())
				return err
			}
			return config.WriteJSON(cmd.OutOrStdout(), aboutBuild())
		}),
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]cobra.Completion{"text", "json"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func newManCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "man DIR",
		Short:   "Write a man page for each command into a directory",
		Example: "  berm man /usr/local/share/man/man1",
		Hidden:  true,
		RunE: config.Action(func(cmd *cobra.Command, args []string) error {
			if err := os.MkdirAll(args[0], 0o755); err != nil { //nolint:gosec // man pages are for all
				return err
			}
			root := cmd.Root()
			root.DisableAutoGenTag = true
			return doc.GenManTree(root, &doc.GenManHeader{Section: "1", Source: "berm " + config.Version, Manual: "Berm"}, args[0])
		}),
	}
}

// buildAbout describes a build.
type buildAbout struct {
	Version   string `json:"version"`
	Commit    string `json:"commit,omitempty"`
	Time      string `json:"time,omitempty"`     // of the commit, RFC 3339
	Modified  bool   `json:"modified,omitempty"` // the sources differed from the commit's
	GoVersion string `json:"go_version"`
	Platform  string `json:"platform"`
}

func aboutBuild() buildAbout {
	info, _ := debug.ReadBuildInfo() // a module's binary always has it
	return buildAbout{
		Version: config.Version, Commit: config.Commit(info), Time: config.Setting(info, "vcs.time"), Modified: config.Setting(info, "vcs.modified") == "true",
		GoVersion: info.GoVersion, Platform: config.Setting(info, "GOOS") + "/" + config.Setting(info, "GOARCH"),
	}
}
