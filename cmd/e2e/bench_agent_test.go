package e2e

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// pair is a server and the engine's own client, at work in one and the same container.
type pair struct {
	berm *bermContender
	raw  contender
	key  string // the sandbox'
	id   string // the container's
	pid  int    // of its init
}

func newPairs(b *testing.B) (*bench, []pair) {
	b.Helper()
	s := newBench(b)
	var pairs []pair
	for i := 0; i < len(s.all); i += 2 {
		p := pair{berm: s.all[i].(*bermContender), raw: s.all[i+1], key: "model-false"}
		p.id = p.berm.model(b, false)
		c, err := p.berm.engine.open(b, p.berm.server).Inspect(b.Context(), p.id)
		must(s.b, err)
		p.pid = c.Pid
		pairs = append(pairs, p)
	}
	return s, pairs
}

// run streams a command's output.
func (c *bermContender) run(ctx context.Context, key string, command []string, stdout io.Writer) error {
	for ev, err := range c.ExecStream(ctx, key, apitype.ExecRequest{Command: command, Raw: true}) {
		switch {
		case err != nil:
			return err
		case ev.Event == apitype.EventStdout:
			if _, err := stdout.Write(ev.DataBase64); err != nil {
				return err
			}
		case ev.Event == apitype.EventExit && (ev.ExitCode == nil || *ev.ExitCode != 0):
			return fmt.Errorf("%+v", ev.Exit)
		}
	}
	return nil
}

func (c *bermContender) writeFile(ctx context.Context, key, name, content string) error {
	_, err := c.WriteFile(ctx, key, name, strings.NewReader(content), client.WriteOptions{})
	return err
}

func (c *bermContender) readFile(ctx context.Context, key, name string) (string, error) {
	return all(c.ReadFile(ctx, key, name, 0, -1))
}

// way is one way of doing a thing.
type way struct {
	name string
	do   func() (time.Duration, error)
}

// whole measures all that a function does.
func whole(f func() error) func() (time.Duration, error) {
	return func() (time.Duration, error) {
		began := time.Now()
		err := f()
		return time.Since(began), err
	}
}

// aftermath is for what a way leaves behind for its engine to do: that takes half of a
// machine for some milliseconds, and would slow down the next one.
const aftermath = 20 * time.Millisecond

// shuffled has n do one after the other, each time in another order: in a fixed one,
// however it is rotated, the same always come after the same.
func shuffled(n int, do func(i int)) {
	for _, i := range rand.Perm(n) {
		do(i)
	}
}

// rested measures after a rest.
func rested(do func() (time.Duration, error)) (time.Duration, error) {
	time.Sleep(aftermath)
	return do()
}

// turns measures ways in turns. Of each two, the first is compared with the second.
func turns(b *testing.B, ways []way, unit func(name string, f figures) string) {
	b.Helper()
	all := make([]figures, len(ways))
	for b.Loop() {
		shuffled(len(ways), func(i int) {
			d, err := rested(ways[i].do)
			if err != nil {
				b.Fatalf("%s: %v", ways[i].name, err)
			}
			all[i] = append(all[i], d)
		})
	}
	b.ReportMetric(0, "ns/op") // the sum of all, which says nothing
	for i, w := range ways {
		b.Logf("%-20s %s   %s", w.name, all[i], unit(w.name, all[i]))
		b.ReportMetric(all[i].at(.5), strings.ReplaceAll(w.name, " ", "-")+"-p50-ms")
	}
	for i := 0; i+1 < len(ways); i += 2 {
		over, under := all[i], all[i+1]
		paired := make([]float64, len(over))
		for n := range over {
			paired[n] = float64(over[n]) / float64(under[n])
		}
		slices.Sort(paired)
		b.Logf("%-20s / %-20s ratio of the medians %.4f, median of the rounds' ratios %.4f",
			ways[i].name, ways[i+1].name, over.at(.5)/under.at(.5), paired[len(paired)/2])
		b.ReportMetric(over.at(.5)/under.at(.5), "ratio-to-"+strings.ReplaceAll(ways[i+1].name, " ", "-"))
	}
}

func noUnit(string, figures) string { return "" }

// per gives what a round's n things come to in a second, by the median.
func per(n float64, what string) func(string, figures) string {
	return func(_ string, f figures) string { return fmt.Sprintf("%.1f %s/s", n*1000/f.at(.5), what) }
}

// cpuTime is how long a process has worked, in hundredths of a second.
func cpuTime(b *testing.B, pid int) (t time.Duration) {
	b.Helper()
	stat := check.Value(os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid)))(b)
	// pid (name) state parent …; user and system time are the 14th and 15th.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	for _, ticks := range fields[11:13] {
		n := check.Value(strconv.Atoi(ticks))(b)
		t += time.Duration(n) * 10 * time.Millisecond
	}
	return t
}

// firstByte is a writer that remembers when it was first written to.
type firstByte struct{ at atomic.Int64 }

func (f *firstByte) Write(p []byte) (int, error) {
	f.at.CompareAndSwap(0, time.Now().UnixNano())
	return len(p), nil
}

// counter is a writer that counts.
type counter struct{ n int64 }

func (c *counter) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	return len(p), nil
}

// emit is a command that prints so many bytes, a multiple of 64 KiB, for next to no time of the
// processor: busybox' head, say, reads and writes each by itself, and is what is measured then.
func emit(size int) []string {
	return []string{"dd", "if=/dev/zero", "bs=64k", fmt.Sprintf("count=%d", size>>16), "status=none"}
}

