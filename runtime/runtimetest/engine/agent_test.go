package engine

import (
	"bytes"
	"testing"
)

func TestBuildAgent(t *testing.T) {
	program, err := BuildAgent(t.Context())
	must(t, err)
	const most = 4_000_000 // it is in the memory of every host, and starts in a moment
	if !bytes.HasPrefix(program, []byte("\x7fELF")) || len(program) > most {
		t.Errorf("%d bytes, which begin with %q", len(program), program[:min(4, len(program))])
	}
	// Hosts keep it by its hash.
	again, err := buildAgent(t.Context())
	if err != nil || !bytes.Equal(program, again) {
		t.Errorf("another build gives other bytes: %v", err)
	}
}
