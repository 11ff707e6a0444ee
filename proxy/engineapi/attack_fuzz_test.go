package engineapi

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	goruntime "runtime"
	"strings"
	"testing"
	"time"

	"github.com/docker/docker/api/types/container"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// dice draws from a fuzzer's bytes, and zeros when they are used up.
type dice struct{ data []byte }

func (d *dice) below(n int) int {
	if len(d.data) == 0 {
		return 0
	}
	b := d.data[0]
	d.data = d.data[1:]
	return int(b) % n
}

// of draws one of a list, the first ones more often, which are those that may be had.
func (d *dice) of(list ...string) string { return list[min(d.below(len(list)), d.below(len(list)))] }

// some gives up to most texts of what f draws, with a comma between them.
func (d *dice) some(most int, f func() string) string {
	list := make([]string, d.below(most+1))
	for i := range list {
		list[i] = f()
	}
	return strings.Join(list, ",")
}

func jsonText(s string) string {
	b, _ := json.Marshal(s)
	return string(b)
}

var (
	grammarSources = []string{"{dir}/share", "{dir}/share/below", "attack-new", "attack-own-vol", "attack-v-vol", "", "/", "/etc", "{outside}", "{dir}/link", "{dir}/share/up", "{dir}/share/../../outside", "{dir}/file", "{dir}", "/proc/self/root", "/run/docker.sock", "../x", "{dir}/share/", "//{dir}/share"}
	grammarTargets = []string{"/x", "/y", "/x/z", "/", "/proc/x", "/sys", "/dev/shm", "x", "/x/../proc", "", "/x:y", "/etc/hosts"}
	grammarNumbers = []string{"0", "1", "-1", "67108864", "134217728", "9223372036854775807", "-9223372036854775808", "1e3", "0.5", "512", "99999999999999999999", "1024", "4096"}
	grammarWords   = []string{"", "private", "none", "attack-own-net", "default", "host", "shareable", "bridge", "container:attack-own", "container:{victim12}", "{ownnet}", "attack-v-net", "attack-shared", "HOST", "always", "no", "on-failure", "json-file", "syslog"}
)

