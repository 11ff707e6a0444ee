package client

import (
	"context"
	"io"
	"net/http"

	"github.com/bermhq/berm/proxy/apitype"
)

// EnsureChat returns a chat, and creates it in the workspace if there is none. The sandbox
// whose key is the chat's ID mounts the chat's files. If the chat belongs to another workspace,
// the error has the code chat_conflict.
func (c *Client) EnsureChat(ctx context.Context, chatID, workspaceID string) (*apitype.Chat, error) {
	return out[apitype.Chat](ctx, c, call{
		method: http.MethodPut, path: at("chats", chatID), body: apitype.ChatRequest{WorkspaceID: workspaceID},
	})
}

// Chat returns a chat.
func (c *Client) Chat(ctx context.Context, chatID string) (*apitype.Chat, error) {
	return get[apitype.Chat](ctx, c, at("chats", chatID), nil)
}

// DeleteChat removes a chat with all its files. It fails with the code chat_has_active_sandbox
// while the chat has a sandbox, and with chat_not_found if there is no chat.
func (c *Client) DeleteChat(ctx context.Context, chatID string) error {
	return c.done(ctx, call{method: http.MethodDelete, path: at("chats", chatID)})
}

// History opens a chat's history at an offset. A length of 0 reads to its end. The caller
// closes the reader. The content is complete only if reading ends with io.EOF.
func (c *Client) History(ctx context.Context, chatID string, offset, length int64) (io.ReadCloser, error) {
	return c.open(ctx, at("chats", chatID, "history"), nil, offset, length)
}

// PutHistory replaces a chat's history by all of r, or leaves it as it was. It is never
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

// ReadChatTar opens a tar archive of a chat's directory, including its history. The caller
// closes the reader.
func (c *Client) ReadChatTar(ctx context.Context, chatID string) (io.ReadCloser, error) {
	return c.open(ctx, at("chats", chatID, "tar"), nil, 0, 0)
}

// WriteChatTar unpacks all of a tar archive over a chat's directory, or nothing. It is never
// repeated.
func (c *Client) WriteChatTar(ctx context.Context, chatID string, r io.Reader) error {
	return c.done(ctx, call{method: http.MethodPut, path: at("chats", chatID, "tar"), header: tarHeader(), upload: r})
}
