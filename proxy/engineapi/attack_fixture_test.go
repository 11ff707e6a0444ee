package engineapi

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// fixtureRules is the policy that the attacks are made on; bounds says the same in the
// words of the engine.
const fixtureRules = `version: 1
images: {allow: ["berm.local/*"]}
mounts: {allowed_roots: [%s], hold: auto}
env: {deny: ["SECRET*"], pin: {PINNED: "yes"}}
ttl: {default: 1h, max_lifetime: 2h}
networks: {team: {engine_network: attack-shared, internal: true}}
profiles:
  default:
    memory_mb: 64
    max_memory_mb: 128
    cpus: 0.5
    max_cpus: 1
    pids_limit: 50
    max_pids_limit: 100
    read_only_rootfs: false
    engine_api:
      capabilities: [CHOWN, KILL, NET_BIND_SERVICE]
      ports: loopback
      log_drivers: [json-file, none]
      log_max_mb: 10
      restart: ["no", on-failure]
      tmpfs_mb: 16
      max_ulimit: 1024
      networks: internal
      build: "on"
      commit: "on"
      tags: ["fixture.local/*"]
      max_objects: 0
`

// fixture is a door with one caller that means harm and another whose things it is after,
// and a look at all that the engine and the host have.
type fixture struct {
	*testing.T
	host, door string // where the engine itself listens, and the attacker's door
	direct     *client.Client
	d          *testDoor
	dir        string // what binds may lead to: share, link, a file
	outside    string // beside it, with a secret

	own, ownExec      string // the attacker's container, which runs, and an exec in it
	ownNet            string
	victim, victimEx  string // another caller's, with a secret in its environment, log and volume
	victimNet, victmg string
	operator          string // one that nobody's door made
	shared            string // a network of the policy's, on which others are too

	bounds  bounds
	words   *strings.Replacer // for {victim} and so on in vectors
	secrets []string          // what no answer may tell, unless it was asked with it
	calm    map[string]string // what there was before, by kind and ID
}

// TestAttack makes all attacks on one fixture, which is after each as it was before.
func TestAttack(t *testing.T) {
	s := startFixture(t)
	for _, a := range []struct {
		name string
		make func(*fixture)
	}{
		{"create", attackCreate}, {"drawn", attackDrawn}, {"http", attackHTTP}, {"tcp", attackTCP}, {"reads", attackReads}, {"lists", attackLists},
		{"objects", attackObjects}, {"build", attackBuild}, {"files", attackFiles}, {"swap", attackSwap},
	} {
		t.Run(a.name, func(now *testing.T) {
			s.T = now
			defer func() { s.T = t }()
			a.make(s)
		})
	}
}

const secret = "correct-horse-battery-staple"

var forced = container.RemoveOptions{Force: true, RemoveVolumes: true}

func startFixture(t *testing.T) *fixture {
	host, direct := testEngine(t)
	s := &fixture{T: t, host: host, direct: direct}
	root := workDir(t)
	s.dir, s.outside = root+"/allowed", root+"/outside"
	for _, dir := range []string{s.dir + "/share/below", s.outside} {
		must(t, os.MkdirAll(dir, 0o755))
	}
	write := func(path, text string) {
		must(t, os.WriteFile(path, []byte(text), 0o644))
	}
	write(s.outside+"/secret", secret)
	write(s.outside+"/linked", "x")
	must(s, os.Link(s.outside+"/linked", s.dir+"/file"))
	for link, to := range map[string]string{"/link": s.outside, "/root": "/", "/share/up": "../../outside", "/loop": "loop"} {
		must(t, os.Symlink(to, s.dir+link))
	}
	s.d = doorTo(t, host, fmt.Sprintf(fixtureRules, s.dir))
	s.door = s.d.listen(Caller{Name: "attacker", Tenant: "attacker"})
	sweepOwn(t, direct, s.d)
	s.makeVictim()
	s.makeOwn()
	s.words = strings.NewReplacer("{image}", testImage, "{dir}", s.dir, "{outside}", s.outside,
		"{victim}", s.victim, "{victim12}", s.victim[:12], "{victim4}", s.victim[:4], "{victimexec}", s.victimEx, "{victimnet}", s.victimNet,
		"{victimnet12}", s.victimNet[:12], "{victimimage}", s.victmg, "{operator}", s.operator, "{own}", s.own, "{ownexec}", s.ownExec, "{ownnet}", s.ownNet)
	s.secrets = []string{secret, s.victim[:12], s.victimNet[:12], s.victimEx[:12], s.victmg[7:19], s.operator[:12], "attack-v"}
	img := check.Value(direct.ImageInspect(t.Context(), testImage))(t)
	s.bounds = bounds{owner: s.d.opts.Owner, tenant: "attacker", dir: s.dir, pins: s.d.dir + "/pins", image: img.ID, networks: map[string]bool{s.ownNet: true, s.shared: true}, shared: s.shared, containers: map[string]bool{s.own: true},
		others: []string{s.victim, s.victimNet, s.operator, s.shared}}
	s.calm = s.look()
	return s
}

