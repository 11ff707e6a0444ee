package cli

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
)

func newConfigCommand() *cobra.Command {
	printer := &cobra.Command{
		Use:   "print",
		Short: "Print the configuration in force: every key, what it means, and where its value came from",
		Long: `Print the configuration in force as a YAML file: every key, what it means, and
where its value came from (default, file, flag, or an environment variable).
Secrets are not shown. The output is a good start for a file of one's own.`,
		Example: "  berm config print > berm.yaml\n  BERM_SANDBOX_TTL=2h berm config print --config berm.yaml",
		RunE: config.Configured(func(cmd *cobra.Command, cfg *config.Config, _ []string) error {
			return cfg.Print(cmd.OutOrStdout())
		}),
	}
	check := &cobra.Command{
		Use:     "check",
		Short:   "Check the configuration, the policy and the tokens, and say all that is wrong",
		Example: "  berm config check --config berm.yaml --policy policy.yaml",
		RunE: config.Configured(func(cmd *cobra.Command, cfg *config.Config, _ []string) error {
			if err := serve.CheckParts(cmd.Context(), cfg); err != nil {
				return err
			}
			_, err := fmt.Fprintln(cmd.OutOrStdout(), "the configuration is valid")
			return err
		}),
	}
	config.AddFlags(printer)
	config.AddFlags(check)
	return config.Group("config", "Print or check the configuration", printer, check)
}
