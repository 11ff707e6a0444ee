package containerd

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// EnsureNetwork makes a network unless one of its name is there. Of one that is
// there it makes anew what the host has lost, as in a reboot.
func (r *Runtime) EnsureNetwork(ctx context.Context, want runtime.Network) error {
	op := fmt.Sprintf("make network %q", want.Name)
	if want.Name == "" {
		return fmt.Errorf("%s: %w", op, runtime.Invalid("the name is missing"))
	}
	return r.netCall(ctx, op, func(wait, work context.Context) error {
		dir := r.networkDir(want.Name)
		n, err := readNetwork(dir)
		if err != nil {
			return err
		}
		if n != nil && !n.Removing && r.stands(n) {
			return n.same(want)
		}
		if n == nil && want.External {
			return runtime.WithClass(errdefs.ErrNotFound, errors.New("there is no such network, and the policy says that Berm doesn't make it"))
		}
		unlock, err := r.lockNetwork(wait, dir, true)
		if err != nil {
			return err
		}
		defer unlock()
		if n, err = readNetwork(dir); err != nil {
			return err
		}
		if n != nil && n.Removing {
			if err := r.clearNetwork(work, n); err != nil {
				return err
			}
			n = nil
		}
		if n != nil {
			return errors.Join(n.same(want), r.stand(work, n))
		}
		if n, err = r.newNetwork(wait, dir, want); err == nil {
			err = r.stand(work, n)
		}
		if err != nil {
			return errors.Join(err, r.undo(work, dir, n))
		}
		return nil
	})
}

// same refuses a network that confines containers otherwise than want.
func (n *network) same(want runtime.Network) error {
	if n.Internal != want.Internal || n.Isolated != want.Isolated && !want.External {
		return runtime.Precondition("the network that is there has other options than the policy's: remove it")
	}
	return nil
}

// netCall runs f on the host's side, with the call timeout as its bound, and classes
// its error. F gets a context to wait with, which ends with the caller's, and one to
// work with, which leaves it the grace to finish what is half done.
func (r *Runtime) netCall(ctx context.Context, op string, f func(wait, work context.Context) error) error {
	if ctx.Err() != nil {
		return failure(ctx, op, ctx.Err())
	}
	wait, cancel := context.WithTimeout(ctx, r.opts.CallTimeout)
	defer cancel()
	work, cancel := r.linger(ctx)
	defer cancel()
	err := r.onHost(work, func(work context.Context) error { return f(wait, work) })
	if err != nil && work.Err() != nil && !runtime.HasClass(err) {
		err = fmt.Errorf("%w: %w", work.Err(), err) // a program that was killed says no more than that
	}
	return failure(ctx, op, err)
}

// newNetwork finds a subnet and keeps the record.
func (r *Runtime) newNetwork(ctx context.Context, dir string, want runtime.Network) (*network, error) {
	if err := r.checkPlugins(); err != nil {
		return nil, err
	}
	// No two networks may choose at once. This lock is taken after the network's.
	unlock, err := lockDir(ctx, r.path("networks"))
	if err != nil {
		return nil, err
	}
	defer unlock()
	others, err := r.networks()
	if err != nil {
		return nil, err
	}
	n := &network{
		Name:     want.Name,
		ID:       strings.ToLower(rand.Text()),
		Labels:   maps.Clone(want.Labels),
		Internal: want.Internal,
		Isolated: want.Isolated,
		Bridge:   r.bridgeName(want.Name),
		Created:  time.Now().UTC(),
		dir:      dir,
	}
	taken, err := takenPrefixes()
	if err != nil {
		return nil, err
	}
	for _, o := range others {
		if o.Bridge == n.Bridge { // it is part of a hash
			return nil, runtime.Precondition("the name can't be used next to that of network %q: their bridges would have the same", o.Name)
		}
		taken = append(taken, o.Subnet)
	}
	if n.Subnet, err = freeSubnet(r.opts.Subnets, taken); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Join(dir, "users"), 0o700); err != nil {
		return nil, err
	}
	return n, n.write()
}

// undo removes what a failed EnsureNetwork made; n is nil if it has no record.
func (r *Runtime) undo(ctx context.Context, dir string, n *network) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	if n == nil {
		return os.RemoveAll(dir)
	}
	return r.clearNetwork(ctx, n)
}

// stand makes what a network lacks of its rules and its bridge, in this order: no
// packet passes a bridge without rules. The network is locked.
func (r *Runtime) stand(ctx context.Context, n *network) error {
	if r.stands(n) {
		return nil
	}
	if err := setRules(ctx, n.chain(), networkRules(n)); err != nil {
		return err
	}
	return r.raise(n)
}

