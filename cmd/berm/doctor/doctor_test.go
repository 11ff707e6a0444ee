package doctor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// gradesOf are what findings came to, by ID; of several the worst.
func gradesOf(findings []finding) map[string]grade {
	out := map[string]grade{}
	for _, f := range findings {
		if was := out[f.ID]; was == "" || was == gradeOK || f.Grade == gradeBad {
			out[f.ID] = f.Grade
		}
	}
	return out
}

// wantFinding checks one of the findings, and that it says what to do unless it is ok.
func wantFinding(t *testing.T, findings []finding, id string, g grade, found string) {
	t.Helper()
	i := slices.IndexFunc(findings, func(f finding) bool { return f.ID == id && strings.Contains(f.Found, found) })
	if i < 0 {
		t.Errorf("no %s that says %q: %+v", id, found, findings)
		return
	}
	f := findings[i]
	if f.Grade != g || (g == gradeOK) != (f.Means == "") || (g == gradeOK) != (f.Fix == "") {
		t.Errorf("%s is %+v, want %s", id, f, g)
	}
}

func TestDoctorText(t *testing.T) {
	t.Parallel()
	r := newReport(slices.Concat(
		judge("host.berm", okay(true, "berm v1")),
		judge("engine.reachable", okay(false, "not this"), bad(true, "no docker listens at unix:///a.sock", "no sandbox can be made", "start it"), okay(true, "nor this")),
		judge("engine.place", bad(false, "none holds", "x", "x")),
		judge("engine.socket_holders", soft(true, "a running container has it:\x1b[2J ci", "it is root", "take it away")),
		judge("engine.self", okay(true, "last"))))
	if r.Grade != gradeBad {
		t.Errorf("the grade is %s", r.Grade)
	}
	want := `Host
  ok    berm            berm v1

Engine
  bad   reachable       no docker listens at unix:///a.sock
                        no sandbox can be made; fix: start it
  soft  socket holders  a running container has it:?[2J ci
                        it is root; fix: take it away
  ok    self            last

2 ok, 1 soft, 1 bad: berm serve doesn't work here as it should: mend what is bad first
`
	if got := r.text(0, false); got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
	if got := r.text(0, true); !strings.Contains(got, "\x1b[31mbad\x1b[0m   reachable") || strings.Contains(got, "\x1b[2J") {
		t.Errorf("in colour: %q", got)
	}
	for line := range strings.Lines(r.text(60, false)) {
		if len(line) > 61 {
			t.Errorf("too long: %q", line)
		}
	}
	if !strings.Contains(r.text(60, false), "no sandbox can be made; fix: start\n                        it\n") {
		t.Errorf("folded:\n%s", r.text(60, false))
	}
	if got := newReport(append(judge("a.b", soft(true, "", "m", "f")), judge("a.c", okay(true, ""))...)).Grade; got != gradeSoft {
		t.Errorf("with one that is soft: %s", got)
	}
}

// A look that doesn't end isn't waited for, and one that heeds its context says why.
func TestDoctorWithin(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	defer close(release)
	if _, err := serve.Within(t.Context(), time.Millisecond, func(context.Context) (int, error) { <-release; return 1, nil }); !errors.Is(err, serve.ErrStuck) {
		t.Errorf("stuck: %v", err)
	}
	if err := serve.Try(t.Context(), time.Millisecond, func(ctx context.Context) error { <-ctx.Done(); return errors.New("mine") }); err == nil || err.Error() != "mine" {
		t.Errorf("slow: %v", err)
	}
	if n, err := serve.Within(t.Context(), time.Minute, func(context.Context) (int, error) { return 1, nil }); n != 1 || err != nil {
		t.Errorf("quick: %d, %v", n, err)
	}
}

