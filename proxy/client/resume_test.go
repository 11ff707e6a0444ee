package client_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

// TestResume has a stream break off where one of the two streams was ahead of the other.
func TestResume(t *testing.T) {
	var asked []string
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.Query().Get("after"))
		w.Header().Set("Content-Type", "application/x-ndjson")
		switch len(asked) {
		case 1:
			_, _ = fmt.Fprintln(w, `{"event":"stderr","seq":1,"resume":"1,5","data":"e"}`)
		case 2:
			_, _ = fmt.Fprintln(w, `{"event":"stdout","seq":7,"data":"ü"}`)
		default:
			_, _ = fmt.Fprintln(w, `{"event":"exit","seq":7,"status":"completed","exit_code":0}`)
		}
	}))
	defer srv.Close()
	c, err := client.New(client.Options{BaseURL: srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	var last apitype.StreamEvent
	for ev, err := range c.FollowExec(t.Context(), "k", "x", client.StreamOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		last = ev
	}
	if last.Event != apitype.EventExit || fmt.Sprint(asked) != "[ 1,5 7]" {
		t.Errorf("it ended with %q, and was asked for %q", last.Event, asked)
	}
}
