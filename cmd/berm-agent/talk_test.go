package main

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hashicorp/yamux"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// talk is Berm's side, with one operation at a time.
type talk struct {
	t    *testing.T
	late time.Duration

	// Over the stdio of a program:
	conn net.Conn
	mux  *yamux.Session

	// Over connections that the program in a sandbox dials:
	s     *sandbox
	first net.Conn // for the next operation; nil is whichever comes
	same  net.Conn // for all operations, unless nil

	hello wire.Hello

	stream net.Conn // of the operation
	r      *wire.Reader
	w      *wire.Writer
}

func newTalk(t *testing.T, c net.Conn) *talk {
	t.Helper()
	t.Cleanup(func() { _ = c.Close() }) // it may be closed
	must(t, c.SetDeadline(time.Now().Add(20*time.Second)))
	hello, err := greet(c)
	must(t, err)
	must(t, c.SetDeadline(time.Time{}))
	mux, err := yamux.Client(c, wire.Mux(20*time.Second, time.Second))
	must(t, err)
	return &talk{t: t, conn: c, mux: mux, late: 20 * time.Second, hello: hello}
}

// greet reads Hello.
func greet(c net.Conn) (hello wire.Hello, err error) {
	payload, err := wire.NewReader(c).Expect(wire.KindHello) // after which nothing comes by itself
	if err != nil {
		return hello, err
	}
	if err := wire.Decode(payload, &hello); err != nil || hello.Version != wire.Version {
		return hello, fmt.Errorf("hello %+v, %w", hello, err)
	}
	return hello, nil
}

// beside is for another operation at the same time.
func (k *talk) beside() *talk {
	return &talk{t: k.t, conn: k.conn, mux: k.mux, s: k.s, late: k.late}
}

func (k *talk) patience(d time.Duration) { k.late = d }

// open opens a stream in place of the one there was.
func (k *talk) open() error {
	if k.stream != nil && k.same == nil {
		_ = k.stream.Close() // it may be closed
	}
	var err error
	switch {
	case k.same != nil:
		k.stream = k.same
	case k.first != nil:
		k.stream, k.first = k.first, nil
	case k.s != nil:
		k.stream, k.hello, err = k.s.take()
	default:
		k.stream, err = k.mux.Open()
	}
	if err != nil {
		return err
	}
	k.r, k.w = wire.NewReader(k.stream), wire.NewWriter(k.stream)
	return k.stream.SetDeadline(time.Now().Add(k.late))
}

// outcome is what came of an operation.
type outcome struct {
	stdout, stderr bytes.Buffer
	seq            int64 // of the last output
	end            bool  // there was an End
	items          []wire.ProcessInfo
	info           wire.ProcessInfo
	failure        *wire.Failure
}

func (a *outcome) class() wire.Class {
	if a.failure == nil {
		return ""
	}
	return a.failure.Class
}

// begin asks for an operation; false if it was refused before it began.
func (k *talk) begin(req *wire.Request) (*outcome, bool) {
	k.t.Helper()
	a, ok := k.request(req)
	if ok {
		k.tellToGo()
	}
	return a, ok
}

// request is the part of begin before tellToGo.
func (k *talk) request(req *wire.Request) (*outcome, bool) {
	k.t.Helper()
	a := &outcome{}
	must(k.t, k.open())
	must(k.t, k.w.SendJSON(wire.KindRequest, req))
	kind, payload, err := k.r.Next()
	switch {
	case err != nil:
		k.t.Fatal(err)
	case kind == wire.KindFailure:
		must(k.t, wire.Decode(payload, &a.failure))
		return a, false
	case kind != wire.KindReady:
		k.t.Fatalf("a frame of kind %d in place of Ready", kind)
	}
	return a, true
}

func (k *talk) tellToGo() {
	k.t.Helper()
	must(k.t, k.w.Send(wire.KindGo, nil))
}

// next takes a frame; false after the last.
func (k *talk) next(a *outcome) bool {
	k.t.Helper()
	kind, payload, err := k.r.Next()
	must(k.t, err)
	switch kind {
	case wire.KindOutput:
		o, err := wire.ParseOutput(payload)
		must(k.t, err)
		a.seq = o.Seq
		if o.Stderr {
			a.stderr.Write(o.Data)
		} else {
			a.stdout.Write(o.Data)
		}
		return true
	case wire.KindData:
		a.stdout.Write(payload)
		return true
	case wire.KindEnd:
		a.end = true
		return true
	case wire.KindItem:
		var info wire.ProcessInfo
		must(k.t, wire.Decode(payload, &info))
		a.items = append(a.items, info)
		return true
	case wire.KindResult:
		err = wire.Decode(payload, &a.info)
	case wire.KindFailure:
		err = wire.Decode(payload, &a.failure)
	default:
		k.t.Fatalf("a frame of kind %d", kind)
	}
	must(k.t, err)
	return false
}

