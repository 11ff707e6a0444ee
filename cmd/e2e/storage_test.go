package e2e

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/compose"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// storageQuotaMB is what a workspace may hold in these tests.
const storageQuotaMB = 8

// storageFixture is a server whose sandboxes have chats.
type storageFixture struct {
	*testing.T
	c         *client.Client
	server    *server
	root      string // of chats
	workspace string
}

// newStorageFixture starts a server with further settings.
func newStorageFixture(t *testing.T, e *testEngine, env ...string) *storageFixture {
	t.Helper()
	dir := e.dir(t)
	b := &storageFixture{T: t, root: filepath.Join(dir, "chats")}
	b.server = newServer(t, e, dir, testImage)
	b.server.env = append(b.server.env, "BERM_SANDBOX_CHATS_ROOT="+b.root, "BERM_SANDBOX_CREATE_ROOTS=true",
		fmt.Sprintf("BERM_STORAGE_WORKSPACE_QUOTA_MB=%d", storageQuotaMB))
	b.server.env = append(b.server.env, env...)
	b.c = b.server.start(t)
	return b
}

// in is the fixture of a part of the test.
func (b *storageFixture) in(t *testing.T) *storageFixture {
	out := *b
	out.T = t
	return &out
}

// chat makes one, with a sandbox, in a workspace of its own user.
func (b *storageFixture) chat(user, id string) {
	b.Helper()
	ctx := deadline(b)
	w := check.Value(b.c.EnsureWorkspace(ctx, user))(b)
	b.workspace = w.WorkspaceID
	must(b, second(b.c.EnsureChat(ctx, id, w.WorkspaceID)))
	must(b, second(b.c.Create(ctx, id, apitype.SandboxRequest{})))
}

// run runs a shell script in a chat's sandbox.
func (b *storageFixture) run(chat, script string) string {
	b.Helper()
	ctx := deadline(b)
	res, err := b.c.Exec(ctx, chat, apitype.ExecRequest{Command: apitype.Command{"sh", "-c", "cd /chat && " + script}, Timeout: apitype.SecondsOf(60)})
	if err != nil || res.ExitCode == nil || *res.ExitCode != 0 {
		b.Fatalf("%s: %+v, %v", script, res, err)
	}
	return res.Stdout
}

func (b *storageFixture) put(chat, name, content string) error {
	return second(b.c.PutChatFile(deadline(b), chat, name, strings.NewReader(content), client.PutChatFileOptions{}))
}

func (b *storageFixture) read(chat, name string) (string, error) {
	return all(b.c.ReadChatFile(deadline(b), chat, name, 0, 0))
}

func (b *storageFixture) history(chat string) (string, error) {
	return all(b.c.History(deadline(b), chat, 0, 0))
}

func all(r io.ReadCloser, err error) (string, error) {
	if err != nil {
		return "", err
	}
	defer func() { _ = r.Close() }()
	data, err := io.ReadAll(r)
	return string(data), err
}

// names lists a chat's files.
func (b *storageFixture) names(chat string) []string {
	b.Helper()
	ctx := deadline(b)
	var names []string
	for f, err := range b.c.ChatFiles(ctx, chat, 0) {
		must(b, err)
		names = append(names, f.Name)
	}
	return names
}

func (b *storageFixture) used() int64 {
	b.Helper()
	ctx := deadline(b)
	usage := check.Value(b.c.WorkspaceUsage(ctx, b.workspace))(b)
	if usage.Enforcement != "soft" || usage.QuotaBytes == nil || *usage.QuotaBytes != storageQuotaMB<<20 {
		b.Errorf("usage %+v", usage)
	}
	return usage.UsedBytes
}

func (b *storageFixture) wantRead(chat, name, want string) {
	b.Helper()
	if got, err := b.read(chat, name); err != nil || got != want {
		b.Errorf("%s of %s is %.100q, %v; want %.100q", name, chat, got, err, want)
	}
}

