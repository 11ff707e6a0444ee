package sandboxapi_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"io"
	"mime/multipart"
	"net/textproto"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/sandboxapi"
)

const (
	workspaceID = "7b0e9d52-3c1f-4a86-9d0e-5f2c7a1b8e44"
	fileID      = "c1f7a0b6-52d4-4c8e-8f59-0a6e1d3b7c20"
	chatPath    = "/api/v1/chats/chat-7"
	filePath    = chatPath + "/files/report.pdf"
	fileIDPath  = "/api/v1/files/" + fileID
)

var longAgo = time.Date(2026, 1, 2, 15, 4, 5, 678_000_000, time.UTC)

// shelf is workspaces and chats whose every call comes to what the test says. A body is
// read to its end.
type shelf struct {
	t       testing.TB
	err     error  // of all calls
	made    bool   // what is got or made
	content string // of all files
	size    int64  // that is told of content, if it isn't 0
	usage   quota.Usage
	list    chat.FileList
	more    bool // chats
	named   error
	refused error         // of what is put
	swap    func()        // before a body is read
	work    time.Duration // on what is put, once it is read

	mu      sync.Mutex
	created time.Time // of the chat
	asked   []string  // what calls were about
	puts    []chat.PutFile
	bodies  []string
	after   string
	limit   int
}

func newShelf(t testing.TB) *shelf {
	return &shelf{t: t, content: "0123456789", created: longAgo, usage: quota.Usage{WorkspaceID: workspaceID, UsedBytes: 3}}
}

func (s *shelf) call(about ...string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = about
	return s.err
}

func (s *shelf) file(name string) chat.File {
	return chat.File{
		ID: fileID, Tenant: "red", ChatID: "chat-7", Name: name, ContentType: "text/html; charset=x", Size: cmp.Or(s.size, int64(len(s.content))),
		CreatedAt: longAgo, ModifiedAt: longAgo,
	}
}

func (s *shelf) open(info chat.File) (*chat.Content, error) {
	f, err := os.CreateTemp(s.t.TempDir(), "")
	if err != nil {
		return nil, err
	}
	if _, err := f.WriteString(s.content); err != nil {
		return nil, err
	}
	return &chat.Content{File: f, Info: info, ETag: `W/"1"`}, nil
}

func (s *shelf) read(f chat.PutFile, r io.Reader) (chat.File, error) {
	if s.swap != nil {
		s.swap()
	}
	b, err := io.ReadAll(r)
	if err != nil {
		return chat.File{}, err
	}
	s.mu.Lock() // a call that was cut off may still go on beside the next
	defer s.mu.Unlock()
	s.puts, s.bodies = append(s.puts, f), append(s.bodies, string(b))
	return s.file(f.Name), nil
}

func (s *shelf) Ensure(_ context.Context, tenant, chatID, workspaceID string) (chat.Chat, bool, error) {
	return chat.Chat{Tenant: tenant, ID: chatID, WorkspaceID: workspaceID, CreatedAt: longAgo}, s.made, s.call(tenant, chatID, workspaceID)
}

func (s *shelf) Get(_ context.Context, tenant, chatID string) (chat.Chat, error) {
	err := s.call(tenant, chatID)
	s.mu.Lock()
	defer s.mu.Unlock()
	return chat.Chat{Tenant: tenant, ID: chatID, WorkspaceID: workspaceID, CreatedAt: s.created}, err
}

func (s *shelf) List(_ context.Context, tenant, workspaceID, after string, limit int) ([]chat.Chat, bool, error) {
	s.after, s.limit = after, limit
	return []chat.Chat{{Tenant: tenant, ID: "chat-7", WorkspaceID: workspaceID, CreatedAt: longAgo}}, s.more, s.call(tenant, workspaceID)
}

func (s *shelf) Delete(_ context.Context, tenant, chatID string) error { return s.call(tenant, chatID) }

func (s *shelf) Files(_ context.Context, tenant, chatID, after string, limit int) (chat.FileList, error) {
	s.after, s.limit = after, limit
	return s.list, s.call(tenant, chatID)
}

func (s *shelf) File(_ context.Context, tenant, id string) (chat.File, error) {
	return s.file("report.pdf"), s.call(tenant, id)
}

func (s *shelf) FileNamed(_ context.Context, tenant, chatID, name string) (chat.File, error) {
	return s.file(name), cmp.Or(s.call(tenant, chatID, name), s.named)
}

func (s *shelf) Content(_ context.Context, tenant, chatID, name string) (*chat.Content, error) {
	if err := s.call(tenant, chatID, name); err != nil {
		return nil, err
	}
	return s.open(s.file(name))
}

func (s *shelf) Put(ctx context.Context, tenant, chatID string, f chat.PutFile, r io.Reader) (chat.File, bool, error) {
	if err := cmp.Or(s.call(tenant, chatID, f.Name), s.refused); err != nil {
		return chat.File{}, false, err
	}
	file, err := s.read(f, r)
	time.Sleep(s.work)
	return file, s.made, cmp.Or(err, ctx.Err())
}

func (s *shelf) PutAll(_ context.Context, tenant, chatID string, next func() (chat.PutFile, io.Reader, error)) (files []chat.File, err error) {
	if err := s.call(tenant, chatID); err != nil {
		return nil, err
	}
	for {
		f, r, err := next()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return nil, err
		}
		file, err := s.read(f, r)
		if err != nil {
			return nil, err
		}
		files = append(files, file)
	}
}

func (s *shelf) DeleteFile(_ context.Context, tenant, chatID, name string) error {
	return s.call(tenant, chatID, name)
}

