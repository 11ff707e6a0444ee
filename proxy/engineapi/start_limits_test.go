package engineapi

import (
	"bytes"
	"fmt"
	"net/http"
	"path"
	"sync/atomic"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"
)

// deaf is a container that doesn't end when it is told to.
func deaf(t *testing.T, c, direct *client.Client) string {
	t.Helper()
	cfg := *sleeper
	cfg.Cmd = []string{"sh", "-c", "trap '' TERM; touch /tmp/deaf; while true; do sleep 1; done"}
	ct := must(c.ContainerCreate(t.Context(), &cfg, nil, nil, nil, ""))(t)
	noError(t, startIt(t, c, ct.ID))
	eventually(t, func() bool {
		_, err := direct.ContainerStatPath(t.Context(), ct.ID, "/tmp/deaf")
		return err == nil
	})
	return ct.ID
}

// counted counts the engine's requests whose path ends so.
func counted(l *liar, end string) *atomic.Int64 {
	var n atomic.Int64
	l.set(func(l *liar) {
		l.refuse = func(_, p string) bool {
			if path.Base(p) == end {
				n.Add(1)
			}
			return false
		}
	})
	return &n
}

func (d *testDoor) making(key string) int64 {
	d.limits.mu.Lock()
	defer d.limits.mu.Unlock()
	return d.limits.making[key]
}

// TestRestartsPileUp has callers ask for restarts that take an hour, and leave.
func TestRestartsPileUp(t *testing.T) {
	host, direct := testEngine(t)
	for what, most := range map[string]int64{"restart": 1, "stop": maxStops} {
		t.Run(what, func(t *testing.T) {
			l := startLiar(t, host)
			d := doorTo(t, l.host, "")
			sweepOwn(t, direct, d)
			address := d.listen(Caller{Name: "pile", Tenant: "pile"})
			c := newClient(t, address)
			id := deaf(t, c, direct)
			n := counted(l, what)
			for range 20 {
				conn := hold(t, address, fmt.Sprintf("POST /containers/%s/%s?t=3600 HTTP/1.1\r\nHost: docker\r\n\r\n", id, what))
				eventually(t, func() bool { return n.Load() > 0 })
				_ = conn.Close()
			}
			eventually(t, func() bool { return n.Load() == most && d.making(acts+" pile") == most })
			if what == "stop" {
				if status, _ := say(t, address, http.MethodPost, "/containers/"+id+"/stop?t=3600", ""); status != http.StatusTooManyRequests {
					t.Errorf("one more: %d", status)
				}
			}
			noError(t, c.ContainerRemove(t.Context(), id, container.RemoveOptions{Force: true}))
			eventually(t, func() bool { return d.making(acts+" pile") == 0 && d.making("stops of container "+id+" pile") == 0 })
			if n.Load() > most {
				t.Errorf("%d reached the engine", n.Load())
			}
			if _, ok := d.startLocks.TryLock(id); !ok {
				t.Error("the start lock is kept")
			}
		})
	}
}

func TestStopIsBounded(t *testing.T) {
	d, _, l := lyingDoor(t, "")
	address := d.listen(Caller{Name: "bound", Tenant: "bound"})
	id := makeOne(t, newClient(t, address), nil, "")
	for query, told := range map[string]string{ // what the engine is told, if it is
		"t=3601": "", "t=-2": "", "t=x": "", "signal=a%20b": "", "t=-1": "t=3600", "t=3600": "t=3600", "t=0&signal=INT": "signal=INT&t=0",
	} {
		want := http.StatusNotModified // it isn't running
		if told == "" {
			want = http.StatusBadRequest
		}
		l.mu.Lock()
		l.stop = nil
		l.mu.Unlock()
		if status, _ := say(t, address, http.MethodPost, "/containers/"+id+"/stop?"+query, ""); status != want {
			t.Errorf("%s: %d, want %d", query, status, want)
		}
		l.mu.Lock()
		if got := l.stop.Encode(); got != told {
			t.Errorf("%s: the engine was told %q, want %q", query, got, told)
		}
		l.mu.Unlock()
	}
}

// TestStreamIsWrittenDown looks for the record of an answer that goes on.
func TestStreamIsWrittenDown(t *testing.T) {
	d, direct := engineDoor(t, "")
	address := d.listen(Caller{Name: "record", Tenant: "record"})
	id := d.made(direct, "record", "", container.Config{})
	for template, request := range map[string]string{
		"/containers/{id}/logs":    "GET /containers/" + id + "/logs?follow=1&stdout=1 HTTP/1.1\r\nHost: docker\r\n\r\n",
		"/containers/{id}/stats":   "GET /containers/" + id + "/stats HTTP/1.1\r\nHost: docker\r\n\r\n",
		"/containers/{id}/wait":    "POST /containers/" + id + "/wait HTTP/1.1\r\nHost: docker\r\nContent-Length: 0\r\n\r\n",
		"/containers/{id}/attach":  "POST /containers/" + id + "/attach?stream=1&stdout=1 HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n",
		"/containers/{id}/archive": fmt.Sprintf(stalled(t)["upload"], id),
		"/events":                  "GET /events HTTP/1.1\r\nHost: docker\r\n\r\n",
	} {
		t.Run(template, func(t *testing.T) {
			conn := hold(t, address, request)
			defer func() { _ = conn.Close() }()
			begun := time.Now()
			eventually(t, func() bool { return bytes.Contains(readFile(t, d.audit), []byte(`"route":"`+template+`"`)) })
			if time.Since(begun) > transferStall/2 {
				t.Error("only at its end")
			}
		})
	}
}
