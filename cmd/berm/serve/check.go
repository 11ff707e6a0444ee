package serve

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
)

// policyOptions returns the options for every policy.Parse with this configuration.
func policyOptions(cfg *config.Config, v View, s Self) policy.Options {
	return policy.Options{
		InContainer:    !v.Root,
		PathMap:        s.Paths,
		Refuse:         ownPaths(cfg),
		DefaultImage:   cfg.Sandbox.Image,
		DefaultTTL:     cfg.Sandbox.TTL,
		DefaultIdleTTL: cfg.Sandbox.IdleTTL,
		EngineNetwork:  cfg.Sandbox.Network,

		ExternalNetwork: slices.Contains(s.Networks, cfg.Sandbox.Network),
	}
}

// ownPaths returns directories and sockets that no caller may mount. They include directories of
// which each sandbox gets a part: the whole directory holds other tenants' chats, or the programs
// of other sandboxes.
func ownPaths(cfg *config.Config) []string {
	paths := append(cfg.Paths(), cfg.File(), cfg.SpoolDir(), EngineSocket(cfg.Engine))
	if cfg.Engine.AgentDir != config.AgentNone {
		paths = append(paths, cfg.Engine.AgentDir)
	}
	addresses := []string{cfg.HTTP.Listen}
	for _, l := range cfg.EngineAPI.Listeners {
		addresses = append(addresses, l.Address)
	}
	for _, address := range addresses {
		if socket, ok := strings.CutPrefix(address, "unix://"); ok {
			paths = append(paths, socket)
		}
	}
	return slices.DeleteFunc(paths, func(path string) bool { return path == "" })
}

// ReadPolicy reads the policy without changing anything. It treats the default workspace, which a
// server would make, as made. Secret is policy.Options.Secret.
func ReadPolicy(ctx context.Context, cfg *config.Config, secret func(policy.SecretSource) (string, error)) (*policy.Policy, error) {
	v := EngineView(ctx, cfg.Engine)
	s, _ := FindSelf(ctx, cfg.Engine, v, time.Second) // without it, paths aren't mapped
	located := *cfg
	if err := s.Settle(&located); err != nil {
		located.Sandbox.Network = "" // a verdict doesn't need the name
	}
	return ReadPolicyAs(&located, v, s, secret)
}

