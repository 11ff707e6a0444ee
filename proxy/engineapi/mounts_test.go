package engineapi

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/client"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
)

// inside reads a file as a running container sees it.
func inside(t *testing.T, direct *client.Client, id, path string) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/root%s", inspect(t, direct, id).State.Pid, path))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// TestFileBinds mounts single files, as Compose does for secrets and configs.
func TestFileBinds(t *testing.T) {
	dir := workDir(t)
	d, direct := engineDoor(t, workRules(dir))
	c := d.client("files")
	file := dir + "/conf"
	noError(t, os.WriteFile(file, []byte("one"), 0o644))
	id := makeOne(t, c, &container.HostConfig{
		Binds:  []string{file + ":/etc/conf:ro"},
		Mounts: []mount.Mount{{Type: mount.TypeBind, Source: file, Target: "/run/secrets/conf", ReadOnly: true}, {Type: mount.TypeBind, Source: file, Target: "/rw"}},
	}, "")
	noError(t, startIt(t, c, id))
	for _, path := range []string{"/etc/conf", "/run/secrets/conf", "/rw"} {
		if got := inside(t, direct, id, path); got != "one" {
			t.Errorf("%s: %q", path, got)
		}
	}
	root := fmt.Sprintf("/proc/%d/root", inspect(t, direct, id).State.Pid)
	if err := os.WriteFile(root+"/etc/conf", nil, 0o644); !errors.Is(err, unix.EROFS) {
		t.Errorf("a read-only file: %v", err)
	}
	report(t, os.WriteFile(root+"/rw", []byte("two"), 0o644))
	if mine := must(c.ContainerInspect(t.Context(), id))(t); mine.Mounts[0].Source != file {
		t.Errorf("shown: %+v", mine.Mounts)
	}
	// Editors put another file in its place.
	noError(t, errors.Join(os.WriteFile(dir+"/new", []byte("three"), 0o644), os.Rename(dir+"/new", file)))
	report(t, restartIt(t, c, id))
	if got := inside(t, direct, id, "/rw"); got != "three" {
		t.Errorf("after a restart: %q", got)
	}

	for name, tt := range map[string]struct {
		put  func() error
		rule string
	}{
		"a link out": {func() error { return os.Symlink("/etc/passwd", file) }, "mounts.always_refused"},
		"a link":     {func() error { return errors.Join(os.WriteFile(dir+"/x", nil, 0o600), os.Symlink("x", file)) }, "verify.policy"},
		"a hard link": {func() error {
			return errors.Join(os.WriteFile(dir+"/y", nil, 0o600), os.Link(dir+"/y", file))
		}, "mounts.hard_link"},
		"a directory": {func() error { return os.Mkdir(file, 0o700) }, "verify.policy"},
		"a fifo":      {func() error { return unix.Mkfifo(file, 0o600) }, "mounts.not_a_directory"},
		"a device":    {func() error { return unix.Mknod(file, unix.S_IFCHR|0o600, int(unix.Mkdev(1, 3))) }, "mounts.not_a_directory"},
		"a socket":    {func() error { return unix.Mknod(file, unix.S_IFSOCK|0o600, 0) }, "mounts.not_a_directory"},
	} {
		if err := errors.Join(os.RemoveAll(file), tt.put()); err != nil {
			t.Logf("%s: %v", name, err) // this machine has no devices
			continue
		}
		deniedBy(t, restartIt(t, c, id), tt.rule)
		if tt.rule == "verify.policy" {
			continue // as of its own a new container may have it
		}
		_, err := c.ContainerCreate(t.Context(), sleeper, &container.HostConfig{Binds: []string{file + ":/x"}}, nil, nil, "")
		deniedBy(t, err, tt.rule)
	}
}

