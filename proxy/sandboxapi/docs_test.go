package sandboxapi_test

import (
	"encoding/json"
	"regexp"
	"strings"
	"testing"

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
		path := strings.Replace(op.path, "/k", "/{key}", 1)
		if !strings.Contains(a.body, "<b>"+op.method+"</b> "+path+"<") {
			t.Errorf("%s %s is missing", op.method, path)
		}
	}
	for _, m := range regexp.MustCompile(`(?:src|href)="([^"]*)"`).FindAllStringSubmatch(a.body, -1) {
		if !strings.HasPrefix(m[1], "#") && m[1] != "/openapi.json" {
			t.Errorf("it needs an asset: %s", m[1])
		}
	}
	for _, bad := range []string{"<script", "<link", "@import", "url(", "&lt;nil&gt;", "ZgotmplZ"} {
		if strings.Contains(a.body, bad) {
			t.Errorf("it contains %s", bad)
		}
	}
	if csp := a.Header.Get("Content-Security-Policy"); !strings.HasPrefix(csp, "default-src 'none'") {
		t.Errorf("Content-Security-Policy is %q", csp)
	}
}
