package config

import (
	"cmp"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"
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

// AddFlags adds --config and the named flags of settings to a command. Without names, it adds
// all of them.
func AddFlags(cmd *cobra.Command, names ...string) {
	cmd.Flags().String("config", "", "configuration file (default $BERM_CONFIG)")
	for _, f := range settingFlags {
		if len(names) == 0 || slices.Contains(names, f.name) {
			cmd.Flags().String(f.name, "", fmt.Sprintf("%s (over %s)", f.usage, f.key))
		}
	}
}

// FileOf returns the path of the configuration file; empty without one.
func FileOf(cmd *cobra.Command) string {
	return cmp.Or(cmd.Flag("config").Value.String(), os.Getenv("BERM_CONFIG"))
}

// FromFlags loads the configuration by the command's flags and the environment.
func FromFlags(cmd *cobra.Command) (*Config, error) {
	opts := Options{File: FileOf(cmd), Environ: os.Environ(), Flags: map[string]string{}}
	for _, f := range settingFlags {
		flag := cmd.Flags().Lookup(f.name)
		if flag == nil || !flag.Changed {
			continue
		}
		value := flag.Value.String()
		if f.isPath && value != "" {
			var err error
			if value, err = filepath.Abs(value); err != nil {
				return nil, fmt.Errorf("--%s: %w", f.name, err)
			}
		}
		opts.Flags[f.key] = value
	}
	cfg, err := Load(opts)
	if err != nil {
		return nil, fmt.Errorf("the configuration is not valid:\n%w", err)
	}
	return cfg, nil
}