// TestFileExchanged exchanges a file between the judgement and the engine's mount.
func TestFileExchanged(t *testing.T) {
	dir := workDir(t)
	d, direct, l := lyingDoor(t, workRules(dir))
	c := d.client("exchanged")
	file := dir + "/file"
	noError(t, errors.Join(os.WriteFile(file, []byte("mine"), 0o644), os.Symlink("/etc/passwd", dir+"/link")))
	id := makeOne(t, c, &container.HostConfig{Binds: []string{file + ":/f"}}, "")
	l.set(func(l *liar) {
		l.refuse = func(_, path string) bool {
			if strings.HasSuffix(path, "/start") {
				report(t, unix.Renameat2(unix.AT_FDCWD, file, unix.AT_FDCWD, dir+"/link", unix.RENAME_EXCHANGE))
			}
			return false
		}
	})
	noError(t, startIt(t, c, id))
	if got := inside(t, direct, id, "/f"); got != "mine" {
		t.Errorf("it has %q", got)
	}
	// An engine that mounts another file after all.
	zero := 0
	noError(t, errors.Join(unix.Renameat2(unix.AT_FDCWD, file, unix.AT_FDCWD, dir+"/link", unix.RENAME_EXCHANGE), direct.ContainerStop(t.Context(), id, container.StopOptions{Timeout: &zero})))
	other, pin := dir+"/other", inspect(t, direct, id).Mounts[0].Source
	noError(t, os.WriteFile(other, nil, 0o600))
	l.set(func(l *liar) {
		l.refuse = func(_, path string) bool {
			if strings.HasSuffix(path, "/start") {
				report(t, errors.Join(unix.Unmount(pin, unix.MNT_DETACH), unix.Mount(other, pin, "", unix.MS_BIND, "")))
			}
			return false
		}
	})
	deniedBy(t, startIt(t, c, id), "verify.start")
}

// TestMissingSources makes sources of binds that aren't there, where the policy says so.
func TestMissingSources(t *testing.T) {
	dir := workDir(t)
	d, direct := engineDoor(t, strings.Replace(workRules(dir), "hold: auto}", `hold: auto, missing: create, owner: "1234:4321"}`, 1))
	c := d.client("missing")
	id := makeOne(t, c, &container.HostConfig{Binds: []string{dir + "/a/b:/x"}}, "")
	noError(t, startIt(t, c, id))
	for _, made := range []string{"/a", "/a/b"} {
		var st unix.Stat_t
		if err := unix.Lstat(dir+made, &st); err != nil || st.Mode != unix.S_IFDIR|0o755 || st.Uid != 1234 || st.Gid != 4321 {
			t.Errorf("%s: %v, %+v", made, err, st)
		}
	}
	report(t, os.WriteFile(fmt.Sprintf("/proc/%d/root/x/f", inspect(t, direct, id).State.Pid), nil, 0o644))
	if _, err := os.Stat(dir + "/a/b/f"); err != nil {
		t.Error(err)
	}
	outside := workDir(t)
	noError(t, errors.Join(os.Symlink(outside, dir+"/out"), os.Symlink("nowhere", dir+"/dangling"), os.WriteFile(dir+"/file", nil, 0o600)))
	create := func(h *container.HostConfig) error {
		_, err := c.ContainerCreate(t.Context(), sleeper, h, nil, nil, "")
		return err
	}
	for _, source := range []string{"/out/x", "/dangling", "/dangling/x", "/file/x"} {
		if err := create(&container.HostConfig{Binds: []string{dir + source + ":/x"}}); err == nil || !strings.Contains(err.Error(), "(rule mounts.") {
			t.Errorf("%s: %v", source, err)
		}
	}
	if left := must(os.ReadDir(outside))(t); len(left) > 0 {
		t.Errorf("made outside: %v", left)
	}
	if _, err := os.Lstat(dir + "/nowhere"); err == nil {
		t.Error("made through a link")
	}
	// --mount asks for it by an option.
	bind := mount.Mount{Type: mount.TypeBind, Source: dir + "/m", Target: "/x"}
	deniedBy(t, create(&container.HostConfig{Mounts: []mount.Mount{bind}}), "mounts.not_a_directory")
	bind.BindOptions = &mount.BindOptions{CreateMountpoint: true}
	report(t, create(&container.HostConfig{Mounts: []mount.Mount{bind}}))
	// A start makes nothing.
	noError(t, os.RemoveAll(dir+"/a"))
	deniedBy(t, restartIt(t, c, id), "mounts.not_a_directory")
}

