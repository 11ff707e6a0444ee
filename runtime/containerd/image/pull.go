package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/config"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/distribution/reference"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/sirupsen/logrus"

	"github.com/bermhq/berm/runtime"
)

const (
	// hostsDir may configure registries' addresses and trusted certificates, as for containerd's other
	// clients.
	hostsDir = "/etc/containerd/certs.d"
	// fetchLease is how long the engine keeps the parts of a pull if this process ends
	// meanwhile.
	fetchLease = 24 * time.Hour
	// maxDownloads bounds a pull's concurrent downloads of layers, as Docker does.
	maxDownloads = 3
)

// Pull brings an image from its registry and unpacks it. It may take as long as ctx
// does. Registries on loopback may speak plain HTTP.
func (s *Store) Pull(ctx context.Context, ref string, progress func(runtime.PullProgress)) error {
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return runtime.Invalid("%w", err)
	}
	follower := newFollower(progress, "Pulling from "+reference.FamiliarName(named))
	err = s.opts.Lease(ctx, fetchLease, func(ctx context.Context) error { return s.pull(ctx, named, follower) })
	follower.end(err == nil)
	if err != nil {
		return pullFailure(ctx, err)
	}
	return nil
}

func (s *Store) pull(ctx context.Context, named reference.Named, follower *follower) error {
	resolver, done, err := s.resolver(ctx, follower)
	if err != nil {
		return err
	}
	defer done()
	_, err = s.opts.Client.Pull(quiet(ctx), named.String(),
		client.WithResolver(resolver),
		client.WithPlatformMatcher(ownPlatform),
		client.WithPullUnpack,
		client.WithPullSnapshotter(s.opts.Snapshotter),
		client.WithMaxConcurrentDownloads(maxDownloads),
		client.WithImageHandlerWrapper(func(next images.Handler) images.Handler { return s.pullHandler(next, follower) }))
	return err
}

// quiet keeps the engine's libraries from logging to standard error. Their errors say what
// matters.
func quiet(ctx context.Context) context.Context {
	logger := logrus.New()
	logger.SetOutput(io.Discard)
	return log.WithLogger(ctx, logrus.NewEntry(logger))
}

// pullHandler refuses images for other platforms before it downloads their layers, and
// documents that are too large.
func (s *Store) pullHandler(next images.Handler, follower *follower) images.Handler {
	return images.HandlerFunc(func(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		isDocument := images.IsManifestType(desc.MediaType) || images.IsIndexType(desc.MediaType) || images.IsConfigType(desc.MediaType)
		if isDocument && desc.Size > maxDocument {
			return nil, fmt.Errorf("%s has %d bytes, more than %d", desc.Digest, desc.Size, maxDocument)
		}
		// The image's author chose these URLs, and this host would send the requests.
		desc.URLs = nil
		children, err := next.Handle(ctx, desc)
		if err != nil {
			return nil, err
		}
		switch {
		case images.IsConfigType(desc.MediaType):
			_, err := s.readConfig(ctx, desc)
			return children, err
		case images.IsManifestType(desc.MediaType):
			if !slices.ContainsFunc(children, func(d ocispec.Descriptor) bool { return images.IsConfigType(d.MediaType) }) {
				return nil, fmt.Errorf("%s isn't an image: %w", desc.Digest, errdefs.ErrNotFound)
			}
			for _, child := range children {
				if images.IsLayerType(child.MediaType) {
					_, err := s.opts.Client.ContentStore().Info(ctx, child.Digest)
					follower.layer(child, err == nil)
				}
			}
		case images.IsLayerType(desc.MediaType):
			follower.layer(desc, true)
		}
		return children, nil
	})
}

// pullFailure puts an error of a pull into its class. A registry's error is NotFound if it
// doesn't have the image or refuses it, and otherwise unknown.
func pullFailure(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return runtime.Ended(ctx)
	}
	if registry, ok := errors.AsType[*registryError](err); ok {
		return runtime.WithClass(registry.class, err)
	}
	if errdefs.IsNotFound(err) || errdefs.IsUnavailable(err) {
		return runtime.Classify(ctx, err)
	}
	return runtime.WithClass(errdefs.ErrUnknown, err)
}

// registryError is an error of a registry, as opposed to the engine. Its text has no query of
// a URL, which may carry a signature.
type registryError struct {
	class error
	text  string
}