// fields are what a body is made of: the paths of its fields, and what draws a value.
var fields = map[string]func(*dice) string{
	"HostConfig.Binds": func(d *dice) string {
		return "[" + d.some(3, func() string {
			return jsonText(d.of(grammarSources...) + d.of(":", ":", "::", "") + d.of(grammarTargets...) + d.of("", ":ro", ":rw", ":ro,rw", ":rshared", ":z", ":nocopy", ":RO", ":ro,", ":x"))
		}) + "]"
	},
	"HostConfig.Mounts": func(d *dice) string { return "[" + d.some(3, func() string { return drawMount(d) }) + "]" },
	"HostConfig.Tmpfs": func(d *dice) string {
		return "{" + d.some(2, func() string {
			return jsonText(d.of(grammarTargets...)) + ":" + jsonText(d.of("", "size=1m", "size=100g", "size=1k", "SIZE=1g", "size=0")+d.of("", ",exec", ",suid", ",dev", ",mode=1777", ",mode=4777", ",size=99g", ",size=50%", ",nr_inodes=0", ",uid=0", ", dev"))
		}) + "}"
	},
	"HostConfig.CapAdd":          drawList("CHOWN", "CAP_KILL", "net_bind_service", "SYS_ADMIN", "ALL", "all", "cap_sys_ptrace", "NET_RAW", " CHOWN", ""),
	"HostConfig.CapDrop":         drawList("ALL", "KILL", "none", "CAP_ALL", ""),
	"HostConfig.SecurityOpt":     drawList("no-new-privileges", "no-new-privileges:true", "no-new-privileges=false", "seccomp=unconfined", "seccomp:{}", "apparmor=unconfined", "label=disable", "systempaths=unconfined", "seccomp=builtin", ""),
	"HostConfig.MaskedPaths":     drawList("/x"),
	"HostConfig.ReadonlyPaths":   drawList("/x"),
	"HostConfig.GroupAdd":        drawList("0", "docker", "1000"),
	"HostConfig.Links":           drawList("attack-v-one:x"),
	"HostConfig.VolumesFrom":     drawList("attack-v-one", "attack-own"),
	"HostConfig.Dns":             drawList("127.0.0.1", "192.0.2.1"),
	"HostConfig.ExtraHosts":      drawList("x:host-gateway", "x:192.0.2.1"),
	"HostConfig.NetworkMode":     drawWord,
	"HostConfig.PidMode":         drawWord,
	"HostConfig.IpcMode":         drawWord,
	"HostConfig.UTSMode":         drawWord,
	"HostConfig.UsernsMode":      drawWord,
	"HostConfig.CgroupnsMode":    drawWord,
	"HostConfig.CgroupParent":    drawWord,
	"HostConfig.Runtime":         drawWord,
	"HostConfig.VolumeDriver":    drawWord,
	"HostConfig.Privileged":      drawFlag,
	"HostConfig.OomKillDisable":  drawFlag,
	"HostConfig.AutoRemove":      drawFlag,
	"HostConfig.PublishAllPorts": drawFlag, "HostConfig.ReadonlyRootfs": drawFlag, "HostConfig.Init": drawFlag,
	"HostConfig.Memory": drawNumber, "HostConfig.MemorySwap": drawNumber, "HostConfig.MemoryReservation": drawNumber, "HostConfig.NanoCpus": drawNumber, "HostConfig.CpuQuota": drawNumber,
	"HostConfig.CpuPeriod": drawNumber, "HostConfig.CpuShares": drawNumber, "HostConfig.PidsLimit": drawNumber, "HostConfig.ShmSize": drawNumber, "HostConfig.OomScoreAdj": drawNumber,
	"HostConfig.CpuRealtimeRuntime": drawNumber, "HostConfig.BlkioWeight": drawNumber, "HostConfig.KernelMemory": drawNumber,
	"HostConfig.Ulimits": func(d *dice) string {
		return "[" + d.some(2, func() string {
			return fmt.Sprintf(`{"Name":%q,"Soft":%s,"Hard":%s}`, d.of("nofile", "nproc", "core", "rtprio", "NOFILE"), d.of(grammarNumbers...), d.of(grammarNumbers...))
		}) + "]"
	},
	"HostConfig.PortBindings": func(d *dice) string {
		return "{" + d.some(2, func() string {
			return fmt.Sprintf(`%q:[{"HostIp":%q,"HostPort":%q}]`, d.of("80/tcp", "80", "53/UDP", "0/tcp", "80-90/tcp"), d.of("", "127.0.0.1", "0.0.0.0", "::", "::1", "192.0.2.1", "127.0.0.2", "::ffff:127.0.0.1"), d.of("", "18080", "0", "80", "8080-8090", "65536"))
		}) + "}"
	},
	"HostConfig.LogConfig": func(d *dice) string {
		return fmt.Sprintf(`{"Type":%q,"Config":{%s}}`, d.of("", "json-file", "none", "local", "gelf", "syslog"), d.some(2, func() string {
			return fmt.Sprintf(`%q:%q`, d.of("max-size", "max-file", "env", "labels", "tag", "gelf-address"), d.of("1m", "100g", "-1", "3", "x", "", "{{.Name}}", "{{.ExtraAttributes nil}}"))
		}))
	},
	"HostConfig.RestartPolicy": func(d *dice) string {
		return fmt.Sprintf(`{"Name":%q,"MaximumRetryCount":%s}`, d.of(grammarWords...), d.of("0", "3", "-1"))
	},
	"NetworkingConfig.EndpointsConfig": func(d *dice) string {
		return "{" + d.some(3, func() string {
			return fmt.Sprintf(`%q:{%s}`, d.of(grammarWords...), d.some(1, func() string {
				return d.of(`"Aliases":["x"]`, `"MacAddress":"02:42:ac:11:00:09"`, `"DriverOpts":{"a":"b"}`, `"IPAMConfig":{"IPv4Address":"172.31.0.9"}`, `"NetworkID":"{victimnet}"`, `"aliases":["x"]`)
			}))
		}) + "}"
	},
	"Env": drawList("A=1", "SECRET_A=1", "PINNED=no", "PINNED", "=x", "A", "secret_b=1", "PATH=/x"),
	"Volumes": func(d *dice) string {
		return "{" + d.some(2, func() string { return jsonText(d.of(grammarTargets...)) + ":{}" }) + "}"
	},
	"Labels": func(d *dice) string {
		return "{" + d.some(2, func() string {
			return fmt.Sprintf(`%q:%q`, d.of("a", "berm.ttl", "berm.tenant", "Berm.owner", "berm.session"), d.of("1", "30m", "99h", "victim"))
		}) + "}"
	},
	"User": drawWord, "Hostname": drawWord, "MacAddress": drawWord, "Tty": drawFlag, "NetworkDisabled": drawFlag,
	"Cmd":        func(d *dice) string { return d.of(`["sleep","1000"]`, `"true"`, `null`, `["x\u0000"]`) },
	"HostConfig": func(d *dice) string { return d.of(`{}`, `null`, `{"Privileged":true}`) },
}