// ReadPolicyAs is ReadPolicy for a configuration that Settle has completed, with a known View and
// Self.
func ReadPolicyAs(cfg *config.Config, v View, s Self, secret func(policy.SecretSource) (string, error)) (*policy.Policy, error) {
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

// Inputs holds the contents of files and variables that a configuration names. A server reads
// them before it opens anything.
type Inputs struct {
	Tokens     *proxy.Tokens // nil if there are none
	SigningKey []byte        // nil if there is none
	Headers    map[string]string
	TLS        []*tls.Config // of engine_api.listeners; nil for one without TLS
}

// Check reads an input. With an error of Run, a server wouldn't start.
type Check struct {
	ID   string // of doctor's finding
	What string // names the input in an error that doesn't name it itself
	Fix  string // advice for the operator
	Run  func() error
}

// Checks returns the checks of a configuration's inputs. Running them fills in.
func Checks(cfg *config.Config, in *Inputs) []Check {
	in.TLS = make([]*tls.Config, len(cfg.EngineAPI.Listeners))
	checks := []Check{
		{"doors.tokens", "security.token_file", "give tokens in security.token_file or BERM_SECURITY_TOKENS (docs/api.md has the format), or listen on 127.0.0.1", func() (err error) {
			if in.Tokens, err = loadTokens(cfg.Security); err == nil {
				err = CheckExposure(cfg.HTTP, in.Tokens.Len())
			}
			return err
		}},
		{"doors.signing_key", "security.signing_key_file", "openssl rand -base64 32 makes one", func() (err error) {
			in.SigningKey, err = loadSigningKey(cfg.Security)
			return err
		}},
		{"doors.telemetry", "otel.headers_file", "set otel.headers right", func() (err error) {
			if cfg.Otel.Endpoint != "" {
				in.Headers, err = otelHeaders(cfg.Otel)
			}
			return err
		}},
	}
	for i, l := range cfg.EngineAPI.Listeners {
		checks = append(checks, Check{"doors.engine_api", "engine_api: certificates of " + l.Address, "set the listener's files right", func() (err error) {
			in.TLS[i], err = listenerTLS(l)
			return err
		}})
	}
	return checks
}

// loadInputs runs all checks, and joins their errors.
func loadInputs(cfg *config.Config) (*Inputs, error) {
	in := &Inputs{}
	var errs []error
	for _, c := range Checks(cfg, in) {
		errs = append(errs, c.Run())
	}
	return in, errors.Join(errs...)
}

// CheckPolicy returns a check of a policy. The policy must have the profiles of all configured
// callers. It must not require that mounts are held if held, the reason against that, isn't nil.
func CheckPolicy(cfg *config.Config, held error) func(*policy.Policy) error {
	return func(p *policy.Policy) error {
		if p.HoldRequired() && held != nil {
			return fmt.Errorf("policy: mounts.hold is required, as it is by default, but mounts can't be held here: %w; %s; "+
				"or set mounts.hold: auto, which refuses mounts elsewhere", held, HoldRemedy)
		}
		for _, l := range cfg.EngineAPI.Listeners {
			for _, c := range l.Callers {
				if _, ok := p.Profile(c.Profile); !ok {
					return fmt.Errorf("policy: there is no profile %q, which caller %s of %s has", c.Profile, c.Name, l.Address)
				}
			}
		}
		return nil
	}
}

// CheckParts checks the policy, the inputs and the engine's settings, and joins the errors.
func CheckParts(ctx context.Context, cfg *config.Config) error {
	p, policyErr := ReadPolicy(ctx, cfg, policy.ReadSecret)
	if policyErr == nil {
		policyErr = CheckPolicy(cfg, nil)(p)
	}
	_, err := loadInputs(cfg)
	return errors.Join(policyErr, err, CheckEngine(cfg.Engine, cfg.StateDir))
}

// CheckExposure is proxy.CheckExposure for the sandbox API. It accepts a socket that systemd
// passes, whose address shows only at the start.
func CheckExposure(cfg config.HTTP, tokens int) error {
	if cfg.Listen == config.ListenNone || config.Passed(cfg.Listen) {
		return nil
	}
	return proxy.CheckExposure(cfg.Listen, tokens)
}

// secretOf returns the content of the file that a key names, or else the value that an
// environment variable set. From names the key or the variable. The secret is nil if neither is
// set.
func secretOf(variable, value, key, file string) (secret []byte, from string, err error) {
	switch {
	case file != "":
		if secret, err = os.ReadFile(file); err != nil {
			err = fmt.Errorf("%s: %w", key, err)
		}
		return secret, key, err
	case value != "":
		return []byte(value), variable, nil
	}
	return nil, "", nil
}

// loadTokens gives nil when none are configured.
func loadTokens(cfg config.Security) (*proxy.Tokens, error) {
	data, from, err := secretOf("BERM_SECURITY_TOKENS", cfg.Tokens, "security.token_file", cfg.TokenFile)
	if data == nil || err != nil {
		return nil, err
	}
	tokens, err := proxy.ParseTokens(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", from, err)
	}
	return tokens, nil
}

// minSigningKey is in bytes.
const minSigningKey = 32

// loadSigningKey gives nil when none is configured. White space around it isn't part of
// it.
func loadSigningKey(cfg config.Security) ([]byte, error) {
	key, from, err := secretOf("BERM_SECURITY_SIGNING_KEY", cfg.SigningKey, "security.signing_key_file", cfg.SigningKeyFile)
	if key == nil || err != nil {
		return nil, err
	}
	if key = bytes.TrimSpace(key); len(key) < minSigningKey {
		return nil, fmt.Errorf("%s: the key has %d characters, want at least %d", from, len(key), minSigningKey)
	}
	return key, nil
}
