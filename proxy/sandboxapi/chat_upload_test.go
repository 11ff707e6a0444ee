package sandboxapi

import (
	"bytes"
	"errors"
	"io"
	"net/http/httptest"
	"testing"

	"github.com/bermhq/berm/proxy"
)

// Parts end with the last boundary only, and whatever else a body holds is its sender's
// fault.
func FuzzFileParts(f *testing.F) {
	const start = "--b\r\nContent-Disposition: form-data; filename=a\r\n\r\n"
	for _, seed := range []string{"", "--b--", start + "x\r\n--b--", start + "x", start + "x\r\n--b\r\n", "x\r\n" + start + "\r\n--b--\r\nx"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		r := httptest.NewRequest("POST", "/", nil)
		r.Header.Set("Content-Type", "multipart/form-data; boundary=b")
		p, err := newFileParts(r, bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		for n := 0; ; n++ {
			_, part, err := p.next()
			if errors.Is(err, io.EOF) {
				if n == 0 || !bytes.Contains(body, []byte("--b--")) {
					t.Errorf("it ended after %d files", n)
				}
				return
			}
			if err == nil {
				_, err = io.Copy(io.Discard, part)
			}
			if err != nil {
				if s := proxy.FaultOf(err).Status; s != 400 && s != 415 && s != 422 {
					t.Errorf("it is a %d: %v", s, err)
				}
				return
			}
		}
	})
}
