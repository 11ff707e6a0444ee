package engineapi

import (
	"archive/tar"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
)

// post is a request with a JSON body.
func post(path, body string) string {
	return request("POST", "/v1.41"+path, "application/json", body)
}

// attackObjects asks for networks, volumes, execs, images and changes that no policy allows.
func attackObjects(s *fixture) {
	var vectors []vector
	add := func(name, request string, flags ...string) {
		v := vector{name: name, request: request}
		for _, flag := range flags {
			v.bites, v.neutral = v.bites || flag == "bites", v.neutral || flag == "neutral"
		}
		vectors = append(vectors, v)
	}
	for name, fields := range networkAttacks {
		v := strings.TrimPrefix(name, "!")
		add("network/"+v, post("/networks/create", `{"Name":"attack-n",`+fields+`}`))
		vectors[len(vectors)-1].bites = v == name
	}
	for _, name := range []string{"host", "bridge", "none", "default", "ingress", "docker_gwbridge", "a/b", "", "{victimnet12}", "{victimnet}", strings.Repeat("a", 64), "fixture v"} {
		add("network/named "+name, post("/networks/create", `{"Name":"`+name+`","Internal":true}`))
	}
	add("network/named aaaaaaaaaaaa", post("/networks/create", `{"Name":"aaaaaaaaaaaa","Internal":true}`), "neutral")
	add("network/second document", post("/networks/create", `{"Name":"attack-n","Internal":true}{}`))
	add("network/with a way out", post("/networks/create", `{"Name":"attack-n","Internal":false}`), "neutral", "bites")
	for name, fields := range volumeAttacks {
		v := strings.TrimPrefix(name, "!")
		add("volume/"+v, post("/volumes/create", `{"Name":"attack-n",`+fields+`}`))
		vectors[len(vectors)-1].bites = v == name
	}
	add("volume/another's name", post("/volumes/create", `{"Name":"attack-v-vol"}`))
	add("volume/a path", post("/volumes/create", `{"Name":"../../x"}`))
	for name, fields := range map[string]string{
		"privileged": `"Privileged":true`, "privileged in small": `"privileged":true`, "privileged escaped": `"\u0050rivileged":true`,
		"privileged folded": "\"Privileged\":false,\"privileged\":true", "privileged twice": `"Privileged":false,"Privileged":true`,
		"denied variable": `"Env":["SECRET_A=1"]`, "unknown": `"CapAdd":["ALL"]`,
	} {
		add("exec/"+name, post("/containers/{own}/exec", `{"Cmd":["true"],`+fields+`}`))
	}
	for name, fields := range map[string]string{
		"memory": `"Memory":1099511627776,"MemorySwap":-1`, "no pids": `"PidsLimit":-1`, "pids of 0": `"PidsLimit":0`,
		"cpus": `"NanoCpus":2000000000`, "quota of none": `"CpuQuota":-1`, "shares": `"CpuShares":262144`,
	} {
		add("update/"+name, post("/containers/{own}/update", `{`+fields+`}`), "neutral")
		add("update/"+name+" in small", post("/containers/{own}/update", `{`+strings.ToLower(fields)+`}`))
	}
	for name, fields := range map[string]string{
		"restart": `"RestartPolicy":{"Name":"always"}`, "device rule": `"DeviceCgroupRules":["a *:* rwm"]`, "device": `"Devices":[{"PathOnHost":"/dev"}]`,
		"cgroup parent": `"CgroupParent":"/x"`, "weight": `"BlkioWeight":1000`, "no oom": `"OomKillDisable":true`, "not of an update": `"Privileged":true`,
		"real time": `"CpuRealtimeRuntime":950000`, "files": `"Ulimits":[{"Name":"nofile","Soft":1048576,"Hard":1048576}]`, "swap": `"memoryswap":-1`,
	} {
		add("update/"+name, post("/containers/{own}/update", `{`+fields+`}`))
	}
	for _, ref := range []string{"bridge", "host", "none", "attack-v-net", "{victimnet}", "{victimnet12}"} {
		add("connect/"+ref, post("/networks/"+ref+"/connect", `{"Container":"attack-own"}`))
		add("connect another's/"+ref, post("/networks/"+ref+"/connect", `{"Container":"attack-v-one"}`))
		add("disconnect another's/"+ref, post("/networks/"+ref+"/disconnect", `{"Container":"{victim12}","Force":true}`))
	}
	add("connect another's to one's own", post("/networks/attack-own-net/connect", `{"Container":"attack-v-one"}`))
	add("connect with a MAC", post("/networks/attack-own-net/connect", `{"Container":"attack-own","EndpointConfig":{"MacAddress":"02:42:ac:11:00:09"}}`))
	add("connect with options", post("/networks/attack-own-net/connect", `{"Container":"attack-own","EndpointConfig":{"DriverOpts":{"a":"b"}}}`))
	add("connect with another's links", post("/networks/attack-own-net/connect", `{"Container":"attack-own","EndpointConfig":{"Links":["attack-v-one:x"]}}`))
	for name, fields := range map[string]string{
		"by another's name": `"Aliases":["pypi.org"]`, "by a short name": `"Aliases":["db"]`, "by an address": `"IPAMConfig":{"IPv4Address":"172.31.0.9"}`, "with links": `"Links":["attack-own:db"]`,
	} {
		add("connect with others "+name, post("/networks/attack-shared/connect", `{"Container":"attack-own","EndpointConfig":{`+fields+`}}`))
		add("join others "+name, post("/containers/create", `{"Image":"`+testImage+`","NetworkingConfig":{"EndpointsConfig":{"attack-shared":{`+fields+`}}}}`))
	}
	add("connect with others", post("/networks/attack-shared/connect", `{"Container":"attack-own"}`), "neutral")
	add("join others as a host", post("/containers/create?name=pypi.org", `{"Image":"`+testImage+`","HostConfig":{"NetworkMode":"attack-shared"}}`))
	steps := func(name string, act func(s *fixture, address string) (refused bool)) {
		vectors = append(vectors, vector{name: name, act: func(s *fixture, address string) bool {
			refused := act(s, address)
			for _, f := range s.breaches() {
				s.Error(f)
			}
			return refused
		}})
	}
	steps("rename among others", func(s *fixture, address string) bool {
		r := s.ask(address, "POST", "/v1.41/networks/attack-shared/connect", "application/json", `{"Container":"attack-own"}`)
		if r.status != http.StatusOK {
			s.Errorf("connect: %+v", r)
		}
		return s.ask(address, "POST", "/v1.41/containers/attack-own/rename?name=pypi.org", "", "").status >= 300
	})
	steps("connect among others by a name of a host", func(s *fixture, address string) bool {
		if r := s.ask(address, "POST", "/v1.41/containers/attack-own/rename?name=pypi.org", "", ""); r.status != http.StatusNoContent {
			return true
		}
		return s.ask(address, "POST", "/v1.41/networks/attack-shared/connect", "application/json", `{"Container":"{own}"}`).status >= 300
	})
	for _, name := range []string{"attack-v-one", strings.Repeat("a", 64), "{victim12}", "{victim}", "a/b", ""} {
		add("rename/"+name, post("/containers/{own}/rename?name="+name, ""))
		add("named/"+name, post("/containers/create?name="+name, `{"Image":"`+testImage+`"}`), map[bool]string{true: "neutral"}[name == ""])
	}
	add("rename/aaaaaaaaaaaa", post("/containers/{own}/rename?name=aaaaaaaaaaaa", ""), "neutral")
	for name, query := range imageAttacks {
		add("image/"+name, post(query, ""))
	}
	s.attack(vectors)
}

