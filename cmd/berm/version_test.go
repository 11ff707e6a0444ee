package main

import (
	"encoding/json"
	"testing"

	"github.com/bermhq/berm/cmd/berm/config"
)

func TestVersionJSON(t *testing.T) {
	stdout, stderr, code := berm(t, "", "version", "-o", "json")
	var got struct {
		Version   string
		GoVersion string `json:"go_version"`
	}
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || code != 0 || got.Version != config.Version || got.GoVersion == "" {
		t.Errorf("exit code %d, %v: %s%s", code, err, stdout, stderr)
	}
	if _, _, code := berm(t, "", "version", "-o", "yaml"); code != config.ExitUsage {
		t.Errorf("-o yaml: exit code %d", code)
	}
}
