// Package network makes the bridges, firewall rules and network namespaces of containers. It
// uses CNI plug-ins, netlink and iptables, and never the engine.
package network

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// cleanupTimeout bounds the removal of what a failed call made.
const cleanupTimeout = 10 * time.Second

// Options of New. All are mandatory, but for Netns.
type Options struct {
	// Root is the directory of the files of networks and namespaces. Namespace is the
	// engine's. Names of bridges depend on both, so that instances don't share a bridge.
	Root, Namespace string
	// Netns is the path of the network namespace where bridges are made. Empty is this
	// process's own.
	Netns string
	// PluginDirs are searched for CNI plug-ins.
	PluginDirs []string
	// Subnets is the pool of which each network gets a /24.
	Subnets netip.Prefix
	// CallTimeout is how long one call may take.
	CallTimeout time.Duration
	Logger      *slog.Logger
}

// Manager makes networks, and attaches containers to them. It may be used by many goroutines at
// once, and together with Managers of other processes on the same Root.
type Manager struct {
	opts Options
	log  *slog.Logger
	// standing holds the IDs of the networks that this process has completed.
	standing sync.Map
}

// New makes a Manager. It makes nothing on the host yet.
func New(opts Options) *Manager { return &Manager{opts: opts, log: opts.Logger} }

// path returns a path below the root. The root has:
//
//	netns/ID     network namespaces, mounted
//	networks/…   networks, and the containers on them
func (m *Manager) path(elem ...string) string {
	return filepath.Join(append([]string{m.opts.Root}, elem...)...)
}

// fail gives an error its class. Ctx is the caller's own.
func fail(ctx context.Context, op string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", op, runtime.Classify(ctx, err))
}

// EnsureNetwork makes a network unless one of its name exists. It repairs an existing one, after a
// reboot for example.
func (m *Manager) EnsureNetwork(ctx context.Context, want runtime.Network) error {
	op := fmt.Sprintf("make network %q", want.Name)
	if want.Name == "" {
		return fmt.Errorf("%s: %w", op, runtime.Invalid("the name is missing"))
	}
	return m.call(ctx, op, func(wait, work context.Context) error {
		dir := m.networkDir(want.Name)
		n, err := readNetwork(dir)
		if err != nil {
			return err
		}
		if n != nil && !n.Removing && m.stands(n) {
			return n.same(want)
		}
		if n == nil && want.External {
			return runtime.WithClass(errdefs.ErrNotFound, errors.New("there is no such network, and the policy says that Berm doesn't make it"))
		}
		unlock, err := m.lockNetwork(wait, dir, true)
		if err != nil {
			return err
		}
		defer unlock()
		if n, err = readNetwork(dir); err != nil {
			return err
		}
		if n != nil && n.Removing {
			if err := m.clearNetwork(work, n); err != nil {
				return err
			}
			n = nil
		}
		if n != nil {
			return errors.Join(n.same(want), m.stand(work, n))
		}
		if n, err = m.newNetwork(wait, dir, want); err == nil {
			err = m.stand(work, n)
		}
		if err != nil {
			return errors.Join(err, m.undo(work, dir, n))
		}
		return nil
	})
}

// same returns an error if the network confines containers differently from want.
func (n *network) same(want runtime.Network) error {
	if n.Internal != want.Internal || n.Isolated != want.Isolated && !want.External {
		return runtime.Precondition("the network that is there has other options than the policy's: remove it")
	}
	return nil
}

// call runs f on the host's side, within the call timeout, and classes its error. F waits with a
// context that ends with the caller's. It works with a context that lasts for the grace longer.
func (m *Manager) call(ctx context.Context, op string, f func(wait, work context.Context) error) error {
	if ctx.Err() != nil {
		return fail(ctx, op, ctx.Err())
	}
	wait, cancel := context.WithTimeout(ctx, m.opts.CallTimeout)
	defer cancel()
	work, cancel := runtime.Linger(ctx, m.opts.CallTimeout)
	defer cancel()
	err := m.onHost(work, func(work context.Context) error { return f(wait, work) })
	if err != nil && work.Err() != nil && !runtime.HasClass(err) {
		err = fmt.Errorf("%w: %w", work.Err(), err) // the error of a killed program doesn't say why
	}
	return fail(ctx, op, err)
}

