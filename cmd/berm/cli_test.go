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
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const testToken = "a-token-for-tests-only"

// startAPI serves the API on an engine in memory, and gives its URL. What goes over
// the wire is held against the OpenAPI document.
func startAPI(t *testing.T) string {
	t.Helper()
	s := openapitest.Serve(runtimetest.NewFake(runtimetest.FakeOptions{Files: t.TempDir()}), t.TempDir(), "", testToken)
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

func TestSandboxCommands(t *testing.T) {
	t.Setenv("BERM_URL", startAPI(t))
	t.Setenv("BERM_TOKEN", testToken)
	t.Setenv("FROM_HERE", "taken")
	// One after the other: each finds what those before it left.
	for _, s := range []check.Step{
		{Args: "sandbox ls", Stdout: []string{"KEY", "STATUS"}},
		{Args: "sandbox ls -o json", Stdout: []string{"[]"}},
		{Args: "sandbox create mine --memory-mb 256 --cpus 0.5 --pids-limit 64 --ttl 30m --idle-ttl 10m --metadata a=b --env X=1 --agent-id agent",
			Stdout: []string{"result:", "created", "metadata:", "a=b", `"memory_mb": 256`, `"cpus": 0.5`, `"pids_limit": 64`, `"ttl": "30m0s"`, `"X"`}},
		{Args: "sandbox create mine --memory-mb 256 --cpus 0.5 --pids-limit 64 --agent-id agent", Stdout: []string{"reused"}},
		{Args: "sandbox create mine --memory-mb 512 --agent-id agent", Code: 1, Stderr: []string{"berm: ", "memory_mb is 256, asked for 512"}},
		{Args: "sandbox create other --host-path /etc", Code: 1, Stderr: []string{"rule mounts.", "allowed: "}},
		{Args: "sandbox create other --mount /etc", Code: 2, Stderr: []string{"want HOST:SANDBOX"}},
		{Args: "sandbox create other --env NOT_THERE_AT_ALL", Code: 2, Stderr: []string{"no such variable"}},
		{Args: "sandbox create other --network off --host-path-mode none --read-only-rootfs=false --image " + runtimetest.DefaultImage, Stdout: []string{`"read_only_rootfs": false`}},
		{Args: "sandbox ls", Stdout: []string{"mine", "other", "running"}},
		{Args: "sandbox ls --metadata a=b -o json", Stdout: []string{`"key": "mine"`}},
		{Args: "sandbox show mine", Stdout: []string{"key:", "mine", "idles out:", "deadline:", "spec: {"}},
		{Args: "sandbox show mine -o json", Stdout: []string{`"session_id"`}},
		{Args: "sandbox show nosuch", Code: 1, Stderr: []string{`there is no sandbox "nosuch"`}},
		{Args: "sandbox renew mine --ttl 2h", Stdout: []string{"expires:"}},

		{Args: "sandbox exec mine --env A=1 --env FROM_HERE -- env", Stdout: []string{"A=1", "FROM_HERE=taken"}},
		{Args: "sandbox exec mine --cwd /tmp -- pwd", Stdout: []string{"/tmp"}},
		{Args: "sandbox exec mine -o json --output-limit 3 -- echo hello", Stdout: []string{`"stdout_truncated": true`}, Stderr: []string{"was cut"}},
		{Args: "sandbox exec mine -o json -- exit 7", Code: 7, Stdout: []string{`"exit_code": 7`}},
		{Args: "sandbox exec nosuch -- true", Code: 125, Stderr: []string{"nosuch"}},
		{Args: "sandbox exec nosuch -o json -- true", Code: 125, Stderr: []string{"nosuch"}},
		{Args: "sandbox exec mine -o xml -- true", Code: 2, Stderr: []string{"table or json"}},
		{Args: "sandbox exec mine", Code: 2, Stderr: []string{"requires at least 2"}},

		{Args: "sandbox rm mine nosuch", Stdout: []string{"mine: deleted", "nosuch: not found"}},
		{Args: "sandbox rm other -o json", Stdout: []string{`"result": "deleted"`}},
		{Args: "sandbox rm ../status", Code: 1, Stderr: []string{"berm: ../status"}},
		{Args: "sandbox ls -o json", Stdout: []string{"[]"}},
		{Args: "sandbox ls -o xml", Code: 2, Stderr: []string{"--output is"}},
		{Args: "sandbox ls --url ftp://x", Code: 1, Stderr: []string{"base URL"}},
		{Args: "sandbox ls --url http://127.0.0.1:1", Code: 1, Stderr: []string{"connection refused"}},
		{Args: "sandbox ls --token-file /nonexistent", Code: 1, Stderr: []string{"read the token"}},
		{Args: "sandbox", Code: 2, Stderr: []string{"say what to do"}},
		{Args: "sandbox nosuch", Code: 2, Stderr: []string{"unknown command"}},
	} {
		s.Run(t, berm)
	}
}

func TestTokenFile(t *testing.T) {
	t.Setenv("BERM_URL", startAPI(t))
	file := filepath.Join(t.TempDir(), "token")
	write(t, file, testToken+"\n")
	check.Step{Args: "sandbox ls --token-file " + file, Stdout: []string{"KEY"}}.Run(t, berm)
	t.Setenv("BERM_TOKEN", "wrong-token-of-some-length")
	check.Step{Args: "sandbox ls --token-file " + file, Stdout: []string{"KEY"}}.Run(t, berm)
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
	for _, s := range []check.Step{
		{Args: "version", Stdout: []string{"berm devel", "go1."}},
		{Args: "version x", Code: 2, Stderr: []string{"unknown command"}},
		{Args: "nosuch", Code: 2, Stderr: []string{`unknown command "nosuch"`}},
		{Args: "serve --nosuch", Code: 2, Stderr: []string{"unknown flag"}},
		{Args: "completion bash", Stdout: []string{"__start_berm"}},
		{Args: "config", Code: 2, Stderr: []string{"say what to do"}},

		{Args: "config print", Stdout: []string{"listen: 127.0.0.1:7070 # default"}},
		{Args: "config print --config " + good + " --listen 127.0.0.1:1", Stdout: []string{"listen: 127.0.0.1:1 # flag", "state_dir: " + dir + " # file"}},
		{Args: "config print --config " + bad, Code: 1, Stderr: []string{"line 1: htp: is not a known key", "logging.level: want"}},
		{Args: "config print --state-dir relative", Stdout: []string{"cmd/berm/relative # flag"}},
		{Args: "config check --config " + good, Stdout: []string{"the configuration is valid"}},
		{Args: "config check --config " + dir + "/none.yaml", Code: 1, Stderr: []string{"no such file"}},
		{Args: "config check --policy " + badPolicy + " --token-file " + badTokens + " --engine-address ftp://x", Code: 1,
			Stderr: []string{"nothing", "shorter than 16", "only unix:// and tcp:// can be used"}},
		{Args: "config check --listen 0.0.0.0:1", Code: 1, Stderr: []string{"without a token, only a loopback address"}},

		{Args: "policy explain -f -", Stdin: `{}`, Stdout: []string{"allowed\n", `"profile": "default"`, `"memory_mb": 512`}},
		{Args: "policy explain -f -", Stdin: `{"host_path":"/etc"}`, Code: 1, Stdout: []string{"denied\n", "rule:    mounts.always_refused", "field:   host_path", "allowed: "}},
		{Args: "policy explain -f - --json", Stdin: `{"host_path":"/etc"}`, Code: 1, Stdout: []string{`"allowed": false`, `"rule": "mounts.always_refused"`}},
		{Args: "policy explain -f - --json", Stdin: `{"env":{"PASSWORD":"hush"}}`, Stdout: []string{`"allowed": true`}},
		{Args: "policy explain -f - --policy " + locked, Stdin: `{"network":"on"}`, Stdout: []string{"network: asked for on, gets off"}},
		{Args: "policy explain -f - --policy " + injects, Stdin: `{}`, Stdout: []string{"allowed"}},
		{Args: "config check --policy " + injects, Code: 1, Stderr: []string{"nosecret"}},
		{Args: "policy explain -f - --policy " + badPolicy, Code: 2, Stdin: `{}`, Stderr: []string{"nothing"}},
		{Args: "policy explain -f - --config " + bad, Code: 2, Stdin: `{}`, Stderr: []string{"is not a known key"}},
		{Args: "policy explain -f -", Code: 2, Stdin: `{"memory_mbb":1}`, Stderr: []string{"memory_mbb"}},
		{Args: "policy explain -f -", Code: 2, Stdin: `{"x": "` + strings.Repeat("x", proxy.MaxBody) + `"}`, Stderr: []string{"larger than"}},
		{Args: "policy explain -f " + dir + "/none.json", Code: 2, Stderr: []string{"no such file"}},
		{Args: "policy explain", Code: 2, Stderr: []string{`required flag(s) "file" not set`}},

		{Args: "serve --listen 0.0.0.0:0 --state-dir " + dir + "/state", Code: 1, Stderr: []string{"without a token, only a loopback address"}},
		{Args: "serve --listen 127.0.0.1:0 --state-dir " + dir + "/state --engine containerd --engine-address tcp://127.0.0.1:1", Code: 1, Stderr: []string{"want the path of containerd's socket"}},
		{Args: "serve --listen 127.0.0.1:0 --state-dir " + dir + "/state --policy " + badPolicy, Code: 1, Stderr: []string{"nothing"}},
		{Args: "serve --listen 127.0.0.1:0 --state-dir " + dir + "/state --token-file " + badTokens, Code: 1, Stderr: []string{"shorter than 16"}},
		{Args: "serve --config " + bad, Code: 1, Stderr: []string{"is not a known key"}},
	} {
		s.Run(t, berm)
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
