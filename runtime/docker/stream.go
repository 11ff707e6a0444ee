package docker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs/pkg/errhttp"
	"github.com/docker/docker/api/types"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/pkg/stdcopy"

	"github.com/bermhq/berm/runtime"
)

const (
	// maxBuffered is more than the engine, its pipes and sockets hold back of a
	// command's output, so that what comes after that much is a descendant's.
	maxBuffered = 4 << 20

	// Output is waited for in drainSteps of drainStep each, after the command's end.
	drainStep  = 40 * time.Millisecond
	drainSteps = 6

	maxRefusal = 8 << 10 // bytes kept of what the engine says
)

// stream is the connection that carries a command's input and output.
type stream struct {
	io.ReadWriteCloser
	reading atomic.Bool  // somebody waits for output
	bytes   atomic.Int64 // read so far
}

func (s *stream) Read(p []byte) (int, error) {
	s.reading.Store(true)
	n, err := s.ReadWriteCloser.Read(p)
	s.reading.Store(false)
	s.bytes.Add(int64(n))
	return n, err
}

func (s *stream) closeWrite() error {
	if c, ok := s.ReadWriteCloser.(types.CloseWriter); ok {
		return c.CloseWrite()
	}
	return errors.ErrUnsupported
}

// hijack starts an exec and takes its connection over. The client's own function
// for it waits for ever on an engine that hangs, and hides the status of a refusal.
func (r *Runtime) hijack(ctx context.Context, s *session, execID string) (*stream, error) {
	body, err := json.Marshal(container.ExecStartOptions{})
	if err != nil {
		return nil, fmt.Errorf("encode the start: %w", err)
	}
	u := r.url.JoinPath("v"+s.info.APIVersion, "exec", execID, "start")
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, u.String(), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "tcp")
	resp, err := s.http.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	if conn, ok := resp.Body.(io.ReadWriteCloser); ok && resp.StatusCode == http.StatusSwitchingProtocols {
		return &stream{ReadWriteCloser: conn}, nil
	}
	defer func() { _ = resp.Body.Close() }()
	var refusal types.ErrorResponse
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxRefusal)).Decode(&refusal); err != nil {
		refusal.Message = resp.Status
	}
	return nil, runtime.WithClass(errhttp.ToNative(resp.StatusCode), errors.New(refusal.Message))
}

// output takes a command's output apart. The engine's own words, when it can't
// start the process, come the same way as the process's would: they are held back.
type output struct {
	stdout, stderr io.Writer
	refused        func() bool // asks the engine

	begun  bool // the first output came
	failed bool // and it was the engine's
	held   []byte
	err    error // of stdout or stderr, which then get no more
}

func (o *output) copy(from io.Reader) {
	_, _ = stdcopy.StdCopy(outputWriter{o, &o.stdout}, outputWriter{o, &o.stderr}, from)
}

type outputWriter struct {
	o  *output
	to *io.Writer
}

func (w outputWriter) Write(p []byte) (int, error) {
	o := w.o
	if !o.begun {
		o.begun, o.failed = true, o.refused()
	}
	switch {
	case o.failed:
		o.held = append(o.held, p[:min(len(p), maxRefusal-len(o.held))]...)
	case *w.to != nil && o.err == nil:
		_, o.err = (*w.to).Write(p)
	}
	return len(p), nil
}

// drain waits for the last output, closes the connection, and returns when nothing
// is written to the caller any more. Time that the caller's writers take isn't
// counted: only time without news from the engine is.
func (x *execution) drain() {
	limit := x.conn.bytes.Load() + maxBuffered
	for idle := 0; idle < drainSteps && x.conn.bytes.Load() < limit; {
		select {
		case <-x.read:
			_ = x.conn.Close()
			return
		case <-time.After(drainStep):
			if x.conn.reading.Load() {
				idle++
			}
		}
	}
	_ = x.conn.Close()
	<-x.read
}
