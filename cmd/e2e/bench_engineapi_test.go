package e2e

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"
	docker "github.com/docker/docker/client"

	"github.com/bermhq/berm/lifecycle"
)

// door is a server of the engine's API, or the engine itself.
type door struct {
	http   *http.Client
	docker *docker.Client
	cmd    *exec.Cmd // nil of the engine
}

// doorBench is an engine and a server before it, side by side.
type doorBench struct {
	b             *testing.B
	direct, berm  *door
	mine, theirs  []string // containers of the caller's, and others
	file, chatter string   // containers with a large file, and with a large log
}

const (
	benchArchive = 400 << 20 // bytes
	benchLine    = 1 << 10
	benchLines   = 2 << 10
)

func newDoor(b *testing.B, path string) *door {
	b.Helper()
	transport := through(path)
	transport.MaxIdleConnsPerHost, transport.DisableCompression, transport.ReadBufferSize, transport.WriteBufferSize = 64, true, 64<<10, 64<<10
	b.Cleanup(transport.CloseIdleConnections)
	return &door{http: &http.Client{Transport: transport}, docker: dockerClient(b, docker.WithHost("unix://"+path))}
}

func newDoorBench(b *testing.B) *doorBench {
	b.Helper()
	e := commonEngine(b, "docker")
	dir := e.dir(b)
	policy := filepath.Join(dir, "policy.yaml")
	write(b, policy, "version: 1\nimages: {allow: [\"berm.local/*\"]}\nprofiles: {default: {engine_api: {max_objects: 0}}}\n")
	s := &doorBench{b: b, direct: newDoor(b, strings.TrimPrefix(e.config.Address, "unix://")), berm: newDoor(b, dir+"/docker.sock")}
	config := filepath.Join(dir, "berm.yaml")
	write(b, config, fmt.Sprintf(`
engine_api:
  archive_fixed: true # the test is of the client, whatever the engine
  audit_log: %[1]s/audit.log
  listeners: [{address: "unix://%[1]s/docker.sock", callers: [{name: bench, tenant: bench, uids: [0]}]}]
engine: {instance: bench-%[2]s}
`, dir, filepath.Base(dir)))
	s.berm.cmd = startChildWith(b, dir, e, "engine_available", "--config", config, "--policy", policy).Cmd
	for range 5 {
		s.mine = append(s.mine, s.make(s.berm, "true"))
		s.theirs = append(s.theirs, s.make(s.direct, "true"))
	}
	s.file = s.start("sleep 100000")
	s.chatter = s.start(fmt.Sprintf(`i=0; l=$(head -c %d /dev/zero | tr '\0' x); while [ $i -lt %d ]; do echo $l; i=$((i+1)); done; sleep 100000`, benchLine-1, benchLines))
	b.Cleanup(func() {
		for _, id := range slices.Concat(s.mine, s.theirs) {
			_ = s.direct.docker.ContainerRemove(context.Background(), id, container.RemoveOptions{Force: true, RemoveVolumes: true})
		}
	})
	return s
}

func (s *doorBench) make(d *door, script string) string {
	ct, err := d.docker.ContainerCreate(s.b.Context(), &container.Config{Image: testImage, Cmd: []string{"sh", "-c", script}},
		&container.HostConfig{NetworkMode: "none", Binds: []string{"/v"}}, nil, nil, "")
	must(s.b, err)
	return ct.ID
}

func (s *doorBench) start(script string) string {
	id := s.make(s.berm, script)
	s.mine = append(s.mine, id)
	must(s.b, s.berm.docker.ContainerStart(s.b.Context(), id, container.StartOptions{}))
	return id
}

// get asks for a path, and reads the whole answer.
func (d *door) get(ctx context.Context, path string) (int64, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://docker"+path, nil)
	if err != nil {
		return 0, err
	}
	resp, err := d.http.Do(req)
	if err != nil {
		return 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	n, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, resp.Body, make([]byte, 64<<10))
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", path, resp.Status)
	}
	return n, err
}

// rounds has both do the same n times on so many connections at once, in turns, and
// reports what of a CPU the server took for each.
func (s *doorBench) rounds(b *testing.B, connections, n int, do func(ctx context.Context, d *door) error) {
	run := func(d *door) func() error {
		return func() error {
			var left atomic.Int64
			left.Store(int64(n))
			return parallel(connections, func(int) error {
				for left.Add(-1) >= 0 {
					if err := do(b.Context(), d); err != nil {
						return err
					}
				}
				return nil
			})
		}
	}
	must(s.b, errors.Join(run(s.berm)(), run(s.direct)())) // connections, and what is looked up once
	before := cpuTime(b, s.berm.cmd.Process.Pid)
	turns(b, []way{{"berm", whole(run(s.berm))}, {"direct", whole(run(s.direct))}}, per(float64(n), "requests"))
	used := cpuTime(b, s.berm.cmd.Process.Pid) - before
	b.ReportMetric(float64(used.Microseconds())/float64(n*b.N), "cpu-us/req")
}

