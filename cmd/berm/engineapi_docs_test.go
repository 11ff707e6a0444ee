package main

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/policy"
)

// yamlBlocks are the examples in YAML of a page.
func yamlBlocks(t *testing.T, page string) (blocks []string) {
	t.Helper()
	data, err := os.ReadFile("../../docs/" + page)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile("(?s)\n```yaml\n(.*?)```").FindAllStringSubmatch(string(data), -1) {
		blocks = append(blocks, m[1])
	}
	return blocks
}

// The examples of configurations and policies, for the second door and for an upgrade, are
// valid, and that of a policy has every key.
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
		if policies == 1 {
			wantEveryKey(t, block)
		}
	}
	if policies < 3 || configs < 4 {
		t.Errorf("%d policies, %d configurations", policies, configs)
	}
}

// wantEveryKey compares a policy's engine_api with that of docs/policy.yaml, which the
// policy's own tests hold against the code.
func wantEveryKey(t *testing.T, block string) {
	t.Helper()
	all, err := os.ReadFile("../../docs/policy.yaml")
	if err != nil {
		t.Fatal(err)
	}
	keys := func(data []byte) []string {
		var file struct {
			Profiles map[string]struct {
				EngineAPI map[string]any `yaml:"engine_api"`
			}
		}
		if err := yaml.Unmarshal(data, &file); err != nil {
			t.Fatal(err)
		}
		return slices.Sorted(maps.Keys(file.Profiles["default"].EngineAPI))
	}
	got := keys([]byte(block))
	if d := cmp.Diff(keys(all), got); d != "" || len(got) == 0 {
		t.Errorf("keys of engine_api (-docs/policy.yaml +example):\n%s", d)
	}
}
