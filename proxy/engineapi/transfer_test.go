package engineapi

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	dockerfilters "github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/lifecycle"
)

// hold sends the beginning of a request and nothing more, and takes nothing either.
func hold(t *testing.T, address, text string) net.Conn {
	t.Helper()
	conn := must(net.Dial("unix", strings.TrimPrefix(address, "unix://")))(t)
	t.Cleanup(func() { _ = conn.Close() })
	must(io.WriteString(conn, text))(t)
	return conn
}

// free tells whether the engine lets a container be looked at.
func free(t *testing.T, direct *client.Client, id string) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err := direct.ContainerInspect(ctx, id)
	return err == nil
}

// bigFile has a container with a file that no buffer holds.
func bigFile(t *testing.T, d *testDoor, direct *client.Client, tenant string) string {
	t.Helper()
	id := d.made(direct, tenant, "", container.Config{Cmd: []string{"sh", "-c", "dd if=/dev/zero of=/big bs=1M count=32 && touch /done; sleep 1000"}})
	eventually(t, func() bool {
		_, err := direct.ContainerStatPath(t.Context(), id, "/done")
		return err == nil
	})
	return id
}

const (
	getBig = "GET /containers/%s/archive?path=/big HTTP/1.1\r\nHost: docker\r\n\r\n"
	putZip = "PUT /containers/%s/archive?path=/ HTTP/1.1\r\nHost: docker\r\nContent-Type: application/x-tar\r\nContent-Length: 1000000\r\n\r\n"
)

// stalled are requests after which the engine keeps the container's lock.
func stalled(t *testing.T) map[string]string {
	t.Helper()
	tar := tarOf(t, "f", strings.Repeat("x", 1<<20))
	return map[string]string{"archive": getBig, "upload": putZip + string(tar[:4096])}
}

func TestStalledArchive(t *testing.T) {
	host, direct := testEngine(t)
	for name, text := range stalled(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they only wait
			d := doorTo(t, host, "")
			d.transfers.stall = 3 * time.Second
			address := d.listen(Caller{Name: "stall", Tenant: "stall"})
			id := bigFile(t, d, direct, "stall")
			hold(t, address, fmt.Sprintf(text, id))
			eventually(t, func() bool { return !free(t, direct, id) })
			eventually(t, func() bool { return free(t, direct, id) })
		})
	}
}

// TestPruneBesideArchive has another tenant prune while an archive stands still.
func TestPruneBesideArchive(t *testing.T) {
	d, direct := engineDoor(t, "")
	address := d.listen(Caller{Name: "beside", Tenant: "beside"})
	id := bigFile(t, d, direct, "beside")
	other := d.client("beside2")
	made, kept := makeOne(t, other, nil, ""), makeOne(t, other, nil, "")
	noError(t, startIt(t, other, kept))
	conn := hold(t, address, fmt.Sprintf(getBig, id))
	eventually(t, func() bool { return !free(t, direct, id) })
	ctx, cancel := context.WithTimeout(t.Context(), transferStall/2)
	defer cancel()
	report, err := other.ContainersPrune(ctx, dockerfilters.NewArgs(dockerfilters.Arg("until", "1h")))
	if err != nil || len(report.ContainersDeleted) != 0 {
		t.Errorf("prune of what is older than an hour: %+v, %v", report, err)
	}
	report, err = other.ContainersPrune(ctx, dockerfilters.NewArgs(dockerfilters.Arg("label!", "none")))
	if err != nil || len(report.ContainersDeleted) != 1 || report.ContainersDeleted[0] != made {
		t.Errorf("prune: %+v, %v", report, err)
	}
	_ = conn.Close()
	eventually(t, func() bool { return free(t, direct, id) })
}

