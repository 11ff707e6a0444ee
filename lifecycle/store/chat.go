package store

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle/chat"
)

var _ chat.Store = (*Store)(nil)

// pageSize is how many chats EachChat reads at a time: whoever is called with one may use
// the store, so that no query can be open meanwhile.
const pageSize = 500

const (
	chatColumns = "tenant, chat_id, workspace_id, created_at"
	fileColumns = "tenant, chat_id, name, file_id, content_type, size, created_at, modified_at"
)

func scanChat(row scanner) (c chat.Chat, err error) {
	var created int64
	err = row.Scan(&c.Tenant, &c.ID, &c.WorkspaceID, &created)
	c.CreatedAt = instant(created)
	return c, err
}

func scanFile(row scanner) (f chat.File, err error) {
	var created, modified int64
	err = row.Scan(&f.Tenant, &f.ChatID, &f.Name, &f.ID, &f.ContentType, &f.Size, &created, &modified)
	f.CreatedAt, f.ModifiedAt = instant(created), instant(modified)
	return f, err
}

// EnsureChat is chat.Store's. It is durable. Of errdefs' NotFound class if the tenant has
// no such workspace.
func (s *Store) EnsureChat(ctx context.Context, c chat.Chat) (got chat.Chat, made bool, err error) {
	return ensure(ctx, s, scanChat,
		"SELECT "+chatColumns+" FROM chats WHERE tenant = ? AND chat_id = ?", []any{c.Tenant, c.ID},
		"INSERT INTO chats ("+chatColumns+") VALUES (?, ?, ?, ?) ON CONFLICT (tenant, chat_id) DO NOTHING",
		c.Tenant, c.ID, c.WorkspaceID, nanos(c.CreatedAt))
}

// Chat is chat.Store's.
func (s *Store) Chat(ctx context.Context, tenant, id string) (chat.Chat, error) {
	return one(ctx, s.db, scanChat, "SELECT "+chatColumns+" FROM chats WHERE tenant = ? AND chat_id = ?", tenant, id)
}

// Chats is chat.Store's. A workspace that isn't there has none.
func (s *Store) Chats(ctx context.Context, tenant, workspaceID, after string, limit int) ([]chat.Chat, error) {
	return list(ctx, s.db, scanChat, "SELECT "+chatColumns+` FROM chats
		WHERE tenant = ? AND workspace_id = ? AND chat_id > ? ORDER BY chat_id LIMIT ?`, tenant, workspaceID, after, max(limit, 0))
}

// EachChat is chat.Store's. It ends with f's first error. Chats that are made or deleted
// meanwhile may be missed.
func (s *Store) EachChat(ctx context.Context, f func(chat.Chat) error) error {
	var last chat.Chat
	for {
		page, err := list(ctx, s.db, scanChat, "SELECT "+chatColumns+` FROM chats
			WHERE (tenant, chat_id) > (?, ?) ORDER BY tenant, chat_id LIMIT ?`, last.Tenant, last.ID, pageSize)
		if err != nil {
			return err
		}
		for _, c := range page {
			if err := f(c); err != nil {
				return err
			}
			last = c
		}
		if len(page) < pageSize {
			return nil
		}
	}
}

// DeleteChat is chat.Store's. It is durable.
func (s *Store) DeleteChat(ctx context.Context, tenant, id string) error {
	return s.durably(ctx, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, "DELETE FROM chats WHERE tenant = ? AND chat_id = ?", tenant, id)
		return err
	})
}

// Files is chat.Store's. A chat that isn't there has none.
func (s *Store) Files(ctx context.Context, tenant, chatID, after string, limit int) ([]chat.File, error) {
	return list(ctx, s.db, scanFile, "SELECT "+fileColumns+` FROM files
		WHERE tenant = ? AND chat_id = ? AND name > ? ORDER BY name LIMIT ?`, tenant, chatID, after, max(limit, 0))
}

// CountFiles is chat.Store's. A chat that isn't there has none.
func (s *Store) CountFiles(ctx context.Context, tenant, chatID string) (int, error) {
	scan := func(row scanner) (n int, err error) {
		err = row.Scan(&n)
		return n, err
	}
	return one(ctx, s.db, scan, "SELECT COUNT(*) FROM files WHERE tenant = ? AND chat_id = ?", tenant, chatID)
}

// File is chat.Store's.
func (s *Store) File(ctx context.Context, tenant, id string) (chat.File, error) {
	return one(ctx, s.db, scanFile, "SELECT "+fileColumns+" FROM files WHERE tenant = ? AND file_id = ?", tenant, id)
}