// A chat's content goes into its sandbox and out again, and outlives it.
func TestStorage(t *testing.T) {
	t.Parallel()
	b := newStorageFixture(t, commonEngine(t, "docker"))
	t.Run("round", func(t *testing.T) { b.in(t).round() })
	t.Run("quota", func(t *testing.T) { b.in(t).quota() })
	t.Run("delete or create", func(t *testing.T) { b.in(t).deleteOrCreate() })
	for _, tt := range storageAttacks {
		t.Run(tt.name, func(t *testing.T) { b.in(t).attack(tt) })
	}
}

func (b *storageFixture) round() {
	b.chat("round", "round")
	must(b, b.put("round", "in put.txt", "some words"))
	must(b, second(b.c.AppendHistory(b.Context(), "round", strings.NewReader("asked\n"))))
	out := b.run("round", `cat "in put.txt" history.md && tr a-z A-Z < "in put.txt" > new && mv new "in put.txt" && echo made > "by itself" && echo answered >> history.md`)
	if out != "some wordsasked\n" {
		b.Errorf("the sandbox sees %q", out)
	}
	b.wantRead("round", "in put.txt", "SOME WORDS")
	b.wantRead("round", "by itself", "made\n")
	if got := b.names("round"); !slices.Equal(got, []string{"by itself", "in put.txt"}) {
		b.Errorf("the files are %q", got)
	}
	if got, err := b.history("round"); err != nil || got != "asked\nanswered\n" {
		b.Errorf("the history is %q, %v", got, err)
	}
	if used := b.used(); used != int64(len("SOME WORDS")+len("made\n")+len("asked\nanswered\n")) {
		b.Errorf("%d bytes are used", used)
	}
	wantCode(b.T, b.c.DeleteChat(b.Context(), "round"), "chat_has_active_sandbox")
	must(b, second(b.c.Delete(b.Context(), "round")))
	b.wantRead("round", "in put.txt", "SOME WORDS")
	must(b, b.c.DeleteChat(b.Context(), "round"))
	wantCode(b.T, second(b.read("round", "in put.txt")), "chat_not_found")
	if _, err := os.Lstat(filepath.Join(b.root, "round")); !errors.Is(err, os.ErrNotExist) {
		b.Errorf("of a deleted chat there is its directory: %v", err)
	}
}

func (b *storageFixture) quota() {
	b.chat("quota", "quota")
	const mega = 1 << 20
	must(b, b.put("quota", "half", strings.Repeat("x", storageQuotaMB*mega/2+1)))
	b.run("quota", "head -c 2097152 /dev/zero | tr '\\0' x > written") // what a sandbox writes counts
	if used := b.used(); used != storageQuotaMB*mega/2+1+2*mega {
		b.Errorf("%d bytes are used", used)
	}
	wantCode(b.T, b.put("quota", "two", strings.Repeat("x", 2*mega)), "workspace_quota_exceeded")
	must(b, b.put("quota", "one", strings.Repeat("x", mega)))
	// Over the quota by a command, it ends, and its result is there.
	ctx := deadline(b)
	_, err := b.c.Exec(ctx, "quota", apitype.ExecRequest{Command: apitype.Command{"sh", "-c", "cat /chat/written /chat/written > /chat/over; echo done"}})
	if refused := refusal(err); refused.Code != "quota_exceeded" || refused.Problem.Result == nil || refused.Problem.Result.Stdout != "done\n" {
		b.Errorf("over the quota: %+v", err)
	}
	wantCode(b.T, second(b.c.Exec(ctx, "quota", apitype.ExecRequest{Command: apitype.Command{"true"}})), "quota_exceeded")
	must(b, b.c.DeleteChatFile(ctx, "quota", "over"))
	if out := b.run("quota", "ls"); !strings.Contains(out, "written") {
		b.Errorf("below the quota again, it sees %q", out)
	}
}

