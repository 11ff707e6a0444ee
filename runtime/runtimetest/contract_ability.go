package runtimetest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

var noID = strings.Repeat("0", 64)

func pauserCases() []contractCase {
	return []contractCase{
		{"pause", testPause},
		inOne("pause in one container", (*fixture).spec,
			containerCase{"while commands start", testPauseStart},
			containerCase{"while a command runs", testPauseRunning},
			containerCase{"canceled", testPauseCanceled},
		),
	}
}

// A container that is frozen under a command that is just being started must not
// be lost to the engine: old ones never answer for it again.
func testPauseStart(t *testing.T, b *fixture, id string) {
	for i := range 15 {
		ctx, cancel := context.WithTimeout(b.ctx, 10*time.Second)
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				_, err := b.rt.Exec(ctx, id, runtime.Exec{Command: []string{"true"}})
				if err != nil && !errdefs.IsFailedPrecondition(err) { // paused already
					t.Errorf("round %d: exec: %v", i, err)
				}
			})
		}
		time.Sleep(time.Duration(i) * 3 * time.Millisecond) // anywhere in the start
		if err := b.pauseAndResume(ctx, id); err != nil {
			t.Errorf("round %d: %v", i, err)
		}
		wg.Wait()
		cancel()
		if t.Failed() {
			return
		}
	}
}

// pauseAndResume does so while programs start. A container that the engine can't freeze then
// stays as it is: runc 1.1 gives up after 0.2 s if the host leaves the processes no time to stop.
func (b *fixture) pauseAndResume(ctx context.Context, id string) error {
	err := b.rt.Pause(ctx, id)
	if err != nil && strings.Contains(err.Error(), "unable to freeze") {
		err = nil
	}
	return errors.Join(err, b.rt.Resume(ctx, id))
}

func testPause(t *testing.T, b *fixture) {
	c := b.create(t, b.spec())
	for range 2 {
		must(t, b.rt.Pause(b.ctx, c.ID))
	}
	if got := b.inspect(t, c.ID).State; got != runtime.StatePaused {
		t.Errorf("paused: %s", got)
	}
	if cs := b.list(t); len(cs) != 1 || cs[0].State != runtime.StatePaused {
		t.Errorf("listed: %+v", cs)
	}
	refused := func(when string) {
		_, err := b.rt.Exec(b.ctx, c.ID, runtime.Exec{Command: []string{"true"}})
		class(t, "exec in a container paused "+when, err, errdefs.IsFailedPrecondition, "FailedPrecondition")
	}
	refused("before any command")
	for range 2 {
		must(t, b.rt.Resume(b.ctx, c.ID))
	}
	b.alive(t, c.ID)
	must(t, b.rt.Pause(b.ctx, c.ID))
	refused("after a command")
	if err := b.rt.Remove(b.ctx, c.ID); err != nil {
		t.Errorf("remove a paused container: %v", err)
	}
	class(t, "pause", b.rt.Pause(b.ctx, noID), errdefs.IsNotFound, "NotFound")
	class(t, "resume", b.rt.Resume(b.ctx, noID), errdefs.IsNotFound, "NotFound")
}

// testPauseRunning checks that a frozen command goes on where it was. One that is to be
// killed while it is frozen may be beyond a backend's reach, which then says so.
func testPauseRunning(t *testing.T, b *fixture, id string) {
	ctx, cancel := context.WithCancel(b.ctx)
	defer cancel()
	failed := b.underWay(ctx, t, id)
	in, end := io.Pipe()
	out, ended := newSignalWriter("started"), make(chan error, 1)
	go func() {
		result, err := b.rt.Exec(b.ctx, id, runtime.Exec{Command: []string{"sh", "-c", "echo started; cat; echo done; exit 6"}, Stdin: in, Stdout: out})
		if err == nil && (result.ExitCode != 6 || string(out.buf) != "started\ndone\n") {
			err = fmt.Errorf("exit code %d, output %q", result.ExitCode, out.buf)
		}
		ended <- err
	}()
	<-out.seen
	must(t, b.rt.Pause(b.ctx, id))
	begun := time.Now()
	cancel()
	class(t, "a command canceled while it was frozen", <-failed, errdefs.IsCanceled, "Canceled")
	if took := time.Since(begun); took > 15*time.Second {
		t.Errorf("it took %s", took)
	}
	must(t, b.rt.Resume(b.ctx, id), end.Close())
	if err := <-ended; err != nil {
		t.Errorf("a command that was frozen: %v", err)
	}
	b.alive(t, id)
}

