package main

import (
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/agent/wire"
)

// bermDir is the directory of Berm's socket in a container that serves Berm.
const bermDir = "/run/berm"

const bermSocket = bermDir + "/" + wire.Socket

// The least and the longest pause before link dials Berm again.
const (
	minRedial = 20 * time.Millisecond
	maxRedial = 500 * time.Millisecond
)

// link keeps connections with Berm, which listens at path. Each serves one operation at a time.
func (srv *server) link(path string) {
	for range wire.Spares {
		go srv.keepSpare(path)
	}
}

// keepSpare keeps a connection that waits for its first operation. It never returns.
func (srv *server) keepSpare(path string) {
	for delay := time.Duration(0); ; time.Sleep(delay) {
		delay = min(max(2*delay, minRedial), maxRedial)
		f, err := connect(&unix.SockaddrUnix{Name: path}, unix.AF_UNIX)
		if err != nil {
			continue
		}
		c := newConn(f)
		_ = srv.greet(c.w) // request finds out if it failed
		payload, err := c.request()
		if err == nil {
			delay = 0
		}
		go srv.talk(c, payload, err)
	}
}

// serving reports whether this container has Berm's socket directory, and so serves Berm.
func serving() bool {
	info, err := os.Stat(bermDir)
	return err == nil && info.IsDir()
}
