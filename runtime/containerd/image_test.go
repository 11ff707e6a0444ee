package containerd

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/google/go-cmp/cmp"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/containerd/image"
)

// imageRuntime is a Runtime with a namespace, and so a store of images, of the test's own.
func imageRuntime(t *testing.T, change func(*Options)) *Runtime {
	t.Helper()
	opts := testOptions(t, shared.Get(t))
	opts.Namespace, opts.Root = "images-"+strings.ToLower(rand.Text()), t.TempDir()
	if change != nil {
		change(&opts)
	}
	return newRuntimeWith(t, opts)
}

// madeImage is an image made by hand: gzipped layers, a configuration, a manifest.
type madeImage struct {
	platform ocispec.Platform // the zero value is this machine's
	config   ocispec.ImageConfig
	layers   [][]tar.Header // a file's content is its PAX record "content"

	blobs    map[digest.Digest][]byte
	tars     [][]byte // uncompressed, of the layers
	spec     []byte   // the configuration
	manifest ocispec.Descriptor
}

func file(name, content string) tar.Header {
	return tar.Header{Name: name, Mode: 0o644, Size: int64(len(content)), PAXRecords: map[string]string{"BERM.content": content}}
}

func link(name, target string) tar.Header {
	return tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target, Mode: 0o777}
}

func (img *madeImage) build(t *testing.T) *madeImage {
	t.Helper()
	img.blobs = map[digest.Digest][]byte{}
	put := func(mediaType string, blob []byte) ocispec.Descriptor {
		d := digest.FromBytes(blob)
		img.blobs[d] = blob
		return ocispec.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(blob))}
	}
	asJSON := func(v any) []byte {
		b, err := json.Marshal(v)
		must(t, err)
		return b
	}
	spec := ocispec.Image{Platform: img.platform, Config: img.config, RootFS: ocispec.RootFS{Type: "layers"}}
	if spec.OS == "" {
		spec.Platform = ocispec.Platform{OS: "linux", Architecture: "amd64"}
	}
	manifest := ocispec.Manifest{MediaType: ocispec.MediaTypeImageManifest}
	manifest.SchemaVersion = 2
	for _, entries := range img.layers {
		var plain, zipped bytes.Buffer
		w := tar.NewWriter(&plain)
		for _, h := range entries {
			content := h.PAXRecords["BERM.content"]
			h.PAXRecords = nil
			must(t, w.WriteHeader(&h))
			if _, err := io.WriteString(w, content); err != nil {
				t.Fatal(err)
			}
		}
		must(t, w.Close())
		z, err := gzip.NewWriterLevel(&zipped, gzip.BestSpeed)
		must(t, err)
		if _, err := z.Write(plain.Bytes()); err != nil {
			t.Fatal(err)
		}
		must(t, z.Close())
		img.tars = append(img.tars, plain.Bytes())
		spec.RootFS.DiffIDs = append(spec.RootFS.DiffIDs, digest.FromBytes(plain.Bytes()))
		manifest.Layers = append(manifest.Layers, put(ocispec.MediaTypeImageLayerGzip, zipped.Bytes()))
	}
	img.spec = asJSON(spec)
	manifest.Config = put(ocispec.MediaTypeImageConfig, img.spec)
	img.manifest = put(ocispec.MediaTypeImageManifest, asJSON(manifest))
	return img
}

// tarOf makes a tar file of files by their names.
func tarOf(t *testing.T, files map[string][]byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for name, content := range files {
		must(t, w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))}))
		if _, err := w.Write(content); err != nil {
			t.Fatal(err)
		}
	}
	must(t, w.Close())
	return b.Bytes()
}

