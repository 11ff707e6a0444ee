package network

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/atomicfile"
)

// network is the record of a network, networks/HASH/network.json. The record is made first and
// removed last. The other parts of a network are its bridge, its firewall rules, and in the same
// directory
//
//	users/ID        endpoints of containers, there from before they get an address
//	                until after it is given back
//	ipam/           the addresses that are taken, as the CNI plug-in host-local keeps them
//
// The process that makes, repairs or removes a network, or adds a user, holds the flock of
// the directory.
type network struct {
	Name     string            `json:"name"`
	ID       string            `json:"id"`
	Labels   map[string]string `json:"labels"`
	Internal bool              `json:"internal"`
	Isolated bool              `json:"isolated"`
	Subnet   netip.Prefix      `json:"subnet"`
	Bridge   string            `json:"bridge"`
	Created  time.Time         `json:"created"`
	Removing bool              `json:"removing"` // its removal has begun

	dir string
}

const (
	bridgePrefix  = "berm-"
	chainPrefix   = "BERM-"
	lockPoll      = 2 * time.Millisecond
	networkRecord = "network.json"
)

// chain of the firewall that holds the network's rules.
func (n *network) chain() string { return chainPrefix + strings.TrimPrefix(n.Bridge, bridgePrefix) }

// gateway is the bridge's address, which an internal network doesn't have.
func (n *network) gateway() netip.Addr { return n.Subnet.Addr().Next() }

func (n *network) user(id string) string { return filepath.Join(n.dir, "users", id) }

func (n *network) ipam() string { return filepath.Join(n.dir, "ipam") }

func (n *network) users() ([]string, error) { return names(filepath.Join(n.dir, "users")) }

func (m *Manager) networkDir(name string) string {
	sum := sha256.Sum256([]byte(name))
	return m.path("networks", hex.EncodeToString(sum[:16]))
}

func (m *Manager) bridgeName(network string) string {
	sum := sha256.Sum256([]byte(m.opts.Namespace + "\x00" + m.opts.Root + "\x00" + network))
	return bridgePrefix + hex.EncodeToString(sum[:4])
}

// readNetwork reads the record in a directory; nil if there is none.
func readNetwork(dir string) (*network, error) {
	b, err := os.ReadFile(filepath.Join(dir, networkRecord))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // that is its meaning
	}
	if err != nil {
		return nil, err
	}
	n := &network{dir: dir}
	if err := json.Unmarshal(b, n); err != nil {
		return nil, fmt.Errorf("read %s: %w", filepath.Join(dir, networkRecord), err)
	}
	return n, nil
}

// write writes the record. It survives a loss of power.
func (n *network) write() error {
	b, err := json.Marshal(n)
	if err != nil {
		return err
	}
	return atomicfile.WriteString(filepath.Join(n.dir, networkRecord), 0o600, string(b))
}

// networkDirs lists the directories of networks, half-made ones too.
func (m *Manager) networkDirs() ([]string, error) {
	found, err := names(m.path("networks"))
	for i, name := range found {
		found[i] = m.path("networks", name)
	}
	return found, err
}

// names lists a directory; a missing one is empty.
func names(dir string) ([]string, error) {
	f, err := os.Open(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	return f.Readdirnames(-1)
}

// lockNetwork locks a network's directory, which it makes first if make is true. The error is
// fs.ErrNotExist if the directory doesn't exist.
func (m *Manager) lockNetwork(ctx context.Context, dir string, make bool) (unlock func(), err error) {
	for {
		if make {
			if err := os.MkdirAll(dir, 0o700); err != nil {
				return nil, err
			}
		}
		unlock, err := LockDir(ctx, dir)
		if make && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		return unlock, err
	}
}

// LockDir acquires a directory's flock. It polls, as waiting in the kernel can't be cancelled.
func LockDir(ctx context.Context, dir string) (unlock func(), err error) {
	var f *os.File
	err = runtime.Poll(ctx, lockPoll, func() (bool, error) {
		f, err = TryLockDir(dir)
		return f != nil, err
	})
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	return func() { _ = f.Close() }, nil
}

// TryLockDir acquires a directory's flock, which closing the file releases. It returns nil if
// another open file has the lock.
func TryLockDir(dir string) (*os.File, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	locked, err := runtime.TryFlock(f, unix.LOCK_EX)
	if locked { // the last holder may have removed the directory
		var opened, named os.FileInfo
		if opened, err = f.Stat(); err == nil {
			named, err = os.Lstat(dir)
		}
		locked = err == nil && os.SameFile(opened, named)
	}
	if !locked {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}