// ready waits for Ready.
func (k *talk) ready() {
	k.t.Helper()
	if _, err := k.r.Expect(wire.KindReady); err != nil {
		k.t.Fatal(err)
	}
}

// input opens the input of a process.
func (k *talk) input(id string) *talk {
	k.t.Helper()
	in := k.beside()
	if a, ok := in.begin(&wire.Request{Op: wire.OpInput, Process: &wire.Process{ID: id}}); !ok {
		k.t.Fatal(a.failure)
	}
	in.ready()
	return in
}

// write writes input, and waits until it was taken.
func (k *talk) write(data string) {
	k.t.Helper()
	must(k.t, k.w.Send(wire.KindData, []byte(data)))
	k.ready()
}

// end ends the input.
func (k *talk) end() {
	k.t.Helper()
	must(k.t, k.w.Send(wire.KindEnd, nil))
	if a := new(outcome); k.next(a) || a.failure != nil {
		k.t.Fatalf("%+v", a)
	}
}

// command is a request to run a command as Exec does.
func command(s wire.Start) *wire.Request {
	s.Exec, s.Follow = true, &wire.Follow{Lossless: true}
	return &wire.Request{Op: wire.OpStart, Start: &s}
}

// follow is a request to follow a process without loss.
func follow(id string, from int64) *wire.Request {
	return &wire.Request{Op: wire.OpFollow, Process: &wire.Process{ID: id, Follow: &wire.Follow{From: from, Lossless: true}}}
}

// do does an operation without input.
func (k *talk) do(req *wire.Request) *outcome {
	k.t.Helper()
	a, ok := k.begin(req)
	if !ok {
		return a
	}
	for k.next(a) {
	}
	return a
}

// sure does an operation that doesn't fail.
func (k *talk) sure(req *wire.Request) {
	k.t.Helper()
	if a := k.do(req); a.failure != nil {
		k.t.Fatal(a.failure)
	}
}

// run runs a shell script.
func (k *talk) run(id, script string) *outcome {
	k.t.Helper()
	return k.do(command(wire.Start{ID: id, Command: []string{"sh", "-c", script}}))
}

func (k *talk) start(s *wire.Start) {
	k.t.Helper()
	k.sure(&wire.Request{Op: wire.OpStart, Start: s})
}

// ask does one of the operations that have nothing but a process' ID.
func (k *talk) ask(op wire.Op, id string) *outcome {
	k.t.Helper()
	return k.do(&wire.Request{Op: op, Process: &wire.Process{ID: id}})
}

// list returns the processes that there are.
func (k *talk) list() []wire.ProcessInfo {
	k.t.Helper()
	a, ok := k.begin(&wire.Request{Op: wire.OpEvents})
	if !ok {
		k.t.Fatal(a.failure)
	}
	for {
		kind, payload, err := k.r.Next()
		var info wire.ProcessInfo
		if err == nil && kind == wire.KindItem {
			err = wire.Decode(payload, &info)
		}
		switch {
		case err != nil:
			k.t.Fatal(err)
		case kind != wire.KindItem:
			return a.items
		}
		a.items = append(a.items, info)
	}
}

// await polls a process until it has ended.
func (k *talk) await(id string) wire.ProcessInfo {
	k.t.Helper()
	var info wire.ProcessInfo
	await(k.t, "the end of "+id, func() bool {
		a := k.ask(wire.OpProcess, id)
		if a.failure != nil {
			k.t.Fatal(a.failure)
		}
		info = a.info
		return !info.Running
	})
	return info
}

// shell runs a script at the test's own side.
func shell(script string) (string, error) {
	out, err := exec.Command("sh", "-c", script).Output()
	return string(out), err
}

// serve runs a command that serves a session on its input and output.
func serve(t *testing.T, cmd *exec.Cmd) *talk {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	its, mine := os.NewFile(uintptr(fds[0]), "its"), os.NewFile(uintptr(fds[1]), "mine")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = its, its, os.Stderr
	startCmd(t, cmd)
	c, err := net.FileConn(mine)
	must(t, err, its.Close(), mine.Close())
	return newTalk(t, c)
}