func (e *registryError) Error() string { return e.text }

func registryFailure(err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return err
	}
	out := &registryError{class: errdefs.ErrUnknown, text: err.Error()}
	if status, ok := errors.AsType[remoteerrors.ErrUnexpectedStatus](err); ok {
		out.text = fmt.Sprintf("%s %s: %s", status.RequestMethod, withoutQuery(status.RequestURL), status.Status)
		switch status.StatusCode {
		case http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound:
			out.class = errdefs.ErrNotFound
		}
	} else if request, ok := errors.AsType[*url.Error](err); ok {
		out.text = fmt.Sprintf("%s %s: %v", request.Op, withoutQuery(request.URL), request.Err)
	}
	if errdefs.IsNotFound(err) || errors.Is(err, docker.ErrInvalidAuthorization) {
		out.class = errdefs.ErrNotFound
	}
	return out
}

func withoutQuery(raw string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return "an address that can't be parsed"
	}
	return (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path}).String()
}

// resolver talks to registries for one pull, until done is called.
func (s *Store) resolver(ctx context.Context, follower *follower) (out *registryResolver, done func(), err error) {
	var mu sync.Mutex
	var transports []*http.Transport
	options := config.HostOptions{
		HostDir: config.HostDirFromRoot(hostsDir),
		UpdateClient: func(c *http.Client) error {
			mu.Lock()
			defer mu.Unlock()
			if t, ok := c.Transport.(*http.Transport); ok {
				transports = append(transports, t)
			}
			return nil
		},
	}
	if s.opts.RegistryAuth != nil {
		options.Credentials = func(host string) (string, string, error) {
			user, secret, err := s.opts.RegistryAuth(ctx, host)
			if err != nil {
				err = fmt.Errorf("registry credentials: %w", err)
			}
			return user, secret, err
		}
	}
	inner, ok := docker.NewResolver(docker.ResolverOptions{Hosts: config.ConfigureHosts(quiet(ctx), options)}).(remotes.ResolverWithOptions)
	if !ok {
		return nil, nil, errors.New("the resolver takes no options")
	}
	return &registryResolver{inner, follower}, func() {
		mu.Lock()
		defer mu.Unlock()
		for _, t := range transports {
			t.CloseIdleConnections()
		}
	}, nil
}

// registryResolver marks the errors of registries, and counts what they send.
type registryResolver struct {
	remotes.ResolverWithOptions
	follower *follower
}

func (r *registryResolver) Resolve(ctx context.Context, ref string) (string, ocispec.Descriptor, error) {
	name, desc, err := r.ResolverWithOptions.Resolve(ctx, ref)
	return name, desc, registryFailure(err)
}

func (r *registryResolver) Fetcher(ctx context.Context, ref string) (remotes.Fetcher, error) {
	fetcher, err := r.ResolverWithOptions.Fetcher(ctx, ref)
	if err != nil {
		return nil, registryFailure(err)
	}
	return remotes.FetcherFunc(func(ctx context.Context, desc ocispec.Descriptor) (io.ReadCloser, error) {
		body, err := fetcher.Fetch(ctx, desc)
		if err != nil {
			return nil, registryFailure(err)
		}
		out := &registryBody{body: body, desc: desc}
		if images.IsLayerType(desc.MediaType) {
			out.follower = r.follower
		}
		return out, nil
	}), nil
}

// registryBody is the download of one blob.
type registryBody struct {
	body     io.ReadCloser
	desc     ocispec.Descriptor
	follower *follower // nil if it isn't a layer
	offset   int64
}

func (b *registryBody) Read(p []byte) (int, error) {
	n, err := b.body.Read(p)
	b.offset += int64(n)
	if b.follower != nil {
		b.follower.reached(b.desc, b.offset)
	}
	return n, registryFailure(err)
}

// Seek lets a download resume where an earlier one ended.
func (b *registryBody) Seek(offset int64, whence int) (int64, error) {
	seeker, ok := b.body.(io.Seeker)
	if !ok {
		return 0, errors.New("this download can't be taken up again")
	}
	n, err := seeker.Seek(offset, whence)
	b.offset = n
	return n, registryFailure(err)
}

func (b *registryBody) Close() error { return b.body.Close() }
