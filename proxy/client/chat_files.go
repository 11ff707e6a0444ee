package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"net/url"

	"github.com/bermhq/berm/proxy/apitype"
)

// ErrMoreFiles says that a chat has more files than the server ever lists.
var ErrMoreFiles = errors.New("the chat has more files than are listed")

// ChatFiles yields a chat's files in the order of their names, page by page, including files
// that its sandbox has written. A page size of 0 is the server's. The sequence ends after the
// first error. It ends with ErrMoreFiles if the chat has more files than the server lists.
func (c *Client) ChatFiles(ctx context.Context, chatID string, pageSize int) iter.Seq2[apitype.ChatFile, error] {
	return pages(ctx, c, at("chats", chatID, "files"), pageQuery(pageSize), func(page *apitype.ChatFileList) ([]apitype.ChatFile, string, error) {
		if page.Truncated && page.NextCursor == "" {
			return page.Files, "", ErrMoreFiles
		}
		return page.Files, page.NextCursor, nil
	})
}

// ChatFile returns a file by its ID.
func (c *Client) ChatFile(ctx context.Context, fileID string) (*apitype.ChatFile, error) {
	return get[apitype.ChatFile](ctx, c, at("files", fileID), nil)
}

// ChatFileNamed returns a file of a chat by its name. If there is none, it returns an *Error
// with the code chat_file_not_found.
func (c *Client) ChatFileNamed(ctx context.Context, chatID, name string) (*apitype.ChatFile, error) {
	var list apitype.ChatFileList
	rep, err := c.do(ctx, call{method: http.MethodGet, path: at("chats", chatID, "files"), query: url.Values{"name": {name}}, out: &list})
	if err != nil {
		return nil, err
	}
	if len(list.Files) == 0 {
		p := apitype.Problem{
			Status: http.StatusNotFound, Code: "chat_file_not_found", Detail: fmt.Sprintf("there is no file %q", name), RequestID: rep.Header.Get("X-Request-Id"),
		}
		return nil, &Error{Status: p.Status, Code: p.Code, Problem: p}
	}
	return &list.Files[0], nil
}

// PutChatFileOptions say how to write a file of a chat.
type PutChatFileOptions struct {
	ContentType string // empty: not known
	NoClash     bool   // fail with the code precondition_failed if the file exists
	// Size of the content in bytes. With a known size, the server refuses an upload that
	// exceeds the quota before it begins. 0 is unknown, unless the reader is a
	// *bytes.Buffer, *bytes.Reader or *strings.Reader.
	Size int64
}

// PutChatFile writes all of r to a file of a chat, or nothing. It closes r if r is an
// io.Closer. The call is never repeated.
func (c *Client) PutChatFile(ctx context.Context, chatID, name string, r io.Reader, opts PutChatFileOptions) (*apitype.ChatFile, error) {
	h := http.Header{}
	if opts.ContentType != "" {
		h.Set("Content-Type", opts.ContentType)
	}
	if opts.NoClash {
		h.Set("If-None-Match", "*")
	}
	return out[apitype.ChatFile](ctx, c, call{method: http.MethodPut, path: at("chats", chatID, "files", name), header: h, upload: r, size: opts.Size})
}

// NewChatFile is a file to be written.
type NewChatFile struct {
	Name        string
	ContentType string // empty: not known
	Content     io.Reader
}

// PutChatFiles writes several files of a chat, at most 1000: all of them or none. It reads
// each file before it takes the next one from the sequence. It does so in a goroutine that
// has ended when PutChatFiles returns. It returns the first error of the sequence or of a
// reader. The call is never repeated.
func (c *Client) PutChatFiles(ctx context.Context, chatID string, files iter.Seq2[NewChatFile, error]) ([]apitype.ChatFile, error) {
	r, w := io.Pipe()
	form := multipart.NewWriter(w)
	read := make(chan error, 1)
	go func() {
		err := writeForm(form, files)
		_ = w.CloseWithError(err) // the reader gets err, or io.EOF for nil
		read <- err
	}()
	list, err := value[apitype.UploadedFiles](ctx, c, call{
		method: http.MethodPost, path: at("chats", chatID, "files"), header: http.Header{"Content-Type": {form.FormDataContentType()}}, upload: r,
	})
	_ = r.Close() // ends the goroutine if the server didn't read everything
	if readErr := <-read; readErr != nil && !errors.Is(readErr, io.ErrClosedPipe) {
		return nil, readErr
	}
	return list.Files, err
}

// writeForm writes each file as a part, to the form's end.
func writeForm(form *multipart.Writer, files iter.Seq2[NewChatFile, error]) error {
	for f, err := range files {
		if err != nil {
			return err
		}
		h := textproto.MIMEHeader{"Content-Disposition": {multipart.FileContentDisposition("file", f.Name)}}
		if f.ContentType != "" {
			h.Set("Content-Type", f.ContentType)
		}
		part, err := form.CreatePart(h)
		if err != nil {
			return err
		}
		if _, err := io.Copy(part, f.Content); err != nil {
			return err
		}
	}
	return form.Close()
}

// ReadChatFile opens a file of a chat at an offset. A length of 0 reads to the file's end. The
// caller closes the reader. The content is complete only if reading ends with io.EOF.
func (c *Client) ReadChatFile(ctx context.Context, chatID, name string, offset, length int64) (io.ReadCloser, error) {
	return c.open(ctx, at("chats", chatID, "files", name), nil, offset, length)
}

// ReadChatFileID opens a file by its ID, as ReadChatFile does.
func (c *Client) ReadChatFileID(ctx context.Context, fileID string, offset, length int64) (io.ReadCloser, error) {
	return c.open(ctx, at("files", fileID, "content"), nil, offset, length)
}

// DeleteChatFile removes a file of a chat.
func (c *Client) DeleteChatFile(ctx context.Context, chatID, name string) error {
	return c.done(ctx, call{method: http.MethodDelete, path: at("chats", chatID, "files", name)})
}

// DeleteChatFileID removes a file by its ID.
func (c *Client) DeleteChatFileID(ctx context.Context, fileID string) error {
	return c.done(ctx, call{method: http.MethodDelete, path: at("files", fileID)})
}

// DeleteChatFiles removes all files of a chat but its history, and returns their number.
func (c *Client) DeleteChatFiles(ctx context.Context, chatID string) (int, error) {
	res, err := value[apitype.DeletedFiles](ctx, c, call{method: http.MethodDelete, path: at("chats", chatID, "files")})
	return res.Deleted, err
}

// SignFileURL signs a URL that lets anyone who has it read or write one file of a chat without
// a token, for a limited time. It ends with the chat.
func (c *Client) SignFileURL(ctx context.Context, chatID string, req apitype.FileURLRequest) (*apitype.FileURL, error) {
	return post[apitype.FileURL](ctx, c, at("chats", chatID, "file-urls"), req, nil)
}
