package cli

import (
	"bytes"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
)

func TestProgress(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		p := &progress{to: &out, total: 4 << 20, next: time.Now().Add(progressAfter)}
		put := func(want string) {
			t.Helper()
			out.Reset()
			_, _ = p.Write(make([]byte, 1<<20))
			if out.String() != want {
				t.Errorf("got %q, want %q", out.String(), want)
			}
		}
		put("") // it may be over soon
		time.Sleep(progressAfter)
		put("\r\x1b[K[##########          ] 50% of 4.0 MiB")
		put("") // not so often
		p.total = 0
		time.Sleep(progressEvery)
		put("\r\x1b[K4.0 MiB")
		time.Sleep(progressEvery)
		out.Reset()
		p.pull(&apitype.Sandbox{}) // says nothing of an image
		p.pull(&apitype.Sandbox{Pull: &apitype.Pull{CurrentBytes: 1 << 20, TotalBytes: 20 << 20}})
		if want := "\r\x1b[Kpulling the image: [#                   ] 5% of 20.0 MiB"; out.String() != want {
			t.Errorf("got %q, want %q", out.String(), want)
		}
		out.Reset()
		p.Close()
		p.Close()
		if out.String() != "\r\x1b[K" {
			t.Errorf("at the end: %q", out.String())
		}
		time.Sleep(progressEvery)
		put("") // what comes late
	})
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		p := newProgress(&out, 1)
		time.Sleep(progressAfter)
		_, _ = p.Write([]byte("x"))
		p.Close()
		if out.Len() > 0 {
			t.Errorf("where there is no terminal: %q", &out)
		}
	})
}
