package engineapi

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/client"
	"github.com/docker/go-connections/nat"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

var sleeper = &container.Config{Image: testImage, Cmd: []string{"sleep", "600"}}

func makeOne(t *testing.T, c *client.Client, h *container.HostConfig, name string) string {
	t.Helper()
	ct := check.Value(c.ContainerCreate(t.Context(), sleeper, h, nil, nil, name))(t)
	return ct.ID
}

// deniedBy checks that an error is a denial by a rule.
func deniedBy(t *testing.T, err error, rule string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), "denied by policy: ") || !strings.Contains(err.Error(), "(rule "+rule+")") {
		t.Errorf("got %v, want a denial by %s", err, rule)
	}
}

func startIt(t *testing.T, c *client.Client, id string) error {
	t.Helper()
	return c.ContainerStart(t.Context(), id, container.StartOptions{})
}

func restartIt(t *testing.T, c *client.Client, id string) error {
	t.Helper()
	zero := 0
	return c.ContainerRestart(t.Context(), id, container.StopOptions{Timeout: &zero})
}

func TestStartLooksAgain(t *testing.T) {
	d, direct, l := lyingDoor(t, "")
	c := d.client("again")
	id := makeOne(t, c, &container.HostConfig{ReadonlyRootfs: true}, "")
	for _, name := range []string{"privileged", "capability", "host network", "bind", "mount", "memory", "pids gone", "unmasked", "image", "user"} {
		l.set(func(l *liar) { l.change = lies[name] })
		for what, do := range map[string]func(*testing.T, *client.Client, string) error{"start": startIt, "restart": restartIt} {
			t.Run(name+", "+what, func(t *testing.T) { deniedBy(t, do(t, c, id), "verify.start") })
		}
	}
	l.honest()
	if inspect(t, direct, id).State.Running {
		t.Error("it runs")
	}
	must(t, startIt(t, c, id))
	if err := startIt(t, c, id); err != nil { // 304
		t.Errorf("start of one that runs: %v", err)
	}
	report(t, restartIt(t, c, id))
	// What is seen only once it runs is ended, though the engine's answer be lost.
	for _, end := range []string{"/restart", "/start"} {
		id := makeOne(t, c, nil, "")
		looks := 0
		l.set(func(l *liar) {
			l.lose = func(_, p string) bool { return end == "/start" && strings.HasSuffix(p, end) }
			l.change = func(m map[string]any) {
				if looks++; looks > 1 {
					put("HostConfig.Privileged", true)(m)
				}
			}
		})
		if end == "/restart" {
			deniedBy(t, restartIt(t, c, id), "verify.start")
		} else if err := startIt(t, c, id); err == nil {
			t.Error("no error")
		}
		l.honest()
		wantErr(t, errdefs.IsNotFound, errOf(direct.ContainerInspect(t.Context(), id)), "it is there after %s", end)
	}
}

// TestStartContainer starts containers without a client's request.
func TestStartContainer(t *testing.T) {
	d, direct, l := lyingDoor(t, "")
	c := d.client("itself")
	id := makeOne(t, c, nil, "")
	for range 2 { // the second finds it running
		must(t, d.StartContainer(t.Context(), id))
	}
	if !inspect(t, direct, id).State.Running {
		t.Error("it does not run")
	}
	if log := string(readFile(t, d.audit)); !strings.Contains(log, `"caller":"itself","tenant":"itself","profile":"default","peer":"berm"`) {
		t.Errorf("audit log: %s", log)
	}
	l.set(func(l *liar) { l.change = lies["privileged"] })
	var denied *policy.DeniedError
	if err := d.StartContainer(t.Context(), id); !errors.As(err, &denied) {
		t.Errorf("one that is not as it was allowed: %v", err)
	}
	l.honest()
	foreign := d.made(direct, "", "itself-foreign", container.Config{})
	if err := d.StartContainer(t.Context(), foreign); !isMissing(err) {
		t.Errorf("one of no tenant's: %v", err)
	}
}

