// Package image finds, pulls, unpacks and reads images in containerd's store.
package image

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/labels"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/singleflight"

	"github.com/bermhq/berm/runtime"
)

const (
	// maxDocument bounds an image's manifests and configuration, which are read into memory. The
	// resolver holds registries to the same bound.
	maxDocument = 4 << 20
	// unpackTimeout bounds the unpacking of an image, which goes on when its callers leave.
	// unpackLease is how long the engine keeps the parts if this process ends meanwhile.
	unpackTimeout = 30 * time.Minute
	unpackLease   = time.Hour
)

// Options of New. All are mandatory, but for RegistryAuth.
type Options struct {
	Client      *client.Client
	Snapshotter string
	// Root is a directory. Images are mounted over it, in the reading thread's mount
	// namespace only.
	Root string
	// Lease runs f with a lease that keeps all that f makes from the engine's collector.
	Lease func(ctx context.Context, expiry time.Duration, f func(context.Context) error) error
	// RegistryAuth returns the credentials for a registry by its host name and port;
	// an empty user with a secret is an identity token. Nil, and empty strings, send none.
	RegistryAuth func(ctx context.Context, host string) (user, secret string, err error)
	Logger       *slog.Logger
}

// Store is the engine's store of images. It may be used by many goroutines at once. Its
// methods leave the class of the engine's errors to the caller, but for Pull.
//
// It caches what it read from an image's content, which never changes. Each call still asks the
// engine whether the image exists.
type Store struct {
	opts     Options
	images   runtime.Cache[digest.Digest, *Image]
	accounts runtime.Cache[string, *accountFiles] // by chain ID
	dirs     runtime.Cache[string, []string]      // directories that images lack: see MissingDirs
	flights  singleflight.Group
}

// New makes a Store. It doesn't talk to the engine.
func New(opts Options) *Store { return &Store{opts: opts} }

// Image describes an image in the store.
type Image struct {
	runtime.Image                     // ID is the digest of the name's target; without Digests
	Config        ocispec.ImageConfig // of this machine's platform
	ChainID       string              // key of the snapshot of all layers; empty without layers

	name   string // one of its names in the store
	target ocispec.Descriptor
	layers []ocispec.Descriptor
}

// ownPlatform matches this machine's platform. Unlike platforms.Default, it doesn't match the
// 32-bit architecture: the seccomp profile refuses all system calls of its programs.
var ownPlatform platforms.MatchComparer = ownArchitecture{platforms.Default()}

type ownArchitecture struct{ platforms.MatchComparer }

func (m ownArchitecture) Match(p ocispec.Platform) bool {
	return platforms.Normalize(p).Architecture == platforms.DefaultSpec().Architecture && m.MatchComparer.Match(p)
}

// Find finds an image by ID or reference. NotFound unless the store has all of it.
func (s *Store) Find(ctx context.Context, ref string) (runtime.Image, error) {
	img, err := s.findImage(ctx, ref)
	if err != nil {
		return runtime.Image{}, err
	}
	unpacked, err := s.isUnpacked(ctx, img)
	if err == nil && !unpacked {
		err = s.checkLayers(ctx, img)
	}
	if err != nil {
		return runtime.Image{}, err
	}
	out := img.Image
	out.Digests, err = s.repoDigests(ctx, img.target.Digest)
	return out, err
}

// Unpacked finds an image by ID or reference, and unpacks it if necessary.
func (s *Store) Unpacked(ctx context.Context, ref string) (*Image, error) {
	img, err := s.findImage(ctx, ref)
	if err == nil {
		err = s.unpack(ctx, img)
	}
	if err != nil {
		return nil, fmt.Errorf("look up image %q: %w", ref, err)
	}
	return img, nil
}

// findImage finds an image in the store and reads its configuration.
func (s *Store) findImage(ctx context.Context, ref string) (*Image, error) {
	found, err := s.lookUp(ctx, ref)
	if err != nil {
		return nil, err
	}
	img, ok := s.images.Get(found.Target.Digest)
	if !ok {
		if img, err = s.describeImage(ctx, found.Target); err != nil {
			return nil, fmt.Errorf("for this machine (%s): %w", platforms.Format(platforms.DefaultSpec()), err)
		}
	}
	if img.name != found.Name {
		img = new(*img) // the cached one is shared
		img.name = found.Name
	}
	return img, nil
}

