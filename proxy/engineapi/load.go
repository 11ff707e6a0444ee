package engineapi

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path"
	"regexp"
	"slices"
	"time"

	"github.com/distribution/reference"
	image "github.com/moby/docker-image-spec/specs-go/v1"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
	"github.com/bermhq/berm/runtime"
)

const (
	maxLoads       = 2       // of a tenant at once
	maxLoaded      = 8 << 30 // bytes of an archive's layers, decompressed
	maxLoadedFiles = 8192    // of an archive
	maxLoadedLinks = 8       // that lead to one file
	maxImages      = 16      // of an archive
	maxLayers      = 127     // of an image
	maxImageFile   = 1 << 20 // bytes of a manifest or a configuration
)

var loadedID = regexp.MustCompile(`Loaded image ID: (sha256:[0-9a-f]{64})`)

// loadImages loads images from an archive in the format of docker save. The engine gets an archive that
// Berm writes: without names, and with the caller's labels in each configuration. The images get their
// names once they are verified.
func loadImages(c *call) error {
	if err := c.untilEnd(c.enter("loads of images", maxLoads)); err != nil {
		return err
	}
	return transferArchive(c, time.Now().Add(saveTime), func(_ context.CancelCauseFunc, r io.Reader) error {
		lease := c.spooled.Lease(c.caller.Tenant)
		defer lease.Release()
		a, err := keepArchive(c, r, lease)
		if err != nil {
			return err
		}
		defer func() { _ = a.file.Close() }()
		images, err := a.judge(c)
		if err != nil {
			return err
		}
		if err := c.untilEnd(c.room("images", int64(len(images)))); err != nil {
			return err
		}
		ids, err := sendArchive(c, a, images)
		if err != nil {
			return err
		}
		return finishLoad(c, ids, images)
	})
}

// imageArchive is an archive of images, in an unlinked file.
type imageArchive struct {
	file   *os.File
	files  map[string]*archivedFile
	links  map[string]string // targets, in the archive
	size   int64             // of the layers that were read, decompressed
	layers map[string]*archivedFile
}

// archivedFile is a regular file of an archive.
type archivedFile struct {
	at, size int64
	plain    int64  // bytes of a layer, decompressed
	digest   string // of a layer, decompressed: hex digits; empty until it was read
}

// manifestEntry is an image in an archive's manifest.
type manifestEntry struct {
	Config   string
	RepoTags []string `json:",omitempty"`
	Layers   []string
}

// loadedImage is a judged image of an archive.
type loadedImage struct {
	config []byte
	labels map[string]string
	layers []string // digests, as hex digits
	names  []reference.NamedTagged
}

// keepArchive writes an archive's regular files into a file.
func keepArchive(c *call, r io.Reader, lease *proxy.Lease) (*imageArchive, error) {
	a := &imageArchive{files: map[string]*archivedFile{}, links: map[string]string{}, layers: map[string]*archivedFile{}}
	var err error
	a.file, err = spoolTar(c, &spoolWriter{ctx: c.ctx, lease: lease}, r, maxLoaded, a.read)
	return a, err
}

func (a *imageArchive) read(from io.Reader, to *spoolWriter) error {
	tr := tar.NewReader(from)
	for n := 1; ; n++ {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return archiveError(err)
		}
		place, err := placeOf(h)
		if err != nil {
			return err
		}
		_, file := a.files[place]
		switch _, link := a.links[place]; {
		case len(place) > maxTarName || len(h.Linkname) > maxTarName:
			return proxy.Malformed(fmt.Sprintf("the archive has a name of more than %d bytes", maxTarName))
		case n > maxLoadedFiles:
			return proxy.Malformed(fmt.Sprintf("the archive has more than %d entries", maxLoadedFiles))
		case h.Typeflag == tar.TypeDir:
		case file || link:
			return proxy.Malformed(fmt.Sprintf("%q is in the archive twice", body.Shorten(place)))
		case h.Typeflag == tar.TypeLink:
			a.links[place] = path.Clean("/" + h.Linkname)[1:]
		case h.Typeflag == tar.TypeSymlink:
			a.links[place] = path.Clean("/" + path.Join(path.Dir(place), h.Linkname))[1:]
		default:
			at := to.size
			if _, err := io.Copy(struct{ io.Writer }{to}, tr); err != nil { // File.ReadFrom would bypass the lease
				return archiveError(err)
			}
			a.files[place] = &archivedFile{at: at, size: to.size - at}
		}
	}
}

