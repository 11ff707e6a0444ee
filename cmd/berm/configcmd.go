package main

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/bermhq/berm/cmd/berm/config"
)

// settingFlags are the flags that stand for keys of the configuration.
var settingFlags = []struct {
	name, key, usage string
	isPath           bool
}{
	{"listen", "http.listen", "host:port, or unix:///path", false},
	{"state-dir", "state_dir", "directory of the database, the lock and the instance's id", true},
	{"engine", "engine.kind", "docker or containerd", false},
	{"engine-address", "engine.address", "the engine's address", false},
	{"policy", "policy_file", "policy file", true},
	{"token-file", "security.token_file", "file with the tokens", true},
}

// addConfigFlags gives a command --config and the flags of the named settings;
// all of them without a name.
func addConfigFlags(cmd *cobra.Command, names ...string) {
	cmd.Flags().String("config", "", "configuration file (default $BERM_CONFIG)")
	for _, f := range settingFlags {
		if len(names) == 0 || slices.Contains(names, f.name) {
			cmd.Flags().String(f.name, "", fmt.Sprintf("%s (over %s)", f.usage, f.key))
		}
	}
	markFiles(cmd.Flags(), "config", "policy", "token-file")
}

// loadConfig reads the configuration as the command's flags say.
func loadConfig(cmd *cobra.Command) (*config.Config, error) {
	file, err := cmd.Flags().GetString("config")
	if err != nil {
		return nil, err
	}
	opts := config.Options{File: cmp.Or(file, os.Getenv("BERM_CONFIG")), Environ: os.Environ(), Flags: map[string]string{}}
	for _, f := range settingFlags {
		flag := cmd.Flags().Lookup(f.name)
		if flag == nil || !flag.Changed {
			continue
		}
		value := flag.Value.String()
		if f.isPath && value != "" {
			if value, err = filepath.Abs(value); err != nil {
				return nil, fmt.Errorf("--%s: %w", f.name, err)
			}
		}
		opts.Flags[f.key] = value
	}
	cfg, err := config.Load(opts)
	if err != nil {
		return nil, fmt.Errorf("the configuration is not valid:\n%w", err)
	}
	return cfg, nil
}

// markFiles has the shell complete the flags' values to file names.
func markFiles(flags *pflag.FlagSet, names ...string) {
	for _, name := range names {
		if flags.Lookup(name) != nil {
			_ = cobra.MarkFlagFilename(flags, name) // fails for unknown flags only
		}
	}
}

func newConfigCommand() *cobra.Command {
	printer := &cobra.Command{
		Use:   "print",
		Short: "Print the configuration in force: every key, what it means, and where its value came from",
		Long: `Print the configuration in force as a YAML file: every key, what it means, and
where its value came from (default, file, flag, or an environment variable).
Secrets are not shown. The output is a good start for a file of one's own.`,
		Args:    cobra.NoArgs,
		Example: "  berm config print > berm.yaml\n  BERM_SANDBOX_TTL=2h berm config print --config berm.yaml",
		RunE: config.Action(func(cmd *cobra.Command, _ []string) error {
			cfg, err := loadConfig(cmd)
			if err != nil {
				return err
			}
			return cfg.Print(cmd.OutOrStdout())
		}),
	}
	check := &cobra.Command{
		Use:     "check",
		Short:   "Check the configuration, the policy and the tokens, and say all that is wrong",
		Args:    cobra.NoArgs,
		Example: "  berm config check --config berm.yaml --policy policy.yaml",
		RunE: config.Action(func(cmd *cobra.Command, _ []string) error {
			cfg, err := loadConfig(cmd)
			if err != nil {
				return err
			}
			if err := checkParts(cmd.Context(), cfg); err != nil {
				return err
			}
			_, err = fmt.Fprintln(cmd.OutOrStdout(), "the configuration is valid")
			return err
		}),
	}
	addConfigFlags(printer)
	addConfigFlags(check)
	return config.Group("config", "Print or check the configuration", printer, check)
}
