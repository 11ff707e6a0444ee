package docker

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/pkg/stdcopy"

	"github.com/bermhq/berm/runtime"
)

// Logs copies what the engine has kept of the main process's output.
func (r *Runtime) Logs(ctx context.Context, id string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	op := "read logs of container " + id
	if err := checkID(id); err != nil {
		return fmt.Errorf("read logs of container %q: %w", id, err)
	}
	o := container.LogsOptions{ShowStdout: true, ShowStderr: true, Follow: opts.Follow, Timestamps: opts.Timestamps}
	if opts.Tail > 0 {
		o.Tail = strconv.Itoa(opts.Tail)
	}
	if !opts.Since.IsZero() {
		o.Since = unixTime(opts.Since)
	}
	if stdout == nil {
		stdout = io.Discard
	}
	if stderr == nil {
		stderr = io.Discard
	}
	readCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := r.connect(readCtx)
	if err != nil {
		return r.failure(ctx, nil, op, err)
	}
	timer := time.AfterFunc(r.timeout, cancel) // for the start of the answer only
	body, err := s.ContainerLogs(readCtx, id, o)
	if err != nil {
		return r.failure(ctx, s, op, err)
	}
	timer.Stop()
	defer func() { _ = body.Close() }()
	if _, err = stdcopy.StdCopy(stdout, stderr, body); ctx.Err() != nil {
		return nil
	}
	return r.failure(ctx, s, op, err)
}

// unixTime formats an exact time for the engine's API.
func unixTime(t time.Time) string {
	return fmt.Sprintf("%d.%09d", t.Unix(), t.Nanosecond())
}