// makeVictim makes what the attacker mustn't reach: another caller's, and the operator's.
func (s *fixture) makeVictim() {
	ctx := s.Context()
	labels := func(kind lifecycle.ObjectKind) map[string]string { return s.d.labels(kind, "victim") }
	n := check.Value(s.direct.NetworkCreate(ctx, "attack-v-net", network.CreateOptions{Labels: labels(lifecycle.ObjectNetwork)}))(s)
	must(s, errOf(s.direct.VolumeCreate(ctx, volume.CreateOptions{Name: "attack-v-vol", Labels: labels(lifecycle.ObjectVolume)})))
	ct := check.Value(s.direct.ContainerCreate(ctx, &container.Config{
		Image: testImage, Labels: labels(lifecycle.ObjectContainer), Env: []string{"TOLD=" + secret}, Cmd: []string{"sh", "-c", "echo $TOLD | tee /v/secret; sleep 1000"},
	}, &container.HostConfig{Binds: []string{"attack-v-vol:/v"}, NetworkMode: "attack-v-net"}, nil, nil, "attack-v-one"))(s)
	must(s, s.direct.ContainerStart(ctx, ct.ID, container.StartOptions{}))
	ex := check.Value(s.direct.ContainerExecCreate(ctx, ct.ID, container.ExecOptions{Cmd: []string{"cat", "/v/secret"}, AttachStdout: true}))(s)
	img := check.Value(s.direct.ContainerCommit(ctx, ct.ID, container.CommitOptions{Reference: "attack-v.local/image:1"}))(s)
	shared := check.Value(s.direct.NetworkCreate(ctx, "attack-shared", network.CreateOptions{Internal: true, Labels: s.d.policyNetworkLabels()}))(s)
	op, err := s.direct.ContainerCreate(ctx, &container.Config{Image: testImage, Env: []string{"TOLD=" + secret}, Cmd: []string{"sleep", "1000"}},
		&container.HostConfig{NetworkMode: "none"}, nil, nil, "attack-v-operator")
	must(s, err)
	must(s, s.direct.ContainerStart(ctx, op.ID, container.StartOptions{}))
	s.victim, s.victimNet, s.victimEx, s.victmg, s.operator, s.shared = ct.ID, n.ID, ex.ID, img.ID, op.ID, shared.ID
	s.Cleanup(func() {
		_, _ = s.direct.ImageRemove(context.Background(), img.ID, image.RemoveOptions{Force: true})
		_ = s.direct.ContainerRemove(context.Background(), op.ID, forced)
		_ = s.direct.NetworkDisconnect(context.Background(), shared.ID, s.own, true)
		_ = s.direct.NetworkRemove(context.Background(), shared.ID)
	})
	eventually(s.T, func() bool {
		r, err := s.direct.ContainerLogs(ctx, ct.ID, container.LogsOptions{ShowStdout: true})
		if err != nil {
			return false
		}
		defer r.Close()
		return strings.Contains(readStream(s.T, r), secret)
	})
}

