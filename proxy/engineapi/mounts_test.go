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
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// TestFileBinds mounts single files, as Compose does for secrets and configs.
func TestFileBinds(t *testing.T) {
	dir := workDir(t)
	d, direct := engineDoor(t, workRules(dir))
	c := d.client("files")
	file := dir + "/conf"
	must(t, os.WriteFile(file, []byte("one"), 0o644))
	id := makeOne(t, c, &container.HostConfig{
		Binds:  []string{file + ":/etc/conf:ro"},
		Mounts: []mount.Mount{{Type: mount.TypeBind, Source: file, Target: "/run/secrets/conf", ReadOnly: true}, {Type: mount.TypeBind, Source: file, Target: "/rw"}},
	}, "")
	must(t, startIt(t, c, id))
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
	if mine := check.Value(c.ContainerInspect(t.Context(), id))(t); mine.Mounts[0].Source != file {
		t.Errorf("shown: %+v", mine.Mounts)
	}
	// Editors put another file in its place.
	must(t, errors.Join(os.WriteFile(dir+"/new", []byte("three"), 0o644), os.Rename(dir+"/new", file)))
	report(t, restartIt(t, c, id))
	if got := inside(t, direct, id, "/rw"); got != "three" {
		t.Errorf("after a restart: %q", got)
	}
}

// TestMissingSources makes sources of binds that aren't there, where the policy says so.
func TestMissingSources(t *testing.T) {
	dir := workDir(t)
	d, direct := engineDoor(t, strings.Replace(workRules(dir), "hold: auto}", `hold: auto, missing: create, owner: "1234:4321"}`, 1))
	c := d.client("missing")
	id := makeOne(t, c, &container.HostConfig{Binds: []string{dir + "/a/b:/x"}}, "")
	must(t, startIt(t, c, id))
	for _, made := range []string{"/a", "/a/b"} {
		var st unix.Stat_t
		if err := unix.Lstat(dir+made, &st); err != nil || st.Mode != unix.S_IFDIR|0o755 || st.Uid != 1234 || st.Gid != 4321 {
			t.Errorf("%s: %v, %+v", made, err, st)
		}
	}
	report(t, os.WriteFile(fmt.Sprintf("/proc/%d/root/x/f", inspect(t, direct, id).State.Pid), nil, 0o644))
	report(t, errOf(os.Stat(dir+"/a/b/f")))
	outside := workDir(t)
	must(t, errors.Join(os.Symlink(outside, dir+"/out"), os.Symlink("nowhere", dir+"/dangling"), os.WriteFile(dir+"/file", nil, 0o600)))
	create := func(h *container.HostConfig) error {
		_, err := c.ContainerCreate(t.Context(), sleeper, h, nil, nil, "")
		return err
	}
	for _, source := range []string{"/out/x", "/dangling", "/dangling/x", "/file/x"} {
		if err := create(&container.HostConfig{Binds: []string{dir + source + ":/x"}}); err == nil || !strings.Contains(err.Error(), "(rule mounts.") {
			t.Errorf("%s: %v", source, err)
		}
	}
	if left := check.Value(os.ReadDir(outside))(t); len(left) > 0 {
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
	must(t, os.RemoveAll(dir+"/a"))
	deniedBy(t, restartIt(t, c, id), "mounts.not_a_directory")
}

// TestNestedMounts mounts into a bind.
func TestNestedMounts(t *testing.T) {
	dir := workDir(t)
	d, direct := engineDoor(t, workRules(dir))
	c := d.client("nested")
	app, conf := heldDir(t, dir+"/app"), dir+"/conf"
	must(t, errors.Join(os.Mkdir(app+"/deep", 0o755), os.WriteFile(conf, []byte("conf"), 0o644), os.WriteFile(app+"/config", nil, 0o644), os.Symlink("/etc", app+"/link"), os.Symlink("deep", app+"/inner")))
	h := &container.HostConfig{
		Binds: []string{app + ":/app", "/app/node_modules", conf + ":/app/config:ro", heldDir(t, dir+"/lib") + ":/app/deep/lib"},
		Tmpfs: map[string]string{"/app/tmp": ""},
	}
	id := makeOne(t, c, h, "")
	for _, do := range []func(*testing.T, *client.Client, string) error{startIt, restartIt} {
		must(t, do(t, c, id))
		if inside(t, direct, id, "/app/name") != "app" || inside(t, direct, id, "/app/config") != "conf" || inside(t, direct, id, "/app/deep/lib/name") != "lib" {
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
	must(t, errors.Join(os.Remove(app+"/node_modules"), os.Symlink("deep", app+"/node_modules")))
	deniedBy(t, restartIt(t, c, id), ruleNested)
	must(t, errors.Join(os.Remove(app+"/node_modules"), os.Mkdir(app+"/node_modules", 0o755)))

	// Others could lead an old runc elsewhere; see TestRefuseWriters.
	must(t, startIt(t, c, makeOne(t, c, nil, "")))
	err := restartIt(t, c, id)
	if safeRunc(check.Value(d.engine.Runc(t.Context()))(t)) {
		report(t, err)
	} else {
		deniedBy(t, err, ruleNested)
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
	v := check.Value(direct.VolumeInspect(t.Context(), "labelled"))(t)
	if v.Labels["session"] != "1" || v.Labels[lifecycle.LabelTenant] != "labels" {
		t.Errorf("labels: %v", v.Labels)
	}
	check.Value(c.VolumeInspect(t.Context(), "labelled"))(t)
}
