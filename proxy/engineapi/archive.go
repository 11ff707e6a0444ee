package engineapi

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

const tarBlock = 512

// withArchive serves a call for a path inside a container of the caller's. The engine mounts the
// container's volumes and binds for such a call, even if the container runs. withArchive holds
// the binds, and keeps starts away that could change these mounts.
func withArchive(c *call, id string, serve func(a upstream.Ask, ct *container.InspectResponse) error) error {
	name := c.query.Get("path")
	if name == "" || len(name) > maxTarName || !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl) {
		return proxy.Malformed("the path is missing, or is none")
	}
	ct, err := inspectSlow(c, id)
	if err != nil {
		return err
	}
	if hasBinds(ct.Mounts) {
		over, err := c.startLocks.Lock(c.ctx, id) // before the claim of mounts, in the order of a start
		if err != nil {
			return err
		}
		defer over()
	}
	return quietly(c, ct, func(ct *container.InspectResponse) error {
		release, err := holdMade(c, ct)
		if err != nil {
			return err
		}
		defer release()
		c.passed.Set("path", name)
		return serve(c.askFor(id), ct)
	})
}

func statArchive(c *call, _ upstream.Ask, id string) error {
	return withArchive(c, id, func(a upstream.Ask, _ *container.InspectResponse) error { return c.forward(a, false) })
}

func getArchive(c *call, a upstream.Ask, id string) error {
	return transfer(c, id, func(io.Reader) error { return statArchive(c, a, id) })
}

// exportContainer exports a container without the checks of quietly. For an export or a commit, the
// engine mounts only the container's root.
func exportContainer(c *call, a upstream.Ask, id string) error {
	return transfer(c, id, func(io.Reader) error {
		return c.forward(a, false)
	})
}

// putArchive unpacks an archive in a container. It decompresses the archive and writes it anew
// for the engine: some engines decompress by programs that they find in the container. Entries
// before a refused one may have been unpacked.
func putArchive(c *call, _ upstream.Ask, id string) error {
	return transfer(c, id, func(r io.Reader) error {
		return withArchive(c, id, func(a upstream.Ask, ct *container.InspectResponse) error {
			r, err := inflate(r, maxInflated)
			if err != nil {
				return err
			}
			if _, compressed := r.(*inflated); compressed {
				if err := c.untilEnd(c.enter("compressed archives", maxCompressed)); err != nil {
					return err
				}
			}
			plain, err := plainTar(r)
			if err != nil {
				return err
			}
			body, err := newTarFilter(plain, ct.HostConfig.ReadonlyRootfs)
			if err != nil {
				return err
			}
			defer func() { _ = body.Close() }()
			a.Body, a.Length, a.Header = body, -1, http.Header{"Content-Type": {"application/x-tar"}}
			c.writeAudit(nil) // before the transfer, which may take long
			err = c.forward(a, false)
			if why := body.refusal.Load(); err != nil && why != nil {
				c.written = false // the audit log has to have the refusal as well
				return *why
			}
			return err
		})
	})
}

// plainWriter refuses an archive that begins like a compressed one. A plain archive begins with
// the name of its first file, which the caller chooses. The engine would decompress and unpack
// something that Berm never judged.
type plainWriter struct {
	io.Writer
	begun bool
}

func (w *plainWriter) Write(b []byte) (int, error) {
	if !w.begun && isCompressed(b) {
		return 0, proxy.Malformed("the archive begins with a name that engines take for a compressed archive")
	}
	w.begun = w.begun || len(b) > 0
	return w.Writer.Write(b)
}

// openTar is plainTar for an archive that may be compressed. It decompresses at most most bytes.
func openTar(r io.Reader, most int64) (io.Reader, error) {
	r, err := inflate(r, most)
	if err != nil {
		return nil, err
	}
	return plainTar(r)
}

// plainTar checks the first block of an archive. It must be the header of a file, or zeros, and no engine
// may take it for a compressed archive.
func plainTar(r io.Reader) (io.Reader, error) {
	br := bufio.NewReaderSize(r, upstream.BufferSize)
	first, err := br.Peek(tarBlock)
	if fault, ok := errors.AsType[*proxy.Fault](err); ok { // from decompression
		return nil, fault
	}
	if err != nil {
		return nil, proxy.Malformed("the body is not a tar archive")
	}
	refuse := denied("archive.plain", "", "the body is not a plain tar archive", "tar, as it is or compressed once by gzip, bzip2, xz or zstd")
	if _, err := tar.NewReader(bytes.NewReader(first)).Next(); isCompressed(first) || errors.Is(err, tar.ErrHeader) {
		return nil, refuse
	}
	return br, nil
}

const (
	// maxTransfers bounds the archives of one tenant that go in and out at a time.
	maxTransfers = 16
	// maxCompressed bounds the compressed ones of them. Each takes maxWindow of memory.
	maxCompressed = 4
	// transferStall is how long a caller may take for another 64 KiB of an archive.
	transferStall = 30 * time.Second
	// transferTime bounds a whole archive.
	transferTime = 10 * time.Minute
	// maxSaves bounds the saves of images of one tenant at a time. The engine keeps a copy of each archive
	// until its transfer ends.
	maxSaves = 2
	saveTime = time.Hour
)

// transfers tracks the archives that are copied into and out of containers. During a copy, the engine
// holds the container's lock: nobody can remove or inspect the container.
type transfers struct {
	stall, most time.Duration

	ends sync.Map // of transferOf, by call
}

