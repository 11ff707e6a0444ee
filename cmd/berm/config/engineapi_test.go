package config

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

const twoListeners = `
engine_api:
  audit_log: /var/log/berm/audit.log
  listeners:
    - address: unix:///run/berm/docker.sock
      socket_mode: "0600"
      owner: "0:998"
      callers:
        - {name: ci, tenant: ci, profile: builds, uids: [1000, 1001]}
        - {name: rest, tenant: rest, mode: audit}
    - address: tcp://0.0.0.0:2376
      tls_cert_file: /c
      tls_key_file: /k
      client_ca_file: /ca
      callers:
        - {name: ci, tenant: ci, certs: [ci.example, "sha256:` + digest + `"]}
`

const digest = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"

func TestListeners(t *testing.T) {
	want := []Listener{
		{
			Address: "unix:///run/berm/docker.sock", SocketMode: "0600", Owner: "0:998",
			Callers: []Caller{{Name: "ci", Tenant: "ci", Profile: "builds", UIDs: []uint32{1000, 1001}}, {Name: "rest", Tenant: "rest", Mode: "audit"}},
		},
		{
			Address: "tcp://0.0.0.0:2376", TLSCertFile: "/c", TLSKeyFile: "/k", ClientCAFile: "/ca",
			Callers: []Caller{{Name: "ci", Tenant: "ci", Certs: []string{"ci.example", "sha256:" + digest}}},
		},
	}
	c, err := parse([]byte(twoListeners), Options{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, c.EngineAPI.Listeners); diff != "" {
		t.Errorf("from the file (-want +got):\n%s", diff)
	}
	var out strings.Builder
	if err := c.Print(&out); err != nil {
		t.Fatal(err)
	}
	again, err := parse([]byte(out.String()), Options{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(c.EngineAPI, again.EngineAPI, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("printed and read again (-want +got):\n%s", diff)
	}
	for _, env := range []string{
		`[{address: "tcp://127.0.0.1:1", callers: [{name: a, tenant: b}]}]`, "  - address: tcp://127.0.0.1:1\n    callers: [{name: a, tenant: b}]\n",
	} {
		c, err := parse([]byte(twoListeners), Options{Environ: []string{"BERM_ENGINE_API_LISTENERS=" + env}})
		if err != nil {
			t.Fatal(err)
		}
		if len(c.EngineAPI.Listeners) != 1 || c.EngineAPI.Listeners[0].Callers[0].Tenant != "b" {
			t.Errorf("from %q: %+v", env, c.EngineAPI.Listeners)
		}
	}
	c, err = parse([]byte(twoListeners), Options{Environ: []string{"BERM_ENGINE_API_LISTENERS="}})
	if err != nil || len(c.EngineAPI.Listeners) != 0 {
		t.Errorf("from an empty variable: %+v, %v", c, err)
	}
}

func TestDoorOneOff(t *testing.T) {
	if _, err := parse([]byte("http: {listen: none}\n"+twoListeners), Options{}); err != nil {
		t.Error(err)
	}
}

func TestListenerValues(t *testing.T) {
	var l Listener
	if mode := l.FileMode(); mode != 0o660 {
		t.Errorf("mode: %o", mode)
	}
	if uid, gid := l.Owners(); uid != -1 || gid != -1 {
		t.Errorf("owner: %d:%d", uid, gid)
	}
	l.Owner = "12:34"
	if uid, gid := l.Owners(); uid != 12 || gid != 34 {
		t.Errorf("owner: %d:%d", uid, gid)
	}
}

func TestListenerErrors(t *testing.T) {
	const caller = "callers: [{name: a, tenant: a}]"
	unix := func(rest string) string { return "[{address: 'unix:///s', " + rest + "}]" }
	tls := "[{address: 'tcp://0.0.0.0:1', tls_cert_file: /c, tls_key_file: /k, client_ca_file: /a, "
	tests := map[string]struct {
		listeners string
		want      []string // all the errors
	}{
		"no list":         {"{}", []string{"line 2: engine_api.listeners: must be a list"}},
		"no mapping":      {"[a]", []string{"engine_api.listeners[0]: must be a mapping"}},
		"unknown":         {unix("tls: x, " + caller), []string{"engine_api.listeners[0].tls: is not a known key"}},
		"unknown, deep":   {unix("callers: [{name: a, tenant: a, uid: 1}]"), []string{"engine_api.listeners[0].callers[0].uid: is not a known key"}},
		"twice":           {unix("owner: '1:1', owner: '1:2', " + caller), []string{"engine_api.listeners[0].owner: is there twice"}},
		"null":            {unix("owner: , " + caller), []string{"engine_api.listeners[0].owner: has no value"}},
		"anchor":          {"[&a {address: 'unix:///s', " + caller + "}, *a]", []string{"listeners[1]: aliases are not supported"}},
		"lines":           {"\n  - address: unix:///s\n    callers:\n      - name: a\n        tenant: a\n        mdoe: x\n", []string{"line 7: engine_api.listeners[0].callers[0].mdoe"}},
		"address":         {"[{address: '0.0.0.0:1', " + caller + "}]", []string{".address: want unix:///path, tcp://host:port or systemd:NAME"}},
		"relative":        {"[{address: 'unix://s', " + caller + "}]", []string{".address: want unix:// and an absolute path"}},
		"no port":         {"[{address: 'tcp://127.0.0.1', allow_plain: true, " + caller + "}]", []string{".address: want tcp://host:port"}},
		"twice there":     {"[{address: 'unix:///s', " + caller + "}, {address: 'unix:///x/../s', " + caller + "}]", []string{"[1].address: is the same as engine_api.listeners[0].address"}},
		"as http":         {"[{address: 'tcp://127.0.0.1:7070', " + caller + "}]", []string{"[0].address: is the same as http.listen"}},
		"open":            {"[{address: 'tcp://0.0.0.0:1', " + caller + "}]", []string{".client_ca_file: is missing"}},
		"open, any":       {"[{address: 'tcp://:1', " + caller + "}]", []string{".client_ca_file: is missing"}},
		"open with TLS":   {"[{address: 'tcp://berm:1', tls_cert_file: /c, tls_key_file: /k, " + caller + "}]", []string{".client_ca_file: is missing"}},
		"no key":          {"[{address: 'tcp://127.0.0.1:1', tls_cert_file: /c, " + caller + "}]", []string{".tls_key_file: a certificate"}},
		"CA alone":        {"[{address: 'tcp://127.0.0.1:1', client_ca_file: /c, " + caller + "}]", []string{".client_ca_file: needs"}},
		"TLS on a socket": {unix("tls_cert_file: /c, tls_key_file: /k, " + caller), []string{".tls_cert_file: TLS is for tcp"}},
		"plain socket":    {unix("allow_plain: true, " + caller), []string{".allow_plain: is for tcp"}},
		"mode on TCP":     {"[{address: 'tcp://127.0.0.1:1', socket_mode: '0600', " + caller + "}]", []string{"socket_mode and owner are for unix"}},
		"socket mode":     {unix("socket_mode: '7777', " + caller), []string{".socket_mode: want an octal"}},
		"owner":           {unix("owner: root, " + caller), []string{".owner: want uid:gid"}},
		"owner, huge":     {unix("owner: '4294967295:0', " + caller), []string{".owner: want uid:gid"}},
		"nobody":          {unix("callers: []"), []string{".callers: names nobody"}},
		"nameless":        {unix("callers: [{}]"), []string{"callers[0].name: want", "callers[0].tenant: want"}},
		"bad tenant":      {unix("callers: [{name: a, tenant: 'a,b'}]"), []string{"callers[0].tenant: want"}},
		"mode":            {unix("callers: [{name: a, tenant: a, mode: off}]"), []string{"callers[0].mode: want enforce or audit"}},
		"no audit log":    {unix("callers: [{name: a, tenant: a, mode: audit}]"), []string{"callers[0].mode: audit needs engine_api.audit_log"}},
		"two anybodies":   {unix("callers: [{name: a, tenant: a}, {name: b, tenant: b}]"), []string{`callers[1]: "everybody else" is another caller's`}},
		"two names":       {unix("callers: [{name: a, tenant: a, uids: [1]}, {name: a, tenant: b}]"), []string{`callers[1].name: "a" is another`}},
		"one uid":         {unix("callers: [{name: a, tenant: a, uids: [1]}, {name: b, tenant: b, uids: [2, 1]}]"), []string{`callers[1].uids: "1" is another`}},
		"half a uid":      {unix("callers: [{name: a, tenant: a, uids: [0.5]}]"), []string{"callers[0].uids[0]: must be a whole number"}},
		"negative uid":    {unix("callers: [{name: a, tenant: a, uids: [-1]}]"), []string{"callers[0].uids[0]: must be a whole number"}},
		"huge uid":        {unix("callers: [{name: a, tenant: a, uids: [4294967296]}]"), []string{"callers[0].uids[0]: must be a whole number"}},
		"named uid":       {unix("callers: [{name: a, tenant: a, uids: [root]}]"), []string{"callers[0].uids[0]: must be a whole number"}},
		"uids on TCP":     {tls + "callers: [{name: a, tenant: a, uids: [1]}]}]", []string{"callers[0].uids: only a unix socket"}},
		"certs on unix":   {unix("callers: [{name: a, tenant: a, certs: [a]}]"), []string{"callers[0].certs: need client_ca_file"}},
		"one cert":        {tls + "callers: [{name: a, tenant: a, certs: [a]}, {name: b, tenant: b, certs: [a]}]}]", []string{`callers[1].certs: "a" is another`}},
		"half a digest":   {tls + "callers: [{name: a, tenant: a, certs: ['sha256:abc']}]}]", []string{"callers[0].certs:"}},
		"loud digest":     {tls + "callers: [{name: a, tenant: a, certs: ['SHA256:" + digest + "']}]}]", []string{"callers[0].certs:"}},
		"empty cert":      {tls + "callers: [{name: a, tenant: a, certs: ['']}]}]", []string{"callers[0].certs:"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := parse([]byte("engine_api:\n listeners: "+tt.listeners), Options{})
			wantErrors(t, err, tt.want)
		})
	}
	for name, file := range map[string]string{
		"relative audit log":     "engine_api: {audit_log: a}",
		"relative spool":         "engine_api: {spool_dir: a}",
		"small spool":            "engine_api: {spool_mb: 63}",
		"host":                   "engine_api: {allowed_hosts: ['http://a']}",
		"containerd":             "engine: {kind: containerd}\nengine_api: {listeners: " + unix(caller) + "}",
		"both by one name":       "http: {listen: 'unix:///s'}\nengine_api: {listeners: " + unix(caller) + "}",
		"a variable of no key":   "engine_api: {listen: x}",
		"a mapping for the text": "engine_api: {audit_log: {a: b}}",
	} {
		if _, err := parse([]byte(file), Options{}); err == nil || !strings.Contains(err.Error(), "engine_api.") || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := parse([]byte("engine_api: {listeners: [{address: 'tcp://berm:2375', allow_plain: true, "+caller+"}]}"), Options{}); err != nil {
		t.Errorf("a plain listener that was accepted: %v", err)
	}
}

func FuzzListeners(f *testing.F) {
	f.Add("[{address: 'unix:///s', callers: [{name: a, tenant: a, uids: [1]}]}]")
	f.Add("- address: tcp://127.0.0.1:1\n  callers: [{name: a, tenant: a}]\n")
	f.Fuzz(func(t *testing.T, value string) {
		c, err := parse(nil, Options{Environ: []string{"BERM_ENGINE_API_LISTENERS=" + value}})
		if err != nil {
			return
		}
		var out strings.Builder
		if err := c.Print(&out); err != nil {
			t.Fatal(err)
		}
		again, err := parse([]byte(out.String()), Options{})
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(c.EngineAPI, again.EngineAPI, cmpopts.EquateEmpty()); diff != "" {
			t.Errorf("printed and read again (-want +got):\n%s", diff)
		}
	})
}

// Whoever reaches a plain listener is its caller, which no sandbox is to be.
func TestPlainBesideSandboxes(t *testing.T) {
	const listener = "engine_api: {listeners: [{address: 'tcp://berm:2375', allow_plain: true, callers: [{name: a, tenant: a}]}]}\nsandbox: {network: "
	if _, err := parse([]byte(listener+"auto}"), Options{}); err == nil || !strings.Contains(err.Error(), "engine_api.listeners[0].allow_plain: with sandbox.network: auto") {
		t.Errorf("in the network of Berm's own: %v", err)
	}
	if _, err := parse([]byte(listener+"apart}"), Options{}); err != nil {
		t.Errorf("in another network: %v", err)
	}
}
