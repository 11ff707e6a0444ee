package engine

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"runtime"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
)

// busyboxArchive is the image of Docker.ImportBusybox as an OCI archive with the name
// ref in it, the same each time.
func busyboxArchive(ctx context.Context, ref string, changes ...string) ([]byte, error) {
	img, err := newBusyboxImage(ctx, changes)
	if err != nil {
		return nil, err
	}
	manifest := img.manifest.descriptor()
	manifest.Annotations = map[string]string{
		"io.containerd.image.name":          ref,
		"org.opencontainers.image.ref.name": ref,
	}
	index, err := json.Marshal(map[string]any{"schemaVersion": 2, "mediaType": typeIndex, "manifests": []descriptor{manifest}})
	if err != nil {
		return nil, err
	}
	files := []struct {
		name    string
		content []byte
	}{
		{"oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`)},
		{"index.json", index},
	}
	for _, b := range []blob{img.manifest, img.config, img.layer} {
		files = append(files, struct {
			name    string
			content []byte
		}{"blobs/" + strings.Replace(b.digest(), ":", "/", 1), b.content})
	}
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, f := range files {
		if err := w.WriteHeader(&tar.Header{Name: f.name, Mode: 0o644, Size: int64(len(f.content))}); err != nil {
			return nil, err
		}
		if _, err := w.Write(f.content); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}

const (
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar"
)

type blob struct {
	mediaType string
	content   []byte
}

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

func (b blob) digest() string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b.content)) }

func (b blob) descriptor() descriptor {
	return descriptor{MediaType: b.mediaType, Digest: b.digest(), Size: len(b.content)}
}

// ociImage is an image of one layer.
type ociImage struct{ manifest, config, layer blob }

func newBusyboxImage(ctx context.Context, changes []string) (*ociImage, error) {
	rootfs, err := busyboxRootfs(ctx)
	if err != nil {
		return nil, err
	}
	img := &ociImage{layer: blob{typeLayer, rootfs}}
	var settings imageSettings
	for _, change := range append(slices.Clone(baseChanges), changes...) {
		if err := settings.apply(change); err != nil {
			return nil, err
		}
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": runtime.GOOS, "config": settings,
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{img.layer.digest()}},
	})
	if err != nil {
		return nil, err
	}
	img.config = blob{typeConfig, config}
	manifest, err := json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": typeManifest,
		"config": img.config.descriptor(), "layers": []descriptor{img.layer.descriptor()},
	})
	if err != nil {
		return nil, err
	}
	img.manifest = blob{typeManifest, manifest}
	return img, nil
}

// imageSettings is what a Dockerfile's lines can set, as an image's config has it.
type imageSettings struct {
	Env        []string            `json:",omitempty"`
	Entrypoint []string            `json:",omitempty"`
	Cmd        []string            `json:",omitempty"`
	User       string              `json:",omitempty"`
	WorkingDir string              `json:",omitempty"`
	Volumes    map[string]struct{} `json:",omitempty"`
	Labels     map[string]string   `json:",omitempty"`
}

// apply understands the commonest lines, without quotes around what has spaces in it.
func (s *imageSettings) apply(change string) error {
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
			put(&s.Labels, key, value)
		}
	case "VOLUME":
		for _, word := range words {
			put(&s.Volumes, word, struct{}{})
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

func put[V any](m *map[string]V, key string, value V) {
	if *m == nil {
		*m = make(map[string]V)
	}
	(*m)[key] = value
}
