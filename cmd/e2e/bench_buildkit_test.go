package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const benchContext = 128 << 20 // bytes

// builder is a directory to build, and ways to the engine.
type builder struct {
	client, dir string
	env         []string
	hosts       map[string][]string // of each side, for two clients
}

// BenchmarkBuildKit measures docker build through Berm against the same client at the
// engine itself. Neither's steps have a network.
func BenchmarkBuildKit(b *testing.B) {
	for _, dockerd := range []string{"dockerd-28", "dockerd-29"} {
		b.Run(dockerd, func(b *testing.B) {
			programs := []string{dockerd, "containerd-2", "runc"}
			engine.RequireNewer(b, append([]string{"docker-cli", "buildx"}, programs...))
			b.Setenv("PATH", engine.NewerPath(programs))
			s := newBuilder(b)
			b.Run("all cached", func(b *testing.B) { s.turns(b, "FROM "+testImage+"\nCOPY file /file\nRUN echo hi\n", s.one()) })
			b.Run("no cache, one RUN", func(b *testing.B) { s.turns(b, "FROM "+testImage+"\nRUN echo hi\n", s.one("--no-cache")) })
			b.Run("two at once", func(b *testing.B) { s.turns(b, "FROM "+testImage+"\nRUN echo hi\n", s.two("--no-cache")) })
			b.Run("128 MiB of context", s.upload)
		})
	}
}

func newBuilder(b *testing.B) *builder {
	b.Helper()
	e := startEngine(b, "docker", engine.Options{})
	dir := e.dir(b)
	write(b, filepath.Join(dir, "policy.yaml"), `
version: 1
images: {allow: ["berm.local/*"]}
profiles: {default: {engine_api: {build: "on", tags: ["bench.local/*"], max_objects: 0, buildkit: {enabled: true, cgroup_parent: "/`+filepath.Base(e.Dir())+`/builds"}}}}
`)
	listeners := ""
	for _, tenant := range []string{"one", "two"} {
		listeners += fmt.Sprintf(`    - {address: "unix://%s/%s.sock", callers: [{name: %[2]s, tenant: %[2]s, uids: [0]}]}`+"\n", dir, tenant)
	}
	config := filepath.Join(dir, "berm.yaml")
	write(b, config, "engine_api:\n  audit_log: "+dir+"/audit.log\n  listeners:\n"+listeners)
	startChildWith(b, dir, e, "engine_available", "--config", config, "--policy", filepath.Join(dir, "policy.yaml"))
	s := &builder{client: filepath.Join(engine.NewerDir(), "docker-cli", "bin", "docker"), dir: makeDir(b, dir, "context"), hosts: map[string][]string{
		"berm": {"unix://" + dir + "/one.sock", "unix://" + dir + "/two.sock"}, "direct": {e.config.Address, e.config.Address},
	}}
	home := makeDir(b, dir, "client")
	write(b, filepath.Join(home, "config.json"), fmt.Sprintf(`{"cliPluginsExtraDirs": [%q]}`, filepath.Join(engine.NewerDir(), "buildx", "bin")))
	write(b, filepath.Join(s.dir, "file"), "content")
	s.env = append(dockerEnv("", home), "HOME="+home)
	return s
}

// build builds the directory, as one of two clients.
func (s *builder) build(ctx context.Context, side string, n int, args ...string) error {
	args = append([]string{"build", "--quiet", "--network", "none", "--tag", fmt.Sprintf("bench.local/%s:%d", side, n)}, append(args, s.dir)...)
	_, err := command(ctx, "", append(slices.Clone(s.env), "DOCKER_HOST="+s.hosts[side][n]), s.client, args...)
	return err
}

func (s *builder) one(args ...string) func(ctx context.Context, side string) error {
	return func(ctx context.Context, side string) error { return s.build(ctx, side, 0, args...) }
}

func (s *builder) two(args ...string) func(ctx context.Context, side string) error {
	return func(ctx context.Context, side string) error {
		return parallel(2, func(i int) error { return s.build(ctx, side, i, args...) })
	}
}

// turns measures a build on both sides in turns, after one that fills the cache.
func (s *builder) turns(b *testing.B, dockerfile string, build func(ctx context.Context, side string) error) {
	b.Helper()
	write(b, filepath.Join(s.dir, "Dockerfile"), dockerfile)
	var ways []way
	for _, side := range []string{"berm", "direct"} {
		must(b, build(b.Context(), side))
		ways = append(ways, way{side, whole(func() error { return build(b.Context(), side) })})
	}
	load, _ := os.ReadFile("/proc/loadavg")
	b.Logf("load %s", strings.TrimSpace(string(load)))
	turns(b, ways, noUnit)
}

// upload sends a file that the engine has by then, as its time is another: all that differs
// is the way of the bytes.
func (s *builder) upload(b *testing.B) {
	file := filepath.Join(s.dir, "file")
	content := make([]byte, benchContext)
	_, _ = rand.NewChaCha8([32]byte{}).Read(content)
	write(b, file, string(content))
	now := time.Now()
	s.turns(b, "FROM "+testImage+"\nCOPY file /file\n", func(ctx context.Context, side string) error {
		now = now.Add(time.Second)
		if err := os.Chtimes(file, now, now); err != nil {
			return err
		}
		return s.build(ctx, side, 0)
	})
}
