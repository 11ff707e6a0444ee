package engineapi

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/docker/docker/api/types/container"
	dockerfilters "github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	"github.com/bermhq/berm/runtime/runtimetest/pipes"
)

// hold sends the beginning of a request and nothing more, and takes nothing either.
func hold(t *testing.T, address, text string) net.Conn {
	t.Helper()
	conn := check.Value(net.Dial("unix", strings.TrimPrefix(address, "unix://")))(t)
	t.Cleanup(func() { _ = conn.Close() })
	check.Value(io.WriteString(conn, text))(t)
	return conn
}

const (
	getBig       = "GET /v1.41/containers/%s/archive?path=/big HTTP/1.1\r\nHost: localhost\r\n\r\n"
	putBig       = "PUT /v1.41/containers/%s/archive?path=/ HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-tar\r\nContent-Length: 1000000\r\n\r\n"
	removeForced = "DELETE /v1.41/containers/%s?force=1 HTTP/1.1\r\nHost: localhost\r\n\r\n"
)

// TestArchiveBeside has containers pruned while the archive of another tenant's stands still,
// and the one of the archive removed. The engine keeps the lock of that as long as it lasts.
func TestArchiveBeside(t *testing.T) {
	d, direct := engineDoor(t, "")
	address := d.listen(Caller{Name: "beside", Tenant: "beside"})
	mine, other := newClient(t, address), d.client("beside2")
	id := d.made(direct, "beside", "", container.Config{Cmd: []string{"sh", "-c", "dd if=/dev/zero of=/big bs=1M count=8 && touch /done; sleep 1000"}})
	made, kept, theirs := makeOne(t, other, nil, ""), makeOne(t, other, nil, ""), makeOne(t, mine, nil, "")
	must(t, startIt(t, other, kept))
	eventually(t, func() bool { _, err := direct.ContainerStatPath(t.Context(), id, "/done"); return err == nil })
	hold(t, address, fmt.Sprintf(getBig, id))
	eventually(t, func() bool { return !free(t, direct, id) })
	ctx, cancel := context.WithTimeout(t.Context(), transferStall/2)
	defer cancel()
	for _, tt := range []struct {
		filter, value string
		want          []string
	}{{"until", "1h", nil}, {"label!", "none", []string{made}}} {
		report, err := other.ContainersPrune(ctx, dockerfilters.NewArgs(dockerfilters.Arg(tt.filter, tt.value)))
		if err != nil || !slices.Equal(report.ContainersDeleted, tt.want) {
			t.Errorf("prune with %s: %+v, %v", tt.filter, report, err)
		}
	}
	inspect(t, direct, theirs)
	report(t, mine.ContainerRemove(ctx, id, forced))
}

// free tells whether the engine lets a container be looked at.
func free(t *testing.T, direct *client.Client, id string) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err := direct.ContainerInspect(ctx, id)
	return err == nil
}

// archiveDoor is a door before an engine with one container, which has a lock as those of real
// engines: an archive holds it, and what else is asked of the container waits for it.
func archiveDoor(t *testing.T, life time.Duration) (d *Proxy, l *pipes.Listener, lock chan struct{}) {
	t.Helper()
	lock = make(chan struct{}, 1)
	var labels string
	d, ls := boundedDoor(t, Options{ArchiveFixed: true}, func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/containers/json") {
			_, _ = fmt.Fprintf(w, `[{"Id":%q,"Labels":%s}]`, standInID, labels)
			return
		}
		select {
		case lock <- struct{}{}:
			defer func() { <-lock }()
		case <-r.Context().Done():
			return
		}
		switch archive := strings.HasSuffix(r.URL.Path, "/archive"); {
		case archive && r.Method == http.MethodGet:
			for err := error(nil); err == nil; {
				_, err = w.Write(make([]byte, 64<<10))
			}
		case archive:
			_, _ = io.Copy(io.Discard, r.Body)
		case r.Method == http.MethodDelete:
			w.WriteHeader(http.StatusNoContent)
		default:
			_, _ = fmt.Fprintf(w, `{"Id":%q,"HostConfig":{},"State":{},"Config":{"Labels":%s}}`, standInID, labels)
		}
	}, "red")
	labels = d.sealed(lifecycle.ObjectContainer, "red", lifecycle.LabelExpiresAt, time.Now().Add(life).UTC().Format(time.RFC3339Nano))
	return d, ls[0], lock
}

