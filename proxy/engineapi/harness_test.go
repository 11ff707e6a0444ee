package engineapi

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/client"
	"github.com/google/uuid"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/mountpin"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
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
	c := must(client.NewClientWithOpts(client.WithHost(host), client.WithAPIVersionNegotiation(), client.WithTimeout(patience)))(t)
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

// must returns the value of a call that may not fail.
func must[T any](v T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		noError(t, err)
		return v
	}
}

func noError(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
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
	p := must(policy.Parse([]byte(rules), policy.Options{DefaultImage: testImage}))(t)
	d := &testDoor{t: t, dir: t.TempDir()}
	d.audit = filepath.Join(d.dir, "audit.log")
	audit := must(OpenAudit(d.audit))(t)
	t.Cleanup(func() { _ = audit.Close() })
	d.Proxy = must(New(Options{
		Dial: func(ctx context.Context) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", strings.TrimPrefix(host, "unix://"))
		},
		Pins:   d.pins(),
		Policy: func() *policy.Policy { return p }, Owner: "test-" + filepath.Base(d.dir) + fmt.Sprint(time.Now().UnixNano()), Audit: audit,
		ArchiveFixed: true, // or no running container could be copied from
	}))(t)
	t.Cleanup(func() { _ = d.Close() })
	return d
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
func (d *testDoor) listen(c Caller) string {
	d.t.Helper()
	address := "unix://" + filepath.Join(d.dir, c.Name+".sock")
	l := must(proxy.Listen(context.Background(), address, 0o600))(d.t)
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() {
		served <- proxy.Serve(ctx, l, d.Handler(Callers{Any: &c}), proxy.ServeOptions{ConnContext: ConnContext, DrainTimeout: time.Second})
	}()
	d.t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil && ctx.Err() == nil {
			d.t.Error(err)
		}
	})
	return address
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

func TestPing(t *testing.T) {
	host, direct := testEngine(t)
	c := doorTo(t, host, "").client("a")
	got := must(c.Ping(t.Context()))(t)
	want := must(direct.Ping(t.Context()))(t)
	if got.APIVersion != want.APIVersion || got.OSType != want.OSType {
		t.Errorf("ping: %+v, want %+v", got, want)
	}
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

// policyNetworkLabels are those of a network of the policy's, as the manager makes it.
func (d *Proxy) policyNetworkLabels() map[string]string {
	return d.opts.Sealer.Seal(lifecycle.ObjectNetwork, map[string]string{lifecycle.LabelOwner: d.opts.Owner})
}

// made has the engine itself make a container with the labels of one that a tenant made
// through the door, and removes it at the test's end.
func (d *testDoor) made(direct *client.Client, tenant, name string, config container.Config) string {
	d.t.Helper()
	if config.Image == "" {
		config.Image = testImage
	}
	if config.Cmd == nil {
		config.Cmd = []string{"sleep", "1000"}
	}
	config.Labels = d.labels(lifecycle.ObjectContainer, tenant)
	got := must(direct.ContainerCreate(context.Background(), &config, &container.HostConfig{NetworkMode: "none"}, nil, nil, name))(d.t)
	d.t.Cleanup(func() {
		err := direct.ContainerRemove(context.Background(), got.ID, container.RemoveOptions{Force: true, RemoveVolumes: true})
		if err != nil && !errdefs.IsNotFound(err) {
			d.t.Error(err)
		}
	})
	noError(d.t, direct.ContainerStart(context.Background(), got.ID, container.StartOptions{}))
	return got.ID
}

func readFile(t testing.TB, path string) []byte {
	t.Helper()
	b := must(os.ReadFile(path))(t)
	return b
}
