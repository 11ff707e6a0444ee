package engineapi

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	dockerfilters "github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/network"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/docker/client"
	"github.com/docker/docker/pkg/stdcopy"
	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/mountpin"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	private "github.com/bermhq/berm/runtime/runtimetest/engine"
)

const testImage = "berm.local/busybox:latest"

// patience is more than any call takes: one that never ends is to fail its test, and not
// all of them.
const patience = 3 * time.Minute

// shared is one private engine for all tests of the package that want one.
var shared struct {
	once   sync.Once
	engine *private.Docker
	err    error
}

func TestMain(m *testing.M) {
	code := m.Run()
	if shared.engine != nil {
		if err := shared.engine.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// testEngine is the shared engine, with testImage, as its own client sees it.
func testEngine(t testing.TB) (host string, direct *client.Client) {
	t.Helper()
	private.Require(t, "docker")
	shared.once.Do(func() {
		shared.engine, shared.err = private.StartDocker(context.Background(), private.Options{})
		if shared.err == nil {
			shared.err = shared.engine.ImportBusybox(context.Background(), testImage)
		}
	})
	if shared.err != nil {
		private.Lacking(t, "docker", shared.err)
	}
	return shared.engine.Host(), newClient(t, shared.engine.Host())
}

func newClient(t testing.TB, host string) *client.Client {
	t.Helper()
	c := check.Value(client.NewClientWithOpts(client.WithHost(host), client.WithAPIVersionNegotiation(), client.WithTimeout(patience)))(t)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// testDoor is a door before an engine, and a listener for each caller.
type testDoor struct {
	*Proxy
	t     testing.TB
	dir   string
	audit string // the audit log's path
	host  string // the engine's address
	left  func() []string

	mounted map[Caller]string // sockets that containers may have mounted
}

// engineDoor makes a door before the shared engine. What is made through it is removed at the
// test's end; left tells of it.
func engineDoor(t *testing.T, rules string) (d *testDoor, direct *client.Client) {
	t.Helper()
	host, direct := testEngine(t)
	d = doorTo(t, host, rules)
	d.host, d.left = host, sweepOwn(t, direct, d)
	return d, direct
}

// lyingDoor is engineDoor with a liar between the door and the engine.
func lyingDoor(t *testing.T, rules string) (d *testDoor, direct *client.Client, l *liar) {
	t.Helper()
	host, direct := testEngine(t)
	l = startLiar(t, host)
	d = doorTo(t, l.host, rules)
	d.host, d.left = host, sweepOwn(t, direct, d)
	return d, direct, l
}

var must = check.Must // ends a test if a step of its own fails

// report is must for a test that goes on.
func report(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// errOf is the error of a call.
func errOf[T any](_ T, err error) error { return err }

// wantErr checks the class of an error.
func wantErr(t testing.TB, is func(error) bool, err error, what string, args ...any) {
	t.Helper()
	if !is(err) {
		t.Errorf("%s: %v", fmt.Sprintf(what, args...), err)
	}
}

// basePolicy allows testImage; a test's own text goes after it.
const basePolicy = "version: 1\nimages: {allow: [\"berm.local/*\"]}\n"

// doorTo makes a door before the engine at host. Rules is the policy file; empty is basePolicy.
func doorTo(t testing.TB, host, rules string) *testDoor {
	t.Helper()
	if rules == "" {
		rules = basePolicy
	}
	p := check.Value(policy.Parse([]byte(rules), policy.Options{DefaultImage: testImage}))(t)
	d := &testDoor{t: t, dir: t.TempDir()}
	d.audit = filepath.Join(d.dir, "audit.log")
	audit := check.Value(OpenAudit(d.audit))(t)
	t.Cleanup(func() { _ = audit.Close() })
	d.Proxy = check.Value(New(Options{
		Dial: func(ctx context.Context) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", strings.TrimPrefix(host, "unix://"))
		},
		Pins: d.pins(),
		Sockets: func(name, tenant, profile string) string {
			return d.mounted[Caller{Name: name, Tenant: tenant, Profile: profile, Socket: true}]
		},
		Policy: func() *policy.Policy { return p }, Owner: "test-" + filepath.Base(d.dir) + fmt.Sprint(time.Now().UnixNano()), Audit: audit,
		ArchiveFixed: true, // or no running container could be copied from
	}))(t)
	t.Cleanup(func() { _ = d.Close() })
	return d
}

// serveEngine stands in for an engine.
func serveEngine(t testing.TB, f http.HandlerFunc) (host string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "e.sock")
	ln := check.Value(net.Listen("unix", path))(t)
	srv := &http.Server{Handler: f, ReadHeaderTimeout: time.Minute}
	go func() { _ = srv.Serve(ln) }()
	t.Cleanup(func() { _ = srv.Close() })
	return "unix://" + path
}

// pins holds the binds of the door's containers.
func (d *testDoor) pins() lifecycle.Holder {
	p, err := mountpin.NewPinner(filepath.Join(d.dir, "pins"))
	if err != nil {
		d.t.Logf("binds can't be held: %v", err)
		return nil
	}
	d.t.Cleanup(func() {
		if left, err := os.ReadDir(filepath.Join(d.dir, "pins")); err != nil || len(left) > 0 {
			d.t.Errorf("still held: %v, %v", left, err)
		}
	})
	return p
}

// listen serves a caller on a unix socket of its own, and gives its address.
func (d *testDoor) listen(c Caller) string { return d.listenAs(c.Name, c) }

// listenAs is listen on a socket of a name.
func (d *testDoor) listenAs(name string, c Caller) string {
	d.t.Helper()
	address := "unix://" + filepath.Join(d.dir, name+".sock")
	l := check.Value(proxy.Listen(context.Background(), address, 0o600))(d.t)
	callers := Callers{Any: &c}
	if !c.Socket {
		callers.Socket = strings.TrimPrefix(address, "unix://")
	}
	d.serve(l, callers, time.Second)
	return address
}

// serve serves callers on a listener, and gives what ends it.
func (d *testDoor) serve(l net.Listener, callers Callers, drain time.Duration) (end func()) {
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = proxy.Serve(ctx, l, d.Handler(callers), proxy.ServeOptions{ConnContext: ConnContext, DrainTimeout: drain})
	}()
	end = sync.OnceFunc(func() { cancel(); <-served })
	d.t.Cleanup(end)
	return end
}

// socketFor serves a caller on a socket that its containers may have mounted.
func (d *testDoor) socketFor(name, tenant, profile string) {
	d.t.Helper()
	c := Caller{Name: name, Tenant: tenant, Profile: profile, Socket: true}
	if d.mounted == nil {
		d.mounted = map[Caller]string{}
	}
	d.mounted[c] = strings.TrimPrefix(d.listenAs(fmt.Sprintf("mounted-%d", len(d.mounted)), c), "unix://")
}

// client is the Docker client of a caller of the tenant's.
func (d *testDoor) client(tenant string) *client.Client {
	d.t.Helper()
	return newClient(d.t, d.listen(Caller{Name: tenant, Tenant: tenant}))
}

// raw speaks HTTP to a caller's listener, for what no client would say.
func raw(address string) *http.Client {
	path := strings.TrimPrefix(address, "unix://")
	return &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}, DisableKeepAlives: true}, Timeout: patience}
}

