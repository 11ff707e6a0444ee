package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/semaphore"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// probeTimeout is how long the engine may take to say what it is.
const probeTimeout = 4 * time.Second

// engine calls the container engine. Each call gets a span, counts in the metrics, and is
// bounded. It is the lowest part of the package and calls no other.
type engine struct {
	opts    *Options
	log     *slog.Logger
	metrics *metrics
	tracer  trace.Tracer
	bound   *semaphore.Weighted // of creates and removals at once
	base    context.Context     // of pulls, which outlive their callers

	mu       sync.Mutex
	networks map[string]struct{} // known to exist
	pulls    map[string]*pull    // under way, by reference
	down     error               // why the engine can't be used; nil when it can
	since    time.Time           // when it last answered, or was first asked; set with down
	known    bool                // true once the first reconciliation is done
	info     runtime.Info
}

func newEngine(base context.Context, opts *Options, m *metrics, tracer trace.Tracer) *engine {
	return &engine{
		opts:     opts,
		log:      opts.Logger,
		metrics:  m,
		tracer:   tracer,
		bound:    semaphore.NewWeighted(int64(opts.Settings.EngineParallel)),
		base:     base,
		networks: map[string]struct{}{},
		pulls:    map[string]*pull{},
		down:     errStarting,
		since:    time.Now(),
	}
}

var errStarting = errors.New("the start-up reconciliation isn't done yet")

// call runs one operation on the engine with a span and metrics.
func (e *engine) call(ctx context.Context, op string, f func(context.Context) error) error {
	ctx, span := e.tracer.Start(ctx, "runtime."+op, trace.WithSpanKind(trace.SpanKindClient))
	defer span.End()
	start := time.Now()
	err := f(ctx)
	e.metrics.operation(op, time.Since(start), err)
	if err != nil {
		span.SetAttributes(attribute.String("error.type", ErrorType(err)))
		failSpan(span, err)
	}
	return err
}

// ask is engine.call for an operation that returns a value.
func ask[T any](ctx context.Context, e *engine, op string, f func(context.Context) (T, error)) (v T, err error) {
	err = e.call(ctx, op, func(ctx context.Context) error {
		v, err = f(ctx)
		return err
	})
	return v, err
}

func failSpan(span trace.Span, err error) { span.SetStatus(codes.Error, ErrorType(err)) }

// guard calls f and turns a panic into an error, which it logs and counts.
func (e *engine) guard(op string, f func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			e.metrics.runtimeErrors.WithLabelValues(op, "panic").Inc()
			e.log.Error("panic", "operation", op, "panic", fmt.Sprint(v), "stack", string(debug.Stack()))
			err = fmt.Errorf("%s: panic: %v", op, v)
		}
	}()
	return f()
}

// available returns an *UnavailableError while the engine can't be used.
func (e *engine) available() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.down != nil {
		return e.unavailableLocked(e.down)
	}
	return nil
}

// unavailableLocked explains to callers why the engine can't be used.
func (e *engine) unavailableLocked(err error) error {
	name := cmp.Or(e.opts.Engine, "the container engine")
	var reason, since string
	if errdefs.IsUnavailable(err) {
		reason = runtime.OutageReason(err)
	}
	if d := time.Since(e.since).Round(time.Second); e.down != nil && d > 0 {
		since = " for " + d.String()
	}
	u := &UnavailableError{Err: err}
	switch {
	case errors.Is(err, errStarting):
		u.Message = "Berm has just started and is asking " + name + " what is there; requests are refused until it knows"
	case reason == "":
		u.Message = name + " can't be used" + since + ", as Berm's log tells; requests are refused until it can"
	case since == "":
		u.Message = name + " doesn't answer (" + reason + "); requests are refused until it does"
	default:
		u.Message = name + " has not answered" + since + " (" + reason + "); requests are refused until it does"
	}
	return u
}

// reconciled returns an *UnavailableError until the first reconciliation is done. Before, a
// sandbox may exist without a record.
func (e *engine) reconciled() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.known {
		return e.unavailableLocked(e.down)
	}
	return nil
}

// status returns the engine's description, and why it can't be used, or nil if it can.
func (e *engine) status() (info runtime.Info, down error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.info, e.down
}

// backend returns the name of the engine's backend.
func (e *engine) backend() string {
	info, _ := e.status()
	return info.Backend
}

