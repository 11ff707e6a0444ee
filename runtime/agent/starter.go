package agent

import (
	"context"
	"io"
	"net"
	"strings"

	"github.com/bermhq/berm/runtime"
)

type Program struct {
	Command []string
	User    string
}

type Stdio interface {
	io.ReadWriteCloser
	Wait(ctx context.Context) (code int, stderr string, err error)
}

type Starter interface {
	Start(ctx context.Context, id string, p Program) (Stdio, error)
}

type execStarter struct{ Engine }

type execStdio struct {
	net.Conn
	done   chan struct{}
	code   int
	err    error
	stderr strings.Builder
}

func (e execStarter) Start(ctx context.Context, id string, p Program) (Stdio, error) {
	mine, its := net.Pipe()
	s := &execStdio{Conn: mine, done: make(chan struct{})}
	go func() {
		defer close(s.done)
		res, err := e.Engine.Exec(context.WithoutCancel(ctx), id, runtime.Exec{Command: p.Command, User: p.User, Stdin: its, Stdout: its, Stderr: &s.stderr})
		s.code, s.err = res.ExitCode, err
		_ = its.Close()
	}()
	return s, nil
}

func (s *execStdio) Wait(ctx context.Context) (int, string, error) {
	select {
	case <-s.done:
		return s.code, s.stderr.String(), s.err
	case <-ctx.Done():
		return 0, "", ctx.Err()
	}
}
