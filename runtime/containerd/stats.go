package containerd

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	cgroup1 "github.com/containerd/cgroups/v3/cgroup1/stats"
	cgroup2 "github.com/containerd/cgroups/v3/cgroup2/stats"
	"github.com/containerd/containerd/api/services/tasks/v1"
	tasktypes "github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"

	"github.com/bermhq/berm/runtime"
)

// Stats measures a container's use of resources.
func (r *Runtime) Stats(ctx context.Context, id string) (runtime.Stats, error) {
	var out runtime.Stats
	err := r.call(ctx, "measure container "+id, func(ctx context.Context) error {
		p, err := r.taskProcess(ctx, id)
		if err != nil {
			return err
		}
		if p.Status == tasktypes.Status_STOPPED {
			return runtime.Precondition("the container isn't running")
		}
		m, err := r.metrics(ctx, id)
		if err != nil {
			if _, why := r.taskProcess(ctx, id); why != nil { // it has ended since
				return why
			}
			return err
		}
		if out, err = fromMetrics(m); err != nil {
			return err
		}
		out.Time = time.Now().UTC()
		out.RxBytes, out.TxBytes, err = traffic(p.Pid)
		return err
	})
	return out, err
}

// metrics returns the engine's metrics of a container, of cgroups version 1 or 2. NotFound when there
// are none.
func (r *Runtime) metrics(ctx context.Context, id string) (any, error) {
	res, err := r.client.TaskService().Metrics(ctx, &tasks.MetricsRequest{Filters: []string{"id==" + id}})
	if err != nil {
		return nil, native(err)
	}
	if len(res.Metrics) == 0 || res.Metrics[0].Data == nil {
		return nil, runtime.WithClass(errdefs.ErrNotFound, errors.New("there is nothing to be measured"))
	}
	m, err := typeurl.UnmarshalAny(res.Metrics[0].Data)
	if err != nil {
		return nil, fmt.Errorf("decode the metrics: %w", err)
	}
	return m, nil
}

func fromMetrics(metrics any) (runtime.Stats, error) {
	var out runtime.Stats
	var used, cache, limit uint64
	switch m := metrics.(type) {
	case *cgroup1.Metrics:
		out.CPUUsage = time.Duration(m.GetCPU().GetUsage().GetTotal()) //nolint:gosec // 292 years
		out.Pids = int64(m.GetPids().GetCurrent())                     //nolint:gosec // the kernel's own limit is 22 bits
		used, limit = m.GetMemory().GetUsage().GetUsage(), m.GetMemory().GetUsage().GetLimit()
		cache = m.GetMemory().GetTotalInactiveFile()
	case *cgroup2.Metrics:
		out.CPUUsage = time.Duration(m.GetCPU().GetUsageUsec()) * time.Microsecond //nolint:gosec // the same
		out.Pids = int64(m.GetPids().GetCurrent())                                 //nolint:gosec // the same
		used, limit = m.GetMemory().GetUsage(), m.GetMemory().GetUsageLimit()
		cache = m.GetMemory().GetInactiveFile()
	default:
		return out, fmt.Errorf("metrics of type %T aren't known", metrics)
	}
	if cache < used {
		used -= cache
	}
	out.MemoryBytes, out.MemoryLimitBytes = int64(min(used, 1<<62)), int64(min(limit, 1<<62)) //nolint:gosec // just bounded
	return out, nil
}

// traffic adds up the bytes on all interfaces of a process's network namespace but loopback.
func traffic(pid uint32) (rx, tx int64, err error) {
	b, err := readLimited(fmt.Sprintf("/proc/%d/net/dev", pid), 1<<20)
	if err != nil {
		return 0, 0, runtime.Precondition("the container isn't running")
	}
	return parseTraffic(string(b))
}

// parseTraffic reads /proc/PID/net/dev: two lines of headings, then one per interface, with the
// received bytes in the first of 16 columns, and the sent bytes in the ninth.
func parseTraffic(dev string) (rx, tx int64, err error) {
	for line := range strings.Lines(dev) {
		name, counts, ok := strings.Cut(line, ":")
		fields := strings.Fields(counts)
		if !ok || strings.TrimSpace(name) == "lo" {
			continue
		}
		if len(fields) < 9 {
			return 0, 0, fmt.Errorf("the kernel's words on interface %q can't be understood", name)
		}
		in, err := strconv.ParseInt(fields[0], 10, 64)
		if err != nil {
			return 0, 0, err
		}
		sent, err := strconv.ParseInt(fields[8], 10, 64)
		if err != nil {
			return 0, 0, err
		}
		rx, tx = rx+in, tx+sent
	}
	return rx, tx, nil
}

// oomKills counts the processes that the kernel killed in a container for want of memory. It asks the
// kernel, which is fast, or the engine if the container's cgroup isn't found. NotFound when the engine
// can't tell any more.
func (r *Runtime) oomKills(ctx context.Context, id string) (uint64, error) {
	own := filepath.Join(r.opts.CgroupParent, id)
	for _, file := range []string{
		filepath.Join(cgroupRoot, "memory", own, "memory.oom_control"), filepath.Join(cgroupRoot, own, "memory.events"),
	} {
		if b, err := readLimited(file, 1<<16); err == nil {
			return parseOOM(string(b))
		}
	}
	metrics, err := r.metrics(ctx, id)
	if err != nil {
		return 0, err
	}
	switch m := metrics.(type) {
	case *cgroup1.Metrics:
		return m.GetMemoryOomControl().GetOomKill(), nil
	case *cgroup2.Metrics:
		return m.GetMemoryEvents().GetOomKill(), nil
	}
	return 0, fmt.Errorf("metrics of type %T aren't known", metrics)
}

// parseOOM reads memory.oom_control of version 1 of cgroups, or memory.events of version 2.
func parseOOM(words string) (uint64, error) {
	for line := range strings.Lines(words) {
		if name, count, ok := strings.Cut(strings.TrimSpace(line), " "); ok && name == "oom_kill" {
			return strconv.ParseUint(count, 10, 64)
		}
	}
	return 0, nil // kernels before 4.13 don't count
}