// makeOwn makes what the attacker has, by its door.
func (s *fixture) makeOwn() {
	c := newClient(s, s.door)
	n := check.Value(c.NetworkCreate(s.Context(), "attack-own-net", network.CreateOptions{}))(s)
	ct := check.Value(c.ContainerCreate(s.Context(), sleeper, &container.HostConfig{Binds: []string{"attack-own-vol:/v"}, NetworkMode: "attack-own-net"}, nil, nil, "attack-own"))(s)
	must(s, c.ContainerStart(s.Context(), ct.ID, container.StartOptions{}))
	ex := check.Value(c.ContainerExecCreate(s.Context(), ct.ID, container.ExecOptions{Cmd: []string{"true"}}))(s)
	s.own, s.ownNet, s.ownExec = ct.ID, n.ID, ex.ID
}

// look notes all that the engine and the host's directories have, by kind and ID, and
// what it is like as far as nobody may change it.
func (s *fixture) look() map[string]string {
	s.Helper()
	ctx, is := context.Background(), map[string]string{}
	list := check.Value(s.direct.ContainerList(ctx, container.ListOptions{All: true}))(s)
	for _, ct := range list {
		is["container "+ct.ID] = s.describe(ct.ID)
	}
	nets := check.Value(s.direct.NetworkList(ctx, network.ListOptions{}))(s)
	for _, n := range nets {
		is["network "+n.ID] = fmt.Sprint(n.Name, n.Driver, n.Options, n.Labels)
	}
	vols := check.Value(s.direct.VolumeList(ctx, volume.ListOptions{}))(s)
	for _, v := range vols.Volumes {
		is["volume "+v.Name] = fmt.Sprint(v.Driver, v.Options, v.Labels)
	}
	images := check.Value(s.direct.ImageList(ctx, image.ListOptions{All: true}))(s)
	for _, img := range images {
		slices.Sort(img.RepoTags)
		is["image "+img.ID] = fmt.Sprint(img.RepoTags)
	}
	must(s, filepath.WalkDir(filepath.Dir(s.dir), func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err == nil {
			is["file "+path] = info.Mode().String()
			if info.Mode().IsRegular() {
				is["file "+path] += fmt.Sprint(info.Size(), info.ModTime())
			}
		}
		return err
	}))
	return is
}

// describe is what of a container nobody but its owner may change.
func (s *fixture) describe(id string) string {
	ct, err := s.direct.ContainerInspect(context.Background(), id)
	if errdefs.IsNotFound(err) {
		return "gone"
	}
	must(s, err)
	if ct.ID == s.own {
		return "" // see ownBreaches
	}
	var nets []string
	for name := range ct.NetworkSettings.Networks {
		nets = append(nets, name)
	}
	slices.Sort(nets)
	host := check.Value(json.Marshal(ct.HostConfig))(s)
	return fmt.Sprint(ct.Name, ct.State.Status, ct.State.StartedAt, ct.ExecIDs, nets, string(host))
}

// breaches says what has come to be that the policy doesn't allow, and what was changed
// that isn't the attacker's. It takes back what is new.
func (s *fixture) breaches() []string {
	s.Helper()
	var found []string
	now := s.look()
	for what, was := range s.calm {
		if is, ok := now[what]; !ok || is != was {
			found = append(found, fmt.Sprintf("%s was %s, is %s", what, was, is))
		}
	}
	for _, what := range sortedKeys(now) { // containers go before what they use
		if _, ok := s.calm[what]; ok {
			continue
		}
		kind, id, _ := strings.Cut(what, " ")
		found = append(found, s.judgeNew(kind, id)...)
	}
	for _, ex := range s.inspect(s.own).ExecIDs {
		got := s.ask(s.host, "GET", "/exec/"+ex+"/json", "", "")
		if strings.Contains(got.body, `"privileged":true`) {
			found = append(found, "a privileged exec")
		}
	}
	ct := s.inspect(s.own)
	found = append(found, s.bounds.inspected(s, ct)...)
	if ct.NetworkSettings.Networks["attack-shared"] != nil {
		must(s, s.direct.NetworkDisconnect(context.Background(), s.shared, s.own, true))
	}
	if ct.Name != "/attack-own" {
		must(s, s.direct.ContainerRename(context.Background(), s.own, "attack-own"))
	}
	return found
}

