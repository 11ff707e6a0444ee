package engine

import (
	"bytes"
	"context"
	"io"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/client"
	"github.com/docker/docker/pkg/jsonmessage"
)

// newClient makes a client of the engine at a host, as in DOCKER_HOST, with TLS as the variable
// DOCKER_CERT_PATH says.
func newClient(host string) (*client.Client, error) {
	return client.NewClientWithOpts(client.WithTLSClientConfigFromEnv(), client.WithHost(host), client.WithAPIVersionNegotiation())
}

// with calls f with a client of the engine at a host.
func with(host string, f func(*client.Client) error) error {
	c, err := newClient(host)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	return f(c)
}

// Ping asks the engine at a host whether it is there.
func Ping(ctx context.Context, host string) error {
	return with(host, func(c *client.Client) error {
		_, err := c.Ping(ctx)
		return err
	})
}

// HasImage reports whether the engine at a host has an image.
func HasImage(ctx context.Context, host, ref string) (has bool, err error) {
	err = with(host, func(c *client.Client) error {
		_, err := c.ImageInspect(ctx, ref)
		has = err == nil
		if errdefs.IsNotFound(err) {
			return nil
		}
		return err
	})
	return has, err
}

// RemoveImage removes an image from the engine at a host.
func RemoveImage(ctx context.Context, host, ref string) error {
	return with(host, func(c *client.Client) error {
		_, err := c.ImageRemove(ctx, ref, image.RemoveOptions{})
		return err
	})
}

func importImage(ctx context.Context, host, ref string, changes []string, rootfs []byte) error {
	return with(host, func(c *client.Client) error {
		body, err := c.ImageImport(ctx, image.ImportSource{Source: bytes.NewReader(rootfs), SourceName: "-"}, ref, image.ImportOptions{Changes: changes})
		if err != nil {
			return err
		}
		defer func() { _ = body.Close() }()
		return jsonmessage.DisplayJSONMessagesStream(body, io.Discard, 0, false, nil) // errors come in the stream
	})
}
