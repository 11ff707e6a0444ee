package sandboxapi_test

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/proxy/sandboxapi"
)

func TestDocument(t *testing.T) {
	d := newDoor(t)
	a := d.want(200, "", "GET", "/openapi.json", "", withToken(""))
	if a.body != string(sandboxapi.Document()) || !json.Valid([]byte(a.body)) {
		t.Error("what is served isn't the document")
	}
	d.CheckExamples()
}

func TestDocs(t *testing.T) {
	d := newDoor(t)
	a := d.want(200, "", "GET", "/docs", "", withToken(""))
	for _, op := range operations {
		path := strings.NewReplacer("/sandboxes/k", "/sandboxes/{key}", "/job-1", "/{exec}", "/tools", "/{process}").Replace(op.path)
		if !strings.Contains(a.body, "<b>"+op.method+"</b> "+path+"<") {
			t.Errorf("%s %s is missing", op.method, path)
		}
	}
	for _, m := range regexp.MustCompile(`(?:src|href)="([^"]*)"`).FindAllStringSubmatch(a.body, -1) {
		if !strings.HasPrefix(m[1], "#") && m[1] != "/openapi.json" {
			t.Errorf("it needs an asset: %s", m[1])
		}
	}
	// One script, which the policy names, and no other.
	before, after, _ := strings.Cut(a.body, "<script>")
	script, after, _ := strings.Cut(after, "</script>")
	sum := sha256.Sum256([]byte(script))
	if csp := a.Header.Get("Content-Security-Policy"); !strings.Contains(csp, "; script-src 'sha256-"+base64.StdEncoding.EncodeToString(sum[:])+"';") {
		t.Errorf("the script isn't in the policy %q", csp)
	}
	for _, bad := range []string{"<script", "<link", "@import", "url(", "&lt;nil&gt;", "ZgotmplZ"} {
		if strings.Contains(before+after, bad) {
			t.Errorf("it contains %s", bad)
		}
	}
	if csp := a.Header.Get("Content-Security-Policy"); !strings.HasPrefix(csp, "default-src 'none'") {
		t.Errorf("Content-Security-Policy is %q", csp)
	}
}

// The guide must know every code and every path of the document, and no other code.
func TestGuide(t *testing.T) {
	var guide []byte
	for _, page := range []string{"api.md", "api-inside.md", "storage.md"} {
		data, err := os.ReadFile("../../docs/" + page)
		must(t, err)
		guide = append(guide, data...)
	}
	var doc struct {
		Paths      map[string]any
		Components struct {
			Schemas struct{ Code struct{ Enum []string } }
		}
	}
	must(t, json.Unmarshal(sandboxapi.Document(), &doc))
	var codes []string
	for _, m := range regexp.MustCompile(`(?m)^- <a id="(\w+)"></a>\x60(\w+)\x60 \(`).FindAllStringSubmatch(string(guide), -1) {
		if m[1] != m[2] {
			t.Errorf("%s has the anchor %s", m[2], m[1])
		}
		codes = append(codes, m[2])
	}
	slices.Sort(codes)
	slices.Sort(doc.Components.Schemas.Code.Enum)
	if diff := cmp.Diff(doc.Components.Schemas.Code.Enum, codes); diff != "" {
		t.Errorf("codes: %s", diff)
	}
	for path := range doc.Paths {
		shown := strings.NewReplacer("{key}", "build-42", "{exec}", `job-\d`, "{process}", "tools",
			"{port}", "8000", "{path}", "index.html", "{signature}", `\w+\.\w+`,
			"{user_id}", "user-7", "{workspace_id}", `\$WORKSPACE`, "{chat_id}", "chat-42", "{name}", "report.csv", "{file_id}", `\$FILE`).Replace(path)
		if !regexp.MustCompile(`(\$URL|http://127\.0\.0\.1:7070)`+shown).Match(guide) && path != "/docs" {
			t.Errorf("%s is missing", path)
		}
	}
}