// FileNamed is chat.Store's.
func (s *Store) FileNamed(ctx context.Context, tenant, chatID, name string) (chat.File, error) {
	return one(ctx, s.db, scanFile, "SELECT "+fileColumns+" FROM files WHERE tenant = ? AND chat_id = ? AND name = ?", tenant, chatID, name)
}

// PutFiles is chat.Store's. It is durable. Of errdefs' NotFound class if a chat isn't
// there, and AlreadyExists if an ID is another file's.
func (s *Store) PutFiles(ctx context.Context, files ...chat.File) error {
	if len(files) == 0 {
		return nil
	}
	return s.durably(ctx, func(tx *sql.Tx) error { return putFiles(ctx, tx, files) })
}

func putFiles(ctx context.Context, tx *sql.Tx, files []chat.File) error {
	return each(ctx, tx, "INSERT INTO files ("+fileColumns+`) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
		ON CONFLICT (tenant, chat_id, name) DO UPDATE
		SET content_type = excluded.content_type, size = excluded.size, modified_at = excluded.modified_at`,
		files, func(f chat.File) []any {
			return []any{f.Tenant, f.ChatID, f.Name, f.ID, f.ContentType, f.Size, nanos(f.CreatedAt), nanos(f.ModifiedAt)}
		})
}

// DeleteFiles is chat.Store's. It may be undone when the machine crashes; the check of
// files at start-up does it again, as their content is gone.
func (s *Store) DeleteFiles(ctx context.Context, tenant string, ids ...string) error {
	if len(ids) == 0 {
		return nil
	}
	return inTx(ctx, s.db, func(tx *sql.Tx) error {
		return each(ctx, tx, "DELETE FROM files WHERE tenant = ? AND file_id = ?", ids, func(id string) []any { return []any{tenant, id} })
	})
}

// PutChange is chat.Store's. It survives a crash of the machine. Of errdefs' NotFound
// class if the chat isn't there, and AlreadyExists if the change is.
func (s *Store) PutChange(ctx context.Context, c chat.Change) error {
	if err := own(c, c.Files); err != nil {
		return err
	}
	return s.durably(ctx, func(tx *sql.Tx) error {
		if _, err := tx.ExecContext(ctx, "INSERT INTO changes (change_id, tenant, chat_id) VALUES (?, ?, ?)", c.ID, c.Tenant, c.ChatID); err != nil {
			return err
		}
		return each(ctx, tx, `INSERT INTO changed_files (change_id, name, file_id, content_type, size, created_at, modified_at)
			VALUES (?, ?, ?, ?, ?, ?, ?)`, c.Files, func(f chat.File) []any {
			return []any{c.ID, f.Name, f.ID, f.ContentType, f.Size, nanos(f.CreatedAt), nanos(f.ModifiedAt)}
		})
	})
}

// FinishChange is chat.Store's. Of errdefs' NotFound class if the change isn't there: its
// chat may have been deleted. It may be undone when the machine crashes; the change is
// listed again then, and finishing it once more does no harm.
func (s *Store) FinishChange(ctx context.Context, c chat.Change, files []chat.File) error {
	if err := own(c, files); err != nil {
		return err
	}
	return inTx(ctx, s.db, func(tx *sql.Tx) error {
		there, err := changed(tx.ExecContext(ctx, "DELETE FROM changes WHERE change_id = ? AND tenant = ? AND chat_id = ?", c.ID, c.Tenant, c.ChatID))
		if err != nil {
			return err
		}
		if !there {
			return fmt.Errorf("change %s: %w", c.ID, errdefs.ErrNotFound)
		}
		return putFiles(ctx, tx, files)
	})
}

// own refuses files of other chats than the change's.
func own(c chat.Change, files []chat.File) error {
	for _, f := range files {
		if f.Tenant != c.Tenant || f.ChatID != c.ChatID {
			return fmt.Errorf("write the store: change %s of chat %q has a file of another chat: %w", c.ID, c.ChatID, errdefs.ErrInvalidArgument)
		}
	}
	return nil
}

// Changes is chat.Store's.
func (s *Store) Changes(ctx context.Context) ([]chat.Change, error) {
	var changes []chat.Change
	err := inTx(ctx, s.db, func(tx *sql.Tx) (err error) { // so that both are of one moment
		changes, err = list(ctx, tx, func(row scanner) (c chat.Change, err error) { return c, row.Scan(&c.ID, &c.Tenant, &c.ChatID) },
			"SELECT change_id, tenant, chat_id FROM changes ORDER BY change_id")
		for i, c := range changes {
			if err != nil {
				break
			}
			changes[i].Files, err = list(ctx, tx, scanFile, "SELECT "+fileColumns+` FROM changes JOIN changed_files USING (change_id)
				WHERE change_id = ? ORDER BY name`, c.ID)
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	return changes, nil
}
