package docker

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/system"

	"github.com/bermhq/berm/runtime"
)

// Survey asks the engine for its configuration, and for the containers that have its socket.
func (r *Runtime) Survey(ctx context.Context) (runtime.Survey, error) {
	var out runtime.Survey
	err := r.call(ctx, "survey the engine", func(ctx context.Context, s *session) error {
		info, err := s.Info(ctx)
		if err != nil {
			return err
		}
		containers, err := s.ContainerList(ctx, container.ListOptions{})
		if err != nil {
			return err
		}
		out = survey(info)
		out.Info, out.Skew, out.Holders = s.info, s.skew, holders(r.host, containers)
		return nil
	})
	return out, err
}

func survey(info system.Info) runtime.Survey {
	out := runtime.Survey{
		Storage: info.Driver, CgroupDriver: info.CgroupDriver, LiveRestore: info.LiveRestoreEnabled,
		Classes: slices.Sorted(maps.Keys(info.Runtimes)), NoUserNS: noUserNS,
	}
	for _, option := range info.SecurityOptions { // "name=seccomp,profile=default"; names alone before 17.05
		for field := range strings.SplitSeq(option, ",") {
			if name, ok := strings.CutPrefix(field, "name="); ok {
				out.Security = append(out.Security, name)
			}
		}
	}
	slices.Sort(out.Security)
	for _, limit := range []struct {
		name string
		held bool
	}{{"memory", info.MemoryLimit}, {"cpu", info.CPUCfsQuota}, {"pids", info.PidsLimit}, {"swap", info.SwapLimit}} {
		if !limit.held {
			out.Unlimited = append(out.Unlimited, limit.name)
		}
	}
	return out
}

// holders returns the containers that have the engine's socket, at its usual paths or at the path that
// this process uses.
func holders(host string, containers []container.Summary) []runtime.Holder {
	sockets := []string{"/var/run/docker.sock", "/run/docker.sock"}
	if path, ok := strings.CutPrefix(host, "unix://"); ok {
		sockets = append(sockets, path)
	}
	var out []runtime.Holder
	for _, c := range containers {
		has := slices.ContainsFunc(c.Mounts, func(m container.MountPoint) bool {
			return slices.ContainsFunc(sockets, func(socket string) bool {
				return m.Source == socket || m.Source != "" && strings.HasPrefix(socket, strings.TrimSuffix(m.Source, "/")+"/")
			})
		})
		if !has {
			continue
		}
		name := fmt.Sprintf("%.12s", c.ID)
		if len(c.Names) > 0 {
			name = strings.TrimPrefix(c.Names[0], "/")
		}
		out = append(out, runtime.Holder{ID: c.ID, Name: name})
	}
	slices.SortFunc(out, func(a, b runtime.Holder) int { return strings.Compare(a.Name, b.Name) })
	return out
}
