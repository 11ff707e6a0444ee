package sandboxapi

import (
	"context"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/julienschmidt/httprouter"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
)

const (
	signedPrefix  = "/p/"
	signedPorts   = signedPrefix + "{signature}/*rest"
	portPurpose   = "berm signed port url 1"
	minSigningKey = 32 // bytes
	defaultURLTTL = time.Hour
	maxURLTTL     = 7 * 24 * time.Hour
)

// claim is what a signed URL allows: one port of one sandbox, until a time.
type claim struct {
	Tenant  string `json:"t"`
	Key     string `json:"k"`
	Session string `json:"s"`
	Port    int    `json:"p"`
	Expires int64  `json:"e"` // seconds since 1970
}

// signer makes and checks signatures, the part of a signed URL that holds a claim and its
// HMAC. It is safe for many goroutines.
type signer struct{ key []byte }

// newSigner takes a key of at least 32 bytes. Without a key it makes a random one, whose
// signatures are valid until the process ends.
func newSigner(key []byte) (signer, error) {
	switch {
	case len(key) == 0:
		key = make([]byte, minSigningKey)
		_, _ = rand.Read(key) // never fails
	case len(key) < minSigningKey:
		return signer{}, fmt.Errorf("sandboxapi: the signing key has less than %d bytes", minSigningKey)
	}
	return signer{key}, nil
}

// mac returns the HMAC of a text for one purpose. It isn't valid for any other.
func (s signer) mac(purpose, text string) []byte {
	h := hmac.New(sha256.New, s.key)
	h.Write([]byte(purpose + "\x00" + text))
	return h.Sum(nil)
}

func (s signer) sign(purpose string, claim any) (string, error) {
	b, err := json.Marshal(claim)
	if err != nil {
		return "", err
	}
	text := base64.RawURLEncoding.EncodeToString(b)
	return text + "." + base64.RawURLEncoding.EncodeToString(s.mac(purpose, text)), nil
}

// open decodes a signature into claim. It returns false unless this key made the signature
// for this purpose.
func (s signer) open(purpose, signature string, claim any) bool {
	text, sum, _ := strings.Cut(signature, ".")
	mac, err := base64.RawURLEncoding.Strict().DecodeString(sum)
	if err != nil || !hmac.Equal(mac, s.mac(purpose, text)) {
		return false
	}
	b, err := base64.RawURLEncoding.DecodeString(text)
	return err == nil && json.Unmarshal(b, claim) == nil
}

// opened decodes the signature in the request's path into claim.
func (s signer) opened(r *http.Request, purpose string, claim any) error {
	if !s.open(purpose, httprouter.ParamsFromContext(r.Context()).ByName("signature"), claim) {
		return &proxy.Fault{Status: http.StatusForbidden, Code: "url_invalid", Title: "Invalid address",
			Detail: "this address wasn't given out by this server, or not since it was started"}
	}
	return nil
}

// expiredURL refuses a signed URL whose time is over, or whose sandbox or chat is gone.
func expiredURL(what string, cause error) error {
	return &proxy.Fault{Status: http.StatusGone, Code: "url_expired", Title: "Address expired",
		Detail: "the time of this address is over, or the " + what + " that it was for is gone", Cause: cause}
}

// expiry returns when a URL that is signed now expires, in whole seconds, rounded up. A nil
// wanted is an hour.
func expiry(wanted *apitype.Duration) (time.Time, error) {
	ttl := defaultURLTTL
	if wanted != nil {
		ttl = time.Duration(*wanted)
	}
	if ttl < time.Second || ttl > maxURLTTL {
		return time.Time{}, &lifecycle.InvalidError{Field: "ttl", Message: "must be from one second to seven days"}
	}
	return time.Now().Add(ttl + time.Second - 1).Truncate(time.Second).UTC(), nil
}

// absolute returns the URL of a path, on the host that the caller used.
func absolute(r *http.Request, path string) string {
	if r.TLS != nil {
		return "https://" + r.Host + path
	}
	return "http://" + r.Host + path
}

// signURL makes a URL for a port that needs no token.
func (a *api) signURL(w http.ResponseWriter, r *http.Request, body apitype.PortURLRequest) error {
	tenant, key := target(r)
	if body.Port < 1 || body.Port > 65535 {
		return &lifecycle.InvalidError{Field: "port", Message: "must be from 1 to 65535"}
	}
	expires, err := expiry(body.TTL)
	if err != nil {
		return err
	}
	access, err := a.Manager.Ports(r.Context(), tenant, key)
	if err != nil {
		return err
	}
	proxy.ExchangeOf(r.Context()).SessionID = access.SessionID()
	signature, err := a.signer.sign(portPurpose, claim{Tenant: tenant, Key: key, Session: access.SessionID(), Port: body.Port, Expires: expires.Unix()})
	if err != nil {
		return err
	}
	path := signedPrefix + signature + "/"
	return reply(w, http.StatusCreated, apitype.PortURL{URL: absolute(r, path), Path: path, ExpiresAt: expires}, nil)
}

// signedPort passes a request on to the port that its signed URL names.
func (a *api) signedPort(w http.ResponseWriter, r *http.Request) error {
	var c claim
	if err := a.signer.opened(r, portPurpose, &c); err != nil {
		return err
	}
	ex := proxy.ExchangeOf(r.Context())
	ex.Caller.Tenant, ex.Key, ex.SessionID = c.Tenant, c.Key, c.Session
	expired := expiredURL("sandbox", nil)
	if time.Now().Unix() >= c.Expires {
		return expired
	}
	if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" && r.Header.Get("Origin") == "null" {
		preflight(w, r)
		return nil
	}
	access, err := a.Manager.Ports(r.Context(), c.Tenant, c.Key)
	var missing *lifecycle.NotFoundError
	switch {
	case errors.As(err, &missing), access != nil && access.SessionID() != c.Session:
		return expired
	case err != nil:
		return err
	}
	to := a.portOptions(access, c.Port, r, 3)
	to.Signed = true
	ctx, cancel := context.WithDeadline(r.Context(), time.Unix(c.Expires, 0)) // ends a request under way
	defer cancel()
	err = to.Serve(w, r.WithContext(ctx))
	if err != nil && ctx.Err() != nil && r.Context().Err() == nil {
		return expired
	}
	return err
}

// preflight answers a CORS preflight of the port's own pages. The browser gives these pages an
// opaque origin, so it takes their requests for cross-origin ones.
func preflight(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", "null")
	h.Set("Access-Control-Allow-Methods", strings.Join(anyMethod, ", "))
	for _, v := range r.Header.Values("Access-Control-Request-Headers") {
		h.Add("Access-Control-Allow-Headers", v)
	}
	w.WriteHeader(http.StatusNoContent)
}
