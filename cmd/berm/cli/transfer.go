package cli

import (
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/moby/term"
	"github.com/spf13/cobra"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime/atomicfile"
)

const (
	progressAfter = time.Second // a transfer is long from then on
	progressEvery = 200 * time.Millisecond
)

// progress shows the progress of a long transfer. The caller has to close it. The HTTP client
// may read on after that, until it notices that the server has refused the request.
type progress struct {
	to    io.Writer
	total int64 // bytes; 0: not known

	mu     sync.Mutex
	done   int64
	next   time.Time // to say something
	said   bool
	closed bool
}

// newProgress makes a bar for total bytes. It shows nothing if to is no terminal.
func newProgress(to io.Writer, total int64) *progress {
	_, ok := term.GetFdInfo(to)
	return &progress{to: to, total: total, next: time.Now().Add(progressAfter), closed: !ok}
}

// follow returns a reader that counts what is read from r.
func (p *progress) follow(r io.Reader) io.Reader { return io.TeeReader(r, p) }

// Write counts. It never fails.
func (p *progress) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done += int64(len(b))
	p.draw("")
	return len(b), nil
}

// pull shows how far the image of a sandbox has come.
func (p *progress) pull(sb *apitype.Sandbox) {
	if sb.Pull == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done, p.total = sb.Pull.CurrentBytes, sb.Pull.TotalBytes
	p.draw("pulling the image: ")
}

// draw draws the line again. The caller holds mu.
func (p *progress) draw(what string) {
	now := time.Now()
	if p.closed || now.Before(p.next) {
		return
	}
	p.next, p.said = now.Add(progressEvery), true
	text := what + inMiB(p.done)
	if p.total > 0 {
		share := int(100 * min(p.done, p.total) / p.total)
		text = fmt.Sprintf("%s[%-20s] %d%% of %s", what, strings.Repeat("#", share/5), share, inMiB(p.total))
	}
	_, _ = fmt.Fprintf(p.to, "\r\x1b[K%s", text)
}

func inMiB(n int64) string { return fmt.Sprintf("%.1f MiB", float64(n)/(1<<20)) }

// Close wipes the line, so that what follows stands alone. It may be called more than once.
func (p *progress) Close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.said && !p.closed {
		_, _ = fmt.Fprint(p.to, "\r\x1b[K")
	}
	p.closed = true
}

const stdio = "-" // in the place of a local file

// argument returns the argument at an index, or other if there are fewer.
func argument(args []string, i int, other string) string {
	if len(args) > i {
		return args[i]
	}
	return other
}

// local is a local file that is being sent, or standard input.
type local struct {
	content io.Reader
	size    int64 // bytes; 0: not known
	mode    fs.FileMode
}

// send opens a local file, or standard input, and calls do with it.
func send[T any](cmd *cobra.Command, name string, do func(l *local) (T, error)) (v T, err error) {
	if name == stdio {
		return do(&local{content: cmd.InOrStdin()})
	}
	file, err := os.Open(name)
	if err != nil {
		return v, err
	}
	defer func() { _ = file.Close() }()
	info, err := file.Stat()
	if err != nil {
		return v, err
	}
	if info.IsDir() {
		return v, fmt.Errorf("%s is a directory", name)
	}
	l := &local{mode: info.Mode().Perm()}
	if info.Mode().IsRegular() {
		l.size = info.Size()
	}
	p := newProgress(cmd.ErrOrStderr(), l.size)
	defer p.Close()
	l.content = p.follow(file)
	return do(l)
}

// download replaces a local file by what open returns, all at once. The name "-" is standard
// output.
func download(cmd *cobra.Command, to string, open func() (io.ReadCloser, error)) error {
	if to == stdio {
		r, err := open()
		return copyAll(cmd.OutOrStdout(), r, err)
	}
	return atomicfile.Write(to, 0o644, func(w io.Writer) error {
		r, err := open()
		if err != nil {
			return err
		}
		defer func() { _ = r.Close() }()
		var size int64
		if sized, ok := r.(interface{ Size() int64 }); ok {
			size = sized.Size()
		}
		p := newProgress(cmd.ErrOrStderr(), size)
		defer p.Close()
		_, err = io.Copy(w, p.follow(r))
		return err
	})
}

// cat opens and prints the files of the given names.
func cat(cmd *cobra.Command, names []string, open func(name string) (io.ReadCloser, error)) error {
	for _, name := range names {
		r, err := open(name)
		if err := copyAll(cmd.OutOrStdout(), r, err); err != nil {
			return err
		}
	}
	return nil
}

// copyAll copies r to w and closes r, unless opening it failed with err.
func copyAll(w io.Writer, r io.ReadCloser, err error) error {
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	_, err = io.Copy(w, r)
	return err
}
