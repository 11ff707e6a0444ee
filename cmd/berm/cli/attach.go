package cli

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/coder/websocket"
	"github.com/moby/term"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

const (
	killTime   = 10 * time.Second
	inputSize  = 128 << 10 // bytes of input that are sent at once
	maxMessage = 1 << 20   // bytes of a message from the server
)

var (
	// errCutOff says that an attachment ended before the command or process did.
	errCutOff = errors.New("the connection was cut off")
	// errPipe says that the reader of this program's output is gone.
	errPipe = errors.New("nobody reads the output")
)

// connection connects to a command or process.
type connection interface {
	// follow copies the output until the command or process ends, and returns how it ended.
	follow(ctx context.Context, stdout, stderr io.Writer) (apitype.AttachEnd, error)
	// write sends input. An error that isn't errCutOff ends the session.
	write(ctx context.Context, input []byte) error
	control(ctx context.Context, c apitype.AttachControl) error
	close()
}

// session connects this program's input and output, or its terminal, to a command or process.
type session struct {
	attach   func(ctx context.Context) (connection, error)
	in       io.Reader // nil gives no input
	stdout   io.Writer
	stderr   io.Writer
	terminal *terminal     // nil if there is none
	kill     func()        // kills the command if this program can't go on; nil leaves it running
	timeout  time.Duration // of the command; set by attach
	detach   bool          // an interrupt detaches, and leaves the process running
}

// run attaches, and stays with the command until its end.
func (s *session) run(ctx context.Context) (apitype.AttachEnd, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	c, err := s.attach(ctx)
	if err != nil {
		return apitype.AttachEnd{}, err
	}
	defer c.close()
	// With SIGPIPE caught, a write to a closed pipe fails instead of ending this program.
	broken := make(chan os.Signal, 1)
	signal.Notify(broken, syscall.SIGPIPE)
	defer signal.Stop(broken)
	if s.terminal != nil {
		restore, err := s.terminal.raw()
		if err != nil {
			return apitype.AttachEnd{}, err
		}
		defer restore()
	}
	defer forwardSignals(ctx, func(sig apitype.Signal) {
		if s.detach && sig == apitype.Signal(syscall.SIGINT) {
			cancel(errDetached)
			return
		}
		_ = c.control(ctx, apitype.AttachControl{Signal: &sig}) // the reader of the output sees the error
	}, func(sig syscall.Signal) {
		if s.kill != nil {
			s.kill()
		}
		cancel(&config.ExitError{Code: exitSignal + int(sig)})
	})()
	if s.terminal != nil {
		s.resize(ctx, c)
		defer onResize(ctx, func() { s.resize(ctx, c) })()
	}
	if s.in != nil {
		go s.input(ctx, cancel, c)
	}
	end, err := c.follow(ctx, s.stdout, s.stderr)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if errors.Is(err, errPipe) {
		if s.kill != nil {
			s.kill()
		}
		err = &config.ExitError{Code: exitSignal + int(syscall.SIGPIPE)}
	}
	return end, err
}

// stay is run for a command or process with an ID. It returns the exit code, and reports how the
// session ended.
func (s *session) stay(ctx context.Context, what, id string) (int, error) {
	end, err := s.run(ctx)
	switch {
	case errors.Is(err, errDetached):
		_, err = fmt.Fprintf(s.stderr, "berm: detached; the %s goes on as %s\n", what, id)
		return 0, err
	case errors.Is(err, errCutOff):
		return 0, fmt.Errorf("%w; the %s goes on as %s, if the sandbox does", err, what, id)
	case err != nil:
		return 0, err
	}
	if end.QuotaExceeded {
		_, _ = fmt.Fprintf(s.stderr, "berm: the %s left the workspace over its quota; the sandbox was stopped, its files are kept\n", what)
	}
	return endCode(end, s.timeout)
}

func (s *session) resize(ctx context.Context, c connection) {
	if size := s.terminal.size(); size.Rows > 0 && size.Cols > 0 {
		_ = c.control(ctx, apitype.AttachControl{Resize: &size}) // likewise
	}
}