// lookUp finds an image's record by ID or reference, mostly in one call.
func (s *Store) lookUp(ctx context.Context, ref string) (images.Image, error) {
	if id := digest.Digest(ref); id.Validate() == nil {
		if known, ok := s.images.Get(id); ok {
			found, err := s.opts.Client.ImageService().Get(ctx, known.name)
			if err == nil && found.Target.Digest == id {
				return found, nil
			}
			if err != nil && !errdefs.IsNotFound(err) {
				return images.Image{}, err
			}
		}
		return s.lookUpTarget(ctx, id, "")
	}
	named, err := reference.ParseDockerRef(ref)
	if err != nil {
		return images.Image{}, runtime.Invalid("%w", err)
	}
	found, err := s.opts.Client.ImageService().Get(ctx, named.String())
	if digested, ok := named.(reference.Digested); ok && errdefs.IsNotFound(err) {
		// An image that was pulled by tag has its digest as well.
		return s.lookUpTarget(ctx, digested.Digest(), named.Name())
	}
	return found, err
}

// lookUpTarget finds an image by its target's digest, in a repository; "" is any.
func (s *Store) lookUpTarget(ctx context.Context, target digest.Digest, repository string) (images.Image, error) {
	found, err := s.opts.Client.ImageService().List(ctx, targetFilter(target))
	if err != nil {
		return images.Image{}, err
	}
	for _, img := range found {
		if repository == "" {
			return img, nil
		}
		if named, err := reference.ParseNormalizedNamed(img.Name); err == nil && named.Name() == repository {
			return img, nil
		}
	}
	return images.Image{}, fmt.Errorf("no image has this digest: %w", errdefs.ErrNotFound)
}

// describeImage reads the image behind a target for this machine's platform. NotFound if a
// part is missing in the store, so that the caller pulls the image again.
func (s *Store) describeImage(ctx context.Context, target ocispec.Descriptor) (*Image, error) {
	manifest, err := images.Manifest(ctx, documents{s.opts.Client.ContentStore()}, target, ownPlatform)
	if err != nil {
		return nil, err
	}
	if !images.IsConfigType(manifest.Config.MediaType) {
		return nil, fmt.Errorf("%s isn't an image but %q: %w", target.Digest, manifest.Config.MediaType, errdefs.ErrNotFound)
	}
	spec, err := s.readConfig(ctx, manifest.Config)
	if err != nil {
		return nil, err
	}
	img := &Image{
		Image: runtime.Image{
			ID: target.Digest.String(), Env: spec.Config.Env, User: spec.Config.User,
			Command: slices.Concat(spec.Config.Entrypoint, spec.Config.Cmd),
		},
		Config: spec.Config, ChainID: identity.ChainID(spec.RootFS.DiffIDs).String(),
		target: target,
	}
	for _, l := range manifest.Layers {
		if images.IsLayerType(l.MediaType) {
			img.layers = append(img.layers, l)
		}
	}
	s.images.Put(target.Digest, img, manifest.Config.Size)
	return img, nil
}

// readConfig reads an image's configuration. It refuses one for another platform, and one
// that is malformed.
func (s *Store) readConfig(ctx context.Context, desc ocispec.Descriptor) (ocispec.Image, error) {
	var spec ocispec.Image
	blob, err := content.ReadBlob(ctx, documents{s.opts.Client.ContentStore()}, desc)
	if err != nil {
		return spec, fmt.Errorf("its configuration: %w", err)
	}
	if int64(len(blob)) != desc.Size {
		return spec, runtime.Precondition("its configuration has %d bytes instead of %d", len(blob), desc.Size)
	}
	if err := json.Unmarshal(blob, &spec); err != nil {
		return spec, runtime.Precondition("its configuration: %w", err)
	}
	// A manifest outside an index was chosen by name, not by platform. Old images name no
	// platform.
	if (spec.OS != "" || spec.Architecture != "") && !ownPlatform.Match(spec.Platform) {
		return spec, fmt.Errorf("the image is for %s: %w", platforms.Format(spec.Platform), errdefs.ErrNotFound)
	}
	for _, id := range spec.RootFS.DiffIDs {
		// The ID of a single layer is used as the key of a snapshot, so it must be a digest.
		if err := id.Validate(); err != nil {
			return spec, runtime.Precondition("layer %q: %w", id, err)
		}
	}
	return spec, nil
}

