package proxy

import (
	"bytes"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/bermhq/berm/lifecycle"
)

// Scope is something that a token may allow.
type Scope string

// The scopes.
const (
	ScopeNone           Scope = "" // needs no token
	ScopeSandboxesRead  Scope = "sandboxes:read"
	ScopeSandboxesWrite Scope = "sandboxes:write"
	ScopeSandboxesExec  Scope = "sandboxes:exec"
	ScopeStorageRead    Scope = "storage:read"  // of workspaces, chats and their files
	ScopeStorageWrite   Scope = "storage:write" // likewise
	ScopeStatusRead     Scope = "status:read"
	ScopeAll            Scope = "*"
)

// minToken is the shortest token in bytes that isn't refused as guessable.
const minToken = 16

var tokenName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}$`)

// Caller is who sent a request.
type Caller struct {
	Name         string // of the token; empty without tokens
	Tenant       string
	Scopes       []Scope
	MaxSandboxes int // 0 is no limit of its own
}

// Allows tells whether the caller may do what the scope stands for.
func (c Caller) Allows(s Scope) bool {
	return slices.Contains(c.Scopes, s) || slices.Contains(c.Scopes, ScopeAll)
}

// Tokens are the tokens that callers may show. Only their hashes are kept. They
// are immutable, and safe for many goroutines.
type Tokens struct {
	callers []Caller
	hashes  [][sha256.Size]byte
}

// Len is how many there are; 0 for nil.
func (t *Tokens) Len() int {
	if t == nil {
		return 0
	}
	return len(t.callers)
}

// Find gives the caller that a token belongs to. It takes the same time whichever
// token matches, or none.
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

// LoadTokens reads a file that ParseTokens understands.
func LoadTokens(file string) (*Tokens, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	t, err := ParseTokens(b)
	if err != nil {
		return nil, fmt.Errorf("token file %s: %w", file, err)
	}
	return t, nil
}

// ParseTokens reads tokens: either YAML or JSON with a list under "tokens", each of
// name, token or sha256 (hex), and optionally tenant, scopes and max_sandboxes; or
// one bare token, which allows everything to the tenant "default". All mistakes are
// reported at once, and none of the messages quotes a value.
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
	var doc yaml.Node
	dec := yaml.NewDecoder(bytes.NewReader(data))
	if dec.Decode(&doc) != nil || len(doc.Content) != 1 || dec.Decode(new(yaml.Node)) == nil {
		// The decoder's own message could quote a token.
		return nil, errors.New("it is neither one bare token nor valid YAML")
	}
	p := tokenParser{tokens: &Tokens{}}
	p.object(doc.Content[0], map[string]func(*yaml.Node){"tokens": p.list})
	if len(p.errs) == 0 && len(p.tokens.callers) == 0 {
		p.errs = append(p.errs, errors.New("there is no token in it"))
	}
	return p.tokens, errors.Join(p.errs...)
}

// tokenParser walks the YAML by hand: the library's errors quote values.
type tokenParser struct {
	tokens *Tokens
	errs   []error
}

func (p *tokenParser) errorf(n *yaml.Node, format string, args ...any) {
	p.errs = append(p.errs, fmt.Errorf("line %d: %s", n.Line, fmt.Sprintf(format, args...)))
}

func (p *tokenParser) object(n *yaml.Node, fields map[string]func(*yaml.Node)) {
	if n.Kind != yaml.MappingNode {
		p.errorf(n, "want a mapping")
		return
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k := n.Content[i]
		f, ok := fields[k.Value]
		switch {
		case !ok:
			p.errorf(k, "unknown key")
		case seen[k.Value]:
			p.errorf(k, "%s is there twice", k.Value)
		default:
			seen[k.Value] = true
			f(n.Content[i+1])
		}
	}
}

func (p *tokenParser) text(n *yaml.Node, what string, ok func(string) bool) string {
	if n.Kind != yaml.ScalarNode || !ok(n.Value) {
		p.errorf(n, "not a valid %s", what)
		return ""
	}
	return n.Value
}

func (p *tokenParser) list(n *yaml.Node) {
	if n.Kind != yaml.SequenceNode {
		p.errorf(n, "tokens must be a list")
		return
	}
	for _, item := range n.Content {
		p.token(item)
	}
}

func (p *tokenParser) token(n *yaml.Node) {
	c := Caller{Tenant: lifecycle.DefaultTenant, Scopes: []Scope{ScopeAll}}
	var hashes [][sha256.Size]byte
	p.object(n, map[string]func(*yaml.Node){
		"name":   func(v *yaml.Node) { c.Name = p.text(v, "name", tokenName.MatchString) },
		"tenant": func(v *yaml.Node) { c.Tenant = p.text(v, "tenant", tokenName.MatchString) },
		"token": func(v *yaml.Node) {
			s := p.text(v, fmt.Sprintf("token (at least %d characters, none of them white space)", minToken), func(s string) bool {
				return len(s) >= minToken && !strings.ContainsAny(s, " \t\r\n")
			})
			hashes = append(hashes, sha256.Sum256([]byte(s)))
		},
		"sha256": func(v *yaml.Node) {
			var h [sha256.Size]byte
			p.text(v, "sha256 (64 hexadecimal digits)", func(s string) bool {
				b, err := hex.DecodeString(s)
				return err == nil && copy(h[:], b) == len(h) && len(b) == len(h)
			})
			hashes = append(hashes, h)
		},
		"scopes": func(v *yaml.Node) { c.Scopes = p.scopes(v) },
		"max_sandboxes": func(v *yaml.Node) {
			if v.Kind != yaml.ScalarNode || v.Decode(&c.MaxSandboxes) != nil || c.MaxSandboxes < 0 {
				p.errorf(v, "max_sandboxes must be a whole number, 0 for no limit")
			}
		},
	})
	if n.Kind != yaml.MappingNode {
		return
	}
	if c.Name == "" {
		p.errorf(n, "a token needs a name")
	}
	if len(hashes) != 1 {
		p.errorf(n, "a token needs exactly one of token and sha256")
		return
	}
	for i := range p.tokens.callers {
		if p.tokens.callers[i].Name == c.Name {
			p.errorf(n, "two tokens have the same name")
		}
		if p.tokens.hashes[i] == hashes[0] {
			p.errorf(n, "the same token is there twice")
		}
	}
	p.tokens.callers = append(p.tokens.callers, c)
	p.tokens.hashes = append(p.tokens.hashes, hashes[0])
}

func (p *tokenParser) scopes(n *yaml.Node) []Scope {
	known := []Scope{ScopeSandboxesRead, ScopeSandboxesWrite, ScopeSandboxesExec, ScopeStorageRead, ScopeStorageWrite, ScopeStatusRead, ScopeAll}
	var out []Scope
	if n.Kind != yaml.SequenceNode || len(n.Content) == 0 {
		p.errorf(n, "scopes must be a list with something in it")
	}
	for _, s := range n.Content {
		if !slices.Contains(known, Scope(s.Value)) {
			p.errorf(s, "unknown scope; known are %s", joinScopes(known))
		}
		out = append(out, Scope(s.Value))
	}
	return out
}

func joinScopes(s []Scope) string {
	out := make([]string, len(s))
	for i := range s {
		out[i] = string(s[i])
	}
	return strings.Join(out, ", ")
}

// authenticate finds out who sent the request.
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

// StripCredentials takes out of a header what Berm's callers show to be let in, before
// it is passed on. With authenticated, the request was let in by it, so that a bearer
// token is Berm's whatever it is; otherwise those are that Berm knows.
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

// Require fails unless the request's caller may also do what the scope stands for.
func Require(r *http.Request, s Scope) error {
	if !ExchangeOf(r.Context()).Caller.Allows(s) {
		return missingScope(s)
	}
	return nil
}
