package main

import (
	"encoding/json"
	"testing"

	"github.com/bermhq/berm/cmd/berm/config"
)

func TestVersionJSON(t *testing.T) {
	t.Parallel()
	stdout, stderr, code := berm(t, "", "version", "-o", "json")
	var got buildAbout
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || code != 0 || got.Version != version || got.GoVersion == "" {
		t.Errorf("exit code %d, %v: %.200s%s", code, err, stdout, stderr)
	}
	if _, _, code := berm(t, "", "version", "-o", "yaml"); code != config.ExitUsage {
		t.Errorf("an unknown format: exit code %d", code)
	}
}
