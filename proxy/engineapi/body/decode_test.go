package body

import (
	cmpor "cmp"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/go-connections/nat"
	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// What becomes of each field of a create's body. A field of the engine's that isn't here
// was added by a newer version of its types, and has to be thought about.
var (
	// harmlessFields are bounded, and have no effect outside of the container.
	harmlessFields = []string{
		"Hostname", "Domainname", "AttachStdin", "AttachStdout", "AttachStderr", "ExposedPorts", "Tty", "OpenStdin", "StdinOnce", "Cmd", "Healthcheck",
		"WorkingDir", "Entrypoint", "Labels", "StopSignal", "StopTimeout", "Shell",
		"HostConfig.AutoRemove", "HostConfig.ConsoleSize", "HostConfig.Init", "HostConfig.CpusetCpus", "HostConfig.CpusetMems",
		"HostConfig.MemoryReservation", "HostConfig.MemorySwappiness",
	}
	// droppedFields mean nothing to an engine on Linux, or are done otherwise.
	droppedFields = []string{"ArgsEscaped", "HostConfig.BlkioWeight", "HostConfig.ContainerIDFile"}
	// judgedFields are the policy's to judge.
	judgedFields = []string{
		"User", "Env", "Image", "Volumes", "NetworkDisabled",
		"HostConfig.Binds", "HostConfig.LogConfig", "HostConfig.NetworkMode", "HostConfig.PortBindings", "HostConfig.RestartPolicy",
		"HostConfig.CapAdd", "HostConfig.CapDrop", "HostConfig.CgroupnsMode", "HostConfig.Dns", "HostConfig.DnsOptions", "HostConfig.DnsSearch",
		"HostConfig.ExtraHosts", "HostConfig.GroupAdd", "HostConfig.IpcMode", "HostConfig.OomScoreAdj", "HostConfig.PidMode", "HostConfig.Privileged",
		"HostConfig.PublishAllPorts", "HostConfig.ReadonlyRootfs", "HostConfig.SecurityOpt", "HostConfig.Tmpfs", "HostConfig.UTSMode",
		"HostConfig.UsernsMode", "HostConfig.ShmSize", "HostConfig.Sysctls", "HostConfig.Runtime", "HostConfig.Mounts", "HostConfig.VolumesFrom", "HostConfig.Links",
		"HostConfig.Memory", "HostConfig.NanoCpus", "HostConfig.CpuPeriod", "HostConfig.CpuQuota", "HostConfig.Devices", "HostConfig.DeviceCgroupRules",
		"HostConfig.DeviceRequests", "HostConfig.MemorySwap", "HostConfig.OomKillDisable", "HostConfig.PidsLimit", "HostConfig.Ulimits",
		"NetworkingConfig.EndpointsConfig",
	}
	// zeroFields are refused, unless they are left out.
	zeroFields = []string{
		"MacAddress", "OnBuild", "Runtime", "VolumesFrom", "PortSpecs", "HostConfig.VolumeDriver", "HostConfig.Annotations", "HostConfig.Capabilities",
		"HostConfig.Cgroup", "HostConfig.StorageOpt", "HostConfig.Isolation", "HostConfig.MaskedPaths", "HostConfig.ReadonlyPaths",
		"HostConfig.CpuShares", "HostConfig.CgroupParent", "HostConfig.BlkioWeightDevice", "HostConfig.BlkioDeviceReadBps",
		"HostConfig.BlkioDeviceWriteBps", "HostConfig.BlkioDeviceReadIOps", "HostConfig.BlkioDeviceWriteIOps", "HostConfig.CpuRealtimePeriod",
		"HostConfig.CpuRealtimeRuntime", "HostConfig.DiskQuota", "HostConfig.LxcConf", "HostConfig.KernelMemory", "HostConfig.KernelMemoryTCP", "HostConfig.CpuCount",
		"HostConfig.CpuPercent", "HostConfig.IOMaximumIOps", "HostConfig.IOMaximumBandwidth",
	}
)

// jsonNames gives the names of a struct's fields in JSON, embedded ones' among them.
func jsonNames(t reflect.Type, prefix string) (names []string) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	for i := range t.NumField() {
		f := t.Field(i)
		tag, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case f.Anonymous && tag == "":
			names = append(names, jsonNames(f.Type, prefix)...)
		case tag == "-":
		case tag == "":
			names = append(names, prefix+f.Name)
		default:
			names = append(names, prefix+tag)
		}
	}
	return names
}