// networkAttacks are fields of a network that no policy allows; those with a "!" do no
// harm on the engine of these tests.
var networkAttacks = map[string]string{
	"!macvlan":          `"Driver":"macvlan","Options":{"parent":"lo"}`,
	"!ipvlan":           `"Driver":"ipvlan","Options":{"parent":"eth0","ipvlan_mode":"l2"}`,
	"!host":             `"Driver":"host"`,
	"!overlay":          `"Driver":"overlay"`,
	"!plug-in":          `"Driver":"weave"`,
	"!swarm":            `"Scope":"swarm"`,
	"!ingress":          `"Ingress":true`,
	"!IPAM plug-in":     `"IPAM":{"Driver":"x"}`,
	"bridge's name":     `"Internal":true,"Options":{"com.docker.network.bridge.name":"fixture0"}`,
	"every address":     `"Internal":true,"Options":{"com.docker.network.bridge.host_binding_ipv4":"0.0.0.0"}`,
	"container's name":  `"Internal":true,"Options":{"com.docker.network.container_iface_prefix":"lo"}`,
	"addresses":         `"Internal":true,"IPAM":{"Config":[{"Subnet":"203.0.113.0/24","Gateway":"203.0.113.1"}]}`,
	"configuration":     `"ConfigOnly":true`,
	"!another's config": `"ConfigFrom":{"Network":"attack-v-net"}`,
	"!owner":            `"Internal":true,"Labels":{"berm.owner":"x"}`,
	"in small":          `"options":{"com.docker.network.bridge.name":"fixture1"}`,
	"escaped":           `"\u004fptions":{"com.docker.network.bridge.name":"fixture2"}`,
	"folded":            "\"Option\u017f\":{\"com.docker.network.bridge.name\":\"fixture3\"}",
	"twice":             `"Options":{},"Options":{"com.docker.network.bridge.name":"fixture4"}`,
	"!IPv6":             `"EnableIPv6":true`,
	"!owner's tenant":   `"Internal":true,"Labels":{"Berm.Tenant":"victim"}`,
	"!unknown":          `"Internal":true,"Peers":[]`,
}

