package sandboxapi

import (
	"errors"
	"fmt"
	"io"
	"mime"
	"mime/multipart"
	"net/http"
	"strings"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
)

const (
	maxParts      = 1000
	maxPartHeader = 64 << 10 // bytes between the contents of two files
	maxBoundary   = 70       // RFC 2046, 5.1.1
)

// uploadChatFiles streams the files of a multipart body into the chat, all of them or none.
func (a *api) uploadChatFiles(w http.ResponseWriter, r *http.Request, body *upload) error {
	tenant, chatID := target(r)
	if err := plainBody(r); err != nil {
		return err
	}
	p, err := newFileParts(r, body)
	if err != nil {
		return err
	}
	files, err := a.Chats.PutAll(r.Context(), tenant, chatID, p.next)
	return reply(w, http.StatusCreated, apitype.UploadedFiles{Files: each(files, chatFileOf)}, err)
}

// fileParts are the files of a multipart body, one after the other.
type fileParts struct {
	*multipart.Reader
	source *partSource
	n      int // files so far
}

func newFileParts(r *http.Request, body io.Reader) (*fileParts, error) {
	mt, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if b := params["boundary"]; err != nil || mt != "multipart/form-data" || b == "" || len(b) > maxBoundary {
		return nil, proxy.UnsupportedMedia("the body must be multipart/form-data, with a boundary")
	}
	// Without a line end after it, the reader finds the last boundary only by io.EOF. But
	// partSource fails at the end: with io.EOF, a truncated body would look complete.
	source := &partSource{r: io.MultiReader(body, strings.NewReader("\r\n"))}
	return &fileParts{Reader: multipart.NewReader(source, params["boundary"]), source: source}, nil
}

// next returns the next file, or io.EOF after the last. It doesn't check for repeated names:
// chat.Service does.
func (p *fileParts) next() (f chat.PutFile, r io.Reader, err error) {
	p.source.left = maxPartHeader
	part, err := p.NextRawPart()
	p.source.left = -1
	var own *proxy.Fault
	switch {
	case errors.Is(err, io.EOF) && p.n == 0:
		return f, nil, &lifecycle.InvalidError{Field: "body", Message: "has no file in it"}
	case errors.Is(err, io.EOF), errors.As(err, &own):
		return f, nil, err
	case err != nil:
		return f, nil, proxy.Unreadable("the body isn't valid as multipart/form-data", err)
	case p.n == maxParts:
		return f, nil, &lifecycle.InvalidError{Field: "body", Message: fmt.Sprintf("has more than %d files in it", maxParts)}
	}
	disposition, params, err := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
	name, ok := params["filename"]
	if err != nil || disposition != "form-data" || !ok {
		return f, nil, &lifecycle.InvalidError{Field: "body", Message: "must have nothing but files in it: every part is form-data with a filename"}
	}
	p.n++
	if e := part.Header.Get("Content-Transfer-Encoding"); e != "" && !plainTransfer[strings.ToLower(e)] {
		return f, nil, proxy.UnsupportedMedia("files must come without a Content-Transfer-Encoding")
	}
	kind, err := contentType(part.Header.Values("Content-Type")...)
	return chat.PutFile{Name: name, ContentType: kind, Size: -1}, part, err
}

// plainTransfer are encodings that leave the bytes as they are.
var plainTransfer = map[string]bool{"7bit": true, "8bit": true, "binary": true}

// partSource is the body that the multipart reader reads. It fails at the body's end, since
// the reader stops at the last boundary before that.
type partSource struct {
	r    io.Reader
	left int // bytes that may be read; less than 0: any
}

func (s *partSource) Read(b []byte) (int, error) {
	if s.left == 0 {
		return 0, proxy.Malformed(fmt.Sprintf("there are more than %d bytes before a file, or after the last", maxPartHeader))
	}
	if s.left > 0 && len(b) > s.left {
		b = b[:s.left]
	}
	n, err := s.r.Read(b)
	if s.left > 0 {
		s.left -= n
	}
	if errors.Is(err, io.EOF) {
		err = proxy.Malformed("the body ends before its last boundary")
	}
	return n, err
}