// deleteOrCreate has a chat's deletion and its sandbox race; one of them wins, and knows.
func (b *storageFixture) deleteOrCreate() {
	ctx := deadline(b)
	w := check.Value(b.c.EnsureWorkspace(ctx, "race"))(b)
	for range 5 {
		must(b, second(b.c.EnsureChat(ctx, "race", w.WorkspaceID)))
		must(b, b.put("race", "f", "x"))
		var both sync.WaitGroup
		var created, deleted error
		both.Go(func() { created = second(b.c.Create(ctx, "race", apitype.SandboxRequest{})) })
		both.Go(func() { deleted = b.c.DeleteChat(ctx, "race") })
		both.Wait()
		if created != nil {
			b.Fatal(created)
		}
		// The sandbox comes before or after the deletion; it never loses what it mounts.
		out := strings.TrimSpace(b.run("race", "ls"))
		if deleted == nil && out != "" {
			b.Errorf("of a deleted chat its sandbox sees %q", out)
		}
		if deleted != nil {
			wantCode(b.T, deleted, "chat_has_active_sandbox")
			if !strings.Contains(out, "f") {
				b.Errorf("of a chat that wasn't deleted its sandbox sees %q", out)
			}
		}
		b.run("race", "echo y > mark")
		if _, err := os.Stat(filepath.Join(b.root, "race", "mark")); err != nil {
			b.Errorf("the sandbox has another directory than its chat: %v", err)
		}
		must(b, second(b.c.Delete(ctx, "race")))
	}
}

// storageAttack is what a sandbox does to its chat's directory, and what must come of it.
type storageAttack struct {
	name   string
	script string                              // in the chat's directory
	host   func(b *storageFixture, dir string) // what the sandbox can't do, but somebody may have
	check  func(b *storageFixture)
}

const evil, good = "evil", "good" // chats of one workspace

