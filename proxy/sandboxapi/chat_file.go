package sandboxapi

import (
	"errors"
	"io"
	"mime"
	"net/http"
	"strings"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
)

const (
	maxChatFiles   = 1000 // of one page
	maxContentType = 255  // bytes
	octetStream    = "application/octet-stream"
)

// listChatFiles answers a page of a chat's files, or only the file with the name in the query.
func (a *api) listChatFiles(w http.ResponseWriter, r *http.Request) error {
	tenant, chatID := target(r)
	q := r.URL.Query()
	limit, after, err := pageQuery(q, tenant, maxChatFiles)
	if err != nil {
		return err
	}
	var list chat.FileList
	if q.Has("name") {
		list.Files, err = a.chatFilesNamed(r, tenant, chatID, q.Get("name"))
	} else {
		list, err = a.Chats.Files(r.Context(), tenant, chatID, after, limit)
	}
	if err != nil {
		return err
	}
	out := apitype.ChatFileList{Files: each(list.Files, chatFileOf), Truncated: list.Beyond}
	if list.More && len(list.Files) > 0 {
		out.NextCursor = cursor{Tenant: tenant, After: list.Files[len(list.Files)-1].Name}.String()
	}
	return reply(w, http.StatusOK, out, nil)
}

// chatFilesNamed returns the file with a name, or none. Only a regular file counts.
func (a *api) chatFilesNamed(r *http.Request, tenant, chatID, name string) ([]chat.File, error) {
	f, err := a.Chats.FileNamed(r.Context(), tenant, chatID, name)
	var none *chat.FileNotFoundError
	var other *chat.FileError
	if errors.As(err, &none) || errors.As(err, &other) {
		return nil, nil
	}
	return []chat.File{f}, err
}

// readChatFile sends a file's content, or a part of it.
func (a *api) readChatFile(w http.ResponseWriter, r *http.Request) error {
	tenant, chatID := target(r)
	c, err := a.Chats.Content(r.Context(), tenant, chatID, param(r, "name"))
	return sendContent(w, r, c, err)
}

// writeChatFile streams the request's body into a file.
func (a *api) writeChatFile(w http.ResponseWriter, r *http.Request, body *upload) error {
	tenant, chatID := target(r)
	f, err := chatFilePut(r, param(r, "name"))
	if err != nil {
		return err
	}
	return a.putChatFile(w, r, tenant, chatID, f, body)
}

// chatFilePut reads the conditions and the content type of a write from the header.
func chatFilePut(r *http.Request, name string) (f chat.PutFile, err error) {
	f = chat.PutFile{Name: name, Size: r.ContentLength}
	if f.NoClash, err = wholeBody(r); err != nil {
		return f, err
	}
	f.ContentType, err = contentType(r.Header.Values("Content-Type")...)
	return f, err
}

// putChatFile writes a file, and answers its new state.
func (a *api) putChatFile(w http.ResponseWriter, r *http.Request, tenant, chatID string, f chat.PutFile, body io.Reader) error {
	file, made, err := a.Chats.Put(r.Context(), tenant, chatID, f, body)
	if err != nil {
		return err
	}
	if etag := a.etagOf(r, tenant, chatID, file); etag != "" {
		w.Header().Set("ETag", etag)
	}
	return reply(w, okOrCreated(made), chatFileOf(file), nil)
}

// etagOf returns the ETag of a file's content, or "" if the file has changed since f.
func (a *api) etagOf(r *http.Request, tenant, chatID string, f chat.File) string {
	c, err := a.Chats.Content(r.Context(), tenant, chatID, f.Name)
	if err != nil {
		return ""
	}
	defer func() { _ = c.Close() }()
	if c.Info.ID != f.ID || c.Info.Size != f.Size || !c.Info.ModifiedAt.Equal(f.ModifiedAt) {
		return ""
	}
	return c.ETag
}

// contentType checks the values of a Content-Type header. Without a value it returns "".
func contentType(said ...string) (string, error) {
	if len(said) == 0 || len(said) == 1 && said[0] == "" {
		return "", nil
	}
	kind := strings.TrimSpace(said[0])
	mt, _, err := mime.ParseMediaType(kind)
	odd := strings.ContainsFunc(kind, func(c rune) bool { return c < ' ' || c > '~' })
	if len(said) > 1 || err != nil || odd || len(kind) > maxContentType || !strings.Contains(mt, "/") {
		return "", &lifecycle.InvalidError{Field: "Content-Type", Message: "must be one media type, of at most 255 characters of ASCII"}
	}
	return kind, nil
}

func (a *api) deleteChatFile(w http.ResponseWriter, r *http.Request) error {
	tenant, chatID := target(r)
	return noContent(w, a.Chats.DeleteFile(r.Context(), tenant, chatID, param(r, "name")))
}

func (a *api) deleteChatFiles(w http.ResponseWriter, r *http.Request) error {
	tenant, chatID := target(r)
	n, err := a.Chats.DeleteFiles(r.Context(), tenant, chatID)
	return reply(w, http.StatusOK, apitype.DeletedFiles{Deleted: n}, err)
}

// fileByID finds the file that the path names.
func (a *api) fileByID(r *http.Request) (chat.File, error) {
	ex := proxy.ExchangeOf(r.Context())
	f, err := a.Chats.File(r.Context(), ex.Caller.Tenant, param(r, "file_id"))
	ex.Key = f.ChatID
	return f, err
}

func (a *api) getFile(w http.ResponseWriter, r *http.Request) error {
	f, err := a.fileByID(r)
	return reply(w, http.StatusOK, chatFileOf(f), err)
}

func (a *api) readFileByID(w http.ResponseWriter, r *http.Request) error {
	f, err := a.fileByID(r)
	if err != nil {
		return err
	}
	c, err := a.Chats.Content(r.Context(), f.Tenant, f.ChatID, f.Name)
	if err == nil && c.Info.ID != f.ID { // another file has taken the name
		err = errors.Join(&chat.FileNotFoundError{Name: f.ID}, c.Close())
	}
	return sendContent(w, r, c, err)
}

func (a *api) deleteFile(w http.ResponseWriter, r *http.Request) error {
	f, err := a.fileByID(r)
	if err != nil {
		return err
	}
	return noContent(w, a.Chats.DeleteFileID(r.Context(), f.Tenant, f.ID))
}

func chatFileOf(f chat.File) apitype.ChatFile {
	out := apitype.ChatFile{
		FileID: f.ID, ChatID: f.ChatID, Name: f.Name, SizeBytes: f.Size, CreatedAt: f.CreatedAt.UTC(), ModifiedAt: f.ModifiedAt.UTC(),
	}
	if f.ContentType != "" {
		out.ContentType = &f.ContentType
	}
	return out
}
