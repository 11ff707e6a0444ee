package sandboxapi_test

import (
	"encoding/json"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/proxy/apitype"
)

// drip is a body of so many bytes at a time, each after a while.
type drip struct {
	n, left int
	every   time.Duration
}

func (d *drip) Read(b []byte) (int, error) {
	if d.left == 0 {
		return 0, io.EOF
	}
	time.Sleep(d.every)
	n := min(d.n, d.left, len(b))
	for i := range b[:n] {
		b[i] = 'x'
	}
	d.left -= n
	return n, nil
}

// upload sends a body, and gives the answer's status, a problem's code, and what it took.
func (d *piped) upload(method, path string, length int64, body io.Reader, kind string) (status int, code string, took time.Duration) {
	d.t.Helper()
	r := d.request(method, path, body, withHeader("Content-Type", kind))
	r.ContentLength = length
	start := time.Now()
	resp, err := d.client.Do(r)
	if err != nil {
		d.t.Fatalf("%s %s after %s: %v", method, path, time.Since(start), err)
	}
	took = time.Since(start)
	var p apitype.Problem
	err = json.NewDecoder(resp.Body).Decode(&p)
	_ = resp.Body.Close()
	time.Sleep(time.Hour) // until what would have sent the next bytes sees that nobody reads them
	if resp.StatusCode >= 400 && err != nil {
		d.t.Errorf("%s %s: %d without a problem: %v", method, path, resp.StatusCode, err)
	}
	return resp.StatusCode, p.Code, took
}

// Nobody keeps room in storage by sending next to nothing, nor does one who sends slowly
// have to hurry.
func TestUploadsHaveAPace(t *testing.T) {
	const binary = "application/octet-stream"
	upload, kind := form(t, "a", "b")
	for name, tt := range map[string]struct {
		method, path, start, kind string
	}{
		"file":    {"PUT", filePath, "", binary},
		"form":    {"POST", chatPath + "/files", strings.Split(upload, "b\r\n--")[0], kind},
		"history": {"PUT", chatPath + "/history", "", binary},
		"append":  {"POST", chatPath + "/history", "", binary},
		"archive": {"PUT", chatPath + "/tar", "", "application/x-tar"},
	} {
		synctest.Test(t, func(t *testing.T) {
			d := newPiped(t, withShelf(t, newShelf(t)))
			for what, body := range map[string]*drip{
				"one that drips":                          {n: 1, left: 1000, every: time.Second},
				"one that begins, and then is too slow":   {n: 1000, left: 1 << 20, every: time.Second},
				"one that hasn't come but for its header": {n: 1, left: 1, every: time.Hour},
			} {
				status, code, took := d.upload(tt.method, tt.path, -1, io.MultiReader(strings.NewReader(tt.start), body), tt.kind)
				if status != 400 || code != "malformed" || took > 3*time.Minute {
					t.Errorf("%s, %s: got %d %s after %s", name, what, status, code, took)
				}
			}
		})
	}
	synctest.Test(t, func(t *testing.T) {
		s := newShelf(t)
		d := newPiped(t, withShelf(t, s))
		for what, body := range map[string]*drip{
			"a small one": {n: 100, left: 11_000, every: time.Second},
			"a long one":  {n: 3 << 10, left: 1 << 20, every: 2 * time.Second},
			"with pauses": {n: 32 << 10, left: 256 << 10, every: 25 * time.Second},
		} {
			if status, code, took := d.upload("PUT", filePath, int64(body.left), body, binary); status != 200 || took < time.Minute {
				t.Errorf("%s: got %d %s after %s", what, status, code, took)
			}
		}
	})
}

// What goes in by a signed URL is whole before that ends, or is nothing.
func TestSignedUploadsEnd(t *testing.T) {
	for what, body := range map[string]*drip{
		"one that drips": {n: 1, left: 100, every: 900 * time.Millisecond},
		"one that stops": {n: 1, left: 100, every: time.Hour},
		"one that comes": {n: 64 << 10, left: 1 << 30, every: 900 * time.Millisecond},
	} {
		synctest.Test(t, func(t *testing.T) {
			s := newShelf(t)
			d := newPiped(t, withShelf(t, s))
			path := d.signFile(`{"name":"x","method":"PUT","ttl":"10s"}`)
			for _, length := range []int64{-1, int64(body.left)} {
				b := *body
				status, code, took := d.upload("PUT", path, length, &b, "")
				if status != 410 || code != "url_expired" || took > 11*time.Second {
					t.Errorf("%s, of %d: got %d %s after %s", what, length, status, code, took)
				}
				path = d.signFile(`{"name":"x","method":"PUT","ttl":"10s"}`)
			}
			if s.puts != nil {
				t.Errorf("%s: got %+v", what, s.puts)
			}
			if status, code, _ := d.upload("PUT", path, -1, &drip{n: 1, left: 8, every: time.Second}, ""); status != 200 {
				t.Errorf("one that ends in time: got %d %s", status, code)
			}
			// Its bytes are there, and it isn't.
			s.work = time.Minute
			path = d.signFile(`{"name":"x","method":"PUT","ttl":"10s"}`)
			if status, code, _ := d.upload("PUT", path, 1, strings.NewReader("x"), ""); status != 410 || code != "url_expired" {
				t.Errorf("one that is worked on: got %d %s", status, code)
			}
		})
	}
}

// TestSignedFaults checks that who has but an address learns neither what else its owner
// has, nor writes the address into logs by passing an error on.
func TestSignedFaults(t *testing.T) {
	t.Parallel()
	d, s := newLibrary(t)
	put := d.signFile(`{"name":"x","method":"PUT"}`)
	for _, full := range []*quota.FullError{
		{WorkspaceID: workspaceID, UsedBytes: 31337, QuotaBytes: 40000},
		{WorkspaceID: workspaceID, QuotaBytes: 40000, Chat: "chat-8"},
	} {
		s.refused = full
		if p := d.want(507, "workspace_quota_exceeded", "PUT", put, "x", withToken("")).problem(t); p.Detail != "there is no room for this" {
			t.Errorf("got %q", p.Detail)
		}
		if p := d.want(507, "workspace_quota_exceeded", "PUT", filePath, "x").problem(t); p.Detail != full.Error() {
			t.Errorf("one with a token got %q", p.Detail)
		}
	}
	signature := strings.TrimPrefix(put, "/f/")
	for _, tt := range [][2]string{
		{"/f/", put}, {"/f/", put + "x"}, {"/f/", put + "/"}, {"/f/", "/f/a%2f" + signature}, {"/f/", "/%66/" + signature},
		{"/p/", "/p/" + signature + "/"}, {"/p/", "/p/" + signature}, {"/p/", "/p/" + signature + "/own/path"}, {"/p/", "/%70/" + signature + "/"},
	} {
		a := d.send("PUT", tt[1], "x", withToken(""))
		if p := a.problem(t); p.Instance != tt[0] || strings.Contains(a.body, signature) {
			t.Errorf("%s: got %d %s", tt[1], a.StatusCode, a.body)
		}
	}
	if got := d.want(507, "workspace_quota_exceeded", "PUT", filePath, "x").problem(t).Instance; got != filePath {
		t.Errorf("got %q", got)
	}
}
