package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/lifecycle/workspace"
)

// openQuotas makes what holds sandboxes and workspaces to their quotas.
func openQuotas(ctx context.Context, cfg *config.Config, db *store.Store, log *slog.Logger) (*quota.Service, error) {
	return quota.New(ctx, quota.Options{
		Store: db, Root: cfg.Sandbox.ChatsRoot, QuotaBytes: int64(cfg.Storage.WorkspaceQuotaMB) << 20, Logger: log,
		Off:      cfg.Storage.ProjectQuotas == config.ProjectQuotasOff,
		Required: cfg.Storage.ProjectQuotas == config.ProjectQuotasRequired,
	})
}

// openWorkspaces makes the service of workspaces, nil without a root for chats.
func openWorkspaces(cfg *config.Config, db *store.Store, quotas *quota.Service) (*workspace.Service, error) {
	if cfg.Sandbox.ChatsRoot == "" {
		return nil, nil
	}
	return workspace.New(db, quotas)
}

// openChats makes the service of chats, nil without workspaces.
func openChats(ctx context.Context, cfg *config.Config, db *store.Store, quotas *quota.Service, ws *workspace.Service, manager *lifecycle.Service, log *slog.Logger, reg prometheus.Registerer) (*chat.Service, error) {
	if ws == nil {
		return nil, nil
	}
	chats, err := chat.New(ctx, chat.Options{
		Root: cfg.Sandbox.ChatsRoot, Store: db, Workspaces: ws, Quotas: quotas, Sandboxes: manager, Logger: log, Registry: reg,
	})
	if err != nil {
		return nil, fmt.Errorf("sandbox.chats_root: %w", err)
	}
	return chats, nil
}

// closeTimeout bounds the end of a removal, which is after the file that it is at.
const closeTimeout = 10 * time.Second

// closeChats ends the removal of deleted chats. The next start goes on with it.
func closeChats(ctx context.Context, chats *chat.Service) error {
	if chats == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), closeTimeout)
	defer cancel()
	if err := chats.Close(ctx); err != nil {
		return fmt.Errorf("end the removal of deleted chats: %w", err)
	}
	return nil
}

// checkChats compares the records of all chats with their files, and logs the outcome.
func checkChats(ctx context.Context, chats *chat.Service, log *slog.Logger) error {
	if chats == nil {
		return nil
	}
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
