package docker

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/runtime"
)

// Stats measures a container's use of resources. Docker 20.10 takes up to a
// second for it, as it measures once a second only.
func (r *Runtime) Stats(ctx context.Context, id string) (runtime.Stats, error) {
	var out runtime.Stats
	err := r.callOn(ctx, "measure container", id, func(ctx context.Context, s *session) error {
		res, err := s.ContainerStatsOneShot(ctx, id)
		if err != nil {
			return err
		}
		defer func() { _ = res.Body.Close() }()
		var st container.StatsResponse
		if err := json.NewDecoder(res.Body).Decode(&st); err != nil {
			return fmt.Errorf("decode: %w", err)
		}
		if st.Read.IsZero() { // the engine's answer if the container doesn't run
			return runtime.Precondition("it isn't running")
		}
		out = fromStats(st)
		return nil
	})
	return out, err
}

func fromStats(st container.StatsResponse) runtime.Stats {
	out := runtime.Stats{
		Time:             st.Read.UTC(),
		CPUUsage:         time.Duration(st.CPUStats.CPUUsage.TotalUsage),
		MemoryBytes:      int64(st.MemoryStats.Usage),
		MemoryLimitBytes: int64(st.MemoryStats.Limit),
		Pids:             int64(st.PidsStats.Current),
	}
	// The page cache that the kernel would drop first: cgroup v1's name, then v2's.
	for _, name := range []string{"total_inactive_file", "inactive_file"} {
		if cache, ok := st.MemoryStats.Stats[name]; ok {
			if cache < st.MemoryStats.Usage {
				out.MemoryBytes -= int64(cache)
			}
			break
		}
	}
	for _, n := range st.Networks {
		out.RxBytes += int64(n.RxBytes)
		out.TxBytes += int64(n.TxBytes)
	}
	return out
}