// setDown records that the engine can't be used.
func (e *engine) setDown(ctx context.Context, err error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.down == nil || e.down.Error() != err.Error() {
		e.log.WarnContext(ctx, "engine_unavailable", "error", err)
	}
	if e.down == nil {
		e.since = time.Now()
	}
	e.down = err
	clear(e.networks) // another engine may come back
	e.metrics.available.Set(0)
}

// setUp records that the engine can be used and is reconciled.
func (e *engine) setUp(ctx context.Context) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.down, e.known = nil, true
	e.metrics.available.Set(1)
	e.log.InfoContext(ctx, "engine_available", "backend", e.info.Backend, "version", e.info.Version)
}

// probe asks the engine for its description, to see whether it answers.
func (e *engine) probe(ctx context.Context) (runtime.Info, error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	return ask(ctx, e, "info", e.opts.Runtime.Info)
}

// remove removes a container, even if ctx has ended.
func (e *engine) remove(ctx context.Context, containerID string) error {
	ctx = context.WithoutCancel(ctx)
	if err := e.bound.Acquire(ctx, 1); err != nil {
		return err
	}
	defer e.bound.Release(1)
	return e.call(ctx, "remove", func(ctx context.Context) error { return e.opts.Runtime.Remove(ctx, containerID) })
}

func (e *engine) inspect(ctx context.Context, containerID string) (runtime.Container, error) {
	return ask(ctx, e, "inspect", func(ctx context.Context) (runtime.Container, error) {
		return e.opts.Runtime.Inspect(ctx, containerID)
	})
}

// list returns the containers that carry the labels.
func (e *engine) list(ctx context.Context, labels map[string]string) ([]runtime.Container, error) {
	return ask(ctx, e, "list", func(ctx context.Context) ([]runtime.Container, error) {
		return e.opts.Runtime.List(ctx, labels)
	})
}

// ownSelector selects objects with this instance's owner label, which others can forge.
func (e *engine) ownSelector() map[string]string {
	return map[string]string{LabelOwner: e.opts.Owner}
}

// image looks an image up.
func (e *engine) image(ctx context.Context, ref string) (runtime.Image, error) {
	return ask(ctx, e, "image", func(ctx context.Context) (runtime.Image, error) {
		return e.opts.Runtime.Image(ctx, ref)
	})
}

// imageLacks reports whether an image exists and has no labels with such names.
func (e *engine) imageLacks(ctx context.Context, id string, such func(name string) bool) (bool, error) {
	img, err := e.image(ctx, id)
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	for name := range img.Labels {
		if such(name) {
			return false, err
		}
	}
	return err == nil, err
}

// withLabels adds the operator's labels to Berm's own. An operator's label can't replace Berm's.
func (e *engine) withLabels(own map[string]string) map[string]string {
	for name, value := range e.opts.Labels {
		if _, taken := own[name]; !taken {
			own[name] = value
		}
	}
	return own
}

// sweep removes what an interrupted Create or Remove left in the engine. It logs a failure; the
// next sweep tries again.
func (e *engine) sweep(ctx context.Context) {
	if err := e.call(ctx, "sweep", e.opts.Runtime.Sweep); err != nil && ctx.Err() == nil {
		e.log.WarnContext(ctx, "engine_sweep_failed", "error", err)
	}
}