// find returns a file by its name in the archive. It follows links.
func (a *imageArchive) find(name string) (*archivedFile, error) {
	place := path.Clean("/" + name)[1:]
	for range maxLoadedLinks {
		to, ok := a.links[place]
		if !ok {
			break
		}
		place = to
	}
	f := a.files[place]
	if f == nil {
		return nil, proxy.Malformed(fmt.Sprintf("the archive has no file %q: it must be as docker save writes it", body.Shorten(name)))
	}
	return f, nil
}

func (a *imageArchive) open(f *archivedFile) io.Reader {
	return io.NewSectionReader(a.file, f.at, f.size)
}

// decode reads a file of JSON.
func (a *imageArchive) decode(name string, into any) error {
	f, err := a.find(name)
	if err != nil {
		return err
	}
	if f.size > maxImageFile {
		return proxy.Malformed(fmt.Sprintf("%q of the archive is larger than %d bytes", body.Shorten(name), maxImageFile))
	}
	if err := json.NewDecoder(a.open(f)).Decode(into); err != nil {
		return proxy.Malformed(fmt.Sprintf("%q of the archive can't be read as JSON", body.Shorten(name)))
	}
	return nil
}

// judge returns the images of the archive with their judged configurations and names.
func (a *imageArchive) judge(c *call) ([]*loadedImage, error) {
	var manifest []manifestEntry
	if err := a.decode("manifest.json", &manifest); err != nil {
		return nil, err
	}
	if len(manifest) == 0 || len(manifest) > maxImages {
		return nil, proxy.Malformed(fmt.Sprintf("the archive must have 1 to %d images", maxImages))
	}
	var images []*loadedImage
	for _, m := range manifest {
		if len(m.Layers) > maxLayers || len(m.RepoTags) > maxBuildTags {
			return nil, proxy.Malformed(fmt.Sprintf("an image of the archive has more than %d layers or %d names", maxLayers, maxBuildTags))
		}
		img := &loadedImage{}
		for _, ref := range m.RepoTags {
			name, err := judgedName(c, c.rules.LoadRef, ref)
			if err != nil {
				return nil, err
			}
			img.names = append(img.names, name)
		}
		for _, name := range m.Layers {
			digest, err := a.layer(name)
			if err != nil {
				return nil, err
			}
			img.layers = append(img.layers, digest)
		}
		if err := a.configure(c, img, m.Config); err != nil {
			return nil, err
		}
		images = append(images, img)
	}
	return images, nil
}

// layer reads a whole layer, and returns its digest. The engine ignores the content of a layer that it
// has already: with only a digest, a caller could get another's layer.
func (a *imageArchive) layer(name string) (digest string, err error) {
	f, err := a.find(name)
	if err != nil {
		return "", err
	}
	if f.digest != "" {
		return f.digest, nil
	}
	r, err := openTar(a.open(f), maxLoaded-a.size)
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	if f.plain, err = io.Copy(sum, r); err != nil {
		return "", err
	}
	if a.size += f.plain; a.size > maxLoaded {
		return "", tooLarge(maxLoaded)
	}
	f.digest = hex.EncodeToString(sum.Sum(nil))
	a.layers[f.digest] = f
	return f.digest, nil
}