// volumeAttacks are the same of volumes.
var volumeAttacks = map[string]string{
	"bind":            `"DriverOpts":{"type":"none","o":"bind","device":"/etc"}`,
	"bind, read-only": `"Driver":"local","DriverOpts":{"type":"none","o":"rbind,ro","device":"/"}`,
	"in small":        `"driveropts":{"type":"none","o":"bind","device":"/etc"}`,
	"escaped":         `"\u0044riverOpts":{"type":"none","o":"bind","device":"/etc"}`,
	"folded":          "\"DriverOpt\u017f\":{\"type\":\"none\",\"o\":\"bind\",\"device\":\"/etc\"}",
	"twice":           `"DriverOpts":{"o":"bind"},"DriverOpts":{"type":"none","device":"/etc"}`,
	"overlay":         `"DriverOpts":{"type":"overlay","device":"overlay","o":"lowerdir=/etc:/root"}`,
	"proc":            `"DriverOpts":{"type":"proc","device":"proc"}`,
	"cgroup":          `"DriverOpts":{"type":"cgroup","device":"cgroup"}`,
	"sysfs":           `"DriverOpts":{"type":"sysfs","device":"sysfs"}`,
	"large tmpfs":     `"DriverOpts":{"type":"tmpfs","device":"tmpfs","o":"size=100g"}`,
	"server":          `"DriverOpts":{"type":"nfs","o":"addr=192.0.2.1","device":":/"}`,
	"!plug-in":        `"Driver":"rexray"`,
	"!cluster":        `"ClusterVolumeSpec":{"Group":"x"}`,
	"!owner":          `"Labels":{"berm.owner":"x"}`,
	"!owner's tenant": `"Labels":{"Berm.Tenant":"victim"}`,
}

var imageAttacks = map[string]string{
	"re-tag an allowed name":      "/images/{image}/tag?repo=berm.local/other&tag=latest",
	"re-tag the default":          "/images/{image}/tag?repo=berm.local/busybox&tag=latest",
	"tag another's":               "/images/attack-v.local/image:1/tag?repo=fixture.local/mine&tag=1",
	"tag another's by ID":         "/images/{victimimage}/tag?repo=fixture.local/mine&tag=1",
	"tag by digest":               "/images/{image}/tag?repo=fixture.local/mine@sha256:" + strings.Repeat("a", 64),
	"pull elsewhere":              "/images/create?fromImage=192.0.2.1:5000/x&tag=1",
	"pull elsewhere by tag":       "/images/create?fromImage=berm.local/x&tag=1@192.0.2.1",
	"import":                      "/images/create?fromSrc=http://192.0.2.1/x&repo=berm.local/busybox",
	"import a body":               "/images/create?fromSrc=-&repo=berm.local/busybox",
	"import beside a pull":        "/images/create?fromImage=berm.local/busybox&fromSrc=-",
	"load":                        "/images/load",
	"push":                        "/images/{image}/push",
	"search":                      "/images/search?term=x",
	"commit another's":            "/commit?container=attack-v-one&repo=fixture.local/mine",
	"commit another's by ID":      "/commit?container={victim12}",
	"commit the operator's":       "/commit?container={operator}&repo=fixture.local/mine",
	"commit to an allowed name":   "/commit?container={own}&repo=berm.local/busybox",
	"commit with labels":          "/commit?container={own}&changes=" + url.QueryEscape("LABEL berm.tenant=victim"),
	"commit with instructions":    "/commit?container={own}&changes=" + url.QueryEscape("ONBUILD ADD http://192.0.2.1/x /"),
	"build from an address":       "/build?remote=http://192.0.2.1/x.tar",
	"build from a repository":     "/build?remote=git://192.0.2.1/x",
	"build in a session":          "/build?session=x&version=2",
	"build on the host's network": "/build?networkmode=host",
}