// TestNestedMounts mounts into a bind.
func TestNestedMounts(t *testing.T) {
	dir := workDir(t)
	d, direct := engineDoor(t, workRules(dir))
	c := d.client("nested")
	app, conf := heldDir(t, dir+"/app"), dir+"/conf"
	noError(t, errors.Join(os.Mkdir(app+"/deep", 0o755), os.WriteFile(conf, []byte("conf"), 0o644), os.WriteFile(app+"/config", nil, 0o644), os.Symlink("/etc", app+"/link"), os.Symlink("deep", app+"/inner")))
	h := &container.HostConfig{
		Binds: []string{app + ":/app", "/app/node_modules", conf + ":/app/config:ro", heldDir(t, dir+"/lib") + ":/app/deep/lib"},
		Tmpfs: map[string]string{"/app/tmp": ""},
	}
	id := makeOne(t, c, h, "")
	for _, do := range []func(*testing.T, *client.Client, string) error{startIt, restartIt} {
		noError(t, do(t, c, id))
		if mountedName(t, direct, id, "/app") != "app" || inside(t, direct, id, "/app/config") != "conf" || mountedName(t, direct, id, "/app/deep/lib") != "lib" {
			t.Error("something else is mounted")
		}
		root := fmt.Sprintf("/proc/%d/root/app/", inspect(t, direct, id).State.Pid)
		for _, inner := range []string{"node_modules", "tmp"} {
			report(t, os.WriteFile(root+inner+"/f", nil, 0o644))
			if left, err := os.ReadDir(app + "/" + inner); err != nil || len(left) > 0 {
				t.Errorf("%s on the host: %v, %v", inner, left, err)
			}
		}
	}
	for _, target := range []string{"/app/link/x", "/app/link", "/app/inner/x", "/app/name"} {
		other := makeOneOr(t, c, &container.HostConfig{Binds: []string{app + ":/app", target}})
		deniedBy(t, other, ruleNested)
	}
	deniedBy(t, makeOneOr(t, c, &container.HostConfig{Binds: []string{app + ":/app:ro", "/app/missing"}}), ruleNested)
	deniedBy(t, makeOneOr(t, c, &container.HostConfig{Binds: []string{app + ":/app", conf + ":/app/none"}}), ruleNested)
	if _, err := os.Lstat("/etc/x"); err == nil {
		t.Error("made through a link")
	}

	// A link takes the place of a mount point.
	noError(t, errors.Join(os.Remove(app+"/node_modules"), os.Symlink("deep", app+"/node_modules")))
	deniedBy(t, restartIt(t, c, id), ruleNested)
	noError(t, errors.Join(os.Remove(app+"/node_modules"), os.Mkdir(app+"/node_modules", 0o755)))

	// Others could lead an old runc elsewhere: one that can write to the bind, and one of the
	// tenant's, which may have a descriptor.
	for what, tt := range map[string]struct{ tenant, bind string }{"another tenant's": {"another", dir + ":/all"}, "one of the tenant's": {"nested", ""}, "a stranger": {"another", ""}} {
		binds := []string{}
		if tt.bind != "" {
			binds = append(binds, tt.bind)
		}
		other := newClient(t, d.listen(Caller{Name: strings.ReplaceAll(what, " ", "-"), Tenant: tt.tenant}))
		writer := makeOne(t, other, &container.HostConfig{Binds: binds}, "")
		noError(t, startIt(t, other, writer))
		err := restartIt(t, c, id)
		if safeRunc(must(d.engine.Runc(t.Context()))(t)) || what == "a stranger" {
			report(t, err)
		} else {
			deniedBy(t, err, ruleNested)
		}
		noError(t, direct.ContainerRemove(t.Context(), writer, container.RemoveOptions{Force: true}))
	}
}

// makeOneOr is makeOne for a create that fails.
func makeOneOr(t *testing.T, c *client.Client, h *container.HostConfig) error {
	t.Helper()
	_, err := c.ContainerCreate(t.Context(), sleeper, h, nil, nil, "")
	return err
}

// TestVolumeLabels labels a volume that a mount makes, as Testcontainers' reaper finds it by.
func TestVolumeLabels(t *testing.T) {
	d, direct := engineDoor(t, "")
	c := d.client("labels")
	mounted := func(labels map[string]string) *container.HostConfig {
		return &container.HostConfig{Mounts: []mount.Mount{{Type: mount.TypeVolume, Source: "labelled", Target: "/v", VolumeOptions: &mount.VolumeOptions{Labels: labels}}}}
	}
	deniedBy(t, makeOneOr(t, c, mounted(map[string]string{lifecycle.LabelTenant: "other"})), "labels.reserved")
	if _, err := direct.VolumeInspect(t.Context(), "labelled"); !errdefs.IsNotFound(err) {
		t.Fatalf("it is there: %v", err)
	}
	makeOne(t, c, mounted(map[string]string{"session": "1"}), "")
	v := must(direct.VolumeInspect(t.Context(), "labelled"))(t)
	if v.Labels["session"] != "1" || v.Labels[lifecycle.LabelTenant] != "labels" {
		t.Errorf("labels: %v", v.Labels)
	}
	must(c.VolumeInspect(t.Context(), "labelled"))(t)
}
