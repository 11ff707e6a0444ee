package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/bermhq/berm/cmd/berm/config"
)

func TestLoadSigningKey(t *testing.T) {
	key := strings.Repeat("k", 32)
	file := func(content string) string {
		name := filepath.Join(t.TempDir(), "key")
		if err := os.WriteFile(name, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	for name, tt := range map[string]struct {
		cfg  config.Security
		want string
		ok   bool
	}{
		"none":       {config.Security{}, "", true},
		"value":      {config.Security{SigningKey: key}, key, true},
		"file":       {config.Security{SigningKeyFile: file("\n" + key + "\n")}, key, true},
		"short":      {config.Security{SigningKey: key[1:]}, "", false},
		"blanks":     {config.Security{SigningKey: strings.Repeat(" ", 32)}, "", false},
		"short file": {config.Security{SigningKeyFile: file(key[1:] + "\n")}, "", false},
		"empty file": {config.Security{SigningKeyFile: file("")}, "", false},
		"no file":    {config.Security{SigningKeyFile: "/nowhere/key"}, "", false},
	} {
		got, err := loadSigningKey(tt.cfg)
		if string(got) != tt.want || (err == nil) != tt.ok {
			t.Errorf("%s: got %q, %v", name, got, err)
		}
		if err != nil && strings.Contains(err.Error(), "kk") {
			t.Errorf("%s: the error tells the key: %v", name, err)
		}
	}
}