func (s *fixture) inspect(id string) container.InspectResponse {
	s.Helper()
	ct := check.Value(s.direct.ContainerInspect(context.Background(), id))(s)
	return ct
}

// judgeNew says what is wrong with something new, and removes it.
func (s *fixture) judgeNew(kind, id string) (found []string) {
	ctx := context.Background()
	var err error
	switch kind {
	case "container":
		var ct container.InspectResponse
		if ct, err = s.direct.ContainerInspect(ctx, id); err == nil { // one with AutoRemove may have ended
			found = s.bounds.inspected(s, ct)
			err = s.direct.ContainerRemove(ctx, id, container.RemoveOptions{Force: true, RemoveVolumes: true})
		}
	case "network":
		var n network.Inspect
		if n, err = s.direct.NetworkInspect(ctx, id, network.InspectOptions{}); err == nil {
			found = s.bounds.network(n)
			err = s.direct.NetworkRemove(ctx, id)
		}
	case "volume":
		var v volume.Volume
		if v, err = s.direct.VolumeInspect(ctx, id); err == nil {
			found = s.bounds.volume(v)
			err = s.direct.VolumeRemove(ctx, id, true)
		}
	case "image":
		var img image.InspectResponse
		if img, err = s.direct.ImageInspect(ctx, id); err == nil {
			found = s.bounds.imageOf(img)
			_, err = s.direct.ImageRemove(ctx, id, image.RemoveOptions{Force: true, PruneChildren: true})
		}
	case "file":
		found = []string{"a new file " + id}
		err = os.RemoveAll(id)
	}
	if err != nil && !errdefs.IsNotFound(err) {
		s.Logf("remove %s %s: %v", kind, id, err)
	}
	return found
}

// reply is what was answered to a request.
type reply struct {
	status int
	header http.Header
	body   string
}

// message is what an answer says of an error, which is text where an engine would take a
// connection over.
func (r reply) message() string {
	var told struct{ Message string }
	if json.Unmarshal([]byte(r.body), &told) != nil {
		return strings.TrimSpace(r.body)
	}
	return told.Message
}

// say sends bytes to a unix or TCP address, and reads one answer.
func (s *fixture) say(address, request string) reply {
	s.Helper()
	kind, place, _ := strings.Cut(address, "://")
	conn := check.Value(net.DialTimeout(kind, place, 10*time.Second))(s)
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(30 * time.Second))
	sent := make(chan struct{})
	go func() { // the answer may come before all is sent
		defer close(sent)
		_, _ = io.WriteString(conn, request)
	}()
	defer func() { _ = conn.Close(); <-sent }()
	br := bufio.NewReader(conn)
	method, _, _ := strings.Cut(request, " ")
	resp, err := http.ReadResponse(br, &http.Request{Method: method})
	if err != nil {
		return reply{body: err.Error()}
	}
	var from io.Reader = resp.Body
	if resp.StatusCode == http.StatusSwitchingProtocols {
		_ = conn.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
		from = br
	}
	body, _ := io.ReadAll(io.LimitReader(from, 8<<20))
	return reply{resp.StatusCode, resp.Header, string(body)}
}

// ask sends one well-formed request, a body as of the type.
func (s *fixture) ask(address, method, path, contentType, body string) reply {
	s.Helper()
	return s.say(address, s.expand(request(method, path, contentType, body)))
}