// runDoctor runs berm doctor with a state directory that isn't there, and gives what it
// found. Nothing may have been made.
func runDoctor(t *testing.T, code int, args ...string) report {
	t.Helper()
	dir := t.TempDir()
	args = append([]string{"doctor", "-o", "json", "--state-dir", filepath.Join(dir, "a", "state"), "--listen", "unix://" + filepath.Join(dir, "berm.sock")}, args...)
	stdout, stderr, got := berm(t, "", args...)
	if got != code || stderr != "" {
		t.Errorf("berm %v: exit code %d, want %d: %s", args, got, code, stderr)
	}
	var r report
	if err := json.Unmarshal([]byte(stdout), &r); err != nil {
		t.Fatalf("%v: %s", err, stdout)
	}
	wantEmptyDir(t, dir)
	for _, f := range r.Findings {
		if (f.Grade == gradeOK) != (f.Means == "") || (f.Grade == gradeOK) != (f.Fix == "") || f.Found == "" {
			t.Errorf("%+v", f)
		}
		if group, _ := f.name(); groups[group] == "" {
			t.Errorf("%s belongs to no group", f.ID)
		}
	}
	return r
}

func TestDoctorWithoutEngine(t *testing.T) {
	t.Parallel()
	socket := filepath.Join(t.TempDir(), "engine.sock")
	r := runDoctor(t, 1, "--engine-address", "unix://"+socket)
	wantFinding(t, r.Findings, "engine.reachable", gradeBad, "there is no docker at unix://"+socket)
	wantFinding(t, r.Findings, "policy.file", gradeOK, "network_basic")
	if _, asked := gradesOf(r.Findings)["policy.images"]; asked {
		t.Error("the engine is said to have been asked for images")
	}
	r = runDoctor(t, 1, "--engine-address", "unix://"+socket, "--enter-engine")
	wantFinding(t, r.Findings, "engine.enter", gradeBad, "find the engine's process")
	stdout, _, code := berm(t, "", "doctor", "--engine-address", "unix://"+socket, "--state-dir", filepath.Join(t.TempDir(), "state"), "--listen", "127.0.0.1:0")
	if code != 1 || !strings.Contains(stdout, "bad   reachable") || strings.Contains(stdout, "\x1b") {
		t.Errorf("exit code %d:\n%s", code, stdout)
	}

	// Somebody is there, and says nothing.
	l := check.Value(net.Listen("unix", socket))(t)
	defer func() { _ = l.Close() }()
	must(t, os.Chmod(socket, 0o666))
	r = runDoctor(t, 1, "--engine-address", "unix://"+socket, "--timeout", "200ms")
	wantFinding(t, r.Findings, "engine.reachable", gradeBad, "docker at unix://"+socket+" is there, but doesn't answer in time")
	r = runDoctor(t, 1, "--engine", "containerd", "--engine-address", socket, "--timeout", "200ms")
	wantFinding(t, r.Findings, "engine.reachable", gradeBad, "containerd at "+socket+" is there, but doesn't answer in time")
}

// What is before the engine's host may be a secret, and is nobody's to see.
func TestDoctorHidesUser(t *testing.T) {
	t.Parallel()
	for _, args := range []string{
		"--engine-address tcp://me:hush@127.0.0.1:1", "--engine-address tcp://hush@127.0.0.1:1", "--engine-address tcp://me:hush/hush@127.0.0.1:1",
		"--engine-address http://me:hush@127.0.0.1:1", "--engine-address ssh://me:hush@127.0.0.1:1", "--engine containerd --engine-address tcp://me:hush@127.0.0.1:1",
	} {
		r := runDoctor(t, 1, strings.Fields(args)...)
		if said := fmt.Sprint(r.Findings); strings.Contains(said, "hush") {
			t.Errorf("%s: %s", args, said)
		}
		if !strings.Contains(args, "containerd") { // which takes none
			wantFinding(t, r.Findings, "engine.address", gradeBad, "a user or a password")
		}
	}
	const plain = "unix:///run/a@b.sock, tcp://127.0.0.1:1 and busybox@sha256:1"
	if got := runtime.WithoutUser(plain); got != plain {
		t.Errorf("without a user: %s", got)
	}
}

