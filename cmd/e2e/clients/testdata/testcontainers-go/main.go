// Command testcontainers-go runs cases of Testcontainers for Go and prints TAP. Its argument
// ryuk chooses those that need the reaper.
package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/log"
	"github.com/testcontainers/testcontainers-go/wait"
)

var image = os.Getenv("IMAGE")

func main() {
	log.SetDefault(silent{})
	switch strings.Join(os.Args[1:], " ") {
	case "":
		tap(concat(containerCases, waitCases, objectCases))
	case "ryuk":
		tap(ryukCases)
	case "child":
		leave()
	}
}

func concat(lists ...[]testCase) (all []testCase) {
	for _, l := range lists {
		all = append(all, l...)
	}
	return all
}

// silent is a logger: standard output is TAP's.
type silent struct{}

func (silent) Printf(string, ...any) {}

type options = []testcontainers.ContainerCustomizer

// run runs a container until the case's end.
func run(t *T, opts ...testcontainers.ContainerCustomizer) *testcontainers.DockerContainer {
	c, err := testcontainers.Run(t, image, opts...)
	t.after(func() { _ = testcontainers.TerminateContainer(c) })
	return must(c, err)
}

// sleeper is a container that does nothing.
func sleeper(t *T, opts ...testcontainers.ContainerCustomizer) *testcontainers.DockerContainer {
	base := options{testcontainers.WithCmd("sh", "-c", "echo ready; exec sleep 300"), testcontainers.WithWaitStrategy(wait.ForLog("ready"))}
	return run(t, append(base, opts...)...)
}

const web = "mkdir -p /www; echo hello >/www/index.html; echo ready; exec httpd -f -p 8080 -h /www"

// server is a container that answers HTTP on a published port.
func server(t *T, opts ...testcontainers.ContainerCustomizer) *testcontainers.DockerContainer {
	base := options{testcontainers.WithCmd("sh", "-c", web), testcontainers.WithExposedPorts("8080/tcp"), testcontainers.WithWaitStrategy(wait.ForListeningPort("8080/tcp"))}
	return run(t, append(base, opts...)...)
}

func script(text string) testcontainers.ContainerCustomizer {
	return testcontainers.WithCmd("sh", "-c", text)
}

func get(t *T, c *testcontainers.DockerContainer) string {
	req := must(http.NewRequestWithContext(t, http.MethodGet, must(c.PortEndpoint(t, "8080/tcp", "http")), nil))
	resp := must(http.DefaultClient.Do(req))
	defer func() { _ = resp.Body.Close() }()
	return string(must(io.ReadAll(resp.Body)))
}

// output runs a command in a container, which has to succeed.
func output(t *T, c *testcontainers.DockerContainer, words ...string) string {
	code, r, err := c.Exec(t, words, multiplexed)
	check(err)
	text := string(must(io.ReadAll(r)))
	if code != 0 {
		fail("%v: %d: %s", words, code, text)
	}
	return strings.TrimSpace(text)
}

func logs(t *T, c *testcontainers.DockerContainer) string {
	r := must(c.Logs(t))
	defer func() { _ = r.Close() }()
	return string(must(io.ReadAll(r)))
}

func docker(t *T) *testcontainers.DockerClient {
	c := must(testcontainers.NewDockerClientWithOpts(t))
	t.after(func() { _ = c.Close() })
	return c
}

func host(f func(*container.HostConfig)) testcontainers.ContainerCustomizer {
	return testcontainers.WithHostConfigModifier(f)
}

func config(f func(*container.Config)) testcontainers.ContainerCustomizer {
	return testcontainers.WithConfigModifier(f)
}

// leave makes a container and a network, and ends without removing them.
func leave() {
	t := &T{Context: context.Background()}
	n := newNetwork(t)
	fmt.Print(sleeper(t).GetContainerID(), " ", n.ID)
}

var ryukCases = []testCase{
	{"ryuk starts", func(t *T) {
		id := sleeper(t).SessionID()
		found := must(docker(t).ContainerList(t, client.ContainerListOptions{Filters: make(client.Filters).Add("label", "org.testcontainers.ryuk=true", "org.testcontainers.sessionId="+id)}))
		equal(len(found.Items), 1)
	}},
	{"ryuk labels its session", func(t *T) {
		c := sleeper(t)
		equal(must(c.Inspect(t)).Config.Labels["org.testcontainers.sessionId"], c.SessionID())
	}},
	{"ryuk removes what a process left", func(t *T) {
		d := docker(t)
		c := sleeper(t) // this process's reaper
		ids := c.SessionID()
		child := exec.CommandContext(t, os.Args[0], "child")
		child.Env = append(os.Environ(), "TESTCONTAINERS_SESSION_ID=berm-child")
		var errs bytes.Buffer
		child.Stderr = &errs
		out, err := child.Output()
		made := strings.Fields(string(out))
		if err != nil || len(made) != 2 {
			fail("%v: %s%s (%s)", err, out, errs.String(), ids)
		}
		until(t, "the container is gone", func() bool {
			_, err := d.ContainerInspect(t, made[0], client.ContainerInspectOptions{})
			return err != nil
		})
		until(t, "the network is gone", func() bool {
			_, err := d.NetworkInspect(t, made[1], client.NetworkInspectOptions{})
			return err != nil
		})
	}},
}

// bounded is a context that ends soon.
func bounded(t *T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(t, d)
	t.after(cancel)
	return ctx
}