// say sends a JSON body, or none, and gives the answer.
func say(t *testing.T, address, method, path, body string) (int, string) {
	t.Helper()
	var header http.Header
	if body != "" {
		header = http.Header{"Content-Type": {"application/json"}}
	}
	resp, told := sayWith(t, address, method, path, header, body)
	return resp.StatusCode, told
}

// sayWith is say with a header. The path may be anything that is to be on the request line.
func sayWith(t *testing.T, address, method, path string, header http.Header, body string) (*http.Response, string) {
	t.Helper()
	req := check.Value(http.NewRequestWithContext(t.Context(), method, "http://docker", strings.NewReader(body)))(t)
	req.URL.Opaque = path
	maps.Copy(req.Header, header)
	resp := check.Value(raw(address).Do(req))(t)
	defer resp.Body.Close()
	return resp, strings.TrimSpace(string(check.Value(io.ReadAll(resp.Body))(t)))
}

// labels are those of something that a tenant made through the door an hour before its end,
// with further ones as pairs of a name and a value, and sealed.
func (d *Proxy) labels(kind lifecycle.ObjectKind, tenant string, more ...string) map[string]string {
	door := lifecycle.DoorEngine
	if kind == lifecycle.ObjectImage {
		door = lifecycle.DoorEngineImage
	}
	labels := map[string]string{
		lifecycle.LabelOwner: d.opts.Owner, lifecycle.LabelDoor: door, lifecycle.LabelTenant: tenant, lifecycle.LabelSessionID: uuid.NewString(),
		lifecycle.LabelExpiresAt: time.Now().Add(time.Hour).UTC().Format(time.RFC3339Nano), lifecycle.LabelEffective: "{}",
	}
	for pair := range slices.Chunk(more, 2) {
		labels[pair[0]] = pair[1]
	}
	return d.opts.Sealer.Seal(kind, labels)
}

