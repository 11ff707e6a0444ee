package serve

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"testing"
)

// Whether this program carries an agent depends on what was built before it.
func TestBuiltinAgent(t *testing.T) {
	want, err := os.ReadFile("agent/berm-agent")
	got, gotErr := builtinAgent()
	if errors.Is(err, fs.ErrNotExist) {
		if !errors.Is(gotErr, errNoAgent) {
			t.Errorf("without an agent: %v", gotErr)
		}
		return
	}
	if err != nil || gotErr != nil || !bytes.Equal(got, want) || !bytes.HasPrefix(got, []byte("\x7fELF")) {
		t.Errorf("%d bytes, %v; the file has %d, %v", len(got), gotErr, len(want), err)
	}
}
