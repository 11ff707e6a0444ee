package engineapi

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types"
	"github.com/docker/docker/api/types/container"
	dockerfilters "github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/client"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// heldDir makes a directory with a file that has its name.
func heldDir(t *testing.T, dir string) string {
	t.Helper()
	must(t, errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(dir+"/name", []byte(filepath.Base(dir)), 0o644)))
	return dir
}

// inside reads a file as a running container sees it.
func inside(t *testing.T, direct *client.Client, id, path string) string {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/root%s", inspect(t, direct, id).State.Pid, path))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

// copied is inside by the archive of a container, running or not.
func copied(t *testing.T, c *client.Client, id, path string) (string, error) {
	t.Helper()
	r, _, err := c.CopyFromContainer(t.Context(), id, path)
	if err != nil {
		return "", err
	}
	defer r.Close()
	tr := tar.NewReader(r)
	if _, err := tr.Next(); err != nil {
		return "", err
	}
	b, err := io.ReadAll(tr)
	return string(b), err
}

// TestHeldBind follows a bind from create to removal: it is mounted while Berm holds it,
// and never otherwise.
func TestHeldBind(t *testing.T) {
	dir := workDir(t)
	asked, second := heldDir(t, dir+"/a"), heldDir(t, dir+"/a/inner")
	d, direct := engineDoor(t, strings.Replace(workRules(dir), `dns: "on"`, `dns: "on", restart: ["no", always]`, 1))
	c := d.client("held")
	id := makeOne(t, c, &container.HostConfig{
		Binds: []string{asked + ":/a", second + ":/b:ro"}, RestartPolicy: container.RestartPolicy{Name: "always"},
	}, "held-one")

	pins := filepath.Join(d.dir, "pins") + "/"
	sources := map[string]bool{}
	got := inspect(t, direct, id)
	for _, m := range got.HostConfig.Mounts {
		sources[m.Source] = true
		if !strings.HasPrefix(m.Source, pins) || m.BindOptions == nil || m.BindOptions.CreateMountpoint {
			t.Errorf("the engine's configuration names %+v", m)
		}
	}
	if len(sources) != 2 || got.HostConfig.RestartPolicy.Name != "no" {
		t.Errorf("the engine's configuration: %v, restart %q", sources, got.HostConfig.RestartPolicy.Name)
	}
	past := func(when string) {
		t.Helper()
		if err := startIt(t, direct, id); err == nil {
			t.Errorf("%s: the engine starts it by itself", when)
		}
	}
	past("after create")
	shows := func(what string, answer any, err error, want ...string) {
		t.Helper()
		text := fmt.Sprintf("%+v", answer)
		if err != nil || strings.Contains(text, pins) {
			t.Errorf("%s tells the pin path: %v, %s", what, err, text)
		}
		for _, w := range want {
			if !strings.Contains(text, w) {
				t.Errorf("%s lacks %s: %s", what, w, text)
			}
		}
	}
	mine, err := c.ContainerInspect(t.Context(), id)
	shows("inspect", fmt.Sprintf("%+v %+v %+v", mine.Mounts, mine.HostConfig.Mounts, mine.State), err, "Source:"+asked+" ", "Source:"+second+" ")
	for _, volume := range []string{asked, "/b", "/elsewhere"} {
		list, err := c.ContainerList(t.Context(), container.ListOptions{All: true, Filters: dockerfilters.NewArgs(dockerfilters.Arg("volume", volume))})
		if want := volume != "/elsewhere"; (len(list) == 1) != want {
			t.Errorf("ps with volume=%s: %d containers", volume, len(list))
		} else if want {
			shows("ps", list[0].Mounts, err, "Source:"+asked+" ")
		}
	}
	df, err := c.DiskUsage(t.Context(), types.DiskUsageOptions{})
	if err != nil || len(df.Containers) != 1 {
		t.Fatalf("system df: %+v, %v", df.Containers, err)
	}
	shows("system df", df.Containers[0].Mounts, nil, "Source:"+asked+" ")

	named := func(when string) {
		t.Helper()
		for target, want := range map[string]string{"/a": "a", "/b": "inner"} {
			if got := inside(t, direct, id, target+"/name"); got != want {
				t.Errorf("%s: %s is %q", when, target, got)
			}
			if got, err := copied(t, c, id, target+"/name"); got != want || err != nil {
				t.Errorf("%s: copy of %s: %q, %v", when, target, got, err)
			}
		}
	}
	if got, err := copied(t, c, id, "/a/name"); got != "a" || err != nil {
		t.Errorf("copy before the first start: %q, %v", got, err)
	}
	must(t, startIt(t, c, id))
	named("started")
	// What is at the path by now is judged and held anew, but not for a container that runs.
	must(t, errors.Join(os.Rename(asked, dir+"/was"), os.Mkdir(asked, 0o755), os.WriteFile(asked+"/name", []byte("new"), 0o644), os.Rename(dir+"/was/inner", second)))
	if err := startIt(t, c, id); err != nil { // 304
		t.Error(err)
	}
	if got := inside(t, direct, id, "/a/name"); got != "a" {
		t.Errorf("after a start that started nothing: %q", got)
	}
	report(t, restartIt(t, c, id))
	if got := inside(t, direct, id, "/a/name"); got != "new" {
		t.Errorf("after a restart: %q", got)
	}
	zero := 0
	must(t, direct.ContainerStop(t.Context(), id, container.StopOptions{Timeout: &zero}))
	past("after it ran")
	report(t, d.StartContainer(t.Context(), id))
	if binds, err := d.Binds(t.Context()); err != nil || len(binds) != 2 || binds[0].Source != asked || binds[1].Mode != "ro" {
		t.Errorf("binds: %+v, %v", binds, err)
	}
}

// TestEndsAtOnce starts containers that may end before they are verified, which is no fault.
func TestEndsAtOnce(t *testing.T) {
	dir := workDir(t)
	d, _ := engineDoor(t, workRules(dir))
	c := d.client("ends")
	ct := check.Value(c.ContainerCreate(t.Context(), &container.Config{Image: testImage, Cmd: []string{"true"}}, &container.HostConfig{Binds: []string{dir + ":/a"}}, nil, nil, ""))(t)
	for range 4 {
		must(t, restartIt(t, c, ct.ID))
	}
}

// TestLedElsewhere has a bind's path lead elsewhere since the container was made.
func TestLedElsewhere(t *testing.T) {
	dir := workDir(t)
	d, direct := engineDoor(t, workRules(dir))
	c := d.client("elsewhere")
	place, file := heldDir(t, dir+"/place"), dir+"/file"
	must(t, os.WriteFile(file, nil, 0o644))
	ids := map[string]string{}
	for _, at := range []string{place, file} {
		ids[at] = makeOne(t, c, &container.HostConfig{Binds: []string{at + ":/a"}}, "")
	}
	link := func(to string) func(string) error {
		return func(at string) error { return os.Symlink(to, at) }
	}
	node := func(kind uint32, dev uint64) func(string) error {
		return func(at string) error { return unix.Mknod(at, kind|0o600, int(dev)) }
	}
	plain := func(at string) error { return os.WriteFile(at, nil, 0o600) }
	must(t, plain(dir+"/other"))
	for name, tt := range map[string]struct {
		at   string
		put  func(at string) error
		rule string
	}{
		"a link out":               {place, link("/etc"), "mounts."},
		"a link":                   {place, link(heldDir(t, dir+"/dir")), "verify.policy"},
		"nothing":                  {place, func(string) error { return nil }, "mounts.not_a_directory"},
		"a plain file":             {place, plain, "mounts.not_a_directory"},
		"a link out, to a file":    {file, link("/etc/passwd"), "mounts.always_refused"},
		"a link, to a file":        {file, link("other"), "verify.policy"},
		"a hard link":              {file, func(at string) error { return os.Link(dir+"/other", at) }, "mounts.hard_link"},
		"a directory for a file":   {file, func(at string) error { return os.Mkdir(at, 0o700) }, "verify.policy"},
		"a fifo for a file":        {file, node(unix.S_IFIFO, 0), "mounts.not_a_directory"},
		"a device for a file":      {file, node(unix.S_IFCHR, unix.Mkdev(1, 3)), "mounts.not_a_directory"},
		"a socket for a file":      {file, node(unix.S_IFSOCK, 0), "mounts.not_a_directory"},
		"a missing path of a file": {file, func(string) error { return nil }, "mounts.not_a_directory"},
	} {
		t.Run(name, func(t *testing.T) {
			if err := errors.Join(os.RemoveAll(tt.at), tt.put(tt.at)); err != nil {
				t.Skip(err) // this machine has no devices
			}
			errs := map[string]error{"start": startIt(t, c, ids[tt.at]), "restart": restartIt(t, c, ids[tt.at])}
			_, errs["copy"] = copied(t, c, ids[tt.at], "/a")
			if tt.at == file && tt.rule != "verify.policy" { // as of its own a new container may have it
				errs["create"] = makeOneOr(t, c, &container.HostConfig{Binds: []string{tt.at + ":/x"}})
			}
			for what, err := range errs {
				if err == nil || !strings.Contains(err.Error(), "(rule "+tt.rule) {
					t.Errorf("%s: %v, want a denial by %s", what, err, tt.rule)
				}
			}
		})
	}
	for _, id := range ids {
		if inspect(t, direct, id).State.Running {
			t.Error("it runs")
		}
	}
}

// TestExchangedMeanwhile exchanges a directory or a file between the judgement and the engine's
// mount.
func TestExchangedMeanwhile(t *testing.T) {
	dir := workDir(t)
	d, direct, l := lyingDoor(t, workRules(dir))
	c := d.client("meanwhile")
	at := func(end string, do func() error) { l.at(end, func() { report(t, do()) }) }
	defer l.honest()
	for i, tt := range []struct {
		name, file, outside string
		other               func(path string) error
	}{
		{"place", "/name", "/etc", func(path string) error { return os.Mkdir(path, 0o755) }},
		{"file", "", "/etc/passwd", func(path string) error { return os.WriteFile(path, nil, 0o600) }},
	} {
		place, other := dir+"/"+tt.name, dir+"/other-"+tt.name
		must(t, errors.Join(tt.other(place), os.WriteFile(place+tt.file, []byte(tt.name), 0o644), tt.other(other), os.Symlink(tt.outside, place+"-link")))
		id := makeOne(t, c, &container.HostConfig{Binds: []string{place + ":/a"}}, "")
		for _, with := range []string{other, place + "-link"} {
			exchange := func() error {
				return unix.Renameat2(unix.AT_FDCWD, place, unix.AT_FDCWD, with, unix.RENAME_EXCHANGE)
			}
			for suffix, do := range map[string]func(*testing.T, *client.Client, string) error{"/start": startIt, "/restart": restartIt} {
				at(suffix, exchange)
				if err := do(t, c, id); err != nil {
					t.Errorf("%s: %v", suffix, err)
				}
				if got := inside(t, direct, id, "/a"+tt.file); got != tt.name {
					t.Errorf("%s: it has %q", suffix, got)
				}
				must(t, errors.Join(exchange(), direct.ContainerKill(t.Context(), id, "KILL")))
				eventually(t, func() bool { return !inspect(t, direct, id).State.Running })
			}
			at("/archive", exchange)
			if got, err := copied(t, c, id, "/a"+tt.file); got != tt.name || err != nil {
				t.Errorf("copy: %q, %v", got, err)
			}
			must(t, exchange())
		}

		// An engine that mounts another one after all.
		pin := inspect(t, direct, id).Mounts[0].Source
		at("/start", func() error { return unix.Mount(other, pin, "", unix.MS_BIND, "") })
		deniedBy(t, startIt(t, c, id), "verify.start")
		if err := errors.Join(unix.Unmount(pin, unix.MNT_DETACH), os.Remove(pin), os.Remove(filepath.Dir(pin))); err != nil { // Berm released one of the two
			t.Error(err)
		}
		l.honest()
		wantErr(t, errdefs.IsNotFound, errOf(direct.ContainerInspect(t.Context(), id)), "it is there")
		if n := testutil.ToFloat64(d.metrics.mismatches); n != float64(i+1) {
			t.Errorf("%v mismatches counted", n)
		}
	}
}

// unheld is a holder that can't hold. It refuses with err.
type unheld struct{ err error }

func (unheld) Mode() string { return "trusted" }
func (unheld) Clean() error { return nil }
func (u unheld) Hold(_ context.Context, _ string, mounts []policy.Mount) (sources []string, release func() error, err error) {
	for _, m := range mounts {
		sources = append(sources, m.Source)
	}
	return sources, func() error { return nil }, u.err
}

// TestHoldModes starts containers where binds are held otherwise than where they were made.
func TestHoldModes(t *testing.T) {
	dir := workDir(t)
	d, direct := engineDoor(t, workRules(dir))
	c := d.client("modes")
	place := heldDir(t, dir+"/place")
	bind := &container.HostConfig{Binds: []string{place + ":/a"}}
	held := d.opts.Pins
	refusal := &policy.DeniedError{Reasons: []policy.Reason{{Rule: "mounts.unheld", Message: "not below a trusted root"}}}

	pinned := makeOne(t, c, bind, "")
	d.opts.Pins, d.opts.Unheld = unheld{}, unheld{}
	plain := makeOne(t, c, bind, "")
	if got := inspect(t, direct, plain).Mounts[0].Source; got != place {
		t.Errorf("unheld: the engine's configuration names %s", got)
	}
	deniedBy(t, startIt(t, c, pinned), "mounts.recreate")
	report(t, restartIt(t, c, plain))
	for name, tt := range map[string]struct {
		pins, unheld  lifecycle.Holder
		create, start string
	}{
		"held, trusted":      {held, unheld{}, "", ""},
		"held, not trusted":  {held, unheld{refusal}, "", "mounts.recreate"},
		"held, nothing else": {held, nil, "", "mounts.recreate"},
		"trusted no more":    {unheld{refusal}, unheld{refusal}, "mounts.unheld", "mounts.unheld"},
		"neither":            {nil, nil, "mounts.unheld", "mounts.recreate"},
	} {
		t.Run(name, func(t *testing.T) {
			d.opts.Pins, d.opts.Unheld = tt.pins, tt.unheld
			_, err := c.ContainerCreate(t.Context(), sleeper, bind, nil, nil, "")
			for _, got := range []struct {
				rule string
				err  error
			}{{tt.create, err}, {tt.start, restartIt(t, c, plain)}} {
				if got.rule != "" {
					deniedBy(t, got.err, got.rule)
				} else if got.err != nil {
					t.Error(got.err)
				}
			}
		})
	}

	// In mode audit it is made and started as it was asked for.
	d.opts.Pins, d.opts.Unheld = unheld{refusal}, nil
	audit := newClient(t, d.listen(Caller{Name: "modes-audit", Tenant: "modes", Audit: true}))
	id := makeOne(t, audit, bind, "")
	report(t, startIt(t, audit, id))
	deniedBy(t, startIt(t, c, id), "verify.start")

	// An engine that starts containers by itself.
	d.opts.Pins = held
	l := startLiar(t, d.host)
	other := doorTo(t, l.host, workRules(dir))
	sweepOwn(t, direct, other)
	c = other.client("modes")
	id = makeOne(t, c, bind, "")
	for name, rule := range map[string]string{"restart": "verify.start", "mount": "verify.start", "host config mount": "mounts.recreate"} {
		l.set(func(l *liar) { l.change = lies[name] })
		deniedBy(t, startIt(t, c, id), rule)
	}
	l.honest()
}

// TestSwapped has another process exchange a directory with a link out, as fast as it can,
// while containers with it are made, started and restarted and their files are read.
func TestSwapped(t *testing.T) {
	dir, outside := workDir(t), heldDir(t, workDir(t)+"/outside")
	d, direct := engineDoor(t, workRules(dir))
	c := d.client("swapped")
	place, parent := heldDir(t, dir+"/in/place"), dir+"/in"
	id := makeOne(t, c, &container.HostConfig{Binds: []string{place + ":/a"}}, "")
	// The swapper is another container, which has the directory around it.
	must(t, os.Symlink(outside, parent+"/link"))
	swapper := makeOne(t, c, &container.HostConfig{Binds: []string{parent + ":/in"}}, "")
	must(t, startIt(t, c, swapper))
	root := check.Value(os.OpenFile(fmt.Sprintf("/proc/%d/root/in", inspect(t, direct, swapper).State.Pid), unix.O_PATH|unix.O_DIRECTORY, 0))(t)
	defer root.Close()
	stop, swaps := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		for ; ; n++ {
			select {
			case <-stop:
				swaps <- n
				return
			default:
			}
			_ = unix.Renameat2(int(root.Fd()), "place", int(root.Fd()), "link", unix.RENAME_EXCHANGE)
		}
	}()
	won, started := 0, 0
	for round := range 30 {
		var err error
		switch round % 3 {
		case 0:
			err = restartIt(t, c, id)
		case 1:
			if name, cerr := copied(t, c, id, "/a/name"); cerr == nil && name != "place" {
				won++
			}
			continue
		case 2:
			if r, _, cerr := c.CopyFromContainer(t.Context(), id, "/a"); cerr == nil {
				_ = r.Close()
			}
			err = d.StartContainer(t.Context(), id)
		}
		if ct := inspect(t, direct, id); err == nil && ct.State.Running {
			if started++; inside(t, direct, id, "/a/name") != "place" {
				won++
			}
		}
	}
	close(stop)
	n := <-swaps
	if won > 0 || started == 0 {
		t.Errorf("the swapper won %d times in %d starts", won, started)
	}
	t.Logf("%d starts during %d exchanges", started, n)
}

