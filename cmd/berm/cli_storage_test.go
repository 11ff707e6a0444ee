package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bermhq/berm/proxy/apitype"
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
	for _, s := range []step{
		{args: "workspace ensure user-7", stdout: []string{"workspace:  " + id, "user:", "user-7"}},
		{args: "workspace ensure 'a\x1bb'", code: 1, stderr: []string{"validation"}},
		{args: "workspace get " + id, stdout: []string{"user-7"}},
		{args: "workspace usage " + id, stdout: []string{"used:", "0 bytes", "quota:", "1048576 bytes (soft)"}},
		{args: "workspace usage " + id + " -o json", stdout: []string{`"quota_bytes": 1048576`}},

		{args: "chat create c1 --workspace " + id, stdout: []string{"chat:", "c1", id}},
		{args: "chat create c2 --user user-7", stdout: []string{id}},
		{args: "chat create c1 --user user-8", code: 1, stderr: []string{"chat_conflict"}},
		{args: "chat create c3", code: 2, stderr: []string{"workspace", "user"}},
		{args: "chat get c1 -o json", stdout: []string{`"chat_id": "c1"`}},
		{args: "chat list --user user-7", stdout: []string{"CHAT", "c1", "c2"}},
		{args: "chat list --user user-9 -o json", stdout: []string{"[]"}},
		{args: "workspace chats " + id + " -o json", stdout: []string{`"chat_id": "c2"`}},

		{args: "chat history c1", stdout: []string{""}},
		{args: "chat history c1 set h.md", stdout: []string{"8 bytes"}},
		{args: "chat history c1 append - -o json", stdin: "- line\n", stdout: []string{`"size_bytes": 15`}},
		{args: "chat history c1 show", stdout: []string{"# title\n- line\n"}},
		{args: "chat history c1 set", code: 2, stderr: []string{"say show"}},
		{args: "chat history c1 nosuch h.md", code: 2, stderr: []string{"say show"}},
		{args: "chat history c1 show h.md", code: 2, stderr: []string{"say show"}},
		{args: "chat history c1 set nosuch", code: 1, stderr: []string{"no such file"}},

		{args: "file put c1 one.txt --content-type text/plain", stdout: []string{"NAME", "one.txt", "6", "text/plain"}},
		{args: "file put c1 one.txt --no-clash", code: 1, stderr: []string{"precondition_failed"}},
		{args: "file put c1 - --name stdin.txt -o json", stdin: "from here", stdout: []string{`"size_bytes": 9`, `"content_type": null`}},
		{args: "file put c1 -", code: 2, stderr: []string{"say --name"}},
		{args: "file put c1 " + filepath.Join(dir, "one.txt") + " two.txt", stdout: []string{"one.txt", "two.txt", "7"}},
		{args: "file put c2 one.txt big", code: 1, stderr: []string{"workspace_quota_exceeded"}},
		{args: "file put c2 one.txt nosuch", code: 1, stderr: []string{"nosuch", "no such file"}},
		{args: "file put c2 one.txt -", code: 2, stderr: []string{"say --name"}},
		{args: "file put c2 one.txt two.txt --name x", code: 2, stderr: []string{"one file only"}},
		{args: "file put c2 .", code: 1, stderr: []string{"is a directory"}},
		{args: "file put c2 one.txt --name history.md", code: 1, stderr: []string{"validation"}},
		{args: "file put c2 one.txt --name ..", code: 1, stderr: []string{"berm: /api/v1/chats/c2/files/..: the path has"}},
		{args: "file list c2 -o json", stdout: []string{"[]"}},
		{args: "file list c1", stdout: []string{"one.txt     6", "stdin.txt   9", "two.txt"}},

		{args: "file cat c1 one.txt two.txt", stdout: []string{"first\nsecond\n"}},
		{args: "file get c1 stdin.txt", stdout: []string{""}},
		{args: "file get c1 two.txt there.txt", stdout: []string{""}},
		{args: "file get c1 two.txt -", stdout: []string{"second\n"}},
		{args: "file get c1 ../x", code: 2, stderr: []string{"say where to"}},
		{args: "file get c1 one.txt .", code: 1, stderr: []string{"is a directory"}},

		{args: "chat tar c1 c1.tar", stdout: []string{""}},
		{args: "chat untar c2 c1.tar", stdout: []string{""}},
		{args: "chat history c2", stdout: []string{"# title\n- line\n"}},
		{args: "file cat c2 one.txt", stdout: []string{"first\n"}},

		{args: "file url c1 one.txt --ttl 10m", stdout: []string{os.Getenv("BERM_URL") + "/f/"}},
		{args: "file url c1 up.png --method PUT --content-type image/png --max-bytes 10 -o json", stdout: []string{`"method": "PUT"`, `"expires_at"`}},

		{args: "file rm c1 stdin.txt nosuch", code: 1, stderr: []string{"chat_file_not_found"}},
		{args: "file rm c1 --all", stdout: []string{"2 deleted"}},
		{args: "file rm c1 --all -o json", stdout: []string{`"deleted": 0`}},
		{args: "file rm c1", code: 2, stderr: []string{"either names or --all"}},
		{args: "file rm c1 x --all", code: 2, stderr: []string{"either names or --all"}},

		{args: "sandbox create c2", stdout: []string{"created"}},
		{args: "chat delete c2 c1", code: 1, stderr: []string{"chat_has_active_sandbox"}},
		{args: "chat get c1", code: 1, stderr: []string{"chat_not_found"}},
		{args: "sandbox rm c2", stdout: []string{"deleted"}},
		{args: "chat delete c2", stdout: []string{""}},
	} {
		s.run(t)
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
