package network

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/bermhq/berm/runtime/atomicfile"
)

// Sweep removes networks that are half made or half removed, and repairs the others. It goes
// on after a failure.
func (m *Manager) Sweep(ctx context.Context) error {
	return m.call(ctx, "sweep networks", func(wait, work context.Context) error {
		dirs, err := m.networkDirs()
		if err != nil || len(dirs) == 0 {
			return err
		}
		fw, err := readFirewall(work)
		if err != nil {
			return err
		}
		var errs []error
		for _, dir := range dirs {
			if err := m.sweepNetwork(wait, work, dir, fw); err != nil {
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	})
}

func (m *Manager) sweepNetwork(wait, work context.Context, dir string, fw firewall) error {
	n, unlock, err := m.holdNetwork(wait, dir)
	if n == nil || err != nil {
		return err
	}
	defer unlock()
	fail := func(err error) error {
		if err == nil {
			return nil
		}
		return fmt.Errorf("network %q: %w", n.Name, err)
	}
	if n.Removing {
		return fail(m.clearNetwork(work, n))
	}
	// The rules were read before the lock, and may be there by now. setRules reads again.
	wanted := networkRules(n)
	if len(fw.restore(n.chain(), wanted)) > 0 {
		if err := setRules(work, n.chain(), wanted); err != nil {
			return fail(err)
		}
	}
	return fail(errors.Join(m.raise(n), n.clean()))
}

// clean frees addresses that no user has, and removes temporary files of processes that ended. A
// plug-in that outlived the process which started it can have taken an address after its container was
// detached. The caller has locked the network.
func (n *network) clean() error {
	users, err := n.users()
	if err != nil {
		return err
	}
	known := make(map[string]bool, len(users))
	for _, id := range users {
		known[id] = true
	}
	parts, err := names(n.dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, part := range parts {
		if strings.HasPrefix(part, atomicfile.TempPrefix) { // of a record: nobody writes it now
			errs = append(errs, os.RemoveAll(filepath.Join(n.dir, part)))
		}
	}
	dir := filepath.Join(n.ipam(), n.Bridge) // where host-local keeps the network's addresses
	files, err := names(dir)
	if err != nil {
		return err
	}
	for _, file := range files {
		if _, err := netip.ParseAddr(file); err != nil {
			continue
		}
		b, err := os.ReadFile(filepath.Join(dir, file))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		id, _, _ := strings.Cut(string(b), "\n")
		if id = strings.TrimSpace(id); id == "" || known[id] {
			continue // empty: host-local has made it just now
		}
		if err := os.Remove(filepath.Join(dir, file)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
