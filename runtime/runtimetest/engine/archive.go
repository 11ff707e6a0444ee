package engine

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// busyboxArchive is the image of Docker.ImportBusybox as an OCI archive with the name
// ref in it, the same each time.
func busyboxArchive(ctx context.Context, ref string, changes ...string) ([]byte, error) {
	img, err := newBusyboxImage(ctx, changes)
	if err != nil {
		return nil, err
	}
	manifest := img.manifest.Descriptor
	manifest.Annotations = map[string]string{"io.containerd.image.name": ref, ocispec.AnnotationRefName: ref}
	index, err := jsonBlob(ocispec.MediaTypeImageIndex, ocispec.Index{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{manifest},
	})
	if err != nil {
		return nil, err
	}
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	add := func(name string, content []byte) {
		if err == nil {
			err = w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(content))})
		}
		if err == nil {
			_, err = w.Write(content)
		}
	}
	add("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`))
	add("index.json", index.content)
	for _, b := range []blob{img.manifest, img.config, img.layer} {
		add("blobs/"+strings.Replace(b.Digest.String(), ":", "/", 1), b.content)
	}
	return buf.Bytes(), errors.Join(err, w.Close())
}

// blob is a part of an image.
type blob struct {
	ocispec.Descriptor
	content []byte
}

func newBlob(mediaType string, content []byte) blob {
	return blob{ocispec.Descriptor{MediaType: mediaType, Digest: digest.FromBytes(content), Size: int64(len(content))}, content}
}

func jsonBlob(mediaType string, v any) (blob, error) {
	content, err := json.Marshal(v)
	return newBlob(mediaType, content), err
}

// ociImage is an image of one layer.
type ociImage struct{ manifest, config, layer blob }

func newBusyboxImage(ctx context.Context, changes []string) (*ociImage, error) {
	rootfs, err := busyboxRootfs(ctx)
	if err != nil {
		return nil, err
	}
	img := &ociImage{layer: newBlob(ocispec.MediaTypeImageLayer, rootfs)}
	config := ocispec.Image{
		Platform: ocispec.Platform{Architecture: runtime.GOARCH, OS: runtime.GOOS},
		RootFS:   ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{img.layer.Digest}},
	}
	for _, change := range append(slices.Clone(baseChanges), changes...) {
		if err := apply(&config.Config, change); err != nil {
			return nil, err
		}
	}
	if img.config, err = jsonBlob(ocispec.MediaTypeImageConfig, config); err != nil {
		return nil, err
	}
	img.manifest, err = jsonBlob(ocispec.MediaTypeImageManifest, ocispec.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest,
		Config: img.config.Descriptor, Layers: []ocispec.Descriptor{img.layer.Descriptor},
	})
	return img, err
}

// apply does what a line of a Dockerfile says. It understands the commonest ones, without quotes
// around what has spaces in it.
func apply(s *ocispec.ImageConfig, change string) error {
	name, rest, _ := strings.Cut(strings.TrimSpace(change), " ")
	rest = strings.TrimSpace(rest)
	words := strings.Fields(rest)
	var list []string // of what is written as JSON
	if strings.HasPrefix(rest, "[") {
		if err := json.Unmarshal([]byte(rest), &list); err != nil {
			return fmt.Errorf("%q: %w: %w", change, err, errdefs.ErrInvalidArgument)
		}
		words = list
	}
	command := list
	if command == nil {
		command = []string{"/bin/sh", "-c", rest}
	}
	switch name {
	case "ENV":
		for _, word := range words {
			key, _, _ := strings.Cut(word, "=")
			s.Env = slices.DeleteFunc(s.Env, func(v string) bool { return strings.HasPrefix(v, key+"=") })
			s.Env = append(s.Env, word)
		}
	case "LABEL":
		for _, word := range words {
			key, value, _ := strings.Cut(word, "=")
			if s.Labels == nil {
				s.Labels = map[string]string{}
			}
			s.Labels[key] = value
		}
	case "VOLUME":
		for _, word := range words {
			if s.Volumes == nil {
				s.Volumes = map[string]struct{}{}
			}
			s.Volumes[word] = struct{}{}
		}
	case "ENTRYPOINT":
		s.Entrypoint = command
	case "CMD":
		s.Cmd = command
	case "USER":
		s.User = rest
	case "WORKDIR":
		s.WorkingDir = rest
	default:
		return fmt.Errorf("%q: only ENV, LABEL, VOLUME, ENTRYPOINT, CMD, USER and WORKDIR are known: %w", change, errdefs.ErrInvalidArgument)
	}
	return nil
}