// ensureNetwork creates an engine network unless it exists. It asks the engine once for each
// network, and again after an outage of the engine.
func (e *engine) ensureNetwork(ctx context.Context, name string) error {
	if name == "" {
		return nil
	}
	e.mu.Lock()
	_, exists := e.networks[name]
	e.mu.Unlock()
	if exists {
		return nil
	}
	n := runtime.Network{Name: name, Isolated: true}
	for _, rule := range e.opts.Policy().Networks() {
		if rule.EngineNetwork == name {
			n.Internal, n.Isolated, n.External = rule.Internal, rule.Isolated, rule.External
		}
	}
	n.Labels = e.opts.Sealer.Seal(ObjectNetwork, e.withLabels(e.ownSelector()))
	err := e.call(ctx, "ensure_network", func(ctx context.Context) error { return e.opts.Runtime.EnsureNetwork(ctx, n) })
	if err == nil {
		err = e.checkNetwork(ctx, n)
	}
	if err != nil {
		return fmt.Errorf("network %s: %w", name, err)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.networks[name] = struct{}{}
	return nil
}

// checkNetwork refuses a network that this instance didn't create, unless the policy says that
// the operator creates it.
func (e *engine) checkNetwork(ctx context.Context, want runtime.Network) error {
	list, err := e.listNetworks(ctx, nil)
	if err != nil {
		return err
	}
	for _, n := range list {
		if n.Name == want.Name && !isObject(n.Labels) && (want.External || e.opts.Sealer.Valid(ObjectNetwork, n.ID, n.Labels)) {
			return nil
		}
	}
	return runtime.Precondition("the engine has a network of this name that isn't Berm's: remove or rename it, name another in the policy's engine_network, or set external if an operator made it for Berm")
}

// listNetworks returns the networks that carry the labels.
func (e *engine) listNetworks(ctx context.Context, labels map[string]string) ([]runtime.Network, error) {
	return ask(ctx, e, "networks", func(ctx context.Context) ([]runtime.Network, error) { return e.opts.Runtime.Networks(ctx, labels) })
}

// removeNetworks removes this instance's unused networks, except those to keep. It returns
// how many.
func (e *engine) removeNetworks(ctx context.Context, keep func(name string) bool) (int, error) {
	list, err := e.listNetworks(ctx, e.ownSelector())
	if err != nil {
		return 0, fmt.Errorf("list this instance's networks: %w", err)
	}
	removed := 0
	for _, n := range list {
		if keep(n.Name) || isObject(n.Labels) || !e.opts.Sealer.Valid(ObjectNetwork, n.ID, n.Labels) {
			continue
		}
		err := e.call(ctx, "remove_network", func(ctx context.Context) error {
			return e.opts.Runtime.RemoveNetwork(ctx, n.Name)
		})
		switch {
		case err == nil:
			removed++
			e.forgetNetwork(n.Name)
		case !errdefs.IsFailedPrecondition(err): // which means that the network is in use
			return removed, fmt.Errorf("remove network %s: %w", n.Name, err)
		}
	}
	return removed, nil
}

// inPolicy reports whether the policy names an engine network.
func (e *engine) inPolicy(name string) bool {
	return slices.ContainsFunc(e.opts.Policy().Networks(), func(n policy.NetworkRule) bool { return n.EngineNetwork == name })
}

// forgetNetwork makes the next ensureNetwork ask the engine again.
func (e *engine) forgetNetwork(name string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.networks, name)
}

// listOwned returns the objects of a kind that carry the labels, forged ones too. Networks and
// volumes are returned as containers that have an ID and labels only.
func (e *engine) listOwned(ctx context.Context, kind ObjectKind, labels map[string]string) (list []runtime.Container, err error) {
	switch {
	case kind == ObjectContainer:
		return e.list(ctx, labels)
	case kind == ObjectNetwork:
		var networks []runtime.Network
		networks, err = e.listNetworks(ctx, labels)
		for _, n := range networks {
			list = append(list, runtime.Container{ID: n.ID, Labels: n.Labels})
		}
	case e.opts.Collector != nil:
		var volumes []runtime.Volume
		volumes, err = ask(ctx, e, "volumes", func(ctx context.Context) ([]runtime.Volume, error) {
			return e.opts.Collector.Volumes(ctx, labels)
		})
		for _, v := range volumes {
			list = append(list, runtime.Container{ID: v.Name, Labels: v.Labels})
		}
	}
	return list, err
}

// objects returns this instance's objects of a kind, as listOwned does.
func (e *engine) objects(ctx context.Context, kind ObjectKind) ([]runtime.Container, error) {
	list, err := e.listOwned(ctx, kind, map[string]string{LabelOwner: e.opts.Owner, LabelDoor: DoorEngine})
	own := slices.DeleteFunc(list, func(c runtime.Container) bool {
		return !isObject(c.Labels) || kind != ObjectContainer && !e.opts.Sealer.Valid(kind, c.ID, c.Labels)
	})
	if kind == ObjectContainer {
		own = e.opts.Sealer.Genuine(own, func(string) bool { return false })
	}
	return own, err
}

