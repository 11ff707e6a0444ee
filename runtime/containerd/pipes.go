package containerd

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// maxBuffered is more than the pipes and the shim hold back of a command's output,
	// so that what comes after that much is a descendant's.
	maxBuffered = 4 << 20

	// Output is waited for in drainSteps of drainStep each, after the command's end, and
	// in lateSteps when only the shim can be what is late.
	drainStep  = 40 * time.Millisecond
	drainSteps = 6
	lateSteps  = 75
)

// pipes are named ones between this process and the shim, which is what has the
// command's own.
type pipes struct {
	place          *place // owned until they are closed, so that no sweep takes them for lost
	stdout, stderr *output
	spare          []*os.File // writing ends, so that there is one before the shim's: without, output would be at its end

	copying bool // output is

	mu     sync.Mutex
	closed chan struct{} // when there is to be no more input
	stdin  *os.File      // once it is open
}

// newPipes makes pipes in a new directory, whose parent may have to be made and
// whose grandparent must be there.
func newPipes(ctx context.Context, dir string, stdin bool) (p *pipes, err error) {
	if err := os.Mkdir(filepath.Dir(dir), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	own, err := newPlace(ctx, dir)
	if err != nil {
		return nil, err
	}
	p = &pipes{place: own, closed: make(chan struct{})}
	defer func() {
		if err != nil {
			p.close()
		}
	}()
	for _, o := range []struct {
		name string
		to   **output
	}{{"stdout", &p.stdout}, {"stderr", &p.stderr}} {
		name := p.file(o.name)
		if err := unix.Mkfifo(name, 0o600); err != nil {
			return nil, fmt.Errorf("make a pipe: %w", err)
		}
		// Readers don't wait for a writer this way; a writer that finds a reader doesn't either.
		f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			return nil, err
		}
		*o.to = &output{f: f, done: make(chan struct{})}
		spare, err := os.OpenFile(name, os.O_WRONLY|unix.O_NONBLOCK, 0)
		if err != nil {
			return nil, err
		}
		p.spare = append(p.spare, spare)
	}
	if stdin {
		if err := unix.Mkfifo(p.file("stdin"), 0o600); err != nil {
			return nil, fmt.Errorf("make a pipe: %w", err)
		}
	}
	return p, nil
}

func (p *pipes) file(name string) string { return p.place.file(name) }

// endSpare closes what is only needed until the shim has opened its ends.
func (p *pipes) endSpare() {
	for _, f := range p.spare {
		_ = f.Close()
	}
	p.spare = nil
}

// copyOut gives the caller the command's output, once the shim has opened its ends,
// in a goroutine per stream; nil discards.
func (p *pipes) copyOut(stdout, stderr io.Writer) {
	p.endSpare()
	p.copying = true
	go p.stdout.copy(stdout)
	go p.stderr.copy(stderr)
}

// copyIn gives the command its input, and closes it. It returns when there is to be
// no more, but for a Read of src that goes on.
func (p *pipes) copyIn(src io.Reader) {
	for delay := time.Millisecond; ; delay = min(2*delay, 50*time.Millisecond) {
		// The shim takes its time to open its end, and what is written before is lost.
		f, err := os.OpenFile(p.file("stdin"), os.O_WRONLY|unix.O_NONBLOCK, 0)
		if err == nil {
			p.mu.Lock()
			select {
			case <-p.closed:
				err = os.ErrClosed
				_ = f.Close()
			default:
				p.stdin = f
			}
			p.mu.Unlock()
			if err == nil {
				break
			}
		}
		if !errors.Is(err, unix.ENXIO) {
			return
		}
		select {
		case <-p.closed:
			return
		case <-time.After(delay):
		}
	}
	_, _ = io.Copy(p.stdin, src) // it ends with the command at the latest
	_ = p.stdin.Close()
}

// drain waits for the last output of a command that has ended; afterwards nothing is
// written to the caller any more. Time that the caller's writers take isn't counted:
// only time without news is. That is short when a descendant may keep the output open,
// which held tells, once.
func (p *pipes) drain(held func() bool) {
	p.endInput()
	limit := p.stdout.bytes.Load() + p.stderr.bytes.Load() + maxBuffered
	tick := time.NewTicker(drainStep)
	defer tick.Stop()
	for idle, steps := 0, drainSteps; p.stdout.bytes.Load()+p.stderr.bytes.Load() < limit; {
		select {
		case <-p.stdout.done:
			select {
			case <-p.stderr.done:
				return
			case <-tick.C:
				idle += p.stderr.idle()
			}
		case <-tick.C:
			idle += p.stdout.idle() * p.stderr.idle()
		}
		if idle < steps {
			continue
		}
		if steps == lateSteps || held() {
			break
		}
		steps = lateSteps
	}
	p.stdout.cut()
	p.stderr.cut()
}

// finish waits until the shim has closed its ends, or until ctx ends, and then closes
// ours: a shim that finds nobody to read what it writes never gets done.
func (p *pipes) finish(ctx context.Context) {
	if !p.copying { // the command was never started
		return
	}
	for _, o := range []*output{p.stdout, p.stderr} {
		select {
		case <-o.done:
		case <-ctx.Done():
		}
	}
	p.close()
}

// endInput is for when the command doesn't read any more.
func (p *pipes) endInput() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.closed:
		return
	default:
	}
	close(p.closed)
	if p.stdin != nil {
		_ = p.stdin.Close()
	}
}

// close closes our ends and removes the pipes. It may be called more than once.
func (p *pipes) close() {
	p.endInput()
	p.endSpare()
	for _, o := range []*output{p.stdout, p.stderr} {
		if o != nil {
			_ = o.f.Close()
		}
	}
	_ = p.place.remove() // what stays goes with the container
	p.place.release()
}

// err is the first error of the caller's writers.
func (p *pipes) err() error { return errors.Join(p.stdout.failure(), p.stderr.failure()) }

// output is one of a command's streams.
type output struct {
	f       *os.File
	reading atomic.Bool   // it is waited for
	bytes   atomic.Int64  // read so far
	done    chan struct{} // closed when no more comes

	mu   sync.Mutex
	head []byte // its beginning
	off  bool   // the caller gets no more
	err  error  // of the caller's writer, which then gets no more either
}

const headSize = 64

func (o *output) begins(with string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return bytes.HasPrefix(o.head, []byte(with))
}

// cut keeps from the caller what comes from now on. It returns when nothing is being
// written to it.
func (o *output) cut() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.off = true
}

func (o *output) failure() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.err
}

// idle is 1 when nothing is there to be read.
func (o *output) idle() int {
	select {
	case <-o.done:
		return 1
	default:
	}
	if o.reading.Load() {
		return 1
	}
	return 0
}

// copy copies all of it to a writer; nil discards.
func (o *output) copy(to io.Writer) {
	defer close(o.done)
	buf := make([]byte, 32<<10)
	for {
		o.reading.Store(true)
		n, err := o.f.Read(buf)
		o.reading.Store(false)
		o.bytes.Add(int64(n))
		if n > 0 {
			o.mu.Lock()
			o.head = append(o.head, buf[:min(n, headSize-len(o.head))]...)
			if to != nil && !o.off && o.err == nil {
				_, o.err = to.Write(buf[:n])
			}
			o.mu.Unlock()
		}
		if err != nil {
			return
		}
	}
}
