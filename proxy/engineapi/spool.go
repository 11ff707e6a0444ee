package engineapi

import (
	"archive/tar"
	"bufio"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/proxy/engineapi/upstream"
)

const (
	spoolPattern = "berm-build-*"
	spoolStep    = 4 << 20 // bytes of disk that are leased at a time
)

// spool writes the build's files into a new archive, with the judged Dockerfile under the name
// builtFrom. The archive is a file that is already unlinked.
func spool(c *call, args map[string]string, lease *proxy.Lease) (*os.File, error) {
	name := path.Clean("/" + cmp.Or(c.query.Get("dockerfile"), builtFrom))[1:]
	auths, err := registryHeader[map[string]json.RawMessage](c.r.Header, "X-Registry-Config")
	if err != nil {
		return nil, err
	}
	auth := func(registry string) (json.RawMessage, error) { return auths[registry], nil }
	ctx, end := context.WithCancelCause(c.ctx)
	defer end(nil)
	rest := patient(ctx, c, end, http.MaxBytesReader(c.w, c.r.Body, maxContext))
	return spoolTar(c, &spoolWriter{ctx: ctx, lease: lease}, rest, maxContext, func(files io.Reader, to *spoolWriter) error {
		return rewrite(to, files, name, func(text []byte) ([]byte, error) { return judgeDockerfile(c, text, args, auth) })
	})
}

// spoolTar reads an archive of at most most bytes, which may be compressed. It returns an
// unlinked file with what keep writes.
func spoolTar(c *call, to *spoolWriter, archive io.Reader, most int64, keep func(files io.Reader, to *spoolWriter) error) (*os.File, error) {
	f, err := os.CreateTemp(c.opts.SpoolDir, spoolPattern)
	if err != nil {
		return nil, fmt.Errorf("keep the archive: %w", err)
	}
	_ = os.Remove(f.Name())
	to.File = f
	files, err := openTar(archive, most)
	if err == nil {
		err = keep(files, to)
	}
	if err == nil { // reads the body to its end before the call asks the engine, while reads have a deadline
		if _, err = io.Copy(io.Discard, archive); err != nil {
			err = archiveError(err)
		}
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// spoolWriter is a file that leases the disk space it takes.
type spoolWriter struct {
	*os.File
	ctx          context.Context //nolint:containedctx // as long as the writer
	lease        *proxy.Lease
	size, leased int64
}

func (w *spoolWriter) Write(b []byte) (int, error) {
	if w.size += int64(len(b)); w.size > w.leased {
		most := (w.size + spoolStep - 1) / spoolStep * spoolStep
		if err := w.lease.Resize(w.ctx, most); err != nil {
			return 0, err
		}
		w.leased = most
	}
	return w.File.Write(b)
}

// cleanSpool makes the directory of build files, and removes files that a crash has left there.
func cleanSpool(dir string) error {
	if dir == "" {
		return nil
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("engineapi: spool directory: %w", err)
	}
	left, _ := filepath.Glob(filepath.Join(dir, spoolPattern)) // the pattern is a good one
	for _, name := range left {
		_ = os.Remove(name)
	}
	return nil
}

// rewrite copies an archive, file by file. It writes the Dockerfile as judge returns it, under
// the name builtFrom. It leaves out the caller's own file of that name, if the caller's
// Dockerfile is another.
func rewrite(to io.Writer, from io.Reader, name string, judge func([]byte) ([]byte, error)) error {
	var dockerfile []byte
	var size int64
	found := false
	out := bufio.NewWriterSize(&plainWriter{Writer: to}, upstream.BufferSize)
	tw, tr := tar.NewWriter(out), tar.NewReader(from)
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return archiveError(err)
		}
		if size += tarBlock + min(max(h.Size, 0), maxContext); size > maxContext {
			return tooLarge(maxContext) // a sparse file may be larger than its part of the archive
		}
		place, err := placeOf(h)
		switch {
		case err != nil:
			return err
		case place == name && h.Typeflag != tar.TypeReg, strings.HasPrefix(name, place+"/") && h.Typeflag != tar.TypeDir:
			return proxy.Malformed("the Dockerfile is no regular file of the archive")
		case place == name && found:
			return proxy.Malformed("the Dockerfile is in the archive twice")
		case place == name:
			found = true
			if dockerfile, err = io.ReadAll(io.LimitReader(tr, maxDockerfile+1)); err != nil {
				return archiveError(err)
			}
			continue // it is written last, so that no other entry replaces it
		case place == builtFrom || strings.HasPrefix(place, builtFrom+"/"):
			continue
		}
		if err := tw.WriteHeader(&tar.Header{
			Typeflag: h.Typeflag, Name: h.Name, Linkname: h.Linkname, Size: h.Size, Mode: h.Mode & 0o7777, Uid: h.Uid, Gid: h.Gid, ModTime: h.ModTime,
		}); err != nil {
			return archiveError(err)
		}
		if _, err := io.Copy(tw, tr); err != nil {
			return archiveError(err)
		}
	}
	if !found {
		return proxy.Malformed("Cannot locate specified Dockerfile: " + body.Shorten(name))
	}
	dockerfile, err := judge(dockerfile)
	if err != nil {
		return err
	}
	err = tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: builtFrom, Size: int64(len(dockerfile)), Mode: 0o644})
	if err == nil {
		_, err = tw.Write(dockerfile)
	}
	if err := errors.Join(err, tw.Close(), out.Flush()); err != nil {
		if full, ok := errors.AsType[*proxy.Fault](err); ok {
			return full
		}
		return fmt.Errorf("keep the build's files: %w", err)
	}
	return nil
}

// placeOf returns the clean path of an archive's entry. It refuses a path that leads out of the
// archive, and entries other than files, directories and links.
func placeOf(h *tar.Header) (string, error) {
	if !slices.Contains([]byte{tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeLink}, h.Typeflag) {
		return "", proxy.Malformed("the archive has something else than files, directories and links")
	}
	if slices.Contains(strings.Split(h.Name, "/"), "..") {
		return "", proxy.Malformed("the archive has a path that leads out of it")
	}
	return strings.TrimPrefix(path.Clean("/"+h.Name), "/"), nil
}

func archiveError(err error) error {
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return tooLarge(maxContext)
	}
	if full, ok := errors.AsType[*proxy.Fault](err); ok {
		return full
	}
	return proxy.Malformed("the body is not a tar archive")
}

func tooLarge(most int64) error {
	return &proxy.Fault{Status: http.StatusRequestEntityTooLarge, Code: "too_large", Title: "Body too large", Detail: fmt.Sprintf("the archive is larger than %d bytes", most)}
}
