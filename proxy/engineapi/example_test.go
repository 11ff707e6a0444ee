package engineapi

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/network"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// examplePolicy is one of the policies that people begin with, which allows testImage too.
func examplePolicy(t *testing.T, name string) string {
	t.Helper()
	text := string(readFile(t, "../../compose/policy/"+name+".yaml"))
	check.Value(policy.Parse([]byte(text), policy.Options{}))(t)
	if !strings.Contains(text, "allow: [") {
		t.Fatalf("%s allows no images", name)
	}
	return strings.Replace(text, "allow: [", `allow: ["berm.local/*", `, 1)
}

// TestExamplePolicies runs what each of them is for, and something that it isn't for.
func TestExamplePolicies(t *testing.T) {
	files := t.TempDir()
	must(t, os.WriteFile(files+"/Dockerfile", []byte("FROM "+testImage+"\nRUN echo built > /proof\nCMD cat /proof\n"), 0o600))
	t.Setenv("DOCKER_BUILDKIT", "0")
	archive := files + "/app.tar"
	run := []string{"run --rm --user 1000:1000 " + testImage + " true"}
	objects := []string{"network create own", "volume create data"}
	images := []string{"build -t app " + files, "tag app app:2", "build --cache-from app -t registry.example.com/NAME/app:1 " + files, "save -o " + archive + " app", "rmi app", "load -i " + archive,
		"run --rm app", "rmi app app:2 registry.example.com/NAME/app:1"}
	work := []string{"run --detach --name one --network own -v data:/data -p 127.0.0.1::80 " + testImage + " sleep 600", "exec one touch /data/x", "commit -c USER=1000 one snapshot", "rmi snapshot"}
	for _, tt := range []struct {
		name       string
		does, wont []string
	}{
		{"locked", run, []string{"run --rm " + testImage + " true", "build -t app " + files, "network create own", "volume create data", "login -u a -p b registry.example.com"}},
		{"team", slices.Concat(run, objects, images, work),
			[]string{"tag " + testImage + " alpine", "build -t python:3.11-slim " + files, "run --rm --privileged " + testImage, "run --rm -p 80:80 " + testImage, "push registry.example.com/other/app:1", "login -u a -p b docker.io"}},
		{"ci", slices.Concat(run, objects, images), []string{"tag " + testImage + " alpine", "run --rm -v /etc:/x " + testImage, "push registry.example.com/team/app:1", "commit x"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			d, direct := engineDoor(t, examplePolicy(t, tt.name))
			n := check.Value(direct.NetworkCreate(t.Context(), "berm-sandbox", network.CreateOptions{Labels: d.policyNetworkLabels()}))(t)
			t.Cleanup(func() { report(t, direct.NetworkRemove(context.Background(), n.ID)) })
			address := d.listen(Caller{Name: "one", Tenant: "one"})
			for _, line := range tt.does {
				args := strings.Fields(strings.ReplaceAll(line, "NAME", tt.name))
				for i := range args {
					args[i] = strings.ReplaceAll(args[i], "USER=", "USER ") // is one argument
				}
				if _, errs, err := dockerCLI(t, address, args...); err != nil {
					t.Errorf("docker %s: %v: %s", line, err, errs)
				}
			}
			for _, line := range tt.wont {
				if out, errs, err := dockerCLI(t, address, strings.Fields(line)...); err == nil || !strings.Contains(errs, "denied by policy") {
					t.Errorf("docker %s: %v: %s%s", line, err, out, errs)
				}
			}
		})
	}
}
