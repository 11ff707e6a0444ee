package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

type clientWrite = client.WriteOptions

func second[T any](_ T, err error) error { return err }

// attackFullDisk fills the disk. Calls fail for that reason, and leave nothing half done.
func attackFullDisk(a *attack) {
	a.must("sh", "-c", "echo before > /tmp/kept; cat /dev/zero > /tmp/fill 2>/dev/null; true")
	names := a.must("ls", "-A", "/tmp")
	ctx := deadline(a)
	big := bytes.Repeat([]byte("x"), 1<<20)
	for what, err := range map[string]error{
		"a new file": second(a.c.WriteFile(ctx, a.key, "/tmp/new", bytes.NewReader(big), clientWrite{})),
		"a file":     second(a.c.WriteFile(ctx, a.key, "/tmp/kept", bytes.NewReader(big), clientWrite{})),
		"an archive": a.c.WriteTar(ctx, a.key, "/tmp", bytes.NewReader(archive(a, tar.Header{Name: "unpacked", Size: 1 << 20, Mode: 0o644}))),
		"a copy":     a.c.CopyFile(ctx, a.key, attackerPath, "/tmp/copy", false),
	} {
		if refusal(err).Status != http.StatusInsufficientStorage {
			a.Errorf("%s: %v", what, err)
		}
	}
	a.must("rm", "-rf", "/tmp/unpacked") // as far as it came
	if out := a.must("ls", "-A", "/tmp"); out != names {
		a.Errorf("there was %q, and is %q", names, out)
	}
	if out := a.must("cat", "/tmp/kept"); out != "before\n" {
		a.Errorf("the file is %q", out)
	}
	must(a, a.c.RemoveFile(ctx, a.key, "/tmp/fill", false))
	must(a, second(a.c.WriteFile(ctx, a.key, "/tmp/new", bytes.NewReader(big), clientWrite{})))
	a.heals()
}

// archive makes one of entries, whose bytes are zero.
func archive(t testing.TB, entries ...tar.Header) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range entries {
		must(t, w.WriteHeader(&h))
		must(t, second(w.Write(make([]byte, h.Size))))
	}
	must(t, w.Close())
	return buf.Bytes()
}

// trappedCall is a call that takes a path, by the client's method.
type trappedCall struct {
	name string
	do   func(ctx context.Context, a *attack, path string) error
}

var trappedCalls = []trappedCall{
	{"StatFile", func(ctx context.Context, a *attack, path string) error { return second(a.c.StatFile(ctx, a.key, path)) }},
	{"ReadFile", func(ctx context.Context, a *attack, path string) error {
		return drain(a.c.ReadFile(ctx, a.key, path, 0, 0))
	}},
	{"ReadFile part", func(ctx context.Context, a *attack, path string) error {
		return drain(a.c.ReadFile(ctx, a.key, path, 1<<40, 1<<20))
	}},
	{"ListFiles", func(ctx context.Context, a *attack, path string) error {
		return count(a.c.ListFiles(ctx, a.key, path, 100))
	}},
	{"GlobFiles", func(ctx context.Context, a *attack, path string) error {
		return second(a.c.GlobFiles(ctx, a.key, path, "**/*", 0))
	}},
	{"SearchFiles", func(ctx context.Context, a *attack, path string) error {
		return second(a.c.SearchFiles(ctx, a.key, path, client.SearchOptions{Pattern: "needle.*thread"}))
	}},
	{"ReadTar", func(ctx context.Context, a *attack, path string) error { return drain(a.c.ReadTar(ctx, a.key, path)) }},
	{"CopyFile", func(ctx context.Context, a *attack, path string) error {
		return a.c.CopyFile(ctx, a.key, path, "/tmp/copy", true)
	}},
	{"WriteFile more", func(ctx context.Context, a *attack, path string) error {
		return second(a.c.WriteFile(ctx, a.key, path, strings.NewReader("x"), clientWrite{Append: true}))
	}},
	{"WriteFile new", func(ctx context.Context, a *attack, path string) error {
		return second(a.c.WriteFile(ctx, a.key, path, strings.NewReader("x"), clientWrite{NoClash: true, Mkdir: true}))
	}},
	{"WriteTar", func(ctx context.Context, a *attack, path string) error {
		return a.c.WriteTar(ctx, a.key, path, bytes.NewReader(archive(a, tar.Header{Name: "x/y", Mode: 0o644})))
	}},
	{"WatchFiles", func(ctx context.Context, a *attack, path string) error {
		for _, err := range a.c.WatchFiles(ctx, a.key, path, true) {
			return err
		}
		return nil
	}},
	{"Exec", func(ctx context.Context, a *attack, path string) error {
		return second(a.c.Exec(ctx, a.key, apitype.ExecRequest{Command: apitype.Command{"true"}, Cwd: path, Timeout: apitype.SecondsOf(10)}))
	}},
	{"Mkdir", func(ctx context.Context, a *attack, path string) error {
		return a.c.Mkdir(ctx, a.key, path+"/a/b", 0, true)
	}},
	{"CopyFile over", func(ctx context.Context, a *attack, path string) error {
		return a.c.CopyFile(ctx, a.key, "/etc/passwd", path, true)
	}},
	{"WriteFile", func(ctx context.Context, a *attack, path string) error {
		return second(a.c.WriteFile(ctx, a.key, path, strings.NewReader("x"), clientWrite{}))
	}},
	{"MoveFile", func(ctx context.Context, a *attack, path string) error {
		return a.c.MoveFile(ctx, a.key, path, "/tmp/moved", true)
	}},
	{"MoveFile over", func(ctx context.Context, a *attack, path string) error {
		return a.c.MoveFile(ctx, a.key, "/tmp/own", path, true)
	}},
	{"RemoveFile", func(ctx context.Context, a *attack, path string) error {
		return a.c.RemoveFile(ctx, a.key, path, true)
	}},
}

