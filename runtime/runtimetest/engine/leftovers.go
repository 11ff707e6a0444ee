package engine

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// Leftovers lists what is there of containers, in the engine and on its host: for an
// engine whose containers have all been removed, by a backend whose files are below
// root, it should list nothing. Images, networks, and what belongs to these, are no
// leftovers. Each entry says what it is and where.
func (c *Containerd) Leftovers(ctx context.Context, root string) ([]string, error) {
	var out []string
	add := func(what string, names ...string) {
		for _, name := range names {
			out = append(out, what+" "+name)
		}
	}
	for what, args := range map[string][]string{
		"container": {"containers", "list", "--quiet"},
		"task":      {"tasks", "list", "--quiet"},
		"lease":     {"leases", "list", "--quiet"},
	} {
		b, err := c.Store().ctr(ctx, nil, args...)
		if err != nil {
			return nil, err
		}
		add(what, strings.Fields(string(b))...)
	}
	sandboxes, err := c.sandboxes(ctx)
	if err != nil {
		return nil, err
	}
	add("sandbox", sandboxes...)
	snapshots, err := c.Store().ctr(ctx, nil, "snapshots", "list")
	if err != nil {
		return nil, err
	}
	for line := range strings.Lines(string(snapshots)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[len(fields)-1] != "Committed" && fields[0] != "KEY" {
			add("snapshot", fields[0])
		}
	}
	for _, pattern := range []string{
		filepath.Join(root, "containers", "*"),
		filepath.Join(root, "netns", "*"),
		filepath.Join(root, "networks", "*", "users", "*"),
		filepath.Join("/sys/fs/cgroup", c.CgroupParent(), "*", ""),
		filepath.Join("/sys/fs/cgroup/*", c.CgroupParent(), "*", ""),
	} {
		found, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, path := range found {
			if info, err := os.Lstat(path); err == nil && (info.IsDir() || !strings.HasPrefix(path, "/sys/fs/cgroup")) {
				add("file", path)
			}
		}
	}
	for _, of := range []struct {
		what string
		list func(root string) ([]string, error)
	}{{"mount", mountsBelow}, {"process", processesOf}, {"file", cniResults}} {
		more, err := of.list(root)
		if err != nil {
			return nil, err
		}
		add(of.what, more...)
	}
	shims, err := processesOf(c.Address()) // each has the engine's address among its arguments
	if err != nil {
		return nil, err
	}
	add("process", shims...)
	sockets, err := c.place.sockets(c.Namespace())
	add("socket", sockets...)
	return out, err
}

var idPattern = regexp.MustCompile(`[0-9a-f]{64}`)

// sockets lists those that shims of the engine have listened at, in the directory that
// is the same for all engines. Their names are made of the containers' IDs, or stand
// themselves in the engine's log.
func (p *place) sockets(namespace string) ([]string, error) {
	log, err := os.ReadFile(p.path("containerd.log"))
	if err != nil {
		return nil, err
	}
	names := make(map[string]bool)
	for _, id := range idPattern.FindAllString(string(log), -1) {
		if names[id] {
			continue
		}
		names[id] = true // it may be such a name
		for _, of := range []string{id, id + "/debug"} {
			name := sha256.Sum256([]byte(filepath.Join(p.path("containerd.sock"), namespace, of)))
			names[hex.EncodeToString(name[:])] = true
		}
	}
	var out []string
	for name := range names {
		if _, err := os.Lstat(filepath.Join(shimSocketDir, name)); err == nil {
			out = append(out, filepath.Join(shimSocketDir, name))
		}
	}
	return out, nil
}

// sandboxes lists the engine's records of sandboxes, which it has from 1.7 on.
func (c *Containerd) sandboxes(ctx context.Context) ([]string, error) {
	help, err := c.Store().ctr(ctx, nil, "help")
	if err != nil || !bytes.Contains(help, []byte("sandboxes")) {
		return nil, err
	}
	list, err := c.Store().ctr(ctx, nil, "sandboxes", "list")
	if err != nil {
		return nil, err
	}
	var out []string
	for line := range strings.Lines(string(list)) {
		if fields := strings.Fields(line); len(fields) > 0 && fields[0] != "ID" {
			out = append(out, fields[0])
		}
	}
	return out, nil
}

// mountsBelow lists what is mounted below a directory.
func mountsBelow(root string) ([]string, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, err
	}
	var out []string
	for line := range strings.Lines(string(b)) {
		if fields := strings.Fields(line); len(fields) > 4 && strings.HasPrefix(fields[4], root+"/") {
			out = append(out, fields[4])
		}
	}
	return out, nil
}

// processesOf lists the shims and agents that carry a text in their arguments.
func processesOf(text string) ([]string, error) {
	files, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return nil, err
	}
	var out []string
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue // it has ended
		}
		line := string(bytes.ReplaceAll(b, []byte{0}, []byte{' '}))
		program, _, _ := strings.Cut(line, " ")
		if name := filepath.Base(program); strings.Contains(line, text) &&
			(strings.HasPrefix(name, "containerd-shim") || strings.HasPrefix(name, "berm-agent")) {
			out = append(out, fmt.Sprintf("%s %s", filepath.Base(filepath.Dir(file)), line))
		}
	}
	return out, nil
}

// cniResultDir is where libcni notes what it did, the same for all its users.
const cniResultDir = "/var/lib/cni/results"

// cniResults lists libcni's notes about containers whose network namespaces or
// networks are files below a directory.
func cniResults(root string) ([]string, error) {
	entries, err := os.ReadDir(cniResultDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	below := []byte(root + "/")
	var out []string
	for _, e := range entries {
		path := filepath.Join(cniResultDir, e.Name())
		b, err := os.ReadFile(path)
		if err != nil {
			continue // it is gone, or not a file
		}
		var note struct {
			Config []byte `json:"config"` // in base64, so that b doesn't show it
		}
		_ = json.Unmarshal(b, &note) // what isn't JSON has no config
		if bytes.Contains(b, below) || bytes.Contains(note.Config, below) {
			out = append(out, path)
		}
	}
	return out, nil
}

// settleTime is how long an engine may take to finish calls of clients that have gone.
const settleTime = 20 * time.Second

// Settled sweeps until nothing is left. It returns what is left when that takes too long.
func (c *Containerd) Settled(ctx context.Context, root string, sweep func(context.Context) error) ([]string, error) {
	for deadline := time.Now().Add(settleTime); ; time.Sleep(100 * time.Millisecond) {
		if err := sweep(ctx); err != nil {
			return nil, err
		}
		left, err := c.Leftovers(ctx, root)
		if err != nil || len(left) == 0 || time.Now().After(deadline) {
			return left, err
		}
	}
}
