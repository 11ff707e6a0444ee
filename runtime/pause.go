package runtime

import (
	"context"
	"strings"
	"time"
)

const (
	maxFreezes  = 5
	freezePause = 200 * time.Millisecond
)

// Freeze calls pause to freeze a container's processes, up to five times while the OCI runtime can't. runc
// gives up after 0.2 s if the host leaves the processes no time to stop. It thaws them then.
func Freeze(ctx context.Context, pause func() error) error {
	for tries := 1; ; tries++ {
		err := pause()
		if err == nil || tries == maxFreezes || !strings.Contains(err.Error(), "unable to freeze") {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(freezePause):
		}
	}
}