// TestStartUnseen starts a container that can't be looked at afterwards: it is killed, but
// stays, as nothing says that it isn't as it was allowed.
func TestStartUnseen(t *testing.T) {
	d, direct, l := lyingDoor(t, "")
	c := d.client("unseen")
	for name, lost := range map[string]bool{"answered": false, "answer lost": true} {
		t.Run(name, func(t *testing.T) {
			id := makeOne(t, c, nil, "")
			var started atomic.Bool
			l.set(func(l *liar) {
				l.lose = func(_, p string) bool { return lost && strings.HasSuffix(p, "/start") }
				l.refuse = func(m, p string) bool {
					if strings.HasSuffix(p, "/start") {
						started.Store(true)
					}
					return started.Load() && m == http.MethodGet
				}
			})
			err := startIt(t, c, id)
			l.honest()
			if err == nil || !started.Load() {
				t.Errorf("started %v: %v", started.Load(), err)
			}
			s := inspect(t, direct, id).State
			if s.Running || s.ExitCode != 137 {
				t.Errorf("running %v, exit code %d", s.Running, s.ExitCode)
			}
		})
	}
}

func TestExpiredIsNotStarted(t *testing.T) {
	d, _ := engineDoor(t, "")
	c := d.client("expired")
	cfg := *sleeper
	cfg.Labels = map[string]string{"berm.ttl": "1s"}
	ct := check.Value(c.ContainerCreate(t.Context(), &cfg, nil, nil, nil, ""))(t)
	eventually(t, func() bool {
		err := startIt(t, c, ct.ID)
		if err == nil { // it was quicker than its time
			zero := 0
			return c.ContainerStop(t.Context(), ct.ID, container.StopOptions{Timeout: &zero}) != nil
		}
		return strings.Contains(err.Error(), "(rule ttl.expired)")
	})
}

// TestNetworkOfTheSameName has a container's network removed, and another caller take its name.
func TestNetworkOfTheSameName(t *testing.T) {
	d, _ := engineDoor(t, "")
	c, other := d.client("name"), d.client("name2")
	n := check.Value(c.NetworkCreate(t.Context(), "same-name", network.CreateOptions{Internal: true}))(t)
	id := makeOne(t, c, &container.HostConfig{NetworkMode: "same-name"}, "")
	must(t, c.NetworkRemove(t.Context(), n.ID))
	check.Value(other.NetworkCreate(t.Context(), "same-name", network.CreateOptions{Internal: true}))(t)
	deniedBy(t, startIt(t, c, id), "verify.start")
}

