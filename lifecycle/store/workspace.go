package store

import (
	"context"

	"github.com/bermhq/berm/lifecycle/quota"
)

// firstProject is the first workspace's project; each later workspace gets the next number. It is
// far from the numbers of Docker, which begin at 1, and of Kubernetes, which begin at 1048577.
const firstProject = 0x62000000

const workspaceColumns = "w.tenant, w.workspace_id, w.user_id, w.created_at, w.project"

func scanWorkspace(row scanner) (w quota.Workspace, err error) {
	var created int64
	err = row.Scan(&w.Tenant, &w.ID, &w.UserID, &created, &w.Project)
	w.CreatedAt = instant(created)
	return w, err
}

// EnsureWorkspace implements quota.Store. It is durable. The error is in errdefs' AlreadyExists
// class if w's ID is another user's.
func (s *Store) EnsureWorkspace(ctx context.Context, w quota.Workspace) (got quota.Workspace, made bool, err error) {
	return ensure(ctx, s, scanWorkspace,
		"SELECT "+workspaceColumns+" FROM workspaces w WHERE tenant = ? AND user_id = ?", []any{w.Tenant, w.UserID},
		`INSERT INTO workspaces (tenant, workspace_id, user_id, created_at, project)
			SELECT ?, ?, ?, ?, COALESCE(MAX(project) + 1, ?) FROM workspaces WHERE true ON CONFLICT (tenant, user_id) DO NOTHING`,
		w.Tenant, w.ID, w.UserID, nanos(w.CreatedAt), firstProject)
}

// Workspace implements quota.Store.
func (s *Store) Workspace(ctx context.Context, tenant, id string) (quota.Workspace, error) {
	return one(ctx, s.db, scanWorkspace, "SELECT "+workspaceColumns+" FROM workspaces w WHERE tenant = ? AND workspace_id = ?", tenant, id)
}