// raise makes the bridge, and puts the containers back on it that have lost it. The
// rules are in place.
func (r *Runtime) raise(n *network) error {
	if err := makeBridge(n, r.log); err != nil {
		return err
	}
	users, err := n.users()
	if err != nil {
		return err
	}
	for _, id := range users {
		u, err := n.readUser(id)
		if err != nil {
			return err
		}
		if u == nil || u.Veth == "" {
			continue
		}
		if err := joinBridge(n, u.Veth); err != nil {
			return err
		}
	}
	r.standing.Store(n.ID, true)
	return nil
}

// stands tells whether this process has put a network in order, and its bridge is
// still there. Rules that somebody flushed are the sweep's concern.
func (r *Runtime) stands(n *network) bool {
	if _, ok := r.standing.Load(n.ID); !ok {
		return false
	}
	bridge, err := findBridge(n.Bridge)
	return err == nil && bridge != nil
}

// networks reads all records, those of networks that are being removed too.
func (r *Runtime) networks() ([]*network, error) {
	dirs, err := r.networkDirs()
	if err != nil {
		return nil, err
	}
	var all []*network
	for _, dir := range dirs {
		n, err := readNetwork(dir)
		if err != nil {
			return nil, err
		}
		if n != nil {
			all = append(all, n)
		}
	}
	return all, nil
}

// Networks lists the networks that carry all the labels.
func (r *Runtime) Networks(ctx context.Context, labels map[string]string) ([]runtime.Network, error) {
	const op = "list networks"
	if ctx.Err() != nil {
		return nil, failure(ctx, op, ctx.Err())
	}
	all, err := r.networks()
	if err != nil {
		return nil, failure(ctx, op, err)
	}
	out := make([]runtime.Network, 0, len(all))
	for _, n := range all {
		matches := !n.Removing
		for name, value := range labels {
			got, ok := n.Labels[name]
			matches = matches && ok && (value == "" || value == got)
		}
		if matches {
			out = append(out, runtime.Network{Name: n.Name, ID: n.ID, Labels: n.Labels, Internal: n.Internal, Isolated: n.Isolated, CreatedAt: n.Created})
		}
	}
	slices.SortFunc(out, func(a, b runtime.Network) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	return out, nil
}

// RemoveNetwork removes a network that no container uses.
func (r *Runtime) RemoveNetwork(ctx context.Context, name string) error {
	return r.netCall(ctx, fmt.Sprintf("remove network %q", name), func(wait, work context.Context) error {
		dir := r.networkDir(name)
		n, unlock, err := r.holdNetwork(wait, dir)
		if n == nil || err != nil {
			return err
		}
		defer unlock()
		users, err := n.users()
		if err != nil {
			return err
		}
		if len(users) > 0 {
			return runtime.Precondition("%d containers use it", len(users))
		}
		return r.clearNetwork(work, n)
	})
}

// holdNetwork locks a network, until unlock is called, and reads it. Nil is none: what is
// left of one that was half made is removed.
func (r *Runtime) holdNetwork(wait context.Context, dir string) (n *network, unlock func(), err error) {
	unlock, err = r.lockNetwork(wait, dir, false)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, err
	}
	if n, err = readNetwork(dir); n == nil && err == nil {
		err = os.RemoveAll(dir)
	}
	if n == nil || err != nil {
		unlock()
		return nil, nil, err
	}
	return n, unlock, nil
}

// clearNetwork removes a network without users, whatever state it is in. It is
// locked. From the first step on it is no network any more, and whoever finds it,
// this or another call, has to go on from there.
func (r *Runtime) clearNetwork(ctx context.Context, n *network) error {
	r.standing.Delete(n.ID)
	if !n.Removing {
		n.Removing = true
		if err := n.write(); err != nil {
			return err
		}
	}
	// The bridge goes first: without rules nothing may pass it.
	if err := removeBridge(n.Bridge); err != nil {
		return err
	}
	if err := setRules(ctx, n.chain(), nil); err != nil {
		return err
	}
	parts, err := names(n.dir)
	if err != nil {
		return err
	}
	for _, part := range parts {
		if part == networkRecord {
			continue // the last one
		}
		if err := os.RemoveAll(filepath.Join(n.dir, part)); err != nil {
			return err
		}
	}
	return os.RemoveAll(n.dir)
}
