package docker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errhttp"
	"github.com/distribution/reference"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/registry"
	"github.com/docker/docker/pkg/jsonmessage"

	"github.com/bermhq/berm/runtime"
)

// Image looks an image up in the engine's own store.
func (r *Runtime) Image(ctx context.Context, ref string) (runtime.Image, error) {
	var out runtime.Image
	err := r.call(ctx, fmt.Sprintf("look up image %q", ref), func(ctx context.Context, s *session) error {
		img, err := s.ImageInspect(ctx, ref)
		if err != nil {
			return err
		}
		out = runtime.Image{ID: img.ID, Digests: img.RepoDigests}
		if c := img.Config; c != nil {
			out.Env, out.User, out.Labels = c.Env, c.User, ownLabels(c.Labels)
			out.Command = slices.Concat(c.Entrypoint, c.Cmd)
		}
		return nil
	})
	return out, err
}

// encodeAuth encodes credentials as the engine takes them; without a secret there are none.
func encodeAuth(user, secret string) (string, error) {
	switch {
	case secret == "":
		return "", nil
	case user == "":
		return registry.EncodeAuthConfig(registry.AuthConfig{IdentityToken: secret})
	}
	return registry.EncodeAuthConfig(registry.AuthConfig{Username: user, Password: secret})
}

// Pull brings an image from its registry. It may take as long as ctx does: engines
// are silent for minutes over large layers and slow registries.
func (r *Runtime) Pull(ctx context.Context, ref string, progress func(runtime.PullProgress)) (runtime.Image, error) {
	if err := r.pull(ctx, ref, progress); err != nil {
		return runtime.Image{}, fmt.Errorf("pull image %q: %w", ref, err)
	}
	return r.Image(ctx, ref)
}

func (r *Runtime) pull(ctx context.Context, ref string, progress func(runtime.PullProgress)) error {
	named, err := reference.ParseNormalizedNamed(ref)
	if err != nil {
		return runtime.Invalid("%w", err)
	}
	opts := image.PullOptions{}
	if r.auth != nil {
		user, secret, err := r.auth(ctx, reference.Domain(named))
		if err == nil {
			opts.RegistryAuth, err = encodeAuth(user, secret)
		}
		if err != nil {
			return fmt.Errorf("registry credentials: %w", err)
		}
	}
	pullCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := r.connect(pullCtx)
	if err != nil {
		return classify(ctx, err)
	}
	body, err := s.ImagePull(pullCtx, ref, opts)
	if err != nil {
		return pullFailure(classify(ctx, err))
	}
	defer func() { _ = body.Close() }()
	return pullFailure(classify(ctx, readPull(body, progress)))
}

// pullFailure makes any refusal by a registry NotFound.
func pullFailure(err error) error {
	if errdefs.IsUnauthorized(err) || errdefs.IsPermissionDenied(err) || errdefs.IsFailedPrecondition(err) {
		return runtime.WithClass(errdefs.ErrNotFound, err)
	}
	return err
}

// readPull follows a pull's messages to their end.
func readPull(body io.Reader, progress func(runtime.PullProgress)) error {
	type layer struct{ current, total int64 }
	layers := map[string]layer{}
	dec := json.NewDecoder(body)
	for {
		var m jsonmessage.JSONMessage
		if err := dec.Decode(&m); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
		if m.Error != nil {
			class := errhttp.ToNative(m.Error.Code)
			if m.Error.Code < http.StatusBadRequest || m.Error.Code > http.StatusInternalServerError { // not Unavailable: the engine is there
				class = errdefs.ErrUnknown
			}
			return runtime.WithClass(class, m.Error)
		}
		if progress == nil {
			continue
		}
		if p := m.Progress; p != nil && m.Status == "Downloading" {
			layers[m.ID] = layer{p.Current, max(p.Total, p.Current)}
		} else if l, ok := layers[m.ID]; ok { // the layer's download is complete
			layers[m.ID] = layer{l.total, l.total}
		}
		out := runtime.PullProgress{Status: strings.TrimSpace(m.ID + " " + m.Status)}
		for _, l := range layers {
			out.CurrentBytes += l.current
			out.TotalBytes += l.total
		}
		progress(out)
	}
}

// declared holds settings from an image's configuration.
type declared struct {
	volumes []string // the paths, sorted
	command []string // entrypoint and command, joined
	dir     string   // the working directory
}

// declared returns what an image declares. The caller must not change it.
func (s *session) declared(ctx context.Context, ref string) (declared, error) {
	out, ok := s.images.Get(ref)
	if ok {
		return out, nil
	}
	img, err := s.ImageInspect(ctx, ref)
	if err != nil {
		return declared{}, err
	}
	if img.Config != nil {
		out.volumes = slices.Sorted(maps.Keys(img.Config.Volumes))
		out.command = slices.Concat(img.Config.Entrypoint, img.Config.Cmd)
		out.dir = img.Config.WorkingDir
	}
	if strings.HasPrefix(ref, "sha256:") { // an ID's image can't change
		s.images.Put(ref, out, int64(len(strings.Join(slices.Concat(out.volumes, out.command), ""))))
	}
	return out, nil
}

// parseTime parses a time of the engine's. It returns the zero time for an invalid one and for the
// engine's own zero.
func parseTime(s string) time.Time {
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil || t.IsZero() {
		return time.Time{}
	}
	return t.UTC()
}