// TestArchivesEnd has callers not go on with archives, containers' time be up, and containers be
// removed.
func TestArchivesEnd(t *testing.T) {
	begin := string(tarOf(t, "f", strings.Repeat("x", 1<<20)))[:4096]
	for name, tt := range map[string]struct {
		life, end time.Duration // of the container, and of the archive at the latest
		trickle   bool
		remove    bool
	}{
		"it stands still": {life: time.Hour, end: transferStall},
		"it trickles":     {life: time.Hour, end: 2 * transferStall, trickle: true},
		"its time is up":  {life: transferStall / 2, end: transferStall / 2},
		"it is removed":   {life: time.Hour, remove: true},
	} {
		for way, head := range map[string]string{"get": getBig, "put": putBig + begin} {
			t.Run(name+", "+way, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					_, l, lock := archiveDoor(t, tt.life)
					conn, begun := l.Dial(), time.Now()
					var sending sync.WaitGroup
					defer sending.Wait()
					defer func() { _ = conn.Close() }()
					sending.Go(func() {
						_, err := io.WriteString(conn, fmt.Sprintf(head, standInID))
						for b := []byte("x"); err == nil && tt.trickle; time.Sleep(time.Second) {
							if way == "get" {
								_, err = conn.Read(b)
							} else {
								_, err = conn.Write(b)
							}
						}
					})
					synctest.Wait()
					if len(lock) == 0 {
						resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
						t.Fatalf("the engine wasn't asked for it: %+v, %v", resp, err)
					}
					if tt.remove {
						if status, text := exchange(l, fmt.Sprintf(removeForced, standInID), strings.NewReader("")); status != http.StatusNoContent {
							t.Errorf("remove: %d %s", status, text)
						}
					}
					lock <- struct{}{}
					if took := time.Since(begun); took > tt.end {
						t.Errorf("it ended after %s", took)
					}
					<-lock
					if time.Since(begun) < tt.life {
						return
					}
					if status, text := exchange(l, fmt.Sprintf(getBig, standInID), strings.NewReader("")); status != http.StatusForbidden || !strings.Contains(text, "ttl.expired") {
						t.Errorf("afterwards: %d %s", status, text)
					}
				})
			})
		}
	}
}

func TestArchivesOfATenant(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, l, _ := archiveDoor(t, time.Hour)
		_, _ = exchange(l, fmt.Sprintf(getRequest, "/containers/"+standInID+"/json"), strings.NewReader("")) // or each would begin with it
		for range maxTransfers {
			conn := l.Dial()
			defer func() { _ = conn.Close() }()
			go func() { _, _ = fmt.Fprintf(conn, getBig, standInID) }()
		}
		synctest.Wait()
		if n := d.making("transfers red"); n != maxTransfers {
			t.Errorf("%d go on", n)
		}
		if status, _ := exchange(l, fmt.Sprintf(getRequest, "/containers/"+standInID+"/export"), strings.NewReader("")); status != http.StatusTooManyRequests {
			t.Errorf("one more: %d", status)
		}
		if status, _ := exchange(l, fmt.Sprintf(removeForced, standInID), strings.NewReader("")); status != http.StatusNoContent {
			t.Errorf("remove: %d", status)
		}
		synctest.Wait()
		d.limits.mu.Lock()
		defer d.limits.mu.Unlock()
		if len(d.limits.making) != 0 {
			t.Errorf("%v is kept", d.limits.making)
		}
		d.transfers.ends.Range(func(call, _ any) bool { t.Errorf("%v is kept", call); return true })
	})
}