// attackBuild has the engine build what it mustn't.
func attackBuild(s *fixture) {
	var vectors []vector
	build := func(name, query, dockerfile string) {
		vectors = append(vectors, vector{name: name, neutral: true, act: func(s *fixture, address string) bool {
			asked := s.expand(request("POST", "/v1.41/build?"+query, "application/x-tar", string(tarOf(s, "Dockerfile", s.words.Replace(dockerfile)))))
			r := s.say(address, asked)
			for _, f := range s.tells(asked, r) {
				s.Error(f)
			}
			// Of labels those count that the door adds, which come last.
			if r.status < 300 && strings.Contains(r.body, "Successfully built") && name != "label by variable" {
				s.Errorf("it was built: %s", r.body)
			}
			return true
		}})
	}
	from := "FROM " + testImage + "\n"
	for name, text := range map[string]string{
		"of elsewhere": "FROM 192.0.2.1/x\n", "of another's": "FROM attack-v.local/image:1\n", "of another's by ID": "FROM {victimimage}\n", "of another's by variable": "ARG A=attack-v.local/image:1\nFROM $A\n",
		"copy from another's": from + "COPY --from=attack-v.local/image:1 / /\n", "copy from elsewhere": from + "COPY --from=192.0.2.1/x / /\n",
		"add an address": from + "ADD http://192.0.2.1/x /\n", "add a quoted address": from + "ADD [\"http:\\u002f/192.0.2.1/x\", \"/\"]\n", "add by a variable": from + "ENV A=http://192.0.2.1\nADD $A /\n",
		"add a repository": from + "ADD git@192.0.2.1:x /\n", "escape": "# escape=`\n" + from + "LABEL a=b `\nberm.owner=x\n",
		"label": from + "LABEL berm.tenant=victim\n", "label over lines": from + "LABEL a=b \\\n# x\nberm.tenant=victim\n", "label by variable": from + "ARG A=berm\nLABEL ${A}.tenant=victim\n",
		"mount": from + "RUN --mount=type=bind,from=attack-v.local/image:1,target=/x cat /x\n", "host's network": from + "RUN --network=host true\n", "insecure": from + "RUN --security=insecure true\n",
		"later": from + "ONBUILD ADD http://192.0.2.1/x /\n", "here-document": from + "COPY <<EOF /x\nx\nEOF\n", "unknown": from + "INCLUDE x\n",
	} {
		build(name, "", text)
	}
	for name, query := range map[string]string{
		"network": "networkmode=container:{victim}", "named network": "networkmode=attack-v-net", "allowed name": "t=berm.local/busybox:latest", "name of nobody's": "t=elsewhere.local/x", "hosts": "extrahosts=x:192.0.2.1", "cgroup": "cgroupparent=/x",
		"options": "securityopt=seccomp%3Dunconfined", "labels": "labels=" + url.QueryEscape(`{"berm.tenant":"victim"}`), "cache": "cachefrom=" + url.QueryEscape(`["attack-v.local/image:1"]`),
		"dockerfile": "dockerfile=../../etc/passwd", "outputs": "outputs=" + url.QueryEscape(`[{"type":"local"}]`), "buildkit": "version=2", "squash": "squash=1", "twice": "t=fixture.local/a&t=berm.local/busybox",
	} {
		build("query "+name, query, from+"RUN true\n")
	}
	dockerfile := tar.Header{Name: "Dockerfile", Typeflag: tar.TypeReg}
	for name, body := range map[string][]byte{
		"Dockerfile is a link": tarOf(s, "Dockerfile", "->"+s.outside+"/secret"), "device": written(s, dockerfile, tar.Header{Name: "sda", Typeflag: tar.TypeBlock, Devmajor: 8}),
		"path that leads out": written(s, dockerfile, tar.Header{Name: "../x", Typeflag: tar.TypeDir}), "no Dockerfile": tarOf(s, "other", from),
	} {
		vectors = append(vectors, vector{name: name, act: func(s *fixture, address string) bool {
			r := s.ask(address, "POST", "/v1.41/build", "application/x-tar", string(body))
			for _, f := range s.tells("", r) {
				s.Error(f)
			}
			return r.status >= 300 || !strings.Contains(r.body, "Successfully built")
		}})
	}
	s.attack(vectors)
}