// transferOf is an archive of a container.
type transferOf struct {
	id  string // of the container
	end context.CancelCauseFunc
}

// end aborts the transfers of a container that is about to be removed.
func (t *transfers) end(id string) {
	t.ends.Range(func(_, value any) bool {
		if of, ok := value.(transferOf); ok && of.id == id {
			of.end(conflict("the container is being removed"))
		}
		return true
	})
}

// slow returns the fault for an archive that took too long.
func slow(what string) error {
	return &proxy.Fault{Status: http.StatusRequestTimeout, Code: "too_slow", Title: "Too slow", Detail: "the archive is broken off: " + what, Cause: os.ErrDeadlineExceeded}
}

// transfer serves an archive of a container. It aborts the transfer when the container expires, after
// transfers.most, or when the caller stalls.
func transfer(c *call, id string, serve func(body io.Reader) error) error {
	until, err := archiveUntil(c, id)
	if err != nil {
		return err
	}
	if err := c.untilEnd(c.enter("transfers", maxTransfers)); err != nil {
		return err
	}
	return transferArchive(c, until, func(end context.CancelCauseFunc, body io.Reader) error {
		c.transfers.ends.Store(c, transferOf{id, end})
		defer c.transfers.ends.Delete(c)
		return serve(body)
	})
}

// transferArchive serves an archive. It aborts the transfer at the time until, or when the caller stalls.
func transferArchive(c *call, until time.Time, serve func(end context.CancelCauseFunc, body io.Reader) error) error {
	client, w := c.ctx, c.w
	limited, cancel := context.WithDeadlineCause(client, until, slow("its time is up"))
	defer cancel()
	ctx, end := context.WithCancelCause(limited)
	defer end(nil)
	conn := http.NewResponseController(w)
	stop := context.AfterFunc(ctx, func() { // an in-process writer has no deadlines
		if c.r.ContentLength != 0 {
			_ = conn.SetReadDeadline(time.Unix(1, 0))
		} else {
			_ = conn.SetWriteDeadline(time.Unix(1, 0))
		}
	})
	c.ctx, c.w = ctx, &patientWriter{ResponseWriter: w, ctx: ctx, stall: c.transfers.stall}
	var err error
	defer func() {
		if c.ctx, c.w = client, w; stop() || err != nil {
			_ = conn.SetWriteDeadline(time.Time{}) // for the error, or the connection's next answer
		}
	}()
	err = serve(end, patient(ctx, c, end, c.r.Body))
	if err != nil && ctx.Err() != nil && client.Err() == nil {
		return context.Cause(ctx)
	}
	return err
}

// patient returns a reader of the body that calls end if the caller stalls.
func patient(ctx context.Context, c *call, end context.CancelCauseFunc, body io.Reader) io.Reader {
	stall := c.transfers.stall
	return &patientReader{Reader: body, conn: http.NewResponseController(c.w), ctx: ctx, end: end, stall: stall, left: stall}
}

// archiveUntil returns the time at which a transfer of a container's archive must end.
func archiveUntil(c *call, id string) (time.Time, error) {
	label, ok := c.ends.get(id)
	if !ok {
		ct, _, err := c.container(id)
		if err != nil {
			return time.Time{}, err
		}
		label = ct.Config.Labels[lifecycle.LabelExpiresAt]
	}
	until := time.Now().Add(c.transfers.most)
	expires, err := expiry(label)
	if expires.Before(until) {
		until = expires
	}
	return until, err
}

// patientWriter fails when the caller stops reading the answer.
type patientWriter struct {
	http.ResponseWriter
	ctx   context.Context //nolint:containedctx // as long as the writer
	stall time.Duration
}

func (w *patientWriter) Write(b []byte) (int, error) {
	_ = http.NewResponseController(w.ResponseWriter).SetWriteDeadline(time.Now().Add(w.stall))
	if w.ctx.Err() != nil { // or its deadline would have been overridden
		return 0, context.Cause(w.ctx)
	}
	return w.ResponseWriter.Write(b)
}

// Unwrap lets http.ResponseController through.
func (w *patientWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// patientReader fails when the caller stops sending the body. The time that the engine takes doesn't
// count.
type patientReader struct {
	io.Reader
	conn        *http.ResponseController
	ctx         context.Context //nolint:containedctx // as long as the reader
	end         context.CancelCauseFunc
	stall, left time.Duration // for a piece of BufferSize bytes, and for the rest of it
	piece       int           // bytes of the piece that were read
}

func (r *patientReader) Read(b []byte) (int, error) {
	begun := time.Now()
	deadline, why := begun.Add(r.left), "it doesn't go on"
	if until, ok := r.ctx.Deadline(); ok && until.Before(deadline) {
		deadline, why = until, "its time is up"
	}
	_ = r.conn.SetReadDeadline(deadline)
	if r.ctx.Err() != nil { // or its deadline would have been overridden
		return 0, context.Cause(r.ctx)
	}
	n, err := r.Reader.Read(b)
	r.left -= time.Since(begun)
	if r.piece += n; r.piece >= upstream.BufferSize {
		r.left, r.piece = r.stall, 0
	}
	switch {
	case errors.Is(err, io.EOF):
		_ = r.conn.SetReadDeadline(time.Time{})
	case err != nil && !time.Now().Before(deadline):
		err = slow(why)
		r.end(err)
	}
	return n, err
}
