package sandboxapi

import (
	"cmp"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/bermhq/berm/lifecycle/chat"
)

// sendStep is how many bytes of a file must leave within one stall.
const sendStep = 1 << 20

// sendContent sends a file's content, or a part of it, and closes the file. It returns err if
// that isn't nil. It announces the size that the file had when it was opened.
func sendContent(w http.ResponseWriter, r *http.Request, c *chat.Content, err error) error {
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	kind := cmp.Or(c.Info.ContentType, octetStream)
	if c.Info.Name == chat.HistoryName {
		kind = "text/markdown; charset=utf-8"
	}
	h, size := w.Header(), c.Info.Size
	modified := c.Info.ModifiedAt.UTC().Format(http.TimeFormat)
	if noneMatch(r, c.ETag) {
		h.Set("ETag", c.ETag)
		h.Set("Last-Modified", modified)
		w.WriteHeader(http.StatusNotModified)
		return nil
	}
	offset, length, status := int64(0), size, http.StatusOK
	if part, ok := rangeOf(r); ok && r.Method != http.MethodHead {
		if offset, length, ok = part.of(size); !ok {
			return noRange(w, size)
		}
		status = http.StatusPartialContent
	}
	if _, err := c.Seek(offset, io.SeekStart); err != nil {
		return err
	}
	h.Set("ETag", c.ETag)
	h.Set("Last-Modified", modified)
	h.Set("Content-Type", kind)
	h.Set("Content-Disposition", attachment(c.Info.Name))
	h.Set("Content-Security-Policy", "sandbox")
	h.Set("Accept-Ranges", "bytes")
	h.Set("Content-Length", strconv.FormatInt(length, 10))
	if status == http.StatusPartialContent {
		h.Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", offset, offset+length-1, size))
	}
	if c.Info.ID != "" {
		h.Set("Berm-File-Id", c.Info.ID)
	}
	w.WriteHeader(status)
	if r.Method == http.MethodHead {
		return nil
	}
	if sendFile(w, c.File, length, stall) != nil {
		panic(http.ErrAbortHandler) // so that the caller doesn't take a part for the whole
	}
	return nil
}

// sendFile sends n bytes of a file, with a deadline for each step. It fails if the file has
// fewer bytes. The kernel copies the bytes, as io.CopyN shows net/http the *os.File itself.
func sendFile(w http.ResponseWriter, f *os.File, n int64, within time.Duration) error {
	rc := http.NewResponseController(w)
	for n > 0 {
		_ = rc.SetWriteDeadline(time.Now().Add(within)) // an in-process writer has none
		sent, err := io.CopyN(w, f, min(n, sendStep))
		if err != nil {
			return err
		}
		n -= sent
	}
	return nil
}