func TestUpdate(t *testing.T) {
	d, direct, l := lyingDoor(t, basePolicy+"profiles: {default: {memory_mb: 64, max_memory_mb: 128, pids_limit: 50, max_pids_limit: 60, engine_api: {restart: [\"no\", on-failure]}}}\nresources: {over_max: refuse}\n")
	c := d.client("update")
	id := makeOne(t, c, nil, "")
	update := func(u container.UpdateConfig) error {
		_, err := c.ContainerUpdate(t.Context(), id, u)
		return err
	}
	pids, unlimited := int64(55), int64(-1)
	good := container.UpdateConfig{RestartPolicy: container.RestartPolicy{Name: "on-failure", MaximumRetryCount: 2}}
	good.Memory, good.PidsLimit, good.NanoCPUs = 100<<20, &pids, 5e8
	must(t, update(good))
	h := inspect(t, direct, id).HostConfig
	if h.Memory != 100<<20 || h.MemorySwap != 100<<20 || *h.PidsLimit != 55 || h.NanoCPUs != 5e8 || h.RestartPolicy.Name != "on-failure" || h.RestartPolicy.MaximumRetryCount != 2 {
		t.Errorf("after the update: %+v", h)
	}
	if err := startIt(t, c, id); err != nil {
		t.Errorf("start after an update: %v", err)
	}
	for rule, change := range map[string]func(*container.UpdateConfig){
		"resources.over_max": func(u *container.UpdateConfig) { u.Memory = 1 << 30 },
		"resources.range":    func(u *container.UpdateConfig) { u.Memory = -1 },
		"containers.restart": func(u *container.UpdateConfig) { u.RestartPolicy.Name = "always" },
		"containers.devices": func(u *container.UpdateConfig) { u.DeviceCgroupRules = []string{"a *:* rwm"} },
		"fields.refused":     func(u *container.UpdateConfig) { u.CgroupParent = "/x" },
		"resources.oom":      func(u *container.UpdateConfig) { yes := true; u.OomKillDisable = &yes },
		"fields.refused, more": func(u *container.UpdateConfig) {
			u.Ulimits = []*container.Ulimit{{Name: "nofile", Soft: 1 << 30, Hard: 1 << 30}}
		},
	} {
		var u container.UpdateConfig
		change(&u)
		rule, _, _ = strings.Cut(rule, ",")
		err := update(u)
		if rule == "resources.range" {
			if err == nil {
				t.Error("negative memory was taken")
			}
			continue
		}
		deniedBy(t, err, rule)
	}
	u := container.UpdateConfig{}
	u.PidsLimit = &unlimited
	deniedBy(t, update(u), "resources.over_max")
	if now := inspect(t, direct, id).HostConfig; now.Memory != h.Memory || *now.PidsLimit != 55 || now.RestartPolicy != h.RestartPolicy {
		t.Errorf("after refusals: %+v", now)
	}
	other := d.client("update2")
	wantErr(t, errdefs.IsNotFound, errOf(other.ContainerUpdate(t.Context(), id, good)), "another's")
	// An engine that does something else, or doesn't tell what was allowed.
	for rule, lie := range map[string]func(map[string]any){
		"verify.update": put("HostConfig.Memory", 1<<40),
		"verify.start": func(m map[string]any) {
			delete(m["Config"].(map[string]any)["Labels"].(map[string]any), lifecycle.LabelEffective)
		},
	} {
		id = makeOne(t, c, nil, "")
		var lying atomic.Bool
		l.set(func(l *liar) {
			l.refuse = func(_, path string) bool {
				lying.CompareAndSwap(false, strings.HasSuffix(path, "/update"))
				return false
			}
			l.change = func(m map[string]any) {
				if lying.Load() {
					lie(m)
				}
			}
		})
		deniedBy(t, update(good), rule)
		l.honest()
		wantErr(t, errdefs.IsNotFound, errOf(direct.ContainerInspect(context.Background(), id)), "%s: it is there", rule)
	}
}

// under has a door's policy be another from now on.
func (d *testDoor) under(rules, image string) {
	d.t.Helper()
	p := check.Value(policy.Parse([]byte(rules), policy.Options{DefaultImage: image}))(d.t)
	d.opts.Policy = func() *policy.Policy { return p }
}

