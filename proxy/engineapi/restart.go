package engineapi

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/events"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/restart"
	"github.com/bermhq/berm/proxy"
)

// Run carries out the restart policies of containers with binds until ctx ends. A lost
// engine is no error.
func (d *Proxy) Run(ctx context.Context) error { return d.restarts.Run(ctx) }

// restartEngine implements restart.Engine. Its requests name no version of the API, as they are the same
// in all.
type restartEngine struct{ *Proxy }

var _ restart.Engine = restartEngine{}

const (
	// eventSlack is how far back the event stream begins: the engine answers a request for
	// events a moment before it subscribes.
	eventSlack = 5 * time.Second
	turnTime   = 200 * time.Millisecond // for a container's turn to be started
)

// Watch implements restart.Engine.
func (d restartEngine) Watch(ctx context.Context, ready func(life string), changed func(id string)) error {
	resp, err := d.engine.Open(ctx, upstream.Ask{Method: http.MethodGet, Path: "/events", Query: url.Values{
		"since":   {strconv.FormatInt(time.Now().Add(-eventSlack).Unix(), 10)},
		"filters": {filters{"type": {"container"}, "event": {"die", "destroy"}, "label": d.proxyLabels()}.String()},
	}})
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if err := d.sweepPins(ctx); err != nil {
		return err
	}
	ready(d.life(ctx))
	for lines := bufio.NewReaderSize(resp.Body, upstream.BufferSize); ; {
		raw, err := nextEvent(lines)
		if err != nil {
			return d.engine.Unavailable(ctx, err)
		}
		var e events.Message
		if json.Unmarshal(raw, &e) == nil {
			changed(e.Actor.ID)
		}
	}
}

// life returns a text that changes only when the engine starts anew: of its process, or of the default
// bridge network, which an engine without live-restore makes anew. It returns "" if Berm can see neither,
// as with live-restore behind systemd's socket.
func (d restartEngine) life(ctx context.Context) string {
	if conn, err := d.opts.Dial(ctx); err == nil {
		cred, _ := proxy.PeerOf(conn)
		_ = conn.Close()
		if since, ok := dockerd(cred.Pid); ok {
			return fmt.Sprintf("process %d since %s", cred.Pid, since)
		}
	}
	var info struct{ LiveRestoreEnabled bool }
	var bridge struct {
		ID string `json:"Id"`
	}
	err := d.engine.Get(ctx, 0, "/info", nil, &info)
	if err == nil && !info.LiveRestoreEnabled {
		err = d.engine.Get(ctx, 0, "/networks/bridge", nil, &bridge)
	}
	if err != nil || bridge.ID == "" {
		return ""
	}
	return "network " + bridge.ID
}

// dockerd returns when a process began, in the kernel's clock ticks. Ok is false if the process isn't the
// engine, but only listens for it, as systemd does.
func dockerd(pid int32) (since string, ok bool) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)) // there is no process 0
	if err != nil {
		return "", false
	}
	_, rest, _ := strings.Cut(string(stat), " (dockerd) ")
	fields := strings.Fields(rest)
	if len(fields) < 20 {
		return "", false
	}
	return fields[19], true
}

// List implements restart.Engine. It leaves out unsealed containers with binds, which earlier versions
// made. It removes their restart policies at the engine, which must not start them either.
func (d restartEngine) List(ctx context.Context) (ids []string, err error) {
	var unsealed []string
	err = d.eachContainer(ctx, 0, func(ct *listed) {
		_, sealed := ct.Labels[lifecycle.LabelSeal]
		e, _ := effectiveOf(ct.Labels)
		switch _, ours := d.restartedHere(ct.ID, ct.Labels); {
		case ours:
			ids = append(ids, ct.ID)
		case !sealed && !e.Audit && hasBinds(ct.Mounts):
			unsealed = append(unsealed, ct.ID)
		}
	}, d.proxyLabels()...)
	for _, id := range unsealed {
		ct, takeErr := d.inspected(ctx, id)
		if takeErr == nil && !ct.HostConfig.RestartPolicy.IsNone() {
			takeErr = d.TakeOver(ctx, id)
		}
		if takeErr != nil && !errdefs.IsNotFound(takeErr) {
			d.log.ErrorContext(ctx, "restart_policy_not_taken_over", "container_id", id, "error", takeErr)
		}
	}
	return ids, err
}

