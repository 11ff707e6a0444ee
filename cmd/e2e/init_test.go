package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What berm init writes is used as it comes: the doctor finds nothing bad, and the server that
// it configures makes a sandbox and a container.
func TestInit(t *testing.T) {
	t.Parallel()
	onEachEngine(t, func(t *testing.T, kind string) {
		e := commonEngine(t, kind)
		must(t, e.ImportBusybox(t.Context(), "docker.io/library/python:3.11-slim"))
		dir := e.dir(t)
		etc, door, instance := filepath.Join(dir, "etc"), filepath.Join(dir, "run", "docker.sock"), "init-"+kind
		if _, stderr, code := berm(t, "", "init", map[string]string{"docker": "machine", "containerd": "containerd"}[kind], etc); code != 0 {
			t.Fatalf("exit code %d: %s", code, stderr)
		}
		file := filepath.Join(etc, "berm.yaml")
		settings := readString(t, file)
		// The test's engine and directories, in the place of the machine's.
		text := strings.ReplaceAll(settings, "unix:///run/berm/docker.sock\n", "unix://"+door+"\n")
		text = strings.Replace(text, "kind: "+kind+"\n", strings.Join([]string{"kind: " + kind, "instance: " + instance, "address: '" + e.config.Address + "'",
			"namespace: '" + e.config.Namespace + "'", "cgroup_parent: '" + e.config.CgroupParent + "'", "netns: '" + e.config.Netns + "'", ""}, "\n  "), 1)
		write(t, file, text)
		got, found := grades(t, 0, "--config", file, "--state-dir", filepath.Join(dir, "state"), "--listen", "127.0.0.1:0")
		for id, grade := range got {
			if grade == "bad" {
				t.Errorf("%s: %s", id, found[id])
			}
		}
		if got["config.file"] != "ok" || got["policy.file"] != "ok" {
			t.Errorf("the doctor says %v", found)
		}
		t.Cleanup(func() { (&server{dir: dir, instance: instance}).removeAll(t, e) })
		c := startChildWith(t, dir, e, "serving", "--config", file, "--listen", "127.0.0.1:0")
		c.Log.Wait(t, "msg=engine_available")
		address := readString(t, filepath.Join(c.dir, "address"))
		env := []string{"BERM_URL=http://" + address}
		args := []string{"--token-file", filepath.Join(etc, "token"), "demo"}
		must(t, second(command(t.Context(), dir, env, bin, append([]string{"sandbox", "create"}, args...)...)))
		if out, err := command(t.Context(), dir, env, bin, append(append([]string{"exec"}, args...), "--", "echo", "hello")...); err != nil || out != "hello" {
			t.Errorf("the sandbox printed %q, %v", out, err)
		}
		if kind == "docker" {
			if out, err := command(t.Context(), dir, dockerEnv("unix://"+door, dir), "docker", "run", "--rm", "python:3.11-slim", "echo", "hello"); err != nil || out != "hello" {
				t.Errorf("the container printed %q, %v", out, err)
			}
		}
		c.end(t, os.Interrupt)
		if t.Failed() {
			t.Log(c.Log.String())
		}
	})
}
