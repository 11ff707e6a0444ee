package sandboxapi

import (
	"net/http"
	"strconv"
	"strings"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/portproxy"
)

const ports = one + "/ports/{port}/*rest"

// anyMethod are the methods that are passed on to ports.
var anyMethod = []string{
	http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions,
}

// routePorts adds the handlers of ports and of their signed URLs.
func (a *api) routePorts(handle routing) {
	for _, method := range anyMethod {
		handle(method, ports, proxy.ScopeSandboxesExec, a.port, anyQuery)
		handle(method, signedPorts, proxy.ScopeNone, a.signedPort, anyQuery)
	}
	handle("POST", one+"/urls", proxy.ScopeSandboxesExec, a.existing(withBody(false, a.signURL)))
}

// ownPath returns the part of an escaped path that addresses Berm. The rest is a port's.
func ownPath(escaped string) string {
	if strings.HasPrefix(escaped, signedPrefix) {
		prefix, _ := cutPath(escaped, 3)
		return prefix
	}
	if parts := strings.SplitN(escaped, "/", 8); len(parts) == 8 && strings.HasPrefix(escaped, base+"/") && parts[5] == "ports" {
		return strings.Join(parts[:7], "/")
	}
	return escaped
}

// cutPath cuts a path after n of its parts. The empty part before the first slash counts. The
// tail begins with a slash, or is empty.
func cutPath(escaped string, n int) (head, tail string) {
	for i, c := range []byte(escaped) {
		if c == '/' {
			if n--; n == 0 {
				return escaped[:i], escaped[i:]
			}
		}
	}
	return escaped, ""
}

// port passes a request on to a port in the sandbox.
func (a *api) port(w http.ResponseWriter, r *http.Request) error {
	tenant, key := target(r)
	number, err := portOf(param(r, "port"))
	if err != nil {
		return err
	}
	access, err := a.Manager.Ports(r.Context(), tenant, key)
	if err != nil {
		return err
	}
	proxy.ExchangeOf(r.Context()).SessionID = access.SessionID()
	return a.portOptions(access, number, r, 7).Serve(w, r)
}

// portOptions returns the options of a request to a port. The first parts of its path are Berm's.
func (a *api) portOptions(access *lifecycle.Access, port int, r *http.Request, parts int) portproxy.Options {
	prefix, tail := cutPath(r.URL.EscapedPath(), parts)
	return portproxy.Options{
		Dial: access.Dial, Port: port, Prefix: prefix, Tail: tail, Timeout: a.PortTimeout, Tokenless: a.Gate.Tokens.Len() == 0, StripCredentials: a.gate.StripCredentials,
	}
}

func portOf(s string) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < 1 || n > 65535 || strconv.Itoa(n) != s {
		return 0, &lifecycle.InvalidError{Field: "port", Message: "must be a whole number from 1 to 65535"}
	}
	return n, nil
}
