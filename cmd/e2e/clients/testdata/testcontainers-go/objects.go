package main

import (
	"archive/tar"
	"bytes"
	"net/netip"
	"os"
	"strings"

	"github.com/moby/moby/api/types/container"
	dockernetwork "github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/network"
	"github.com/testcontainers/testcontainers-go/wait"
)

func provider(t *T) *testcontainers.DockerProvider {
	p := must(testcontainers.NewDockerProvider())
	t.after(func() { _ = p.Close() })
	return p
}

func newNetwork(t *T, opts ...network.NetworkCustomizer) *testcontainers.DockerNetwork {
	n := must(network.New(t, opts...))
	t.after(func() { _ = n.Remove(t) })
	return n
}

func build(d testcontainers.FromDockerfile) testcontainers.ContainerCustomizer {
	return testcontainers.WithDockerfile(d)
}

var objectCases = []testCase{
	{"provider health", func(t *T) { check(provider(t).Health(t)) }},
	{"host of the engine", func(t *T) {
		if must(provider(t).DaemonHost(t)) == "" {
			fail("it has no name")
		}
	}},
	{"list images", func(t *T) {
		for _, i := range must(provider(t).ListImages(t)) {
			if i.Name == image {
				return
			}
		}
		fail("%s isn't listed", image)
	}},
	{"save images", func(t *T) {
		file := temporary(t, nil) + "/saved.tar"
		check(provider(t).SaveImages(t, file, image))
		if must(os.Stat(file)).Size() < 1<<16 {
			fail("it is small")
		}
	}},
	{"pull an image", func(t *T) {
		name := os.Getenv("REGISTRY") + "/hello:1"
		check(provider(t).PullImage(t, name))
		must(docker(t).ImageInspect(t, name))
	}},
	{"pull always", func(t *T) {
		c, err := testcontainers.Run(t, os.Getenv("REGISTRY")+"/hello:1", testcontainers.WithAlwaysPull(), testcontainers.WithNoStart(), testcontainers.WithCmd("x"))
		t.after(func() { _ = testcontainers.TerminateContainer(c) })
		check(err)
	}},
	{"a missing image", func(t *T) {
		_, err := testcontainers.Run(bounded(t, 1e10), os.Getenv("REGISTRY")+"/missing:1")
		if err == nil {
			fail("it runs")
		}
	}},
	{"network with aliases", func(t *T) {
		n := newNetwork(t)
		server(t, network.WithNetwork([]string{"web"}, n))
		equal(output(t, sleeper(t, network.WithNetwork([]string{"client"}, n)), "wget", "-q", "-O", "-", "http://web:8080/"), "hello")
	}},
	{"networks of a container", func(t *T) {
		one, two := newNetwork(t), newNetwork(t, network.WithDriver("bridge"), network.WithLabels(map[string]string{"k": "v"}))
		c := sleeper(t, network.WithNetwork([]string{"first"}, one), network.WithNetwork([]string{"second"}, two))
		equal(len(must(c.Networks(t))), 2)
		equal(len(must(c.ContainerIPs(t))), 2)
		within(strings.Join(must(c.NetworkAliases(t))[two.Name], " "), "second")
	}},
	{"a new network", func(t *T) {
		c := sleeper(t, network.WithNewNetwork(t, []string{"alias"}, network.WithAttachable(), network.WithInternal()))
		name := must(c.Networks(t))[0]
		t.after(func() { _, _ = docker(t).NetworkRemove(t, name, client.NetworkRemoveOptions{}) })
		got := must(docker(t).NetworkInspect(t, name, client.NetworkInspectOptions{})).Network
		equal(got.Internal, true)
		equal(got.Labels["org.testcontainers"], "true")
	}},
	{"network with a subnet", func(t *T) {
		n := newNetwork(t, network.WithIPAM(&dockernetwork.IPAM{Driver: "default", Config: []dockernetwork.IPAMConfig{{Subnet: netip.MustParsePrefix("10.177.0.0/24"), Gateway: netip.MustParseAddr("10.177.0.1")}}}))
		within(must(sleeper(t, network.WithNetwork(nil, n)).ContainerIP(t)), "10.177.0.")
	}},
	{"network by its mode", func(t *T) {
		n := newNetwork(t)
		c := sleeper(t, host(func(h *container.HostConfig) { h.NetworkMode = container.NetworkMode(n.Name) }))
		equal(must(c.Networks(t)), []string{n.Name})
	}},
	{"default network", func(t *T) { sleeper(t, network.WithBridgeNetwork()) }},
	{"volumes", func(t *T) {
		d := docker(t)
		t.after(func() { _, _ = d.VolumeRemove(t, "tc-shared", client.VolumeRemoveOptions{Force: true}) })
		mount := testcontainers.WithMounts(testcontainers.VolumeMount("tc-shared", "/data"))
		output(t, sleeper(t, mount), "sh", "-c", "echo kept >/data/x")
		equal(output(t, sleeper(t, mount), "cat", "/data/x"), "kept")
		equal(must(d.VolumeInspect(t, "tc-shared", client.VolumeInspectOptions{})).Volume.Labels["org.testcontainers"], "true")
	}},
	{"tmpfs", func(t *T) {
		within(output(t, sleeper(t, testcontainers.WithTmpfs(map[string]string{"/scratch": "rw,size=1m"})), "grep", "/scratch", "/proc/mounts"), "size=1024k")
	}},
	{"binds", func(t *T) {
		dir := temporary(t, map[string]string{"x": "mounted"})
		c := sleeper(t, host(func(h *container.HostConfig) { h.Binds = []string{dir + ":/bound:ro"} }))
		equal(output(t, c, "cat", "/bound/x"), "mounted")
	}},
	{"build", func(t *T) {
		dir := temporary(t, map[string]string{"Dockerfile": "ARG BASE\nFROM ${BASE}\nCOPY x /x\nCMD [\"sh\", \"-c\", \"cat /x; exec sleep 300\"]\n", "x": "built\n", ".dockerignore": "ignored\n"})
		c, err := testcontainers.Run(t, "", build(testcontainers.FromDockerfile{Context: dir, Repo: "testcontainers/built", BuildArgs: map[string]*string{"BASE": &image}}), testcontainers.WithWaitStrategy(wait.ForLog("built")))
		t.after(func() { _ = testcontainers.TerminateContainer(c) })
		check(err)
	}},
	{"build under a random name", func(t *T) {
		dir := temporary(t, map[string]string{"Dockerfile": "FROM " + image + "\nCMD [\"sleep\", \"300\"]\n"})
		c, err := testcontainers.Run(t, "", build(testcontainers.FromDockerfile{Context: dir}))
		t.after(func() { _ = testcontainers.TerminateContainer(c) })
		check(err)
	}},
	{"build of an archive under a name", func(t *T) {
		var b, said bytes.Buffer
		w := tar.NewWriter(&b)
		text := "FROM " + image + "\nRUN echo a step\nCMD [\"sleep\", \"300\"]\n"
		check(w.WriteHeader(&tar.Header{Name: "other.Dockerfile", Size: int64(len(text)), Mode: 0o644}))
		must(w.Write([]byte(text)))
		check(w.Close())
		c, err := testcontainers.Run(t, "", build(testcontainers.FromDockerfile{
			ContextArchive: bytes.NewReader(b.Bytes()), Dockerfile: "other.Dockerfile", Repo: "testcontainers/kept", Tag: "1", KeepImage: true, BuildLogWriter: &said,
			BuildOptionsModifier: func(o *client.ImageBuildOptions) { o.Target, o.Labels = "", map[string]string{"k": "v"} },
		}))
		t.after(func() { _ = testcontainers.TerminateContainer(c) })
		check(err)
		within(said.String(), "a step")
		check(c.Terminate(t))
		equal(must(docker(t).ImageInspect(t, "testcontainers/kept:1")).Config.Labels["k"], "v")
	}},
	{"build that fails", func(t *T) {
		dir := temporary(t, map[string]string{"Dockerfile": "FROM " + image + "\nRUN exit 3\n"})
		_, err := testcontainers.Run(t, "", build(testcontainers.FromDockerfile{Context: dir, Repo: "testcontainers/fails"}))
		if err == nil {
			fail("it runs")
		}
		within(err.Error(), "non-zero code: 3")
	}},
}