// No call of the client's is forgotten.
func TestAttackTrapsAll(t *testing.T) {
	all := reflect.TypeFor[*client.Client]()
	for i := range all.NumMethod() {
		name := all.Method(i).Name
		if strings.Contains(name, "Chat") { // whose files have no paths; TestStorage attacks those
			continue
		}
		if !strings.HasSuffix(strings.TrimSuffix(name, "s"), "File") && !strings.HasSuffix(name, "Tar") && !strings.HasSuffix(name, "dir") {
			continue
		}
		if !slices.ContainsFunc(trappedCalls, func(call trappedCall) bool { return call.name == name }) {
			t.Errorf("%s isn't led into traps", name)
		}
	}
}

// Whatever a path leads to, each call is answered, or can be given up.
func attackTraps(a *attack) {
	paths := []string{
		"/dev/zero", "/dev/full", "/dev/random", "/dev/tty", "/dev/ptmx", "/proc/kmsg", "/proc/kcore", "/proc/self/mem", "/proc/1/mem",
		"/proc/self/pagemap", "/proc/self/fd/0", "/proc/1/fd/0", "/proc/self/root/proc/self/root/dev/zero", "/proc/self/clear_refs",
		"/proc/sysrq-trigger", "/proc/1", "/tmp/t/fifo", "/tmp/t/tofifo", "/tmp/t/loop", "/tmp/t/self", "/tmp/t/up/up/up/fifo", "/tmp/t/tozero",
		"/tmp/t/sock", "/tmp/t", "/run/berm/s", "/run/berm", "/sys/kernel",
	}
	lay := `mkdir -p /tmp/t && cd /tmp/t && mkfifo fifo; ln -s fifo tofifo; ln -s loop loop; ln -s . self; ln -s ../t up; ln -s /dev/zero tozero
		[ -e sock ] || { nc -l -s local:/tmp/t/sock 2>/dev/null & }
		echo own >/tmp/own`
	for _, path := range paths {
		a.must("sh", "-c", lay)
		for _, call := range trappedCalls {
			a.trap(call.name+" "+path, path, func(ctx context.Context) error { return call.do(ctx, a, path) })
		}
		a.must("rm", "-rf", "/tmp/copy", "/tmp/moved", "/tmp/t")
	}
	a.heals()
}

// trap does a call on a path.
func (a *attack) trap(what, path string, do func(context.Context) error) {
	const endless = 3 * time.Second                                              // for what may go on for ever
	whole := strings.HasPrefix(path, "/proc") || strings.HasPrefix(path, "/sys") // trees that are long, or grow
	ctx := deadline(a)
	if whole {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, endless)
		defer cancel()
	}
	began := time.Now()
	err := do(ctx)
	if took := time.Since(began); took > endless/2 {
		a.Logf("%s took %s: %v", what, took, err)
	}
	if whole && errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errCut) {
		return
	}
	a.answered(what, err)
}

// errCut is an answer that was broken off: the server couldn't go on.
var errCut = errors.New("the answer was broken off")

// drain reads all of an answer, within reason.
func drain(r io.ReadCloser, err error) error {
	if errors.Is(err, io.EOF) {
		return fmt.Errorf("%w: %w", errCut, err)
	}
	if err != nil {
		return err
	}
	defer func() { _ = r.Close() }()
	if _, err := io.Copy(io.Discard, io.LimitReader(r, 64<<20)); err != nil {
		return fmt.Errorf("%w: %w", errCut, err)
	}
	return nil
}

