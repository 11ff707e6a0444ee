package logs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

const logChunk = 64 << 10

// openLog opens the files of a log, the oldest first. No output is missing between their first and last
// lines.
func openLog(dir string) ([]*os.File, error) {
	const tries = 1000 // one of them falls between two rotations
	for range tries {
		old, err := openLogFile(dir, "log.1")
		if err != nil {
			return nil, err
		}
		current, err := openLogFile(dir, "log")
		still := false
		if err == nil { // while old is open, no other file can have its inode
			still, err = isAt(old, dir, "log.1")
		}
		if still {
			return slices.DeleteFunc([]*os.File{old, current}, func(f *os.File) bool { return f == nil }), nil
		}
		closeAll(old, current)
		if err != nil {
			return nil, err
		}
	}
	return nil, errors.New("the log is rotated faster than it can be opened")
}

// openLogFile returns nil if there is no such file.
func openLogFile(dir, name string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, name), os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil //nolint:nilnil // a log needn't have both
	}
	return f, err
}

// isAt reports whether a file, or none if f is nil, has a name.
func isAt(f *os.File, dir, name string) (bool, error) {
	there, err := os.Lstat(filepath.Join(dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		return f == nil, nil
	}
	if err != nil || f == nil {
		return false, err
	}
	own, err := f.Stat()
	return err == nil && os.SameFile(own, there), err
}

// closeAll closes files; nil ones are fine.
func closeAll(files ...*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}

// sections returns readers of what files hold at this moment.
func sections(files []*os.File) ([]*io.SectionReader, error) {
	var out []*io.SectionReader
	for _, f := range files {
		info, err := f.Stat()
		if err != nil {
			return nil, err
		}
		out = append(out, io.NewSectionReader(f, 0, info.Size()))
	}
	return out, nil
}

// logFollower prints a log as it grows.
type logFollower struct {
	dir     string
	files   []*os.File // from the one being read to the newest known one
	scanner logScanner
	printer *logPrinter
	buf     []byte
}

// followLog returns a follower of a log. The options of p say where it begins.
func followLog(dir string, p *logPrinter) (*logFollower, error) {
	files, err := openLog(dir)
	if err != nil {
		return nil, err
	}
	parts, err := sections(files)
	if err == nil {
		err = p.skipTo(context.Background(), parts)
	}
	if err != nil {
		closeAll(files...)
		return nil, err
	}
	return &logFollower{dir: dir, files: files, printer: p, buf: make([]byte, logChunk)}, nil
}

func (f *logFollower) close() { closeAll(f.files...) }

// copy prints new output, from one file to the next.
func (f *logFollower) copy(ctx context.Context) error {
	complete := false // whether the file being read can't grow any more
	for ctx.Err() == nil {
		if len(f.files) > 0 {
			n, err := f.files[0].Read(f.buf)
			if err != nil && !errors.Is(err, io.EOF) {
				return fmt.Errorf("read the log: %w", err)
			}
			if n > 0 {
				if err := f.scanner.feed(f.buf[:n], f.printer.print); err != nil {
					return err
				}
				continue
			}
		}
		if len(f.files) < 2 {
			more, err := f.rotated(&complete)
			if err != nil {
				return err
			}
			if !more {
				break
			}
			continue
		}
		f.advance()
		complete = false
	}
	return f.printer.flush()
}

// rotated looks for files after the last known one, and reports whether there is anything to read.
func (f *logFollower) rotated(complete *bool) (bool, error) {
	if len(f.files) > 0 {
		last, err := isAt(f.files[0], f.dir, "log")
		if last || err != nil {
			return false, err
		}
		// The file was rotated: it doesn't grow any more, but may have grown since it was read.
		if !*complete {
			*complete = true
			return true, nil
		}
	}
	files, err := openLog(f.dir)
	if err != nil {
		return false, err
	}
	if len(f.files) > 0 && len(files) > 0 {
		a, errA := f.files[0].Stat()
		b, errB := files[0].Stat()
		if err := errors.Join(errA, errB); err != nil {
			closeAll(files...)
			return false, err
		}
		if os.SameFile(a, b) {
			_ = files[0].Close()
			files = files[1:]
		}
	}
	f.files = append(f.files, files...)
	return len(files) > 0, nil
}

func (f *logFollower) advance() {
	_ = f.files[0].Close()
	f.files = f.files[1:]
	f.scanner = logScanner{} // no record goes on in the next file
}

// gone reports whether the log has been removed.
func (f *logFollower) gone() bool {
	_, err := os.Lstat(f.dir)
	return errors.Is(err, fs.ErrNotExist)
}
