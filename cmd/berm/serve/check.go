package serve

import (
	"bytes"
	"context"
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

// policyOptions are what every policy of this configuration is read with.
func policyOptions(cfg *config.Config, v View, s *Self) policy.Options {
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
	if socket := EngineSocket(cfg.Engine); socket != "" {
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
func ReadPolicy(ctx context.Context, cfg *config.Config, secret func(policy.SecretSource) (string, error)) (*policy.Policy, error) {
	v := EngineView(ctx, cfg.Engine)
	s, _ := FindSelf(ctx, cfg.Engine, v, time.Second) // without it, less is known
	located := *cfg
	if err := s.Settle(&located); err != nil {
		located.Sandbox.Network = "" // a verdict can do without its name
	}
	return ReadPolicyAs(&located, v, s, secret)
}

// readPolicyAs is readPolicy for a configuration that heeds what is known already.
func ReadPolicyAs(cfg *config.Config, v View, s *Self, secret func(policy.SecretSource) (string, error)) (*policy.Policy, error) {
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
func CheckParts(ctx context.Context, cfg *config.Config) error {
	p, policyErr := ReadPolicy(ctx, cfg, policy.ReadSecret)
	if policyErr == nil {
		policyErr = HasProfiles(cfg.EngineAPI)(p)
	}
	tokens, err := LoadTokens(cfg.Security)
	if err == nil {
		err = CheckExposure(cfg.HTTP, tokens.Len())
	}
	for _, l := range cfg.EngineAPI.Listeners {
		_, tlsErr := ListenerTLS(l)
		err = errors.Join(err, tlsErr)
	}
	_, keyErr := LoadSigningKey(cfg.Security)
	_, headersErr := OtelHeaders(cfg.Otel)
	return errors.Join(policyErr, err, keyErr, headersErr, CheckEngine(cfg.Engine, cfg.StateDir))
}

// loadTokens gives nil when none are configured.
func LoadTokens(cfg config.Security) (*proxy.Tokens, error) {
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
func LoadSigningKey(cfg config.Security) ([]byte, error) {
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
