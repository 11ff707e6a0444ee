package main

import (
	"bytes"
	"io"
	"time"

	"github.com/moby/moby/api/types/container"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/wait"
)

// waiting is a case of a container that waits by a strategy.
func waiting(name, text string, s wait.Strategy, opts ...testcontainers.ContainerCustomizer) testCase {
	return testCase{"wait for " + name, func(t *T) {
		run(t, append(options{script(text), testcontainers.WithWaitStrategy(s)}, opts...)...)
	}}
}

var waitCases = []testCase{
	waiting("a log message", "echo ready; exec sleep 300", wait.ForLog("ready")),
	waiting("a log message several times", "echo x; echo x; exec sleep 300", wait.ForLog("x").WithOccurrence(2)),
	waiting("a pattern in the log", "echo ready-5; exec sleep 300", wait.ForLog(`ready-\d`).AsRegexp()),
	waiting("a port", web, wait.ForListeningPort("8080/tcp"), testcontainers.WithExposedPorts("8080/tcp")),
	waiting("an exposed port", web, wait.ForExposedPort(), testcontainers.WithExposedPorts("8080/tcp")),
	waiting("a mapped port", web, wait.ForMappedPort("8080/tcp"), testcontainers.WithExposedPorts("8080/tcp")),
	waiting("HTTP", web, wait.ForHTTP("/").WithPort("8080/tcp").WithResponseMatcher(func(r io.Reader) bool {
		body, err := io.ReadAll(r)
		return err == nil && string(body) == "hello\n"
	}), testcontainers.WithExposedPorts("8080/tcp")),
	waiting("a command", web, wait.ForExec([]string{"test", "-e", "/www/index.html"})),
	waiting("a command's output", web, wait.ForExec([]string{"cat", "/www/index.html"}).WithResponseMatcher(func(r io.Reader) bool {
		body, err := io.ReadAll(r)
		return err == nil && bytes.Contains(body, []byte("hello"))
	})),
	waiting("a file", web, wait.ForFile("/www/index.html").WithMatcher(func(r io.Reader) error {
		_, err := io.ReadAll(r)
		return err
	})),
	waiting("the end", "exit 0", wait.ForExit()),
	waiting("a health check", "exec sleep 300", wait.ForHealthCheck(), config(func(c *container.Config) {
		c.Healthcheck = &container.HealthConfig{Test: []string{"CMD", "true"}, Interval: time.Second, Timeout: time.Second, Retries: 3}
	})),
	waiting("all of several", web, wait.ForAll(wait.ForLog("ready"), wait.ForListeningPort("8080/tcp")).WithDeadline(30*time.Second), testcontainers.WithExposedPorts("8080/tcp")),
	waiting("any of several", web, wait.ForAny(wait.ForLog("never"), wait.ForLog("ready"))),
	{"wait in vain", func(t *T) {
		c, err := testcontainers.Run(t, image, script("exec sleep 300"), testcontainers.WithWaitStrategy(wait.ForLog("never").WithStartupTimeout(time.Second)))
		t.after(func() { _ = testcontainers.TerminateContainer(c) })
		if err == nil {
			fail("it started")
		}
	}},
	{"wait for a container that ends", func(t *T) {
		c, err := testcontainers.Run(t, image, script("exit 3"), testcontainers.WithWaitStrategy(wait.ForLog("never")))
		t.after(func() { _ = testcontainers.TerminateContainer(c) })
		if err == nil {
			fail("it started")
		}
		within(err.Error(), "exited with code 3")
	}},
}
