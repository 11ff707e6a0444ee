package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// jsonOf runs a command, and reads what it prints.
func jsonOf[T any](t *testing.T, args string) T {
	t.Helper()
	stdout, stderr, code := berm(t, "", append(strings.Fields(args), "-o", "json")...)
	var v T
	if err := json.Unmarshal([]byte(stdout), &v); err != nil || code != 0 {
		t.Fatalf("berm %s: exit code %d, %v, %s", args, code, err, stderr)
	}
	return v
}

func TestStorageCommands(t *testing.T) {
	t.Setenv("BERM_URL", startAPI(t))
	t.Setenv("BERM_TOKEN", testToken)
	dir := t.TempDir()
	t.Chdir(dir)
	write(t, "one.txt", "first\n")
	write(t, "two.txt", "second\n")
	write(t, "big", strings.Repeat("x", 2<<20))
	write(t, "h.md", "# title\n")

	id := jsonOf[apitype.Workspace](t, "workspace ensure user-7").WorkspaceID
	for _, s := range []check.Step{
		{Args: "workspace ensure user-7", Stdout: []string{"workspace:  " + id, "user:", "user-7"}},
		{Args: "workspace ensure 'a\x1bb'", Code: 1, Stderr: []string{"validation"}},
		{Args: "workspace get " + id, Stdout: []string{"user-7"}},
		{Args: "workspace usage " + id, Stdout: []string{"used:", "0 bytes", "quota:", "1048576 bytes (soft)"}},
		{Args: "workspace usage " + id + " -o json", Stdout: []string{`"quota_bytes": 1048576`}},

		{Args: "chat create c1 --workspace " + id, Stdout: []string{"chat:", "c1", id}},
		{Args: "chat create c2 --user user-7", Stdout: []string{id}},
		{Args: "chat create c1 --user user-8", Code: 1, Stderr: []string{"chat_conflict"}},
		{Args: "chat create c3", Code: 2, Stderr: []string{"workspace", "user"}},
		{Args: "chat get c1 -o json", Stdout: []string{`"chat_id": "c1"`}},
		{Args: "chat list --user user-7", Stdout: []string{"CHAT", "c1", "c2"}},
		{Args: "chat list --user user-9 -o json", Stdout: []string{"[]"}},
		{Args: "workspace chats " + id + " -o json", Stdout: []string{`"chat_id": "c2"`}},

		{Args: "chat history c1", Stdout: []string{""}},
		{Args: "chat history c1 set h.md", Stdout: []string{"8 bytes"}},
		{Args: "chat history c1 append - -o json", Stdin: "- line\n", Stdout: []string{`"size_bytes": 15`}},
		{Args: "chat history c1 show", Stdout: []string{"# title\n- line\n"}},
		{Args: "chat history c1 set", Code: 2, Stderr: []string{"say show"}},
		{Args: "chat history c1 nosuch h.md", Code: 2, Stderr: []string{"say show"}},
		{Args: "chat history c1 show h.md", Code: 2, Stderr: []string{"say show"}},
		{Args: "chat history c1 set nosuch", Code: 1, Stderr: []string{"no such file"}},

		{Args: "file put c1 one.txt --content-type text/plain", Stdout: []string{"NAME", "one.txt", "6", "text/plain"}},
		{Args: "file put c1 one.txt --no-clash", Code: 1, Stderr: []string{"precondition_failed"}},
		{Args: "file put c1 - --name stdin.txt -o json", Stdin: "from here", Stdout: []string{`"size_bytes": 9`, `"content_type": null`}},
		{Args: "file put c1 -", Code: 2, Stderr: []string{"say --name"}},
		{Args: "file put c1 " + filepath.Join(dir, "one.txt") + " two.txt", Stdout: []string{"one.txt", "two.txt", "7"}},
		{Args: "file put c2 one.txt big", Code: 1, Stderr: []string{"workspace_quota_exceeded"}},
		{Args: "file put c2 one.txt nosuch", Code: 1, Stderr: []string{"nosuch", "no such file"}},
		{Args: "file put c2 one.txt -", Code: 2, Stderr: []string{"say --name"}},
		{Args: "file put c2 one.txt two.txt --name x", Code: 2, Stderr: []string{"one file only"}},
		{Args: "file put c2 .", Code: 1, Stderr: []string{"is a directory"}},
		{Args: "file put c2 one.txt --name history.md", Code: 1, Stderr: []string{"validation"}},
		{Args: "file put c2 one.txt --name ..", Code: 1, Stderr: []string{"berm: /api/v1/chats/c2/files/..: the path has"}},
		{Args: "file list c2 -o json", Stdout: []string{"[]"}},
		{Args: "file list c1", Stdout: []string{"one.txt     6", "stdin.txt   9", "two.txt"}},

		{Args: "file cat c1 one.txt two.txt", Stdout: []string{"first\nsecond\n"}},
		{Args: "file get c1 stdin.txt", Stdout: []string{""}},
		{Args: "file get c1 two.txt there.txt", Stdout: []string{""}},
		{Args: "file get c1 two.txt -", Stdout: []string{"second\n"}},
		{Args: "file get c1 ../x", Code: 2, Stderr: []string{"say where to"}},
		{Args: "file get c1 one.txt .", Code: 1, Stderr: []string{"is a directory"}},

		{Args: "chat tar c1 c1.tar", Stdout: []string{""}},
		{Args: "chat untar c2 c1.tar", Stdout: []string{""}},
		{Args: "chat history c2", Stdout: []string{"# title\n- line\n"}},
		{Args: "file cat c2 one.txt", Stdout: []string{"first\n"}},

		{Args: "file url c1 one.txt --ttl 10m", Stdout: []string{os.Getenv("BERM_URL") + "/f/"}},
		{Args: "file url c1 up.png --method PUT --content-type image/png --max-bytes 10 -o json", Stdout: []string{`"method": "PUT"`, `"expires_at"`}},

		{Args: "file rm c1 stdin.txt nosuch", Code: 1, Stderr: []string{"chat_file_not_found"}},
		{Args: "file rm c1 --all", Stdout: []string{"2 deleted"}},
		{Args: "file rm c1 --all -o json", Stdout: []string{`"deleted": 0`}},
		{Args: "file rm c1", Code: 2, Stderr: []string{"either names or --all"}},
		{Args: "file rm c1 x --all", Code: 2, Stderr: []string{"either names or --all"}},

		{Args: "sandbox create c2", Stdout: []string{"created"}},
		{Args: "chat delete c2 c1", Code: 1, Stderr: []string{"chat_has_active_sandbox"}},
		{Args: "chat get c1", Code: 1, Stderr: []string{"chat_not_found"}},
		{Args: "sandbox rm c2", Stdout: []string{"deleted"}},
		{Args: "chat delete c2", Stdout: []string{""}},
	} {
		s.Run(t, berm)
	}
	for name, want := range map[string]string{"stdin.txt": "from here", "there.txt": "second\n"} {
		if got, err := os.ReadFile(name); err != nil || string(got) != want {
			t.Errorf("%s has %q, %v", name, got, err)
		}
	}
	// Nothing else: what failed has left nothing.
	if entries, err := os.ReadDir("."); err != nil || len(entries) != 7 {
		t.Errorf("the directory has %v, %v", entries, err)
	}
}