// input copies this program's input to the command.
func (s *session) input(ctx context.Context, cancel context.CancelCauseFunc, c connection) {
	r := s.in
	if s.terminal != nil {
		r = term.NewEscapeProxy(r, detachKeys)
	}
	buf := make([]byte, inputSize)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if err := c.write(ctx, buf[:n]); err != nil {
				if !errors.Is(err, errCutOff) { // follow reports that the connection is cut off
					cancel(fmt.Errorf("send the input: %w", err))
				}
				return
			}
		}
		switch {
		case err == nil:
			continue
		case errors.Is(err, term.EscapeError{}):
			cancel(errDetached)
			return
		case !errors.Is(err, io.EOF):
			_, _ = fmt.Fprintln(s.stderr, "berm: read standard input: "+err.Error())
		}
		_ = c.control(ctx, apitype.AttachControl{CloseStdin: true})
		return
	}
}

// printTo writes output. It returns errPipe if nobody reads it.
func printTo(w io.Writer, data []byte) error {
	_, err := w.Write(data)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.EPIPE), errors.Is(err, io.ErrClosedPipe):
		return errPipe
	}
	return fmt.Errorf("print the output: %w", err)
}

// socketConnection is a connection by WebSocket, in bytes.
type socketConnection struct {
	ws   *websocket.Conn
	fail func(text string) // prints an error of input or a control message
}

// attach opens a WebSocket. It returns errCutOff if the server can't be reached or goes down, and
// a *client.Error for any other refusal.
func attach(ctx context.Context, to client.Handshake, fail func(text string)) (connection, error) {
	ws, resp, err := websocket.Dial(ctx, to.URL, &websocket.DialOptions{HTTPClient: to.HTTPClient, HTTPHeader: to.Header}) //nolint:bodyclose // it is read already, or is the connection
	switch {
	case err == nil:
	case resp == nil || resp.StatusCode == http.StatusSwitchingProtocols || resp.StatusCode == http.StatusServiceUnavailable:
		return nil, fmt.Errorf("%w: %w", errCutOff, err)
	default:
		data, _ := io.ReadAll(resp.Body) // what the library keeps of it
		return nil, client.ErrorOf(resp, data)
	}
	ws.SetReadLimit(maxMessage)
	return &socketConnection{ws: ws, fail: fail}, nil
}

func (a *socketConnection) close() { _ = a.ws.CloseNow() }

func (a *socketConnection) follow(ctx context.Context, stdout, stderr io.Writer) (apitype.AttachEnd, error) {
	for {
		kind, data, err := a.ws.Read(ctx)
		switch {
		case err != nil:
			return attachEnd(err)
		case kind == websocket.MessageText:
			err = a.text(data)
		case len(data) > 0 && data[0] == streamStdout:
			err = printTo(stdout, data[1:])
		case len(data) > 0 && data[0] == streamStderr:
			err = printTo(stderr, data[1:])
		default:
			err = errors.New("the server sent output of no known stream")
		}
		if err != nil {
			return apitype.AttachEnd{}, err
		}
	}
}

// The first byte of a binary message, which names the stream.
const (
	streamStdout = 1
	streamStderr = 2
)

// attachEnd decodes the close frame in the error of a read.
func attachEnd(err error) (end apitype.AttachEnd, _ error) {
	closed, ok := errors.AsType[websocket.CloseError](err)
	switch {
	case !ok:
		return end, fmt.Errorf("%w: %w", errCutOff, err)
	case closed.Code == websocket.StatusNormalClosure && json.Unmarshal([]byte(closed.Reason), &end) == nil && end.Status != "":
		return end, nil
	case closed.Code == websocket.StatusGoingAway, closed.Code == websocket.StatusServiceRestart:
		return end, fmt.Errorf("%w: %s", errCutOff, cmp.Or(closed.Reason, "the server goes down"))
	}
	return end, fmt.Errorf("the server ended the attachment: %s (%d)", cmp.Or(closed.Reason, "it gave no reason"), closed.Code)
}

func (a *socketConnection) text(data []byte) error {
	var m apitype.AttachError
	if err := json.Unmarshal(data, &m); err != nil {
		return fmt.Errorf("the server sent a message that isn't JSON: %w", err)
	}
	if m.Error.Code != "" || m.Error.Detail != "" { // without them, it is an AttachStart
		a.fail(cmp.Or(m.Error.Detail, m.Error.Code))
	}
	return nil
}

