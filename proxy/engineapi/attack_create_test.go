package engineapi

import (
	"fmt"
	"strings"
)

// payload is one field of a create's body that must not get its way.
type payload struct {
	name  string
	path  string // "HostConfig.PidMode"
	value string // JSON
	// here says that the engine of these tests takes it and does harm; others are for
	// engines that are newer, or that have what it names.
	here bool
}

var payloads = []payload{
	{"privileged", "HostConfig.Privileged", `true`, true},
	{"capability", "HostConfig.CapAdd", `["SYS_ADMIN"]`, true},
	{"capability in small", "HostConfig.CapAdd", `["cap_sys_admin"]`, true},
	{"capability all", "HostConfig.CapAdd", `["ALL"]`, true},
	{"capability all in small", "HostConfig.CapAdd", `["all"]`, true},
	{"capability as text", "HostConfig.CapAdd", `"SYS_PTRACE"`, true},
	{"capabilities of one version", "HostConfig.Capabilities", `["CAP_SYS_ADMIN"]`, false},
	{"seccomp off", "HostConfig.SecurityOpt", `["seccomp=unconfined"]`, true},
	{"seccomp off with a colon", "HostConfig.SecurityOpt", `["seccomp:unconfined"]`, true},
	{"seccomp of one's own", "HostConfig.SecurityOpt", `["seccomp={\"defaultAction\":\"SCMP_ACT_ALLOW\"}"]`, true},
	{"apparmor off", "HostConfig.SecurityOpt", `["apparmor=unconfined"]`, true},
	{"label off", "HostConfig.SecurityOpt", `["label=disable"]`, true},
	{"systempaths off", "HostConfig.SecurityOpt", `["systempaths=unconfined"]`, false},
	{"new privileges at last", "HostConfig.SecurityOpt", `["no-new-privileges:true","no-new-privileges:false"]`, true},
	{"masked paths, none", "HostConfig.MaskedPaths", `[]`, true},
	{"masked paths, a dummy", "HostConfig.MaskedPaths", `["/x"]`, true},
	{"read-only paths, none", "HostConfig.ReadonlyPaths", `[]`, true},
	{"pid host", "HostConfig.PidMode", `"host"`, true},
	{"pid of another", "HostConfig.PidMode", `"container:{victim12}"`, true},
	{"ipc host", "HostConfig.IpcMode", `"host"`, true},
	{"ipc shareable", "HostConfig.IpcMode", `"shareable"`, true},
	{"ipc of another", "HostConfig.IpcMode", `"container:{victim4}"`, true},
	{"uts host", "HostConfig.UTSMode", `"host"`, true},
	{"cgroups host", "HostConfig.CgroupnsMode", `"host"`, false},
	{"users host", "HostConfig.UsernsMode", `"host"`, true},
	{"cgroup of another", "HostConfig.Cgroup", `"container:{victim}"`, false},
	{"cgroup parent", "HostConfig.CgroupParent", `"../../x"`, true},
	{"device", "HostConfig.Devices", `[{"PathOnHost":"/dev","PathInContainer":"/x","CgroupPermissions":"rwm"}]`, true},
	{"device rule", "HostConfig.DeviceCgroupRules", `["a *:* rwm"]`, true},
	{"device request", "HostConfig.DeviceRequests", `[{"Driver":"nvidia","Count":-1,"Capabilities":[["gpu"]]}]`, true},
	{"bind of the root", "HostConfig.Binds", `["/:/x"]`, true},
	{"bind read-only", "HostConfig.Binds", `["/etc:/x:ro"]`, true},
	{"bind of the socket", "HostConfig.Binds", `["/run/docker.sock:/x"]`, true},
	{"bind of the socket's other name", "HostConfig.Binds", `["/var/run/docker.sock:/x"]`, true},
	{"bind by proc", "HostConfig.Binds", `["/proc/self/root/etc:/x"]`, true},
	{"bind beside", "HostConfig.Binds", `["{outside}:/x"]`, true},
	{"bind with dots", "HostConfig.Binds", `["{dir}/share/../../outside:/x"]`, true},
	{"bind of a link", "HostConfig.Binds", `["{dir}/link:/x"]`, true},
	{"bind below a link", "HostConfig.Binds", `["{dir}/root/etc:/x"]`, true},
	{"bind of a link further down", "HostConfig.Binds", `["{dir}/share/up:/x"]`, true},
	{"bind of a loop", "HostConfig.Binds", `["{dir}/loop:/x"]`, false},
	{"bind of what isn't there", "HostConfig.Binds", `["{dir}/new:/x"]`, true},
	{"bind of a file", "HostConfig.Binds", `["{dir}/file:/x"]`, true},
	{"bind of a linked file by a mount", "HostConfig.Mounts", `[{"Type":"bind","Source":"{dir}/file","Target":"/x","ReadOnly":true}]`, true},
	{"bind of a file outside", "HostConfig.Binds", `["{outside}/linked:/x:ro"]`, true},
	{"bind of a file of the host", "HostConfig.Binds", `["/etc/passwd:/x:ro"]`, true},
	{"bind in a bind by a link", "HostConfig.Binds", `["{dir}/share:/x","{dir}/share:/x/up/y"]`, false},
	{"bind over the hosts file", "HostConfig.Binds", `["{dir}/share:/etc/hosts:ro"]`, false},
	{"bind shared", "HostConfig.Binds", `["{dir}/share:/x:rshared"]`, false},
	{"bind by a mount", "HostConfig.Mounts", `[{"Type":"bind","Source":"/etc","Target":"/x","ReadOnly":true}]`, true},
	{"bind by a mount of a link", "HostConfig.Mounts", `[{"Type":"bind","Source":"{dir}/link","Target":"/x"}]`, true},
	{"bind that propagates", "HostConfig.Mounts", `[{"Type":"bind","Source":"{dir}/share","Target":"/x","BindOptions":{"Propagation":"rshared"}}]`, true},
	{"bind that makes its source", "HostConfig.Mounts", `[{"Type":"bind","Source":"{dir}/new","Target":"/x","BindOptions":{"CreateMountpoint":true}}]`, false},
	{"volume of a bind", "HostConfig.Mounts", `[{"Type":"volume","Target":"/x","VolumeOptions":{"DriverConfig":{"Name":"local","Options":{"type":"none","o":"bind","device":"/etc"}}}}]`, true},
	{"volume of a bind without a driver", "HostConfig.Mounts", `[{"Type":"volume","Source":"attack-n","Target":"/x","VolumeOptions":{"DriverConfig":{"Options":{"type":"none","o":"rbind,ro","device":"/etc"}}}}]`, true},
	{"volume of an overlay", "HostConfig.Mounts", `[{"Type":"volume","Source":"attack-n","Target":"/x","VolumeOptions":{"DriverConfig":{"Name":"local","Options":{"type":"overlay","device":"overlay","o":"lowerdir=/etc:/root"}}}}]`, true},
	{"volume of proc", "HostConfig.Mounts", `[{"Type":"volume","Source":"attack-n","Target":"/x","VolumeOptions":{"DriverConfig":{"Name":"local","Options":{"type":"proc","device":"proc"}}}}]`, true},
	{"volume of cgroups", "HostConfig.Mounts", `[{"Type":"volume","Source":"attack-n","Target":"/x","VolumeOptions":{"DriverConfig":{"Name":"local","Options":{"type":"cgroup","device":"cgroup"}}}}]`, true},
	{"volume of a large tmpfs", "HostConfig.Mounts", `[{"Type":"volume","Source":"attack-n","Target":"/x","VolumeOptions":{"DriverConfig":{"Name":"local","Options":{"type":"tmpfs","device":"tmpfs","o":"size=100g"}}}}]`, true},
	{"volume of another's server", "HostConfig.Mounts", `[{"Type":"volume","Source":"attack-n","Target":"/x","VolumeOptions":{"DriverConfig":{"Name":"local","Options":{"type":"nfs","o":"addr=192.0.2.1","device":":/"}}}}]`, true},
	{"volume's part", "HostConfig.Mounts", `[{"Type":"volume","Source":"attack-own-vol","Target":"/x","VolumeOptions":{"Subpath":"../../.."}}]`, false},
	{"another's volume", "HostConfig.Binds", `["attack-v-vol:/x"]`, true},
	{"another's volume by a mount", "HostConfig.Mounts", `[{"Type":"volume","Source":"attack-v-vol","Target":"/x"}]`, true},
	{"volumes of another", "HostConfig.VolumesFrom", `["{victim12}:ro"]`, true},
	{"volume plug-in", "HostConfig.VolumeDriver", `"other"`, true},
	{"image mount", "HostConfig.Mounts", `[{"Type":"image","Source":"attack-v.local/image:1","Target":"/x"}]`, false},
	{"cluster mount", "HostConfig.Mounts", `[{"Type":"cluster","Source":"x","Target":"/x"}]`, false},
	{"pipe mount", "HostConfig.Mounts", `[{"Type":"npipe","Source":"x","Target":"/x"}]`, false},
	{"mount type in capitals", "HostConfig.Mounts", `[{"Type":"BIND","Source":"/etc","Target":"/x"}]`, false},
	{"tmpfs with devices", "HostConfig.Tmpfs", `{"/x":"dev,suid,exec"}`, true},
	{"tmpfs without end", "HostConfig.Tmpfs", `{"/x":"size=100g"}`, true},
	{"tmpfs of half the memory", "HostConfig.Tmpfs", `{"/x":"size=50%"}`, true},
	{"tmpfs with two sizes", "HostConfig.Tmpfs", `{"/x":"size=1m,size=0"}`, true},
	{"tmpfs over proc", "HostConfig.Tmpfs", `{"/proc/x":""}`, true},
	{"tmpfs over sys by dots", "HostConfig.Tmpfs", `{"/x/../sys/x":""}`, false},
	{"network host", "HostConfig.NetworkMode", `"host"`, true},
	{"network of another", "HostConfig.NetworkMode", `"container:{victim12}"`, true},
	{"network of the operator's", "HostConfig.NetworkMode", `"container:{operator}"`, true},
	{"another's network by name", "HostConfig.NetworkMode", `"attack-v-net"`, true},
	{"another's network by ID", "HostConfig.NetworkMode", `"{victimnet}"`, true},
	{"another's network by a prefix", "HostConfig.NetworkMode", `"{victimnet12}"`, true},
	{"endpoint of the host", "NetworkingConfig.EndpointsConfig", `{"host":{}}`, true},
	{"endpoint of another's network", "NetworkingConfig.EndpointsConfig", `{"attack-v-net":{}}`, true},
	{"endpoint by a prefix", "NetworkingConfig.EndpointsConfig", `{"{victimnet12}":{"Aliases":["x"]}}`, true},
	{"two endpoints", "NetworkingConfig.EndpointsConfig", `{"attack-own-net":{},"attack-v-net":{}}`, false},
	{"endpoint with a MAC", "NetworkingConfig.EndpointsConfig", `{"attack-own-net":{"MacAddress":"02:42:ac:11:00:09"}}`, false},
	{"endpoint with options", "NetworkingConfig.EndpointsConfig", `{"attack-own-net":{"DriverOpts":{"com.docker.network.endpoint.sysctls":"net.ipv4.conf.IFNAME.forwarding=1"}}}`, false},
	{"links", "HostConfig.Links", `["attack-v-one:db"]`, true},
	{"ports on every address", "HostConfig.PortBindings", `{"80/tcp":[{"HostIp":"0.0.0.0","HostPort":"18080"}]}`, true},
	{"low port", "HostConfig.PortBindings", `{"80/tcp":[{"HostIp":"127.0.0.1","HostPort":"22"}]}`, false},
	{"name server", "HostConfig.Dns", `["127.0.0.1"]`, true},
	{"the host's gateway", "HostConfig.ExtraHosts", `["x:host-gateway"]`, true},
	{"sysctl", "HostConfig.Sysctls", `{"kernel.core_pattern":"|/x"}`, true},
	{"runtime", "HostConfig.Runtime", `"io.containerd.runc.v1"`, false},
	{"storage", "HostConfig.StorageOpt", `{"size":"1T"}`, false},
	{"annotations", "HostConfig.Annotations", `{"run.oci.handler":"x"}`, false},
	{"isolation", "HostConfig.Isolation", `"process"`, false},
	{"log to a server", "HostConfig.LogConfig", `{"Type":"gelf","Config":{"gelf-address":"udp://192.0.2.1:1"}}`, true},
	{"log to fluentd", "HostConfig.LogConfig", `{"Type":"fluentd","Config":{"fluentd-address":"192.0.2.1:1","fluentd-async-connect":"true"}}`, true},
	{"log to syslog", "HostConfig.LogConfig", `{"Type":"syslog","Config":{"syslog-address":"tcp://192.0.2.1:1"}}`, true},
	{"log that tells variables", "HostConfig.LogConfig", `{"Type":"json-file","Config":{"env-regex":".*"}}`, true},
	{"log tag with code", "HostConfig.LogConfig", `{"Type":"json-file","Config":{"tag":"{{.ExtraAttributes nil}}"}}`, true},
	{"memory over the most", "HostConfig.Memory", `1099511627776`, true},
	{"no oom", "HostConfig.OomKillDisable", `true`, true},
	{"oom score", "HostConfig.OomScoreAdj", `-1000`, true},
	{"many files", "HostConfig.Ulimits", `[{"Name":"nofile","Soft":1048576,"Hard":1048576}]`, true},
	{"real time", "HostConfig.Ulimits", `[{"Name":"rtprio","Soft":99,"Hard":99}]`, true},
	{"shared memory", "HostConfig.ShmSize", `109951162777`, true},
	{"real-time runtime", "HostConfig.CpuRealtimeRuntime", `950000`, false},
	{"weight", "HostConfig.CpuShares", `262144`, true},
	{"restart", "HostConfig.RestartPolicy", `{"Name":"always"}`, true},
	{"denied variable", "Env", `["SECRET_A=1"]`, true},
	{"pinned variable", "Env", `["PINNED=no"]`, true},
	{"label of another's", "Labels", `{"berm.tenant":"victim"}`, false},
	{"label of the door's", "Labels", `{"berm.owner":"x"}`, false},
	{"label in capitals", "Labels", `{"BERM.TENANT":"victim"}`, false},
	{"another's image", "Image", `"attack-v.local/image:1"`, true},
	{"another's image by ID", "Image", `"{victimimage}"`, true},
	{"MAC", "MacAddress", `"02:42:ac:11:00:09"`, true},
}

