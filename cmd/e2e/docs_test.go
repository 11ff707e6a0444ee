package e2e

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// runnable is a block of commands in the documentation: "sh runnable", or "sh runnable
// fails" if its last command is to fail. "text output", "json output" or so in the next
// block is what it prints: … stands for whatever varies, and blanks don't count in JSON.
type runnable struct {
	line         int
	script       string
	fails        bool
	want, format string // no format: not compared
}

var fence = regexp.MustCompile("(?m)^```(.*)\n((?s:.*?))^```$")

func runnables(t *testing.T, page string) (blocks []runnable) {
	t.Helper()
	data := readString(t, page)
	var last *runnable // whose output the next block may be
	for _, at := range fence.FindAllStringSubmatchIndex(data, -1) {
		info, body := data[at[2]:at[3]], data[at[4]:at[5]]
		format, isOutput := strings.CutSuffix(info, " output")
		switch {
		case isOutput && last == nil:
			t.Errorf("%s: the output %q is of no block", page, body)
		case isOutput:
			last.want, last.format, last = body, format, nil
		case info == "sh runnable" || info == "sh runnable fails":
			blocks = append(blocks, runnable{line: 1 + strings.Count(data[:at[0]], "\n"), script: body, fails: strings.HasSuffix(info, "fails")})
			last = &blocks[len(blocks)-1]
		case strings.Contains(info, "runnable"):
			t.Errorf("%s: a block is marked %q", page, info)
		default:
			last = nil
		}
	}
	return blocks
}

// matches tells whether a block printed what its page says.
func (b runnable) matches(got string) bool {
	want := b.want
	if b.format == "json" {
		blank := regexp.MustCompile(`\s+`)
		want, got = blank.ReplaceAllString(want, ""), blank.ReplaceAllString(got, "")
	}
	pattern := strings.ReplaceAll(regexp.QuoteMeta(strings.TrimSpace(want)), "…", "(?s:.*?)")
	return regexp.MustCompile("^" + pattern + "$").MatchString(strings.TrimSpace(got))
}

// docsWorld is what runnable blocks find: berm in the PATH, a server of both doors on a
// private Docker with the image that the pages use, the token, and a clean directory.
type docsWorld struct {
	t     *testing.T
	bin   string            // goes first in the PATH
	env   []string          // of each page's shell
	stand map[string]string // what stands in the pages for what the test has
}

// run runs a page's blocks, one after the other, in one shell.
func (w *docsWorld) run(page string, blocks []runnable) {
	t := w.t
	t.Helper()
	home, out := t.TempDir(), t.TempDir()
	write(t, filepath.Join(home, ".curlrc"), "silent\nshow-error\nfail-with-body\nwrite-out = \"\\n\"\nmax-time = 60\n")
	write(t, filepath.Join(home, "token"), testToken+"\n")
	var script strings.Builder
	script.WriteString("set -euo pipefail\n")
	for i, b := range blocks {
		for from, to := range w.stand {
			b.script = strings.ReplaceAll(b.script, from, to)
		}
		fmt.Fprintf(&script, "exec >%s/%d 2>&1\n", out, i)
		if b.fails {
			fmt.Fprintf(&script, "if (\n%s); then echo 'it did not fail'; exit 1; fi\n", b.script)
		} else {
			script.WriteString(b.script)
		}
	}
	sh := exec.CommandContext(t.Context(), "bash", "-c", script.String())
	sh.Dir = home
	sh.Env = append([]string{"PATH=" + w.bin + ":" + os.Getenv("PATH"), "HOME=" + home, "LC_ALL=C.UTF-8"}, w.env...)
	if tail, err := sh.CombinedOutput(); err != nil {
		t.Errorf("%s: %v %s", page, err, tail) // the last block that printed something says why
	}
	for i, b := range blocks {
		data, err := os.ReadFile(filepath.Join(out, fmt.Sprint(i)))
		if err != nil {
			t.Errorf("%s:%d wasn't run", page, b.line)
			continue
		}
		got := string(data)
		for from, to := range w.stand {
			got = strings.ReplaceAll(got, to, from)
		}
		t.Logf("%s:%d\n%s%s", page, b.line, b.script, got)
		if b.format != "" && !b.matches(got) {
			t.Errorf("%s:%d prints something else (-documented +printed):\n%s", page, b.line, cmp.Diff(b.want, got))
		}
	}
}

