package config

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var update = flag.Bool("update", false, "write every key into docs/berm.yaml")

var ignoreSource = cmpopts.IgnoreUnexported(Config{})

func TestDefaultsAreValid(t *testing.T) {
	got, err := Load(Options{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(Default(), got, ignoreSource); diff != "" {
		t.Errorf("settings from nothing differ from the defaults (-want +got):\n%s", diff)
	}
}

func TestOrderOfSources(t *testing.T) {
	file := filepath.Join(t.TempDir(), "berm.yaml")
	content := "http: {listen: '127.0.0.1:1', socket_mode: '0600', drain_timeout: 1s}\nsandbox:\n  env: {A: b}\nlogging:\n"
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := Load(Options{
		File:    file,
		Environ: []string{"BERM_HTTP_LISTEN=127.0.0.1:2", "BERM_HTTP_SOCKET_MODE=0640"},
		Flags:   map[string]string{"http.listen": "127.0.0.1:3"},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := Default()
	want.HTTP.Listen, want.HTTP.SocketMode, want.HTTP.DrainTimeout = "127.0.0.1:3", "0640", time.Second
	want.Sandbox.Env = map[string]string{"A": "b"}
	if diff := cmp.Diff(want, got, ignoreSource); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	sources := map[string]string{"http.listen": "flag", "http.socket_mode": "BERM_HTTP_SOCKET_MODE", "http.drain_timeout": "file", "sandbox.env": "file"}
	if diff := cmp.Diff(sources, got.source); diff != "" {
		t.Errorf("sources (-want +got):\n%s", diff)
	}
}

// Every key has to yield to its variable, or an operator can't rely on any.
func TestEnvironmentSetsEveryKey(t *testing.T) {
	values := map[string]string{
		"BERM_HTTP_LISTEN": "unix:///run/berm.sock", "BERM_HTTP_SOCKET_MODE": "0600",
		"BERM_HTTP_ALLOWED_HOSTS": "a.example, b.example", "BERM_HTTP_ALLOWED_ORIGINS": "https://a.example",
		"BERM_HTTP_DRAIN_TIMEOUT": "5s", "BERM_LOGGING_LEVEL": "debug",
		"BERM_LOGGING_FORMAT": "json", "BERM_TRACING_SAMPLE_RATIO": "0.5", "BERM_OTEL_ENDPOINT": "http://collector:4318", "BERM_OTEL_HEADERS": "a=b",
		"BERM_OTEL_HEADERS_FILE": "", "BERM_OTEL_SERVICE_NAME": "other", "BERM_OTEL_INSECURE": "true",
		"BERM_ENGINE_KIND": "containerd", "BERM_ENGINE_ADDRESS": "/run/c.sock", "BERM_ENGINE_CALL_TIMEOUT": "5s",
		"BERM_ENGINE_INSTANCE": "one", "BERM_ENGINE_REGISTRY_AUTH_FILE": "/a", "BERM_ENGINE_NAMESPACE": "ns", "BERM_ENGINE_SNAPSHOTTER": "native",
		"BERM_ENGINE_CGROUP_PARENT": "/p", "BERM_ENGINE_NETNS": "/n", "BERM_ENGINE_SUBNETS": "10.0.0.0/20", "BERM_ENGINE_CNI_PLUGIN_DIRS": "/b",
		"BERM_ENGINE_AGENT_DIR": "none", "BERM_SANDBOX_IMAGE": "busybox", "BERM_SANDBOX_NETWORK": "net",
		"BERM_SANDBOX_PORT": "80", "BERM_SANDBOX_TTL": "5m", "BERM_SANDBOX_IDLE_TTL": "5m",
		"BERM_SANDBOX_CLEANUP_INTERVAL": "5s", "BERM_SANDBOX_MAX_SANDBOXES": "5", "BERM_SANDBOX_MAX_COMMANDS": "5",
		"BERM_SANDBOX_MAX_PROCESSES": "5", "BERM_SANDBOX_COMMAND": `["a,b", c]`,
		"BERM_SANDBOX_ENV": `{"A": "1"}`, "BERM_SANDBOX_ADOPT_LEGACY": "true", "BERM_SANDBOX_CREATE_ROOTS": "true",
		"BERM_SANDBOX_CHATS_ROOT": "/c", "BERM_SANDBOX_DEPENDENCIES_ROOT": "/d", "BERM_SANDBOX_LAMBDA_TOOLS_ROOT": "/l",
		"BERM_SANDBOX_CHAT_MOUNT_PATH": "/mc", "BERM_SANDBOX_DEPENDENCIES_MOUNT_PATH": "/md",
		"BERM_SANDBOX_LAMBDA_TOOLS_MOUNT_PATH": "/ml", "BERM_SANDBOX_VOLUME_MOUNT_PATH": "/mv",
		"BERM_STORAGE_WORKSPACE_QUOTA_MB": "5", "BERM_STORAGE_PROJECT_QUOTAS": "off",
		"BERM_SECURITY_TOKEN_HEADER": "X-T", "BERM_SECURITY_TOKENS": "secret", "BERM_SECURITY_TOKEN_FILE": "",
		"BERM_SECURITY_SIGNING_KEY": "key", "BERM_SECURITY_SIGNING_KEY_FILE": "",
		"BERM_STATE_DIR": "/s", "BERM_POLICY_FILE": "/p", "BERM_ENGINE_API_LISTENERS": "",
		"BERM_ENGINE_API_AUDIT_LOG": "/a", "BERM_ENGINE_API_SPOOL_DIR": "/s", "BERM_ENGINE_API_SPOOL_MB": "64", "BERM_ENGINE_API_ALLOWED_HOSTS": "berm", "BERM_ENGINE_API_ARCHIVE_FIXED": "true",
	}
	var environ []string
	for name, value := range values {
		environ = append(environ, name+"="+value)
	}
	got, err := Load(Options{Environ: environ})
	if err != nil {
		t.Fatal(err)
	}
	defaults := fields(Default())
	for i, f := range fields(got) {
		text, ok := values[f.env()]
		if !ok {
			t.Errorf("%s has no value in this test", f.env())
		}
		if text != "" && cmp.Equal(defaults[i].value.Interface(), f.value.Interface()) {
			t.Errorf("%s=%s left %s at its default", f.env(), text, f.key)
		}
	}
	if diff := cmp.Diff([]string{"a.example", "b.example"}, got.HTTP.AllowedHosts); diff != "" {
		t.Errorf("comma-separated list (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"a,b", "c"}, got.Sandbox.Command); diff != "" {
		t.Errorf("list in brackets (-want +got):\n%s", diff)
	}
}

func TestEmptyList(t *testing.T) {
	for _, env := range []string{"", "[]"} {
		c, err := Load(Options{Environ: []string{"BERM_SANDBOX_COMMAND=" + env}})
		if err != nil {
			t.Fatal(err)
		}
		if len(c.Sandbox.Command) != 0 {
			t.Errorf("%q gives %q, want the empty list", env, c.Sandbox.Command)
		}
	}
}

func TestErrors(t *testing.T) {
	tests := map[string]struct {
		file string
		env  []string
		want []string // each in the error
	}{
		"all at once": {
			file: "htp: {}\nhttp:\n  listne: x\n  drain_timeout: 30\nsandbox: {ttl: 30}\n",
			env:  []string{"BERM_SANDBOX_IDLE_TTL=soon", "BERM_HTTP_LISTNE=x"},
			want: []string{
				"line 1: htp: is not a known key", `line 3: http.listne: is not a known key (did you mean "listen"?`, "line 4: http.drain_timeout: must be a duration",
				"line 5: sandbox.ttl: must be a duration", "sandbox.idle_ttl (from BERM_SANDBOX_IDLE_TTL): must be a duration",
				"BERM_HTTP_LISTNE: unknown key; did you mean BERM_HTTP_LISTEN?",
			},
		},
		"twice":          {file: "state_dir: /a\nstate_dir: /b\n", want: []string{"line 2: state_dir: is there twice"}},
		"section twice":  {file: "http: {}\nhttp: {}\n", want: []string{"line 2: http: is there twice"}},
		"two documents":  {file: "http: {}\n---\nhttp: {}\n", want: []string{"more than one YAML document"}},
		"no mapping":     {file: "- a\n", want: []string{"must be a mapping"}},
		"section scalar": {file: "http: yes\n", want: []string{"http: must be a mapping"}},
		"broken":         {file: "http: [\n", want: []string{"configuration file: line 1"}},
		"null":           {file: "state_dir:\n", want: []string{"state_dir: has no value"}},
		"no anchor":      {file: "security: {tokens: *hush}\n", want: []string{"configuration file: aliases are not supported"}},
		"alias":          {file: "state_dir: &a /a\npolicy_file: *a\n", want: []string{"policy_file: aliases are not supported"}},
		"merge":          {file: "http:\n  <<: {listen: x}\n", want: []string{"http.<<: is not a known key"}},
		"list for text":  {file: "state_dir: [/a]\n", want: []string{"state_dir: must be a single value"}},
		"text for list":  {file: "sandbox: {command: sleep}\n", want: []string{"sandbox.command: must be a list"}},
		"env name twice": {file: "sandbox: {env: {A: 1, A: 2}}\n", want: []string{"sandbox.env.A: is there twice"}},
		"secret in file": {file: "security: {tokens: hush}\n", want: []string{"a secret doesn't belong into the file; set BERM_SECURITY_TOKENS"}},
		"two secrets":    {env: []string{"BERM_SECURITY_TOKENS=hush", "BERM_SECURITY_TOKEN_FILE=/t"}, want: []string{"security.token_file: BERM_SECURITY_TOKENS is set as well"}},
		"two keys":       {env: []string{"BERM_SECURITY_SIGNING_KEY=hush", "BERM_SECURITY_SIGNING_KEY_FILE=/k"}, want: []string{"security.signing_key_file: BERM_SECURITY_SIGNING_KEY is set as well"}},
		"nothing served": {file: "http: {listen: none}\n", want: []string{"http.listen: is none"}},
		"listen":         {file: "http: {listen: '127.0.0.1'}\n", want: []string{"http.listen: want host:port"}},
		"listen port":    {file: "http: {listen: '127.0.0.1:http'}\n", want: []string{"http.listen: want host:port"}},
		"listen unix":    {file: "http: {listen: 'unix://berm.sock'}\n", want: []string{"http.listen: want unix:// and an absolute path"}},
		"listen long":    {file: "http: {listen: 'unix:///" + strings.Repeat("a", 107) + "'}\n", want: []string{"at most 107 bytes"}},
		"socket mode":    {file: "http: {socket_mode: rw}\n", want: []string{"http.socket_mode: want an octal"}},
		"socket setuid":  {file: "http: {socket_mode: '4755'}\n", want: []string{"http.socket_mode: want an octal"}},
		"drain":          {file: "http: {drain_timeout: 0s}\n", want: []string{"http.drain_timeout: must be more than 0"}},
		"origin":         {file: "http: {allowed_origins: ['*']}\n", want: []string{`http.allowed_origins: "*" is no origin`}},
		"host":           {file: "http: {allowed_hosts: ['http://a']}\n", want: []string{"http.allowed_hosts"}},
		"level":          {file: "logging: {level: loud}\n", want: []string{"logging.level: want debug"}},
		"format":         {file: "logging: {format: xml}\n", want: []string{"logging.format: want text or json"}},
		"ratio":          {file: "tracing: {sample_ratio: .nan}\n", want: []string{"tracing.sample_ratio: want 0 to 1"}},
		"otel scheme":    {file: "otel: {endpoint: 'collector:4318'}\n", want: []string{"otel.endpoint: want http"}},
		"otel plain":     {file: "otel: {endpoint: 'http://collector:4318'}\n", want: []string{"needs otel.insecure"}},
		"otel password":  {file: "otel: {endpoint: 'https://u:hush@c'}\n", want: []string{"otel.endpoint: carries credentials"}},
		"engine":         {file: "engine: {kind: podman}\n", want: []string{"engine.kind: want docker or containerd"}},
		"containerd's keys": {
			file: "engine: {namespace: a, snapshotter: a, cgroup_parent: /a, netns: /a, subnets: 10.0.0.0/16, cni_plugin_dirs: [/a], agent_dir: a}\n",
			want: []string{
				"engine.namespace: is for engine.kind: containerd only", "engine.snapshotter: is for", "engine.cgroup_parent: is for",
				"engine.netns: is for", "engine.subnets: is for", "engine.cni_plugin_dirs: is for", "engine.agent_dir: want",
			},
		},
		"containerd's values": {
			file: "engine: {kind: containerd, address: 'tcp://a:1', namespace: 'a..b', snapshotter: '-', cgroup_parent: /a/../b, netns: n, subnets: 10.0.0.0/25, cni_plugin_dirs: [b], registry_auth_file: r}\n",
			want: []string{
				"engine.address: want the path", "engine.namespace: want", `engine.snapshotter: "-" is no name`, "engine.cgroup_parent: want", "engine.netns: want",
				"engine.subnets: want", "engine.cni_plugin_dirs: want", "engine.registry_auth_file: want",
			},
		},
		"subnets of 6":    {file: "engine: {kind: containerd, subnets: 'fd00::/16'}\n", want: []string{"engine.subnets: want"}},
		"subnets' host":   {file: "engine: {kind: containerd, subnets: 10.0.0.1/16}\n", want: []string{"engine.subnets: want"}},
		"cgroup root":     {file: "engine: {kind: containerd, cgroup_parent: /}\n", want: []string{"engine.cgroup_parent: want"}},
		"state_dir long":  {file: "state_dir: /" + strings.Repeat("a", 79) + "\nengine: {kind: containerd}\n", want: []string{"state_dir: with containerd"}},
		"call timeout":    {file: "engine: {call_timeout: 0s}\n", want: []string{"engine.call_timeout: must be more than 0"}},
		"instance":        {file: "engine: {instance: 'a b'}\n", want: []string{"engine.instance"}},
		"image":           {file: "sandbox: {image: ''}\n", want: []string{"sandbox.image: must not be empty"}},
		"network":         {file: "sandbox: {network: 'a b'}\n", want: []string{"sandbox.network"}},
		"port":            {file: "sandbox: {port: 65536}\n", want: []string{"sandbox.port: want 0 to 65535"}},
		"ttl":             {file: "sandbox: {ttl: 0s, idle_ttl: -1s, cleanup_interval: 1ms}\n", want: []string{"sandbox.ttl: must", "sandbox.idle_ttl: must", "sandbox.cleanup_interval: must"}},
		"env":             {file: "sandbox: {env: {'A B': hush}}\n", want: []string{`sandbox.env: "A B" is no name`}},
		"relative":        {file: "state_dir: a\npolicy_file: b\nsandbox: {chats_root: c}\n", want: []string{"state_dir: want", "policy_file: want", "sandbox.chats_root: want"}},
		"mount paths":     {file: "sandbox: {chat_mount_path: /a/, volume_mount_path: /b/../a}\n", want: []string{"sandbox.volume_mount_path: is the same as sandbox.chat_mount_path"}},
		"mount over root": {file: "sandbox: {chat_mount_path: /a/..}\n", want: []string{"sandbox.chat_mount_path: want an absolute path below /"}},
		"max sandboxes":   {file: "sandbox: {max_sandboxes: -1}\n", want: []string{"sandbox.max_sandboxes: must not"}},
		"storage":         {file: "storage: {workspace_quota_mb: -1, project_quotas: hard}\n", want: []string{"storage.workspace_quota_mb: want 0 to", "storage.project_quotas: want auto, required or off"}},
		"none at all": {file: "sandbox: {max_commands: 0, max_processes: 0}\n", want: []string{
			"sandbox.max_commands: want 1 to 512", "sandbox.max_processes: want 1 to 256",
		}},
		"too many": {file: "sandbox: {max_commands: 513, max_processes: 257}\n", want: []string{
			"sandbox.max_commands: want 1 to 512", "sandbox.max_processes: want 1 to 256",
		}},
		"removed": {
			file: "sandbox: {max_queued: 1, port_timeout: 1s}\nmetrics: {enabled: false}\ntracing: {enabled: false}\n",
			want: []string{
				"line 1: sandbox.max_queued: no longer a key: remove it", "line 1: sandbox.port_timeout: no longer a key: remove it",
				"line 2: metrics: no longer a key: remove it; /metrics is always", "line 3: tracing.enabled: no longer a key: remove it; tracing.sample_ratio: 0",
			},
		},
		"removed, by environment": {env: []string{"BERM_METRICS_ENABLED=true", "BERM_TRACING_ENABLED=false"}, want: []string{
			"BERM_METRICS_ENABLED: no longer a key: remove it", "BERM_TRACING_ENABLED: no longer a key: remove it",
		}},
		"token header": {file: "security: {token_header: 'a b'}\n", want: []string{"security.token_header"}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := parse([]byte(tt.file), Options{Environ: tt.env})
			wantErrors(t, err, tt.want)
		})
	}
}

// wantErrors checks that an error joins what is wanted, and nothing else.
func wantErrors(t *testing.T, err error, wants []string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	for _, want := range wants {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("error lacks %q:\n%v", want, err)
		}
	}
	if got := strings.Count(err.Error(), "\n") + 1; got != len(wants) {
		t.Errorf("%d errors, want %d:\n%v", got, len(wants), err)
	}
	if strings.Contains(err.Error(), "hush") {
		t.Errorf("the error tells a secret: %v", err)
	}
}

func TestForeignVariablesAreLeftAlone(t *testing.T) {
	if _, err := Load(Options{Environ: []string{"BERM_URL=x", "BERM_TOKEN=x", "BERM_DEMO_IMAGE=x", "BERM_REQUIRE=docker", "PATH=/bin"}}); err != nil {
		t.Error(err)
	}
}

func TestLoadErrors(t *testing.T) {
	huge := filepath.Join(t.TempDir(), "berm.yaml")
	if err := os.WriteFile(huge, bytes.Repeat([]byte("#"), maxFileBytes+1), 0o600); err != nil {
		t.Fatal(err)
	}
	for want, opts := range map[string]Options{
		"no such file": {File: huge + "x"}, "larger than": {File: huge},
	} {
		_, err := Load(opts)
		wantErrors(t, err, []string{want})
	}
}

// What Print writes has to say the same when it is read again, secrets apart.
func TestPrintReadsBack(t *testing.T) {
	c, err := Load(Options{Environ: []string{
		"BERM_SECURITY_TOKENS=hush", "BERM_SANDBOX_ENV={A: hush}", "BERM_SANDBOX_COMMAND=", "BERM_SANDBOX_TTL=90m", "BERM_HTTP_ALLOWED_HOSTS=a,b",
	}})
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := c.Print(&out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"ttl: 1h30m0s # BERM_SANDBOX_TTL", "command: [] # BERM_SANDBOX_COMMAND", "tokens: '[redacted]' # BERM_SECURITY_TOKENS", "drain_timeout: 30s # default"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("lacks %q:\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "hush") {
		t.Errorf("tells a secret:\n%s", out.String())
	}
	var lines []string
	for line := range strings.Lines(out.String()) {
		if !strings.Contains(line, "tokens: ") {
			lines = append(lines, line)
		}
	}
	again, err := parse([]byte(strings.Join(lines, "")), Options{})
	if err != nil {
		t.Fatal(err)
	}
	c.Security.Tokens, c.Sandbox.Env["A"] = "", redacted
	if diff := cmp.Diff(c, again, ignoreSource, cmpopts.EquateEmpty()); diff != "" {
		t.Errorf("(-printed +read):\n%s", diff)
	}
}

func TestEveryKeyIsDescribed(t *testing.T) {
	all := fields(Default())
	for _, f := range all {
		if list, ok := listOf(f.value.Type()); ok {
			all = append(all, elements(f.key, list)...)
		}
	}
	for _, f := range all {
		if f.doc == "" {
			t.Errorf("%s has no doc tag", f.key)
		}
	}
}

const docs = "../../../docs/berm.yaml"

func TestDocsHaveEveryKey(t *testing.T) {
	var want strings.Builder
	if err := Default().Print(&want); err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(docs, []byte(want.String()), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	got, err := os.ReadFile(docs)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want.String(), string(got)); diff != "" {
		t.Errorf("docs/berm.yaml is stale; run go test ./cmd/berm/config -run DocsHave -update (-want +got):\n%s", diff)
	}
}

func FuzzConfig(f *testing.F) {
	f.Add([]byte("http: {listen: '127.0.0.1:1'}\nsandbox: {env: {A: b}, command: [a]}\n"), "1h")
	f.Add([]byte("state_dir: &a /a\npolicy_file: *a\n"), "")
	f.Add([]byte("security: {tokens: x}\n"), "{}")
	f.Fuzz(func(t *testing.T, data []byte, value string) {
		c, err := parse(data, Options{Environ: []string{"BERM_SANDBOX_TTL=" + value, "BERM_SANDBOX_ENV=" + value, "BERM_SANDBOX_COMMAND=" + value}})
		if err != nil {
			return
		}
		if errs := c.validate(); len(errs) > 0 {
			t.Errorf("accepted, and invalid: %v", errs)
		}
		if c.Security.Tokens != "" || c.Otel.Headers != "" {
			t.Error("a secret came out of the file")
		}
		if err := c.Print(new(strings.Builder)); err != nil {
			t.Errorf("accepted, and can't be printed: %v", err)
		}
	})
}