// Inspect implements restart.Engine. A container that the engine may start itself counts as not found.
func (d restartEngine) Inspect(ctx context.Context, id string) (restart.Container, error) {
	ct, err := d.inspected(ctx, id)
	if err != nil {
		return restart.Container{}, err
	}
	policy, ours := d.restartedHere(ct.ID, ct.Config.Labels)
	if !ours || ct.State == nil || ct.State.Dead || ct.State.Status == container.StateRemoving {
		return restart.Container{}, fmt.Errorf("inspect container %q: %w", id, errdefs.ErrNotFound)
	}
	h := ct.HostConfig
	out := restart.Container{
		Policy: policy, EngineRestart: !h.RestartPolicy.IsNone(),
		Running: ct.State.Running, ExitCode: ct.State.ExitCode,
		Joins: h.NetworkMode.IsContainer() || len(h.Links) > 0,
	}
	if out.EngineRestart { // an update may have changed it since the container was made
		out.Policy = restart.Policy{Name: string(h.RestartPolicy.Name), MaxRetries: h.RestartPolicy.MaximumRetryCount}
	}
	for _, t := range []struct {
		to   *time.Time
		text string
	}{{&out.StartedAt, ct.State.StartedAt}, {&out.FinishedAt, ct.State.FinishedAt}, {&out.Expires, ct.Config.Labels[lifecycle.LabelExpiresAt]}} {
		if *t.to, err = time.Parse(time.RFC3339Nano, t.text); err != nil {
			return restart.Container{}, fmt.Errorf("inspect container %q: %w", id, err)
		}
	}
	return out, nil
}

func (d restartEngine) inspected(ctx context.Context, id string) (*container.InspectResponse, error) {
	ct, err := (&call{Proxy: d.Proxy, ctx: ctx}).inspect(id, 0)
	if upstream.StatusOf(err) == http.StatusNotFound {
		err = fmt.Errorf("%w: %w", errdefs.ErrNotFound, err)
	}
	return ct, err
}

// TakeOver implements restart.Engine. It cancels a restart that the engine has scheduled.
func (d restartEngine) TakeOver(ctx context.Context, id string) error {
	change := container.UpdateConfig{RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyDisabled}}
	if err := d.engine.Post(ctx, 0, "/containers/"+id+"/update", nil, change, nil); err != nil {
		return fmt.Errorf("take over the restart policy of container %q: %w", id, err)
	}
	d.log.InfoContext(ctx, "restart_policy_taken_over", "container_id", id)
	ct, err := d.inspected(ctx, id)
	if err == nil && ct.State != nil && ct.State.Restarting {
		err = d.engine.Post(ctx, 0, "/containers/"+id+"/stop", nil, nil, nil)
	}
	return err
}

// StartContainer implements restart.Engine. It doesn't wait for other calls on the container: a slow copy
// of its files would keep other containers waiting.
func (d restartEngine) StartContainer(ctx context.Context, id string) error {
	_, err := d.engine.Max(ctx)
	if err == nil {
		turn, cancel := context.WithTimeout(ctx, turnTime)
		defer cancel()
		err = d.Proxy.StartContainer(turn, id) // turn bounds only the wait for other calls
	}
	var f *proxy.Fault
	if errors.Is(err, context.DeadlineExceeded) || errors.As(err, &f) && upstream.StatusOf(err) == 0 && f.Status == http.StatusServiceUnavailable {
		err = fmt.Errorf("%w: %w", errdefs.ErrUnavailable, err)
	}
	return err
}

// restartedHere reports whether Berm carries out a container's restart policy, and returns the policy of
// its labels. The engine carries out the policies of containers without binds, and of containers that
// were denied and made in mode audit.
func (d *Proxy) restartedHere(id string, labels map[string]string) (restart.Policy, bool) {
	e, ok := effectiveOf(labels)
	if !ok || e.Audit || len(e.Binds) == 0 || !d.opts.Sealer.Valid(lifecycle.ObjectContainer, id, labels) {
		return restart.Policy{}, false
	}
	return restart.Policy{Name: e.Restart, MaxRetries: e.RestartMax}, true
}