// serveStdio runs the agent for one session.
func serveStdio(t *testing.T) (*talk, *exec.Cmd) {
	t.Helper()
	cmd := exec.Command(agent, "serve")
	k := serve(t, cmd)
	t.Cleanup(func() { // or what it runs would outlive it, killed as it is then
		_ = k.conn.Close()
		await(t, "what it ran to end", func() bool { return len(children(cmd.Process.Pid)) == 0 })
	})
	return k, cmd
}

// sandbox is a container as far as the agent can tell: it is the first process in
// namespaces of processes and mounts, and its socket's directory is where it has to be.
type sandbox struct {
	t   *testing.T
	dir string // of the socket
	cmd *exec.Cmd
	pid int // of the agent
	l   net.Listener

	mu    sync.Mutex
	taken []net.Conn
	// A control group of memory, unless empty, and where the sandbox sees it.
	group, seen string
}

// users are those that sandboxes are tried as.
var users = map[string]int{"root": 0, "nobody": 65534}

func newSandbox(t *testing.T, uid int) *sandbox {
	t.Helper()
	engine.Require(t, "containerd") // root, for namespaces
	s := prepareSandbox(t)
	s.boot(uid)
	return s
}

func prepareSandbox(t *testing.T) *sandbox {
	t.Helper()
	dir, err := os.MkdirTemp("", "b-")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) }) // a temporary one
	must(t, os.Chmod(dir, 0o755))
	s := &sandbox{t: t, dir: dir}
	s.listen()
	return s
}

func (s *sandbox) boot(uid int) {
	s.t.Helper()
	script := `if [ -n "$3" ]; then echo 0 >"$3/cgroup.procs" || exit; fi
		mount --make-rprivate / && mount -t proc proc /proc && mount -t tmpfs -o mode=755 tmpfs /run && mkdir /run/berm &&
		mount --bind "$1" /run/berm && mount -o remount,bind,ro /run/berm || exit
		if [ -n "$3" ]; then mount --bind "$3" "$4" || exit; fi
		cd / && exec setpriv --reuid "$2" --regid "$2" --clear-groups "$0" init / -- sleep 1000`
	s.cmd = exec.Command("sh", "-c", script, agent, s.dir, fmt.Sprint(uid), s.group, s.seen)
	s.cmd.Stderr = os.Stderr
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS}
	startCmd(s.t, s.cmd)
	s.pid = s.cmd.Process.Pid
}

// listen is Berm's start; the test's end is its end at the latest.
func (s *sandbox) listen() {
	s.t.Helper()
	path := filepath.Join(s.dir, wire.Socket)
	l, err := net.Listen("unix", path)
	must(s.t, err)
	s.t.Cleanup(func() { _ = l.Close() }) // it may be closed
	must(s.t, os.Chmod(path, 0o777))
	s.l = l
}

// accept takes a connection, for the next operation. Those after it take others.
func (s *sandbox) accept() *talk {
	s.t.Helper()
	c, hello, err := s.take()
	must(s.t, err)
	return &talk{t: s.t, s: s, first: c, hello: hello, late: 20 * time.Second}
}

// take takes a connection.
func (s *sandbox) take() (net.Conn, wire.Hello, error) {
	l := s.l.(*net.UnixListener)
	err := l.SetDeadline(time.Now().Add(time.Minute))
	if err != nil {
		return nil, wire.Hello{}, err
	}
	c, err := l.Accept()
	if err != nil {
		return nil, wire.Hello{}, err
	}
	s.mu.Lock()
	s.taken = append(s.taken, c)
	s.mu.Unlock()
	s.t.Cleanup(func() { _ = c.Close() }) // it may be closed
	hello, err := greet(c)
	return c, hello, err
}

// hangUp ends the session, or all connections that were taken.
func (k *talk) hangUp() {
	k.t.Helper()
	if k.s == nil {
		must(k.t, k.mux.Close())
		return
	}
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	for _, c := range k.s.taken {
		_ = c.Close() // it may be closed
	}
	k.s.taken = nil
}

// inside are the command lines of all processes in the sandbox but the agent and its
// command.
func (k *talk) inside() string {
	k.t.Helper()
	a := k.run("look", `for p in /proc/[0-9]*; do [ $p = /proc/$$ ] || tr '\0' ' ' <$p/cmdline 2>/dev/null; echo; done | grep -v -e 'init / -- sleep 1000' -e '^sleep 1000 $' -e '^$' -e '^tr ' -e '^grep ' -e '^sh -c for p in'`)
	return a.stdout.String()
}
