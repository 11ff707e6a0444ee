package doctor

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
)

// checkSeals checks the seal key, and counts containers of this instance with a seal of another
// key.
func checkSeals(ctx context.Context, limit time.Duration, e *engineFacts, s *storageFacts) []finding {
	const id = "storage.seal_key"
	path := filepath.Join(e.cfg.StateDir, serve.StateSealKey)
	key, err := reading(ctx, limit, path, func() ([]byte, error) { return serve.SealKey(e.cfg.StateDir) })
	if err == nil && (s.instance == "" || e.err != nil) {
		return nil
	}
	var sealer *lifecycle.Sealer
	if err == nil {
		sealer, err = lifecycle.NewSealer(ctx, lifecycle.SealerOptions{Key: key, Owner: s.instance})
	}
	if err != nil {
		return judge(id, bad(true, said(err), wontStart, "restore it from a backup"))
	}
	list, err := serve.Within(ctx, limit, func(ctx context.Context) ([]runtime.Container, error) {
		return e.client.List(ctx, map[string]string{lifecycle.LabelOwner: s.instance, lifecycle.LabelSeal: ""})
	})
	foreign := 0
	for _, c := range list {
		if !sealer.Valid(lifecycle.ObjectContainer, c.ID, c.Labels) {
			foreign++
		}
	}
	if err != nil {
		return nil // engine.reachable reports it
	}
	return judge(id,
		soft(foreign > 0, fmt.Sprintf("%d containers carry this instance's ID, and a seal of another key", foreign), "Berm neither enters nor removes them",
			"restore "+path+" if it was lost; else remove the containers by hand"),
		okay(key == nil, "made by the next start of berm serve"),
		okay(true, path))
}