func TestEveryField(t *testing.T) {
	known := slices.Concat(harmlessFields, droppedFields, judgedFields, zeroFields)
	for name, names := range map[string][]string{
		"the engine's": slices.Concat(jsonNames(reflect.TypeFor[container.Config](), ""), jsonNames(reflect.TypeFor[container.HostConfig](), "HostConfig."),
			jsonNames(reflect.TypeFor[network.NetworkingConfig](), "NetworkingConfig.")),
		"the proxy's": slices.Concat(jsonNames(reflect.TypeFor[Config](), ""), jsonNames(reflect.TypeFor[Host](), "HostConfig."),
			[]string{"NetworkingConfig.EndpointsConfig"}),
		"an update's": jsonNames(reflect.TypeFor[Update](), "HostConfig."),
	} {
		for _, field := range names {
			if n := len(slices.DeleteFunc(slices.Clone(known), func(s string) bool { return s != field })); n != 1 {
				t.Errorf("%s field %s is in %d of the lists", name, field, n)
			}
		}
	}
	// What is inside of them, all of which is looked at or refused.
	for _, tt := range []struct {
		of    any
		names string
	}{
		{container.HealthConfig{}, "Test Interval Timeout StartPeriod StartInterval Retries"},
		{container.LogConfig{}, "Type Config"},
		{container.RestartPolicy{}, "Name MaximumRetryCount"},
		{container.Ulimit{}, "Name Hard Soft"},
		{container.DeviceMapping{}, "PathOnHost PathInContainer CgroupPermissions"},
		{container.DeviceRequest{}, "Driver Count DeviceIDs Capabilities Options"},
		{nat.PortBinding{}, "HostIp HostPort"},
		{mount.Mount{}, "Type Source Target ReadOnly Consistency BindOptions VolumeOptions ImageOptions TmpfsOptions ClusterOptions"},
		{mount.BindOptions{}, "Propagation NonRecursive CreateMountpoint ReadOnlyNonRecursive ReadOnlyForceRecursive"},
		{mount.VolumeOptions{}, "NoCopy Labels Subpath DriverConfig"},
		{mount.Driver{}, "Name Options"},
		{mount.TmpfsOptions{}, "SizeBytes Mode Options"},
		{mount.ImageOptions{}, "Subpath"},
		{mount.ClusterOptions{}, ""},
		{network.EndpointSettings{}, "IPAMConfig Links Aliases MacAddress DriverOpts GwPriority NetworkID EndpointID Gateway IPAddress IPPrefixLen IPv6Gateway GlobalIPv6Address GlobalIPv6PrefixLen DNSNames"},
		{network.EndpointIPAMConfig{}, "IPv4Address IPv6Address LinkLocalIPs"},
	} {
		got := jsonNames(reflect.TypeOf(tt.of), "")
		if strings.Join(got, " ") != tt.names {
			t.Errorf("%T has %q, want %q", tt.of, got, tt.names)
		}
	}
}

func TestZeroFieldsAreReported(t *testing.T) {
	for _, field := range zeroFields {
		b := &Create{HostConfig: &Host{}}
		v, name := reflect.ValueOf(&b.Config).Elem(), field
		if rest, ok := strings.CutPrefix(field, "HostConfig."); ok {
			v, name = reflect.ValueOf(b.HostConfig).Elem(), rest
		}
		check.Fill(fieldByJSON(v, name), "7")
		if got := b.refused(); len(got) != 1 || got[0].Field != field {
			t.Errorf("%s: %v", field, got)
		}
	}
	empty := &Create{HostConfig: &Host{}}
	if got := empty.refused(); len(got) != 0 {
		t.Errorf("nothing given: %v", got)
	}
}

