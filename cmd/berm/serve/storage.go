package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/lifecycle/store"
)

// openQuotas makes the service that enforces the quotas of sandboxes and workspaces.
func openQuotas(ctx context.Context, cfg *config.Config, db *store.Store, log *slog.Logger) (*quota.Service, error) {
	return quota.New(ctx, quota.Options{
		Store: db, Root: cfg.Sandbox.ChatsRoot, QuotaBytes: int64(cfg.Storage.WorkspaceQuotaMB) << 20, Logger: log,
		Off:      cfg.Storage.ProjectQuotas == config.ProjectQuotasOff,
		Required: cfg.Storage.ProjectQuotas == config.ProjectQuotasRequired,
	})
}

// closeTimeout bounds the end of a removal, which is after the file that it is at.
const closeTimeout = 10 * time.Second

// openChats makes the service of chats.
func (s *server) openChats(ctx context.Context) (err error) {
	s.chats, err = chat.New(ctx, chat.Options{
		Root: s.cfg.Sandbox.ChatsRoot, Store: s.db, Quotas: s.quotas, Sandboxes: s.manager, Logger: s.log, Registry: s.tel.registry,
	})
	if err != nil {
		return fmt.Errorf("sandbox.chats_root: %w", err)
	}
	s.undo.add(func() error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
		defer cancel()
		if err := s.chats.Close(ctx); err != nil { // the next start goes on with it
			s.log.WarnContext(ctx, "staging_not_removed", "error", "end the removal of deleted chats: "+err.Error())
		}
		return nil
	})
	return nil
}

// checkChats compares the records of all chats with their files, and logs the outcome.
func checkChats(ctx context.Context, chats *chat.Service, log *slog.Logger) error {
	start := time.Now()
	report, err := chats.Check(ctx)
	if ctx.Err() != nil && errors.Is(err, ctx.Err()) {
		return nil // the next start goes on with it
	}
	attrs := []any{
		"chats", report.Chats, "finished", report.Finished, "dropped", report.Dropped,
		"removed", report.Removed, "failed", report.Failed, "seconds", time.Since(start).Seconds(),
	}
	if err != nil || report.Failed > 0 {
		// Every chat is looked at again when it is used.
		log.WarnContext(ctx, "storage_check_incomplete", append(attrs, "error", err)...)
		return nil
	}
	log.InfoContext(ctx, "storage_checked", attrs...)
	return nil
}
