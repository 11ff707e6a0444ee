package network

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containerd/go-cni"

	"github.com/bermhq/berm/runtime"
)

// Endpoint is a container's place on a network.
type Endpoint struct {
	Network  string `json:"network"`
	IP       string `json:"ip"`       // empty while it is being attached
	Internal bool   `json:"internal"` // no way out, so no name servers either
	Veth     string `json:"veth"`     // the host's side of its link
}

// ifName is the name of a container's interface.
const ifName = "eth0"

// plugins of CNI that Attach uses; bridge calls host-local.
var plugins = []string{"loopback", "bridge", "host-local", "portmap"}

// checkPlugins returns an error if a plug-in is missing. CNI's library has no class for that.
func (m *Manager) checkPlugins() error {
	if missing := m.MissingPlugins(); len(missing) > 0 {
		return runtime.Precondition("the CNI plug-in %s, of the package containernetworking-plugins, is in none of %s: networks need it",
			missing[0], strings.Join(m.opts.PluginDirs, ", "))
	}
	return nil
}

// MissingPlugins lists the CNI plug-ins that this host lacks.
func (m *Manager) MissingPlugins() (missing []string) {
	for _, name := range plugins {
		if !slices.ContainsFunc(m.opts.PluginDirs, func(dir string) bool {
			info, err := os.Stat(filepath.Join(dir, name))
			return err == nil && info.Mode().IsRegular()
		}) {
			missing = append(missing, name)
		}
	}
	return missing
}

// cni sets the plug-ins up for a network.
//
// The firewall masquerades, once for the network. The bridge plug-in would take 16 ms to set
// that up for each container, and 65 ms to remove it.
func (m *Manager) cni(n *network) (cni.CNI, error) {
	type object = map[string]any
	routes := []object{{"dst": "0.0.0.0/0"}}
	if n.Internal {
		routes = []object{}
	}
	conf, err := json.Marshal(object{
		"cniVersion": "0.4.0", // the first version that passes the result of ADD to DEL
		"name":       n.Bridge,
		"plugins": []object{
			{
				"type": "bridge", "bridge": n.Bridge, "isGateway": false, "ipMasq": false,
				"ipam": object{
					"type": "host-local", "dataDir": n.ipam(), "routes": routes,
					"ranges": [][]object{{{"subnet": n.Subnet.String(), "gateway": n.gateway().String()}}},
				},
			},
			{"type": "portmap", "capabilities": map[string]bool{"portMappings": true}},
		},
	})
	if err != nil {
		return nil, err
	}
	// The interfaces are numbered from the start of the list.
	out, err := cni.New(cni.WithMinNetworkCount(2), cni.WithPluginDir(m.opts.PluginDirs), cni.WithInterfacePrefix("eth"),
		cni.WithConfListBytes(conf), cni.WithLoNetwork)
	if err != nil {
		return nil, fmt.Errorf("set up CNI: %w", err)
	}
	return out, nil
}

// Attach puts a container's network namespace on a network. NotFound when there is
// no such network.
func (m *Manager) Attach(ctx context.Context, id, network string) (Endpoint, error) {
	done := make(chan Endpoint, 1)
	err := m.call(ctx, fmt.Sprintf("attach to network %q", network), func(wait, work context.Context) error {
		n, err := m.addUser(wait, work, id, network)
		if err != nil {
			return err
		}
		e, err := m.plug(work, n, id)
		done <- e
		return err
	})
	if err != nil {
		return Endpoint{}, err
	}
	return <-done, nil
}

// addUser makes a container a user of a network. It completes the network first. From then on the
// network isn't removed, and Attachments lists the container.
func (m *Manager) addUser(wait, work context.Context, id, name string) (*network, error) {
	if err := m.checkPlugins(); err != nil {
		return nil, err
	}
	dir := m.networkDir(name)
	unlock, err := m.lockNetwork(wait, dir, false)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, noNetwork()
	}
	if err != nil {
		return nil, err
	}
	defer unlock()
	n, err := readNetwork(dir)
	if err != nil {
		return nil, err
	}
	if n == nil || n.Removing {
		return nil, noNetwork()
	}
	// The plug-in would make a bridge that isn't there, with nothing in the firewall.
	if err := m.stand(work, n); err != nil {
		return nil, err
	}
	return n, n.writeUser(id, Endpoint{Network: n.Name, Internal: n.Internal})
}