func count(files func(func(apitype.FileInfo, error) bool)) error {
	var failed error
	n := 0
	files(func(_ apitype.FileInfo, err error) bool {
		failed = err
		n++
		return err == nil && n < 100_000
	})
	if failed != nil && refusal(failed).Status == 0 && !errors.Is(failed, context.DeadlineExceeded) {
		return fmt.Errorf("%w: %w", errCut, failed)
	}
	return failed
}

// Links in a directory of the host lead nowhere outside of the sandbox.
func attackLinksOut(a *attack) {
	ctx := deadline(a)
	must(a, second(a.c.Delete(ctx, a.key)))
	workspace := makeDir(a, a.server.dir, "workspace", a.mark)
	secret := filepath.Join(a.server.dir, "secret-"+a.mark)
	write(a.T, secret, "secret")
	defer func() { _ = os.RemoveAll(workspace) }()
	a.create(apitype.SandboxRequest{HostPath: &workspace})
	up := strings.Repeat("../", 40)
	a.must("sh", "-c", `cd /workspace && ln -s "$0" abs && ln -s "$1$0" rel && ln -s "$1" top && ln -s /proc/1/root"$0" root && ln -s /proc/1/cwd"$1$0" cwd`, secret, up)
	for _, path := range []string{"abs", "rel", "top" + secret, "root", "cwd"} {
		path = "/workspace/" + path
		for what, err := range map[string]error{
			"stat":   second(a.c.StatFile(ctx, a.key, path)),
			"read":   drain(a.c.ReadFile(ctx, a.key, path, 0, 0)),
			"append": second(a.c.WriteFile(ctx, a.key, path, strings.NewReader("x"), clientWrite{Append: true})),
			"search": second(a.c.SearchFiles(ctx, a.key, path, client.SearchOptions{Pattern: "secret"})),
		} {
			if a.answered(what+" "+path, err); err == nil && what != "append" {
				a.Errorf("%s %s came off", what, path)
			}
		}
		a.answered("write", second(a.c.WriteFile(ctx, a.key, path, strings.NewReader("x"), clientWrite{Mkdir: true})))
		a.answered("remove", a.c.RemoveFile(ctx, a.key, path, true))
	}
	// Packed and unpacked, links are links.
	packed, err := all(a.c.ReadTar(ctx, a.key, "/workspace"))
	if err != nil || strings.Contains(packed, "secret\x00") && !strings.Contains(packed, secret) {
		a.Errorf("the archive has what a link leads to, or fails: %v", err)
	}
	if got, err := os.ReadFile(secret); err != nil || string(got) != "secret" {
		a.Errorf("the host's file is %q, %v", got, err)
	}
	a.heals()
}

// Directories and links change places under calls that unpack, copy, write and remove.
func attackSwappedLinks(a *attack) {
	a.must("sh", "-c", "mkdir -p /tmp/d/sub /tmp/outside && echo kept > /tmp/outside/kept && ln -s /tmp/outside /tmp/d/link")
	end := a.begin("swap", "/tmp/d/sub", "/tmp/d/link")
	ctx := deadline(a)
	bytesOf := archive(a, tar.Header{Name: "sub/", Typeflag: tar.TypeDir, Mode: 0o755}, tar.Header{Name: "sub/planted", Size: 10, Mode: 0o644},
		tar.Header{Name: "sub/deep/planted", Size: 10, Mode: 0o644}, tar.Header{Name: "../outside/planted", Size: 10, Mode: 0o644},
		tar.Header{Name: "/tmp/outside/planted", Size: 10, Mode: 0o644})
	for range 200 {
		a.answered("unpack", a.c.WriteTar(ctx, a.key, "/tmp/d", bytes.NewReader(bytesOf)))
	}
	link := archive(a, tar.Header{Name: "out", Typeflag: tar.TypeSymlink, Linkname: "../outside", Mode: 0o777}, tar.Header{Name: "out/planted", Size: 10, Mode: 0o644},
		tar.Header{Name: "hard", Typeflag: tar.TypeLink, Linkname: "../outside/kept"}, tar.Header{Name: "hard", Size: 10, Mode: 0o644})
	for range 20 {
		a.answered("unpack links", a.c.WriteTar(ctx, a.key, "/tmp/d", bytes.NewReader(link)))
		a.answered("remove", a.c.RemoveFile(ctx, a.key, "/tmp/d/sub/deep", true))
		a.answered("copy", a.c.CopyFile(ctx, a.key, "/tmp/d", "/tmp/copy", false))
		a.answered("remove", a.c.RemoveFile(ctx, a.key, "/tmp/copy", true))
	}
	if out := end(); out != "swapped true\n" {
		a.Errorf("%q", out)
	}
	must(a, a.c.RemoveFile(ctx, a.key, "/tmp/d", true))
	if out := a.must("sh", "-c", "ls -A /tmp/outside; cat /tmp/outside/kept"); out != "kept\nkept\n" {
		a.Errorf("outside is %q", out)
	}
	a.heals()
}

