package engineapi

import (
	"bytes"
	"io"
	"testing"
	"time"

	"github.com/docker/docker/pkg/stdcopy"
)

// readStream reads both of a container's streams to their end.
func readStream(t *testing.T, r io.Reader) string {
	t.Helper()
	var b bytes.Buffer
	must(stdcopy.StdCopy(&b, &b, r))(t)
	return b.String()
}

// eventually waits until ok; a test's own deadline is the end of its patience.
func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it didn't come to be")
		}
	}
}
