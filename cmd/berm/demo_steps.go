package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy/apitype"
)

// demo plays the scenes. Each shows its calls and answers, and fails when an
// answer isn't what the scene promises.
type demo struct {
	out    io.Writer
	server *demoServer
	scene  int
}

// limitsScript tells what is in force inside, on cgroup v1 and v2 alike.
const limitsScript = `cd /sys/fs/cgroup
echo "memory limit: $(cat memory.max 2>/dev/null || cat memory/memory.limit_in_bytes) bytes"
echo "pids limit: $(cat pids.max 2>/dev/null || cat pids/pids.max)"
routes=0; while read -r line; do routes=$((routes+1)); done < /proc/net/route
echo "network routes: $((routes > 0 ? routes - 1 : 0))"
if (echo > /written) 2>/dev/null; then echo "root file system: writable"; else echo "root file system: read-only"; fi
echo "$(grep Uid: /proc/self/status)"
echo "$(grep CapEff: /proc/self/status) $(grep NoNewPrivs: /proc/self/status) $(grep Seccomp: /proc/self/status)"`

func (d *demo) play(ctx context.Context) error {
	began := time.Now()
	d.printf("A server is up at %s (its token is $TOKEN below), on the %s engine.\n", d.server.url, d.server.opts.engine.Kind)
	for _, scene := range []struct {
		title string
		play  func(context.Context) error
	}{
		{"Ask for a sandbox by a key of your own, and it is made", d.create},
		{"Run a command in it", d.exec},
		{"Ask again, and it is the same one", d.reuse},
		{"Ask for the key with another spec, and nothing is changed behind your back", d.conflict},
		{"Ask for the host's /etc, and the policy says no, why, and what would do", d.refuse},
		{"The limits are really in force inside", d.limits},
		{"A sandbox ends when its time is up", d.expire},
		{"Kill the server with SIGKILL, start it again, and it knows its sandboxes", d.survive},
		{"Remove it", d.remove},
	} {
		d.scene++
		d.printf("\n%d. %s\n", d.scene, scene.title)
		if err := scene.play(ctx); err != nil {
			return fmt.Errorf("scene %d: %w", d.scene, err)
		}
	}
	d.printf("\nAll %d scenes went as promised, in %.1f s. Nothing is left running.\n", d.scene, time.Since(began).Seconds())
	return nil
}

// see tells what to look at, once it was checked.
func (d *demo) see(format string, args ...any) {
	d.printf("   => "+format+"\n", args...)
}

func (d *demo) create(ctx context.Context) error {
	var sb apitype.Sandbox
	if err := d.call(ctx, http.MethodPut, "demo", `{"ttl":"5m","metadata":{"made_by":"berm demo"}}`, http.StatusCreated, &sb,
		"result", "key", "session_id", "status", "expires_at", "metadata"); err != nil {
		return err
	}
	d.see("201: one container runs, hardened by default: no capabilities, no network, read-only root")
	return expect("result", sb.Result, "created")
}

func (d *demo) exec(ctx context.Context) error {
	res, err := d.run(ctx, "demo", `echo "hello from $(hostname)"; exit 3`)
	if err != nil {
		return err
	}
	if res.ExitCode == nil || *res.ExitCode != 3 || !strings.Contains(res.Stdout, "hello from") {
		return fmt.Errorf("the command printed %q, want hello and exit code 3", res.Stdout)
	}
	d.see("200: the command's output, and its own exit code")
	return nil
}

func (d *demo) reuse(ctx context.Context) error {
	var before, after apitype.Sandbox
	if err := d.send(ctx, http.MethodGet, "demo", "", http.StatusOK, &before); err != nil {
		return err
	}
	if err := d.call(ctx, http.MethodPut, "demo", `{"ttl":"5m"}`, http.StatusOK, &after, "result", "key", "session_id"); err != nil {
		return err
	}
	d.see("200, reused: the session is the one of scene 1")
	if err := expect("session_id", after.SessionID, before.SessionID); err != nil {
		return err
	}
	return expect("result", after.Result, "reused")
}

func (d *demo) conflict(ctx context.Context) error {
	var p apitype.Problem
	if err := d.call(ctx, http.MethodPut, "demo", `{"memory_mb":256}`, http.StatusConflict, &p, "code", "differences"); err != nil {
		return err
	}
	if len(p.Differences) != 1 || p.Differences[0].Field != "memory_mb" {
		return fmt.Errorf("the differences are %v, want memory_mb alone", p.Differences)
	}
	d.see("409: every field that differs, with both values")
	return expect("code", p.Code, "sandbox_conflict")
}

