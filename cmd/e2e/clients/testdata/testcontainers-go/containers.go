package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	tcexec "github.com/testcontainers/testcontainers-go/exec"
	"github.com/testcontainers/testcontainers-go/wait"
)

var multiplexed = tcexec.Multiplexed()

// lines are a consumer of a log.
type lines struct {
	mu   sync.Mutex
	text string
}

func (l *lines) Accept(line testcontainers.Log) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.text += line.LogType + ":" + string(line.Content)
}

func (l *lines) has(part string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.text, part)
}

func temporary(t *T, files map[string]string) string {
	dir := must(filepath.Abs(must(os.MkdirTemp(".", "testcontainers-"))))
	t.after(func() { _ = os.RemoveAll(dir) })
	check(os.Chmod(dir, 0o755))
	for name, text := range files {
		check(os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		check(os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644))
	}
	return dir
}

var containerCases = []testCase{
	{"ports", func(t *T) {
		c := server(t, testcontainers.WithExposedPorts("8081/tcp", "53/udp"))
		equal(get(t, c), "hello\n")
		for _, port := range []string{"8081/tcp", "53/udp"} {
			if must(c.MappedPort(t, port)).Num() == 0 {
				fail("%s isn't mapped", port)
			}
		}
		within(must(c.Endpoint(t, "http")), "http://")
	}},
	{"a fixed port", func(t *T) {
		c := server(t, host(func(h *container.HostConfig) {
			h.PortBindings = network.PortMap{network.MustParsePort("8082/tcp"): {{HostPort: "41082"}}}
		}), testcontainers.WithExposedPorts("8082/tcp"))
		equal(must(c.MappedPort(t, "8082/tcp")).Num(), 41082)
	}},
	{"environment, user, working directory, entrypoint and hostname", func(t *T) {
		c := run(t, testcontainers.WithEnv(map[string]string{"A": "b c"}), testcontainers.WithEntrypoint("sh", "-c"), testcontainers.WithCmd(`echo "$A $(id -u) $PWD $(hostname)"`),
			testcontainers.WithWaitStrategy(wait.ForExit()), config(func(c *container.Config) { c.User, c.WorkingDir, c.Hostname = "1000", "/tmp", "named" }))
		equal(strings.TrimSpace(logs(t, c)), "b c 1000 /tmp named")
	}},
	{"name and labels", func(t *T) {
		c := sleeper(t, testcontainers.WithName("tc-named"), testcontainers.WithLabels(map[string]string{"k": "v"}))
		got := must(c.Inspect(t))
		equal(got.Name, "/tc-named")
		equal(got.Config.Labels["k"]+got.Config.Labels["org.testcontainers"], "vtrue")
	}},
	{"resources and host configuration", func(t *T) {
		c := sleeper(t, host(func(h *container.HostConfig) {
			h.Memory, h.NanoCPUs, h.ShmSize, h.ExtraHosts, h.CapDrop, h.Init = 64<<20, 5e8, 8<<20, []string{"other:192.0.2.7", "up:host-gateway"}, []string{"CHOWN"}, new(true)
		}))
		got := must(c.Inspect(t)).HostConfig
		equal(got.Memory, 64<<20)
		equal(got.NanoCPUs, int64(5e8))
		within(output(t, c, "cat", "/etc/hosts"), "192.0.2.7")
		within(output(t, c, "df", "-k", "/dev/shm"), "8192")
	}},
	{"processes of the host [policy]", func(t *T) { sleeper(t, host(func(h *container.HostConfig) { h.PidMode = "host" })) }},
	{"image platform", func(t *T) { sleeper(t, testcontainers.WithImagePlatform("linux/amd64")) }},
	{"files in", func(t *T) {
		dir := temporary(t, map[string]string{"a": "one"})
		c := sleeper(t, testcontainers.WithFiles(
			testcontainers.ContainerFile{Reader: strings.NewReader("two"), ContainerFilePath: "/tmp/b", FileMode: 0o600},
			testcontainers.ContainerFile{HostFilePath: dir + "/a", ContainerFilePath: "/tmp/a", FileMode: 0o755}))
		equal(output(t, c, "sh", "-c", "cat /tmp/a /tmp/b; stat -c %a /tmp/a /tmp/b"), "onetwo755\n600")
	}},
	{"files in while it runs", func(t *T) {
		dir := temporary(t, map[string]string{"a": "one", "d/x": "three", "d/e/y": "four"})
		c := sleeper(t)
		check(c.CopyToContainer(t, []byte("two"), "/tmp/b", 0o644))
		check(c.CopyFileToContainer(t, dir+"/a", "/tmp/deep/a", 0o644))
		check(c.CopyDirToContainer(t, dir+"/d", "/tmp/d", 0o755))
		equal(output(t, c, "sh", "-c", "cat /tmp/deep/a /tmp/b /tmp/d/x /tmp/d/e/y"), "onetwothreefour")
	}},
	{"files out", func(t *T) {
		c := sleeper(t, testcontainers.WithCmd("sh", "-c", "echo out >/tmp/out; echo ready; exec sleep 300"))
		r := must(c.CopyFileFromContainer(t, "/tmp/out"))
		equal(string(must(io.ReadAll(r))), "out\n")
		check(r.Close())
		if _, err := c.CopyFileFromContainer(t, "/missing"); err == nil {
			fail("a file that is missing comes out")
		}
	}},
	{"exec", func(t *T) {
		c := sleeper(t)
		code, r, err := c.Exec(t, []string{"sh", "-c", `echo "$A $(id -u) $PWD"; exit 5`}, tcexec.WithEnv([]string{"A=b"}), tcexec.WithUser("1000"), tcexec.WithWorkingDir("/tmp"), multiplexed)
		check(err)
		equal(string(must(io.ReadAll(r))), "b 1000 /tmp\n")
		equal(code, 5)
	}},
	{"exec with both streams", func(t *T) {
		_, r, err := sleeper(t).Exec(t, []string{"sh", "-c", "echo out; echo err >&2"})
		check(err)
		text := string(must(io.ReadAll(r)))
		within(text, "\x01\x00\x00\x00\x00\x00\x00\x04out\n")
		within(text, "\x02\x00\x00\x00\x00\x00\x00\x04err\n")
	}},
	{"exec of what isn't there", func(t *T) {
		code, _, err := sleeper(t).Exec(t, []string{"missing"})
		if err == nil {
			equal(code/2, 63) // 126 or 127
		}
	}},
	{"logs", func(t *T) {
		c := run(t, script("echo out; echo err >&2"), testcontainers.WithWaitStrategy(wait.ForExit()))
		within(logs(t, c), "out\n")
		within(logs(t, c), "err\n")
	}},
	{"a consumer of the log", func(t *T) {
		l := &lines{}
		sleeper(t, testcontainers.WithLogConsumers(l), testcontainers.WithCmd("sh", "-c", "echo ready; while true; do echo again; echo wrong >&2; sleep 0.1; done"))
		until(t, "both streams", func() bool { return l.has("STDOUT:again\n") && l.has("STDERR:wrong\n") })
	}},
	{"lifecycle hooks", func(t *T) {
		var seen []string
		hook := func(name string) []testcontainers.ContainerHook {
			return []testcontainers.ContainerHook{func(_ context.Context, c testcontainers.Container) error {
				seen = append(seen, name)
				return nil
			}}
		}
		c := sleeper(t, testcontainers.WithAdditionalLifecycleHooks(testcontainers.ContainerLifecycleHooks{
			PostCreates: hook("created"), PostStarts: hook("started"), PostReadies: hook("ready"), PostStops: hook("stopped"), PostTerminates: hook("terminated"),
		}))
		check(c.Stop(t, new(time.Duration)))
		check(c.Terminate(t))
		within(strings.Join(seen, " "), "created started ready stopped")
		within(strings.Join(seen, " "), "terminated")
	}},
	{"commands after the start", func(t *T) {
		c := sleeper(t, testcontainers.WithStartupCommand(testcontainers.NewRawCommand([]string{"touch", "/tmp/one"})),
			testcontainers.WithAfterReadyCommand(testcontainers.NewRawCommand([]string{"touch", "/tmp/two"})))
		output(t, c, "ls", "/tmp/one", "/tmp/two")
	}},
	{"stop and start", func(t *T) {
		c := server(t)
		check(c.Stop(t, new(time.Second)))
		equal(must(c.State(t)).Running, false)
		check(c.Start(t))
		equal(get(t, c), "hello\n")
	}},
	{"no start", func(t *T) {
		c := run(t, script("sleep 300"), testcontainers.WithNoStart())
		equal(must(c.State(t)).Status, "created")
		check(c.Start(t))
	}},
	{"reuse by name", func(t *T) {
		first := sleeper(t, testcontainers.WithReuseByName("tc-reused"))
		equal(sleeper(t, testcontainers.WithReuseByName("tc-reused")).GetContainerID(), first.GetContainerID())
	}},
	{"terminate", func(t *T) {
		c := sleeper(t, testcontainers.WithMounts(testcontainers.VolumeMount("tc-ended", "/data")))
		check(c.Terminate(t, testcontainers.RemoveVolumes("tc-ended"), testcontainers.StopTimeout(0)))
		if _, err := docker(t).ContainerInspect(t, c.GetContainerID(), client.ContainerInspectOptions{}); err == nil {
			fail("the container is there")
		}
		if _, err := docker(t).VolumeInspect(t, "tc-ended", client.VolumeInspectOptions{}); err == nil {
			fail("the volume is there")
		}
	}},
	{"containers in parallel", func(t *T) {
		request := func(i int) testcontainers.GenericContainerRequest {
			return testcontainers.GenericContainerRequest{Started: true, ContainerRequest: testcontainers.ContainerRequest{
				Image: image, Cmd: []string{"sh", "-c", "echo ready; exec sleep 300"}, Name: fmt.Sprintf("tc-parallel-%d", i), WaitingFor: wait.ForLog("ready"),
			}}
		}
		all, err := testcontainers.ParallelContainers(t, testcontainers.ParallelContainerRequest{request(1), request(2), request(3), request(4)}, testcontainers.ParallelContainersOptions{WorkersCount: 2})
		for _, c := range all {
			t.after(func() { _ = testcontainers.TerminateContainer(c) })
		}
		check(err)
		equal(len(all), 4)
	}},
}
