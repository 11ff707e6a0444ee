package main

import (
	"errors"
	"fmt"
	"runtime/debug"
	"strings"

	"github.com/spf13/cobra"

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
				return &config.ExitError{Code: config.ExitUsage, Err: fmt.Errorf("--output is %q, want text or json", output)}
			}
			if output == "text" {
				_, err := fmt.Fprintln(cmd.OutOrStdout(), versionLine())
				return err
			}
			about, err := aboutBuild()
			if err != nil {
				return err
			}
			return config.WriteJSON(cmd.OutOrStdout(), about)
		}),
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]cobra.Completion{"text", "json"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// versionLine tells what this binary was built from. The commit is known when the
// build recorded it.
func versionLine() string {
	line := "berm " + version
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return line
	}
	if commit := commitOf(info); commit != "" {
		line += ", commit " + commit
	}
	return line + ", " + info.GoVersion
}

// commitOf is the commit that a build recorded, or was told; empty if neither.
func commitOf(info *debug.BuildInfo) string {
	if commit := setting(info, "vcs.revision"); commit != "" {
		return commit
	}
	return strings.TrimPrefix(revision, "unknown")
}

func setting(info *debug.BuildInfo, key string) string {
	for _, s := range info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
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

func aboutBuild() (*buildAbout, error) {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return nil, errors.New("this binary carries no build information")
	}
	return &buildAbout{
		Version: version, Commit: commitOf(info), Time: setting(info, "vcs.time"), Modified: setting(info, "vcs.modified") == "true",
		GoVersion: info.GoVersion, Platform: setting(info, "GOOS") + "/" + setting(info, "GOARCH"),
	}, nil
}