// documents reads small blobs only.
type documents struct{ content.Provider }

func (d documents) ReaderAt(ctx context.Context, desc ocispec.Descriptor) (content.ReaderAt, error) {
	ra, err := d.Provider.ReaderAt(ctx, desc)
	if err != nil {
		return nil, err
	}
	if ra.Size() > maxDocument {
		_ = ra.Close()
		return nil, runtime.Precondition("%s has %d bytes, more than %d", desc.Digest, ra.Size(), maxDocument)
	}
	return ra, nil
}

// isUnpacked reports whether the snapshot of an image's layers exists.
func (s *Store) isUnpacked(ctx context.Context, img *Image) (bool, error) {
	if img.ChainID == "" {
		return true, nil
	}
	info, err := s.opts.Client.SnapshotService(s.opts.Snapshotter).Stat(ctx, img.ChainID)
	if errdefs.IsNotFound(err) {
		return false, nil
	}
	return err == nil && info.Kind == snapshots.KindCommitted, err
}

// checkLayers fails with NotFound when a layer isn't in the store.
func (s *Store) checkLayers(ctx context.Context, img *Image) error {
	for _, l := range img.layers {
		if _, err := s.opts.Client.ContentStore().Info(ctx, l.Digest); err != nil {
			return fmt.Errorf("layer %s: %w", l.Digest, err)
		}
	}
	return nil
}

// unpack makes the snapshot of an image's layers, unless it exists.
func (s *Store) unpack(ctx context.Context, img *Image) error {
	if unpacked, err := s.isUnpacked(ctx, img); err != nil || unpacked {
		return err
	}
	_, err := runtime.Together(ctx, &s.flights, "unpack "+img.ChainID, unpackTimeout, func(ctx context.Context) (struct{}, error) {
		return struct{}{}, s.opts.Lease(ctx, unpackLease, func(ctx context.Context) error {
			if err := s.checkLayers(ctx, img); err != nil {
				return err
			}
			record := images.Image{Name: img.name, Target: img.target}
			return client.NewImageWithPlatform(s.opts.Client, record, ownPlatform).Unpack(ctx, s.opts.Snapshotter)
		})
	})
	if err != nil {
		return fmt.Errorf("unpack: %w", err)
	}
	return nil
}

// repoDigests returns the names by which a target was pulled, with its digest, in the form that
// users write them.
func (s *Store) repoDigests(ctx context.Context, target digest.Digest) ([]string, error) {
	info, err := s.opts.Client.ContentStore().Info(ctx, target)
	if errdefs.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	// The labels say where content came from, but without the registry's port, which the
	// images' names have.
	sources := map[string]bool{}
	for key, repositories := range info.Labels {
		if host, ok := strings.CutPrefix(key, labels.LabelDistributionSource+"."); ok {
			for repository := range strings.SplitSeq(repositories, ",") {
				sources[host+"/"+repository] = true
			}
		}
	}
	if len(sources) == 0 {
		return nil, nil
	}
	found, err := s.opts.Client.ImageService().List(ctx, targetFilter(target))
	if err != nil {
		return nil, err
	}
	var out []string
	for _, img := range found {
		named, err := reference.ParseNormalizedNamed(img.Name)
		if err != nil { // not Berm's
			continue
		}
		host := (&url.URL{Host: reference.Domain(named)}).Hostname()
		if sources[host+"/"+reference.Path(named)] {
			out = append(out, reference.FamiliarName(named)+"@"+target.String())
		}
	}
	slices.Sort(out)
	return slices.Compact(out), nil
}

func targetFilter(target digest.Digest) string {
	return fmt.Sprintf("target.digest==%q", target.String())
}