// layout is an OCI archive of the image, with annotations.
func (img *madeImage) layout(t *testing.T, annotations map[string]string) []byte {
	t.Helper()
	m := img.manifest
	m.Annotations = annotations
	index, err := json.Marshal(map[string]any{"schemaVersion": 2, "manifests": []ocispec.Descriptor{m}})
	must(t, err)
	files := map[string][]byte{"oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`), "index.json": index}
	for d, blob := range img.blobs {
		files["blobs/sha256/"+d.Encoded()] = blob
	}
	return tarOf(t, files)
}

func named(name string) map[string]string { return map[string]string{images.AnnotationImageName: name} }

// mustImport puts the image of an archive into the store, not unpacked.
func (r *Runtime) mustImport(t *testing.T, archive []byte) images.Image {
	t.Helper()
	got, err := r.client.Import(r.namespaced(t.Context()), bytes.NewReader(archive))
	must(t, err)
	if len(got) != 1 {
		t.Fatalf("imported %+v", got)
	}
	return got[0]
}

// leftOver lists what the store holds that no image needs, once the engine's collector
// has been.
func (r *Runtime) leftOver(t *testing.T) (left []string) {
	t.Helper()
	ctx := r.namespaced(t.Context())
	held, err := r.client.LeasesService().List(ctx)
	must(t, err)
	for _, l := range held {
		left = append(left, "lease "+l.ID)
	}
	// The end of a lease that is synchronous waits for the collector.
	l, err := r.client.LeasesService().Create(ctx, leases.WithRandomID())
	must(t, err)
	must(t, r.client.LeasesService().Delete(ctx, l, leases.SynchronousDelete))
	found, err := r.client.ImageService().List(ctx)
	must(t, err)
	for _, img := range found {
		left = append(left, "image "+img.Name)
	}
	err = r.client.ContentStore().Walk(ctx, func(info content.Info) error {
		left = append(left, "content "+info.Digest.String())
		return nil
	})
	must(t, err)
	ingests, err := r.client.ContentStore().ListStatuses(ctx)
	must(t, err)
	for _, i := range ingests {
		left = append(left, "ingest "+i.Ref)
	}
	return append(left, r.snapshots(t)...)
}

func (r *Runtime) snapshots(t *testing.T) (left []string) {
	t.Helper()
	err := r.client.SnapshotService(r.opts.Snapshotter).Walk(r.namespaced(t.Context()), func(_ context.Context, info snapshots.Info) error {
		left = append(left, "snapshot "+info.Name)
		return nil
	})
	must(t, err)
	return left
}

func TestImage(t *testing.T) {
	r := imageRuntime(t, nil)
	ctx := t.Context()
	first := (&madeImage{
		config: ocispec.ImageConfig{Env: []string{"A=b"}, User: "65534", Entrypoint: []string{"sh"}, Cmd: []string{"-c", "true"}},
		layers: [][]tar.Header{{file("one", "1")}, {file("two", "2")}},
	}).build(t)
	second := (&madeImage{layers: [][]tar.Header{{file("three", "3")}}}).build(t)
	id := first.manifest.Digest.String()
	r.mustImport(t, first.layout(t, named("docker.io/library/tool:latest")))

	want := runtime.Image{ID: id, Env: []string{"A=b"}, Command: []string{"sh", "-c", "true"}, User: "65534"}
	for _, ref := range []string{id, "tool", "tool:latest", "docker.io/library/tool", "tool@" + id, "tool:any@" + id} {
		got, err := r.Image(ctx, ref)
		if err != nil {
			t.Errorf("%s: %v", ref, err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%s: %s", ref, d)
		}
		img, err := r.images.Unpacked(r.namespaced(ctx), ref)
		if err != nil || img.ChainID == "" || img.Config.User != "65534" {
			t.Errorf("%s: %+v, %v", ref, img, err)
		}
	}
	for ref, is := range map[string]func(error) bool{
		"":                                       errdefs.IsInvalidArgument,
		"NOT A REFERENCE":                        errdefs.IsInvalidArgument,
		"sha256:abc@":                            errdefs.IsInvalidArgument,
		strings.TrimPrefix(id, "sha256:"):        errdefs.IsInvalidArgument, // as Docker has it
		"tool:other":                             errdefs.IsNotFound,
		"other@" + id:                            errdefs.IsNotFound,
		"tool@" + digest.FromString("").String(): errdefs.IsNotFound,
		digest.FromString("").String():           errdefs.IsNotFound,
	} {
		if _, err := r.Image(ctx, ref); !is(err) {
			t.Errorf("%q: %v", ref, err)
		}
		if _, err := r.images.Unpacked(r.namespaced(ctx), ref); !is(err) {
			t.Errorf("create with %q: %v", ref, err)
		}
	}

	// What is remembered is no answer for what isn't there any more.
	r.mustImport(t, second.layout(t, named("docker.io/library/tool:latest")))
	if got, err := r.Image(ctx, "tool"); err != nil || got.ID != second.manifest.Digest.String() {
		t.Errorf("the name's new image: %+v, %v", got, err)
	}
	if _, err := r.images.Unpacked(r.namespaced(ctx), id); !errdefs.IsNotFound(err) {
		t.Errorf("the image that lost its name: %v", err)
	}
	must(t, r.client.ImageService().Delete(r.namespaced(ctx), "docker.io/library/tool:latest", images.SynchronousDelete()))
	for _, ref := range []string{"tool", second.manifest.Digest.String()} {
		if _, err := r.images.Unpacked(r.namespaced(ctx), ref); !errdefs.IsNotFound(err) {
			t.Errorf("%s, deleted: %v", ref, err)
		}
	}
	if left := r.leftOver(t); left != nil {
		t.Errorf("left over: %q", left)
	}
}

// Images that others brought may not be unpacked, or not be whole.
func TestImageUnpack(t *testing.T) {
	r := imageRuntime(t, nil)
	ctx := r.namespaced(t.Context())
	img := (&madeImage{layers: [][]tar.Header{{file("one", "1")}, {file("two", "2")}}}).build(t)
	r.mustImport(t, img.layout(t, named("docker.io/library/packed:latest")))
	if _, err := r.Image(t.Context(), "packed"); err != nil {
		t.Error(err)
	}
	if s := r.snapshots(t); s != nil {
		t.Errorf("to look made %q", s)
	}
	// A caller that gives up doesn't take the others' work along.
	hasty, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.images.Unpacked(r.namespaced(hasty), "packed"); !errors.Is(err, context.Canceled) {
		t.Errorf("a canceled caller: %v", err)
	}
	errs := make(chan error)
	for range 10 {
		go func() {
			_, err := r.images.Unpacked(r.namespaced(t.Context()), "packed")
			errs <- err
		}()
	}
	for range 10 {
		must(t, <-errs)
	}
	if s := r.snapshots(t); len(s) != 2 {
		t.Errorf("snapshots %q, want one for each layer", s)
	}
	if held, err := r.client.LeasesService().List(ctx); err != nil || len(held) > 0 {
		t.Errorf("leases %+v, %v", held, err)
	}

	// Now without its last layer, and without the snapshot of it.
	var manifest ocispec.Manifest
	must(t, json.Unmarshal(img.blobs[img.manifest.Digest], &manifest))
	found, err := r.images.Unpacked(r.namespaced(t.Context()), "packed")
	must(t, err)
	must(t, r.client.ContentStore().Delete(ctx, manifest.Layers[1].Digest))
	if _, err := r.images.Unpacked(r.namespaced(t.Context()), "packed"); err != nil {
		t.Errorf("without a layer that is unpacked: %v", err)
	}
	must(t, r.client.SnapshotService(r.opts.Snapshotter).Remove(ctx, found.ChainID))
	if _, err := r.images.Unpacked(r.namespaced(t.Context()), "packed"); !errdefs.IsNotFound(err) || !strings.Contains(err.Error(), manifest.Layers[1].Digest.String()) {
		t.Errorf("without a layer: %v", err)
	}
	if _, err := r.Image(t.Context(), "packed"); !errdefs.IsNotFound(err) {
		t.Errorf("a look at it: %v", err)
	}
}

// Images that can't be run here, or that lie.
func TestImageUnfit(t *testing.T) {
	r := imageRuntime(t, nil)
	ctx := r.namespaced(t.Context())
	layer := [][]tar.Header{{file("one", "1")}}
	cases := map[string]struct {
		change func(*madeImage)
		is     func(error) bool
	}{
		"fine":        {func(*madeImage) {}, func(err error) bool { return err == nil }},
		"no platform": {func(i *madeImage) { i.rewrite(`"architecture":"amd64","os":"linux"`, `"architecture":"","os":""`) }, func(err error) bool { return err == nil }},
		"arm64":       {func(i *madeImage) { i.rewrite(`"amd64"`, `"arm64"`) }, errdefs.IsNotFound},
		"386":         {func(i *madeImage) { i.rewrite(`"amd64"`, `"386"`) }, errdefs.IsNotFound},
		"windows":     {func(i *madeImage) { i.rewrite(`"linux"`, `"windows"`) }, errdefs.IsNotFound},
		"no diff id":  {func(i *madeImage) { i.rewrite(`"diff_ids":["sha256:`, `"diff_ids":["berm-`) }, errdefs.IsFailedPrecondition},
		"large": {func(i *madeImage) {
			i.rewrite(`"os":"linux"`, `"os":"linux","x":"`+strings.Repeat("x", 4<<20)+`"`)
		}, errdefs.IsFailedPrecondition},
	}
	for name, tc := range cases {
		t.Run(name, func(t *testing.T) {
			img := (&madeImage{layers: layer}).build(t)
			tc.change(img)
			ctx, done, err := r.client.WithLease(ctx)
			must(t, err)
			defer func() { _ = done(ctx) }()
			for d, blob := range img.blobs {
				desc := ocispec.Descriptor{Digest: d, Size: int64(len(blob))}
				must(t, content.WriteBlob(ctx, r.client.ContentStore(), "test-"+d.String(), bytes.NewReader(blob), desc))
			}
			if _, err := r.client.ImageService().Create(ctx, images.Image{Name: "docker.io/library/" + strings.ReplaceAll(name, " ", "-") + ":latest", Target: img.manifest}); err != nil {
				t.Fatal(err)
			}
			if _, err := r.images.Unpacked(r.namespaced(t.Context()), img.manifest.Digest.String()); !tc.is(err) {
				t.Error(err)
			}
			if _, err := r.Image(t.Context(), img.manifest.Digest.String()); !tc.is(err) {
				t.Errorf("a look at it: %v", err)
			}
		})
	}
}

// remake changes an image's manifest.
func (img *madeImage) remake(change func(*ocispec.Manifest)) {
	var m ocispec.Manifest
	if err := json.Unmarshal(img.blobs[img.manifest.Digest], &m); err != nil {
		panic(err)
	}
	delete(img.blobs, img.manifest.Digest)
	change(&m)
	blob, err := json.Marshal(m)
	if err != nil {
		panic(err)
	}
	img.manifest.Digest, img.manifest.Size = digest.FromBytes(blob), int64(len(blob))
	img.blobs[img.manifest.Digest] = blob
}

// rewrite changes an image's configuration, and the manifest with it.
func (img *madeImage) rewrite(from, to string) {
	if !bytes.Contains(img.spec, []byte(from)) {
		panic(fmt.Sprintf("no %s in %s", from, img.spec))
	}
	img.remake(func(m *ocispec.Manifest) {
		delete(img.blobs, m.Config.Digest)
		img.spec = bytes.Replace(img.spec, []byte(from), []byte(to), 1)
		m.Config.Digest, m.Config.Size = digest.FromBytes(img.spec), int64(len(img.spec))
		img.blobs[m.Config.Digest] = img.spec
	})
}

const (
	testPasswd = "root:x:0:0:root:/root:/bin/sh\ndev:x:1000:100:Dev:/home/dev:/bin/sh\n"
	testGroup  = "root:x:0:root\nusers:x:100:\nwheel:x:10:root,dev\naudio:x:29:dev\n"
)

func TestImageAccount(t *testing.T) {
	r := imageRuntime(t, nil)
	dir := tar.Header{Name: "etc/", Typeflag: tar.TypeDir, Mode: 0o755}
	many := [][]tar.Header{{dir, file("etc/passwd", testPasswd), file("etc/group", "")}}
	for i := range 60 { // more than fit into a mount's page by their full paths
		many = append(many, []tar.Header{file("file", fmt.Sprint(i))})
	}
	many = append(many, []tar.Header{dir, file("etc/group", testGroup)})
	two := [][]tar.Header{many[0], many[61]}
	whiteout := tar.Header{Name: "etc/.wh.passwd", Mode: 0o600}
	for _, tc := range []struct {
		name   string
		config string // the image's own user
		layers [][]tar.Header
		user   string
		want   *image.Account
	}{
		{"one layer", "", [][]tar.Header{{dir, file("etc/passwd", testPasswd), file("etc/group", testGroup)}}, "dev", &image.Account{UID: 1000, GID: 100, Groups: []uint32{100, 10, 29}}},
		{"many layers", "", many, "dev", &image.Account{UID: 1000, GID: 100, Groups: []uint32{100, 10, 29}}},
		{"image's own", "dev:wheel", two, "", &image.Account{UID: 1000, GID: 10, Groups: []uint32{10}}},
		{"not the image's own", "dev", two, "5:6", &image.Account{UID: 5, GID: 6, Groups: []uint32{6}}},
		{"root", "", two, "", &image.Account{UID: 0, GID: 0, Groups: []uint32{0, 10}}},
		{"link", "", [][]tar.Header{{dir, link("etc/passwd", "/usr/passwd")}, {file("usr/passwd", testPasswd)}}, "dev", &image.Account{UID: 1000, GID: 100, Groups: []uint32{100}}},
		{"link out", "", [][]tar.Header{{dir, link("etc/passwd", "../../../../../../../etc/passwd")}, {file("x", "x")}}, "root", nil},
		{"removed", "", [][]tar.Header{many[0], {whiteout}}, "dev", nil},
		{"no files", "", [][]tar.Header{{file("x", "x")}}, "", &image.Account{UID: 0, GID: 0, Groups: []uint32{0}}},
		{"no files, a name", "", [][]tar.Header{{file("x", "x")}}, "dev", nil},
		{"no layers", "", nil, "dev", nil},
		{"no layers, an id", "", nil, "1000", &image.Account{UID: 1000, GID: 0, Groups: []uint32{0}}},
		{"the image's own unknown", "nobody", [][]tar.Header{{file("x", "x")}}, "", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			made := (&madeImage{config: ocispec.ImageConfig{User: tc.config}, layers: tc.layers}).build(t)
			ref := "docker.io/library/" + strings.NewReplacer(" ", "-", ",", "", "'", "").Replace(tc.name) + ":1"
			r.mustImport(t, made.layout(t, named(ref)))
			img, err := r.images.Unpacked(r.namespaced(t.Context()), ref)
			must(t, err)
			before, snapshots := mounts(t, r.opts.Root), r.snapshots(t)
			for range 2 { // the second time from memory
				got, err := r.images.Account(t.Context(), img, tc.user)
				if tc.want == nil {
					if !errdefs.IsInvalidArgument(err) {
						t.Errorf("%+v, %v", got, err)
					}
					continue
				}
				must(t, err)
				if d := cmp.Diff(*tc.want, got); d != "" {
					t.Error(d)
				}
			}
			if d := cmp.Diff(before, mounts(t, r.opts.Root)); d != "" {
				t.Errorf("mounts: %s", d)
			}
			if d := cmp.Diff(snapshots, r.snapshots(t)); d != "" {
				t.Errorf("snapshots: %s", d)
			}
			if held, err := r.client.LeasesService().List(r.namespaced(t.Context())); err != nil || len(held) > 0 {
				t.Errorf("leases %+v, %v", held, err)
			}
		})
	}
	img, err := r.images.Unpacked(r.namespaced(t.Context()), "many-layers:1")
	must(t, err)
	again := newRuntimeWith(t, r.opts) // which remembers nothing
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := again.images.Account(canceled, img, "dev"); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

// mounts lists what is mounted beside a directory, and in it.
func mounts(t *testing.T, dir string) (out []string) {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mounts")
	must(t, err)
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, filepath.Dir(dir)) {
			out = append(out, line)
		}
	}
	return out
}