var storageAttacks = []storageAttack{
	{name: "link out", script: "ln -s /etc/passwd a; ln -s ../good/keep b; ln -s /proc/self/environ c; ln -s . d; ln -s e e", check: func(b *storageFixture) {
		for _, name := range []string{"a", "b", "c", "d", "e"} {
			wantCode(b.T, second(b.read(evil, name)), "chat_file_wrong_kind", "chat_file_not_found")
			if err := b.put(evil, name, "mine"); err != nil { // takes the link's place
				b.Errorf("%s: %v", name, err)
			}
			b.wantRead(evil, name, "mine")
		}
	}},
	{name: "link as history", script: "ln -sf ../good/history.md history.md", check: func(b *storageFixture) {
		if got, err := b.history(evil); err == nil {
			b.Errorf("a link as history gives %q", got)
		}
		if err := second(b.c.AppendHistory(b.Context(), evil, strings.NewReader("x"))); err == nil {
			b.Error("it was appended to a link")
		}
		must(b, second(b.c.PutHistory(b.Context(), evil, strings.NewReader("new"))))
		if got, err := b.history(evil); err != nil || got != "new" {
			b.Errorf("the history is %q, %v", got, err)
		}
	}},
	{name: "fifos", script: "mkfifo pipe && rm -f history.md && mkfifo history.md", check: func(b *storageFixture) {
		wantCode(b.T, second(b.read(evil, "pipe")), "chat_file_wrong_kind", "chat_file_not_found")
		if got, err := b.history(evil); err == nil {
			b.Errorf("a fifo as history gives %q", got)
		}
		must(b, b.put(evil, "pipe", "x"), second(b.c.PutHistory(b.Context(), evil, strings.NewReader("new"))))
	}},
	{name: "directories", script: "mkdir -p file.txt/sub && rm -f history.md && mkdir history.md", check: func(b *storageFixture) {
		wantCode(b.T, b.put(evil, "file.txt", "x"), "chat_file_wrong_kind")
		wantCode(b.T, second(b.c.PutHistory(b.Context(), evil, strings.NewReader("x"))), "chat_file_wrong_kind")
		wantCode(b.T, b.c.DeleteChatFile(b.Context(), evil, "file.txt"), "chat_file_wrong_kind", "chat_file_not_found")
	}},
	{name: "devices", script: "! mknod null c 1 3 2>/dev/null", host: func(b *storageFixture, dir string) {
		if err := unix.Mknod(filepath.Join(dir, "zero"), unix.S_IFCHR|0o666, int(unix.Mkdev(1, 5))); err != nil {
			b.Logf("this machine makes no devices: %v", err)
			return
		}
		wantCode(b.T, second(b.read(evil, "zero")), "chat_file_wrong_kind", "chat_file_not_found")
	}},
	{name: "hard links", script: "echo x > one && ln one two && ln history.md three", check: func(b *storageFixture) {
		must(b, b.put(evil, "two", "other"))
		b.wantRead(evil, "one", "x\n")
		must(b, second(b.c.AppendHistory(b.Context(), evil, strings.NewReader("more"))))
		b.wantRead(evil, "three", "")
	}},
	{name: "sparse", script: "truncate -s 1024G huge", check: func(b *storageFixture) {
		if used := b.used(); used > 1<<20 {
			b.Errorf("what takes no room counts %d bytes", used)
		}
		ctx := deadline(b)
		if got, err := all(b.c.ReadChatFile(ctx, evil, "huge", 1<<39, 3)); err != nil || got != "\x00\x00\x00" {
			b.Errorf("of a huge file came %q, %v", got, err)
		}
		if _, err := all(b.c.ReadChatTar(ctx, evil)); err == nil {
			b.Error("a tebibyte of nothing was archived")
		}
	}},
	{name: "names", script: `printf x > "$(printf 'caf\351')"; printf x > "$(printf 'a\nb')"; printf x > 'back\slash'; printf x > -n; printf x > .hidden; printf x > "$(printf 'ü%.0s' $(seq 100))"`, check: func(b *storageFixture) {
		if got := b.names(evil); !slices.Equal(got, []string{"-n", ".hidden", strings.Repeat("ü", 100)}) {
			b.Errorf("the files are %q", got)
		}
		ctx := deadline(b)
		archive := check.Value(all(b.c.ReadChatTar(ctx, evil)))(b)
		n := 0
		for r := tar.NewReader(bytes.NewReader([]byte(archive))); ; {
			h, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			must(b, err)
			if h.Typeflag == tar.TypeReg {
				n++
			}
		}
		if n != 7 { // history.md, too
			b.Errorf("%d files were archived", n)
		}
	}},
	{name: "deep", script: "i=0; while [ $i -lt 1500 ]; do mkdir d && cd d && i=$((i+1)) || break; done; echo x > bottom", check: func(b *storageFixture) {
		if used := b.used(); used < 2 {
			b.Errorf("of a deep tree %d bytes are counted", used)
		}
		ctx := deadline(b)
		_, _ = all(b.c.ReadChatTar(ctx, evil))
	}},
	{name: "many", script: "mkdir m && cd m && seq 5000 | xargs touch && cd .. && seq 2000 | xargs touch", check: func(b *storageFixture) {
		if n := len(b.names(evil)); n != 2000 {
			b.Errorf("%d files are listed", n)
		}
	}},
	{name: "swaps", script: `echo fine > fine; (end=$(($(date +%s)+3)); while [ $(date +%s) -lt $end ]; do ln -sf ../good/keep f; cp fine t; mv -f t f; ln -sfn ../good sub2; rm -f sub2; mkdir sub2; rmdir sub2; done) > /dev/null 2>&1 &`, check: func(b *storageFixture) {
		for end := time.Now().Add(3 * time.Second); time.Now().Before(end); {
			if got, err := b.read(evil, "f"); err == nil && got != "fine\n" && got != "mine" {
				b.Fatalf("a swapped link gave %q", got)
			}
			_ = b.put(evil, "f", "mine")
			_ = b.c.WriteChatTar(deadline(b), evil, bytes.NewReader(archive(b, tar.Header{Name: "sub2/keep", Size: 4, Mode: 0o644})))
			_, _ = all(b.c.ReadChatTar(deadline(b), evil))
		}
	}},
}

