package e2e

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
)

// doctorReport is what berm doctor -o json prints.
type doctorReport struct {
	Findings []struct{ ID, Grade, Found string }
}

// grades runs berm doctor, and returns each finding's grade and text by its ID.
func grades(t *testing.T, code int, args ...string) (grades, found map[string]string) {
	t.Helper()
	stdout, stderr, got := berm(t, "", append([]string{"doctor", "-o", "json", "--timeout", "1m"}, args...)...)
	if got != code {
		t.Errorf("berm doctor %v: exit code %d, want %d: %s", args, got, code, stderr)
	}
	var r doctorReport
	if err := json.Unmarshal([]byte(stdout), &r); err != nil {
		t.Fatalf("%v: %s", err, stdout)
	}
	grades, found = map[string]string{}, map[string]string{}
	for _, f := range r.Findings {
		grades[f.ID], found[f.ID] = f.Grade, f.Found
	}
	return grades, found
}

func TestDoctorOnEngines(t *testing.T) {
	t.Parallel()
	onEachEngine(t, func(t *testing.T, kind string) {
		e := commonEngine(t, kind)
		env := filepath.Join(e.dir(t), "berm.yaml")
		settings := "engine: {" + strings.Join([]string{
			"kind: " + kind, "address: '" + e.config.Address + "'", "namespace: '" + e.config.Namespace + "'", "cgroup_parent: '" + e.config.CgroupParent + "'",
			"netns: '" + e.config.Netns + "'",
		}, ", ") + "}\nsandbox: {image: '" + testImage + "'}\n"
		write(t, env, settings)
		none := []string{"--state-dir", filepath.Join(t.TempDir(), "state"), "--listen", "127.0.0.1:0"}
		got, found := grades(t, 0, append(none, "--config", env)...)
		for id, want := range map[string]string{
			"config.file": env, "engine.reachable": kind, "engine.socket": "", "engine.agent": "", "engine.setup": "overlay", "engine.runtimes": "runc",
			"policy.file": "", "policy.hold": "", "policy.images": "all 4 profiles", "storage.state_dir": "which berm serve makes", "storage.database": "none yet", "doors.sandbox_api": "is free",
		} {
			if got[id] != "ok" || !strings.Contains(found[id], want) {
				t.Errorf("%s is %q: %s", id, got[id], found[id])
			}
		}
		if _, _, code := berm(t, "", append(none, "doctor", "--strict", "--config", env, "--timeout", "1m")...); code != 1 {
			t.Errorf("with --strict, and no token: exit code %d", code)
		}

		if kind == "containerd" {
			for setting, want := range map[string]string{"cni_plugin_dirs: [/nonexistent]": "soft", "snapshotter: none-such": "bad"} {
				file := filepath.Join(t.TempDir(), "berm.yaml")
				write(t, file, strings.Replace(settings, "engine: {", "engine: {"+setting+", ", 1))
				got, found := grades(t, map[string]int{"soft": 0, "bad": 1}[want], append(none, "--config", file)...)
				if got["engine.parts"] != want || !strings.Contains(found["engine.parts"], "missing: ") {
					t.Errorf("%s: %s %s", setting, got["engine.parts"], found["engine.parts"])
				}
			}
			return
		}
		// Beside a server that runs, which isn't disturbed.
		dir := e.dir(t)
		c := startChildWith(t, dir, e, "serving")
		got, found = grades(t, 0, "--config", env, "--state-dir", c.dir, "--listen", "unix://"+filepath.Join(dir, "berm.sock"))
		if got["doors.sandbox_api"] == "bad" || got["storage.instance"] != "ok" || got["storage.database"] != "ok" || !strings.Contains(found["storage.state_dir"], "in use by process") {
			t.Errorf("beside a server: %v %v", got, found)
		}
		if status, body := c.get(t, "/healthz"); status != 200 {
			t.Errorf("the server is disturbed: %d %s", status, body)
		}
	})
}