// What the documentation says that one can run can be run, and prints what it says. A
// collector gets what is exported meanwhile. Tests of serve check that all names are documented.
func TestDocs(t *testing.T) {
	t.Parallel()
	e := commonEngine(t, "docker")
	must(t, e.ImportBusybox(t.Context(), "python:3.11-slim"))
	for _, program := range []string{"bash", "curl", "docker"} {
		if _, err := exec.LookPath(program); err != nil {
			engine.Lacking(t, "docker", err)
		}
	}
	dir, roots, sent := e.dir(t), t.TempDir(), newCollector(t)
	door := filepath.Join(dir, "docker.sock")
	write(t, filepath.Join(dir, "token"), testToken)
	write(t, filepath.Join(dir, "headers"), "X-Key="+collectorKey+"\n")
	write(t, filepath.Join(dir, "policy.yaml"), `version: 1
profiles:
  default: {user: "1000:1000"}
  docker-api: {extends: default, user: ""}
mounts: {allowed_roots: [`+roots+`], hold: auto, owner: "1000:1000"}
`)
	work := filepath.Join(roots, "7")
	must(t, os.Mkdir(work, 0o755), os.Chown(work, 1000, 1000))
	write(t, filepath.Join(dir, "berm.yaml"), `http: {listen: "127.0.0.1:0"}
engine: {instance: docs}
otel: {endpoint: "`+sent.URL+`", headers_file: `+dir+`/headers}
sandbox: {chats_root: "`+filepath.Join(dir, "chats")+`", create_roots: true}
security: {token_file: `+dir+`/token}
engine_api:
  listeners:
    - address: unix://`+door+`
      callers: [{name: ci, tenant: ci, profile: docker-api}]
`)
	t.Cleanup(func() { (&server{dir: dir, instance: "docs"}).removeAll(t, e) })
	c := startChildWith(t, dir, e, "serving", "--config", filepath.Join(dir, "berm.yaml"), "--policy", filepath.Join(dir, "policy.yaml"), "--listen", "127.0.0.1:0")
	c.Log.Wait(t, "msg=engine_available")
	address := readString(t, filepath.Join(c.dir, "address"))
	url := "http://" + address
	w := &docsWorld{bin: t.TempDir(),
		env: []string{"BERM_URL=" + url, "BERM_TOKEN=" + testToken, "BERM_ENGINE_INSTANCE=docs"},
		stand: map[string]string{
			"http://127.0.0.1:7070": url, "/run/berm/docker.sock": door, "/srv/ci": roots, "/var/lib/berm": c.dir, "/srv/volumes/7": work,
		}}
	must(t, os.Symlink(bin, filepath.Join(w.bin, "berm")))
	pages := check.Value(filepath.Glob("../../docs/*.md"))(t)
	ran := 0
	for _, page := range append(pages, "../../README.md") {
		if blocks := runnables(t, page); len(blocks) > 0 {
			ran += len(blocks)
			t.Run(filepath.Base(page), func(t *testing.T) {
				w.t = t
				w.run(page, blocks)
			})
		}
	}
	if ran < 10 {
		t.Errorf("%d blocks are marked runnable", ran)
	}

	c.end(t, os.Interrupt)
	if log := c.Log.String(); strings.Contains(log, collectorKey) || !strings.Contains(log, "msg=stopped") {
		t.Errorf("the log has a secret, or lacks its end:\n%s", log)
	}
	got := sent.got(t, "docs")
	wantSent(t, got.logs, "http_request", "sandbox_created", "sandbox_delete_not_found", "serving", "serving_engine_api", "stopped")
	wantSent(t, got.metrics, "berm_engine_api_requests_total", "berm_http_request_duration_seconds", "berm_sandbox_commands_total")
	wantSent(t, got.spans, "reconcile", "runtime.create", "sandbox.create", "sandbox.exec")
	request, create := got.spans["PUT /api/v1/sandboxes/{key}"], got.spans["sandbox.create"]
	if request.trace == "" || create.parent == "" {
		t.Errorf("the spans %+v and %+v belong to no trace", request, create)
	}
}

var (
	mdLink    = regexp.MustCompile(`\]\(([^)\s]*)\)`)
	mdHeading = regexp.MustCompile("(?m)^#+ (.*)$")
	mdAnchor  = regexp.MustCompile(`<a id="([^"]*)">`)
	unslug    = regexp.MustCompile(`[^\p{L}\p{N}_ -]`)
)

// Links between pages lead somewhere, down to the heading.
func TestDocsLinks(t *testing.T) {
	pages := check.Value(filepath.Glob("../../docs/*.md"))(t)
	more := check.Value(filepath.Glob("../../*.md"))(t)
	links := 0
	for _, page := range append(pages, more...) {
		data := readString(t, page)
		for _, m := range mdLink.FindAllStringSubmatch(fence.ReplaceAllString(data, ""), -1) {
			path, place, _ := strings.Cut(m[1], "#")
			if strings.Contains(path, "://") {
				continue
			}
			links++
			target := page
			if path != "" {
				target = filepath.Join(filepath.Dir(page), path)
			}
			body, err := os.ReadFile(target)
			if err != nil {
				t.Errorf("%s: %v", page, err)
				continue
			}
			places := map[string]bool{"": true}
			for _, h := range mdHeading.FindAllStringSubmatch(string(body), -1) {
				places[strings.ReplaceAll(unslug.ReplaceAllString(strings.ToLower(h[1]), ""), " ", "-")] = true
			}
			for _, a := range mdAnchor.FindAllStringSubmatch(string(body), -1) {
				places[a[1]] = true
			}
			if !places[place] {
				t.Errorf("%s: %s has no heading for #%s", page, target, place)
			}
		}
	}
	if links < 30 {
		t.Errorf("%d links were followed", links)
	}
}

// wantSent checks that some names were sent.
func wantSent[V any](t *testing.T, sent map[string]V, some ...string) {
	t.Helper()
	for _, name := range some {
		if _, ok := sent[name]; !ok {
			t.Errorf("%s was never sent", name)
		}
	}
}
