package docker

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"slices"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/pkg/stdcopy"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
)

// BenchmarkCreateToOutput compares a sandbox's creation and first command with the
// same calls made directly, one after the other, so that both meet the same machine.
func BenchmarkCreateToOutput(b *testing.B) {
	r := newRuntime(b, shared.Get(b).Host())
	s, err := r.connect(b.Context())
	must(b, err)
	img, err := r.Image(b.Context(), testImage)
	must(b, err)
	spec := runtime.Spec{
		Image: img.ID, Command: []string{"sleep", "100000"}, ReadOnlyRootfs: true, MemoryBytes: 64 << 20, PidsLimit: 64, CPUs: 1,
		Tmpfs: []runtime.Tmpfs{{Target: "/tmp", SizeBytes: 1 << 20}},
	}
	command := []string{"/bin/echo", "hi"}
	ours := func(spec runtime.Spec) (string, string, error) {
		c, err := r.Create(b.Context(), spec)
		if err != nil {
			return "", "", err
		}
		out, _, _, err := runtimetest.Output(b.Context(), r, c.ID, "", command...)
		return c.ID, out, err
	}
	direct := func(spec runtime.Spec) (string, string, error) {
		ctx := b.Context()
		c, err := s.ContainerCreate(ctx, containerConfig(spec, "", ""), hostConfig(spec, s, nil), nil, nil, spec.Name)
		if err != nil {
			return "", "", err
		}
		if err := s.ContainerStart(ctx, c.ID, container.StartOptions{}); err != nil {
			return c.ID, "", err
		}
		e, err := s.ContainerExecCreate(ctx, c.ID, container.ExecOptions{Cmd: command, AttachStdout: true, AttachStderr: true})
		if err != nil {
			return c.ID, "", err
		}
		conn, err := s.ContainerExecAttach(ctx, e.ID, container.ExecAttachOptions{})
		if err != nil {
			return c.ID, "", err
		}
		defer conn.Close()
		var out bytes.Buffer
		if _, err := stdcopy.StdCopy(&out, io.Discard, conn.Reader); err != nil {
			return c.ID, "", err
		}
		_, err = s.ContainerExecInspect(ctx, e.ID)
		return c.ID, out.String(), err
	}
	var times [2][]time.Duration
	n := 0
	for b.Loop() {
		n++
		for i, f := range []func(runtime.Spec) (string, string, error){ours, direct} {
			spec.Name = fmt.Sprintf("berm-bench-%d-%d", n, i)
			start := time.Now()
			id, out, err := f(spec)
			times[i] = append(times[i], time.Since(start))
			if err == nil && out != "hi\n" {
				err = fmt.Errorf("output %q", out)
			}
			if id != "" {
				if err := r.Remove(context.WithoutCancel(b.Context()), id); err != nil {
					b.Error(err)
				}
			}
			must(b, err)
		}
	}
	medians := [2]float64{}
	for i := range times {
		slices.Sort(times[i])
		medians[i] = float64(times[i][len(times[i])/2]) / 1e6
	}
	b.ReportMetric(medians[0], "ms/ours")
	b.ReportMetric(medians[1], "ms/direct")
	b.ReportMetric(medians[0]-medians[1], "ms/overhead")
	b.ReportMetric(medians[0]/medians[1], "ratio")
}
