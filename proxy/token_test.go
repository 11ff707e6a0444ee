package proxy_test

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/proxy"
)

const (
	secretA = "aaaaaaaa-secret-aaaaaaaa"
	secretB = "bbbbbbbb-secret-bbbbbbbb"
)

func hashOf(s string) string {
	h := sha256.Sum256([]byte(s))
	return hex.EncodeToString(h[:])
}

func TestParseTokens(t *testing.T) {
	all := []proxy.Scope{proxy.ScopeAll}
	tests := map[string]struct {
		in   string
		want map[string]proxy.Caller
	}{
		"bare": {secretA + "\n", map[string]proxy.Caller{secretA: {Name: "default", Tenant: "default", Scopes: all}}},
		"yaml": {
			"tokens:\n- {name: a, token: " + secretA + ", tenant: red, scopes: [sandboxes:read, 'sandboxes:exec'], max_sandboxes: 3}\n- name: b\n  sha256: " + hashOf(secretB) + "\n",
			map[string]proxy.Caller{
				secretA: {Name: "a", Tenant: "red", Scopes: []proxy.Scope{proxy.ScopeSandboxesRead, proxy.ScopeSandboxesExec}, MaxSandboxes: 3},
				secretB: {Name: "b", Tenant: "default", Scopes: all},
			},
		},
		"json": {`{"tokens":[{"name":"a","token":"` + secretA + `"}]}`, map[string]proxy.Caller{secretA: {Name: "a", Tenant: "default", Scopes: all}}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			tokens, err := proxy.ParseTokens([]byte(tt.in))
			must(t, err)
			if tokens.Len() != len(tt.want) {
				t.Errorf("got %d tokens, want %d", tokens.Len(), len(tt.want))
			}
			for secret, want := range tt.want {
				got, ok := tokens.Find(secret)
				if diff := cmp.Diff(want, got); diff != "" || !ok {
					t.Errorf("%v %s", ok, diff)
				}
			}
			for _, wrong := range []string{"", secretA + " ", strings.ToUpper(secretA), hashOf(secretA), hashOf(secretB)} {
				if _, ok := tokens.Find(wrong); ok {
					t.Errorf("%q is taken for a token", wrong)
				}
			}
		})
	}
}

func TestParseTokensRefuses(t *testing.T) {
	for name, tt := range map[string]struct{ in, want string }{
		"empty":             {" \n", "no token"},
		"short":             {"hunter2", "shorter than 16"},
		"empty list":        {"tokens: []", "no token"},
		"not a list":        {"tokens: " + secretA, "must be a list"},
		"two documents":     {"tokens: []\n---\ntokens: []", "neither"},
		"broken":            {"tokens: [{" + secretA, "neither"},
		"no name":           {"tokens: [{token: " + secretA + "}]", "needs a name"},
		"no token":          {"tokens: [{name: a}]", "exactly one"},
		"both":              {"tokens: [{name: a, token: " + secretA + ", sha256: " + hashOf(secretA) + "}]", "exactly one"},
		"bad hash":          {"tokens: [{name: a, sha256: " + hashOf(secretA)[1:] + "}]", "64 hexadecimal"},
		"short token":       {"tokens: [{name: a, token: hunter2}]", "at least 16"},
		"unknown key":       {"tokens: [{name: a, token: " + secretA + ", scope: x}]", "line 1: unknown key"},
		"unknown scope":     {"tokens: [{name: a, token: " + secretA + ", scopes: [admin]}]", "unknown scope"},
		"no scopes":         {"tokens: [{name: a, token: " + secretA + ", scopes: []}]", "something in it"},
		"bad tenant":        {"tokens: [{name: a, token: " + secretA + ", tenant: a/b}]", "not a valid tenant"},
		"negative":          {"tokens: [{name: a, token: " + secretA + ", max_sandboxes: -1}]", "max_sandboxes"},
		"same name":         {"tokens: [{name: a, token: " + secretA + "}, {name: a, token: " + secretB + "}]", "same name"},
		"same token":        {"tokens: [{name: a, token: " + secretA + "}, {name: b, sha256: " + hashOf(secretA) + "}]", "same token"},
		"repeated key":      {"tokens: [{name: a, name: b, token: " + secretA + "}]", "twice"},
		"token as a list":   {"tokens: [{name: a, token: [" + secretA + "]}]", "tokens[0].token must be a single value"},
		"no value":          {"tokens: [{name: a, token: " + secretA + ", scopes: }]", "scopes has no value"},
		"an alias":          {"tokens: [{name: &a " + secretA + ", token: *a}]", "aliases are not supported"},
		"value as two keys": {"tokens: [{name: a, " + secretA + ": token, " + secretA + ": token}]", "twice"},
		"no scopes said":    {"tokens: [{name: a, token: " + secretA + ", scopes: }]", "no value"},
		"anchor":            {"tokens: [{name: &" + secretA + " a, token: *" + secretA + "}]", "aliases"},
		"value as the key":  {"tokens: [{name: a, " + secretA + ": token}]", "unknown key"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := proxy.ParseTokens([]byte(tt.in))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Fatalf("got %v, want %q", err, tt.want)
			}
			for _, s := range []string{secretA, secretB, "hunter2"} {
				if strings.Contains(err.Error(), s) {
					t.Errorf("the error quotes a token: %v", err)
				}
			}
		})
	}
}

func TestParseTokensReportsAll(t *testing.T) {
	_, err := proxy.ParseTokens([]byte("tokens:\n- {name: a}\n- {name: b, token: short}\n- {token: " + secretA + "}\n"))
	for _, want := range []string{"line 2", "line 3", "line 4"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q is missing in %v", want, err)
		}
	}
}

func TestCheckExposure(t *testing.T) {
	for address, ok := range map[string]bool{
		"127.0.0.1:80": true, "127.9.9.9:0": true, "[::1]:80": true, "localhost:80": true, "unix:///run/berm.sock": true,
		":80": false, "0.0.0.0:80": false, "[::]:80": false, "192.0.2.1:80": false, "example.com:80": false, "localhost.example.com:80": false,
		"127.0.0.1": false, "": false,
	} {
		if err := proxy.CheckExposure(address, 0); (err == nil) != ok {
			t.Errorf("%q without tokens: %v", address, err)
		}
	}
	if err := proxy.CheckExposure("0.0.0.0:80", 1); err != nil {
		t.Errorf("with a token: %v", err)
	}
}
