package main

import (
	"maps"
	"os"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseTask(t *testing.T) {
	for stat, want := range map[string]task{
		"12 (a b) S 1 12 12 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 3 0 4711 0 0":             {12, 1, 'S', 3, 4711},
		"12 (a) Z) R 9 9 9 9) Z 7 12 12 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 4711 0 0": {12, 7, 'Z', 1, 4711},
	} {
		if got, ok := parseTask([]byte(stat)); !ok || got != want {
			t.Errorf("%s: %+v, want %+v", stat, got, want)
		}
	}
	for _, stat := range []string{"", "12", "12 (a)", "12 (a) S 1", "x (a) S 1 12 12 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 3 0 4711 0 0"} {
		if got, ok := parseTask([]byte(stat)); ok {
			t.Errorf("%q: %+v", stat, got)
		}
	}
	if own, ok := readTask(os.Getpid()); !ok || own.parent != os.Getppid() || own.over() || own.start > ticksNow() || own.start == 0 {
		t.Errorf("this process is %+v, and now is %d", own, ticksNow())
	}
}

func TestBelow(t *testing.T) {
	all := map[int]task{
		1: {pid: 1, parent: 0, state: 'S'}, 2: {pid: 2, parent: 1, state: 'S'}, 3: {pid: 3, parent: 2, state: 'R'},
		4: {pid: 4, parent: 3, state: 'Z', threads: 1}, 5: {pid: 5, parent: 4, state: 'S'}, 6: {pid: 6, parent: 1, state: 'S'},
		7: {pid: 7, parent: 3, state: 'Z', threads: 2}, 8: {pid: 8, parent: 9, state: 'S'}, 9: {pid: 9, parent: 8, state: 'S'},
		10: {pid: 10, parent: 11, state: 'S'},
	}
	for root, want := range map[int][]int{1: {2, 3, 5, 6, 7}, 2: {3, 5, 7}, 6: nil, 8: {9}, 11: {10}, 12: nil} {
		got := slices.Sorted(maps.Keys(below(all, map[int]bool{root: true})))
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("below %d: want -, got +\n%s", root, diff)
		}
	}
}