func drawWord(d *dice) string { return jsonText(d.of(grammarWords...)) }

func drawFlag(d *dice) string { return d.of("false", "null", "true", `"true"`, "1") }

func drawNumber(d *dice) string { return d.of(grammarNumbers...) }

func drawList(words ...string) func(*dice) string {
	return func(d *dice) string {
		return "[" + d.some(3, func() string { return jsonText(d.of(words...)) }) + "]"
	}
}

func drawMount(d *dice) string {
	m := fmt.Sprintf(`"Type":%q,"Source":%s,"Target":%s`, d.of("bind", "volume", "tmpfs", "bind", "volume", "image", "BIND", ""), jsonText(d.of(grammarSources...)), jsonText(d.of(grammarTargets...)))
	for range d.below(3) {
		m += "," + d.of(`"ReadOnly":true`, `"BindOptions":{"Propagation":"rshared"}`, `"BindOptions":{"CreateMountpoint":true}`, `"BindOptions":{"NonRecursive":false}`, `"VolumeOptions":{"NoCopy":true}`,
			`"VolumeOptions":{"Subpath":"../x"}`, `"VolumeOptions":{"DriverConfig":{"Options":{"o":"bind","device":"/"}}}`, `"VolumeOptions":{"DriverConfig":{"Name":"local"}}`, `"VolumeOptions":{"Labels":{"berm.owner":"x"}}`,
			`"TmpfsOptions":{"SizeBytes":1099511627776}`, `"TmpfsOptions":{"Mode":2559}`, `"TmpfsOptions":{"Options":[["dev"]]}`, `"source":"/etc"`, `"Consistency":"cached"`, `"ImageOptions":{"Subpath":"/"}`)
	}
	return "{" + m + "}"
}

// drawKey spells a key in one of the ways in which engines take it.
func drawKey(d *dice) func(string) string {
	return func(key string) string {
		switch d.below(40) {
		case 37:
			return strings.ToLower(key)
		case 38:
			return folded(key)
		case 39:
			return escaped(key)
		}
		return key
	}
}

// drawBody draws the body of a create. Most fields of HostConfig are in one object, as a
// client would write them.
func drawBody(d *dice) string {
	names := sortedKeys(fields)
	parts, host := []string{`"Image":` + jsonText(d.of(testImage, testImage, testImage, testImage, "attack-v.local/image:1", "{victimimage}"))}, []string(nil)
	for range 1 + d.below(5) {
		path := names[d.below(len(names))]
		value := fields[path](d)
		if inner, ok := strings.CutPrefix(path, "HostConfig."); ok && d.below(12) != 11 {
			host = append(host, quote(drawKey(d)(inner))+":"+value)
			continue
		}
		if inner, ok := strings.CutPrefix(path, "HostConfig."); ok && d.below(2) == 1 {
			path = inner // at the top level
		}
		parts = append(parts, nest(path, value, drawKey(d)))
	}
	if host != nil {
		parts = append(parts, quote(drawKey(d)("HostConfig"))+":{"+strings.Join(host, ",")+"}")
	}
	return "{" + strings.Join(parts, ",") + "}"
}

const (
	fakeOwn    = "1111111111111111111111111111111111111111111111111111111111111111"
	fakeVictim = "2222222222222222222222222222222222222222222222222222222222222222"
	fakeNet    = "3333333333333333333333333333333333333333333333333333333333333333"
	fakeVNet   = "4444444444444444444444444444444444444444444444444444444444444444"
	fakeShared = "5555555555555555555555555555555555555555555555555555555555555555"
	fakeHost   = "6666666666666666666666666666666666666666666666666666666666666666"
	fakeMade   = "7777777777777777777777777777777777777777777777777777777777777777"
)

func labelsJSON(labels map[string]string) string {
	b, _ := json.Marshal(labels)
	return string(b)
}

