package sandboxapi

import (
	"cmp"
	"net/http"

	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/apitype"
)

// ensureWorkspace is get-or-create.
func (a *api) ensureWorkspace(w http.ResponseWriter, r *http.Request) error {
	if err := skipBody(w, r); err != nil {
		return err
	}
	ws, made, err := a.Workspaces.EnsureWorkspace(r.Context(), proxy.ExchangeOf(r.Context()).Caller.Tenant, param(r, "user_id"))
	return reply(w, okOrCreated(made), workspaceOf(ws), err)
}

func okOrCreated(made bool) int {
	if made {
		return http.StatusCreated
	}
	return http.StatusOK
}

func (a *api) getWorkspace(w http.ResponseWriter, r *http.Request) error {
	ws, err := a.Workspaces.Workspace(r.Context(), proxy.ExchangeOf(r.Context()).Caller.Tenant, param(r, "workspace_id"))
	return reply(w, http.StatusOK, workspaceOf(ws), err)
}

func (a *api) workspaceUsage(w http.ResponseWriter, r *http.Request) error {
	u, err := a.Workspaces.Usage(r.Context(), proxy.ExchangeOf(r.Context()).Caller.Tenant, param(r, "workspace_id"))
	if err != nil {
		return err
	}
	out := apitype.WorkspaceUsage{WorkspaceID: u.WorkspaceID, UsedBytes: u.UsedBytes, Enforcement: cmp.Or(u.Enforcement, "none")}
	if u.QuotaBytes > 0 {
		out.QuotaBytes = &u.QuotaBytes
	}
	return reply(w, http.StatusOK, out, nil)
}

// listChats answers a page of a workspace's chats.
func (a *api) listChats(w http.ResponseWriter, r *http.Request) error {
	tenant := proxy.ExchangeOf(r.Context()).Caller.Tenant
	limit, after, err := pageQuery(r.URL.Query(), tenant, maxLimit)
	if err != nil {
		return err
	}
	page, more, err := a.Chats.List(r.Context(), tenant, param(r, "workspace_id"), after, limit)
	if err != nil {
		return err
	}
	out := apitype.ChatList{Chats: each(page, chatOf)}
	if more && len(page) > 0 {
		out.NextCursor = cursor{Tenant: tenant, After: page[len(page)-1].ID}.String()
	}
	return reply(w, http.StatusOK, out, nil)
}

func workspaceOf(w quota.Workspace) apitype.Workspace {
	return apitype.Workspace{WorkspaceID: w.ID, UserID: w.UserID, CreatedAt: w.CreatedAt.UTC()}
}
