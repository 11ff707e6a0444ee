package containerd

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/runtime"
)

func TestTracker(t *testing.T) {
	const (
		start, exit, removed = runtime.EventStart, runtime.EventExit, runtime.EventRemoved
		oom                  = runtime.EventOOM
	)
	for _, tt := range []struct {
		name  string
		alive bool // when the watch began
		fresh bool // it was made since
		in    []runtime.EventType
		out   string
	}{
		{"a life", false, false, []runtime.EventType{start, exit, removed}, "start@0 exit@0 removed@0"},
		{"one that was there", true, false, []runtime.EventType{exit, removed}, "exit@0 removed@0"},
		{"one that had ended", false, false, []runtime.EventType{removed}, "removed@0"},
		{"one that had ended, told again", false, false, []runtime.EventType{exit, removed}, "removed@0"},
		{"two exits", false, false, []runtime.EventType{start, exit, exit, removed}, "start@0 exit@0 removed@0"},
		{"removed before the exit", false, false, []runtime.EventType{start, removed, exit}, "start@0 exit@0 removed@0"},
		{"removed before two exits", false, false, []runtime.EventType{start, removed, exit, exit}, "start@0 exit@0 removed@0"},
		{"removed, and no exit", false, false, []runtime.EventType{start, removed}, "start@0 exit@2 removed@2"},
		{"out of memory", false, false, []runtime.EventType{start, oom, exit, removed}, "start@0 oom@0 exit@0 removed@0"},
		{"out of memory, late", false, false, []runtime.EventType{start, exit, oom, removed}, "start@0 exit@0 oom@0 removed@0"},
		{"started", false, true, []runtime.EventType{start, exit, removed}, "start@0 exit@0 removed@0"},
		{"a start told twice", false, true, []runtime.EventType{start, start, exit, removed}, "start@0 exit@0 removed@0"},
		{"no start", false, true, []runtime.EventType{runtime.EventPaused, exit, removed}, "start@0 paused@0 exit@0 removed@0"},
		{"only an exit", false, true, []runtime.EventType{exit, exit, removed}, "start@0 exit@0 removed@0"},
		{"a late start", false, true, []runtime.EventType{oom, start, exit}, "start@0 oom@0 exit@0"},
		{"never started", false, true, []runtime.EventType{removed}, "removed@0"},
		{"started again", false, true, []runtime.EventType{start, exit, start, exit}, "start@0 exit@0 start@0 exit@0"},
		{"out of memory, too late", false, false, []runtime.EventType{start, exit, removed, oom}, "start@0 exit@0 removed@0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				tr := newTracker(nil)
				tr.know("a", map[string]string{"k": "v"}, tt.alive)
				tr.know("b", nil, true)
				begun := time.Now()
				var got []string
				flush := func() {
					for _, e := range tr.flush(time.Now()) {
						if diff := cmp.Diff(map[string]string{"k": "v"}, e.Labels); diff != "" {
							t.Errorf("labels (-want +got)\n%s", diff)
						}
						got = append(got, fmt.Sprintf("%s@%.0f", e.Type, time.Since(begun).Seconds()))
					}
				}
				if tt.fresh {
					tr.meet("a", map[string]string{"k": "v"})
				}
				for _, typ := range tt.in {
					tr.happened(runtime.Event{Type: typ, ContainerID: "a"}, time.Now())
					tr.happened(runtime.Event{Type: typ, ContainerID: "unknown"}, time.Now())
					flush()
				}
				for due := tr.due(); due != nil; due = tr.due() {
					<-due
					flush()
				}
				if got := strings.Join(got, " "); got != tt.out {
					t.Errorf("%s, want %s", got, tt.out)
				}
				if tt.in[len(tt.in)-1] == removed && tr.knows("a") {
					t.Error("it is remembered for ever")
				}
			})
		})
	}
}

// Several that are held back are told in their order, each when it is due.
func TestTrackerHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		tr := newTracker(nil)
		for _, id := range []string{"a", "b", "c"} {
			tr.know(id, nil, true)
			tr.happened(runtime.Event{Type: runtime.EventRemoved, ContainerID: id}, time.Now())
			time.Sleep(time.Second)
		}
		tr.happened(runtime.Event{Type: runtime.EventExit, ContainerID: "b"}, time.Now())
		var got []string
		for _, e := range tr.flush(time.Now()) {
			got = append(got, e.ContainerID+" "+string(e.Type))
		}
		<-tr.due()
		for _, e := range tr.flush(time.Now()) {
			got = append(got, e.ContainerID+" "+string(e.Type))
		}
		want := []string{"b exit", "b removed", "a exit", "a removed", "c exit", "c removed"}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("(-want +got)\n%s", diff)
		}
	})
}

func TestTrackerLabels(t *testing.T) {
	for _, tt := range []struct {
		name    string
		watched map[string]string
		want    bool
	}{
		{"all", nil, true},
		{"one", map[string]string{"k": "v"}, true},
		{"its name", map[string]string{"k": ""}, true},
		{"two", map[string]string{"k": "v", "empty": ""}, true},
		{"another value", map[string]string{"k": "w"}, false},
		{"another name", map[string]string{"l": ""}, false},
	} {
		tr := newTracker(tt.watched)
		tr.know("a", map[string]string{"k": "v", "empty": ""}, true)
		if got := tr.knows("a"); got != tt.want {
			t.Errorf("%s: %t", tt.name, got)
		}
	}
}
