package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

// RegistryOptions say how to start a registry. The zero value will do.
type RegistryOptions struct {
	// Netns is the path of the network namespace that has the loopback to listen
	// on: that of a Docker Engine that is to pull. Empty is this process's.
	Netns string
	// User and Password are asked for, unless User is empty.
	User, Password string
}

// Registry is a registry of images on loopback, without TLS, that keeps all in memory.
type Registry struct {
	host   string
	store  http.Handler // without the question for a password
	server *http.Server
	served chan error
}

// StartRegistry starts an empty registry. The caller closes it.
func StartRegistry(ctx context.Context, opts RegistryOptions) (*Registry, error) {
	var listener net.Listener
	err := inNetns(opts.Netns, func() error {
		var err error
		listener, err = new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("start a registry: %w", err)
	}
	silent := log.New(io.Discard, "", 0)
	r := &Registry{
		host:   listener.Addr().String(),
		store:  new(RegistryStore),
		served: make(chan error, 1),
	}
	r.server = &http.Server{Handler: opts.guard(r.store), ErrorLog: silent, ReadHeaderTimeout: 10 * time.Second}
	go func() { r.served <- r.server.Serve(listener) }()
	return r, nil
}

func (o RegistryOptions) guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if user, password, _ := req.BasicAuth(); o.User == "" || user == o.User && password == o.Password {
			next.ServeHTTP(w, req)
			return
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
		registryError(w, http.StatusUnauthorized, "UNAUTHORIZED", "authentication required")
	})
}

// Host is the registry's name in references: an address and a port.
func (r *Registry) Host() string { return r.host }

// Push puts the image of Docker.ImportBusybox into the registry, as name: "repo:tag".
// No password is needed.
func (r *Registry) Push(ctx context.Context, name string, changes ...string) error {
	repo, tag, ok := strings.Cut(name, ":")
	if !ok {
		return fmt.Errorf("push %q: it has no tag: %w", name, errdefs.ErrInvalidArgument)
	}
	img, err := newBusyboxImage(ctx, changes)
	if err != nil {
		return fmt.Errorf("build image %s: %w", name, err)
	}
	for _, b := range []blob{img.layer, img.config} {
		if err := r.put(ctx, http.MethodPost, "/v2/"+repo+"/blobs/uploads/?digest="+b.Digest.String(), b); err != nil {
			return fmt.Errorf("push %s: %w", name, err)
		}
	}
	if err := r.put(ctx, http.MethodPut, "/v2/"+repo+"/manifests/"+tag, img.manifest); err != nil {
		return fmt.Errorf("push %s: %w", name, err)
	}
	return nil
}

// put asks the store itself, as the network may be another one.
func (r *Registry) put(ctx context.Context, method, path string, b blob) error {
	req := httptest.NewRequestWithContext(ctx, method, path, bytes.NewReader(b.content))
	req.Header.Set("Content-Type", b.MediaType)
	reply := httptest.NewRecorder()
	r.store.ServeHTTP(reply, req)
	if reply.Code != http.StatusCreated {
		return fmt.Errorf("%s %s: status %d: %s", method, path, reply.Code, bytes.TrimSpace(reply.Body.Bytes()))
	}
	return nil
}

// Close ends the registry, with whatever is being pulled.
func (r *Registry) Close() error {
	err := r.server.Close()
	if served := <-r.served; !errors.Is(served, http.ErrServerClosed) {
		err = errors.Join(err, served)
	}
	return err
}
