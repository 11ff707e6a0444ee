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

// signer makes and checks the part of a signed URL that lets its bearer in. It is safe
// for many goroutines.
type signer struct{ key []byte }

// newSigner takes a key of at least 32 bytes. None has a random one made: what it signs
// is good until the process ends.
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

func (s signer) mac(text string) []byte {
	h := hmac.New(sha256.New, s.key)
	h.Write([]byte("berm signed port url 1\x00" + text))
	return h.Sum(nil)
}

func (s signer) sign(c claim) (string, error) {
	b, err := json.Marshal(c)
	if err != nil {
		return "", err
	}
	text := base64.RawURLEncoding.EncodeToString(b)
	return text + "." + base64.RawURLEncoding.EncodeToString(s.mac(text)), nil
}

// open gives what was signed; false if it wasn't by this key.
func (s signer) open(signature string) (c claim, ok bool) {
	text, sum, _ := strings.Cut(signature, ".")
	mac, err := base64.RawURLEncoding.Strict().DecodeString(sum)
	if err != nil || !hmac.Equal(mac, s.mac(text)) {
		return claim{}, false
	}
	b, err := base64.RawURLEncoding.DecodeString(text)
	return c, err == nil && json.Unmarshal(b, &c) == nil
}

// signURL makes a URL for a port that needs no token.
func (a *api) signURL(w http.ResponseWriter, r *http.Request) error {
	tenant, key, err := a.key(r)
	if err != nil {
		return err
	}
	var body apitype.PortURLRequest
	if err := proxy.DecodeBody(w, r, proxy.MaxBody, false, &body); err != nil {
		return err
	}
	ttl := defaultURLTTL
	if body.TTL != nil {
		ttl = time.Duration(*body.TTL)
	}
	switch {
	case body.Port < 1 || body.Port > 65535:
		return &lifecycle.InvalidError{Field: "port", Message: "must be from 1 to 65535"}
	case ttl < time.Second || ttl > maxURLTTL:
		return &lifecycle.InvalidError{Field: "ttl", Message: "must be from one second to seven days"}
	}
	access, err := a.manager.Ports(r.Context(), tenant, key)
	if err != nil {
		return err
	}
	proxy.ExchangeOf(r.Context()).SessionID = access.SessionID()
	expires := time.Now().Add(ttl + time.Second - 1).Truncate(time.Second).UTC()
	signature, err := a.signer.sign(claim{Tenant: tenant, Key: key, Session: access.SessionID(), Port: body.Port, Expires: expires.Unix()})
	if err != nil {
		return err
	}
	scheme := "http://"
	if r.TLS != nil {
		scheme = "https://"
	}
	path := signedPrefix + signature + "/"
	return proxy.WriteJSON(w, http.StatusCreated, jsonType, apitype.PortURL{URL: scheme + r.Host + path, Path: path, ExpiresAt: expires})
}

// signedPort passes a request on to the port that its address allows.
func (a *api) signedPort(w http.ResponseWriter, r *http.Request) error {
	c, ok := a.signer.open(httprouter.ParamsFromContext(r.Context()).ByName("signature"))
	if !ok {
		return &proxy.Fault{Status: http.StatusForbidden, Code: "url_invalid", Title: "Invalid address",
			Detail: "this address wasn't given out by this server, or not since it was started"}
	}
	ex := proxy.ExchangeOf(r.Context())
	ex.Caller.Tenant, ex.Key, ex.SessionID = c.Tenant, c.Key, c.Session
	expired := &proxy.Fault{Status: http.StatusGone, Code: "url_expired", Title: "Address expired",
		Detail: "the time of this address is over, or the sandbox that it was for is gone"}
	if time.Now().Unix() >= c.Expires {
		return expired
	}
	if r.Method == http.MethodOptions && r.Header.Get("Access-Control-Request-Method") != "" && r.Header.Get("Origin") == "null" {
		preflight(w, r)
		return nil
	}
	access, err := a.manager.Ports(r.Context(), c.Tenant, c.Key)
	var missing *lifecycle.NotFoundError
	switch {
	case errors.As(err, &missing), access != nil && access.SessionID() != c.Session:
		return expired
	case err != nil:
		return err
	}
	p := &passage{api: a, access: access, port: c.Port, signed: true}
	p.prefix, p.tail = cutPath(r.URL.EscapedPath(), 3)
	ctx, cancel := context.WithDeadline(r.Context(), time.Unix(c.Expires, 0)) // also what goes on by then
	defer cancel()
	err = p.serve(w, r.WithContext(ctx))
	if err != nil && ctx.Err() != nil && r.Context().Err() == nil {
		return expired
	}
	return err
}

// preflight lets the port's own pages ask: to the browser, which gave them an origin of
// their own, they are strangers here.
func preflight(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Access-Control-Allow-Origin", "null")
	h.Set("Access-Control-Allow-Methods", strings.Join(anyMethod, ", "))
	for _, v := range r.Header.Values("Access-Control-Request-Headers") {
		h.Add("Access-Control-Allow-Headers", v)
	}
	w.WriteHeader(http.StatusNoContent)
}