func (d *demo) refuse(ctx context.Context) error {
	var p apitype.Problem
	if err := d.call(ctx, http.MethodPut, "curious", `{"host_path":"/etc"}`, http.StatusForbidden, &p, "code", "reasons"); err != nil {
		return err
	}
	if len(p.Reasons) == 0 || p.Reasons[0].Rule == "" || p.Reasons[0].Allowed == "" {
		return fmt.Errorf("the reasons are %v, want a rule and what would be allowed", p.Reasons)
	}
	d.see("403 by the rule %s; nothing was made", p.Reasons[0].Rule)
	return expect("code", p.Code, "policy_denied")
}

func (d *demo) limits(ctx context.Context) error {
	res, err := d.run(ctx, "demo", limitsScript)
	if err != nil {
		return err
	}
	for _, want := range []string{
		"memory limit: 536870912 bytes", "pids limit: 128", "network routes: 0", "root file system: read-only",
		"Uid:\t1000\t", "CapEff:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2",
	} {
		if !strings.Contains(res.Stdout, want) {
			return fmt.Errorf("%q is not in force: %q %q", want, res.Stdout, res.Stderr)
		}
	}
	d.see("512 MB, 128 processes, no way out, nothing to write to, no root, no capabilities, seccomp on: read from the kernel")
	return nil
}

func (d *demo) expire(ctx context.Context) error {
	var sb apitype.Sandbox
	if err := d.call(ctx, http.MethodPut, "brief", `{"ttl":"2s"}`, http.StatusCreated, &sb, "result", "key", "expires_at"); err != nil {
		return err
	}
	rt, err := d.server.openRuntime()
	if err != nil {
		return err
	}
	defer closeRuntime(rt)
	labels := map[string]string{lifecycle.LabelOwner: d.server.instance, lifecycle.LabelKey: "brief"}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for left := -1; left != 0; {
		containers, err := rt.List(ctx, labels)
		if err != nil {
			return fmt.Errorf("ask the engine for the container: %w", err)
		}
		if len(containers) != left {
			left = len(containers)
			d.printf("   the engine has %d container(s) labelled %s=brief\n", left, lifecycle.LabelKey)
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("the container is still there: %w", ctx.Err())
		}
	}
	var p apitype.Problem
	if err := d.call(ctx, http.MethodGet, "brief", "", http.StatusNotFound, &p, "code", "detail"); err != nil {
		return err
	}
	d.see("2 s later the sweep had taken the container; the key is free again")
	return nil
}

func (d *demo) survive(ctx context.Context) error {
	var before, after apitype.Sandbox
	if err := d.send(ctx, http.MethodGet, "demo", "", http.StatusOK, &before); err != nil {
		return err
	}
	d.printf("   $ kill -9 %d\n", d.server.cmd.Process.Pid)
	if err := d.server.kill(); err != nil {
		return err
	}
	began := time.Now()
	if err := d.server.start(ctx); err != nil {
		return err
	}
	d.printf("   $ berm serve   # ready again after %d ms\n", time.Since(began).Milliseconds())
	if err := d.call(ctx, http.MethodGet, "demo", "", http.StatusOK, &after, "key", "session_id", "status", "expires_at", "metadata"); err != nil {
		return err
	}
	if err := expect("session_id", after.SessionID, before.SessionID); err != nil {
		return err
	}
	if !after.ExpiresAt.Equal(before.ExpiresAt) || after.Metadata["made_by"] != "berm demo" {
		return fmt.Errorf("the sandbox came back with expiry %s and metadata %v", after.ExpiresAt, after.Metadata)
	}
	if err := d.call(ctx, http.MethodPut, "demo", "{}", http.StatusOK, &after, "result", "session_id"); err != nil {
		return err
	}
	if err := expect("result", after.Result, "reused"); err != nil {
		return err
	}
	if _, err := d.run(ctx, "demo", "echo still here"); err != nil {
		return err
	}
	d.see("the same session, expiry and metadata as before, and it still works")
	return nil
}

func (d *demo) remove(ctx context.Context) error {
	var res apitype.DeleteResult
	if err := d.call(ctx, http.MethodDelete, "demo", "", http.StatusOK, &res, "result", "container_id"); err != nil {
		return err
	}
	d.see("200: the container is gone")
	return expect("result", res.Result, "deleted")
}