// sealEarlier stores seals of objects that a Berm version without seals made. It does so once for
// each store: later, an object without a seal is never this instance's. It leaves out a container
// whose image has labels of Berm's, because the container may have them from there.
func (e *engine) sealEarlier(ctx context.Context) error {
	s := e.opts.Sealer
	s.mu.Lock()
	open := s.open
	s.mu.Unlock()
	if !open {
		return nil
	}
	var seals []string
	for _, kind := range ObjectKinds() {
		list, err := e.listOwned(ctx, kind, e.ownSelector())
		if err != nil {
			return err
		}
		for _, c := range list {
			_, sealed := c.Labels[LabelSeal]
			own := !sealed
			if own && kind == ObjectContainer {
				if own, err = e.imageLacks(ctx, c.Image, IsOwnLabel); err != nil {
					return err
				}
			}
			if own {
				seals = append(seals, s.seal(kind, c.ID, c.Labels))
			}
		}
	}
	if err := s.opts.Store.CloseSeals(ctx, seals); err != nil {
		return &UnavailableError{Err: err}
	}
	s.keep(seals, false)
	if len(seals) > 0 {
		e.log.InfoContext(ctx, "earlier_objects_sealed", "objects", len(seals))
	}
	return nil
}

// Bounds of a pull. It ends with the last create that waits for it.
const (
	pullTimeout  = 30 * time.Minute
	pullLogEvery = 5 * time.Second
)

// pull is the pull of an image. Creates share it.
type pull struct {
	at      atomic.Pointer[runtime.PullProgress]
	waiting int // creates; guarded by engine.mu
	cancel  context.CancelFunc
	done    chan struct{} // closed when the next two are set
	image   runtime.Image
	err     error
}

func (p *pull) progress() runtime.PullProgress { return *p.at.Load() }

// pull starts pulling an image, or joins the pull that is under way. The caller must wait for it.
func (e *engine) pull(ref string) *pull {
	e.mu.Lock()
	defer e.mu.Unlock()
	p := e.pulls[ref]
	if p == nil {
		p = &pull{done: make(chan struct{})}
		p.at.Store(&runtime.PullProgress{Status: "waiting"})
		var ctx context.Context
		ctx, p.cancel = context.WithTimeout(e.base, pullTimeout)
		e.pulls[ref] = p
		go func() { // ends when the last create stops waiting
			p.err = e.guard("pull", func() (err error) { p.image, err = e.pullImage(ctx, ref, &p.at); return err })
			e.mu.Lock()
			e.forgetPullLocked(ref, p)
			e.mu.Unlock()
			close(p.done)
		}()
	}
	p.waiting++
	return p
}

// forgetPullLocked ends a pull, and makes the next caller start another.
func (e *engine) forgetPullLocked(ref string, p *pull) {
	p.cancel()
	if e.pulls[ref] == p {
		delete(e.pulls, ref)
	}
}

// await waits for the image, or until ctx ends.
func (e *engine) await(ctx context.Context, ref string, p *pull) (runtime.Image, error) {
	select {
	case <-p.done:
		if p.err != nil {
			return runtime.Image{}, &PullError{Image: ref, Err: p.err}
		}
		return p.image, nil
	case <-ctx.Done():
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if p.waiting--; p.waiting == 0 {
		e.forgetPullLocked(ref, p)
	}
	return runtime.Image{}, context.Cause(ctx)
}

func (e *engine) pullImage(ctx context.Context, ref string, at *atomic.Pointer[runtime.PullProgress]) (runtime.Image, error) {
	start := time.Now()
	logged := start
	e.log.InfoContext(ctx, "image_pull_started", "image", ref)
	img, err := ask(ctx, e, "pull", func(ctx context.Context) (runtime.Image, error) {
		return e.opts.Runtime.Pull(ctx, ref, func(p runtime.PullProgress) {
			at.Store(&p)
			if now := time.Now(); now.Sub(logged) >= pullLogEvery {
				logged = now
				e.log.InfoContext(ctx, "image_pulling", "image", ref, "status", p.Status,
					"current_bytes", p.CurrentBytes, "total_bytes", p.TotalBytes)
			}
		})
	})
	if err != nil {
		e.log.WarnContext(ctx, "image_pull_failed", "image", ref, "error", err)
		return img, err
	}
	e.log.InfoContext(ctx, "image_pulled", "image", ref, "image_id", img.ID, "duration", time.Since(start))
	return img, nil
}