// sealed is labels as JSON.
func (d *Proxy) sealed(kind lifecycle.ObjectKind, tenant string, more ...string) string {
	return labelsJSON(d.labels(kind, tenant, more...))
}

// policyNetworkLabels are those of a network of the policy's, as the manager makes it.
func (d *Proxy) policyNetworkLabels() map[string]string {
	return d.opts.Sealer.Seal(lifecycle.ObjectNetwork, map[string]string{lifecycle.LabelOwner: d.opts.Owner})
}

// made has the engine itself make a container with the labels of one that a tenant made
// through the door.
func (d *testDoor) made(direct *client.Client, tenant, name string, config container.Config) string {
	d.t.Helper()
	if config.Image == "" {
		config.Image = testImage
	}
	if config.Cmd == nil {
		config.Cmd = []string{"sleep", "1000"}
	}
	config.Labels = d.labels(lifecycle.ObjectContainer, tenant)
	got := check.Value(direct.ContainerCreate(context.Background(), &config, &container.HostConfig{NetworkMode: "none"}, nil, nil, name))(d.t)
	must(d.t, direct.ContainerStart(context.Background(), got.ID, container.StartOptions{}))
	return got.ID
}

// tarOf is an archive of files: of each a name, and its text or "->" and a link's target.
func tarOf(t testing.TB, files ...string) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i := 0; i < len(files); i += 2 {
		h := tar.Header{Name: files[i], Typeflag: tar.TypeReg, Size: int64(len(files[i+1])), Mode: 0o755}
		if to, ok := strings.CutPrefix(files[i+1], "->"); ok {
			h.Typeflag, h.Linkname, h.Size = tar.TypeSymlink, to, 0
		}
		must(t, w.WriteHeader(&h))
		if h.Size > 0 {
			check.Value(io.WriteString(w, files[i+1]))(t)
		}
	}
	must(t, w.Close())
	return b.Bytes()
}

func readFile(t testing.TB, path string) []byte {
	t.Helper()
	b := check.Value(os.ReadFile(path))(t)
	return b
}

