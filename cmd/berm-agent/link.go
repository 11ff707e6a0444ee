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

// link keeps a session with Berm, which listens at path. It never returns.
func (srv *server) link(path string) {
	for delay := time.Duration(0); ; time.Sleep(delay) {
		begun := time.Now()
		if f, err := connect(&unix.SockaddrUnix{Name: path}, unix.AF_UNIX); err == nil {
			_ = srv.session(f) // any error: dial again
			_ = f.Close()
			srv.tidy.Reset(quiet)
		}
		if delay = min(max(2*delay, minRedial), maxRedial); time.Since(begun) > time.Second {
			delay = minRedial
		}
	}
}

// serving reports whether this container has Berm's socket directory, and so serves Berm.
func serving() bool {
	info, err := os.Stat(bermDir)
	return err == nil && info.IsDir()
}
