package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// A server is backed up while it works, killed, and restored, once in its place and once
// after its state directory was lost: what was made since the backup is there, what was
// deleted isn't, and nothing leaks.
func TestRestore(t *testing.T) {
	t.Parallel()
	e := commonEngine(t, "docker")
	b := newStorageFixture(t, e, "BERM_ENGINE_INSTANCE=") // which is in the state directory then
	ctx := t.Context()
	state, file := b.server.stateDir(), filepath.Join(t.TempDir(), "berm.tar")
	b.server.instance = readString(t, filepath.Join(state, "instance"))
	sessions := map[string]string{}
	note := func(keys ...string) {
		t.Helper()
		for _, key := range keys {
			sb := check.Value(b.c.Create(ctx, key, apitype.SandboxRequest{}))(t)
			sessions[key] = sb.SessionID
		}
	}
	put := func(chat, name string) {
		t.Helper()
		must(t, b.put(chat, name, name))
	}
	b.chat("user", "kept")
	b.chat("gone user", "gone")
	put("kept", "before")
	note("kept", "gone")

	var stop atomic.Bool
	begun, ended := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		for ; !stop.Load() || n == 0; n++ {
			if err := b.put("kept", fmt.Sprint("during ", n), "x"); err != nil {
				t.Errorf("during the backup: %v", err)
			}
			if n == 0 {
				close(begun)
			}
		}
		ended <- n
	}()
	<-begun
	check.Step{Args: "store backup " + file + " --state-dir " + state, Stderr: []string{"instance " + b.server.instance, "sandboxes: 2", "chats: 2"}}.Run(t, berm)
	stop.Store(true)
	during := <-ended

	b.chat("later user", "later")
	put("later", "early")
	put("kept", "after")
	note("later", "plain")
	must(t, second(b.c.Delete(ctx, "gone")))
	must(t, b.c.DeleteChat(ctx, "gone"))
	delete(sessions, "gone")

	// With the state directory, the sockets are lost that the sandboxes' agents dial.
	for _, lost := range []bool{false, true} {
		b.server.Kill()
		if lost {
			must(t, os.RemoveAll(state))
		}
		check.Step{Args: "store restore " + file + " --force --state-dir " + state, Stdout: []string{"restored", "sandboxes: 2"}}.Run(t, berm)
		b.server.start(t)
		if n := containersOf(t, e, b.server); n != len(sessions) {
			t.Errorf("lost %v: there are %d containers, want %d", lost, n, len(sessions))
		}
		for key, session := range sessions {
			sb, err := b.c.Get(ctx, key)
			if err != nil || sb.SessionID != session || sb.Status != "running" {
				t.Errorf("lost %v: %s: %+v, %v", lost, key, sb, err)
			}
			res, err := b.c.Exec(ctx, key, apitype.ExecRequest{Command: apitype.Command{"echo", "hello"}})
			if err != nil || res.Stdout != "hello\n" || res.SessionID != session {
				t.Errorf("lost %v: in %s: %+v, %v", lost, key, res, err)
			}
		}
		wantCode(t, second(b.c.Get(ctx, "gone")), "not_found")
		// It is there again without files, or gone if the kill came before its removal was done.
		for f, err := range b.c.ChatFiles(ctx, "gone", 0) {
			if err == nil {
				t.Errorf("lost %v: a chat that was deleted holds %q", lost, f.Name)
			} else {
				wantCode(t, err, "chat_not_found")
			}
		}
		want := []string{"after", "before"}
		for i := range during {
			want = append(want, fmt.Sprint("during ", i))
		}
		slices.Sort(want)
		if got := b.names("kept"); !slices.Equal(got, want) {
			t.Errorf("lost %v: the chat's files are %q, want %q", lost, got, want)
		}
		b.in(t).wantRead("kept", "after", "after")
		wantCode(t, second(b.read("later", "early")), "chat_not_found")
		w, err := b.c.EnsureWorkspace(ctx, "later user")
		if err == nil {
			_, err = b.c.EnsureChat(ctx, "later", w.WorkspaceID)
		}
		must(t, err)
		b.in(t).wantRead("later", "early", "early")
	}
	for key := range sessions {
		must(t, second(b.c.Delete(ctx, key)))
	}
	b.server.stop()
	wantNothing(t, e, b.server)
	check.Step{Args: "store check --state-dir " + state, Stdout: []string{"sound", "sandboxes: 0"}}.Run(t, berm)
}
