package main

import (
	"cmp"
	"context"
	"io"
	"os"
	"slices"

	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const (
	dockerSocket     = "unix:///var/run/docker.sock"
	containerdSocket = "/run/containerd/containerd.sock"
)

// store is the images of one engine.
type store interface {
	Ping(ctx context.Context) error
	HasImage(ctx context.Context, ref string) (bool, error)
	ImportBusybox(ctx context.Context, ref string, changes ...string) error
	RemoveImage(ctx context.Context, ref string) error
}

// namespaced is a store in a namespace, which the first image makes.
type namespaced interface {
	HasNamespace(ctx context.Context) (bool, error)
	RemoveNamespace(ctx context.Context) error
}

// kind is a sort of engines.
type kind struct {
	name    string
	address string                     // where one usually is
	at      func(address string) store // the one at an address
	start   func(ctx context.Context, log io.Writer) (started, error)

	addressVar string   // the variable that tells commands the address
	alsoVars   []string // what else says how to reach one
}

// started is a private engine.
type started struct {
	store
	address string
	env     []string // what the command is told about it, besides the address
	close   func() error
}

var kinds = []kind{
	{
		name:       "docker",
		address:    dockerSocket,
		addressVar: "DOCKER_HOST",
		alsoVars:   []string{"DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_API_VERSION"},
		at:         func(address string) store { return dockerAt(address) },
		start: func(ctx context.Context, log io.Writer) (started, error) {
			d, err := engine.StartDocker(ctx, engine.Options{Log: log})
			if err != nil {
				return started{}, err
			}
			return started{store: dockerAt(d.Host()), address: d.Host(), close: d.Close}, nil
		},
	},
	{
		name:       "containerd",
		address:    containerdSocket,
		addressVar: "CONTAINERD_ADDRESS",
		at: func(address string) store {
			return engine.ContainerdStore{Address: address, Namespace: namespace()}
		},
		start: func(ctx context.Context, log io.Writer) (started, error) {
			c, err := engine.StartContainerd(ctx, engine.Options{Log: log})
			if err != nil {
				return started{}, err
			}
			return started{
				store:   engine.ContainerdStore{Address: c.Address(), Namespace: namespace()},
				address: c.Address(),
				env:     []string{"BERM_ENGINE_NETNS=" + c.Netns(), "BERM_ENGINE_CGROUP_PARENT=" + c.CgroupParent()},
				close:   c.Close,
			}, nil
		},
	},
}

// namespace of containerd that the command is to use.
func namespace() string {
	return cmp.Or(os.Getenv("BERM_ENGINE_NAMESPACE"), os.Getenv("CONTAINERD_NAMESPACE"), "berm")
}

func kindOf(name string) (kind, bool) {
	i := slices.IndexFunc(kinds, func(k kind) bool { return k.name == name })
	if i < 0 {
		return kind{}, false
	}
	return kinds[i], true
}

// dockerAt is the Docker Engine at a host.
type dockerAt string

func (d dockerAt) Ping(ctx context.Context) error { return engine.Ping(ctx, string(d)) }

func (d dockerAt) HasImage(ctx context.Context, ref string) (bool, error) {
	return engine.HasImage(ctx, string(d), ref)
}

func (d dockerAt) ImportBusybox(ctx context.Context, ref string, changes ...string) error {
	return engine.ImportBusybox(ctx, string(d), ref, changes...)
}

func (d dockerAt) RemoveImage(ctx context.Context, ref string) error {
	return engine.RemoveImage(ctx, string(d), ref)
}