// dockerCLI runs Docker's own client against a caller's listener.
func dockerCLI(t *testing.T, host string, args ...string) (stdout, stderr string, err error) {
	t.Helper()
	const binary = "/usr/bin/docker"
	if _, err := os.Stat(binary); err != nil {
		private.Lacking(t, "docker", err)
	}
	cmd := exec.CommandContext(t.Context(), binary, args...)
	cmd.Env = append(os.Environ(), "DOCKER_HOST="+host, "DOCKER_CONFIG="+t.TempDir(), "DOCKER_CONTEXT=")
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

// mustDocker is dockerCLI for what has to succeed.
func mustDocker(t *testing.T, host string) func(args ...string) string {
	return func(args ...string) string {
		t.Helper()
		out, errs, err := dockerCLI(t, host, args...)
		if err != nil {
			t.Fatalf("docker %v: %v: %s", args, err, errs)
		}
		return strings.TrimSpace(out)
	}
}

// sweepOwn removes in the end what the door's callers made, and gives what there is but images.
func sweepOwn(t *testing.T, direct *client.Client, d *testDoor) (left func() []string) {
	t.Helper()
	owned := dockerfilters.NewArgs(dockerfilters.Arg("label", lifecycle.LabelOwner+"="+d.opts.Owner))
	left = func() (all []string) {
		t.Helper()
		ctx := context.Background()
		list, err := direct.ContainerList(ctx, container.ListOptions{All: true, Filters: owned})
		networks, networksErr := direct.NetworkList(ctx, network.ListOptions{Filters: owned})
		volumes, volumesErr := direct.VolumeList(ctx, volume.ListOptions{Filters: owned})
		must(t, errors.Join(err, networksErr, volumesErr))
		for _, ct := range list {
			all = append(all, "container "+ct.ID)
		}
		for _, n := range networks {
			all = append(all, "network "+n.ID)
		}
		for _, v := range volumes.Volumes {
			all = append(all, "volume "+v.Name)
		}
		return all
	}
	t.Cleanup(func() {
		ctx := context.Background()
		for _, what := range left() {
			kind, id, _ := strings.Cut(what, " ")
			var err error
			switch kind {
			case "container":
				err = direct.ContainerRemove(ctx, id, container.RemoveOptions{Force: true, RemoveVolumes: true})
			case "network":
				err = direct.NetworkRemove(ctx, id)
			case "volume":
				err = direct.VolumeRemove(ctx, id, true)
			}
			if err != nil && !errdefs.IsNotFound(err) {
				t.Error(err)
			}
		}
		list, err := direct.ImageList(ctx, image.ListOptions{All: true, Filters: owned})
		report(t, err)
		for range list { // children first, whatever the order
			for _, img := range list {
				_, _ = direct.ImageRemove(ctx, img.ID, image.RemoveOptions{Force: true, PruneChildren: true})
			}
		}
	})
	return left
}

// finish starts a container, waits for its end, and gives its output and exit code.
func finish(t *testing.T, c, direct *client.Client, id string) (string, int64) {
	t.Helper()
	must(t, c.ContainerStart(t.Context(), id, container.StartOptions{}))
	return finished(t, direct, id)
}

func finished(t *testing.T, direct *client.Client, id string) (string, int64) {
	t.Helper()
	done, failed := direct.ContainerWait(t.Context(), id, container.WaitConditionNotRunning)
	var code int64
	select {
	case r := <-done:
		code = r.StatusCode
	case err := <-failed:
		t.Fatal(err)
	}
	r := check.Value(direct.ContainerLogs(t.Context(), id, container.LogsOptions{ShowStdout: true, ShowStderr: true}))(t)
	defer r.Close()
	return readStream(t, r), code
}

func inspect(t *testing.T, direct *client.Client, id string) container.InspectResponse {
	t.Helper()
	ct := check.Value(direct.ContainerInspect(t.Context(), id))(t)
	return ct
}

// workRules allow binds below dir, and what most tests want.
func workRules(dir string) string {
	return basePolicy + "mounts: {allowed_roots: [" + dir + `], hold: auto}
env: {deny: ["SECRET*"], pin: {PINNED: "yes"}}
ttl: {default: 1h, max_lifetime: 2h}
profiles:
  default:
    max_memory_mb: 256
    memory_mb: 64
    engine_api: {ports: loopback, dns: "on"}
`
}

func workDir(t *testing.T) string {
	t.Helper()
	dir := check.Value(os.MkdirTemp("/var/tmp", "berm-engineapi-"))(t)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return check.Value(filepath.EvalSymlinks(dir))(t)
}

// readStream reads both of a container's streams to their end.
func readStream(t *testing.T, r io.Reader) string {
	t.Helper()
	var b bytes.Buffer
	check.Value(stdcopy.StdCopy(&b, &b, r))(t)
	return b.String()
}

// eventually waits until ok; a test's own deadline is the end of its patience.
func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it didn't come to be")
		}
	}
}
