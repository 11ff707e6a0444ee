package main

import (
	"bytes"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/sandboxapi/openapitest"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const testToken = "a-token-for-tests-only"

// startAPI serves the API on an engine in memory, and gives its URL. What goes over
// the wire is held against the OpenAPI document.
func startAPI(t *testing.T) string {
	t.Helper()
	return startAPIOn(t, runtimetest.NewFake(runtimetest.FakeOptions{Files: t.TempDir()}))
}

func startAPIOn(t *testing.T, rt runtime.AgentRuntime) string {
	t.Helper()
	s := openapitest.Serve(rt, t.TempDir(), "", testToken)
	t.Cleanup(s.End)
	target := check.Value(url.Parse(s.URL))(t)
	checked := httputil.NewSingleHostReverseProxy(target)
	checked.Transport = openapitest.New(t).Transport(nil)
	front := httptest.NewServer(checked)
	t.Cleanup(front.Close)
	return front.URL
}

// berm runs the program in this process.
func berm(t *testing.T, stdin string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	code = run(t.Context(), args, strings.NewReader(stdin), &out, &errs)
	return out.String(), errs.String(), code
}

// step is a command and what it should come to.
type step struct {
	args   string // split at blanks, but for a last part in single quotes
	stdin  string
	code   int
	stdout []string // each in the output
	stderr []string // each in the errors; none means that nothing is said
}

func (s step) run(t *testing.T) {
	t.Helper()
	line, quoted, ok := strings.Cut(s.args, " '")
	args := strings.Fields(line)
	if ok {
		args = append(args, strings.TrimSuffix(quoted, "'"))
	}
	stdout, stderr, code := berm(t, s.stdin, args...)
	if code != s.code {
		t.Errorf("berm %s: exit code %d, want %d", s.args, code, s.code)
	}
	for _, want := range s.stdout {
		if !strings.Contains(stdout, want) {
			t.Errorf("berm %s: the output lacks %q:\n%s", s.args, want, stdout)
		}
	}
	for _, want := range s.stderr {
		if !strings.Contains(stderr, want) {
			t.Errorf("berm %s: the errors lack %q:\n%s", s.args, want, stderr)
		}
	}
	if len(s.stderr) == 0 && stderr != "" {
		t.Errorf("berm %s: unexpected errors:\n%s", s.args, stderr)
	}
}

func TestSandboxCommands(t *testing.T) {
	t.Setenv("BERM_URL", startAPI(t))
	t.Setenv("BERM_TOKEN", testToken)
	t.Setenv("FROM_HERE", "taken")
	// One after the other: each finds what those before it left.
	for _, s := range []step{
		{args: "sandbox ls", stdout: []string{"KEY", "STATUS"}},
		{args: "sandbox ls -o json", stdout: []string{"[]"}},
		{args: "sandbox create mine --memory-mb 256 --cpus 0.5 --pids-limit 64 --ttl 30m --idle-ttl 10m --metadata a=b --env X=1 --agent-id agent",
			stdout: []string{"result:", "created", "metadata:", "a=b", `"memory_mb": 256`, `"cpus": 0.5`, `"pids_limit": 64`, `"ttl": "30m0s"`, `"X"`}},
		{args: "sandbox create mine --memory-mb 256 --cpus 0.5 --pids-limit 64 --agent-id agent", stdout: []string{"reused"}},
		{args: "sandbox create mine --memory-mb 512 --agent-id agent", code: 1, stderr: []string{"berm: ", "memory_mb is 256, asked for 512"}},
		{args: "sandbox create other --host-path /etc", code: 1, stderr: []string{"rule mounts.", "allowed: "}},
		{args: "sandbox create other --mount /etc", code: 2, stderr: []string{"want HOST:SANDBOX"}},
		{args: "sandbox create other --env NOT_THERE_AT_ALL", code: 2, stderr: []string{"no such variable"}},
		{args: "sandbox create other --network off --host-path-mode none --read-only-rootfs=false --image " + runtimetest.DefaultImage, stdout: []string{`"read_only_rootfs": false`}},
		{args: "sandbox ls", stdout: []string{"mine", "other", "running"}},
		{args: "sandbox ls --metadata a=b -o json", stdout: []string{`"key": "mine"`}},
		{args: "sandbox show mine", stdout: []string{"key:", "mine", "idles out:", "deadline:", "spec: {"}},
		{args: "sandbox show mine -o json", stdout: []string{`"session_id"`}},
		{args: "sandbox show nosuch", code: 1, stderr: []string{`there is no sandbox "nosuch"`}},
		{args: "sandbox renew mine --ttl 2h", stdout: []string{"expires:"}},

		{args: "sandbox exec mine --env A=1 --env FROM_HERE -- env", stdout: []string{"A=1", "FROM_HERE=taken"}},
		{args: "sandbox exec mine --cwd /tmp -- pwd", stdout: []string{"/tmp"}},
		{args: "sandbox exec mine -o json --output-limit 3 -- echo hello", stdout: []string{`"stdout_truncated": true`}, stderr: []string{"was cut"}},
		{args: "sandbox exec mine -o json -- exit 7", code: 7, stdout: []string{`"exit_code": 7`}},
		{args: "sandbox exec nosuch -- true", code: 125, stderr: []string{"nosuch"}},
		{args: "sandbox exec mine -o xml -- true", code: 2, stderr: []string{"table or json"}},
		{args: "sandbox exec mine", code: 2, stderr: []string{"requires at least 2"}},

		{args: "sandbox rm mine nosuch", stdout: []string{"mine: deleted", "nosuch: not found"}},
		{args: "sandbox rm other -o json", stdout: []string{`"result": "deleted"`}},
		{args: "sandbox rm ../status", code: 1, stderr: []string{"berm: ../status"}},
		{args: "sandbox ls -o json", stdout: []string{"[]"}},
		{args: "sandbox ls -o xml", code: 2, stderr: []string{"--output is"}},
		{args: "sandbox ls --url ftp://x", code: 1, stderr: []string{"base URL"}},
		{args: "sandbox ls --url http://127.0.0.1:1", code: 1, stderr: []string{"connection refused"}},
		{args: "sandbox ls --token-file /nonexistent", code: 1, stderr: []string{"read the token"}},
		{args: "sandbox", code: 2, stderr: []string{"say what to do"}},
		{args: "sandbox nosuch", code: 2, stderr: []string{"unknown command"}},
	} {
		s.run(t)
	}
}

func TestTokenFile(t *testing.T) {
	t.Setenv("BERM_URL", startAPI(t))
	file := filepath.Join(t.TempDir(), "token")
	write(t, file, testToken+"\n")
	step{args: "sandbox ls --token-file " + file, stdout: []string{"KEY"}}.run(t)
	t.Setenv("BERM_TOKEN", "wrong-token-of-some-length")
	step{args: "sandbox ls --token-file " + file, stdout: []string{"KEY"}}.run(t)
	_, stderr, code := berm(t, "", "sandbox", "ls")
	if code != 1 || !strings.Contains(stderr, "the token is not known") || strings.Contains(stderr, "wrong-token") {
		t.Errorf("exit code %d, errors %q", code, stderr)
	}
}

func TestLocalCommands(t *testing.T) {
	dir := t.TempDir()
	good, bad := filepath.Join(dir, "good.yaml"), filepath.Join(dir, "bad.yaml")
	write(t, good, "http: {listen: '127.0.0.1:0'}\nstate_dir: "+dir+"\n")
	write(t, bad, "htp: {}\nlogging: {level: loud}\n")
	badPolicy := filepath.Join(dir, "policy.yaml")
	write(t, badPolicy, broken+"mounts: {allowed_roots: ["+dir+"], default_workspace: "+dir+"/unmade}\n")
	locked := filepath.Join(dir, "locked.yaml")
	write(t, locked, "version: 1\nprofiles: {default: {locked: [network]}}\n")
	injects := filepath.Join(dir, "injects.yaml")
	write(t, injects, "version: 1\nenv: {inject: {KEY: {file: "+dir+"/nosecret}}}\n")
	badTokens := filepath.Join(dir, "tokens.yaml")
	write(t, badTokens, "short")
	for _, s := range []step{
		{args: "version", stdout: []string{"berm devel", "go1."}},
		{args: "version x", code: 2, stderr: []string{"unknown command"}},
		{args: "nosuch", code: 2, stderr: []string{`unknown command "nosuch"`}},
		{args: "serve --nosuch", code: 2, stderr: []string{"unknown flag"}},
		{args: "completion bash", stdout: []string{"__start_berm"}},
		{args: "config", code: 2, stderr: []string{"say what to do"}},

		{args: "config print", stdout: []string{"listen: 127.0.0.1:7070 # default"}},
		{args: "config print --config " + good + " --listen 127.0.0.1:1", stdout: []string{"listen: 127.0.0.1:1 # flag", "state_dir: " + dir + " # file"}},
		{args: "config print --config " + bad, code: 1, stderr: []string{"line 1: htp: is not a known key", "logging.level: want"}},
		{args: "config print --state-dir relative", stdout: []string{"cmd/berm/relative # flag"}},
		{args: "config check --config " + good, stdout: []string{"the configuration is valid"}},
		{args: "config check --config " + dir + "/none.yaml", code: 1, stderr: []string{"no such file"}},
		{args: "config check --policy " + badPolicy + " --token-file " + badTokens + " --engine-address ftp://x", code: 1,
			stderr: []string{"nothing", "shorter than 16", "only unix:// and tcp:// can be used"}},
		{args: "config check --listen 0.0.0.0:1", code: 1, stderr: []string{"without a token, only a loopback address"}},

		{args: "policy explain -f -", stdin: `{}`, stdout: []string{"allowed\n", `"profile": "default"`, `"memory_mb": 512`}},
		{args: "policy explain -f -", stdin: `{"host_path":"/etc"}`, code: 1, stdout: []string{"denied\n", "rule:    mounts.always_refused", "field:   host_path", "allowed: "}},
		{args: "policy explain -f - --json", stdin: `{"host_path":"/etc"}`, code: 1, stdout: []string{`"allowed": false`, `"rule": "mounts.always_refused"`}},
		{args: "policy explain -f - --json", stdin: `{"env":{"PASSWORD":"hush"}}`, stdout: []string{`"allowed": true`}},
		{args: "policy explain -f - --policy " + locked, stdin: `{"network":"on"}`, stdout: []string{"network: asked for on, gets off"}},
		{args: "policy explain -f - --policy " + injects, stdin: `{}`, stdout: []string{"allowed"}},
		{args: "config check --policy " + injects, code: 1, stderr: []string{"nosecret"}},
		{args: "policy explain -f - --policy " + badPolicy, code: 2, stdin: `{}`, stderr: []string{"nothing"}},
		{args: "policy explain -f - --config " + bad, code: 2, stdin: `{}`, stderr: []string{"is not a known key"}},
		{args: "policy explain -f -", code: 2, stdin: `{"memory_mbb":1}`, stderr: []string{"memory_mbb"}},
		{args: "policy explain -f -", code: 2, stdin: `{"x": "` + strings.Repeat("x", proxy.MaxBody) + `"}`, stderr: []string{"larger than"}},
		{args: "policy explain -f " + dir + "/none.json", code: 2, stderr: []string{"no such file"}},
		{args: "policy explain", code: 2, stderr: []string{`required flag(s) "file" not set`}},

		{args: "serve --listen 0.0.0.0:0 --state-dir " + dir + "/state", code: 1, stderr: []string{"without a token, only a loopback address"}},
		{args: "serve --listen 127.0.0.1:0 --state-dir " + dir + "/state --engine containerd --engine-address tcp://127.0.0.1:1", code: 1, stderr: []string{"want the path of containerd's socket"}},
		{args: "serve --listen 127.0.0.1:0 --state-dir " + dir + "/state --policy " + badPolicy, code: 1, stderr: []string{"nothing"}},
		{args: "serve --listen 127.0.0.1:0 --state-dir " + dir + "/state --token-file " + badTokens, code: 1, stderr: []string{"shorter than 16"}},
		{args: "serve --config " + bad, code: 1, stderr: []string{"is not a known key"}},
	} {
		s.run(t)
	}
	for _, name := range []string{"state/address", "unmade"} {
		if _, err := os.Stat(filepath.Join(dir, name)); !os.IsNotExist(err) {
			t.Errorf("servers that didn't start made %s: %v", name, err)
		}
	}
}

func TestExplainHidesEnv(t *testing.T) {
	for _, mode := range []string{"--json=false", "--json=true"} {
		stdout, stderr, _ := berm(t, `{"env":{"PASSWORD":"hush"}}`, "policy", "explain", "-f", "-", mode)
		if strings.Contains(stdout+stderr, "hush") {
			t.Errorf("%s shows the value of a variable:\n%s%s", mode, stdout, stderr)
		}
	}
}

// Each command that does something has an example.
func TestHelpIsWhole(t *testing.T) {
	whole := 0
	var look func(cmd *cobra.Command)
	look = func(cmd *cobra.Command) {
		for _, child := range cmd.Commands() {
			look(child)
		}
		if !cmd.HasSubCommands() {
			args := append(strings.Fields(cmd.CommandPath())[1:], "--help")
			if stdout, _, code := berm(t, "", args...); code != 0 || !strings.Contains(stdout, "Examples:") {
				t.Errorf("berm %v: exit code %d:\n%s", args, code, stdout)
			}
			whole++
		}
	}
	look(newRootCommand())
	if whole < 50 {
		t.Errorf("%d commands were looked at", whole)
	}
}
