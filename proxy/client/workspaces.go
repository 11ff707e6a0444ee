package client

import (
	"context"
	"iter"
	"net/http"
	"net/url"

	"github.com/bermhq/berm/proxy/apitype"
)

// EnsureWorkspace returns the workspace of a user, and creates it if there is none. A user has
// exactly one.
func (c *Client) EnsureWorkspace(ctx context.Context, userID string) (*apitype.Workspace, error) {
	return out[apitype.Workspace](ctx, c, call{method: http.MethodPut, path: at("users", userID, "workspace")})
}

// Workspace returns a workspace.
func (c *Client) Workspace(ctx context.Context, workspaceID string) (*apitype.Workspace, error) {
	return get[apitype.Workspace](ctx, c, at("workspaces", workspaceID), nil)
}

// WorkspaceUsage measures the files of all chats of a workspace.
func (c *Client) WorkspaceUsage(ctx context.Context, workspaceID string) (*apitype.WorkspaceUsage, error) {
	return get[apitype.WorkspaceUsage](ctx, c, at("workspaces", workspaceID, "usage"), nil)
}

// Chats yields a workspace's chats in the order of their IDs, page by page. A page size of 0 is
// the server's. The sequence ends after the first error.
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