func expect(what, got, want string) error {
	if got != want {
		return fmt.Errorf("%s is %q, want %q", what, got, want)
	}
	return nil
}

// run shows a command that a shell in the sandbox runs.
func (d *demo) run(ctx context.Context, key, script string) (apitype.ExecResult, error) {
	var res apitype.ExecResult
	var body strings.Builder
	enc := json.NewEncoder(&body)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(map[string]string{"command": script}); err != nil {
		return res, err
	}
	resp, err := d.exchange(ctx, http.MethodPost, key+"/exec", body.String())
	if err != nil {
		return res, err
	}
	shown := "'" + strings.TrimSpace(body.String()) + "'"
	if strings.Contains(script, "\n") {
		shown = "@command.json"
	}
	d.printf("%s %s/api/v1/sandboxes/%s/exec\n", curl(http.MethodPost, shown), d.server.url, key)
	if strings.Contains(script, "\n") {
		d.printf("     its command:\n%s\n", indent(script))
	}
	d.answered(resp)
	if err := resp.into(http.StatusOK, &res); err != nil {
		return res, err
	}
	d.printf("     exit code %s, stdout:\n%s\n", showCode(res.ExitCode), indent(res.Stdout))
	return res, nil
}

// curl is the start of the line that makes a call.
func curl(method, data string) string {
	line := "   $ curl"
	if method != http.MethodGet {
		line += " -X " + method
	}
	line += ` -H "X-API-Token: $TOKEN"`
	if data != "" {
		line += " -H 'Content-Type: application/json' -d " + data
	}
	return line
}

func showCode(code *int) string {
	if code == nil {
		return "none"
	}
	return fmt.Sprint(*code)
}

// call shows a request and, of its answer, the named members.
func (d *demo) call(ctx context.Context, method, path, body string, want int, into any, show ...string) error {
	shown := ""
	if body != "" {
		shown = "'" + body + "'"
	}
	d.printf("%s %s/api/v1/sandboxes/%s\n", curl(method, shown), d.server.url, path)
	for {
		resp, err := d.exchange(ctx, method, path, body)
		if err != nil {
			return err
		}
		d.answered(resp)
		if resp.status == http.StatusAccepted {
			d.printf("     the image is on its way; asking again\n")
			select {
			case <-time.After(2 * time.Second):
				continue
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		d.printf("%s\n", indent(pick(resp.body, show)))
		return resp.into(want, into)
	}
}

// send is call without showing anything.
func (d *demo) send(ctx context.Context, method, path, body string, want int, into any) error {
	resp, err := d.exchange(ctx, method, path, body)
	if err != nil {
		return err
	}
	return resp.into(want, into)
}

type demoResponse struct {
	status int
	body   []byte
	took   time.Duration
}

func (d *demo) answered(r demoResponse) {
	d.printf("   < %d %s (%d ms)\n", r.status, http.StatusText(r.status), r.took.Milliseconds())
}

func (r demoResponse) into(want int, into any) error {
	if r.status != want {
		return fmt.Errorf("the answer is %d, want %d: %s", r.status, want, bytes.TrimSpace(r.body))
	}
	if err := json.Unmarshal(r.body, into); err != nil {
		return fmt.Errorf("read the answer: %w", err)
	}
	return nil
}

func (d *demo) exchange(ctx context.Context, method, path, body string) (demoResponse, error) {
	req, err := http.NewRequestWithContext(ctx, method, d.server.url+"/api/v1/sandboxes/"+path, strings.NewReader(body))
	if err != nil {
		return demoResponse{}, err
	}
	req.Header.Set("X-API-Token", d.server.token)
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	began := time.Now()
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return demoResponse{}, err
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	return demoResponse{resp.StatusCode, data, time.Since(began)}, err
}

// pick shortens a JSON object to the named members, in their order.
func pick(body []byte, names []string) string {
	var all map[string]json.RawMessage
	if json.Unmarshal(body, &all) != nil {
		return string(body)
	}
	var lines []string
	for _, name := range names {
		if value, ok := all[name]; ok {
			var pretty bytes.Buffer
			if json.Indent(&pretty, value, "  ", "  ") != nil {
				pretty.Write(value)
			}
			lines = append(lines, fmt.Sprintf("  %q: %s,", name, pretty.String()))
		}
	}
	if len(lines) < len(all) {
		lines = append(lines, "  ...")
	}
	return "{\n" + strings.Join(lines, "\n") + "\n}"
}