// attack has a sandbox make its chat's directory a trap. Every call about it is answered
// in time, nothing outside it is read or changed, and the other chat goes on.
func (b *storageFixture) attack(a storageAttack) {
	b.chat("attacked", good)
	must(b, b.put(good, "keep", "kept"))
	b.chat("attacked", evil)
	b.run(evil, a.script)
	if a.host != nil {
		a.host(b, filepath.Join(b.root, evil))
	}
	if a.check != nil {
		a.check(b)
	}
	// Whatever there is, these come to an end.
	b.names(evil)
	b.used()
	ctx := deadline(b)
	must(b, second(b.c.DeleteChatFiles(ctx, evil)))
	must(b, b.put(evil, "after", "after"))
	b.wantRead(evil, "after", "after")
	b.wantRead(good, "keep", "kept")
	if got := b.names(good); !slices.Equal(got, []string{"keep"}) {
		b.Errorf("the other chat has %q", got)
	}
	must(b, second(b.c.Delete(ctx, evil)), b.c.DeleteChat(ctx, evil))
	if _, err := os.Lstat(filepath.Join(b.root, evil)); !errors.Is(err, os.ErrNotExist) {
		b.Errorf("of a deleted chat there is its directory: %v", err)
	}
	until(b.T, "nothing is left in staging", func() bool { return stagingEmpty(b.root) })
}

func stagingEmpty(root string) bool {
	left, err := os.ReadDir(filepath.Join(root, ".staging"))
	return (err == nil || errors.Is(err, os.ErrNotExist)) && len(left) == 0
}

func TestDefaultUser(t *testing.T) { onEachEngine(t, testDefaultUser) }

// In the stacks, sandboxes run as a user that isn't Berm's, and share their chats with it.
func testDefaultUser(t *testing.T, kind string) {
	t.Parallel()
	data := check.Value(compose.Files.ReadFile("policy/" + map[string]string{"docker": "minimal", "containerd": "containerd"}[kind] + ".yaml"))(t)
	file := filepath.Join(t.TempDir(), "policy.yaml")
	write(t, file, string(data))
	b := newStorageFixture(t, commonEngine(t, kind), "BERM_POLICY_FILE="+file)
	b.chat("u", "k")
	must(t, b.put("k", "up", "uploaded"))
	got := b.run("k", "id -u; id -g; cat up; stat -c %u:%g . up; mkdir d; echo made >mine; chmod 600 mine; echo more >>history.md; mv up d/up; echo $HOME; touch /tmp/x")
	if want := "1000\n1000\nuploaded1000:1000\n1000:1000\n/\n"; got != want {
		t.Errorf("the sandbox says %q, want %q", got, want)
	}
	if got, err := b.read("k", "mine"); err != nil || got != "made\n" {
		t.Errorf("the sandbox's file: %q, %v", got, err)
	}
	must(t, b.put("k", "mine", "replaced"))
	if got := b.run("k", "cat mine; rm mine; echo again >mine; chmod 0 mine"); got != "replaced" {
		t.Errorf("the replaced file: %q", got)
	}
	if got := b.names("k"); !slices.Equal(got, []string{"mine"}) {
		t.Errorf("the files are %q", got)
	}
	ctx := deadline(b)
	must(t, b.c.DeleteChatFile(ctx, "k", "mine"))
	if got, err := b.history("k"); err != nil || got != "more\n" {
		t.Errorf("the history: %q, %v", got, err)
	}
}

// wantCode checks the code of an answer that says no.
func wantCode(t *testing.T, err error, codes ...string) {
	t.Helper()
	if !slices.Contains(codes, refusal(err).Code) {
		t.Errorf("got %v, want %s", err, strings.Join(codes, " or "))
	}
}