// expand fills in what the fixture has, and the body's length.
func (s *fixture) expand(request string) string {
	text := s.words.Replace(request)
	_, body, _ := strings.Cut(text, "\r\n\r\n")
	return strings.Replace(text, "{length}", strconv.Itoa(len(body)), 1)
}

func request(method, path, contentType, body string) string {
	text := method + " " + path + " HTTP/1.1\r\nHost: docker\r\nConnection: close\r\n"
	if contentType != "" {
		text += "Content-Type: " + contentType + "\r\n"
	}
	if body != "" || method == http.MethodPost || method == http.MethodPut {
		text += "Content-Length: {length}\r\n"
	}
	return text + "\r\n" + body
}

// tells gives the secrets that are in an answer and weren't in the request.
func (s *fixture) tells(request string, r reply) (found []string) {
	answer := r.body + fmt.Sprint(r.header)
	for _, word := range s.secrets {
		if strings.Contains(answer, word) && !strings.Contains(request, word) {
			found = append(found, "the answer tells "+word)
		}
	}
	return found
}

// vector is one attack: a request as it goes over the wire, in which {victim} and the
// like stand for what the fixture has, or all of a function of one's own.
type vector struct {
	name    string
	request string
	act     func(s *fixture, address string) (refused bool)
	// neutral says that the door may answer that all is well, as nothing harmful comes of it.
	neutral bool
	// bites says that the engine itself, asked the same, does harm: the test is sure then
	// that what it looks for would be seen.
	bites bool
}

// run makes one attack on an address, and gives what came of it. What has come to be of one
// that was refused is looked for after all of them.
func (s *fixture) run(v vector, address string) (refused bool, found []string) {
	s.Helper()
	if v.act != nil {
		refused = v.act(s, address)
	} else {
		text := s.expand(v.request)
		r := s.say(address, text)
		refused = r.status == 0 || r.status >= 300
		found = s.tells(text, r)
	}
	if !refused {
		found = append(found, s.breaches()...)
	}
	return refused, found
}

// attack makes every attack on the door, then those that bite on the engine itself.
func (s *fixture) attack(vectors []vector) {
	s.Helper()
	t := s.T
	defer func() { s.T = t }()
	for _, v := range vectors {
		t.Run(v.name, func(t *testing.T) {
			s.T = t
			refused, found := s.run(v, s.door)
			if len(found) > 0 {
				t.Errorf("through the door: %s", strings.Join(found, "; "))
			}
			if !refused && !v.neutral {
				t.Error("the door didn't refuse it")
			}
		})
	}
	s.T = t
	if found := s.breaches(); len(found) > 0 {
		t.Errorf("after all of %s and so on: %s", vectors[0].name, strings.Join(found, "; "))
	}
	vectors = slices.DeleteFunc(vectors, func(v vector) bool { return !v.bites })
	if len(vectors) == 0 || !isOldEngine(t, s.direct) {
		return
	}
	bite := func(v vector) []string {
		refused, found := s.run(v, s.host)
		if refused {
			found = append(found, s.breaches()...)
		}
		return found
	}
	usual := bite(vector{request: demand(`"Cmd":["true"]`)}) // of anything that the engine is asked without a policy
	for _, v := range vectors {
		t.Run("engine/"+v.name, func(t *testing.T) {
			s.T = t
			found := bite(v)
			if !slices.ContainsFunc(found, func(f string) bool { return !slices.Contains(usual, f) }) {
				t.Errorf("the engine itself does no harm when it is asked: %s", strings.Join(found, "; "))
			}
		})
	}
}

// demand is a request for a container: fields are those of the body beside Image.
func demand(fields string) string {
	return request("POST", "/v1.41/containers/create", "application/json", `{"Image":"`+testImage+`",`+fields+`}`)
}

// isOldEngine reports whether the engine is Docker 20. Newer ones ignore or refuse some of what an
// attack sends them.
func isOldEngine(t *testing.T, direct *client.Client) bool {
	t.Helper()
	version := check.Value(direct.ServerVersion(t.Context()))(t)
	return strings.HasPrefix(version.Version, "20.")
}
