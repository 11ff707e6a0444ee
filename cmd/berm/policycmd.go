package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/sandboxapi"
)

// policyOptions are what every policy of this configuration is read with.
func policyOptions(cfg *config.Config, v serve.View, s *serve.Self) policy.Options {
	return policy.Options{
		InContainer:    !v.Root,
		PathMap:        s.Mappings(),
		Refuse:         ownPaths(cfg),
		DefaultImage:   cfg.Sandbox.Image,
		DefaultTTL:     cfg.Sandbox.TTL,
		DefaultIdleTTL: cfg.Sandbox.IdleTTL,
		EngineNetwork:  cfg.Sandbox.Network,

		ExternalNetwork: s != nil && slices.Contains(s.Networks, cfg.Sandbox.Network),
	}
}

// ownPaths are directories and sockets that no caller may have mounted. Those that
// every sandbox is given a part of are among them: whole, they hold other tenants'
// chats, and what other sandboxes run.
func ownPaths(cfg *config.Config) []string {
	paths := []string{cfg.StateDir}
	if socket := serve.EngineSocket(cfg.Engine); socket != "" {
		paths = append(paths, socket)
	}
	if dir := cfg.Engine.AgentDir; dir != "" && dir != config.AgentNone {
		paths = append(paths, dir)
	}
	own := []string{cfg.EngineAPI.AuditLog}
	addresses := []string{cfg.HTTP.Listen}
	for _, l := range cfg.EngineAPI.Listeners {
		addresses = append(addresses, l.Address)
		own = append(own, l.TLSCertFile, l.TLSKeyFile, l.ClientCAFile)
	}
	for _, address := range addresses {
		if socket, ok := strings.CutPrefix(address, "unix://"); ok {
			own = append(own, socket)
		}
	}
	for _, path := range append(own,
		cfg.PolicyFile, cfg.Security.TokenFile, cfg.Security.SigningKeyFile, cfg.Otel.HeadersFile, cfg.Engine.RegistryAuthFile, cfg.Engine.AgentFile,
		cfg.Sandbox.ChatsRoot, cfg.Sandbox.DependenciesRoot, cfg.Sandbox.LambdaToolsRoot,
	) {
		if path != "" {
			paths = append(paths, path)
		}
	}
	return paths
}

// readPolicy reads the policy without changing anything: the default workspace,
// which a server makes, is taken as made. Secret is policy.Options.Secret.
func readPolicy(ctx context.Context, cfg *config.Config, secret func(policy.SecretSource) (string, error)) (*policy.Policy, error) {
	v := serve.EngineView(ctx, cfg.Engine)
	s, _ := serve.FindSelf(ctx, cfg.Engine, v, time.Second) // without it, less is known
	located := *cfg
	if err := s.Settle(&located); err != nil {
		located.Sandbox.Network = "" // a verdict can do without its name
	}
	return readPolicyAs(&located, v, s, secret)
}

// readPolicyAs is readPolicy for a configuration that heeds what is known already.
func readPolicyAs(cfg *config.Config, v serve.View, s *serve.Self, secret func(policy.SecretSource) (string, error)) (*policy.Policy, error) {
	opts := policyOptions(cfg, v, s)
	opts.Secret = secret
	made := map[string]bool{}
	opts.MakeDir = func(dir, rel string, _ *policy.Owner) error {
		made[path.Join(dir, rel)] = true
		return nil
	}
	opts.Resolve = func(path string) (string, error) {
		if made[path] {
			return path, nil
		}
		return policy.ResolveDir(path)
	}
	var data []byte
	if cfg.PolicyFile != "" {
		var err error
		if data, err = os.ReadFile(cfg.PolicyFile); err != nil {
			return nil, fmt.Errorf("read the policy: %w", err)
		}
	}
	return policy.Parse(data, opts)
}