// rehearsal is a door before an engine that has what a fixture has, and notes what it is asked to make.
type rehearsal struct {
	*script
	d       *testDoor
	client  *http.Client
	address string
	bounds  bounds
	words   *strings.Replacer
}

func rehearse(t testing.TB, version string) *rehearsal {
	root := check.Value(filepath.EvalSymlinks(t.TempDir()))(t)
	dir := root + "/allowed"
	for _, d := range []string{dir + "/share/below", root + "/outside"} {
		must(t, os.MkdirAll(d, 0o755))
	}
	for link, to := range map[string]string{"/link": root + "/outside", "/share/up": "../../outside"} {
		must(t, os.Symlink(to, dir+link))
	}
	d, s, address := scripted(t, version, fmt.Sprintf(fixtureRules, dir))
	ct := func(id, labels string) string {
		return fmt.Sprintf(`{"Id":%q,"Name":"/x","Config":{"Labels":%s},"HostConfig":{"NetworkMode":"none"},"NetworkSettings":{},"State":{}}`, id, labels)
	}
	n := func(id, name, driver, labels string) string {
		return fmt.Sprintf(`{"Id":%q,"Name":%q,"Driver":%q,"Scope":"local","Internal":true,"Labels":%s}`, id, name, driver, labels)
	}
	mine, theirs := d.sealed(lifecycle.ObjectContainer, "mine"), d.sealed(lifecycle.ObjectContainer, "victim")
	victims := `{"Id":"sha256:` + fakeVictim + `","RepoTags":["attack-v.local/image:1"],"Config":{"Labels":` + theirs + `}}`
	own := n(fakeNet, "attack-own-net", "bridge", d.sealed(lifecycle.ObjectNetwork, "mine"))
	s.answers = map[string]string{
		"GET /info":                                    `{"NCPU":4,"Architecture":"` + goruntime.GOARCH + `","SecurityOptions":["name=seccomp,profile=default"]}`,
		"GET /containers/json":                         `[{"Id":"` + fakeOwn + `","Labels":` + mine + `}]`,
		"POST /volumes/create":                         "{body}",
		"POST /containers/create":                      `{"Id":"` + fakeMade + `"}`,
		"GET /images/" + testImage + "/json":           `{"Id":"sha256:` + fakeMade + `","RepoTags":["` + testImage + `"],"Config":{"User":"0"}}`,
		"GET /images/attack-v.local/image:1/json":      victims,
		"GET /images/sha256:" + fakeVictim + "/json":   victims,
		"GET /volumes/attack-own-vol":                  `{"Name":"attack-own-vol","Driver":"local","Labels":` + d.sealed(lifecycle.ObjectVolume, "mine") + `}`,
		"GET /volumes/attack-v-vol":                    `{"Name":"attack-v-vol","Driver":"local","Labels":` + d.sealed(lifecycle.ObjectVolume, "victim") + `}`,
		"GET /containers/attack-own/json":              ct(fakeOwn, mine),
		"GET /containers/" + fakeOwn + "/json":         ct(fakeOwn, mine),
		"GET /containers/attack-v-one/json":            ct(fakeVictim, theirs),
		"GET /containers/" + fakeVictim[:12] + "/json": ct(fakeVictim, theirs),
		"GET /networks/attack-own-net":                 own,
		"GET /networks/" + fakeNet:                     own,
		"GET /networks/attack-v-net":                   n(fakeVNet, "attack-v-net", "bridge", d.sealed(lifecycle.ObjectNetwork, "victim")),
		"GET /networks/attack-shared":                  n(fakeShared, "attack-shared", "bridge", labelsJSON(d.policyNetworkLabels())),
		"GET /networks/HOST":                           n(fakeHost, "HOST", "host", "{}"),
	}
	c := raw(address)
	c.Transport.(*http.Transport).DisableKeepAlives = false
	t.Cleanup(c.CloseIdleConnections)
	return &rehearsal{
		script: s, d: d, client: c, address: address,
		bounds: bounds{owner: d.opts.Owner, tenant: "mine", dir: dir, networks: map[string]bool{fakeNet: true, fakeShared: true}, shared: fakeShared, containers: map[string]bool{fakeOwn: true}},
		words:  strings.NewReplacer("{dir}", dir, "{outside}", root+"/outside", "{victim12}", fakeVictim[:12], "{ownnet}", fakeNet, "{victimnet}", fakeVNet, "{victimimage}", "sha256:"+fakeVictim),
	}
}

