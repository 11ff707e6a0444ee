package sandboxapi

import (
	"context"
	"io"
	"net/http"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
)

// ensureChat is get-or-create.
func (a *api) ensureChat(w http.ResponseWriter, r *http.Request, body apitype.ChatRequest) error {
	tenant, chatID := target(r)
	if body.WorkspaceID == "" {
		return &lifecycle.InvalidError{Field: "workspace_id", Message: "is mandatory"}
	}
	c, made, err := a.Chats.Ensure(r.Context(), tenant, chatID, body.WorkspaceID)
	return reply(w, okOrCreated(made), chatOf(c), err)
}

func (a *api) getChat(w http.ResponseWriter, r *http.Request) error {
	tenant, chatID := target(r)
	c, err := a.Chats.Get(r.Context(), tenant, chatID)
	return reply(w, http.StatusOK, chatOf(c), err)
}

func (a *api) deleteChat(w http.ResponseWriter, r *http.Request) error {
	tenant, chatID := target(r)
	return noContent(w, a.Chats.Delete(r.Context(), tenant, chatID))
}

// readHistory sends the history, or a part of it.
func (a *api) readHistory(w http.ResponseWriter, r *http.Request) error {
	tenant, chatID := target(r)
	c, err := a.Chats.History(r.Context(), tenant, chatID)
	return sendContent(w, r, c, err)
}

type historyFunc = func(c chats, ctx context.Context, tenant, chatID string, size int64, r io.Reader) (chat.File, error)

// writeHistory replaces the history, or appends to it.
func (a *api) writeHistory(write historyFunc) proxy.Handler {
	return withUpload(func(w http.ResponseWriter, r *http.Request, body *upload) error {
		tenant, chatID := target(r)
		noClash, err := wholeBody(r)
		if err != nil {
			return err
		}
		if noClash {
			return &lifecycle.InvalidError{Field: "If-None-Match", Message: "can't be met: every chat has a history"}
		}
		f, err := write(a.Chats, r.Context(), tenant, chatID, r.ContentLength, body)
		return reply(w, http.StatusOK, apitype.ChatHistory{SizeBytes: f.Size, ModifiedAt: f.ModifiedAt.UTC()}, err)
	})
}

// readChatTar sends all that the chat's directory holds as an archive.
func (a *api) readChatTar(w http.ResponseWriter, r *http.Request) error {
	tenant, chatID := target(r)
	t := tarball(w, chatID)
	return endTar(t, a.Chats.ReadTar(r.Context(), tenant, chatID, t))
}

func (a *api) writeChatTar(w http.ResponseWriter, r *http.Request, body *upload) error {
	if err := plainBody(r); err != nil {
		return err
	}
	tenant, chatID := target(r)
	return noContent(w, a.Chats.WriteTar(r.Context(), tenant, chatID, body))
}

func chatOf(c chat.Chat) apitype.Chat {
	return apitype.Chat{ChatID: c.ID, WorkspaceID: c.WorkspaceID, CreatedAt: c.CreatedAt.UTC()}
}
