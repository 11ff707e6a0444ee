package store

import (
	"context"

	"github.com/bermhq/berm/lifecycle/chat"
)

var _ chat.Store = (*Store)(nil)

// pageSize is how many chats EachChat reads at a time. No query may be open while it calls f,
// since f may use the store.
const pageSize = 500

const (
	chatColumns = "tenant, chat_id, workspace_id, created_at"
	fileColumns = "tenant, chat_id, name, file_id, created_at, content_type, inode, old_type, old_inode"
)

func scanChat(row scanner) (c chat.Chat, err error) {
	var created int64
	err = row.Scan(&c.Tenant, &c.ID, &c.WorkspaceID, &created)
	c.CreatedAt = instant(created)
	return c, err
}

// row is a record of a chat.
type row struct {
	tenant, chatID string
	chat.Record
}

func scanFile(from scanner) (r row, err error) {
	var created, inode, old int64
	err = from.Scan(&r.tenant, &r.chatID, &r.Name, &r.ID, &created, &r.ContentType, &inode, &r.OldType, &old)
	r.CreatedAt, r.Identity, r.OldIdentity = instant(created), uint64(inode), uint64(old)
	return r, err
}

// EnsureChat implements chat.Store. It is durable. The error is in errdefs' NotFound class if the
// tenant has no such workspace.
func (s *Store) EnsureChat(ctx context.Context, c chat.Chat) (got chat.Chat, made bool, err error) {
	return ensure(ctx, s, scanChat,
		"SELECT "+chatColumns+" FROM chats WHERE tenant = ? AND chat_id = ?", []any{c.Tenant, c.ID},
		"INSERT INTO chats ("+chatColumns+") VALUES (?, ?, ?, ?) ON CONFLICT (tenant, chat_id) DO NOTHING",
		c.Tenant, c.ID, c.WorkspaceID, nanos(c.CreatedAt))
}

// Chat implements chat.Store.
func (s *Store) Chat(ctx context.Context, tenant, id string) (chat.Chat, error) {
	return one(ctx, s.db, scanChat, "SELECT "+chatColumns+" FROM chats WHERE tenant = ? AND chat_id = ?", tenant, id)
}

// Chats implements chat.Store. A missing workspace has none.
func (s *Store) Chats(ctx context.Context, tenant, workspaceID, after string, limit int) ([]chat.Chat, error) {
	return list(ctx, s.db, scanChat, "SELECT "+chatColumns+` FROM chats
		WHERE tenant = ? AND workspace_id = ? AND chat_id > ? ORDER BY chat_id LIMIT ?`, tenant, workspaceID, after, max(limit, 0))
}

// EachChat implements chat.Store. It ends with f's first error. It may miss chats that are made or
// deleted meanwhile.
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

// DeleteChat implements chat.Store. It is durable.
func (s *Store) DeleteChat(ctx context.Context, tenant, id string) error {
	return s.durably(ctx, run(ctx, "DELETE FROM chats WHERE tenant = ? AND chat_id = ?", tenant, id))
}

// EachRecord implements chat.Store. A missing chat has none.
func (s *Store) EachRecord(ctx context.Context, tenant, chatID, from, to string, f func(chat.Record)) error {
	_, err := eachRow(ctx, s.db, func(at scanner) error {
		r, err := scanFile(at)
		if err == nil {
			f(r.Record)
		}
		return err
	}, "SELECT "+fileColumns+` FROM files
		WHERE tenant = ? AND chat_id = ? AND name >= ? AND (name <= ? OR ? = '') ORDER BY name`, tenant, chatID, from, to, to)
	return err
}

// CountRecords implements chat.Store. A missing chat has none.
func (s *Store) CountRecords(ctx context.Context, tenant, chatID string) (int, error) {
	return one(ctx, s.db, value[int], "SELECT COUNT(*) FROM files WHERE tenant = ? AND chat_id = ?", tenant, chatID)
}

// RecordOf implements chat.Store.
func (s *Store) RecordOf(ctx context.Context, tenant, fileID string) (chatID string, r chat.Record, err error) {
	got, err := one(ctx, s.db, scanFile, "SELECT "+fileColumns+" FROM files WHERE tenant = ? AND file_id = ?", tenant, fileID)
	return got.chatID, got.Record, err
}

// PutRecords implements chat.Store. The error is in errdefs' NotFound class if there is no such
// chat, and in AlreadyExists if an ID is another file's.
func (s *Store) PutRecords(ctx context.Context, tenant, chatID string, records []chat.Record) error {
	if len(records) == 0 {
		return nil
	}
	return s.durably(ctx, runEach(ctx, "INSERT INTO files ("+fileColumns+`) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)
		ON CONFLICT (tenant, chat_id, name) DO UPDATE SET content_type = excluded.content_type, inode = excluded.inode,
		old_type = excluded.old_type, old_inode = excluded.old_inode`, records, func(r chat.Record) []any {
		return []any{tenant, chatID, r.Name, r.ID, nanos(r.CreatedAt), r.ContentType, int64(r.Identity), r.OldType, int64(r.OldIdentity)}
	}))
}

// DeleteRecords implements chat.Store. A crash of the machine may undo it. Then the check of chats
// at the start deletes the records again, since their files are gone.
func (s *Store) DeleteRecords(ctx context.Context, tenant string, ids []string) error {
	if len(ids) == 0 {
		return nil
	}
	return inTx(ctx, s.db, runEach(ctx, "DELETE FROM files WHERE tenant = ? AND file_id = ?", ids, func(id string) []any { return []any{tenant, id} }))
}
