package cli

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

func newPortCommand(flags *clientFlags) *cobra.Command {
	var listen string
	var ttl time.Duration
	cmd := &cobra.Command{
		Use:   "port KEY PORT",
		Short: "Reach what listens at a port in a sandbox",
		Long: `Print a URL under which whoever has it can use a port of the sandbox by HTTP, for as
long as --ttl says. With --listen, serve that port at a local address until Ctrl-C
instead; then no URL is given out.

What listens there is a stranger. It gets all that is sent, and a browser shows its pages
under the address. Of a browser's cookies, which are the same for all local addresses, it
gets only those that it has set: the browser keeps them as berm-…-NAME. It can't have the
browser ask for a login.`,
		Example: `  berm sandbox port mine 8000
  berm sandbox port mine 8000 --ttl 10m
  berm sandbox port mine 8000 --listen 127.0.0.1:0`,
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			port, err := strconv.Atoi(args[1])
			if err != nil || port < 1 || port > 65535 {
				return usage("port is %q, want a number from 1 to 65535", args[1])
			}
			if listen != "" {
				return flags.forwardPort(cmd, c, args[0], port, listen)
			}
			signed, err := c.PortURL(cmd.Context(), args[0], port, ttl)
			if err != nil {
				return err
			}
			signed.URL = flags.here(signed.URL, signed.Path)
			return answer(flags, cmd, signed, nil, func(signed *apitype.PortURL) string { return signed.URL + "\n" })
		}),
	}
	cmd.Flags().StringVar(&listen, "listen", "", "local address to serve the port at, like 127.0.0.1:8000; port 0 is any")
	cmd.Flags().DurationVar(&ttl, "ttl", 0, "life of the URL, up to 168h (default 1h)")
	return cmd
}

// forwardPort serves a sandbox's port at a local address, until it is interrupted.
func (f *clientFlags) forwardPort(cmd *cobra.Command, c *client.Client, key string, port int, listen string) error {
	addr, err := netip.ParseAddrPort(strings.Replace(listen, "localhost:", "127.0.0.1:", 1))
	if err != nil || !addr.Addr().IsLoopback() {
		return usage("--listen is %q, want a loopback address, like 127.0.0.1:8000", listen)
	}
	fw := &forwarder{transport: c.Port(key, port).Transport, origin: originOf(f.server()), prefix: "/api/v1/sandboxes/" + url.PathEscape(key) + "/ports/" + strconv.Itoa(port)}
	ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", addr.String())
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(cmd.OutOrStdout(), "http://%s/\n", l.Addr()); err != nil {
		return errors.Join(err, l.Close())
	}
	return proxy.Serve(ctx, l, fw.handler(), proxy.ServeOptions{DrainTimeout: time.Second})
}

// originOf returns the web origin of a server's URL.
func originOf(base string) string {
	u, err := url.Parse(base)
	if err != nil || u.Scheme == "unix" {
		return "http://localhost" // as the client calls it
	}
	return u.Scheme + "://" + u.Host
}

// forwarder passes requests on to a sandbox's port, through the server.
type forwarder struct {
	transport http.RoundTripper // leads to the port
	origin    string            // the server's
	prefix    string            // of the port's path there, escaped
}

func (fw *forwarder) handler() http.Handler {
	rp := &httputil.ReverseProxy{
		Transport:     fw.transport,
		FlushInterval: -1,
		Rewrite: func(pr *httputil.ProxyRequest) {
			pr.Out.URL.Scheme, pr.Out.URL.Host = "http", "localhost"
			if pr.In.Header.Get("Origin") == "http://"+pr.In.Host {
				pr.Out.Header.Set("Origin", fw.origin) // the port's own page asks
			}
			pr.Out.Header.Del("Authorization")
			pr.Out.Header.Del("Cookie") // most are other local programs'
			for _, c := range pr.In.Cookies() {
				if name, ok := strings.CutPrefix(c.Name, fw.cookiePrefix()); ok && name != "" {
					pr.Out.AddCookie(&http.Cookie{Name: name, Value: c.Value, Quoted: c.Quoted})
				}
			}
		},
		ModifyResponse: fw.modify,
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			status := http.StatusBadGateway
			if errors.Is(err, client.ErrDotSegment) {
				status = http.StatusBadRequest
			}
			http.Error(w, "berm: "+err.Error(), status)
		},
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// A hostile page's host name may resolve to this address, and the page could then read
		// the answers.
		name := (&url.URL{Host: r.Host}).Hostname()
		if ip, err := netip.ParseAddr(name); name != "localhost" && (err != nil || !ip.IsLoopback()) {
			http.Error(w, "berm: the Host isn't a loopback address", http.StatusMisdirectedRequest)
			return
		}
		rp.ServeHTTP(w, r)
	})
}

// cookiePrefix returns the prefix of the cookies of this port of this sandbox in the browser. A
// browser doesn't keep cookies of a machine's ports apart.
func (fw *forwarder) cookiePrefix() string {
	sum := sha256.Sum256([]byte(fw.origin + fw.prefix))
	return "berm-" + hex.EncodeToString(sum[:8]) + "-"
}

// modify translates paths in an answer from the server's path of the port to the local address.
func (fw *forwarder) modify(res *http.Response) error {
	h := res.Header
	if rest, ok := strings.CutPrefix(h.Get("Location"), fw.prefix); ok && strings.HasPrefix(rest, "/") {
		h.Set("Location", rest)
	}
	cookies := res.Cookies()
	h.Del("Set-Cookie")
	for _, c := range cookies {
		if rest, ok := strings.CutPrefix(c.Path, fw.prefix); ok {
			c.Path = rest
		}
		c.Name = fw.cookiePrefix() + c.Name
		h.Add("Set-Cookie", c.String())
	}
	h.Del("WWW-Authenticate") // the answer to which isn't passed on
	// Only this port is served at the local address, so its pages need no sandbox.
	policies := slices.DeleteFunc(h.Values("Content-Security-Policy"), func(v string) bool { return strings.HasPrefix(v, "sandbox allow-scripts ") })
	h.Del("Content-Security-Policy")
	for _, v := range policies {
		h.Add("Content-Security-Policy", v)
	}
	return nil
}
