package e2e

import (
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

// How commands find their sandbox, and go together in it.
var boxSessions = []boxCase{
	{"get or create", sessionMade},
	{"conflict", sessionConflict},
	{"recreated", sessionRecreated},
	{"idle time", sessionIdle},
	{"idle end", sessionIdleEnd},
	{"no backend", sessionNoBackend},
}

func sessionMade(r *boxRow) {
	_, err := r.c.Exec(r.ctx, r.key, apitype.ExecRequest{Command: apitype.Command{"true"}})
	r.wantError(err, http.StatusNotFound, "not_found") // unless it says what is to be made
	req := apitype.ExecRequest{Command: shell("echo in"), Sandbox: &apitype.SandboxRequest{MemoryMB: new(int64(64))}}
	var sessions []string
	for _, made := range []bool{true, false} {
		res := r.exec(req)
		if res.Created != made || res.Recreated || res.Stdout != "in\n" || r.limits().memoryMB != 64 {
			r.Errorf("%+v", res)
		}
		sessions = append(sessions, res.SessionID)
	}
	if sessions[0] != sessions[1] || r.get().SessionID != sessions[0] {
		r.Errorf("sessions %v", sessions)
	}
	x := r.on(r.main, "process")
	p, err := x.c.StartProcess(r.ctx, x.key, apitype.ProcessRequest{Command: "cat", Sandbox: &apitype.SandboxRequest{}})
	if err != nil || p.SessionID != x.get().SessionID {
		r.Errorf("a process: %+v, %v", p, err)
	}
}

// sessionConflict asks for a sandbox with another value in each of the fields.
func sessionConflict(r *boxRow) {
	a, b := r.makeDir(r, "roots", "root", r.key, "a"), r.makeDir(r, "roots", "root", r.key, "b")
	made := r.create(apitype.SandboxRequest{HostPath: &a})
	all := apitype.SandboxRequest{HostPath: &b}
	var names []string
	for _, tt := range []struct {
		field              string
		set                func(req *apitype.SandboxRequest)
		current, requested any
	}{
		{"profile", func(req *apitype.SandboxRequest) { req.Profile = new("plain") }, "default", "plain"},
		{"image", func(req *apitype.SandboxRequest) { req.Image = new(otherImage) }, testImage, otherImage},
		{"network", func(req *apitype.SandboxRequest) { req.Network = new("on") }, "off", "on"},
		{"host_path", func(req *apitype.SandboxRequest) { req.HostPath = &b }, a, b},
		{"host_path_mode", func(req *apitype.SandboxRequest) { req.HostPathMode = new("ro") }, "rw", "ro"},
		{"mount_path", func(req *apitype.SandboxRequest) { req.MountPath = new("/other") }, "/workspace", "/other"},
		{"extra_mounts", func(req *apitype.SandboxRequest) {
			req.ExtraMounts = []apitype.MountRequest{{HostPath: b, MountPath: "/b"}}
		}, []any{}, []any{b + ":/b:ro"}},
		{"cpus", func(req *apitype.SandboxRequest) { req.CPUs = new(0.5) }, 1.0, 0.5},
		{"memory_mb", func(req *apitype.SandboxRequest) { req.MemoryMB = new(int64(64)) }, 512.0, 64.0},
		{"pids_limit", func(req *apitype.SandboxRequest) { req.PidsLimit = new(int64(64)) }, 128.0, 64.0},
		{"read_only_rootfs", func(req *apitype.SandboxRequest) { req.ReadOnlyRootfs = new(false) }, true, false},
		{"workspace_quota_mb", func(req *apitype.SandboxRequest) { req.WorkspaceQuotaMB = new(int64(1)) }, 0.0, 1.0},
	} {
		req := apitype.SandboxRequest{HostPath: &a}
		tt.set(&req)
		tt.set(&all)
		names = append(names, tt.field)
		_, err := r.c.Create(r.ctx, r.key, req)
		p := r.wantError(err, http.StatusConflict, "sandbox_conflict")
		if len(p.Differences) != 1 || fmt.Sprint(p.Differences[0]) != fmt.Sprint(apitype.Difference{Field: tt.field, Current: tt.current, Requested: tt.requested}) {
			r.Errorf("%s: %+v", tt.field, p)
		}
		_, err = r.c.Exec(r.ctx, r.key, apitype.ExecRequest{Command: shell("touch /workspace/ran"), Sandbox: &req})
		r.wantError(err, http.StatusConflict, "sandbox_conflict")
	}
	_, err := r.c.Create(r.ctx, r.key, all)
	p := r.wantError(err, http.StatusConflict, "sandbox_conflict")
	var fields []string
	for _, d := range p.Differences {
		fields = append(fields, d.Field)
		if !strings.Contains(p.Detail, d.Field) {
			r.Errorf("%q doesn't name %s", p.Detail, d.Field)
		}
	}
	if !slices.Equal(fields, names) {
		r.Errorf("all at once: %v, want %v", fields, names)
	}
	if exists(a+"/ran") || r.get().SessionID != made.SessionID || r.sh("echo lives") != "lives" {
		r.Error("the conflict wasn't without effect")
	}
}

func sessionRecreated(r *boxRow) {
	dir := r.makeDir(r, "roots", "root", r.key)
	sb := r.create(apitype.SandboxRequest{HostPath: &dir, Env: map[string]string{"KEPT": "yes"}})
	r.sh("touch /workspace/file /tmp/lost")
	if err := syscall.Kill(r.pid(), syscall.SIGKILL); err != nil {
		r.Fatal(err)
	}
	res := r.exec(apitype.ExecRequest{Command: shell("ls /workspace /tmp; echo $KEPT")})
	if !res.Recreated || res.Created || !res.OK || res.Stdout != "/tmp:\n\n/workspace:\nfile\nyes\n" {
		r.Errorf("%+v", res)
	}
	if again := r.exec(apitype.ExecRequest{Command: apitype.Command{"true"}}); again.Recreated || again.SessionID != res.SessionID {
		r.Errorf("%+v", again)
	}
	if now := r.get(); now.ContainerID == sb.ContainerID || now.Spec.HostPath != dir {
		r.Errorf("%+v", now)
	}
}

// Every use moves idle_expires_at.
func sessionIdle(r *boxRow) {
	const idle = time.Hour
	r.create(apitype.SandboxRequest{IdleTTL: new(apitype.Duration(idle)), TTL: new(apitype.Duration(2 * time.Hour))})
	if _, err := r.c.StartExec(r.ctx, r.key, apitype.ExecRequest{Command: apitype.Command{"httpd", "-f", "-p", "8000", "-h", "/tmp"}, Timeout: apitype.SecondsOf(120)}); err != nil {
		r.Fatal(err)
	}
	if _, err := r.c.StartProcess(r.ctx, r.key, apitype.ProcessRequest{Command: "cat"}); err != nil {
		r.Fatal(err)
	}
	for _, use := range []struct {
		name string
		do   func() error
	}{
		{"a command", func() error { r.sh("true"); return nil }},
		{"a file that is written", func() error {
			_, err := r.c.WriteFile(r.ctx, r.key, "/tmp/file.txt", strings.NewReader("x"), client.WriteOptions{})
			return err
		}},
		{"a file that is looked at", func() error { _, err := r.c.StatFile(r.ctx, r.key, "/tmp/file.txt"); return err }},
		{"a process' byte", func() error { return r.echoed() }},
		{"a proxied byte", func() error { return r.proxied() }},
	} {
		until(r, "a little time to pass", func() bool { return time.Since(r.get().LastUsedAt) > 100*time.Millisecond })
		before := time.Now()
		if err := use.do(); err != nil {
			r.Errorf("%s: %v", use.name, err)
		}
		if sb := r.get(); sb.IdleExpiresAt == nil || sb.IdleExpiresAt.Before(before.Add(idle)) || sb.LastUsedAt.Before(before) {
			r.Errorf("%s at %s: %+v", use.name, before, sb)
		}
	}
	before := r.get().LastUsedAt // what was closed a moment ago may count yet
	until(r, "looking at it to be no use", func() bool {
		time.Sleep(100 * time.Millisecond)
		now := r.get().LastUsedAt
		same := now.Equal(before)
		before = now
		return same
	})
}

// echoed sends the process a line, and reads it back.
func (r *boxRow) echoed() error {
	ws := r.attach(r.boxSandbox, "default", client.AttachOptions{Lines: true})
	defer func() { _ = ws.CloseNow() }()
	ws.send("ping")
	if line := ws.line(); line.Line != "ping" {
		return fmt.Errorf("read %+v", line)
	}
	return nil
}

// proxied asks what listens in the sandbox for a file.
func (r *boxRow) proxied() error {
	req, err := http.NewRequestWithContext(r.ctx, http.MethodGet, "http://localhost/file.txt", nil)
	if err != nil {
		return err
	}
	resp, err := r.c.Port(r.key, 8000).Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "x" {
		return fmt.Errorf("%d %q, %w", resp.StatusCode, body, err)
	}
	return nil
}

// A sandbox that nobody uses ends, but not while something runs in it.
func sessionIdleEnd(r *boxRow) {
	const idle = 4 * time.Second
	request := func(idle time.Duration) *apitype.SandboxRequest {
		return &apitype.SandboxRequest{IdleTTL: new(apitype.Duration(idle)), TTL: new(apitype.Duration(time.Hour))}
	}
	command, process, unused := r.on(r.main, "command"), r.on(r.main, "process"), r.on(r.main, "unused")
	dir := r.makeDir(r, "roots", "root", command.key)
	req := request(idle)
	req.HostPath = &dir
	over := make(chan error, 1)
	go func() {
		res, err := command.c.Exec(r.ctx, command.key, apitype.ExecRequest{
			Command: shell("touch on; until test -e off; do sleep 0.1; done"), Timeout: apitype.SecondsOf(110), Sandbox: req,
		})
		if err == nil && !res.OK {
			err = fmt.Errorf("%+v", res)
		}
		over <- err
	}()
	if _, err := process.c.StartProcess(r.ctx, process.key, apitype.ProcessRequest{Command: "cat", Sandbox: request(idle)}); err != nil {
		r.Fatal(err)
	}
	until(r, "the command to run", func() bool { return exists(dir + "/on") })
	since := time.Now()
	unused.create(*request(time.Second))
	gone := func(x boxSandbox) func() bool {
		return func() bool {
			_, err := x.c.Get(x.ctx, x.key)
			return err != nil
		}
	}
	until(r, "the unused one to end", gone(unused))
	unused.wantNone()
	until(r, "more than the idle time", func() bool { return time.Since(since) > idle+time.Second })
	for _, x := range []boxSandbox{command, process} {
		if sb := x.get(); sb.Status != "running" {
			r.Errorf("%+v", sb)
		}
	}
	write(r.T, dir+"/off", "")
	if err := <-over; err != nil {
		r.Error(err)
	}
	if _, err := process.c.StopProcess(r.ctx, process.key, "default"); err != nil {
		r.Error(err)
	}
	until(r, "the others to end after it", func() bool { return gone(command)() && gone(process)() })
}

// A server without its engine answers every call that needs one with backend_unavailable,
// and runs nothing by itself.
func sessionNoBackend(r *boxRow) {
	dir := r.makeDir(r, "away")
	config := filepath.Join(dir, "berm.yaml")
	write(r.T, config, "engine: {kind: "+r.kind+"}\n")
	c := startChild(r.T, dir, "--config", config)
	mark := filepath.Join(dir, "ran")
	command := fmt.Sprintf(`{"command": "touch %s", "sandbox": {}}`, mark)
	process := fmt.Sprintf(`{"command": "touch", "args": [%q], "sandbox": {}}`, mark)
	for _, call := range [][3]string{
		{"PUT", "", "{}"}, {"POST", "/exec", command}, {"POST", "/execs", command}, {"POST", "/processes", process},
		{"POST", "/exec", `{"command": "true"}`}, {"GET", "", ""}, {"DELETE", "", ""}, {"POST", "/renew", "{}"}, {"POST", "/pause", ""}, {"POST", "/resume", ""},
		{"GET", "/execs", ""}, {"GET", "/processes", ""}, {"GET", "/logs", ""}, {"GET", "/stats", ""},
		{"GET", "/files?path=/etc/passwd", ""}, {"PUT", "/files?path=" + mark, "x"}, {"GET", "/ports/80/", ""},
	} {
		status, body := c.call(r.T, call[0], "/api/v1/sandboxes/k"+call[1], call[2])
		if status != http.StatusServiceUnavailable || !strings.Contains(body, `"code":"backend_unavailable"`) {
			r.Errorf("%s %s: %d %s", call[0], call[1], status, body)
		}
	}
	if exists(mark) {
		r.Error("a command ran on the host")
	}
	if status, body := c.get(r.T, "/api/v1/status"); status != http.StatusOK || !strings.Contains(body, `"available":false`) {
		r.Errorf("the status: %d %s", status, body)
	}
}

// call makes a call with a body.
func (c *child) call(t *testing.T, method, path, body string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "http://localhost"+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	if strings.Contains(path, "/files?") {
		req.Header.Set("Content-Type", "application/octet-stream")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	answer, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(answer)
}