// checkParts checks what the configuration refers to, and says all that is wrong.
func checkParts(ctx context.Context, cfg *config.Config) error {
	p, policyErr := readPolicy(ctx, cfg, policy.ReadSecret)
	if policyErr == nil {
		policyErr = hasProfiles(cfg.EngineAPI)(p)
	}
	tokens, err := loadTokens(cfg.Security)
	if err == nil {
		err = checkExposure(cfg.HTTP, tokens.Len())
	}
	for _, l := range cfg.EngineAPI.Listeners {
		_, tlsErr := listenerTLS(l)
		err = errors.Join(err, tlsErr)
	}
	_, keyErr := loadSigningKey(cfg.Security)
	_, headersErr := otelHeaders(cfg.Otel)
	return errors.Join(policyErr, err, keyErr, headersErr, serve.CheckEngine(cfg.Engine, cfg.StateDir))
}

// loadTokens gives nil when none are configured.
func loadTokens(cfg config.Security) (*proxy.Tokens, error) {
	switch {
	case cfg.TokenFile != "":
		return proxy.LoadTokens(cfg.TokenFile)
	case cfg.Tokens != "":
		tokens, err := proxy.ParseTokens([]byte(cfg.Tokens))
		if err != nil {
			return nil, fmt.Errorf("BERM_SECURITY_TOKENS: %w", err)
		}
		return tokens, nil
	}
	return nil, nil
}

// minSigningKey is in bytes.
const minSigningKey = 32

// loadSigningKey gives nil when none is configured. White space around it isn't part of
// it.
func loadSigningKey(cfg config.Security) ([]byte, error) {
	key, from := []byte(cfg.SigningKey), "BERM_SECURITY_SIGNING_KEY"
	if cfg.SigningKeyFile != "" {
		var err error
		if key, err = os.ReadFile(cfg.SigningKeyFile); err != nil {
			return nil, fmt.Errorf("security.signing_key_file: %w", err)
		}
		from = "security.signing_key_file"
	} else if cfg.SigningKey == "" {
		return nil, nil
	}
	if key = bytes.TrimSpace(key); len(key) < minSigningKey {
		return nil, fmt.Errorf("%s: the key has %d characters, want at least %d", from, len(key), minSigningKey)
	}
	return key, nil
}

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
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			verdict, err := explainRequest(cmd, file)
			if err != nil {
				return &config.ExitError{Code: config.ExitUsage, Err: err}
			}
			if err := printVerdict(cmd.OutOrStdout(), verdict, asJSON); err != nil {
				return &config.ExitError{Code: config.ExitUsage, Err: err}
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
	_ = explain.MarkFlagFilename("file") // it is there
	_ = explain.MarkFlagRequired("file") // fails for unknown flags only
	return config.Group("policy", "Ask the policy", explain, newLearnCommand())
}

func explainRequest(cmd *cobra.Command, file string) (policy.Verdict, error) {
	cfg, err := config.FromFlags(cmd)
	if err != nil {
		return policy.Verdict{}, err
	}
	in := cmd.InOrStdin()
	if file != "-" {
		f, err := os.Open(file)
		if err != nil {
			return policy.Verdict{}, fmt.Errorf("read the request: %w", err)
		}
		defer func() { _ = f.Close() }()
		in = f
	}
	data, err := io.ReadAll(io.LimitReader(in, maxRequestFile+1))
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
	// A verdict needs no secrets, and who asks for one may not have them.
	p, err := readPolicy(cmd.Context(), cfg, func(policy.SecretSource) (string, error) { return "secret", nil })
	if err != nil {
		return policy.Verdict{}, err
	}
	return p.Sandbox(sandboxapi.PolicyRequest(body)), nil
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
		spec, err := json.MarshalIndent(v.Spec, "  ", "  ")
		if err != nil {
			return err
		}
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
			cfg, err := config.FromFlags(cmd)
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
			cfg, err := config.FromFlags(cmd)
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
	config.AddFlags(printer)
	config.AddFlags(check)
	return config.Group("config", "Print or check the configuration", printer, check)
}