// attackFiles uploads archives that leave the container, and what isn't plain.
func attackFiles(s *fixture) {
	var vectors []vector
	put := func(name, query string, body []byte, neutral bool) {
		vectors = append(vectors, vector{name: name, neutral: neutral, request: request("PUT", "/v1.41/containers/{own}/archive?"+query, "application/x-tar", string(body))})
	}
	put("dots", "path=/v", tarOf(s, "../../../../../../outside", "x"), true)
	put("link", "path=/v", tarOf(s, "x", "->"+s.outside), true)
	put("through the link", "path=/v/x", tarOf(s, "secret", "changed"), true)
	put("path with dots", "path=/v/../../../../..", tarOf(s, "x", "x"), true)
	put("gzip", "path=/v", []byte("\x1f\x8b\x08"+strings.Repeat("x", 600)), false)
	put("bzip2", "path=/v", []byte("BZh9"+strings.Repeat("x", 600)), false)
	put("xz", "path=/v", []byte("\xfd7zXZ\x00"+strings.Repeat("x", 600)), false)
	put("zstd", "path=/v", []byte("\x28\xb5\x2f\xfd"+strings.Repeat("x", 600)), false)
	put("nothing", "path=/v", nil, false)
	put("no path", "", tarOf(s, "x", "x"), false)
	put("two paths", "path=/v&path=/", tarOf(s, "x", "x"), true) // the first counts, to the engine, too
	for _, path := range []string{"/v/x/secret", "/proc/1/environ", "/v/../../../../.." + s.outside + "/secret"} {
		vectors = append(vectors, vector{name: "get " + path, neutral: true, request: request("GET", "/v1.41/containers/{own}/archive?path="+path, "", "")})
	}
	s.attack(vectors)
}

// attackSwap exchanges a directory on the host between the look at it and its use.
func attackSwap(s *fixture) {
	swap := func(made func(dir string)) func(*fixture, string) bool {
		return func(s *fixture, address string) bool {
			dir := s.dir + "/swap"
			must(s, os.MkdirAll(dir, 0o755))
			defer func() { must(s, os.RemoveAll(s.dir+"/swap")); must(s, os.RemoveAll(s.dir+"/away")) }()
			r := s.ask(address, "POST", "/v1.41/containers/create?name=attack-swap", "application/json", `{"Image":"`+testImage+`","Cmd":["sleep","1000"],"HostConfig":{"Mounts":[{"Type":"bind","Source":"{dir}/swap","Target":"/x"}]}}`)
			if r.status != http.StatusCreated {
				s.Fatalf("create: %+v", r)
			}
			made(dir)
			r = s.ask(address, "POST", "/v1.41/containers/attack-swap/start", "", "")
			ct := s.inspect("attack-swap")
			if ct.State.Running && !s.bounds.leadsInside(ct.State.Pid, "/x") {
				s.Errorf("it runs with what the bind leads to now")
			}
			must(s, s.direct.ContainerRemove(s.Context(), ct.ID, forced))
			return r.status >= 300
		}
	}
	moved := func(dir string) { must(s, os.Rename(dir, s.dir+"/away")) }
	s.attack([]vector{
		{name: "a link", act: swap(func(dir string) { moved(dir); must(s, os.Symlink(s.outside, dir)) })},
		{name: "a link to the root", act: swap(func(dir string) { moved(dir); must(s, os.Symlink("/", dir)) })},
		{name: "nothing", act: swap(moved)},
		{name: "a file", act: swap(func(dir string) { moved(dir); must(s, os.WriteFile(dir, nil, 0o600)) })},
	})
	// The engine itself follows the link, and so the attack would be seen.
	dir := s.dir + "/swap"
	must(s, os.Mkdir(dir, 0o755))
	defer os.RemoveAll(dir)
	r := s.ask(s.host, "POST", "/v1.41/containers/create?name=attack-swap", "application/json", `{"Image":"`+testImage+`","Cmd":["sleep","1000"],"HostConfig":{"Binds":["{dir}/swap:/x"]}}`)
	must(s, os.Remove(dir))
	must(s, os.Symlink(s.outside, dir))
	if r := s.ask(s.host, "POST", "/v1.41/containers/attack-swap/start", "", ""); r.status >= 300 {
		s.Fatalf("%+v", r)
	}
	ct := s.inspect("attack-swap")
	if s.bounds.leadsInside(ct.State.Pid, "/x") {
		s.Errorf("the engine doesn't follow the link: %s", fmt.Sprint(r))
	}
	must(s, s.direct.ContainerRemove(s.Context(), ct.ID, forced))
}