// TestShown conceals the held paths in what the engine tells of a container.
func TestShown(t *testing.T) {
	binds, mounts := "", ""
	for i := range 12 {
		binds += fmt.Sprintf(`,{"host_path":"/asked/<%d>","source":"/real/%d","mount_path":"/m%d"}`, i, i, i)
		mounts += fmt.Sprintf(`,{"Type":"bind","Source":"/pins/u&/%d","Destination":"/m%d"}`, i, i)
	}
	label := fmt.Sprintf("%q", `{"binds":[`+binds[1:]+`]}`)
	in := `{"Id":"x","Labels":{"berm.effective":` + label + `},"Mounts":[` + mounts[1:] + `],"State":{"Error":"\"/pins/u&/11\": no"}}`
	got := string(shownEntry([]byte(in)))
	if strings.Contains(got, "/pins/") || !strings.Contains(got, `"Source":"/asked/<11>","Destination":"/m11"`) || !strings.Contains(got, `\"/asked/<11>\": no`) {
		t.Errorf("shown: %s", got)
	}
	for _, same := range []string{
		`{"Mounts":[{"Type":"bind","Source":"/pins/u&/1","Destination":"/m1"}]}`, // not Berm's
		strings.Replace(in, `{\"binds\"`, `{\"audit\":true,\"binds\"`, 1),
	} {
		if got := string(shownEntry([]byte(same))); got != same {
			t.Errorf("changed: %s", got)
		}
	}
}
