package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// server is what this program is to Berm: the place where its operations are done.
type server struct {
	env       []string
	files     syscall.Rlimit // of open files, for commands
	oom       *oomCounter
	kids      nursery
	processes table
	tidy      *time.Timer // calls freeMemory
	// launch starts a process; tests of the protocol start none.
	launch func(*process, *wire.Start) error
	// other gives the operations that aren't about processes.
	other func(wire.Op) handler
}

// newServer makes a server of this process, whose command, if it has one, is main.
func newServer(main int) (*server, error) {
	files, err := fileLimit()
	if err != nil {
		return nil, err
	}
	srv := &server{env: os.Environ(), files: files, oom: openOOM(), launch: (*process).launch, other: fileHandler, tidy: time.AfterFunc(quiet, freeMemory)}
	srv.kids.main = main
	return srv, nil
}

// serve does operations on a connection, one after the other, until it is of no use
// any more. Busy, unless nil, is called when one has begun, and idle when the next can:
// its false ends the connection.
func (srv *server) serve(c *conn, busy func(), idle func() bool) {
	hello := wire.Hello{Version: wire.Version, UID: os.Getuid(), GID: os.Getgid(), Control: true}
	if c.w.SendJSON(wire.KindHello, hello) != nil {
		return
	}
	for {
		payload, err := c.r.Expect(wire.KindRequest)
		if err != nil {
			return
		}
		busy()
		var req wire.Request
		if err := wire.Decode(payload, &req); err != nil {
			return
		}
		c.input, c.drain, c.sent = false, nil, nil
		result, err := srv.do(c, &req)
		srv.tidy.Reset(quiet)
		if !c.finish(result, err) || !idle() {
			return
		}
	}
}

// do does one operation.
func (srv *server) do(c *conn, req *wire.Request) (any, error) {
	h := srv.handler(req.Op)
	if h == nil {
		return nil, &wire.Failure{Class: wire.ClassUnsupported, Message: "there is no operation " + quote(string(req.Op))}
	}
	return h(c, req)
}

// finish ends an operation. False: the connection is of no use any more.
func (c *conn) finish(result any, err error) bool {
	switch {
	case errors.Is(err, errGone):
		return false
	case err != nil:
		err = c.w.SendJSON(wire.KindFailure, failureOf(err))
	case result == nil:
		err = c.w.Send(wire.KindResult, []byte("{}"))
	default:
		err = c.w.SendJSON(wire.KindResult, result)
	}
	if err == nil && c.sent != nil {
		c.sent()
	}
	c.sent = nil // it has hold of the process, whose output is large
	// Large frames have left large buffers.
	c.w = wire.NewWriter(c.out)
	if err == nil && c.drain != nil && !c.drain() {
		return false
	}
	for err == nil && c.input { // what was on its way meanwhile
		var kind wire.Kind
		switch kind, _, err = c.r.Next(); {
		case err != nil:
		case kind == wire.KindEnd:
			c.input = false
		case kind != wire.KindData:
			err = errGone
		}
	}
	return err == nil
}

func (srv *server) handler(op wire.Op) handler {
	switch op {
	case wire.OpPing:
		return ping
	case wire.OpRun:
		return srv.run
	case wire.OpStart:
		return srv.start
	case wire.OpAttach:
		return srv.attach
	case wire.OpProcess:
		return srv.process
	case wire.OpList:
		return srv.list
	case wire.OpSignal:
		return srv.signal
	case wire.OpKill:
		return srv.kill
	case wire.OpResize:
		return srv.resize
	case wire.OpForget:
		return srv.forget
	}
	return srv.other(op)
}

func ping(c *conn, _ *wire.Request) (any, error) { return nil, c.ready() }

// runServe serves one connection on its standard input and output, and kills what was
// started there when that ends: "serve".
func runServe(args []string) int {
	if len(args) != 0 {
		return complain("usage: berm-agent serve", exitUsage)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return complain("forbid tracing: "+reason(err), exitNotExecutable)
	}
	// What a supervisor that was killed leaves behind is to come here.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return complain("become a reaper: "+reason(err), exitNotExecutable)
	}
	in, out, err := stdio()
	if err != nil {
		return complain("take the standard input and output: "+reason(err), exitNotExecutable)
	}
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unix.SIGCHLD, unix.SIGPIPE, unix.SIGTERM, unix.SIGINT, unix.SIGHUP)
	limitMemory()
	srv, err := newServer(0)
	if err != nil {
		return complain("read the limit of open files: "+reason(err), exitNotExecutable)
	}
	ended := make(chan struct{})
	go func() {
		srv.serve(newConn(in, out, in), func() {}, func() bool { return true })
		close(ended)
	}()
	for {
		select {
		case sig := <-signals:
			switch sig {
			case unix.SIGCHLD:
				srv.kids.reap()
			case unix.SIGPIPE:
			default:
				_ = in.Close() // the operation that is under way ends, and serve
				go srv.processes.close()
			}
			continue
		case <-ended:
		}
		break
	}
	done := make(chan struct{})
	go func() { srv.killAll(); close(done) }()
	for {
		select {
		case <-signals:
			srv.kids.reap()
		case <-done:
			return 0
		}
	}
}

// stdio gives the standard input and output under other numbers, as files that this
// process waits for without a thread.
func stdio() (in, out *os.File, err error) {
	var files [2]*os.File
	for i := range files {
		fd, err := unix.FcntlInt(uintptr(i), unix.F_DUPFD_CLOEXEC, 3)
		if err == nil {
			err = unix.SetNonblock(fd, true)
		}
		if err != nil {
			return nil, nil, err
		}
		files[i] = os.NewFile(uintptr(fd), "berm")
	}
	if err := files[0].SetReadDeadline(time.Time{}); err != nil {
		return nil, nil, fmt.Errorf("the input is no pipe or socket: %w", err)
	}
	return files[0], files[1], nil
}

// newConn makes a connection of its two directions.
func newConn(in io.Reader, out io.Writer, c io.Closer) *conn {
	return &conn{r: wire.NewReader(in), w: wire.NewWriter(out), out: out, c: c}
}
