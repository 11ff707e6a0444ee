package serve

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/ceiling"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/project"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/lifecycle/workspace"
)

// openWorkspaces makes the service of workspaces, nil without a root for chats. Manager
// answers the one that there is later.
func openWorkspaces(cfg *config.Config, db *store.Store, manager func() *lifecycle.Manager, log *slog.Logger) (*workspace.Service, error) {
	root := cfg.Sandbox.ChatsRoot
	if root == "" {
		return nil, nil
	}
	opts := workspace.Options{
		Store: db, QuotaBytes: int64(cfg.Storage.WorkspaceQuotaMB) << 20,
		Open:   func(tenant, chatID string) (*os.Root, error) { return chat.Open(root, tenant, chatID) },
		Keys:   func(tenant, key string) ([]string, error) { return chat.Keys(root, tenant, key) },
		Live:   func(tenant, chatID string) bool { return manager().HasSandbox(tenant, chatID) },
		Follow: project.Follow,
	}
	if cfg.Storage.ProjectQuotas != config.ProjectQuotasOff {
		projects, err := project.Open(root)
		switch {
		case err == nil:
			opts.Projects = projects // without a quota, too: the limits of an earlier one are to go
		case opts.QuotaBytes == 0:
		case cfg.Storage.ProjectQuotas == config.ProjectQuotasRequired:
			return nil, fmt.Errorf("storage.project_quotas is required, but the kernel can't hold workspaces to their quotas here: %w", err)
		case errdefs.IsNotImplemented(err):
			log.Info("workspace_quota_soft", "chats_root", root, "reason", err.Error())
		default:
			return nil, fmt.Errorf("storage.project_quotas: %w", err)
		}
	}
	return workspace.New(opts)
}

// openCeilings makes what has the kernel hold sandboxes' own workspaces to their quotas.
func openCeilings(ctx context.Context, cfg *config.Config, db *store.Store, log *slog.Logger) (*ceiling.Service, error) {
	opts := ceiling.Options{
		Store: db,
		Find: func(dir string) (ceiling.Projects, error) {
			q, err := project.Find(dir)
			if err != nil {
				return nil, err
			}
			return q, nil
		},
		Off:    cfg.Storage.ProjectQuotas == config.ProjectQuotasOff,
		Logger: log,
	}
	if root := cfg.Sandbox.ChatsRoot; root != "" {
		resolved, err := filepath.EvalSymlinks(root)
		if err != nil {
			return nil, fmt.Errorf("sandbox.chats_root: %w", err)
		}
		opts.Except = []string{resolved}
	}
	return ceiling.New(ctx, opts)
}

// openChats makes the service of chats, nil without workspaces.
func openChats(ctx context.Context, cfg *config.Config, db *store.Store, ws *workspace.Service, manager *lifecycle.Manager, log *slog.Logger, reg prometheus.Registerer) (*chat.Service, error) {
	if ws == nil {
		return nil, nil
	}
	chats, err := chat.New(ctx, chat.Options{
		Root: cfg.Sandbox.ChatsRoot, Store: db, Workspaces: ws, Sandboxes: manager, Logger: log, Registry: reg,
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

// checkChats brings the records and the content of all chats together, and tells of it.
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
		"chats", report.Chats, "finished", report.Finished, "adopted", report.Adopted, "dropped", report.Dropped,
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