// clamped are those that the policy answers with less than was asked for, or with what
// it has in its stead.
var clamped = map[string]bool{"memory over the most": true, "shared memory": true, "tmpfs without end": true, "many files": true, "pinned variable": true}

// nest gives a field at a path, as keys write it.
func nest(path, value string, key func(string) string) string {
	keys := strings.Split(path, ".")
	for i := len(keys) - 1; i > 0; i-- {
		value = "{" + quote(key(keys[i])) + ":" + value + "}"
	}
	return quote(key(keys[0])) + ":" + value
}

func quote(key string) string { return `"` + key + `"` }

func plainKey(s string) string { return s }

// folded is a key with a letter that only Unicode's folding takes for the one it stands for.
func folded(s string) string {
	if i := strings.IndexAny(s, "sS"); i >= 0 {
		return s[:i] + "\u017f" + s[i+1:]
	}
	if i := strings.IndexAny(s, "kK"); i >= 0 {
		return s[:i] + "\u212a" + s[i+1:]
	}
	return s
}

func escaped(s string) string { return fmt.Sprintf(`\u%04x%s`, s[0], s[1:]) }

// spellings are the ways to write a field that engines take for it. What a door may take
// for it too is the plain and the escaped one, so that these only have to be harmless.
func spellings(p payload) map[string]string {
	first, last := p.path, ""
	if i := strings.IndexByte(p.path, '.'); i >= 0 {
		first, last = p.path[:i], p.path[i+1:]
	}
	plain := nest(p.path, p.value, plainKey)
	all := map[string]string{
		"plain":         plain,
		"lower case":    nest(p.path, p.value, strings.ToLower),
		"upper case":    nest(p.path, p.value, strings.ToUpper),
		"escaped":       nest(p.path, p.value, escaped),
		"after null":    nest(p.path, "null", plainKey) + "," + plain,
		"other case on": nest(p.path, "null", plainKey) + "," + nest(p.path, p.value, strings.ToLower),
	}
	if f := nest(p.path, p.value, folded); f != plain {
		all["folded"] = f
	}
	if last != "" {
		all["merged"] = quote(first) + ":{}," + plain
		all["field twice"] = fmt.Sprintf(`"%s":{"%s":null,"%s":%s}`, first, last, last, p.value)
	}
	if first == "HostConfig" {
		all["top level"] = nest(last, p.value, plainKey)
		all["top level beside null"] = `"HostConfig":null,` + nest(last, p.value, plainKey)
	}
	return all
}

// attackCreate asks for containers that no policy allows, in every spelling.
func attackCreate(s *fixture) {
	var vectors []vector
	for i, p := range payloads {
		for how, fields := range spellings(p) {
			body := `{"Image":"` + testImage + `",` + fields + `}`
			if p.path == "Image" {
				body = `{` + fields + `}`
			}
			v := vector{name: p.name + "/" + how, request: request("POST", "/v1.41/containers/create", "application/json", body)}
			v.neutral = clamped[p.name] && (how == "plain" || how == "escaped")
			v.bites = p.here && (how == "plain" || i%5 == 0 && (how == "folded" || how == "escaped" || how == "top level"))
			vectors = append(vectors, v)
		}
	}
	s.attack(vectors)
}
