package containerd

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/images/archive"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/bermhq/berm/runtime"
)

// importedName is the repository of imported images that have no name. Without one
// the engine's collector would take them. No registry can have it: the domain is one
// that never resolves (RFC 2606).
const importedName = "berm.invalid/import"

// Import puts the images of a tar archive, which may be compressed with gzip, into
// the store and unpacks them. A name that is there already goes to the new image. An
// image without a name is found by its ID, and as "berm.invalid/import@" + its ID. A
// read of the archive that ctx's end overtakes goes on alone.
func (r *Runtime) Import(ctx context.Context, archive io.Reader) ([]runtime.Image, error) {
	source, stop := endWith(ctx, archive)
	defer stop()
	var out []runtime.Image
	err := r.withLease(ctx, fetchLease, func(ctx context.Context) error {
		found, err := r.readArchive(ctx, source)
		if err != nil {
			return source.blame(err)
		}
		out, err = r.keepImported(ctx, found)
		return err
	})
	if err != nil {
		if ctx.Err() != nil {
			err = runtime.Ended(ctx)
		}
		return nil, failure(ctx, "import images", err)
	}
	return out, nil
}

// imported is an image of an archive; its content is in the store, its name isn't.
type imported struct {
	*image
	name string
}

// readArchive brings an archive's content into the store and finds this platform's
// images in it, unpacked.
func (r *Runtime) readArchive(ctx context.Context, source io.Reader) ([]imported, error) {
	plain, err := decompress(source)
	if err != nil {
		return nil, err
	}
	ctx = quiet(ctx)
	store := importStore{r.client.ContentStore(), "berm-import-" + rand.Text() + "-"}
	index, err := archive.ImportIndex(ctx, store, plain)
	if err != nil {
		return nil, err
	}
	manifests, err := images.Children(ctx, documents{store}, index)
	if err != nil {
		return nil, err
	}
	var out []imported
	var elsewhere error
	for _, m := range manifests {
		if m.Platform != nil && !ownPlatform.Match(*m.Platform) {
			elsewhere = fmt.Errorf("%s is for %s", m.Digest, platforms.Format(*m.Platform))
			continue
		}
		img, err := r.describeImage(ctx, m)
		if errdefs.IsNotFound(err) {
			elsewhere = err
			continue
		}
		if err != nil {
			return nil, err
		}
		// From now on the collector sees what the image needs.
		children := images.FilterPlatforms(images.ChildrenHandler(documents{store}), ownPlatform)
		if err := images.Walk(ctx, images.SetChildrenLabels(store, children), m); err != nil {
			return nil, err
		}
		if img.name, err = importName(m); err != nil {
			return nil, err
		}
		out = append(out, imported{img, img.name})
	}
	if len(out) == 0 {
		return nil, errors.Join(errors.New("the archive has no image for this machine"), elsewhere)
	}
	return out, nil
}

// keepImported unpacks images and gives them their names, which makes them stay.
func (r *Runtime) keepImported(ctx context.Context, found []imported) ([]runtime.Image, error) {
	for _, img := range found {
		if err := r.checkLayers(ctx, img.image); errdefs.IsNotFound(err) {
			return nil, runtime.Invalid("the archive is incomplete: %w", err)
		}
		if err := r.unpack(ctx, img.image); err != nil {
			return nil, err
		}
	}
	var out []runtime.Image
	seen := map[string]bool{}
	for _, img := range found {
		if err := r.putImage(ctx, images.Image{Name: img.name, Target: img.target}); err != nil {
			return nil, fmt.Errorf("name image %s: %w", img.name, err)
		}
		if seen[img.ID] {
			continue
		}
		seen[img.ID] = true
		kept, err := r.Image(ctx, img.ID)
		if err != nil {
			return nil, err
		}
		out = append(out, kept)
	}
	return out, nil
}

// putImage makes an image's record, or changes what is there.
func (r *Runtime) putImage(ctx context.Context, img images.Image) error {
	service := r.client.ImageService()
	for {
		_, err := service.Create(ctx, img)
		if !errdefs.IsAlreadyExists(err) {
			return err
		}
		if _, err = service.Update(ctx, img, "target"); !errdefs.IsNotFound(err) { // else it went meanwhile
			return err
		}
	}
}

// importName is what an archive calls an image.
func importName(manifest ocispec.Descriptor) (string, error) {
	name := manifest.Annotations[images.AnnotationImageName]
	if ref := manifest.Annotations[ocispec.AnnotationRefName]; name == "" && strings.ContainsAny(ref, "/:@") {
		name = ref // else it is a tag, of nobody knows what
	}
	if name == "" {
		return importedName + "@" + manifest.Digest.String(), nil
	}
	named, err := reference.ParseDockerRef(name)
	if err != nil {
		return "", runtime.Invalid("image name %q: %w", name, err)
	}
	return named.String(), nil
}

func decompress(source io.Reader) (io.Reader, error) {
	buffered := bufio.NewReader(source)
	if magic, _ := buffered.Peek(2); !bytes.Equal(magic, []byte{0x1f, 0x8b}) {
		return buffered, nil // too short for an archive, too, which its reader says
	}
	return gzip.NewReader(buffered)
}

// importStore gives what is written names of its own: the importer's are the paths
// in the archive, and the engine would append to what another import left there.
type importStore struct {
	content.Store
	prefix string
}

func (s importStore) Writer(ctx context.Context, opts ...content.WriterOpt) (content.Writer, error) {
	var wanted content.WriterOpts
	for _, opt := range opts {
		if err := opt(&wanted); err != nil {
			return nil, err
		}
	}
	return s.Store.Writer(ctx, content.WithRef(s.prefix+digest.FromString(wanted.Ref).Encoded()), content.WithDescriptor(wanted.Desc))
}

// archiveSource is what an archive is read from. It ends with a context, though the
// reader behind it may not.
type archiveSource struct {
	*io.PipeReader
	failed chan error // what the reader behind it said, if it wasn't the end
}

func endWith(ctx context.Context, source io.Reader) (*archiveSource, func()) {
	pr, pw := io.Pipe()
	out := &archiveSource{pr, make(chan error, 1)}
	go func() {
		_, err := io.Copy(pw, source)
		if err != nil && !errors.Is(err, io.ErrClosedPipe) {
			out.failed <- err
		}
		_ = pw.CloseWithError(err) // never fails
	}()
	stop := context.AfterFunc(ctx, func() { _ = pw.CloseWithError(context.Cause(ctx)) })
	return out, func() { stop(); _ = pr.Close() }
}

// blame finds out whose fault a failed import is: the engine's and the source's
// errors stay what they are, and all others are the archive's.
func (s *archiveSource) blame(err error) error {
	select {
	case err := <-s.failed:
		return fmt.Errorf("read the archive: %w", err)
	default:
	}
	for _, engines := range []func(error) bool{errdefs.IsUnavailable, errdefs.IsUnknown, errdefs.IsInternal,
		errdefs.IsCanceled, errdefs.IsDeadlineExceeded, errdefs.IsResourceExhausted} {
		if engines(err) {
			return err
		}
	}
	return runtime.Invalid("%w", err)
}
