package engine

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/errdefs"
)

// client makes the few calls that the harness needs, by plain HTTP, so that it doesn't depend
// on what it tests.
type client struct {
	base string
	http *http.Client
}

// newClient understands unix:// and tcp:// hosts, the latter with TLS as the
// variable DOCKER_CERT_PATH says.
func newClient(host string) (*client, error) {
	scheme, addr, _ := strings.Cut(host, "://")
	transport := &http.Transport{DisableKeepAlives: true}
	c := &client{base: "http://engine", http: &http.Client{Transport: transport}}
	var dialer net.Dialer
	switch scheme {
	case "unix":
		transport.DialContext = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, "unix", addr)
		}
	case "tcp":
		c.base = "http://" + addr
		if os.Getenv("DOCKER_CERT_PATH") != "" {
			config, err := tlsConfig(os.Getenv("DOCKER_CERT_PATH"))
			if err != nil {
				return nil, fmt.Errorf("TLS for %s: %w", host, err)
			}
			c.base, transport.TLSClientConfig = "https://"+addr, config
		}
	default:
		return nil, fmt.Errorf("engine at %q: only unix:// and tcp:// are known: %w", host, errdefs.ErrInvalidArgument)
	}
	return c, nil
}

func tlsConfig(dir string) (*tls.Config, error) {
	cert, err := tls.LoadX509KeyPair(filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem"))
	if err != nil {
		return nil, err
	}
	ca, err := os.ReadFile(filepath.Join(dir, "ca.pem"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, errors.New("ca.pem holds no certificate")
	}
	return &tls.Config{Certificates: []tls.Certificate{cert}, RootCAs: roots, MinVersion: tls.VersionTLS12}, nil
}

func (c *client) ping(ctx context.Context) error {
	_, err := c.call(ctx, http.MethodGet, "/_ping", "", nil)
	return err
}

func (c *client) hasImage(ctx context.Context, ref string) (bool, error) {
	_, err := c.call(ctx, http.MethodGet, "/images/"+ref+"/json", "", nil)
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	return err == nil, err
}

func (c *client) removeImage(ctx context.Context, ref string) error {
	_, err := c.call(ctx, http.MethodDelete, "/images/"+ref, "", nil)
	return err
}

func (c *client) importImage(ctx context.Context, ref string, changes []string, rootfs []byte) error {
	q := url.Values{"fromSrc": {"-"}, "repo": {ref}, "changes": changes}
	reply, err := c.call(ctx, http.MethodPost, "/images/create?"+q.Encode(), "application/x-tar", rootfs)
	if err != nil {
		return err
	}
	for dec := json.NewDecoder(bytes.NewReader(reply)); ; { // errors come in the stream, with status 200
		var message struct {
			Error string `json:"error"`
		}
		if err := dec.Decode(&message); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if message.Error != "" {
			return errors.New(message.Error)
		}
	}
}

// call returns the body of a successful reply.
func (c *client) call(ctx context.Context, method, path, contentType string, body []byte) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	reply, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return nil, err
	}
	if resp.StatusCode == http.StatusNotFound {
		return nil, fmt.Errorf("%s %s: %w", method, path, errdefs.ErrNotFound)
	}
	if resp.StatusCode/100 != 2 {
		return nil, fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, bytes.TrimSpace(reply))
	}
	return reply, nil
}