// noNetwork returns the error of a call for a network that doesn't exist.
func noNetwork() error {
	return runtime.WithClass(errdefs.ErrNotFound, errors.New("there is no such network"))
}

// plug makes the container's link and gives the link its address.
func (m *Manager) plug(ctx context.Context, n *network, id string) (Endpoint, error) {
	c, err := m.cni(n)
	if err != nil {
		return Endpoint{}, err
	}
	// SetupSerially runs on this thread, and so in its network namespace.
	result, err := c.SetupSerially(ctx, id, m.path("netns", id))
	if err != nil {
		return Endpoint{}, err
	}
	e := Endpoint{Network: n.Name, Internal: n.Internal}
	for name, i := range result.Interfaces {
		switch {
		case name == ifName && len(i.IPConfigs) == 1:
			e.IP = i.IPConfigs[0].IP.String()
		case i.Sandbox == "" && name != n.Bridge && name != ifName && name != "lo":
			e.Veth = name
		}
	}
	if e.IP == "" || e.Veth == "" {
		return Endpoint{}, errors.New("the CNI plug-ins gave no address or no link")
	}
	if err := joinBridge(n, e.Veth); err != nil {
		return Endpoint{}, err
	}
	return e, n.writeUser(id, e)
}

// writeUser writes a container's endpoint. A reader of half the file takes it for an endpoint without
// an address.
func (n *network) writeUser(id string, e Endpoint) error {
	b, err := json.Marshal(e)
	if err != nil {
		return err
	}
	return os.WriteFile(n.user(id), b, 0o600)
}

// readUser returns nil if a container isn't on the network.
func (n *network) readUser(id string) (*Endpoint, error) {
	b, err := os.ReadFile(n.user(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // that is its meaning
	}
	if err != nil {
		return nil, err
	}
	e := new(Endpoint)
	if json.Unmarshal(b, e) != nil {
		// The file is being written, or a loss of power cut it short, which ended the link, too.
		return &Endpoint{Network: n.Name, Internal: n.Internal}, nil
	}
	return e, nil
}

// used finds the directory of the network that a container is on; empty if none.
func (m *Manager) used(id string) (string, error) {
	dirs, err := m.networkDirs()
	if err != nil {
		return "", err
	}
	for _, dir := range dirs {
		_, err := os.Lstat(filepath.Join(dir, "users", id))
		if err == nil {
			return dir, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
	}
	return "", nil
}

// Attached returns a container's place on its network; nil if it is on none.
func (m *Manager) Attached(id string) (*Endpoint, error) {
	dir, err := m.used(id)
	if err != nil || dir == "" {
		return nil, err
	}
	n, err := readNetwork(dir)
	if err != nil || n == nil {
		return nil, err
	}
	return n.readUser(id)
}

// Detach undoes MakeNetns and Attach for a container, even if they were cut short. Missing parts are no
// error.
func (m *Manager) Detach(ctx context.Context, id string) error {
	dir, err := m.used(id)
	if err != nil {
		return fail(ctx, "detach", err)
	}
	path := m.path("netns", id)
	if dir == "" { // on no network, or its attach was cut short before it was a user
		return fail(ctx, "detach", RemoveNetns(path))
	}
	return m.call(ctx, "detach", func(_, work context.Context) error {
		if err := m.unplug(work, dir, id, path); err != nil {
			return err
		}
		return RemoveNetns(path)
	})
}

func (m *Manager) unplug(ctx context.Context, dir, id, path string) error {
	n, err := readNetwork(dir)
	if err != nil {
		return err
	}
	if n == nil {
		n = &network{dir: dir} // this can't happen, but mustn't keep a container for good
	} else {
		c, err := m.cni(n)
		if err != nil {
			return err
		}
		there, err := isNetns(path)
		if err != nil {
			return err
		}
		if !there {
			path = "" // the plug-ins then free only what isn't in the namespace
		}
		if err := c.Remove(ctx, id, path); err != nil {
			return err
		}
	}
	if err := os.Remove(n.user(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Attachments lists the containers that have parts for Detach to remove.
func (m *Manager) Attachments() ([]string, error) {
	ids, err := names(m.path("netns"))
	if err != nil {
		return nil, err
	}
	dirs, err := m.networkDirs()
	if err != nil {
		return nil, err
	}
	for _, dir := range dirs {
		users, err := names(filepath.Join(dir, "users"))
		if err != nil {
			return nil, err
		}
		ids = append(ids, users...)
	}
	slices.Sort(ids)
	return slices.Compact(ids), nil
}
