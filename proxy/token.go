package proxy

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
)

// Scope is a permission that a token may have.
type Scope string

// The scopes.
const (
	ScopeNone           Scope = "" // needs no token
	ScopeSandboxesRead  Scope = "sandboxes:read"
	ScopeSandboxesWrite Scope = "sandboxes:write"
	ScopeSandboxesExec  Scope = "sandboxes:exec"
	ScopeStorageRead    Scope = "storage:read"  // of workspaces, chats and their files
	ScopeStorageWrite   Scope = "storage:write" // of the same
	ScopeStatusRead     Scope = "status:read"
	ScopeAll            Scope = "*"
)

// minToken is the minimum length of a token in bytes. Shorter ones could be guessed.
const minToken = 16

var tokenName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}$`)

// Caller is the sender of a request.
type Caller struct {
	Name         string // of the token; empty without tokens
	Tenant       string
	Scopes       []Scope
	MaxSandboxes int // 0 sets no limit
}

// Allows reports whether the caller has the scope.
func (c Caller) Allows(s Scope) bool {
	return slices.Contains(c.Scopes, s) || slices.Contains(c.Scopes, ScopeAll)
}

// Tokens is the set of tokens that callers may show. It keeps only their hashes. It is
// immutable, and safe for many goroutines.
type Tokens struct {
	callers []Caller
	hashes  [][sha256.Size]byte
}

// Len returns the number of tokens, 0 for nil.
func (t *Tokens) Len() int {
	if t == nil {
		return 0
	}
	return len(t.callers)
}

// Find returns the caller that a token belongs to. The time that it takes depends neither on
// whether a token matches nor on which.
func (t *Tokens) Find(token string) (Caller, bool) {
	sum := sha256.Sum256([]byte(token))
	found := -1
	for i := range t.hashes {
		if subtle.ConstantTimeCompare(sum[:], t.hashes[i][:]) == 1 {
			found = i
		}
	}
	if found < 0 {
		return Caller{}, false
	}
	return t.callers[found], true
}

// ParseTokens reads either YAML or JSON with a list under "tokens", or one bare token. Each
// entry has name, token or sha256 (hex), and optionally tenant, scopes and max_sandboxes. A
// bare token allows everything to the tenant "default". The error reports all mistakes at once,
// and quotes no value.
func ParseTokens(data []byte) (*Tokens, error) {
	data = bytes.TrimSpace(data)
	if len(data) == 0 {
		return nil, errors.New("there is no token in it")
	}
	if !bytes.ContainsAny(data, " \t\r\n{") {
		if len(data) < minToken {
			return nil, fmt.Errorf("the token is shorter than %d characters", minToken)
		}
		return &Tokens{
			callers: []Caller{{Name: "default", Tenant: lifecycle.DefaultTenant, Scopes: []Scope{ScopeAll}}},
			hashes:  [][sha256.Size]byte{sha256.Sum256(data)},
		}, nil
	}
	var file struct {
		Tokens []tokenEntry `yaml:"tokens"`
	}
	doc := policy.Decode(data, &file)
	var errs []error
	errorf := func(path, format string, args ...any) {
		errs = append(errs, fmt.Errorf("line %d: %s", doc.Lines[path], fmt.Sprintf(format, args...)))
	}
	for _, p := range doc.Problems {
		switch {
		case p.Line == 0: // the decoder's own message could quote a token
			return nil, errors.New("it is neither one bare token nor valid YAML")
		case strings.HasPrefix(p.Message, "is not a known key"): // the key could be a token
			errorf(p.Path, "unknown key")
		case strings.HasPrefix(p.Message, "is there twice"):
			errorf(p.Path, "a key %s", p.Message)
		default:
			errorf(p.Path, "%s %s", p.Path, p.Message)
		}
	}
	for _, path := range doc.Nulls {
		errorf(path, "%s has no value", path)
	}
	if len(errs) == 0 && len(file.Tokens) == 0 {
		return nil, errors.New("there is no token in it")
	}
	tokens := &Tokens{}
	for i, entry := range file.Tokens {
		path := fmt.Sprintf("tokens[%d]", i)
		tokens.add(entry, func(format string, args ...any) { errorf(path, format, args...) })
	}
	return tokens, errors.Join(errs...)
}

// tokenEntry is a token in the file.
type tokenEntry struct {
	Name         string   `yaml:"name"`
	Tenant       *string  `yaml:"tenant"`
	Token        *string  `yaml:"token"`
	SHA256       *string  `yaml:"sha256"`
	Scopes       *[]Scope `yaml:"scopes"`
	MaxSandboxes int      `yaml:"max_sandboxes"`
}

// add adds a token, and reports its mistakes.
func (t *Tokens) add(e tokenEntry, errorf func(format string, args ...any)) {
	c := Caller{Name: e.Name, Tenant: lifecycle.DefaultTenant, Scopes: []Scope{ScopeAll}, MaxSandboxes: e.MaxSandboxes}
	if e.Name == "" {
		errorf("a token needs a name")
	} else if !tokenName.MatchString(e.Name) {
		errorf("not a valid name")
	}
	if e.Tenant != nil {
		if c.Tenant = *e.Tenant; !tokenName.MatchString(c.Tenant) {
			errorf("not a valid tenant")
		}
	}
	if e.Scopes != nil {
		if c.Scopes = *e.Scopes; len(c.Scopes) == 0 {
			errorf("scopes must be a list with something in it")
		}
		known := []Scope{ScopeSandboxesRead, ScopeSandboxesWrite, ScopeSandboxesExec, ScopeStorageRead, ScopeStorageWrite, ScopeStatusRead, ScopeAll}
		for _, s := range c.Scopes {
			if !slices.Contains(known, s) {
				errorf("unknown scope; known are %s", joinScopes(known))
			}
		}
	}
	if e.MaxSandboxes < 0 {
		errorf("max_sandboxes must be a whole number, 0 for no limit")
	}
	var hash [sha256.Size]byte
	switch {
	case (e.Token == nil) == (e.SHA256 == nil):
		errorf("a token needs exactly one of token and sha256")
		return
	case e.Token != nil:
		if len(*e.Token) < minToken || strings.ContainsAny(*e.Token, " \t\r\n") {
			errorf("not a valid token (at least %d characters, none of them white space)", minToken)
		}
		hash = sha256.Sum256([]byte(*e.Token))
	default:
		sum, err := hex.DecodeString(*e.SHA256)
		if err != nil || len(sum) != len(hash) {
			errorf("not a valid sha256 (64 hexadecimal digits)")
		}
		copy(hash[:], sum)
	}
	for i := range t.callers {
		if t.callers[i].Name == c.Name {
			errorf("two tokens have the same name")
		}
		if t.hashes[i] == hash {
			errorf("the same token is there twice")
		}
	}
	t.callers, t.hashes = append(t.callers, c), append(t.hashes, hash)
}

func joinScopes(s []Scope) string {
	out := make([]string, len(s))
	for i := range s {
		out[i] = string(s[i])
	}
	return strings.Join(out, ", ")
}

// authenticate returns the caller of a request.
func (g *Gate) authenticate(r *http.Request) (Caller, error) {
	if g.opts.Tokens.Len() == 0 {
		return Caller{Tenant: lifecycle.DefaultTenant, Scopes: []Scope{ScopeAll}}, nil
	}
	shown := slices.Clone(r.Header.Values(g.opts.TokenHeader))
	for _, a := range r.Header.Values("Authorization") {
		scheme, token, _ := strings.Cut(a, " ")
		if strings.EqualFold(scheme, "Bearer") {
			shown = append(shown, strings.TrimSpace(token))
		}
	}
	if len(shown) == 0 {
		return Caller{}, unauthorized("a token is needed, in the header " + g.opts.TokenHeader + " or as Authorization: Bearer")
	}
	if len(slices.Compact(shown)) > 1 {
		return Caller{}, unauthorized("the request shows more than one token")
	}
	c, ok := g.opts.Tokens.Find(shown[0])
	if !ok {
		return Caller{}, unauthorized("the token is not known")
	}
	return c, nil
}

// StripCredentials removes Berm's tokens from the header of a request that is passed on. If
// a token authenticated the request, every bearer token is Berm's. Otherwise only known
// tokens are. Without any tokens, StripCredentials leaves Authorization as it is.
func (g *Gate) StripCredentials(h http.Header, authenticated bool) {
	h.Del(g.opts.TokenHeader)
	if g.opts.Tokens.Len() == 0 {
		return
	}
	values := h.Values("Authorization")
	h.Del("Authorization")
	for _, a := range values {
		scheme, token, _ := strings.Cut(a, " ")
		if strings.EqualFold(scheme, "Bearer") {
			if _, known := g.opts.Tokens.Find(strings.TrimSpace(token)); known || authenticated {
				continue
			}
		}
		h.Add("Authorization", a)
	}
}

func unauthorized(detail string) *Fault {
	return &Fault{Status: http.StatusUnauthorized, Code: "unauthorized", Title: "Unauthorized", Detail: detail}
}

func missingScope(s Scope) *Fault {
	return &Fault{Status: http.StatusForbidden, Code: "forbidden", Title: "Scope missing", Detail: "the token lacks the scope " + string(s)}
}

// Require fails unless the request's caller has the scope.
func Require(r *http.Request, s Scope) error {
	if !ExchangeOf(r.Context()).Caller.Allows(s) {
		return missingScope(s)
	}
	return nil
}