// TestTightenedPolicy makes a container under one policy and starts it under others.
func TestTightenedPolicy(t *testing.T) {
	dir := workDir(t)
	wide := "mounts: {allowed_roots: [" + dir + "], hold: auto}\nprofiles: {default: {memory_mb: 64, cap_add: [NET_ADMIN], engine_api: {ports: any, dns: \"on\", restart: [\"no\", always], sysctls: [net.ipv4.ip_forward], %}}}\n"
	with := func(key string) string { return basePolicy + strings.Replace(wide, "%", key, 1) }
	d, direct := engineDoor(t, with(""))
	c := d.client("tight")
	n := check.Value(c.NetworkCreate(context.Background(), "tight-net", network.CreateOptions{Internal: true}))(t)
	ct := check.Value(c.ContainerCreate(t.Context(), &container.Config{Image: testImage, Cmd: []string{"sleep", "600"}, ExposedPorts: nat.PortSet{"80/tcp": {}}}, &container.HostConfig{
		Binds: []string{dir + ":/a", "tight-vol:/v"}, Tmpfs: map[string]string{"/t": "size=32m"}, CapAdd: []string{"NET_ADMIN"}, NetworkMode: container.NetworkMode(n.ID),
		PortBindings: nat.PortMap{"80/tcp": {{}}}, DNS: []string{"192.0.2.53"}, Sysctls: map[string]string{"net.ipv4.ip_forward": "1"},
		RestartPolicy: container.RestartPolicy{Name: "always"},
	}, nil, nil, ""))(t)
	base := func(text string) string { return basePolicy + text }
	for name, tt := range map[string]struct{ rules, rule string }{
		"image":        {strings.Replace(with(""), "berm.local/*", "other/*", 1), "(rule images.allow)"},
		"no binds":     {base("profiles: {default: {host_path_mode: none, memory_mb: 64, cap_add: [NET_ADMIN]}}\n"), "(rule "},
		"elsewhere":    {strings.Replace(with(""), dir, "/srv", 1), "(rule mounts."},
		"capabilities": {strings.Replace(with(""), "cap_add: [NET_ADMIN], ", "", 1), "(rule containers.capabilities)"},
		"user":         {with("users: non_root"), "(rule containers.user)"},
		"a user":       {strings.Replace(with(""), "memory_mb: 64", "memory_mb: 64, user: \"1000\"", 1), "(rule verify.policy)"},
		"root":         {strings.Replace(with(""), "memory_mb: 64", "memory_mb: 64, read_only_rootfs: true, locked: [read_only_rootfs]", 1), "(rule verify.policy)"},
		"memory":       {strings.Replace(with(""), "memory_mb: 64", "memory_mb: 32, max_memory_mb: 32", 1), "(rule "},
		"ports":        {strings.Replace(with(""), "ports: any", "ports: loopback", 1), "(rule verify.policy)"},
		"volumes":      {with("volumes: \"off\""), "(rule mounts.volumes)"},
		"networks":     {with("networks: \"off\""), "(rule networks"},
		"tmpfs":        {with("tmpfs_mb: 16"), "(rule "},
		"restart":      {strings.Replace(with(""), "restart: [\"no\", always]", "restart: [\"no\"]", 1), "(rule containers.restart)"},
		"sysctls":      {strings.Replace(with(""), "sysctls: [net.ipv4.ip_forward], ", "", 1), "(rule "},
		"dns":          {strings.Replace(with(""), "dns: \"on\"", "dns: \"off\"", 1), "(rule "},
	} {
		t.Run(name, func(t *testing.T) {
			image := testImage
			if name == "image" { // the profile's own would be allowed
				image = "other/image:1"
			}
			d.under(tt.rules, image)
			if err := startIt(t, c, ct.ID); err == nil || !strings.Contains(err.Error(), tt.rule) || !strings.Contains(err.Error(), "denied by policy") {
				t.Errorf("got %v, want a denial with %q", err, tt.rule)
			}
		})
	}
	if inspect(t, direct, ct.ID).State.Running {
		t.Error("it runs")
	}
	// One that is as wide or wider doesn't stand in the way.
	for _, rules := range []string{with(""), strings.Replace(with("tmpfs_mb: 4096"), "memory_mb: 64", "memory_mb: 128", 1)} {
		d.under(rules, testImage)
		report(t, restartIt(t, c, ct.ID))
	}
}

// deaf is a container that doesn't end when it is told to.
func deaf(t *testing.T, c, direct *client.Client) string {
	t.Helper()
	cfg := *sleeper
	cfg.Cmd = []string{"sh", "-c", "trap '' TERM; touch /tmp/deaf; while true; do sleep 1; done"}
	ct := check.Value(c.ContainerCreate(t.Context(), &cfg, nil, nil, nil, ""))(t)
	must(t, startIt(t, c, ct.ID))
	eventually(t, func() bool {
		_, err := direct.ContainerStatPath(t.Context(), ct.ID, "/tmp/deaf")
		return err == nil
	})
	return ct.ID
}

