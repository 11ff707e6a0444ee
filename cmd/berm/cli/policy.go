package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/sandboxapi"
)

// maxRequestFile bounds what explain reads, as the API bounds a body.
const maxRequestFile = proxy.MaxBody

func newPolicyCommand() *cobra.Command {
	var file string
	var asJSON bool
	explain := &cobra.Command{
		Use:   "explain -f request.json",
		Short: "Say what the policy makes of a request, and why",
		Long: `Say what the policy makes of a request, the body of a create, without a server or
an engine. The exit code is 0 when it is allowed, 1 when it is refused, and 2 when
that can't be told.`,
		Example: `  echo '{"host_path": "/etc"}' | berm policy explain -f -
  berm policy explain -f request.json --policy policy.yaml --json`,
		RunE: func(cmd *cobra.Command, _ []string) error {
			verdict, err := explainRequest(cmd, file)
			if err != nil {
				return usage("%w", err)
			}
			if err := printVerdict(cmd.OutOrStdout(), verdict, asJSON); err != nil {
				return usage("%w", err)
			}
			if !verdict.Allowed() {
				return &config.ExitError{Code: config.ExitFailure}
			}
			return nil
		},
	}
	config.AddFlags(explain, "policy")
	explain.Flags().StringVarP(&file, "file", "f", "", "request, as JSON; - is standard input")
	explain.Flags().BoolVar(&asJSON, "json", false, "print the verdict as JSON")
	_ = explain.MarkFlagRequired("file") // fails for unknown flags only
	return config.Group("policy", "Ask the policy", explain, newLearnCommand())
}

func explainRequest(cmd *cobra.Command, file string) (policy.Verdict, error) {
	data, err := send(cmd, file, func(l *local) ([]byte, error) { return io.ReadAll(io.LimitReader(l.content, maxRequestFile+1)) })
	if err != nil {
		return policy.Verdict{}, fmt.Errorf("read the request: %w", err)
	}
	if len(data) > maxRequestFile {
		return policy.Verdict{}, fmt.Errorf("the request is larger than %d bytes", maxRequestFile)
	}
	var body apitype.SandboxRequest
	if err := proxy.DecodeJSON(data, &body); err != nil {
		return policy.Verdict{}, fmt.Errorf("read the request: %w", err)
	}
	p, err := readPolicy(cmd)
	if err != nil {
		return policy.Verdict{}, err
	}
	return p.Sandbox(sandboxapi.PolicyRequest(body)), nil
}

// readPolicy reads the policy with a stand-in for each secret, as the user may not have them.
func readPolicy(cmd *cobra.Command) (*policy.Policy, error) {
	cfg, err := config.FromFlags(cmd)
	if err != nil {
		return nil, err
	}
	return serve.ReadPolicy(cmd.Context(), cfg, func(policy.SecretSource) (string, error) { return "secret", nil })
}

// printVerdict never shows the values of the environment.
func printVerdict(w io.Writer, v policy.Verdict, asJSON bool) error {
	if asJSON {
		out := struct {
			Allowed    bool              `json:"allowed"`
			Spec       *policy.Spec      `json:"spec,omitempty"`
			Overridden []policy.Override `json:"overridden"`
			Denials    []policy.Reason   `json:"denials"`
		}{v.Allowed(), nil, v.Overridden, v.Denials}
		if v.Allowed() {
			out.Spec = &v.Spec
		}
		return config.WriteJSON(w, out)
	}
	var b strings.Builder
	if v.Allowed() {
		b.WriteString("allowed\n")
		spec, _ := json.MarshalIndent(v.Spec, "  ", "  ") // it has no value that JSON lacks
		fmt.Fprintf(&b, "  %s\n", spec)
	} else {
		b.WriteString("denied\n")
		for _, r := range v.Denials {
			fmt.Fprintf(&b, "  %s\n    rule:    %s\n    field:   %s\n    allowed: %s\n", r.Message, r.Rule, r.Field, r.Allowed)
		}
	}
	for _, o := range v.Overridden {
		fmt.Fprintf(&b, "  %s: asked for %v, gets %v (%s)\n", o.Field, o.Requested, o.Effective, o.Rule)
	}
	_, err := io.WriteString(w, b.String())
	return err
}