// configure encodes an image's configuration anew, with the labels of an image of the caller's.
func (a *imageArchive) configure(c *call, img *loadedImage, name string) error {
	var config image.DockerOCIImage
	if err := a.decode(name, &config); err != nil {
		return err
	}
	ids := config.RootFS.DiffIDs
	switch {
	case config.OS != "linux":
		return proxy.Malformed("an image of the archive isn't for linux")
	case len(ids) != len(img.layers):
		return proxy.Malformed("an image of the archive has other layers than its configuration")
	case runtime.KernelPath(path.Clean("/" + config.Config.WorkingDir)):
		return denied("images.load", "WorkingDir", "an image's working directory is in a file system of the kernel", "another working directory")
	}
	for i, digest := range img.layers {
		if string(ids[i]) != "sha256:"+digest {
			return denied("images.load", "", fmt.Sprintf("layer %d of an image isn't the one that its configuration names", i), "layers with these digests")
		}
	}
	maps.DeleteFunc(config.Config.Labels, func(name, _ string) bool { return lifecycle.IsOwnLabel(name) })
	var err error
	if img.labels, err = stampLabels(c, lifecycle.ObjectImage, config.Config.Labels); err != nil {
		return err
	}
	config.Config.Labels, config.RootFS.Type = img.labels, "layers"
	img.config, err = json.Marshal(config)
	return err
}

// write writes the archive that the engine gets.
func (a *imageArchive) write(to io.Writer, images []*loadedImage) error {
	var manifest []manifestEntry
	tw := tar.NewWriter(to)
	add := func(name string, size int64, from io.Reader) error {
		if err := tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: name, Size: size, Mode: 0o644}); err != nil {
			return err
		}
		_, err := io.Copy(tw, from)
		return err
	}
	for _, digest := range slices.Sorted(maps.Keys(a.layers)) {
		f := a.layers[digest]
		r, err := inflate(a.open(f), f.plain)
		if err != nil {
			return err
		}
		if err := add(digest+"/layer.tar", f.plain, r); err != nil {
			return err
		}
	}
	for _, img := range images {
		sum := sha256.Sum256(img.config)
		e := manifestEntry{Config: hex.EncodeToString(sum[:]) + ".json", Layers: []string{}}
		for _, digest := range img.layers {
			e.Layers = append(e.Layers, digest+"/layer.tar")
		}
		if err := add(e.Config, int64(len(img.config)), bytes.NewReader(img.config)); err != nil {
			return err
		}
		manifest = append(manifest, e)
	}
	text, err := json.Marshal(manifest)
	if err != nil {
		return err
	}
	return errors.Join(add("manifest.json", int64(len(text)), bytes.NewReader(text)), tw.Close())
}

// sendArchive makes the engine load the images, and returns the IDs that it reports.
func sendArchive(c *call, a *imageArchive, images []*loadedImage) (ids []string, err error) {
	r, w := io.Pipe()
	defer func() { _ = r.Close() }()
	go func() { _ = w.CloseWithError(a.write(w, images)) }()
	ask := upstream.Ask{Path: "/images/load", Query: url.Values{"quiet": {"1"}}, Header: http.Header{"Content-Type": {"application/x-tar"}}, Body: r, Length: -1}
	err = eachMessage(c, ask, http.StatusInternalServerError, func(m buildMessage) {
		for _, found := range loadedID.FindAllStringSubmatch(m.Stream, -1) {
			ids = append(ids, found[1])
		}
	})
	return ids, err
}

// finishLoad verifies the loaded images, gives them their names, and answers the caller.
func finishLoad(c *call, ids []string, images []*loadedImage) error {
	if len(ids) != len(images) {
		return fmt.Errorf("load images: the engine told of %d, not of %d", len(ids), len(images))
	}
	var told []buildMessage
	for _, id := range ids {
		c.about(id)
		img, err := lookUpImage(c, id)
		if err != nil {
			return err
		}
		i := -1
		if img != nil {
			i = slices.IndexFunc(images, func(l *loadedImage) bool { return maps.Equal(l.labels, img.Config.Labels) })
		}
		if i < 0 {
			return denied("verify.load", "", "an image lacks the labels that it was loaded with", "none")
		}
		err = nameVerified(c, img, "verify.load", images[i].labels, images[i].names, func(name string) {
			told = append(told, buildMessage{Stream: "Loaded image: " + name + "\n"})
		})
		if err != nil {
			return err
		}
		if len(images[i].names) == 0 {
			told = append(told, buildMessage{Stream: "Loaded image ID: " + id + "\n"})
		}
	}
	c.w.Header().Set("Content-Type", "application/json")
	c.w.Header().Set("Api-Version", c.version.String())
	for _, m := range told {
		c.tell(m)
	}
	return nil
}
