package client

import (
	"context"
	"io"
	"net/http"

	"github.com/bermhq/berm/proxy/apitype"
)

// EnsureChat answers a chat of a workspace, and makes it if there is none. The sandbox
// whose key is the chat's ID mounts what the chat holds. Code chat_conflict: it belongs to
// another workspace.
func (c *Client) EnsureChat(ctx context.Context, chatID, workspaceID string) (*apitype.Chat, error) {
	return out[apitype.Chat](ctx, c, call{
		method: http.MethodPut, path: at("chats", chatID), body: apitype.ChatRequest{WorkspaceID: workspaceID},
	})
}

// Chat answers a chat.
func (c *Client) Chat(ctx context.Context, chatID string) (*apitype.Chat, error) {
	return get[apitype.Chat](ctx, c, at("chats", chatID), nil)
}

// DeleteChat removes a chat with all that it holds. Code chat_has_active_sandbox: delete its
// sandbox first. Code chat_not_found: there is none, or not any more.
func (c *Client) DeleteChat(ctx context.Context, chatID string) error {
	return c.done(ctx, call{method: http.MethodDelete, path: at("chats", chatID)})
}

// History opens a chat's history from an offset on; a length of 0 is to its end. The caller
// closes it. A read that ends without io.EOF hasn't seen all of it.
func (c *Client) History(ctx context.Context, chatID string, offset, length int64) (io.ReadCloser, error) {
	return c.open(ctx, at("chats", chatID, "history"), nil, offset, length)
}

// PutHistory replaces a chat's history by all of r, whole or not at all. It is never
// repeated.
func (c *Client) PutHistory(ctx context.Context, chatID string, r io.Reader) (*apitype.ChatHistory, error) {
	return c.writeHistory(ctx, http.MethodPut, chatID, r)
}

// AppendHistory adds all of r to a chat's history, or nothing. It is never repeated.
func (c *Client) AppendHistory(ctx context.Context, chatID string, r io.Reader) (*apitype.ChatHistory, error) {
	return c.writeHistory(ctx, http.MethodPost, chatID, r)
}

func (c *Client) writeHistory(ctx context.Context, method, chatID string, r io.Reader) (*apitype.ChatHistory, error) {
	h := http.Header{"Content-Type": {"text/markdown; charset=utf-8"}}
	return out[apitype.ChatHistory](ctx, c, call{method: method, path: at("chats", chatID, "history"), header: h, upload: r})
}

// ReadChatTar opens an archive of all that a chat's directory holds, its history as well.
// The caller closes it.
func (c *Client) ReadChatTar(ctx context.Context, chatID string) (io.ReadCloser, error) {
	return c.open(ctx, at("chats", chatID, "tar"), nil, 0, 0)
}

// WriteChatTar unpacks an archive over a chat's directory, all of it or nothing. It is
// never repeated.
func (c *Client) WriteChatTar(ctx context.Context, chatID string, r io.Reader) error {
	return c.done(ctx, call{method: http.MethodPut, path: at("chats", chatID, "tar"), header: tarHeader(), upload: r})
}
