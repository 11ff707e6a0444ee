package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
)

// StartExec starts a command, and returns while it runs. Without an ExecID, the call is
// repeated only when the server had no room for it, so that the command never runs twice.
func (c *Client) StartExec(ctx context.Context, key string, req apitype.ExecRequest) (*apitype.Execution, error) {
	return post[apitype.Execution](ctx, c, at("sandboxes", key, "execs"), req, unlessNamed(req.ExecID))
}

// unlessNamed returns a call's again for the start of a command. A start with an ID can always
// be repeated, since it finds the command that it has started before.
func unlessNamed(id string) func(*Error) bool {
	if id == "" {
		return unlessFull
	}
	return nil
}

// Execution returns a command that was started.
func (c *Client) Execution(ctx context.Context, key, execID string) (*apitype.Execution, error) {
	return get[apitype.Execution](ctx, c, at("sandboxes", key, "execs", execID), nil)
}

// Executions returns a sandbox's commands in the order they were started.
func (c *Client) Executions(ctx context.Context, key string) ([]apitype.Execution, error) {
	list, err := value[apitype.ExecutionList](ctx, c, call{method: http.MethodGet, path: at("sandboxes", key, "execs")})
	return list.Execs, err
}

// KillExec kills a command with all its descendants. It doesn't fail if the command has ended.
func (c *Client) KillExec(ctx context.Context, key, execID string) (*apitype.Execution, error) {
	return out[apitype.Execution](ctx, c, call{method: http.MethodDelete, path: at("sandboxes", key, "execs", execID)})
}

// SignalExec sends a signal to a command's process group.
func (c *Client) SignalExec(ctx context.Context, key, execID string, signal apitype.Signal) (*apitype.Execution, error) {
	return post[apitype.Execution](ctx, c, at("sandboxes", key, "execs", execID, "signal"), apitype.SignalRequest{Signal: signal}, never)
}

// ResizeExec sets the size of a command's terminal.
func (c *Client) ResizeExec(ctx context.Context, key, execID string, rows, cols int) (*apitype.Execution, error) {
	return post[apitype.Execution](ctx, c, at("sandboxes", key, "execs", execID, "resize"), apitype.ResizeRequest{Rows: rows, Cols: cols}, nil)
}

// WriteExec sends all of r to a command's input, and then closes the input if end is set. It
// returns how many bytes were sent. The call is never repeated.
func (c *Client) WriteExec(ctx context.Context, key, execID string, r io.Reader, end bool) (int64, error) {
	q := url.Values{}
	set(q, "close", end)
	w, err := value[apitype.Written](ctx, c, call{
		method: http.MethodPut, path: at("sandboxes", key, "execs", execID, "stdin"), query: q, header: http.Header{"Content-Type": {octets}}, upload: r,
	})
	return w.Bytes, err
}

// StartProcess starts a managed process, and returns when it is ready. The call is repeated
// only when the server had no room for it.
func (c *Client) StartProcess(ctx context.Context, key string, req apitype.ProcessRequest) (*apitype.Process, error) {
	return post[apitype.Process](ctx, c, at("sandboxes", key, "processes"), req, unlessFull)
}

// Process returns a managed process.
func (c *Client) Process(ctx context.Context, key, processID string) (*apitype.Process, error) {
	return get[apitype.Process](ctx, c, at("sandboxes", key, "processes", processID), nil)
}

// Processes returns a sandbox's managed processes in the order they were started.
func (c *Client) Processes(ctx context.Context, key string) ([]apitype.Process, error) {
	list, err := value[apitype.ProcessList](ctx, c, call{method: http.MethodGet, path: at("sandboxes", key, "processes")})
	return list.Processes, err
}

// StopProcess closes a process' input, sends TERM to its group, and kills what is left
// after 5 s.
func (c *Client) StopProcess(ctx context.Context, key, processID string) (*apitype.Process, error) {
	return out[apitype.Process](ctx, c, call{method: http.MethodDelete, path: at("sandboxes", key, "processes", processID)})
}

// SignalProcess sends a signal to a process' group.
func (c *Client) SignalProcess(ctx context.Context, key, processID string, signal apitype.Signal) (*apitype.Process, error) {
	return post[apitype.Process](ctx, c, at("sandboxes", key, "processes", processID, "signal"), apitype.SignalRequest{Signal: signal}, never)
}

// ResizeProcess sets the size of a process' terminal.
func (c *Client) ResizeProcess(ctx context.Context, key, processID string, rows, cols int) (*apitype.Process, error) {
	return post[apitype.Process](ctx, c, at("sandboxes", key, "processes", processID, "resize"), apitype.ResizeRequest{Rows: rows, Cols: cols}, nil)
}

// WaitProcess waits until a process has ended, for at most timeout. A timeout of 0 is none.
// The State of the result says whether the process has ended.
func (c *Client) WaitProcess(ctx context.Context, key, processID string, timeout time.Duration) (*apitype.Process, error) {
	for until := time.Now().Add(timeout); ; {
		q := url.Values{}
		set(q, "timeout", timeout)
		p, err := out[apitype.Process](ctx, c, call{method: http.MethodPost, path: at("sandboxes", key, "processes", processID, "wait"), query: q})
		if err != nil || p.State != "running" {
			return p, err
		}
		// The server waits for an hour at most.
		if timeout != 0 {
			if timeout = time.Until(until); timeout <= 0 {
				return p, nil
			}
		}
	}
}

// AttachOptions are how to attach to a command or process.
type AttachOptions struct {
	Lines    bool   // messages are lines, rather than bytes
	After    *int64 // the seq after which the output begins; nil begins with the first that is kept
	Resume   string // Resume of the last apitype.AttachLine; used instead of After unless it is empty
	TakeOver bool   // take over from a caller that is attached; for processes only
}

// Handshake is what a WebSocket library needs to attach. This package has no WebSockets.
type Handshake struct {
	URL        string       // http or https, as the libraries take it
	Header     http.Header  // carries the token
	HTTPClient *http.Client // connects to the server, also over a unix socket
}

// AttachExec returns the handshake that attaches to a command. The messages are
// apitype.AttachStart, AttachLine, AttachControl, AttachError and AttachEnd.
func (c *Client) AttachExec(key, execID string, opts AttachOptions) Handshake {
	opts.TakeOver = false // the newest attachment to a command always takes over
	return c.handshake(at("sandboxes", key, "execs", execID, "attach"), opts)
}

// AttachProcess returns the handshake that attaches to a managed process, as AttachExec does.
func (c *Client) AttachProcess(key, processID string, opts AttachOptions) Handshake {
	return c.handshake(at("sandboxes", key, "processes", processID, "attach"), opts)
}

func (c *Client) handshake(path string, opts AttachOptions) Handshake {
	q := StreamOptions{After: opts.After}.query()
	if opts.Resume != "" {
		q.Set("after", opts.Resume)
	}
	q.Set("frames", "bytes")
	if opts.Lines {
		q.Set("frames", "lines")
	}
	set(q, "take_over", opts.TakeOver)
	h := Handshake{URL: c.base + path + "?" + q.Encode(), Header: http.Header{}, HTTPClient: c.http}
	c.authorize(h.Header)
	return h
}