// BenchmarkInside measures what is done in a sandbox over the REST API against the same
// done in the same container with the engine's own client, interleaved, in one run.
func BenchmarkInside(b *testing.B) {
	_, pairs := newPairs(b)
	ctx := b.Context()
	// both are the ways of all: each in the container of its pair, which goes by a key.
	both := func(ours, theirs func(c contender, key string) func() (time.Duration, error)) (ways []way) {
		for _, p := range pairs {
			ways = append(ways, way{p.berm.String(), ours(p.berm, p.key)}, way{p.raw.String(), theirs(p.raw, p.id)})
		}
		return ways
	}
	same := func(do func(c contender, key string) func() (time.Duration, error)) []way { return both(do, do) }
	weighInside := func(b *testing.B, when string) {
		for _, p := range pairs {
			w := weigh(b, p.pid)
			b.Logf("%-20s init %s: %s", p.berm, when, w)
			b.ReportMetric(float64(w.private), p.berm.kind+"-init-private-KiB")
			b.ReportMetric(float64(w.anonymous), p.berm.kind+"-init-anonymous-KiB")
		}
	}
	b.Run("init memory, idle", func(b *testing.B) {
		for b.Loop() {
			continue
		}
		b.ReportMetric(0, "ns/op")
		weighInside(b, "idle")
	})
	b.Run("exec", func(b *testing.B) {
		turns(b, same(func(c contender, key string) func() (time.Duration, error) {
			return whole(func() error { return c.exec(ctx, key) })
		}), noUnit)
	})
	b.Run("exec, 16 in parallel", func(b *testing.B) {
		const workers, each = 16, 4
		turns(b, same(func(c contender, key string) func() (time.Duration, error) {
			return whole(func() error {
				return parallel(workers, func(int) error {
					for range each {
						if err := c.exec(ctx, key); err != nil {
							return err
						}
					}
					return nil
				})
			})
		}), per(workers*each, "commands"))
	})
	b.Run("first byte of a stream", func(b *testing.B) {
		// It goes on after that: what is buffered to the end comes late.
		command := []string{"sh", "-c", "echo hi; sleep 0.2"}
		turns(b, same(func(c contender, key string) func() (time.Duration, error) {
			return func() (time.Duration, error) {
				var out firstByte
				began := time.Now()
				if err := c.run(ctx, key, command, &out); err != nil {
					return 0, err
				}
				return time.Duration(out.at.Load() - began.UnixNano()), nil
			}
		}), noUnit)
	})
	b.Run("256 MiB of output", func(b *testing.B) {
		const size = 256 << 20
		command := emit(size)
		before, worked := map[string]weight{}, map[string][2]time.Duration{}
		for _, p := range pairs {
			before[p.berm.kind] = weigh(b, p.berm.server.Process.Pid)
			worked[p.berm.kind] = [2]time.Duration{cpuTime(b, p.berm.server.Process.Pid), cpuTime(b, p.pid)}
			forgetPeak(b, p.berm.server.Process.Pid)
			forgetPeak(b, p.pid)
		}
		turns(b, same(func(c contender, key string) func() (time.Duration, error) {
			return whole(func() error {
				var out counter
				err := c.run(ctx, key, command, &out)
				if err == nil && out.n != size {
					err = fmt.Errorf("%d bytes came", out.n)
				}
				return err
			})
		}), per(size>>20, "MiB"))
		for _, p := range pairs {
			pid, was := p.berm.server.Process.Pid, worked[p.berm.kind]
			b.Logf("%-20s server private %d kB, before %d kB, resident at most %d kB; init at most %d kB; CPU time of a round %s and %s",
				p.berm, weigh(b, pid).private, before[p.berm.kind].private, peak(b, pid), peak(b, p.pid),
				(cpuTime(b, pid)-was[0])/time.Duration(b.N), (cpuTime(b, p.pid)-was[1])/time.Duration(b.N))
		}
		time.Sleep(3 * time.Second) // it gives memory back when it has been idle for a while
		weighInside(b, "after it")
	})
	content := strings.Repeat("0123456789abcde\n", 256)
	b.Run("write 4 KiB", func(b *testing.B) {
		// The engines' own copies don't reach a tmpfs, nor into a read-only root.
		command := []string{"sh", "-c", `printf %s "$0" > /tmp/theirs`, content}
		turns(b, both(func(c contender, key string) func() (time.Duration, error) {
			return whole(func() error { return c.(*bermContender).writeFile(ctx, key, "/tmp/ours", content) })
		}, func(c contender, key string) func() (time.Duration, error) {
			return whole(func() error { return c.run(ctx, key, command, io.Discard) })
		}), noUnit)
	})
	b.Run("read 4 KiB", func(b *testing.B) {
		check := func(got string, err error) error {
			if err == nil && got != content {
				err = fmt.Errorf("%d bytes came: %.40q", len(got), got)
			}
			return err
		}
		turns(b, both(func(c contender, key string) func() (time.Duration, error) {
			return whole(func() error { return check(c.(*bermContender).readFile(ctx, key, "/tmp/ours")) })
		}, func(c contender, key string) func() (time.Duration, error) {
			return whole(func() error {
				var out strings.Builder
				err := c.run(ctx, key, []string{"cat", "/tmp/theirs"}, &out)
				return check(out.String(), err)
			})
		}), noUnit)
	})
}