// newNetwork finds a subnet and writes the record.
func (m *Manager) newNetwork(ctx context.Context, dir string, want runtime.Network) (*network, error) {
	if err := m.checkPlugins(); err != nil {
		return nil, err
	}
	// Two networks must not choose at the same time. This lock is acquired after the network's.
	unlock, err := LockDir(ctx, m.path("networks"))
	if err != nil {
		return nil, err
	}
	defer unlock()
	others, err := m.networks()
	if err != nil {
		return nil, err
	}
	n := &network{
		Name:     want.Name,
		ID:       strings.ToLower(rand.Text()),
		Labels:   maps.Clone(want.Labels),
		Internal: want.Internal,
		Isolated: want.Isolated,
		Bridge:   m.bridgeName(want.Name),
		Created:  time.Now().UTC(),
		dir:      dir,
	}
	taken, err := takenPrefixes()
	if err != nil {
		return nil, err
	}
	for _, o := range others {
		if o.Bridge == n.Bridge { // its name is part of a hash
			return nil, runtime.Precondition("the name can't be used next to that of network %q: their bridges would have the same", o.Name)
		}
		taken = append(taken, o.Subnet)
	}
	if n.Subnet, err = freeSubnet(m.opts.Subnets, taken); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Join(dir, "users"), 0o700); err != nil {
		return nil, err
	}
	return n, n.write()
}

// undo removes what a failed EnsureNetwork made; n is nil if it has no record.
func (m *Manager) undo(ctx context.Context, dir string, n *network) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	if n == nil {
		return os.RemoveAll(dir)
	}
	return m.clearNetwork(ctx, n)
}

// stand sets a network's rules, and then makes its bridge, so that no packet passes a bridge
// without rules. The caller has locked the network.
func (m *Manager) stand(ctx context.Context, n *network) error {
	if m.stands(n) {
		return nil
	}
	if err := setRules(ctx, n.chain(), networkRules(n)); err != nil {
		return err
	}
	return m.raise(n)
}

// raise makes the bridge, and connects the network's containers to it. The rules must be set.
func (m *Manager) raise(n *network) error {
	if err := makeBridge(n, m.log); err != nil {
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
	m.standing.Store(n.ID, true)
	return nil
}

// stands reports whether this process has completed a network, and its bridge exists. The
// sweep restores rules that another program removed.
func (m *Manager) stands(n *network) bool {
	if _, ok := m.standing.Load(n.ID); !ok {
		return false
	}
	bridge, err := findBridge(n.Bridge)
	return err == nil && bridge != nil
}

// networks reads all records, including those of networks that are being removed.
func (m *Manager) networks() ([]*network, error) {
	dirs, err := m.networkDirs()
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
func (m *Manager) Networks(ctx context.Context, labels map[string]string) ([]runtime.Network, error) {
	const op = "list networks"
	if ctx.Err() != nil {
		return nil, fail(ctx, op, ctx.Err())
	}
	all, err := m.networks()
	if err != nil {
		return nil, fail(ctx, op, err)
	}
	out := make([]runtime.Network, 0, len(all))
	for _, n := range all {
		if !n.Removing && runtime.HasLabels(n.Labels, labels) {
			out = append(out, runtime.Network{Name: n.Name, ID: n.ID, Labels: n.Labels, Internal: n.Internal, Isolated: n.Isolated, CreatedAt: n.Created})
		}
	}
	slices.SortFunc(out, func(a, b runtime.Network) int {
		return cmp.Or(a.CreatedAt.Compare(b.CreatedAt), cmp.Compare(a.ID, b.ID))
	})
	return out, nil
}

// RemoveNetwork removes a network that no container uses.
func (m *Manager) RemoveNetwork(ctx context.Context, name string) error {
	return m.call(ctx, fmt.Sprintf("remove network %q", name), func(wait, work context.Context) error {
		dir := m.networkDir(name)
		n, unlock, err := m.holdNetwork(wait, dir)
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
		return m.clearNetwork(work, n)
	})
}

// holdNetwork locks a network, until unlock is called, and reads its record. It returns nil if
// there is none. It removes a directory without a record.
func (m *Manager) holdNetwork(wait context.Context, dir string) (n *network, unlock func(), err error) {
	unlock, err = m.lockNetwork(wait, dir, false)
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

// clearNetwork removes a network without users, even one made or removed in part. It first marks
// the record, so that the network isn't listed any more and a later call can finish. The caller
// has locked the network.
func (m *Manager) clearNetwork(ctx context.Context, n *network) error {
	m.standing.Delete(n.ID)
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
			continue // it is removed last
		}
		if err := os.RemoveAll(filepath.Join(n.dir, part)); err != nil {
			return err
		}
	}
	return os.RemoveAll(n.dir)
}