func TestDoctorUsage(t *testing.T) {
	t.Parallel()
	for _, args := range []string{"doctor -o yaml", "doctor --timeout 0s", "doctor extra"} {
		if _, _, code := berm(t, "", strings.Fields(args)...); code != config.ExitUsage {
			t.Errorf("berm %s: exit code %d", args, code)
		}
	}
	file := filepath.Join(t.TempDir(), "berm.yaml")
	write(t, file, "htp: {}\nstate_dir: relative\n")
	r := runDoctor(t, 1, "--config", file)
	wantFinding(t, r.Findings, "config.file", gradeBad, "htp")
	if gradesOf(r.Findings)["host.system"] != gradeOK {
		t.Errorf("without a configuration: %+v", r.Findings)
	}
}

// What berm serve refuses, the doctor calls bad, and says so at the right place.
func TestDoctorAgreesWithServe(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	// An engine that hangs up on everybody: it is known to be in the same place as the server.
	l := check.Value(net.Listen("unix", filepath.Join(dir, "engine.sock")))(t)
	defer func() { _ = l.Close() }()
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.Close()
		}
	}()
	file := func(name, content string) string {
		write(t, filepath.Join(dir, name), content)
		return filepath.Join(dir, name)
	}
	cut := filepath.Dir(madeStore(t))
	must(t, os.Truncate(filepath.Join(cut, serve.StateStore), 4096))
	lost := t.TempDir()
	write(t, filepath.Join(lost, serve.StateInstance), "nobody")
	refused := file("policy.yaml", "version: 1\nprofiles: {default: {cpus: -1}}\n")
	for name, tt := range map[string]struct {
		config, id string
		args       []string
	}{
		"policy":      {"", "policy.file", []string{"--policy", refused}},
		"tokens":      {"", "doors.tokens", []string{"--token-file", file("tokens", "short\n")}},
		"exposure":    {"", "doors.tokens", []string{"--listen", "0.0.0.0:0"}},
		"signing key": {"security: {signing_key_file: " + file("key", "short") + "}\n", "doors.signing_key", nil},
		"no profile":  {"engine_api: {listeners: [{address: 'unix:///" + dir + "/e.sock', callers: [{name: a, tenant: a, profile: other}]}]}\n", "policy.file", nil},
		"its TLS":     {"engine_api: {listeners: [{address: 'tcp://127.0.0.1:0', tls_cert_file: " + refused + ", tls_key_file: " + refused + ", callers: [{name: a, tenant: a}]}]}\n", "doors.engine_api", nil},
		"audit log":   {"engine_api: {audit_log: /nonexistent/log, listeners: [{address: 'unix:///" + dir + "/e.sock', callers: [{name: a, tenant: a}]}]}\n", "doors.audit_log", nil},
		"headers":     {"otel: {endpoint: 'http://127.0.0.1:1', headers_file: " + refused + "}\n", "doors.telemetry", nil},
		"credentials": {"engine: {registry_auth_file: " + refused + "}\n", "engine.reachable", nil},
		"network":     {"sandbox: {network: auto}\n", "engine.network", nil},
		"chats root":  {"sandbox: {chats_root: /nonexistent}\n", "storage.chats_root", nil},
		"instance":    {"", "storage.instance", []string{"--state-dir", lost}},
		"database":    {"", "storage.database", []string{"--state-dir", cut}},
		"quotas":      {"sandbox: {chats_root: /proc}\nstorage: {project_quotas: required}\n", "storage.quotas", nil},
	} {
		args := append([]string{"--engine-address", "unix://" + filepath.Join(dir, "engine.sock"), "--config", file("config of "+name+".yaml", tt.config)}, tt.args...)
		r := runDoctor(t, 1, args...)
		if name == "quotas" { // no file can be made in /proc either
			r.Findings = slices.DeleteFunc(r.Findings, func(f finding) bool { return f.ID == "storage.chats_root" })
		}
		if got := gradesOf(r.Findings); got[tt.id] != gradeBad {
			t.Errorf("%s: %s is %q: %+v", name, tt.id, got[tt.id], r.Findings)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // one that is not refused ends then, without an error
		var log strings.Builder
		code := run(ctx, append([]string{"serve", "--state-dir", t.TempDir(), "--listen", "127.0.0.1:0"}, args...), strings.NewReader(""), io.Discard, &log)
		cancel()
		if code != 1 {
			t.Errorf("%s: berm serve ends with %d: %s", name, code, &log)
		}
	}
}
