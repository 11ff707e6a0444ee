package engineapi

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/network"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const relationRules = basePolicy + `profiles:
  default: {engine_api: {networks: own, dns: "off", host_gateway: "on", max_memlock_mb: 8, subnets: [10.213.0.0/16, "fd00:213::/48"]}}
  other: {engine_api: {networks: own}}
`

// TestPidOfAnother joins the processes of a container of the caller's, and of nobody else's.
func TestPidOfAnother(t *testing.T) {
	d, direct := engineDoor(t, relationRules)
	ctx := t.Context()
	c, other := d.client("mine"), d.client("other")
	audit := newClient(t, d.listen(Caller{Name: "audit", Tenant: "mine", Audit: true}))
	profiled := newClient(t, d.listen(Caller{Name: "profiled", Tenant: "mine", Profile: "other"}))
	target := makeOne(t, c, nil, "pid-target")
	must(t, startIt(t, c, target))
	theirs := makeOne(t, other, nil, "pid-theirs")
	unconfined := makeOne(t, audit, &container.HostConfig{Privileged: true}, "pid-unconfined")
	sandbox := check.Value(direct.ContainerCreate(ctx, &container.Config{Image: testImage, Labels: map[string]string{lifecycle.LabelOwner: d.opts.Owner, lifecycle.LabelTenant: "mine", lifecycle.LabelKey: "k"}}, nil, nil, nil, "pid-sandbox"))(t)
	ask := func(ref string) *container.HostConfig {
		return &container.HostConfig{PidMode: container.PidMode("container:" + ref)}
	}
	joined := makeOne(t, c, ask("pid-target"), "")
	must(t, startIt(t, c, joined))
	if mode := inspect(t, direct, joined).HostConfig.PidMode; mode != container.PidMode("container:"+target) {
		t.Errorf("pid mode: %s", mode)
	}
	top := check.Value(direct.ContainerTop(ctx, joined, nil))(t)
	if len(top.Processes) == 0 {
		t.Error("no processes")
	}
	for name, ref := range map[string]string{"another's": "pid-theirs", "another's by ID": theirs, "a sandbox": "pid-sandbox", "a sandbox by ID": sandbox.ID, "nobody's": "pid-nobody", "a path": "../" + theirs, "none": ""} {
		wantErr(t, errdefs.IsNotFound, errOf(c.ContainerCreate(ctx, sleeper, ask(ref), nil, nil, "")), "%s", name)
	}
	for _, ref := range []string{unconfined, joined} {
		deniedBy(t, errOf(c.ContainerCreate(ctx, sleeper, ask(ref), nil, nil, "")), "containers.namespaces")
	}
	deniedBy(t, errOf(profiled.ContainerCreate(ctx, sleeper, ask(target), nil, nil, "")), "containers.namespaces")
	for _, mode := range []string{"host", "container", "Container:" + target, "containers:" + target} {
		if _, err := c.ContainerCreate(ctx, sleeper, &container.HostConfig{PidMode: container.PidMode(mode)}, nil, nil, ""); err == nil {
			t.Errorf("pid mode %q", mode)
		}
	}
	wantErr(t, errdefs.IsPermissionDenied, errOf(c.ContainerCreate(ctx, sleeper, &container.HostConfig{IpcMode: container.IpcMode("container:" + target)}, nil, nil, "")), "ipc")

	// What was allowed is looked up again at a start.
	must(t, direct.ContainerKill(ctx, joined, "KILL"))
	d.under(basePolicy+"profiles: {default: {engine_api: {capabilities: []}}}\n", testImage)
	wantErr(t, errdefs.IsPermissionDenied, startIt(t, c, joined), "with a target that has more")
	d.under(relationRules, testImage)
	late := makeOne(t, c, ask(target), "")
	d.opts.ArchiveFixed = false
	deniedBy(t, startIt(t, c, late), "archive.engine")
	deniedBy(t, errOf(c.ContainerCreate(ctx, sleeper, ask(target), nil, nil, "")), "archive.engine")
	d.opts.ArchiveFixed = true
	must(t, c.ContainerRemove(ctx, target, forced))
	again := makeOne(t, c, nil, "pid-target")
	must(t, startIt(t, c, again))
	wantErr(t, errdefs.IsNotFound, startIt(t, c, late), "with a target that was made again")
}

// TestPidOfAnOldRunc joins no processes where these could lead runc elsewhere.
func TestPidOfAnOldRunc(t *testing.T) {
	for version, rule := range map[string]string{"1.1.5": ruleNested, "1.3.2": ruleNested, "": ruleNested, "1.3.3": ""} {
		d, s, _ := scripted(t, "1.51", "")
		d.opts.ArchiveFixed = false
		s.ownContainerOf(d, "mine", mineID, "c")
		s.answers["GET /"] = fmt.Sprintf(`{"Version":"29.5.1","Components":[{"Name":"runc","Version":%q}]}`, version) // of /version
		peer := policy.ContainerPeer{Asked: "container:" + mineID}
		c := &call{Proxy: d.Proxy, ctx: t.Context(), rules: d.opts.Policy(), caller: Caller{Name: "mine", Tenant: "mine"}, version: 51}
		if err := findPeer(c, &peer); rule == "" && (err != nil || peer.ID != mineID) || rule != "" && (err == nil || peer.ID != "") {
			t.Errorf("runc %q: %+v, %v", version, peer, err)
		}
	}
}

// TestVolumesFromAnother has the mounts of another container judged and written as mounts.
func TestVolumesFromAnother(t *testing.T) {
	d, direct := engineDoor(t, "")
	ctx := t.Context()
	c, other := d.client("mine"), d.client("other")
	volumes := func(list ...mount.Mount) *container.HostConfig { return &container.HostConfig{Mounts: list} }
	from := makeOne(t, c, volumes(mount.Mount{Type: mount.TypeVolume, Source: "from-named", Target: "/named"}, mount.Mount{Type: mount.TypeVolume, Target: "/anonymous"},
		mount.Mount{Type: mount.TypeTmpfs, Target: "/tmpfs"}, mount.Mount{Type: mount.TypeVolume, Source: "from-ro", Target: "/ro", ReadOnly: true}), "from-one")
	last := makeOne(t, c, volumes(mount.Mount{Type: mount.TypeVolume, Source: "from-last", Target: "/named"}), "from-last")
	makeOne(t, other, volumes(mount.Mount{Type: mount.TypeVolume, Source: "from-theirs", Target: "/v"}), "from-theirs")
	nested := makeOne(t, c, volumes(mount.Mount{Type: mount.TypeVolume, Target: "/a"}, mount.Mount{Type: mount.TypeVolume, Target: "/a/b"}), "from-nested")
	mounts := func(id string) map[string]string {
		ct, got := inspect(t, direct, id), map[string]string{}
		for _, m := range ct.Mounts {
			got[m.Destination] = m.Name + map[bool]string{true: ":rw", false: ":ro"}[m.RW]
		}
		if len(ct.HostConfig.VolumesFrom) > 0 {
			t.Errorf("volumes from: %v", ct.HostConfig.VolumesFrom)
		}
		return got
	}
	anonymous := strings.TrimSuffix(mounts(from)["/anonymous"], ":rw")
	for _, tt := range []struct {
		from []string
		own  []mount.Mount
		want map[string]string
	}{
		{[]string{"from-one"}, nil, map[string]string{"/named": "from-named:rw", "/anonymous": anonymous + ":rw", "/ro": "from-ro:ro"}},
		{[]string{from[:12] + ":ro"}, nil, map[string]string{"/named": "from-named:ro", "/anonymous": anonymous + ":ro", "/ro": "from-ro:ro"}},
		{[]string{"from-one:rw", last}, nil, map[string]string{"/named": "from-last:rw", "/anonymous": anonymous + ":rw", "/ro": "from-ro:ro"}},
		{[]string{"from-last"}, []mount.Mount{{Type: mount.TypeVolume, Source: "from-mine", Target: "/named"}}, map[string]string{"/named": "from-mine:rw"}},
	} {
		h := volumes(tt.own...)
		h.VolumesFrom = tt.from
		id := makeOne(t, c, h, "")
		if got := mounts(id); !maps.Equal(got, tt.want) {
			t.Errorf("%v: %v, want %v", tt.from, got, tt.want)
		}
		must(t, startIt(t, c, id))
	}
	for ref, rule := range map[string]string{nested: "mounts.target_overlap", "from-theirs": "", "from-theirs:ro": "", "from-nobody": "", "": ""} {
		_, err := c.ContainerCreate(ctx, sleeper, &container.HostConfig{VolumesFrom: []string{ref}}, nil, nil, "")
		if rule != "" {
			deniedBy(t, err, rule)
		} else if !errdefs.IsNotFound(err) {
			t.Errorf("from %q: %v", ref, err)
		}
	}
	for _, mode := range []string{"z", "rw,Z", "nocopy", "rw:ro", ""} {
		wantErr(t, errdefs.IsInvalidArgument, errOf(c.ContainerCreate(ctx, sleeper, &container.HostConfig{VolumesFrom: []string{"from-one:" + mode}}, nil, nil, "")), "mode %q", mode)
	}
	held := inspect(t, direct, nested).Mounts
	i := slices.IndexFunc(held, func(m container.MountPoint) bool { return m.Destination == "/a" })
	deniedBy(t, errOf(c.ContainerCreate(ctx, sleeper, volumes(mount.Mount{Type: mount.TypeVolume, Source: held[i].Name, Target: "/x"}), nil, nil, "")), "mounts.target_overlap")
}

// TestManyVolumesFrom bounds how often the engine is asked about the mounts of others.
func TestManyVolumesFrom(t *testing.T) {
	d, s, address := scripted(t, "1.51", "")
	s.answers["GET /images/berm.local/busybox:latest/json"] = `{"Id":"sha256:cafe","RepoTags":["berm.local/busybox:latest"],"Config":{}}`
	for _, id := range []string{mineID, theirsID, strings.Repeat("c3", 32)} {
		var spec policy.ContainerSpec
		var mounts []container.MountPoint
		for i := range 60 {
			target := fmt.Sprintf("/%s/%d", id[:2], i)
			spec.Volumes = append(spec.Volumes, policy.ContainerMount{Type: "volume", Source: "v", Target: target})
			mounts = append(mounts, container.MountPoint{Type: mount.TypeVolume, Name: "v", Destination: target})
		}
		labels := d.labels(lifecycle.ObjectContainer, "mine", lifecycle.LabelEffective, string(check.Value(json.Marshal(spec))(t)))
		d.firsts.put(labels[lifecycle.LabelSessionID], id)
		answer := check.Value(json.Marshal(map[string]any{"Id": id, "Config": map[string]any{"Labels": labels}, "State": struct{}{}, "Mounts": mounts}))(t)
		s.answers["GET /containers/"+id+"/json"] = string(answer)
	}
	status, told := say(t, address, "POST", "/containers/create", fmt.Sprintf(`{"Image":%q,"HostConfig":{"VolumesFrom":[%q,%q,%q]}}`, testImage, mineID, theirsID, strings.Repeat("c3", 32)))
	if n := len(s.said("GET /volumes/")); status != http.StatusBadRequest || n > 0 {
		t.Errorf("the engine was asked of %d volumes: %d %s", n, status, told)
	}
}

// TestLinks has what the Docker CLI and Compose send: the same links in both places.
func TestLinks(t *testing.T) {
	d, direct := engineDoor(t, relationRules)
	ctx := t.Context()
	c, other := d.client("mine"), d.client("other")
	net := check.Value(c.NetworkCreate(ctx, "link-net", network.CreateOptions{}))(t)
	makeOne(t, c, &container.HostConfig{NetworkMode: "link-net"}, "link-db")
	makeOne(t, other, nil, "link-theirs")
	ask := func(mode string, links ...string) (container.CreateResponse, error) {
		config := &network.NetworkingConfig{EndpointsConfig: map[string]*network.EndpointSettings{}}
		if mode != "" {
			config.EndpointsConfig[mode] = &network.EndpointSettings{Links: links[:1]}
		}
		return c.ContainerCreate(ctx, sleeper, &container.HostConfig{NetworkMode: container.NetworkMode(mode), Links: links}, config, nil, "")
	}
	for _, mode := range []string{"link-net", net.ID, net.ID[:12]} {
		made := check.Value(ask(mode, "link-db:db", "link-db:database"))(t)
		must(t, startIt(t, c, made.ID))
		ct := inspect(t, direct, made.ID)
		if got := ct.NetworkSettings.Networks["link-net"].Links; !slices.Equal(got, []string{"link-db:db", "link-db:database"}) || len(ct.HostConfig.Links) > 0 {
			t.Errorf("%s: %v, %v", mode, got, ct.HostConfig.Links)
		}
	}
	wantErr(t, errdefs.IsNotFound, errOf(ask("link-net", "link-theirs:db")), "another's")
	wantErr(t, errdefs.IsNotFound, errOf(ask("link-net", "link-db:db", "link-theirs:db")), "another's beside")
	wantErr(t, errdefs.IsInvalidArgument, errOf(ask("link-net", "link-db:a b")), "alias")
	for _, mode := range []string{"", "none"} {
		deniedBy(t, errOf(c.ContainerCreate(ctx, sleeper, &container.HostConfig{NetworkMode: container.NetworkMode(mode), Links: []string{"link-db:db"}}, nil, nil, "")), "networks.options")
	}
}

// TestHostLinks bounds the links of a network that come from two places.
func TestHostLinks(t *testing.T) {
	n := policy.ContainerNetwork{Own: true, Mode: policy.NetNamed, ID: mineID, Field: modeField}
	var links []string
	for i := range maxAliases {
		links = append(links, fmt.Sprintf("c:a%d", i))
	}
	endpoints := map[string]*network.EndpointSettings{mineID: {Links: links[:1]}}
	if err := hostLinks(links, &n, endpoints); err != nil || len(n.Options) > 0 || !slices.Equal(endpoints[mineID].Links, links) {
		t.Errorf("%v, %v, %v", endpoints[mineID].Links, n.Options, err)
	}
	if err := hostLinks([]string{"c:more"}, &n, endpoints); err == nil {
		t.Error("more than there may be")
	}
	if options, err := endpointOptions(&network.EndpointSettings{Links: links[:1]}, policy.ContainerNetwork{Mode: policy.NetNamed, ID: mineID}); err != nil || len(options) != 1 {
		t.Errorf("a shared network: %v, %v", options, err)
	}
	for name, other := range map[string]policy.ContainerNetwork{
		"shared": {Mode: policy.NetNamed, ID: mineID, Field: modeField}, "none": {Own: true, Mode: policy.NetNone, Field: modeField},
		"a container's": {Own: true, Mode: policy.NetContainer, ID: mineID, Field: modeField}, "not the default": {Own: true, Mode: policy.NetNamed, ID: mineID, Field: "E"},
	} {
		if err := hostLinks(links[:1], &other, map[string]*network.EndpointSettings{}); err != nil || len(other.Options) != 1 {
			t.Errorf("%s: %v, %v", name, other.Options, err)
		}
	}
}

// TestNetworkOfALiar has an engine make another network than it is asked for.
func TestNetworkOfALiar(t *testing.T) {
	var labels map[string]string
	var lie string
	removed := false
	d := doorBefore(t, &standIn{handler: func(w http.ResponseWriter, r *http.Request) {
		switch path := strings.TrimPrefix(r.URL.Path, "/v1.41/networks"); {
		case path == "/create":
			var asked network.CreateRequest
			report(t, json.NewDecoder(r.Body).Decode(&asked))
			labels = asked.Labels
			_, _ = fmt.Fprintf(w, `{"Id":%q}`, mineID)
		case r.Method == http.MethodDelete:
			removed = true
		case path == "/"+mineID:
			_, _ = fmt.Fprintf(w, `{"Name":"n","Id":%q,"Scope":"local","Driver":"bridge","Options":{},"Labels":%s%s}`, mineID, labelsJSON(labels), lie)
		default:
			_, _ = fmt.Fprint(w, "[]")
		}
	}}, basePolicy+"profiles: {default: {engine_api: {networks: own, subnets: [198.51.100.0/24]}}}\n")
	address := d.listen(Caller{Name: "n", Tenant: standInTenant})
	const honest = `,"IPAM":{"Config":[{"Subnet":"198.51.100.0/28","Gateway":"198.51.100.1"}]}`
	for what, ok := range map[string]bool{
		honest: true, honest + `,"EnableIPv6":true`: false, honest + `,"Internal":true`: false, `,"IPAM":{"Config":[{"Subnet":"198.51.100.0/24"}]}`: false,
		strings.Replace(honest, "100.1\"", "100.9\"", 1): false, strings.Replace(honest, "}]", `,"IPRange":"198.51.100.0/29"}]`, 1): false, strings.Replace(honest, "]", `,{"Subnet":"fd00::/64"}]`, 1): false,
		strings.Replace(honest, "]", `,{"Subnet":"198.51.100.16/28"}]`, 1): false, `,"IPAM":{"Config":[{"Subnet":"fd00::/64"}]}`: false,
		honest + `,"Driver":"macvlan"`: false, honest + `,"Labels":null`: false, honest + `,"Options":{"parent":"eth0"}`: false,
	} {
		lie, removed = what, false
		status, told := say(t, address, http.MethodPost, "/v1.41/networks/create", `{"Name":"n","IPAM":{"Config":[{"Subnet":"198.51.100.0/28","Gateway":"198.51.100.1"}]}}`)
		if (status == http.StatusCreated) != ok || removed == ok {
			t.Errorf("%s: %d %s, removed: %v", what, status, told, removed)
		}
	}
}

// TestSubnets makes networks with addresses of the policy's pools.
func TestSubnets(t *testing.T) {
	d, direct := engineDoor(t, relationRules)
	ctx := t.Context()
	c, other := d.client("mine"), d.client("other")
	ipam := func(list ...network.IPAMConfig) network.CreateOptions {
		return network.CreateOptions{IPAM: &network.IPAM{Driver: "default", Config: list}}
	}
	made := check.Value(c.NetworkCreate(ctx, "subnet-one", ipam(network.IPAMConfig{Subnet: "10.213.1.0/24", IPRange: "10.213.1.128/25", Gateway: "10.213.1.254"})))(t)
	n := check.Value(direct.NetworkInspect(ctx, made.ID, network.InspectOptions{}))(t)
	if len(n.IPAM.Config) != 1 || n.IPAM.Config[0].Subnet != "10.213.1.0/24" || n.IPAM.Config[0].IPRange != "10.213.1.128/25" || n.IPAM.Config[0].Gateway != "10.213.1.254" || n.EnableIPv6 {
		t.Errorf("network: %+v", n)
	}
	at := func(address string) error {
		ct, err := c.ContainerCreate(ctx, sleeper, &container.HostConfig{NetworkMode: "subnet-one"}, &network.NetworkingConfig{EndpointsConfig: map[string]*network.EndpointSettings{
			"subnet-one": {IPAMConfig: &network.EndpointIPAMConfig{IPv4Address: address}},
		}}, nil, "")
		if err != nil {
			return err
		}
		defer func() { report(t, c.ContainerRemove(context.Background(), ct.ID, forced)) }()
		return startIt(t, c, ct.ID)
	}
	must(t, at("10.213.1.7"))
	for _, address := range []string{"10.213.1.254", "10.213.2.7", "192.0.2.1"} { // the gateway, and outside
		if err := at(address); err == nil {
			t.Errorf("a container has %s", address)
		}
	}
	if _, err := other.NetworkCreate(ctx, "subnet-theirs", ipam(network.IPAMConfig{Subnet: "10.213.1.128/25"})); err == nil {
		t.Error("another tenant's network has addresses of one that is there")
	}
	for name, o := range map[string]network.CreateOptions{
		"no pool": ipam(network.IPAMConfig{Subnet: "10.214.0.0/24"}), "gateway elsewhere": ipam(network.IPAMConfig{Subnet: "10.213.2.0/24", Gateway: "10.213.3.1"}),
		"reserved": ipam(network.IPAMConfig{Subnet: "10.213.2.0/24", AuxAddress: map[string]string{"x": "10.213.2.9"}}),
	} {
		if _, err := c.NetworkCreate(ctx, "subnet-bad", o); err == nil || !strings.Contains(err.Error(), "denied by policy") {
			t.Errorf("%s: %v", name, err)
		}
	}
	six, on := ipam(network.IPAMConfig{Subnet: "fd00:213::/64"}), true
	six.EnableIPv6 = &on
	v6, err := c.NetworkCreate(ctx, "subnet-six", six)
	if v := check.Value(direct.ServerVersion(ctx))(t); versionOf(v.APIVersion) < minIPv6 {
		deniedBy(t, err, "networks.subnets")
	} else if n, err := direct.NetworkInspect(ctx, v6.ID, network.InspectOptions{}); err != nil || !n.EnableIPv6 {
		t.Errorf("IPv6: %+v, %v", n, err)
	}
}

func versionOf(s string) int {
	_, minor, _ := strings.Cut(s, ".")
	n := 0
	for _, r := range minor {
		n = n*10 + int(r-'0')
	}
	return n
}

// TestHostSubnet refuses the addresses of the host's own interfaces, wherever a pool has them.
func TestHostSubnet(t *testing.T) {
	d, _ := engineDoor(t, "")
	c := &call{Proxy: d.Proxy, ctx: t.Context()}
	if err := checkSubnets(c, policy.NetworkSpec{Subnets: []policy.NetworkSubnet{{Subnet: "127.0.0.0/24"}}}); err == nil {
		t.Error("the loopback address")
	}
	report(t, checkSubnets(c, policy.NetworkSpec{Subnets: []policy.NetworkSubnet{{Subnet: "198.51.100.0/24"}}}))
}

// TestHostSettings has what a policy may switch on.
func TestHostSettings(t *testing.T) {
	d, direct := engineDoor(t, relationRules)
	c := d.client("mine")
	id := makeOne(t, c, &container.HostConfig{
		ExtraHosts: []string{"host.docker.internal:host-gateway"}, LogConfig: container.LogConfig{Type: "json-file", Config: map[string]string{"tag": "{{.ImageName}}/{{.Name}}", "max-size": "1m", "max-file": "2", "compress": "true"}},
		Resources: container.Resources{Ulimits: []*container.Ulimit{{Name: "memlock", Soft: 1 << 20, Hard: 8 << 20}}},
	}, "")
	must(t, startIt(t, c, id))
	h := inspect(t, direct, id).HostConfig
	if len(h.ExtraHosts) != 1 || h.LogConfig.Config["tag"] == "" || len(h.Ulimits) == 0 {
		t.Errorf("%+v", h)
	}
	if status, answer := say(t, "unix://"+d.dir+"/mine.sock", http.MethodPost, "/v1.41/containers/create", `{"Image":"`+testImage+`","HostConfig":{"LogConfig":{"Type":"json-file","Config":{"tag":"{{range .ContainerEnv}}{{.}}{{end}}"}}}}`); status != http.StatusForbidden {
		t.Errorf("%d %s", status, answer)
	}
}