func (s *shelf) DeleteFileID(_ context.Context, tenant, fileID string) error {
	return s.call(tenant, fileID)
}

func (s *shelf) DeleteFiles(_ context.Context, tenant, chatID string) (int, error) {
	return 3, s.call(tenant, chatID)
}

func (s *shelf) History(_ context.Context, tenant, chatID string) (*chat.Content, error) {
	if err := s.call(tenant, chatID); err != nil {
		return nil, err
	}
	return s.open(chat.File{Tenant: tenant, ChatID: chatID, Name: chat.HistoryName, Size: int64(len(s.content)), ModifiedAt: longAgo})
}

func (s *shelf) PutHistory(_ context.Context, tenant, chatID string, size int64, r io.Reader) (chat.File, error) {
	if err := s.call(tenant, chatID); err != nil {
		return chat.File{}, err
	}
	return s.read(chat.PutFile{Name: "put", Size: size}, r)
}

func (s *shelf) AppendHistory(_ context.Context, tenant, chatID string, size int64, r io.Reader) (chat.File, error) {
	if err := s.call(tenant, chatID); err != nil {
		return chat.File{}, err
	}
	return s.read(chat.PutFile{Name: "append", Size: size}, r)
}

func (s *shelf) ReadTar(_ context.Context, tenant, chatID string, w io.Writer) error {
	if err := s.call(tenant, chatID); err != nil {
		return err
	}
	_, err := io.WriteString(w, s.content)
	return cmp.Or(err, s.named)
}

func (s *shelf) WriteTar(_ context.Context, tenant, chatID string, r io.Reader) error {
	if err := s.call(tenant, chatID); err != nil {
		return err
	}
	_, err := s.read(chat.PutFile{Name: "tar"}, r)
	return err
}

// desk is the shelf's workspaces.
type desk struct{ *shelf }

func (d desk) EnsureWorkspace(_ context.Context, tenant, userID string) (quota.Workspace, bool, error) {
	return quota.Workspace{ID: workspaceID, Tenant: tenant, UserID: userID, CreatedAt: longAgo}, d.made, d.call(tenant, userID)
}

func (d desk) Workspace(_ context.Context, tenant, id string) (quota.Workspace, error) {
	return quota.Workspace{ID: id, Tenant: tenant, UserID: "ada", CreatedAt: longAgo}, d.call(tenant, id)
}

func (d desk) Usage(_ context.Context, tenant, id string) (quota.Usage, error) {
	return d.usage, d.call(tenant, id)
}

const (
	librarian = "token-of-the-librarian"
	browser   = "token-of-a-mere-browser"
)

// withShelf gives an API workspaces and chats, and tokens that are for nothing else.
func withShelf(t testing.TB, s *shelf) func(*sandboxapi.Options) {
	tokens, err := proxy.ParseTokens([]byte(`tokens:
- {name: master, tenant: red, token: ` + master + `}
- {name: powerless, tenant: red, token: ` + powerless + `, scopes: [sandboxes:read, sandboxes:write, sandboxes:exec, status:read]}
- {name: librarian, tenant: red, token: ` + librarian + `, scopes: [storage:read, storage:write]}
- {name: browser, tenant: red, token: ` + browser + `, scopes: [storage:read]}
`))
	must(t, err)
	return func(o *sandboxapi.Options) { o.Workspaces, o.Chats, o.Gate.Tokens = desk{s}, s, tokens }
}

// newLibrary is a door with a shelf behind it.
func newLibrary(t *testing.T, change ...func(*sandboxapi.Options)) (*door, *shelf) {
	t.Helper()
	s := newShelf(t)
	return newDoor(t, append([]func(*sandboxapi.Options){withShelf(t, s)}, change...)...), s
}

var (
	noWorkspace   = outcome{&quota.NotFoundError{ID: workspaceID}, 404, "workspace_not_found"}
	noChat        = outcome{&chat.NotFoundError{ID: "chat-7"}, 404, "chat_not_found"}
	noFile        = outcome{&chat.FileNotFoundError{Name: "report.pdf"}, 404, "chat_file_not_found"}
	anothers      = outcome{&chat.ConflictError{ID: "chat-7", WorkspaceID: workspaceID}, 409, "chat_conflict"}
	activeSandbox = outcome{&lifecycle.ActiveError{Key: "chat-7"}, 409, "chat_has_active_sandbox"}
	otherKind     = outcome{&chat.FileError{Name: "x", Class: errdefs.ErrFailedPrecondition, Message: "is a directory"}, 409, "chat_file_wrong_kind"}
	fileThere     = outcome{&chat.FileError{Name: "x", Class: errdefs.ErrAlreadyExists, Message: "is there"}, 412, "precondition_failed"}
	tooLong       = outcome{&chat.TooLargeError{Limit: 7}, 413, "too_large"}
	noRoom        = outcome{&quota.FullError{WorkspaceID: workspaceID, UsedBytes: 1, QuotaBytes: 1}, 507, "workspace_quota_exceeded"}
	noDisk        = outcome{&chat.FileError{Name: "x", Class: errdefs.ErrResourceExhausted, Message: "finds no space"}, 507, "no_space"}
)

// form is a multipart body of files, each a name and a content.
func form(t testing.TB, files ...string) (body, kind string) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for i := 0; i+1 < len(files); i += 2 {
		p, err := w.CreatePart(textproto.MIMEHeader{"Content-Disposition": {multipart.FileContentDisposition("f", files[i])}, "Content-Type": {"text/plain"}})
		must(t, err)
		_, _ = io.WriteString(p, files[i+1])
	}
	must(t, w.Close())
	return b.String(), w.FormDataContentType()
}
