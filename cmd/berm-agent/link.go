package main

import (
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// bermDir is where a container has the directory of Berm's socket, if it serves.
const bermDir = "/run/berm"

const bermSocket = bermDir + "/" + wire.Socket

// How long it takes until Berm is dialled again.
const (
	minRedial = 20 * time.Millisecond
	maxRedial = 500 * time.Millisecond
)

// link keeps a session with Berm. It never returns.
func (srv *server) link(path string) {
	for delay := time.Duration(0); ; time.Sleep(delay) {
		begun := time.Now()
		if f, err := connect(&unix.SockaddrUnix{Name: path}, unix.AF_UNIX); err == nil {
			_ = srv.session(f) // the next one may last longer
			_ = f.Close()
			srv.tidy.Reset(quiet)
		}
		if delay = min(max(2*delay, minRedial), maxRedial); time.Since(begun) > time.Second {
			delay = minRedial
		}
	}
}

// serving is whether this container is Berm's to work in.
func serving() bool {
	info, err := os.Stat(bermDir)
	return err == nil && info.IsDir()
}
