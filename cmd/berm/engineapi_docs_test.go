package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// yamlBlocks are the examples in YAML of a page.
func yamlBlocks(t *testing.T, page string) (blocks []string) {
	t.Helper()
	data := check.Value(os.ReadFile("../../docs/" + page))(t)
	for _, m := range regexp.MustCompile("(?s)\n```yaml\n(.*?)```").FindAllStringSubmatch(string(data), -1) {
		blocks = append(blocks, m[1])
	}
	return blocks
}

// The examples of configurations and policies, for the second door and for an upgrade, are
// valid.
func TestEngineAPIExamples(t *testing.T) {
	dir := t.TempDir()
	var policies, configs int
	blocks := slices.Concat(yamlBlocks(t, "engine-proxy.md"), yamlBlocks(t, "from-other-proxies.md"), yamlBlocks(t, "upgrade.md"))
	for _, block := range blocks {
		if !strings.Contains(block, "version: 1\n") {
			configs++
			write(t, filepath.Join(dir, "berm.yaml"), block)
			if _, err := config.Load(config.Options{File: filepath.Join(dir, "berm.yaml")}); err != nil {
				t.Errorf("%v:\n%s", err, block)
			}
			continue
		}
		policies++
		_, err := policy.Parse([]byte(block), policy.Options{
			DefaultImage: "python:3.11-slim", EngineNetwork: "berm-sandbox",
			Resolve: func(path string) (string, error) { return path, nil },
		})
		if err != nil {
			t.Errorf("%v:\n%s", err, block)
		}
	}
	if policies < 3 || configs < 4 {
		t.Errorf("%d policies, %d configurations", policies, configs)
	}
}
