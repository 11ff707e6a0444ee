package engineapi

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/registry"
	"github.com/docker/docker/api/types/system"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// TestInfoFields decides on every field that an engine may send, those of a newer API too.
func TestInfoFields(t *testing.T) {
	var of info
	check.Fill(reflect.ValueOf(&of).Elem(), "hunter2")
	of.Swarm.Cluster, of.RegistryConfig = nil, &registry.ServiceConfig{}
	must(t, json.Unmarshal([]byte(`{
		"InsecureRegistryCIDRs": ["127.0.0.0/8", "10.1.0.0/16"], "Mirrors": ["https://u:hunter2@mirror"],
		"IndexConfigs": {"docker.io": {"Mirrors": ["https://hunter2"]}, "hunter2": {"Name": "hunter2"}}}`), of.RegistryConfig))
	shown := []string{ // facts of the kernel and of programs
		"Driver", "CgroupDriver", "CgroupVersion", "SystemTime", "KernelVersion", "OperatingSystem", "OSVersion", "OSType", "Architecture", "IndexServerAddress",
		"ServerVersion", "Isolation", "InitBinary", "DefaultRuntime",
	}
	for _, name := range shown {
		reflect.ValueOf(&of).Elem().FieldByName(name).SetString("shown")
	}
	of.InitBinary = "/hunter2/docker-init"
	of.Runtimes = map[string]system.RuntimeWithStatus{"shown": {Runtime: system.Runtime{Path: "/hunter2"}}, "hunter2": {}}
	of.ContainerdCommit, of.RuncCommit, of.InitCommit = system.Commit{ID: "1"}, system.Commit{ID: "1"}, system.Commit{ID: "1"}
	of.DriverStatus = [][2]string{{"driver-type", "x"}, {"Data Space Used", "hunter2"}}
	of.SecurityOptions = []string{"name=seccomp,profile=/hunter2/seccomp.json", "name=cgroupns"}
	of.Warnings = []string{"WARNING: No swap limit support", "WARNING: bridge-nf-call-iptables is disabled", "WARNING: Support for cgroup v1 is deprecated", "WARNING: API is accessible on http://hunter2 without encryption."}
	d := standInDoor(t, &standIn{handler: func(w http.ResponseWriter, r *http.Request) {
		switch strings.TrimPrefix(r.URL.Path, "/v1.41") {
		case "/info":
			must(t, json.NewEncoder(w).Encode(of))
		case "/images/json":
			_, _ = io.WriteString(w, `[{"Id":"sha256:1","RepoTags":["berm.local/a:1"]},{"Id":"sha256:2","RepoTags":["hunter2:1"]}]`)
		case "/version":
			_, _ = fmt.Fprint(w, `{"Version":"1","Components":[{"Name":"Engine","Details":{"ApiVersion":"1.52"}},{"Name":"rootlesskit","Details":{"ApiVersion":"1.1.1","StateDir":"/run/hunter2"}}]}`)
		}
	}})
	address := d.listen(Caller{Name: "a", Tenant: standInTenant})
	status, body := say(t, address, http.MethodGet, "/v1.41/info", "")
	var got info
	must(t, json.Unmarshal([]byte(body), &got))
	if status != http.StatusOK || strings.Contains(body, "hunter2") || strings.Contains(body, "10.1.") {
		t.Errorf("%d %s", status, body)
	}
	hidden := []string{
		"SystemStatus", "KernelMemoryTCP", "Debug", "NFd", "NGoroutines", "NEventsListener", "GenericResources", "DockerRootDir", "HTTPProxy", "HTTPSProxy", "NoProxy", "Labels",
		"ProductLicense", "DefaultAddressPools", "FirewallBackend", "CDISpecDirs", "DiscoveredDevices", "Containerd", "ContainersPaused", "ContainersRunning",
	}
	for _, field := range reflect.VisibleFields(reflect.TypeFor[info]()) {
		if field.Anonymous {
			continue
		}
		v := reflect.ValueOf(got).FieldByIndex(field.Index)
		empty := v.IsZero() || v.Kind() == reflect.Slice && v.Len() == 0
		if empty != slices.Contains(hidden, field.Name) {
			t.Errorf("%s: %v", field.Name, v)
		}
	}
	want := info{Info: system.Info{Containers: 1, Images: 1, InitBinary: "docker-init", Warnings: of.Warnings[:3], SecurityOptions: []string{"name=seccomp,profile=custom", "name=cgroupns"}}}
	if got.Containers != want.Containers || got.Images != want.Images || got.InitBinary != want.InitBinary || len(got.DriverStatus) != 1 ||
		!slices.Equal(got.Warnings, want.Warnings) || !slices.Equal(got.SecurityOptions, want.SecurityOptions) || fmt.Sprint(got.Runtimes) != "map[shown:{{ []  map[]} map[]}]" {
		t.Errorf("%+v", got)
	}
	if _, theirs := say(t, d.listen(Caller{Name: "b", Tenant: "other"}), http.MethodGet, "/v1.41/info", ""); strings.Contains(theirs, got.ID) {
		t.Errorf("the ID isn't the tenant's: %s", got.ID)
	}
	if _, body := say(t, address, http.MethodGet, "/version", ""); strings.Contains(body, "hunter2") || !strings.Contains(body, `"ApiVersion":"1.1.1"`) {
		t.Error(body)
	}
}

// TestDiskUsage counts containers of the caller's only, and of what images share no more than
// it may see.
func TestDiskUsage(t *testing.T) {
	const image = `{"Id":"sha256:%s","RepoTags":[%q],"Containers":%d,"Size":%d,"SharedSize":%d,"Labels":null}`
	var images []string
	d := standInDoor(t, &standIn{handler: func(w http.ResponseWriter, r *http.Request) {
		switch strings.TrimPrefix(r.URL.Path, "/v1.41") {
		case "/system/df":
			_, _ = fmt.Fprintf(w, `{"LayersSize":1000,"Images":[%s],"Containers":[],"Volumes":[]}`, strings.Join(images, ","))
		}
	}})
	address := d.listen(Caller{Name: "a", Tenant: standInTenant})
	own, other := fmt.Sprintf(image, "1", "berm.local/a:1", 5, 100, 30), fmt.Sprintf(image, "2", "hunter2:1", 5, 100, 30)
	for _, tt := range []struct {
		images []string
		size   int64
		shared []int64
	}{
		{nil, 0, nil},
		{[]string{own}, 100, []int64{0}},
		{[]string{own, other}, 100, []int64{0}},
		{[]string{own, other, fmt.Sprintf(image, "3", "berm.local/b:1", 0, 50, 20)}, 70 + 30 + 30, []int64{30, 20}},
	} {
		images = tt.images
		status, body := say(t, address, http.MethodGet, "/v1.41/system/df", "")
		var got struct {
			LayersSize int64
			Images     []struct{ SharedSize, Containers int64 }
		}
		must(t, json.Unmarshal([]byte(body), &got))
		var shared []int64
		for _, i := range got.Images {
			shared = append(shared, i.SharedSize)
			if i.Containers != 0 {
				t.Errorf("another's containers are counted: %s", body)
			}
		}
		if status != http.StatusOK || got.LayersSize != tt.size || !slices.Equal(shared, tt.shared) || strings.Contains(body, "hunter2") || got.Images == nil {
			t.Errorf("%d %s, want %d", status, body, tt.size)
		}
	}
}
