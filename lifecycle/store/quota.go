package store

import (
	"context"
	"database/sql"

	"github.com/bermhq/berm/lifecycle/quota"
)

var _ quota.Store = (*Store)(nil)

const projectColumns = "project, session_id, dir"

func scanProject(row scanner) (p quota.Project, err error) {
	err = row.Scan(&p.ID, &p.SessionID, &p.Dir)
	return p, err
}

// Projects implements quota.Store.
func (s *Store) Projects(ctx context.Context) ([]quota.Project, error) {
	return list(ctx, s.db, scanProject, "SELECT "+projectColumns+" FROM ceilings ORDER BY project")
}

// AddProject implements quota.Store. The error is in errdefs' AlreadyExists class if the directory
// has a project.
func (s *Store) AddProject(ctx context.Context, sessionID, dir string) (p quota.Project, err error) {
	err = s.durably(ctx, func(tx *sql.Tx) error {
		p, err = scanProject(tx.QueryRowContext(ctx, "INSERT INTO ceilings (session_id, dir) VALUES (?, ?) RETURNING "+projectColumns, sessionID, dir))
		return err
	})
	return p, err
}

// PassProject implements quota.Store.
func (s *Store) PassProject(ctx context.Context, project uint32, sessionID string) error {
	return s.durably(ctx, run(ctx, "UPDATE ceilings SET session_id = ? WHERE project = ?", sessionID, project))
}

// DeleteProject implements quota.Store.
func (s *Store) DeleteProject(ctx context.Context, project uint32) error {
	return s.durably(ctx, run(ctx, "DELETE FROM ceilings WHERE project = ?", project))
}

// WorkspaceOf implements quota.Store.
func (s *Store) WorkspaceOf(ctx context.Context, tenant, chatID string) (quota.Workspace, error) {
	return one(ctx, s.db, scanWorkspace, "SELECT "+workspaceColumns+
		" FROM chats c JOIN workspaces w USING (tenant, workspace_id) WHERE c.tenant = ? AND c.chat_id = ?", tenant, chatID)
}

// ChatIDs implements quota.Store. A missing workspace has none.
func (s *Store) ChatIDs(ctx context.Context, tenant, workspaceID string) ([]string, error) {
	if workspaceID == "" {
		return list(ctx, s.db, value[string], "SELECT chat_id FROM chats WHERE tenant = ? ORDER BY chat_id", tenant)
	}
	return list(ctx, s.db, value[string],
		"SELECT chat_id FROM chats WHERE tenant = ? AND workspace_id = ? ORDER BY chat_id", tenant, workspaceID)
}
