package main

import (
	"errors"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// timeFormat is RFC 3339 with all nine digits, so that all times have the same length.
const timeFormat = "2006-01-02T15:04:05.000000000Z07:00"

const retryDelay = time.Second

// journal is a log in a directory: the file "log", and "log.1" with older records. Each has
// up to half of the bound. So the log has at least the last half of the bound that was
// printed, and never exceeds the bound. Records are in Kubernetes' container log format:
//
//	2006-01-02T15:04:05.000000000Z stdout F text
//
// P replaces F if the line goes on in the stream's next record, or had no end. The file
// "lock" is locked while more records may be written.
type journal struct {
	dir  string
	half int64

	f     *os.File // log; nil while it can't be opened
	size  int64    // of log
	buf   []byte   // records that aren't written yet
	torn  bool     // the last record in the file lacks its end
	full  bool     // log has its half, and couldn't be renamed
	retry time.Time
}

// lock locks the log until this process ends. It ignores errors: without the lock, readers
// only don't know whether more records may come.
func (j *journal) lock() {
	fd, err := unix.Open(j.dir+"/lock", unix.O_CREAT|unix.O_RDWR|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return
	}
	for errors.Is(unix.Flock(fd, unix.LOCK_EX), unix.EINTR) {
	}
}

func (j *journal) open() {
	f, err := os.OpenFile(j.dir+"/log", os.O_CREATE|os.O_APPEND|os.O_WRONLY|unix.O_NOFOLLOW, 0o600)
	if err == nil {
		if info, err := f.Stat(); err == nil {
			j.f, j.size = f, info.Size()
			return
		}
		_ = f.Close()
	}
	j.f, j.retry = nil, time.Now().Add(retryDelay)
}

// add adds a record of text and more, joined.
func (j *journal) add(now time.Time, stream string, tag byte, text, more []byte) {
	need := len(timeFormat) + len(stream) + len(" ") + len(" F ") + len(text) + len(more) + len("\n")
	if j.full || j.size+int64(len(j.buf)+need) > j.half {
		j.flush()
		if j.full || j.size > 0 && j.size+int64(need) > j.half {
			j.rotate()
		}
	}
	b := now.UTC().AppendFormat(j.buf, timeFormat)
	b = append(b, ' ')
	b = append(b, stream...)
	b = append(b, ' ', tag, ' ')
	b = append(b, text...)
	b = append(b, more...)
	j.buf = append(b, '\n')
}

// flush writes the records. It drops those that it can't write: a full disk must not stop the
// container.
func (j *journal) flush() {
	if len(j.buf) == 0 {
		return
	}
	left := j.buf
	j.buf = j.buf[:0]
	if j.f == nil {
		if j.full || time.Now().Before(j.retry) {
			return
		}
		if j.open(); j.f == nil {
			return
		}
	}
	if j.torn && !j.write([]byte("\n")) {
		return
	}
	j.torn = !j.write(left)
}

// write reports whether all was written.
func (j *journal) write(b []byte) bool {
	n, err := j.f.Write(b)
	j.size += int64(n)
	return err == nil
}

// rotate begins a new file. If that fails, the journal drops records until it succeeds, to
// keep within the bound.
func (j *journal) rotate() {
	if j.full && time.Now().Before(j.retry) {
		return
	}
	if j.f != nil {
		_ = j.f.Close()
		j.f = nil
	}
	j.full = true
	if err := unix.Rename(j.dir+"/log", j.dir+"/log.1"); err != nil && !errors.Is(err, unix.ENOENT) {
		j.retry = time.Now().Add(retryDelay)
		return
	}
	j.full, j.torn, j.size = false, false, 0
	j.open()
}