// BenchmarkEngineAPI measures the engine's API through the door, policy and audit log on,
// against the engine's own socket.
func BenchmarkEngineAPI(b *testing.B) {
	s := newDoorBench(b)
	b.Run("idle memory", s.idle)
	b.Run("cost", s.cost)
	for _, connections := range []int{1, 16, 64} {
		at := fmt.Sprintf(", %d connections", connections)
		get := func(path string) func(context.Context, *door) error {
			return func(ctx context.Context, d *door) error { _, err := d.get(ctx, path); return err }
		}
		b.Run("_ping"+at, func(b *testing.B) { s.rounds(b, connections, 2000, get("/_ping")) })
		b.Run("containers-json"+at, func(b *testing.B) {
			s.rounds(b, connections, 400, func(ctx context.Context, d *door) error {
				path := "/v1.41/containers/json?all=1"
				if d == s.direct { // for the same answer
					path += "&filters=" + url.QueryEscape(`{"label":["`+lifecycle.LabelTenant+`=bench"]}`)
				}
				_, err := d.get(ctx, path)
				return err
			})
		})
		b.Run("inspect"+at, func(b *testing.B) { s.rounds(b, connections, 400, get("/v1.41/containers/"+s.file+"/json")) })
		b.Run("create and rm"+at, func(b *testing.B) {
			s.rounds(b, connections, max(4, connections), func(ctx context.Context, d *door) error {
				ct, err := d.docker.ContainerCreate(ctx, &container.Config{Image: testImage}, &container.HostConfig{NetworkMode: "none"}, nil, nil, "")
				if err != nil {
					return err
				}
				return d.docker.ContainerRemove(ctx, ct.ID, container.RemoveOptions{Force: true})
			})
		})
		b.Run("logs"+at, func(b *testing.B) {
			s.rounds(b, connections, max(8, connections), func(ctx context.Context, d *door) error {
				n, err := d.get(ctx, "/v1.41/containers/"+s.chatter+"/logs?stdout=1")
				if err == nil && n < benchLine*benchLines/2 {
					err = fmt.Errorf("a log of %d bytes", n)
				}
				return err
			})
		})
	}
	b.Run("archive in", func(b *testing.B) { s.rounds(b, 1, 1, s.upload) })
	b.Run("archive out", func(b *testing.B) {
		s.rounds(b, 1, 1, func(ctx context.Context, d *door) error {
			n, err := d.get(ctx, "/v1.41/containers/"+s.file+"/archive?path=/v/large")
			if err == nil && n < benchArchive {
				err = fmt.Errorf("an archive of %d bytes", n)
			}
			return err
		})
	})
}

// upload puts a large file into a container.
func (s *doorBench) upload(ctx context.Context, d *door) error {
	var head bytes.Buffer
	if err := tar.NewWriter(&head).WriteHeader(&tar.Header{Name: "large", Mode: 0o644, Size: benchArchive, Typeflag: tar.TypeReg}); err != nil {
		return err
	}
	body := io.MultiReader(&head, io.LimitReader(zeros{}, benchArchive+1024)) // the end is two empty blocks
	req, err := http.NewRequestWithContext(ctx, http.MethodPut, "http://docker/v1.41/containers/"+s.file+"/archive?path=/v", body)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/x-tar")
	resp, err := d.http.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if text, _ := io.ReadAll(resp.Body); resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", resp.Status, text)
	}
	return nil
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) {
	clear(b)
	return len(b), nil
}

// idle compares the server with one that has the other door only.
func (s *doorBench) idle(b *testing.B) {
	e := commonEngine(b, "docker")
	alone := startChildWith(b, e.dir(b), e, "engine_available").Cmd
	time.Sleep(30*time.Second + 5*time.Second)
	var with, without float64
	for b.Loop() {
		with = float64(weigh(b, s.berm.cmd.Process.Pid).rss) / 1024
		without = float64(weigh(b, alone.Process.Pid).rss) / 1024
	}
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(with, "MiB")
	b.ReportMetric(with-without, "MiB-over-one-door")
	b.Logf("%.1f MiB resident, %.1f with the sandbox API alone", with, without)
}