// restartPolicy returns the policy that is asked for. Only on-failure has a number of retries.
func restartPolicy(b container.RestartPolicy) restart.Policy {
	p := restart.Policy{Name: string(b.Name)}
	if p.Name == restart.OnFailure {
		p.MaxRetries = b.MaximumRetryCount
	}
	return p
}

// checkRestart refuses, as the engine would, a restart policy of a container that is
// removed when it ends.
func (p *plan) checkRestart() error {
	if p.Body.HostConfig.AutoRemove && !p.audited && len(p.Spec.Binds) > 0 && !restartOf(p).None() {
		return proxy.Malformed("can't create 'AutoRemove' container with restart policy")
	}
	return nil
}

func restartOf(p *plan) restart.Policy {
	r := restartPolicy(p.Body.HostConfig.RestartPolicy)
	r.Name = p.Spec.Restart
	return r
}

// endContainer makes the engine stop or kill a container. Off cancels its restarts; see
// restart.Supervisor.Stopping. If the container was only waiting for a restart, or has ended again by
// itself, there is nothing left to end.
func endContainer(c *call, a upstream.Ask, id string, off bool) error {
	waited, err := c.restarts.Stopping(c.ctx, id, off)
	if err != nil {
		return err
	}
	resp, err := c.ask(a)
	if err != nil {
		return err
	}
	if waited && (resp.StatusCode == http.StatusNotModified || resp.StatusCode == http.StatusConflict) {
		_ = resp.Body.Close()
		return c.status(http.StatusNoContent)
	}
	return c.relay(resp, false)
}

// killContainer makes the engine send a container a signal. It cancels restarts where the engine would:
// for SIGKILL, for the container's stop signal, and for any signal if the container has none.
func killContainer(c *call, a upstream.Ask, id string) error {
	if _, ok := c.restarts.Row(id); !ok {
		return c.forward(a, false)
	}
	ct, err := c.inspect(id, c.version)
	if err != nil {
		return err
	}
	sent, stop := signalNumber(a.Query.Get("signal")), ct.Config.StopSignal
	return endContainer(c, a, id, sent == unix.SIGKILL || stop == "" || sent == signalNumber(stop))
}

// signalNumber returns a signal's number, given as such or by name. "" is SIGKILL; 0 is unknown.
func signalNumber(s string) unix.Signal {
	if n, err := strconv.Atoi(s); err == nil {
		return unix.Signal(n)
	}
	if s == "" {
		return unix.SIGKILL
	}
	return unix.SignalNum("SIG" + strings.TrimPrefix(strings.ToUpper(s), "SIG"))
}

// showRestarts shows a list's entry as restarting, as the engine would, if Berm will restart it.
func showRestarts(c *call, entry json.RawMessage) (json.RawMessage, error) {
	var ct labelled
	if err := json.Unmarshal(entry, &ct); err != nil {
		return nil, err
	}
	if row, _ := c.restarts.Row(ct.ID); row.Next.IsZero() {
		return entry, nil
	}
	return replacing{"State": "restarting", "Status": "Restarting"}.in(entry)
}

// restarted returns what inspect shows of the restart policy that Berm carries out, as the
// engine would.
func restarted(c *call, id string) replacing {
	row, ok := c.restarts.Row(id)
	if !ok {
		return replacing{}
	}
	policy := container.RestartPolicy{Name: container.RestartPolicyMode(row.Name), MaximumRetryCount: row.MaxRetries}
	values := replacing{"RestartCount": row.Count, "HostConfig": replacing{"RestartPolicy": policy}}
	if !row.Next.IsZero() {
		values["State"] = replacing{"Status": "restarting", "Restarting": true, "Running": true}
	}
	return values
}

// replacing maps keys of a JSON object to new values. A value of type replacing changes the object at its
// key.
type replacing map[string]any

// in returns the object with the values, and the rest of it as the engine wrote it. It fails
// unless the object has all of the fields.
func (r replacing) in(raw json.RawMessage) (json.RawMessage, error) {
	for name, value := range r {
		before, old, after := proxy.CutField(raw, name)
		text, err := json.Marshal(value)
		if inner, ok := value.(replacing); ok {
			text, err = inner.in(old)
		}
		if err == nil && old == nil {
			err = fmt.Errorf("there is no %s", name)
		}
		if err != nil {
			return nil, fmt.Errorf("rewrite the engine's answer: %w", err)
		}
		raw = slices.Concat(before, text, after)
	}
	return raw, nil
}
