package main

import (
	"os"
	"slices"
	"strings"
	"testing"
)

const (
	policyA = "version: 1\nprofiles: {a: {extends: default}}\n"
	policyB = "version: 1\nprofiles: {b: {extends: default}}\n"
	broken  = "version: 1\nprofiles: {c: {extends: nothing}}\n"
)

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// replace swaps a file for another as editors do.
func replace(t *testing.T, path, content string) {
	t.Helper()
	write(t, path+".new", content)
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// link makes a symbolic link, over one that is there, in one step.
func link(t *testing.T, target, path string) {
	t.Helper()
	if err := os.Symlink(target, path+".new"); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

func wantEmptyDir(t *testing.T, dir string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) > 0 {
		t.Errorf("left in %s: %v, %v", dir, entries, err)
	}
}

func slurp(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// section gives the rows of the tables and lists below a heading of docs/observability.md.
// Cells have no backquotes. A heading below it, a log's level, is its rows' second column.
func section(t *testing.T, heading string) [][]string {
	t.Helper()
	doc, err := os.ReadFile("../../docs/observability.md")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(doc), "\n## "+heading+"\n")
	if !found {
		t.Fatalf("no section %s", heading)
	}
	rest, _, _ = strings.Cut(rest, "\n## ")
	var rows [][]string
	below := ""
	for line := range strings.Lines(rest) {
		if heading, ok := strings.CutPrefix(line, "### "); ok {
			below = strings.TrimSpace(heading)
		}
		if item, ok := strings.CutPrefix(line, "- `"); ok {
			name, meaning, _ := strings.Cut(item, "`")
			rows = append(rows, []string{name, below, strings.TrimPrefix(strings.TrimSpace(meaning), ": ")})
		}
		if strings.HasPrefix(line, "| `") {
			cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
			for i := range cells {
				cells[i] = strings.ReplaceAll(strings.TrimSpace(cells[i]), "`", "")
			}
			if below != "" {
				cells = slices.Insert(cells, 1, below)
			}
			rows = append(rows, cells)
		}
	}
	return rows
}
