package serve

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve/storetest"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// stateHolds reads a state directory as the next server would.
func stateHolds(t *testing.T, dir string) string {
	t.Helper()
	must(t, check.Value(openState(dir))(t).Close())
	return storetest.Holds(t, dir)
}

// stateHoldsCopy is stateHolds without a trace.
func stateHoldsCopy(t *testing.T, dir string) string {
	t.Helper()
	to := t.TempDir()
	must(t, os.CopyFS(filepath.Join(to, "state"), os.DirFS(dir)))
	return stateHolds(t, filepath.Join(to, "state"))
}

// backedUp returns a backup of a state directory.
func backedUp(t *testing.T, dir string) []byte {
	t.Helper()
	cfg := config.Default()
	cfg.StateDir = dir
	var data []byte
	_, err := MakeBackup(t.Context(), cfg, func(path string) error {
		data = []byte(storetest.Read(t, path))
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// Wherever a restore is cut off, the next process finds the old store or the new one, each
// with its own instance, and the old one isn't lost.
func TestRestoreCutOff(t *testing.T) {
	t.Parallel() // it waits for the disk
	dir := t.TempDir()
	from := filepath.Join(dir, "from")
	storetest.Fill(t, from, "backed", "up")
	backup := backedUp(t, from)
	fresh := stateHolds(t, from)
	stop := errors.New("cut off")
	for n := 0; ; n++ {
		to := filepath.Join(dir, fmt.Sprint(n))
		storetest.Fill(t, to, "old")
		old := stateHoldsCopy(t, to)
		done := 0
		_, err := restore(t.Context(), to, "", bytes.NewReader(backup), true, func(from, to string) error {
			if done == n {
				return stop
			}
			done++
			return os.Rename(from, to)
		})
		want := fresh
		if n == 0 {
			want = old
		}
		if err != nil && n > 0 {
			// Who tries again hears what has been done, whatever becomes of that.
			if !strings.Contains(err.Error(), "the next restore, puts it there first") {
				t.Error(err)
			}
			_, err := restore(t.Context(), to, "", strings.NewReader(""), false, os.Rename)
			if said := fmt.Sprint(err); !strings.Contains(said, "a restore that was cut off has been finished, and what was there is kept in "+to+"/"+stateReplaced) ||
				!strings.Contains(said, "another one: read the backup") {
				t.Errorf("after %d steps and one more restore: %s", n, said)
			}
		}
		if got := stateHolds(t, to); got != want {
			t.Errorf("after %d steps it holds %s, want %s (old %s, new %s)", n, got, want, old, fresh)
		}
		kept, globErr := filepath.Glob(filepath.Join(to, stateReplaced+"*"))
		if globErr != nil || len(kept) != min(n, 1) {
			t.Errorf("after %d steps there is %q, %v", n, kept, globErr)
		} else if n > 0 {
			if got := stateHolds(t, kept[0]); got != old {
				t.Errorf("after %d steps %s is kept, want %s", n, got, old)
			}
		}
		if left, err := os.ReadDir(filepath.Join(to, stateScratch)); err != nil || len(left) > 0 {
			t.Errorf("left: %v, %v", left, err)
		}
		if err == nil {
			if n < 6 {
				t.Errorf("it took %d steps only", n)
			}
			return
		}
		if !errors.Is(err, stop) {
			t.Fatal(err)
		}
	}
}

// A restore into an empty directory that is cut off is finished by the next one, which says so.
func TestRestoreAfterCutOff(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
	storetest.Fill(t, from, "backed", "up")
	backup := backedUp(t, from)
	cutOff := func() {
		t.Helper()
		steps := 0
		_, err := restore(t.Context(), to, "", bytes.NewReader(backup), true, func(from, to string) error {
			if steps++; steps > 1 {
				return errors.New("cut off")
			}
			return os.Rename(from, to)
		})
		if err == nil {
			t.Fatal("it wasn't cut off")
		}
	}
	cutOff()
	_, err := restore(t.Context(), to, "", bytes.NewReader(backup), false, os.Rename)
	if said := fmt.Sprint(err); !strings.Contains(said, "a restore that was cut off has been finished; another one: ") || !strings.Contains(said, "isn't empty; --force") {
		t.Error(err)
	}
	cutOff()
	r, err := restore(t.Context(), to, "", bytes.NewReader(backup), true, os.Rename)
	if err != nil || !strings.HasPrefix(r.Earlier, "a restore that was cut off has been finished, and what was there is kept in "+to+"/replaced-20") || !strings.HasPrefix(r.Kept, to+"/replaced-20") {
		t.Errorf("%+v, %v", r, err)
	}
	if got, want := stateHolds(t, to), stateHolds(t, from); got != want {
		t.Errorf("it holds %s, want %s", got, want)
	}
}
