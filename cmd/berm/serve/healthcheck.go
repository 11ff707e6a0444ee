package serve

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/proxy/apitype"
)

// maxHealth bounds the answer that is read, in bytes.
const maxHealth = 64 << 10

// NewHealthcheckCommand makes the command healthcheck.
func NewHealthcheckCommand() *cobra.Command {
	var timeout time.Duration
	var live bool
	cmd := &cobra.Command{
		Use:   "healthcheck",
		Short: "Ask this machine's server whether it is ready, and exit with 0 or 1",
		Long: `Ask the server that the configuration describes whether it is ready (/readyz), or
with --live only whether it is there (/healthz), and exit with 0, or with 1 and a line
on standard error. It is made for HEALTHCHECK: configuration file, environment and
flags are those of berm serve, and the addresses that a running server wrote into its
state directory go over what they say.

Where the sandbox API is off (http.listen: none), the first of engine_api.listeners is
asked. One with TLS has to show its certificate; whether the engine is there, it tells
its callers only.`,
		Example: "  berm healthcheck\n  berm healthcheck --config /etc/berm/berm.yaml --timeout 1s\n  berm healthcheck --live",
		Args:    cobra.NoArgs,
		RunE: config.Action(func(cmd *cobra.Command, _ []string) error {
			if timeout <= 0 {
				return &config.ExitError{Code: config.ExitUsage, Err: fmt.Errorf("--timeout is %s, want more than 0", timeout)}
			}
			cfg, err := config.FromFlags(cmd)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
			defer cancel()
			return config.OneLine(checkHealth(ctx, cfg, live))
		}),
	}
	config.AddFlags(cmd, "listen", "state-dir")
	cmd.Flags().DurationVar(&timeout, "timeout", 3*time.Second, "how long the server may take")
	cmd.Flags().BoolVar(&live, "live", false, "whether it is there, also without its engine")
	return cmd
}

// checkHealth returns nil if the configuration's server is ready. With live, an answer is enough.
func checkHealth(ctx context.Context, cfg *config.Config, live bool) error {
	address, err := Announced(cfg.StateDir, StateAddress)
	if err != nil {
		return err
	}
	if address = cmp.Or(address, cfg.HTTP.Listen); address != config.ListenNone {
		path := "/readyz"
		if live {
			path = "/healthz"
		}
		return AskHealth(ctx, address, path, nil)
	}
	if address, err = Announced(cfg.StateDir, stateEngineAddress); err != nil {
		return err
	}
	l := cfg.EngineAPI.Listeners[0] // the configuration is valid, so there is one
	address = strings.TrimPrefix(cmp.Or(address, l.Address), "tcp://")
	if l.TLSCertFile != "" {
		return greetTLS(ctx, address, l.TLSCertFile)
	}
	// The engine proxy refuses a request from somebody who isn't its caller. That refusal also
	// shows that the server answers.
	return AskHealth(ctx, address, "/_ping", func(status int) bool {
		return status == http.StatusForbidden || live && status < http.StatusInternalServerError
	})
}

// Announced returns an address that a running server wrote down: StateAddress or
// stateEngineAddress. It is empty if none did.
func Announced(stateDir, name string) (string, error) {
	address, _, err := readState(stateDir, name, "server's address")
	return address, err
}

// dialAddress returns the address at which this machine reaches a server that listens on listen.
func dialAddress(listen string) (network, address string, err error) {
	if path, ok := strings.CutPrefix(listen, "unix://"); ok {
		return "unix", path, nil
	}
	host, port, err := net.SplitHostPort(listen)
	switch {
	case config.Passed(listen):
		return "", "", errors.New("no server runs on this state directory, or only systemd knows its address")
	case err != nil:
		return "", "", fmt.Errorf("the server's address %q: %w", listen, err)
	case port == "0" || port == "":
		return "", "", errors.New("no server runs on this state directory, or its port was left to the system")
	}
	switch ip, err := netip.ParseAddr(host); {
	case host == "" || err == nil && ip == netip.IPv6Unspecified():
		host = "::" // which Go dials by IPv6, and else by IPv4: who listens there may do so by one of them alone
	case err == nil && ip.IsUnspecified():
		host = "127.0.0.1"
	}
	return "tcp", net.JoinHostPort(host, port), nil
}

// AskHealth requests a path. It fails for a status other than 200 unless enough accepts it.
func AskHealth(ctx context.Context, listen, path string, enough func(status int) bool) error {
	status, body, err := FetchHealth(ctx, listen, path)
	if err != nil || status == http.StatusOK || enough != nil && enough(status) {
		return err
	}
	var problem apitype.Problem
	if json.Unmarshal(body, &problem) == nil && problem.Detail != "" {
		return fmt.Errorf("the server at %s answered %d: %s", listen, status, problem.Detail)
	}
	return fmt.Errorf("the server at %s answered %d %s", listen, status, http.StatusText(status))
}

// FetchHealth requests a path from the server that listens on an address.
func FetchHealth(ctx context.Context, listen, path string) (status int, body []byte, err error) {
	network, address, err := dialAddress(listen)
	if err != nil {
		return 0, nil, err
	}
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, address)
		},
		DisableKeepAlives: true,
	}
	host := address
	if network == "unix" || strings.HasPrefix(address, "[::]:") {
		host = "localhost"
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+host+path, nil)
	if err != nil {
		return 0, nil, err
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return 0, nil, fmt.Errorf("the server at %s doesn't answer: %w", listen, err)
	}
	defer func() { _ = resp.Body.Close() }()
	if body, err = io.ReadAll(io.LimitReader(resp.Body, maxHealth)); err != nil {
		return 0, nil, fmt.Errorf("the server at %s broke its answer off: %w", listen, err)
	}
	return resp.StatusCode, body, nil
}

// greetTLS returns nil if the server at an address has the certificate of a file.
func greetTLS(ctx context.Context, listen, certFile string) error {
	_, address, err := dialAddress(listen)
	if err != nil {
		return err
	}
	data, err := os.ReadFile(certFile)
	if err != nil {
		return fmt.Errorf("read the listener's certificate: %w", err)
	}
	block, _ := pem.Decode(data)
	if block == nil {
		return fmt.Errorf("%s holds no certificate", certFile)
	}
	dialer := tls.Dialer{Config: &tls.Config{
		MinVersion: tls.VersionTLS12,
		// The certificate's names are for other machines, so only the certificate is compared.
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection compares it
		VerifyConnection: func(s tls.ConnectionState) error {
			if len(s.PeerCertificates) == 0 || !bytes.Equal(s.PeerCertificates[0].Raw, block.Bytes) {
				return errors.New("its certificate isn't that of " + certFile)
			}
			return nil
		},
	}}
	conn, err := dialer.DialContext(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("the server at %s doesn't answer: %w", listen, err)
	}
	_ = conn.Close()
	return nil
}