func fieldByJSON(v reflect.Value, name string) reflect.Value {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		tag, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Anonymous {
			if in := fieldByJSON(v.Field(i), name); in.IsValid() {
				return in
			}
		} else if cmpor.Or(tag, f.Name) == name {
			return v.Field(i)
		}
	}
	return reflect.Value{}
}

// TestBodiesOfClients takes what clients send, written by their own types.
func TestBodiesOfClients(t *testing.T) {
	zero, err := json.Marshal(container.CreateRequest{
		Config: &container.Config{Image: "x"}, HostConfig: &container.HostConfig{}, NetworkingConfig: &network.NetworkingConfig{EndpointsConfig: map[string]*network.EndpointSettings{"default": {}}},
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, body := range map[string]string{
		"Go, all zero":  string(zero),
		"Python":        `{"Image":"x","Cmd":"ls","Env":null,"Volumes":{"/data":{}},"HostConfig":{"NetworkMode":"n","LogConfig":{"Type":null,"Config":null},"Ulimits":[{"Name":"nofile","Soft":1,"Hard":2}],"RestartPolicy":null,"Binds":null},"NetworkingConfig":{"EndpointsConfig":{"n":null},"n":null},"Healthcheck":{"Test":null,"Interval":null},"Runtime":null}`,
		"no HostConfig": `{"Image":"x","HostConfig":null,"NetworkingConfig":null}`,
		"19.03":         `{"Image":"x","HostConfig":{"Capabilities":null,"KernelMemory":0,"KernelMemoryTCP":0,"MemorySwappiness":-1,"OomKillDisable":false,"PidsLimit":0,"ConsoleSize":[0,0],"DeviceRequests":null}}`,
	} {
		var b Create
		if err := decodeNulls(body, &b); err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if b.HostConfig == nil {
			b.HostConfig = &Host{}
		}
		if err := b.Check(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := b.Endpoints(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if got := b.refused(); len(got) > 0 {
			t.Errorf("%s: %v", name, got)
		}
		again, err := json.Marshal(&b)
		if err != nil {
			t.Fatal(err)
		}
		var twice Create
		if err := decodeNulls(string(again), &twice); err != nil {
			t.Errorf("%s, written again: %v", name, err)
		}
		if diff := cmp.Diff(b, twice, cmp.AllowUnexported(Create{}, Host{})); diff != "" {
			t.Errorf("%s, written again: %s", name, diff)
		}
	}
	for name, body := range map[string]string{
		"top level":           `{"Image":"x","Privileged":true}`,
		"folding":             `{"Image":"x","HostConfig":{"Bind` + "\u017f" + `":["/:/x"]}}`,
		"twice by an escape":  `{"Image":"x","HostConfig":{"Privileged":false,"\u0050rivileged":true}}`,
		"unknown":             `{"Image":"x","HostConfig":{"Checkpoint":"x"}}`,
		"unknown in a mount":  `{"Image":"x","HostConfig":{"Mounts":[{"Type":"bind","Options":[]}]}}`,
		"volume with options": `{"Image":"x","Volumes":{"/x":{"Source":"/"}}}`,
		"null":                `null`,
		"number for text":     `{"Image":7}`,
		"number for a list":   `{"Image":"x","Cmd":7}`,
		"embedded type":       `{"Image":"x","Config":{"User":"0"}}`,
		"no ulimit":           `{"Image":"x","HostConfig":{"Ulimits":[null]}}`,
		"embedded resources":  `{"Image":"x","HostConfig":{"Resources":{"Memory":1}}}`,
	} {
		var b Create
		if decodeNulls(body, &b) == nil {
			t.Errorf("%s was taken: %+v", name, b)
		}
	}
}

func TestParseBind(t *testing.T) {
	volume := func(source, target string) Mounted {
		return Mounted{ContainerMount: policy.ContainerMount{Type: "volume", Own: true, Source: source, Target: target}}
	}
	bind := func(source, target string) Mounted {
		return Mounted{ContainerMount: policy.ContainerMount{Type: "bind", Own: true, Create: true, Source: source, Target: target}}
	}
	readOnly := func(m Mounted) Mounted { m.ReadOnly = true; return m }
	options := func(m Mounted, o ...string) Mounted { m.Options = o; return m }
	noCopy, label := volume("v", "/x"), readOnly(bind("/a", "/x"))
	noCopy.noCopy, label.Label = true, true
	for raw, want := range map[string]Mounted{
		"/x":                  volume("", "/x"),
		"v:/x":                volume("v", "/x"),
		"v:/x/../y/":          volume("v", "/y"),
		"/a:/x":               bind("/a", "/x"),
		"/a/../b/:/x":         bind("/b", "/x"),
		"/a:/x:rw":            bind("/a", "/x"),
		"/a:/x:ro":            readOnly(bind("/a", "/x")),
		"/a:/x:z,ro":          label,
		"v:/x:nocopy":         noCopy,
		"/a:/x:rprivate":      bind("/a", "/x"),
		"/a:/x:ro,rslave":     options(readOnly(bind("/a", "/x")), "propagation=rslave"),
		"/a:/x:rshared":       options(bind("/a", "/x"), "propagation=rshared"),
		"v:/x:private":        options(volume("v", "/x"), "propagation=private"),
		"/a:/x:cached":        bind("/a", "/x"),
		"../a:/x":             volume("../a", "/x"), // no name of a volume's, which the policy says
		"./a:/x:delegated":    volume("./a", "/x"),
		"/a:relative/../../y": bind("/a", "../y"),
	} {
		if got, err := parseBind(raw); err != nil {
			t.Errorf("%s: %v", raw, err)
		} else if diff := cmp.Diff(want, got, cmp.AllowUnexported(Mounted{})); diff != "" {
			t.Errorf("%s: %s", raw, diff)
		}
	}
	for _, raw := range []string{"", ":", "a:", ":/x", "/a:/x:", "/a:/x:ro:rw", "/a:/x:ro,rw", "/a:/x:ro,ro", "/a:/x:bogus", "/a:/x:,", "/a:/x:nocopy", "/a:/x:shared,private", "/a:/x:RO"} {
		if got, err := parseBind(raw); err == nil {
			t.Errorf("%s was taken as %+v", raw, got)
		}
	}
}

func TestTmpfsFlags(t *testing.T) {
	for flags, want := range map[string]string{
		"": "", "rw,exec": "exec", "noexec,mode=0755,uid=5": "noexec,mode=755,uid=5", "nosuid,nodev": "", "mode=1777": "mode=1777",
	} {
		var m Mounted
		if err := m.tmpfsFlags(strings.Split(flags, ",")); err != nil || m.flags != want || len(m.Options) > 0 {
			t.Errorf("%q: %+v, %v", flags, m, err)
		}
	}
	for _, flags := range []string{"suid", "dev", "mode=4755", "mode=x", "shared", "bind", "remount", "nr_inodes=0", "size", "uid=-1", "EXEC", "mpol=bind:0", "context=x"} {
		var m Mounted
		if err := m.tmpfsFlags([]string{flags}); err != nil || len(m.Options) != 1 {
			t.Errorf("%q: %+v, %v", flags, m, err)
		}
	}
	for _, size := range []string{"size=", "size=50%", "size=-1", "size=0", "size=9999999999g", "size=1t"} {
		var m Mounted
		if err := m.tmpfsFlags([]string{size}); err == nil {
			t.Errorf("%q was taken as %+v", size, m)
		}
	}
	var m Mounted
	if err := m.tmpfsFlags([]string{"size=2m"}); err != nil || m.SizeBytes != 2<<20 {
		t.Errorf("2m is %d, %v", m.SizeBytes, err)
	}
}

func TestPortRanges(t *testing.T) {
	want := nat.PortMap{"80/tcp": {{HostPort: "8080-8090"}, {HostPort: "8080"}, {}}}
	parsed := func(m nat.PortMap) ([]policy.ContainerPort, error) {
		var h Host
		h.PortBindings = m
		return h.ports()
	}
	ports, err := parsed(want)
	if got := portMap(ports); err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	for _, s := range []string{"8090-8080", "0-8080", "8080-0", "8080-", "-8080", "8080-65536", "8080-8081-8082", "8080-+1", " 8080-8081"} {
		if ports, err := parsed(nat.PortMap{"80/tcp": {{HostPort: s}}}); err == nil {
			t.Errorf("%q: %v", s, ports)
		}
	}
}

func decodeNulls(body string, v any) error {
	r := httptest.NewRequest(http.MethodPost, "/containers/create", strings.NewReader(body))
	r.Header.Set("Content-Type", "application/json")
	return proxy.DecodeNulls(httptest.NewRecorder(), r, proxy.MaxBody, v)
}

// FuzzCreateBody looks for bodies that aren't refused for what they ask for, but break
// something on the way to the policy.
func FuzzCreateBody(f *testing.F) {
	for _, body := range []string{
		`{"Image":"x","HostConfig":{"Binds":["/a:/b:ro","v:/x:nocopy","/y"],"Tmpfs":{"/t":"size=1m,mode=755"},"PortBindings":{"80/tcp":[{"HostPort":"8080"}]}}}`,
		`{"Image":"x","HostConfig":{"Mounts":[{"Type":"volume","Target":"/x","VolumeOptions":{"DriverConfig":{"Options":{"o":"bind"}}}}],"PublishAllPorts":true},"ExposedPorts":{"80":{}}}`,
		`{"Image":"x","Env":["A=1","B"],"Cmd":"x","NetworkingConfig":{"EndpointsConfig":{"n":{"Aliases":["a"]}}},"HostConfig":{"CpuQuota":1,"Devices":[{}]}}`,
	} {
		f.Add(body)
	}
	f.Fuzz(func(t *testing.T, body string) {
		var b Create
		if decodeNulls(body, &b) != nil {
			return
		}
		if b.HostConfig == nil {
			b.HostConfig = &Host{}
		}
		if b.Check() != nil {
			return
		}
		req, err := b.Request()
		if err != nil {
			return
		}
		mounts, err := b.Mounts("")
		if err != nil {
			return
		}
		if req.Ports, err = b.Published(req.Ports, nil); err != nil {
			return
		}
		p := Judged{Body: &b, Mounts: mounts, Labels: map[string]string{}, Spec: policy.ContainerSpec{Network: policy.SpecNetworkNone}}
		for _, m := range mounts {
			switch m.Type {
			case "tmpfs":
				p.Spec.Tmpfs = append(p.Spec.Tmpfs, m.ContainerMount)
			case "volume":
				p.Spec.Volumes = append(p.Spec.Volumes, m.ContainerMount)
			}
		}
		h := p.Encode(nil, 51).HostConfig
		if h.Privileged || len(h.Binds) > 0 || len(h.Devices) > 0 || len(h.VolumesFrom) > 0 || h.PidMode != "" || h.MaskedPaths != nil || h.CgroupParent != "" {
			t.Errorf("%s: %+v", body, h)
		}
		for _, m := range h.Mounts {
			if m.VolumeOptions != nil && (m.VolumeOptions.DriverConfig != nil || m.VolumeOptions.Subpath != "") {
				t.Errorf("%s: %+v", body, m)
			}
		}
		for _, options := range h.Tmpfs {
			for _, o := range strings.Split(options, ",") {
				if slices.Contains([]string{"suid", "dev", "bind", "remount", "shared"}, o) {
					t.Errorf("%s: %s", body, options)
				}
			}
		}
	})
}

// TestGrantedKeepsSources checks that the label, which callers see, names no path of a pin,
// and that none comes from it.
func TestGrantedKeepsSources(t *testing.T) {
	label, err := json.Marshal(Granted{Sources: []string{"/pins/1"}})
	if err != nil || strings.Contains(string(label), "ources") {
		t.Errorf("label %s, error %v; want no sources", label, err)
	}
	var g Granted
	if err := json.Unmarshal([]byte(`{"Sources":["/pins/1"]}`), &g); err != nil || g.Sources != nil {
		t.Errorf("sources %v, error %v; want none", g.Sources, err)
	}
}