// take returns the bodies of the creates that the engine was asked for since the last take.
func (s *rehearsal) take() (bodies [][]byte) {
	for _, asked := range s.said("POST /containers/create") {
		_, body, _ := strings.Cut(asked, " {")
		bodies = append(bodies, []byte("{"+body))
	}
	s.forget()
	return bodies
}

// exceeded says what of what the engine was asked is more than the policy allows, as
// an engine reads it: whatever the case of a name, and at the top level, too.
func (s *rehearsal) exceeded(body []byte) (e excess) {
	var req container.CreateRequest
	if err := json.Unmarshal(body, &req); err != nil || req.HostConfig == nil || req.Config == nil {
		return excess{fmt.Sprintf("the engine can't read it: %v", err)}
	}
	e = s.bounds.asked(req.Config, req.HostConfig, req.NetworkingConfig)
	e.unless(sameImage(req.Image, testImage), "Image", req.Image)
	e.unless(req.HostConfig.MaskedPaths == nil && req.HostConfig.ReadonlyPaths == nil, "MaskedPaths", req.HostConfig.MaskedPaths)
	if req.NetworkingConfig != nil {
		if shared := req.NetworkingConfig.EndpointsConfig[fakeShared]; shared != nil {
			e.unless(len(shared.Aliases)+len(shared.Links) == 0 && shared.IPAMConfig == nil, "endpoint", shared)
		}
	}
	var top container.HostConfig
	if err := json.Unmarshal(body, &top); err != nil || !reflect.DeepEqual(top, container.HostConfig{}) {
		e.unless(false, "top level", fmt.Sprint(top, err))
	}
	return e
}

// FuzzCreate sends creates of all kinds. What the door asks the engine for, decoded as
// leniently as an engine does, is never more than the policy allows.
func FuzzCreate(f *testing.F) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		seed := make([]byte, 40)
		for i := range seed {
			seed[i] = byte(r.UintN(256))
		}
		f.Add(seed)
	}
	var all []*rehearsal
	for _, version := range []string{"1.41", "1.51"} {
		all = append(all, rehearse(f, version))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		body := drawBody(&dice{data})
		for _, s := range all {
			resp := check.Value(s.client.Post("http://docker/containers/create", "application/json", strings.NewReader(s.words.Replace(body))))(t)
			answer, _ := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			if resp.StatusCode == http.StatusCreated || resp.StatusCode >= 500 {
				t.Errorf("the door didn't miss what it had made, or had no engine: %s", answer) // which has no such container
			}
			for _, asked := range s.take() {
				if e := s.exceeded(asked); len(e) > 0 {
					t.Errorf("of %s\nthe engine %s was asked for %s:\n%s", body, s.version, strings.Join(e, "; "), asked)
				}
			}
		}
	})
}

// attackDrawn makes what FuzzCreate draws on a real engine, and starts what can be made of it.
func attackDrawn(s *fixture) {
	now := uint64(time.Now().UnixNano())
	s.Logf("seed %d", now)
	made := 0
	for _, seed := range []uint64{1, now} {
		r := rand.New(rand.NewPCG(seed, 0))
		for range 40 {
			data := make([]byte, 40)
			for i := range data {
				data[i] = byte(r.UintN(256))
			}
			body := drawBody(&dice{data})
			asked := s.expand(request("POST", "/v1.41/containers/create", "application/json", body))
			reply := s.say(s.door, asked)
			found := s.tells(asked, reply)
			if reply.status == http.StatusCreated {
				made++
				var ct struct{ ID string }
				_ = json.Unmarshal([]byte(reply.body), &ct)
				s.ask(s.door, "POST", "/v1.41/containers/"+url.PathEscape(ct.ID)+"/start", "", "")
				found = append(found, s.breaches()...)
			}
			if len(found) > 0 {
				s.Errorf("%s:\n%s", body, strings.Join(found, "; "))
			}
		}
	}
	if found := s.breaches(); len(found) > 0 {
		s.Errorf("of what was refused: %s", strings.Join(found, "; "))
	}
	s.Logf("%d were made", made)
	if made == 0 {
		s.Error("none was made, and so nothing tried")
	}
}
