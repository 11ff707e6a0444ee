package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"

	"github.com/bermhq/berm/proxy/apitype"
)

// EnsureWorkspace answers the workspace of a user, and makes it if there is none. A user
// has exactly one.
func (c *Client) EnsureWorkspace(ctx context.Context, userID string) (*apitype.Workspace, error) {
	return out[apitype.Workspace](ctx, c, call{method: http.MethodPut, path: at("users", userID, "workspace")})
}

// Workspace answers a workspace.
func (c *Client) Workspace(ctx context.Context, workspaceID string) (*apitype.Workspace, error) {
	return get[apitype.Workspace](ctx, c, at("workspaces", workspaceID), nil)
}

// WorkspaceUsage measures what all chats of a workspace hold.
func (c *Client) WorkspaceUsage(ctx context.Context, workspaceID string) (*apitype.WorkspaceUsage, error) {
	return get[apitype.WorkspaceUsage](ctx, c, at("workspaces", workspaceID, "usage"), nil)
}

// Chats gives a workspace's chats in the order of their IDs, page by page; a page size of
// 0 is the server's. It ends after the first error.
func (c *Client) Chats(ctx context.Context, workspaceID string, pageSize int) iter.Seq2[apitype.Chat, error] {
	return pages(ctx, c, at("workspaces", workspaceID, "chats"), pageQuery(pageSize), func(page *apitype.ChatList) ([]apitype.Chat, string, error) {
		return page.Chats, page.NextCursor, nil
	})
}

func pageQuery(size int) url.Values {
	q := url.Values{}
	set(q, "limit", size)
	return q
}
