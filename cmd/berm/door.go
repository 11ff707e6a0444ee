package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/coder/websocket"

	"github.com/bermhq/berm/proxy/client"
)

// maxMessage is the largest message that is taken.
const maxMessage = 1 << 20

// door is the server as calls that the client doesn't have are made to it.
type door struct {
	base      string // without a slash at its end
	token     string
	transport http.RoundTripper
}

func (f *clientFlags) door() (door, error) {
	base, token, err := f.server()
	if err != nil {
		return door{}, err
	}
	d := door{base: strings.TrimSuffix(base, "/"), token: token, transport: http.DefaultTransport}
	if socket, ok := strings.CutPrefix(base, "unix://"); ok {
		d.base = "http://localhost"
		d.transport = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		}}
	}
	return d, nil
}

// websocket opens a WebSocket. An answer that says no is a *client.Error.
func (d door) websocket(ctx context.Context, path string, query url.Values) (*websocket.Conn, error) {
	header := http.Header{}
	if d.token != "" {
		header.Set("Authorization", "Bearer "+d.token)
	}
	address := d.base + path
	if len(query) > 0 {
		address += "?" + query.Encode()
	}
	// A redirect would carry the token to wherever it points.
	hc := &http.Client{Transport: d.transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	ws, resp, err := websocket.Dial(ctx, address, &websocket.DialOptions{HTTPClient: hc, HTTPHeader: header}) //nolint:bodyclose // is read already, or is the connection
	if err != nil {
		if resp != nil && resp.StatusCode != http.StatusSwitchingProtocols {
			return nil, refused(resp)
		}
		return nil, fmt.Errorf("connect to the server: %w", err)
	}
	ws.SetReadLimit(maxMessage)
	return ws, nil
}

// refused is the error of a handshake that was answered otherwise.
func refused(resp *http.Response) error {
	e := &client.Error{Status: resp.StatusCode}
	if seconds, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && resp.StatusCode == http.StatusServiceUnavailable {
		e.RetryAfter = time.Duration(seconds) * time.Second
	}
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "application/problem+json") {
		// What the library keeps of the body may be cut off.
		if json.NewDecoder(resp.Body).Decode(&e.Problem) == nil {
			e.Code = e.Problem.Code
		}
	}
	return e
}