// TestTrickledArchive gives a byte now and then.
func TestTrickledArchive(t *testing.T) {
	d, direct := engineDoor(t, "")
	d.transfers.stall = 2 * time.Second
	address := d.listen(Caller{Name: "trickle", Tenant: "trickle"})
	id := bigFile(t, d, direct, "trickle")
	conn := hold(t, address, fmt.Sprintf(stalled(t)["upload"], id))
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for range 150 {
		<-tick.C
		if _, err := io.WriteString(conn, "x"); err != nil {
			return
		}
	}
	t.Error("it went on for 30 s")
}

func TestArchiveOfWhatIsRemoved(t *testing.T) {
	host, direct := testEngine(t)
	for name, text := range stalled(t) {
		t.Run(name, func(t *testing.T) {
			d := doorTo(t, host, "")
			address := d.listen(Caller{Name: "gone", Tenant: "gone"})
			id := bigFile(t, d, direct, "gone")
			hold(t, address, fmt.Sprintf(text, id))
			eventually(t, func() bool { return !free(t, direct, id) })
			ctx, cancel := context.WithTimeout(t.Context(), transferStall/2)
			defer cancel()
			report(t, newClient(t, address).ContainerRemove(ctx, id, container.RemoveOptions{Force: true}))
		})
	}
}

// TestArchiveEndsWithItsContainer lets a container's time be up in mid-archive.
func TestArchiveEndsWithItsContainer(t *testing.T) {
	host, direct := testEngine(t)
	for name, text := range stalled(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // they only wait
			d := doorTo(t, host, "")
			address := d.listen(Caller{Name: "time", Tenant: "time"})
			id := bigFile(t, d, direct, "time")
			d.known.put(id, "time")
			d.ends.put(id, time.Now().Add(5*time.Second).Format(time.RFC3339Nano))
			hold(t, address, fmt.Sprintf(text, id))
			eventually(t, func() bool { return !free(t, direct, id) })
			begun := time.Now()
			eventually(t, func() bool { return free(t, direct, id) })
			if took := time.Since(begun); took > transferStall/2 {
				t.Errorf("it took %v", took)
			}
			_, _, err := newClient(t, address).CopyFromContainer(t.Context(), id, "/big")
			deniedBy(t, err, "ttl.expired")
		})
	}
	// As its label has it.
	d := doorTo(t, host, "")
	sweepOwn(t, direct, d)
	c := d.client("label")
	made := makeOne(t, c, nil, "")
	must(c.ContainerStatPath(t.Context(), made, "/etc"))(t)
	r, _, err := c.CopyFromContainer(t.Context(), made, "/bin/busybox")
	if err != nil {
		t.Fatal(err)
	}
	_ = r.Close()
	want := inspect(t, direct, made).Config.Labels[lifecycle.LabelExpiresAt]
	if got, _ := d.ends.get(made); got != want || got == "" {
		t.Errorf("it is known to end %q, not %q", got, want)
	}
}

func TestArchivesOfATenant(t *testing.T) {
	d, direct := engineDoor(t, "")
	address := d.listen(Caller{Name: "many", Tenant: "many"})
	id := bigFile(t, d, direct, "many")
	must(newClient(t, address).ContainerStatPath(t.Context(), id, "/big"))(t)
	for range maxTransfers {
		hold(t, address, fmt.Sprintf(getBig, id))
	}
	eventually(t, func() bool {
		d.limits.mu.Lock()
		defer d.limits.mu.Unlock()
		return d.limits.making["transfers many"] == maxTransfers
	})
	if status, _ := say(t, address, http.MethodGet, "/containers/"+id+"/export", ""); status != http.StatusTooManyRequests {
		t.Errorf("one more: %d", status)
	}
	report(t, newClient(t, address).ContainerRemove(t.Context(), id, container.RemoveOptions{Force: true}))
	eventually(t, func() bool {
		d.limits.mu.Lock()
		defer d.limits.mu.Unlock()
		return len(d.limits.making) == 0
	})
	d.transfers.ends.Range(func(call, _ any) bool { t.Errorf("%v is kept", call); return true })
}
