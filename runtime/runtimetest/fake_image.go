package runtimetest

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/distribution/reference"

	"github.com/bermhq/berm/runtime"
)

// AddImage puts an image into the store, or replaces it.
func (f *Fake) AddImage(ref string, img runtime.Image) {
	f.mu.Lock()
	defer f.mu.Unlock()
	addImage(f.images, ref, img)
}

// Image implements runtime.Runtime.
func (f *Fake) Image(ctx context.Context, ref string) (runtime.Image, error) {
	return call(ctx, f, "image", ref, func() (runtime.Image, error) { return findImage(f.images, ref) })
}

// Pull implements runtime.Runtime.
func (f *Fake) Pull(ctx context.Context, ref string, progress func(runtime.PullProgress)) (runtime.Image, error) {
	if _, err := f.begin(ctx, "pull", ref); err != nil {
		return runtime.Image{}, err
	}
	f.mu.Lock()
	img, err := findImage(f.registry, ref)
	f.mu.Unlock()
	if err != nil {
		return runtime.Image{}, err
	}
	if progress == nil {
		progress = func(runtime.PullProgress) {}
	}
	progress(runtime.PullProgress{Status: "pulling", TotalBytes: 1 << 20})
	if f.opts.Pull != nil {
		if err := f.opts.Pull(ctx, ref, progress); err != nil {
			return runtime.Image{}, err
		}
	}
	if ctx.Err() != nil {
		return runtime.Image{}, fmt.Errorf("pull %s: %w", ref, ctxError(ctx))
	}
	progress(runtime.PullProgress{Status: "done", CurrentBytes: 1 << 20, TotalBytes: 1 << 20})
	f.AddImage(ref, img)
	return img, f.after("pull", ref)
}

func addImage(store map[string]runtime.Image, ref string, img runtime.Image) {
	if img.ID == "" {
		img.ID = fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(ref)))
	}
	store[img.ID] = img
	store[ref] = img
	if named, err := reference.ParseDockerRef(ref); err == nil {
		store[named.String()] = img
	}
}

func findImage(store map[string]runtime.Image, ref string) (runtime.Image, error) {
	if img, ok := store[ref]; ok {
		return img, nil
	}
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return runtime.Image{}, fmt.Errorf("image %q: %w: %w", ref, err, errdefs.ErrInvalidArgument)
	}
	if img, ok := store[named.String()]; ok {
		return img, nil
	}
	return runtime.Image{}, fmt.Errorf("image %s: %w", ref, errdefs.ErrNotFound)
}

type fakeVolume struct {
	info      runtime.Volume
	container string // that has it
}

type fakeNetwork struct {
	info  runtime.Network
	next  netip.Addr // of those to give
	users int        // running containers
}

// EnsureNetwork implements runtime.Runtime. Each network is a /16 of its own.
func (f *Fake) EnsureNetwork(ctx context.Context, n runtime.Network) error {
	return f.do(ctx, "ensure_network", n.Name, func() error {
		there := f.networks[n.Name]
		switch {
		case n.Name == "" || strings.ContainsAny(n.Name, "/ "):
			return fmt.Errorf("network name %q: %w", n.Name, errdefs.ErrInvalidArgument)
		case there == nil && n.External:
			return fmt.Errorf("network %s: %w", n.Name, errdefs.ErrNotFound)
		case there != nil && (there.info.Internal != n.Internal || there.info.Isolated != n.Isolated && !n.External):
			return fmt.Errorf("network %s is another: %w", n.Name, errdefs.ErrFailedPrecondition)
		case there == nil:
			n.ID, n.CreatedAt = newID(), time.Now()
			f.networks[n.Name] = &fakeNetwork{info: n, next: f.freeSubnet()}
		}
		return nil
	})
}

// freeSubnet returns the first address to hand out of a /16 that is in no use.
func (f *Fake) freeSubnet() netip.Addr {
	var used [256]bool
	for _, n := range f.networks {
		used[n.next.As4()[1]] = true
	}
	i := slices.Index(used[:], false)
	return netip.AddrFrom4([4]byte{10, byte(max(i, 0)), 0, 2})
}

// take hands out an address. After 65,000 it starts anew.
func (n *fakeNetwork) take() string {
	ip := n.next
	n.users++
	if n.next = ip.Next(); n.next.As4()[1] != ip.As4()[1] {
		n.next = netip.AddrFrom4([4]byte{10, ip.As4()[1], 0, 2})
	}
	return ip.String()
}

// Networks implements runtime.Runtime.
func (f *Fake) Networks(ctx context.Context, labels map[string]string) ([]runtime.Network, error) {
	return call(ctx, f, "networks", "", func() (ns []runtime.Network, _ error) {
		for _, n := range f.networks {
			if runtime.HasLabels(n.info.Labels, labels) {
				ns = append(ns, n.info)
			}
		}
		return ns, nil
	})
}

// AddVolume puts a volume into the engine, and takes the one of its name out. It is in
// use as long as the container is there; an empty id is none.
func (f *Fake) AddVolume(v runtime.Volume, containerID string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.volumes[v.Name] = &fakeVolume{info: v, container: containerID}
}

// Volumes implements runtime.Collector.
func (f *Fake) Volumes(ctx context.Context, labels map[string]string) ([]runtime.Volume, error) {
	return call(ctx, f, "volumes", "", func() (vs []runtime.Volume, _ error) {
		for _, v := range f.volumes {
			if runtime.HasLabels(v.info.Labels, labels) {
				vs = append(vs, v.info)
			}
		}
		return vs, nil
	})
}

// RemoveVolume implements runtime.Collector.
func (f *Fake) RemoveVolume(ctx context.Context, name string) error {
	return f.do(ctx, "remove_volume", name, func() error {
		if v := f.volumes[name]; v != nil && f.containers[v.container] != nil {
			return fmt.Errorf("volume %s is in use: %w", name, errdefs.ErrFailedPrecondition)
		}
		delete(f.volumes, name)
		return nil
	})
}

// RemoveNetworkID implements runtime.Collector.
func (f *Fake) RemoveNetworkID(ctx context.Context, id string) error {
	f.mu.Lock()
	name := ""
	for _, n := range f.networks {
		if n.info.ID == id {
			name = n.info.Name
		}
	}
	f.mu.Unlock()
	return f.RemoveNetwork(ctx, name)
}

// RemoveNetwork implements runtime.Runtime.
func (f *Fake) RemoveNetwork(ctx context.Context, name string) error {
	return f.do(ctx, "remove_network", name, func() error {
		if n := f.networks[name]; n != nil && n.users > 0 {
			return fmt.Errorf("network %s has containers: %w", name, errdefs.ErrFailedPrecondition)
		}
		delete(f.networks, name)
		return nil
	})
}