func (a *socketConnection) write(ctx context.Context, input []byte) error {
	if err := a.ws.Write(ctx, websocket.MessageBinary, input); err != nil {
		return fmt.Errorf("%w: %w", errCutOff, err)
	}
	return nil
}

func (a *socketConnection) control(ctx context.Context, c apitype.AttachControl) error {
	data, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return a.ws.Write(ctx, websocket.MessageText, data)
}

// attachProcess attaches to a process until its end, and returns its exit code. From is the seq
// after which the output begins; -1 begins with the first output that is kept.
func attachProcess(ctx context.Context, c *client.Client, s *session, key, id string, opts client.AttachOptions, from int64) (int, error) {
	if from >= 0 {
		opts.After = &from
	}
	s.attach = func(ctx context.Context) (connection, error) {
		return attach(ctx, c.AttachProcess(key, id, opts), func(text string) {
			_, _ = fmt.Fprintln(s.stderr, "berm: "+text)
		})
	}
	return s.stay(ctx, "process", id)
}

// streamConnection is a connection to a command that this program starts. The output comes as a
// stream of events, which the client resumes by itself. Input and control messages are calls.
type streamConnection struct {
	session *session
	c       *client.Client
	key     string
	req     apitype.ExecRequest
	next    func() (apitype.StreamEvent, error, bool)
	stop    func()
}

// attach starts the command.
func (x *streamConnection) attach(ctx context.Context) (connection, error) {
	x.next, x.stop = iter.Pull2(x.c.ExecStream(ctx, x.key, x.req))
	ev, err, _ := x.next()
	if err == nil && (ev.Event != apitype.EventStart || ev.Execution == nil) {
		err = fmt.Errorf("the server began the stream with the event %q", ev.Event)
	}
	if err != nil {
		x.stop()
		return nil, err
	}
	x.session.timeout = time.Duration(ev.Execution.Timeout)
	return x, nil
}

func (x *streamConnection) close() { x.stop() }

func (x *streamConnection) follow(_ context.Context, stdout, stderr io.Writer) (apitype.AttachEnd, error) {
	for {
		ev, err, ok := x.next()
		switch {
		case !ok:
			return apitype.AttachEnd{}, errors.New("the server didn't say how the command ended")
		case err != nil:
			return apitype.AttachEnd{}, fmt.Errorf("the command %s is out of sight: %w", x.req.ExecID, explain(err))
		case ev.Event == apitype.EventStdout:
			err = printTo(stdout, ev.DataBase64)
		case ev.Event == apitype.EventStderr:
			err = printTo(stderr, ev.DataBase64)
		case ev.Event == apitype.EventExit && ev.Exit != nil:
			full := ev.WorkspaceQuota != nil && ev.WorkspaceQuota.Exceeded
			return apitype.AttachEnd{ExitCode: ev.ExitCode, Signal: ev.Signal, Status: ev.Status, QuotaExceeded: full}, nil
		}
		if err != nil {
			return apitype.AttachEnd{}, err
		}
	}
}

func (x *streamConnection) write(ctx context.Context, input []byte) error {
	return x.input(ctx, input, false)
}

// input sends input, and closes the command's input if end is set. It returns errCutOff if the
// command has ended.
func (x *streamConnection) input(ctx context.Context, input []byte, end bool) error {
	_, err := x.c.WriteExec(ctx, x.key, x.req.ExecID, bytes.NewReader(input), end)
	if answer, ok := errors.AsType[*client.Error](err); ok && answer.Code == "process_ended" {
		return errCutOff
	}
	return err
}

func (x *streamConnection) control(ctx context.Context, ctl apitype.AttachControl) error {
	var err error
	switch {
	case ctl.CloseStdin:
		err = x.input(ctx, nil, true)
	case ctl.Signal != nil:
		_, err = x.c.SignalExec(ctx, x.key, x.req.ExecID, *ctl.Signal)
	case ctl.Resize != nil:
		_, err = x.c.ResizeExec(ctx, x.key, x.req.ExecID, ctl.Resize.Rows, ctl.Resize.Cols)
	}
	return err
}