// counted counts the engine's requests whose path ends so.
func counted(l *liar, end string) *atomic.Int64 {
	var n atomic.Int64
	l.at("/"+end, func() { n.Add(1) })
	return &n
}

func (d *Proxy) making(key string) int64 {
	d.limits.mu.Lock()
	defer d.limits.mu.Unlock()
	return d.limits.making[key]
}

// TestRestartsPileUp has callers ask for restarts that take an hour, and leave.
func TestRestartsPileUp(t *testing.T) {
	host, direct := testEngine(t)
	for what, most := range map[string]int64{"restart": 1, "stop": maxStops} {
		t.Run(what, func(t *testing.T) {
			l := startLiar(t, host)
			d := doorTo(t, l.host, "")
			sweepOwn(t, direct, d)
			address := d.listen(Caller{Name: "pile", Tenant: "pile"})
			c := newClient(t, address)
			id := deaf(t, c, direct)
			n := counted(l, what)
			for range 20 {
				conn := hold(t, address, fmt.Sprintf("POST /containers/%s/%s?t=3600 HTTP/1.1\r\nHost: docker\r\n\r\n", id, what))
				eventually(t, func() bool { return n.Load() > 0 })
				_ = conn.Close()
			}
			eventually(t, func() bool { return n.Load() == most && d.making(acts+" pile") == most })
			if what == "stop" {
				if status, _ := say(t, address, http.MethodPost, "/containers/"+id+"/stop?t=3600", ""); status != http.StatusTooManyRequests {
					t.Errorf("one more: %d", status)
				}
			}
			must(t, c.ContainerRemove(t.Context(), id, container.RemoveOptions{Force: true}))
			eventually(t, func() bool { return d.making(acts+" pile") == 0 && d.making("stops of container "+id+" pile") == 0 })
			if n.Load() > most {
				t.Errorf("%d reached the engine", n.Load())
			}
			if _, ok := d.startLocks.TryLock(id); !ok {
				t.Error("the start lock is kept")
			}
		})
	}
}

// TestStreamIsWrittenDown looks for the record of an answer that goes on.
func TestStreamIsWrittenDown(t *testing.T) {
	d := standInDoor(t, &standIn{handler: func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		if base := path.Base(r.URL.Path); base == "networks" || base == "volumes" {
			_, _ = io.WriteString(w, map[string]string{"networks": "[]", "volumes": "{}"}[base])
			return
		}
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}, hijack: func(conn net.Conn, _ *bufio.Reader, greeting string) {
		_, _ = io.WriteString(conn, greeting)
		_, _ = io.Copy(io.Discard, conn)
	}})
	address := d.listen(Caller{Name: "record", Tenant: standInTenant})
	for template, request := range map[string]string{
		"/containers/{id}/logs":    "GET /containers/%s/logs?follow=1&stdout=1 HTTP/1.1\r\nHost: docker\r\n\r\n",
		"/containers/{id}/stats":   "GET /containers/%s/stats HTTP/1.1\r\nHost: docker\r\n\r\n",
		"/containers/{id}/wait":    "POST /containers/%s/wait HTTP/1.1\r\nHost: docker\r\nContent-Length: 0\r\n\r\n",
		"/containers/{id}/attach":  "POST /containers/%s/attach?stream=1&stdout=1 HTTP/1.1\r\nHost: docker\r\n" + upgradeHeaders + "\r\n",
		"/containers/{id}/archive": putBig + string(tarOf(t, "f", strings.Repeat("x", 1<<20)))[:4096],
		"/events":                  "GET /events?x=%s HTTP/1.1\r\nHost: docker\r\n\r\n",
	} {
		t.Run(template, func(t *testing.T) {
			conn := hold(t, address, fmt.Sprintf(request, standInID))
			defer func() { _ = conn.Close() }()
			eventually(t, func() bool { return bytes.Contains(readFile(t, d.audit), []byte(`"route":"`+template+`"`)) })
		})
	}
}
