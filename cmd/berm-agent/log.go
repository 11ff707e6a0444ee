package main

import (
	"bytes"
	"os"
	"os/signal"
	"runtime"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// partDelay is how long the beginning of a line waits for its end, before followers of
	// the log see it.
	partDelay = 100 * time.Millisecond
	// maxPart is the longest text of one record.
	maxPart = 16 << 10
	// minBytes is the smallest bound of a log, which has room for a few records.
	minBytes = 4 << 10
)

// The descriptors that containerd's shim gives to a log's writer.
const (
	stdoutFD = 3
	stderrFD = 4
	readyFD  = 5
)

// runLog logs a container's output until no process has the pipes open. The arguments are a URI's
// query, in any order: "log DIRECTORY max BYTES owner ID". The pipes get the owner, so that the
// container's programs can reopen them.
func runLog(args []string) int {
	var dir string
	var limit int64
	for ; len(args) > 1; args = args[2:] {
		switch args[0] {
		case "log":
			dir = args[1]
		case "max":
			limit, _ = strconv.ParseInt(args[1], 10, 64) // 0 if it is no number
		case "owner":
			if owner, _ := strconv.Atoi(args[1]); owner > 0 {
				_ = unix.Fchown(stdoutFD, owner, owner)
				_ = unix.Fchown(stderrFD, owner, owner)
			}
		}
	}
	if dir == "" || limit <= 0 || len(args) > 0 {
		return complain("usage: berm-agent log DIR max BYTES owner ID", exitUsage)
	}
	runtime.GOMAXPROCS(1)
	// The shim signals this process before it has read everything. It ends when the pipes do.
	signal.Ignore(unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT, unix.SIGPIPE)
	limit = max(limit, minBytes)
	j := &journal{dir: dir, half: limit / 2}
	j.lock()
	j.open()
	_, _ = unix.Write(readyFD, []byte{0})
	_ = unix.Close(readyFD)
	part := min(maxPart, int(min(limit/4, maxPart)))
	collect(j, part)
	return 0
}

// stream is one of a container's outputs.
type stream struct {
	name string
	rest []byte    // of a line that hasn't ended
	due  time.Time // when the rest is written at the latest
}

// collect copies both streams to the journal, up to their ends. It goes on reading if the
// journal fails, as the container would block otherwise.
func collect(j *journal, part int) {
	var mu sync.Mutex // guards the journal and the streams
	var all sync.WaitGroup
	for fd, name := range map[int]string{stdoutFD: "stdout", stderrFD: "stderr"} {
		_ = unix.SetNonblock(fd, true) // waiting takes no thread then
		f, s := os.NewFile(uintptr(fd), name), &stream{name: name}
		all.Go(func() { s.copy(f, j, part, &mu) })
	}
	all.Wait()
}

// copy copies f to the journal up to its end, and closes f.
func (s *stream) copy(f *os.File, j *journal, part int, mu *sync.Mutex) {
	flush := func() {
		mu.Lock()
		defer mu.Unlock()
		s.flush(j, time.Now())
		j.flush()
	}
	defer func() { _ = f.Close() }()
	defer flush()
	late := time.AfterFunc(partDelay, flush)
	defer late.Stop()
	buf := make([]byte, 64<<10)
	for {
		n, err := f.Read(buf)
		mu.Lock()
		s.take(j, buf[:n], part, time.Now())
		j.flush()
		if len(s.rest) > 0 {
			late.Reset(time.Until(s.due))
		}
		mu.Unlock()
		if err != nil { // the end, or an error that would stay
			return
		}
	}
}

// take makes records of the lines that were read. It keeps the beginning of a line that
// hasn't ended.
func (s *stream) take(j *journal, text []byte, part int, now time.Time) {
	for len(text) > 0 {
		end := bytes.IndexByte(text, '\n')
		whole := end >= 0
		if !whole {
			end = len(text)
		}
		room := part - len(s.rest)
		switch {
		case end > room: // the line is longer than one record
			j.add(now, s.name, 'P', s.rest, text[:room])
			s.rest, text = s.rest[:0], text[room:]
		case whole:
			j.add(now, s.name, 'F', s.rest, text[:end])
			s.rest, text = s.rest[:0], text[end+1:]
		default:
			if len(s.rest) == 0 {
				s.due = now.Add(partDelay)
			}
			s.rest, text = append(s.rest, text...), nil
		}
	}
}

// flush writes the beginning of a line without its end.
func (s *stream) flush(j *journal, now time.Time) {
	if len(s.rest) > 0 {
		j.add(now, s.name, 'P', s.rest, nil)
		s.rest = s.rest[:0]
	}
}
