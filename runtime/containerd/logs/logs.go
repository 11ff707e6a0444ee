// Package logs reads the output of containers' main processes, as log writers keep it: one directory
// per container, which outlives the process.
package logs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
)

const (
	// writerTimeout is how long a log writer may take to write the rest of the output. writerTick is
	// how often AwaitWriter polls.
	writerTimeout = 5 * time.Second
	writerTick    = 10 * time.Millisecond

	// A follower reads the log when the kernel reports a change, and every followTick. If the kernel
	// has no watch left, it reads every followTickBlind.
	followTick      = time.Second
	followTickBlind = 50 * time.Millisecond
)

// Print writes what a log has at this moment to the writers; nil discards.
func Print(ctx context.Context, dir string, opts runtime.LogOptions, stdout, stderr io.Writer) error {
	return printLog(ctx, dir, newPrinter(opts, stdout, stderr))
}

// printLog prints what a log has at this moment, without the lines to come.
func printLog(ctx context.Context, dir string, p *logPrinter) error {
	files, err := openLog(dir)
	if err != nil {
		return err
	}
	defer closeAll(files...)
	parts, err := sections(files)
	if err != nil {
		return err
	}
	if err := p.skipTo(ctx, parts); err != nil {
		return err
	}
	if err := scanAll(ctx, parts, p.print); err != nil {
		return err
	}
	return p.flush()
}

func newPrinter(opts runtime.LogOptions, stdout, stderr io.Writer) *logPrinter {
	p := &logPrinter{opts: opts}
	p.streams[0].w, p.streams[1].w = stdout, stderr
	return p
}

// Follow prints a log as it grows, until it is complete, until it is removed, or until
// ctx ends. Complete returns once the main process has ended and all that it printed is
// in the log.
func Follow(ctx context.Context, dir string, opts runtime.LogOptions, stdout, stderr io.Writer, complete func(context.Context) error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	changed, stop := watchDir(dir)
	defer stop()
	interval := followTick
	if changed == nil {
		interval = followTickBlind
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	ended := make(chan error, 1)
	go func() { ended <- complete(ctx) }()

	f, err := followLog(dir, newPrinter(opts, stdout, stderr))
	if err != nil {
		return err
	}
	defer f.close()
	for over := false; ; {
		if err := f.copy(ctx); err != nil {
			return err
		}
		if over || f.gone() {
			return nil
		}
		select {
		case <-changed:
		case <-tick.C:
		case err := <-ended:
			if err != nil {
				return err
			}
			over = true
		case <-ctx.Done():
			return nil
		}
	}
}

// AwaitWriter waits until a log's writer has ended. The writer holds a lock until then.
func AwaitWriter(ctx context.Context, dir string) error {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) { // it never began, or the container is being removed
		return nil
	}
	if err != nil {
		return fmt.Errorf("look for the log's writer: %w", err)
	}
	defer func() { _ = f.Close() }() // unlocks it too
	waitCtx, cancel := context.WithTimeout(ctx, writerTimeout)
	defer cancel()
	err = runtime.Poll(waitCtx, writerTick, func() (bool, error) { return runtime.TryFlock(f, unix.LOCK_SH) })
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return runtime.Ended(ctx)
	case waitCtx.Err() != nil:
		return runtime.Unavailable(errors.New("the log's writer doesn't come to its end"))
	}
	return fmt.Errorf("look for the log's writer: %w", err)
}

// watchDir returns a channel that reports changes in a directory. It is nil if the kernel has no watch
// left.
func watchDir(dir string) (changed <-chan struct{}, stop func()) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, func() {}
	}
	if err := w.Add(dir); err != nil {
		_ = w.Close()
		return nil, func() {}
	}
	out, done := make(chan struct{}, 1), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case _, ok := <-w.Events:
				if !ok {
					return
				}
			case _, ok := <-w.Errors: // it has missed some
				if !ok {
					return
				}
			}
			select {
			case out <- struct{}{}:
			default:
			}
		}
	}()
	return out, func() {
		_ = w.Close() // closes its channels
		<-done
	}
}
