package engineapi

import (
	"bytes"
	"io"
	"testing"

	"github.com/docker/docker/pkg/stdcopy"
)

// readStream reads both of a container's streams to their end.
func readStream(t *testing.T, r io.Reader) string {
	t.Helper()
	var b bytes.Buffer
	if _, err := stdcopy.StdCopy(&b, &b, r); err != nil {
		t.Fatal(err)
	}
	return b.String()
}