// Names of any bytes come as JSON, and lead back to their files.
func attackNames(a *attack) {
	ctx := deadline(a)
	must(a, a.c.Mkdir(ctx, a.key, "/tmp/n", 0, false))
	watched := make(chan error, 1)
	ready := make(chan struct{})
	watching, stop := context.WithCancel(ctx)
	defer stop()
	seen := map[string]bool{}
	go func() {
		for ev, err := range a.c.WatchFiles(watching, a.key, "/tmp/n", true) {
			if err != nil {
				watched <- err
				return
			}
			if ev.Type == "ready" {
				close(ready)
			}
			if seen[nameOf(ev.Path, ev.PathBase64)] = true; ev.Path == "/tmp/n/last" {
				break
			}
		}
		watched <- nil
	}()
	select {
	case <-ready:
	case err := <-watched:
		a.Fatalf("watch: %v", err)
	}
	out := a.must(attackerPath, "names", "/tmp/n")
	a.must("touch", "/tmp/n/last")
	if err := <-watched; err != nil {
		a.Errorf("watch: %v", err)
	}
	var listed []string
	for f, err := range a.c.ListFiles(ctx, a.key, "/tmp/n", 0) {
		must(a, err)
		name := nameOf(f.Path, f.PathBase64)
		listed = append(listed, name)
		if !seen[name] {
			a.Errorf("%q wasn't seen by the watch", name)
		}
		if f.Type == "file" && f.Size > 0 {
			if got := a.read(ctx, name); got != "needle "+filepath.Base(name)+"\n" && !strings.HasSuffix(name, "/") {
				a.Errorf("%q is %q", name, got)
			}
		}
	}
	var files int
	if _, err := fmt.Sscan(out, &files); err != nil || len(listed) != 2*files+1 || !slices.IsSorted(listed) {
		a.Errorf("%d of 2*%s were listed: %q", len(listed), out, listed)
	}
	glob := check.Value(a.c.GlobFiles(ctx, a.key, "/tmp", "**/*", 0))(a)
	found, err := a.c.SearchFiles(ctx, a.key, "/tmp/n", client.SearchOptions{Pattern: "^needle"})
	if err != nil || len(found.Matches) != files {
		a.Errorf("%d of %d were found, %v", len(found.Matches), files, err)
	}
	for _, f := range glob.Files {
		if name := nameOf(f.Path, f.PathBase64); strings.HasPrefix(name, "/tmp/n/") && !slices.Contains(listed, name) {
			a.Errorf("%q was found, and isn't listed", name)
		}
	}
	for _, m := range found.Matches {
		if name := nameOf(m.Path, m.PathBase64); !slices.Contains(listed, name) {
			a.Errorf("%q was searched, and isn't listed", name)
		}
	}
	for _, call := range []string{"list?depth=3&path=", "glob?pattern=**/*&path=", "search?pattern=needle&path="} {
		for _, accept := range []string{"application/json", "application/x-ndjson"} {
			a.wantJSON(ctx, call+url.QueryEscape("/tmp/n"), accept)
		}
	}
	for _, name := range listed {
		if err := a.c.RemoveFile(ctx, a.key, name, false); err != nil {
			a.Errorf("remove %q: %v", name, err)
		}
	}
	if out := a.must("ls", "-A", "/tmp/n"); out != "" {
		a.Errorf("left: %q", out)
	}
	a.heals()
}

func nameOf(text string, raw []byte) string {
	if raw != nil {
		return string(raw)
	}
	return text
}

func (a *attack) read(ctx context.Context, name string) string {
	a.Helper()
	text, err := all(a.c.ReadFile(ctx, a.key, name, 0, 0))
	if err != nil {
		a.Errorf("read %q: %v", name, err)
	}
	return text
}

// wantJSON checks that an answer is JSON in UTF-8, line by line if it was asked for so.
func (a *attack) wantJSON(ctx context.Context, call, accept string) {
	a.Helper()
	url := a.server.url + "/api/v1/sandboxes/" + a.key + "/files/" + call
	resp, body, err := exchange(ctx, http.DefaultClient, http.MethodGet, url, "", "X-API-Token", a.server.token, "Accept", accept)
	if err != nil || resp.StatusCode != http.StatusOK || !utf8.ValidString(body) || body == "" {
		a.Errorf("%s: %v, %d bytes, %v", call, resp, len(body), err)
		return
	}
	parts := []string{body}
	if accept == "application/x-ndjson" {
		parts = strings.Split(strings.TrimSuffix(body, "\n"), "\n")
	}
	for _, part := range parts {
		if !json.Valid([]byte(part)) {
			a.Errorf("%s: not JSON: %q", call, part)
		}
	}
}