// testPauseCanceled ends the context at many stages of a pause, and of a resume.
func testPauseCanceled(t *testing.T, b *fixture, id string) {
	for delay := time.Millisecond; delay < 200*time.Millisecond; delay = delay*3/2 + time.Millisecond {
		for _, tt := range []struct {
			name string
			call func(context.Context, string) error
			want runtime.State
		}{{"pause", b.rt.Pause, runtime.StatePaused}, {"resume", b.rt.Resume, runtime.StateRunning}} {
			ctx, cancel := context.WithTimeout(b.ctx, delay)
			err := tt.call(ctx, id)
			cancel()
			if err != nil {
				class(t, fmt.Sprintf("%s ended after %s", tt.name, delay), err, errdefs.IsDeadlineExceeded, "DeadlineExceeded")
			}
			if err := tt.call(b.ctx, id); err != nil {
				t.Errorf("%s after one that ended after %s: %v", tt.name, delay, err)
			}
			if got := b.inspect(t, id).State; got != tt.want {
				t.Errorf("%s after one that ended after %s: it is %s", tt.name, delay, got)
			}
		}
	}
	b.alive(t, id)
}

// testStatsCounts checks that what is measured is the container's own.
func testStatsCounts(t *testing.T, b *fixture) {
	must(t, b.rt.EnsureNetwork(b.ctx, runtime.Network{Name: b.name, Labels: b.labels}))
	server, client := b.onNetwork(t, b.name), b.onNetwork(t, b.name)
	b.serve(t, server.ID, "wc -c")
	measure := func() runtime.Stats {
		t.Helper()
		got, err := b.rt.Stats(b.ctx, client.ID)
		must(t, err)
		return got
	}
	before := measure()
	b.shell(t, client.ID, "head -c 30000 /dev/zero | nc -w 2 "+server.IP+" 7777; for i in 1 2 3 4; do sleep 1000 >/dev/null 2>&1 & done; i=0; while test $i -lt 20000; do i=$((i+1)); done")
	after := measure()
	if after.TxBytes-before.TxBytes < 30000 || after.RxBytes <= before.RxBytes || after.TxBytes > 10<<20 {
		t.Errorf("after 30000 bytes were sent: %+v, before %+v", after, before)
	}
	if after.Pids < before.Pids+4 || after.Pids > before.Pids+30 { // the first process may have made its threads meanwhile
		t.Errorf("after 4 processes more: %d, before %d", after.Pids, before.Pids)
	}
	if after.CPUUsage < before.CPUUsage+10*time.Millisecond {
		t.Errorf("after some work: %s, before %s", after.CPUUsage, before.CPUUsage)
	}
	if !after.Time.After(before.Time) {
		t.Errorf("measured at %s, then at %s", before.Time, after.Time)
	}
}

func testStats(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.MemoryBytes = 64 << 20
	c := b.create(t, spec)
	b.output(t, c.ID, "true")
	got, err := b.rt.Stats(b.ctx, c.ID)
	must(t, err)
	if time.Since(got.Time).Abs() > time.Minute || got.CPUUsage <= 0 || got.CPUUsage > time.Minute ||
		got.MemoryBytes <= 0 || got.MemoryBytes > spec.MemoryBytes || got.MemoryLimitBytes != spec.MemoryBytes || got.Pids < 1 {
		t.Errorf("%+v", got)
	}
	_, err = b.rt.Stats(b.ctx, noID)
	class(t, "stats", err, errdefs.IsNotFound, "NotFound")
}
