package restart

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestDecide has each rule of Docker's: see moby's internal/restartmanager, and the
// daemon's handleContainerExit and restore.
func TestDecide(t *testing.T) {
	t.Parallel()
	now := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	exited := func(code int, ran time.Duration) Container {
		return Container{ExitCode: code, StartedAt: now.Add(-ran), FinishedAt: now, Expires: now.Add(time.Hour)}
	}
	failed := exited(1, time.Second)
	in := func(d time.Duration) time.Time { return now.Add(d) }
	row := func(name string) Row { return Row{Policy: Policy{Name: name}} }
	type change func(*Row)
	for name, tt := range map[string]struct {
		row       Row
		c         Container
		off, boot bool
		want      change // of the row, besides Exit; nil: nothing restarts
	}{
		"no":                       {row: row("no"), c: failed},
		"none":                     {row: row(""), c: failed},
		"no, boot":                 {row: row("no"), c: failed, boot: true},
		"always":                   {row: row(Always), c: exited(0, 0), want: func(r *Row) { r.Count, r.Next = 1, in(minBackoff) }},
		"always, failed":           {row: row(Always), c: failed, want: func(r *Row) { r.Count, r.Next = 1, in(minBackoff) }},
		"always, signalled":        {row: Row{Policy: Policy{Name: Always}, Stopped: true}, c: failed, want: func(r *Row) { r.Count, r.Next = 1, in(minBackoff) }},
		"always, stopped":          {row: Row{Policy: Policy{Name: Always}, Stopped: true}, c: failed, off: true},
		"always, stopped, boot":    {row: Row{Policy: Policy{Name: Always}, Stopped: true, Count: 7}, c: failed, off: true, boot: true, want: func(r *Row) { r.Count, r.Stopped, r.Backoff, r.Next = 0, false, 0, now }},
		"unless-stopped":           {row: row(UnlessStopped), c: exited(0, 0), want: func(r *Row) { r.Count, r.Next = 1, in(minBackoff) }},
		"unless-stopped, stopped":  {row: Row{Policy: Policy{Name: UnlessStopped}, Stopped: true}, c: failed},
		"unless-stopped, stp boot": {row: Row{Policy: Policy{Name: UnlessStopped}, Stopped: true}, c: failed, boot: true},
		"unless-stopped, boot":     {row: Row{Policy: Policy{Name: UnlessStopped}, Count: 3}, c: exited(0, 0), boot: true, want: func(r *Row) { r.Count, r.Backoff, r.Next = 0, 0, now }},
		"on-failure":               {row: row(OnFailure), c: failed, want: func(r *Row) { r.Count, r.Next = 1, in(minBackoff) }},
		"on-failure, success":      {row: row(OnFailure), c: exited(0, 0)},
		"on-failure, below max":    {row: Row{Policy: Policy{Name: OnFailure, MaxRetries: 3}, Count: 2}, c: failed, want: func(r *Row) { r.Count, r.Next = 3, in(minBackoff) }},
		"on-failure, at max":       {row: Row{Policy: Policy{Name: OnFailure, MaxRetries: 3}, Count: 3}, c: failed},
		"on-failure, at max, boot": {row: Row{Policy: Policy{Name: OnFailure, MaxRetries: 3}, Count: 3}, c: failed, boot: true},
		"on-failure, success boot": {row: row(OnFailure), c: exited(0, 0), boot: true},
		"on-failure, stopped boot": {row: Row{Policy: Policy{Name: OnFailure}, Stopped: true}, c: exited(143, 0), boot: true, want: func(r *Row) { r.Stopped, r.Backoff, r.Next = false, 0, now }},
		"backs off":                {row: Row{Policy: Policy{Name: Always}, Backoff: 3 * time.Second}, c: failed, want: func(r *Row) { r.Count, r.Backoff, r.Next = 1, 6*time.Second, in(6*time.Second) }},
		"backs off, at most":       {row: Row{Policy: Policy{Name: Always}, Backoff: 40 * time.Second}, c: failed, want: func(r *Row) { r.Count, r.Backoff, r.Next = 1, time.Minute, in(time.Minute) }},
		"ran for long":             {row: Row{Policy: Policy{Name: Always}, Backoff: time.Minute, Count: 8}, c: exited(1, steady), want: func(r *Row) { r.Count, r.Backoff, r.Next = 9, minBackoff, in(minBackoff) }},
		"joins, boot":              {row: row(Always), c: func() Container { c := failed; c.Joins = true; return c }(), boot: true, want: func(r *Row) { r.Backoff, r.Next = 0, in(joinDelay) }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			want := tt.row
			want.Exit = now
			if want.Backoff = max(2*want.Backoff, minBackoff); want.Backoff > maxBackoff {
				want.Backoff = maxBackoff
			}
			if tt.want != nil {
				tt.want(&want)
			}
			if diff := cmp.Diff(want, tt.row.decide(tt.c, tt.off, tt.boot, now)); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
	waiting := Row{Policy: Policy{Name: Always}, Next: now, Exit: now, Count: 1, Backoff: time.Second}
	stays := waiting
	stays.Next = time.Time{}
	for name, tt := range map[string]struct {
		c    Container
		boot bool
		want Row
	}{
		"same exit":     {c: failed, want: waiting},
		"runs":          {c: Container{Running: true, StartedAt: now, FinishedAt: in(-1), Expires: in(1)}, want: stays},
		"runs, boot":    {c: Container{Running: true, StartedAt: now, FinishedAt: in(-1), Expires: in(1)}, boot: true, want: stays},
		"never started": {c: Container{Expires: in(1)}, boot: true, want: stays},
		"expired":       {c: Container{StartedAt: in(-2), FinishedAt: in(-1), Expires: now}, want: stays},
		"expired, boot": {c: Container{StartedAt: in(-2), FinishedAt: in(-1), Expires: now}, boot: true, want: stays},
		"no expiry":     {c: Container{StartedAt: in(-2), FinishedAt: in(-1)}, want: stays},
	} {
		if diff := cmp.Diff(tt.want, waiting.decide(tt.c, false, tt.boot, now)); diff != "" {
			t.Errorf("%s: -want +got:\n%s", name, diff)
		}
	}
}
