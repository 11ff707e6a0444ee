package logs

import (
	"bytes"
	"context"
	"errors"
	"io"
	"time"

	"github.com/bermhq/berm/runtime"
)

// maxRecord is longer than any record that the writer makes.
const maxRecord = 64 << 10

// logRecord is one line of a log's file: a line that was printed, or a part of one.
type logRecord struct {
	stamp   []byte // RFC 3339
	time    time.Time
	stream  int // 0 is stdout, 1 stderr
	partial bool
	text    []byte
}

// parseRecord reads "TIME stdout|stderr P|F TEXT".
func parseRecord(line []byte) (logRecord, bool) {
	var r logRecord
	var name, tag []byte
	var ok bool
	if r.stamp, line, ok = bytes.Cut(line, []byte(" ")); !ok {
		return r, false
	}
	if name, line, ok = bytes.Cut(line, []byte(" ")); !ok {
		return r, false
	}
	if tag, r.text, ok = bytes.Cut(line, []byte(" ")); !ok {
		return r, false
	}
	switch string(name) {
	case "stdout":
	case "stderr":
		r.stream = 1
	default:
		return r, false
	}
	switch string(tag) {
	case "F":
	case "P":
		r.partial = true
	default:
		return r, false
	}
	var err error
	r.time, err = time.Parse(time.RFC3339Nano, string(r.stamp))
	return r, err == nil
}

// logScanner cuts a file into records. It skips malformed ones: a full disk may have cut one off.
type logScanner struct {
	rest []byte // a record whose end hasn't come yet
	lost bool   // that record has grown too long to be one
}

// feed takes the file's next bytes. A record is valid until handle returns.
func (s *logScanner) feed(b []byte, handle func(logRecord) error) error {
	for {
		line, more, ended := bytes.Cut(b, []byte("\n"))
		if !ended {
			if s.lost = s.lost || len(s.rest)+len(line) > maxRecord; s.lost {
				s.rest = s.rest[:0]
			} else {
				s.rest = append(s.rest, line...)
			}
			return nil
		}
		if len(s.rest) > 0 {
			line = append(s.rest, line...)
			s.rest = line[:0]
		}
		if rec, ok := parseRecord(line); ok && !s.lost {
			if err := handle(rec); err != nil {
				return err
			}
		}
		s.lost, b = false, more
	}
}

// logPrinter joins the records of a log to lines, as they were printed.
type logPrinter struct {
	opts    runtime.LogOptions
	streams [2]logStream
	lines   int // lines that have begun and are new enough
	skip    int // how many of these lines aren't shown
	buf     []byte
	to      int // the stream that buf is of
}

type logStream struct {
	w     io.Writer // nil discards
	open  bool      // in the middle of a line
	shown bool      // that line
}

func (p *logPrinter) print(rec logRecord) error {
	s := &p.streams[rec.stream]
	begins := !s.open
	if begins {
		if s.shown = !rec.time.Before(p.opts.Since); s.shown {
			p.lines++
			s.shown = p.lines > p.skip
		}
	}
	s.open = rec.partial
	if !s.shown || s.w == nil {
		return nil
	}
	if rec.stream != p.to || len(p.buf) > logChunk {
		if err := p.flush(); err != nil {
			return err
		}
		p.to = rec.stream
	}
	if begins && p.opts.Timestamps {
		p.buf = append(append(p.buf, rec.stamp...), ' ')
	}
	p.buf = append(p.buf, rec.text...)
	if !rec.partial {
		p.buf = append(p.buf, '\n')
	}
	return nil
}

// flush writes buf to its stream.
func (p *logPrinter) flush() error {
	if len(p.buf) == 0 {
		return nil
	}
	n, err := p.streams[p.to].w.Write(p.buf)
	if err == nil && n < len(p.buf) {
		err = io.ErrShortWrite
	}
	p.buf = p.buf[:0]
	return err
}

// skipTo makes the printer skip all lines but the last opts.Tail.
func (p *logPrinter) skipTo(ctx context.Context, parts []*io.SectionReader) error {
	if p.opts.Tail <= 0 {
		return nil
	}
	counter := &logPrinter{opts: p.opts}
	if err := scanAll(ctx, parts, counter.print); err != nil {
		return err
	}
	p.skip = max(0, counter.lines-p.opts.Tail)
	for _, part := range parts {
		if _, err := part.Seek(0, io.SeekStart); err != nil {
			return err
		}
	}
	return nil
}

func scanAll(ctx context.Context, parts []*io.SectionReader, handle func(logRecord) error) error {
	buf := make([]byte, logChunk)
	for _, part := range parts {
		var s logScanner
		for {
			n, err := part.Read(buf)
			if err := s.feed(buf[:n], handle); err != nil {
				return err
			}
			if errors.Is(err, io.EOF) {
				break
			}
			if err == nil && ctx.Err() != nil {
				err = runtime.Ended(ctx)
			}
			if err != nil {
				return err
			}
		}
	}
	return nil
}
