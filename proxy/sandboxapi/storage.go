package sandboxapi

import (
	"context"
	"io"
	"net/http"

	"github.com/julienschmidt/httprouter"

	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/proxy"
)

// workspaces is what the API needs of *quota.Service.
type workspaces interface {
	EnsureWorkspace(ctx context.Context, tenant, userID string) (w quota.Workspace, made bool, err error)
	Workspace(ctx context.Context, tenant, id string) (quota.Workspace, error)
	Usage(ctx context.Context, tenant, id string) (quota.Usage, error)
}

// chats is what the API needs of *chat.Service.
type chats interface {
	Ensure(ctx context.Context, tenant, chatID, workspaceID string) (c chat.Chat, made bool, err error)
	Get(ctx context.Context, tenant, chatID string) (chat.Chat, error)
	List(ctx context.Context, tenant, workspaceID, after string, limit int) (list []chat.Chat, more bool, err error)
	Delete(ctx context.Context, tenant, chatID string) error

	Files(ctx context.Context, tenant, chatID, after string, limit int) (chat.FileList, error)
	File(ctx context.Context, tenant, fileID string) (chat.File, error)
	FileNamed(ctx context.Context, tenant, chatID, name string) (chat.File, error)
	Content(ctx context.Context, tenant, chatID, name string) (*chat.Content, error)
	Put(ctx context.Context, tenant, chatID string, f chat.PutFile, r io.Reader) (file chat.File, made bool, err error)
	PutAll(ctx context.Context, tenant, chatID string, next func() (chat.PutFile, io.Reader, error)) ([]chat.File, error)
	DeleteFile(ctx context.Context, tenant, chatID, name string) error
	DeleteFileID(ctx context.Context, tenant, fileID string) error
	DeleteFiles(ctx context.Context, tenant, chatID string) (int, error)

	History(ctx context.Context, tenant, chatID string) (*chat.Content, error)
	PutHistory(ctx context.Context, tenant, chatID string, size int64, r io.Reader) (chat.File, error)
	AppendHistory(ctx context.Context, tenant, chatID string, size int64, r io.Reader) (chat.File, error)

	ReadTar(ctx context.Context, tenant, chatID string, w io.Writer) error
	WriteTar(ctx context.Context, tenant, chatID string, r io.Reader) error
}

const (
	oneWorkspace = "/api/v1/workspaces/{workspace_id}"
	oneChat      = "/api/v1/chats/{chat_id}"
	oneFile      = "/api/v1/files/{file_id}"
)

// routeStorage adds the handlers of workspaces, chats and their files.
func (a *api) routeStorage(handle routing) {
	on := handle
	if a.Workspaces == nil || a.Chats == nil {
		on = func(method, path string, scope proxy.Scope, _ proxy.Handler, _ ...string) {
			handle(method, path, scope, noStorage, anyQuery)
		}
	}
	const history, files, named = oneChat + "/history", oneChat + "/files", oneChat + "/files/{name}"
	on("PUT", "/api/v1/users/{user_id}/workspace", proxy.ScopeStorageWrite, a.ensureWorkspace)
	on("GET", oneWorkspace, proxy.ScopeStorageRead, a.getWorkspace)
	on("GET", oneWorkspace+"/usage", proxy.ScopeStorageRead, a.workspaceUsage)
	on("GET", oneWorkspace+"/chats", proxy.ScopeStorageRead, a.listChats, "limit", "cursor")
	on("PUT", oneChat, proxy.ScopeStorageWrite, withBody(false, a.ensureChat))
	on("GET", oneChat, proxy.ScopeStorageRead, a.getChat)
	on("DELETE", oneChat, proxy.ScopeStorageWrite, a.deleteChat)
	on("GET", history, proxy.ScopeStorageRead, a.readHistory)
	on("HEAD", history, proxy.ScopeStorageRead, a.readHistory)
	on("PUT", history, proxy.ScopeStorageWrite, a.writeHistory(chats.PutHistory))
	on("POST", history, proxy.ScopeStorageWrite, a.writeHistory(chats.AppendHistory))
	on("GET", oneChat+"/tar", proxy.ScopeStorageRead, a.readChatTar)
	on("PUT", oneChat+"/tar", proxy.ScopeStorageWrite, withUpload(a.writeChatTar))
	on("GET", files, proxy.ScopeStorageRead, a.listChatFiles, "name", "limit", "cursor")
	on("POST", files, proxy.ScopeStorageWrite, withUpload(a.uploadChatFiles))
	on("DELETE", files, proxy.ScopeStorageWrite, a.deleteChatFiles)
	on("GET", named, proxy.ScopeStorageRead, a.readChatFile)
	on("HEAD", named, proxy.ScopeStorageRead, a.readChatFile)
	on("PUT", named, proxy.ScopeStorageWrite, withUpload(a.writeChatFile))
	on("DELETE", named, proxy.ScopeStorageWrite, a.deleteChatFile)
	on("GET", oneFile, proxy.ScopeStorageRead, a.getFile)
	on("DELETE", oneFile, proxy.ScopeStorageWrite, a.deleteFile)
	on("GET", oneFile+"/content", proxy.ScopeStorageRead, a.readFileByID)
	on("HEAD", oneFile+"/content", proxy.ScopeStorageRead, a.readFileByID)
	on("POST", oneChat+"/file-urls", proxy.ScopeStorageRead, a.signFileURL)
	on("GET", signedFiles, proxy.ScopeNone, a.readSignedFile, anyQuery)
	on("HEAD", signedFiles, proxy.ScopeNone, a.readSignedFile, anyQuery)
	on("PUT", signedFiles, proxy.ScopeNone, withUpload(a.writeSignedFile), anyQuery)
	on("OPTIONS", signedFiles, proxy.ScopeNone, a.askSignedFile, anyQuery)
}

func noStorage(http.ResponseWriter, *http.Request) error {
	return &proxy.Fault{Status: http.StatusNotImplemented, Code: "not_supported", Title: "Not supported",
		Detail: "the server keeps no workspaces, chats and files: its setting sandbox.chats_root is missing"}
}

// param returns the value of a parameter of the path's template.
func param(r *http.Request, name string) string {
	return httprouter.ParamsFromContext(r.Context()).ByName(name)
}
