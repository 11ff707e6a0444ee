package e2e

import (
	"context"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/bermhq/berm/cmd/e2e/program"
)

// plainProxyEnv makes the test binary a plainProxy; its value names the two sockets.
const plainProxyEnv = "BERM_BENCH_PLAIN"

// plainProxy passes requests on from one unix socket to another, by net/http alone.
func plainProxy(from, to string) error {
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", to)
		},
		DisableCompression: true, MaxIdleConnsPerHost: 256, ReadBufferSize: 64 << 10, WriteBufferSize: 64 << 10,
	}
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "unix", from)
	if err != nil {
		return err
	}
	return (&http.Server{ReadHeaderTimeout: time.Minute, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		out := r.Clone(r.Context())
		out.URL.Scheme, out.URL.Host, out.RequestURI = "http", "docker", ""
		resp, err := transport.RoundTrip(out)
		if err != nil {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		defer func() { _ = resp.Body.Close() }()
		maps.Copy(w.Header(), resp.Header)
		w.WriteHeader(resp.StatusCode)
		_, _ = io.CopyBuffer(struct{ io.Writer }{w}, resp.Body, make([]byte, 64<<10))
	})}).Serve(l)
}

// haproxyConfig is for an HAProxy of one process between two unix sockets.
const haproxyConfig = `defaults
  mode http
  timeout connect 5s
  timeout client 1m
  timeout server 1m
frontend f
  bind unix@%s
  default_backend b
backend b
  server e unix@%s
`

// started runs another proxy before the engine, and returns it as a door.
func (s *doorBench) started(address string, cmd *exec.Cmd) *door {
	p, err := program.Start(cmd, program.NewOutput())
	must(s.b, err)
	s.b.Cleanup(p.Kill)
	d := newDoor(s.b, address)
	d.cmd = cmd
	must(s.b, p.Ready(deadline(s.b), func() bool { return second(d.get(s.b.Context(), "/_ping")) == nil }))
	return d
}

// cost measures what of a CPU Berm takes for a request, beside http.Server with
// http.Transport and, where it is installed, HAProxy. It makes the same requests of each in turns.
func (s *doorBench) cost(b *testing.B) {
	engine, dir := strings.TrimPrefix(s.direct.docker.DaemonHost(), "unix://"), b.TempDir()
	binary, err := os.Executable()
	must(s.b, err)
	plain := exec.Command(binary)
	plain.Env = append(os.Environ(), plainProxyEnv+"="+dir+"/plain.sock:"+engine)
	doors := []*door{s.berm, s.started(dir+"/plain.sock", plain)}
	names := []string{"berm", "plain", "haproxy"}
	if path, err := exec.LookPath("haproxy"); err == nil {
		write(b, dir+"/haproxy.cfg", fmt.Sprintf(haproxyConfig, dir+"/haproxy.sock", engine))
		doors = append(doors, s.started(dir+"/haproxy.sock", exec.Command(path, "-db", "-f", dir+"/haproxy.cfg")))
	}
	none := "/v1.41/containers/json?filters=" + url.QueryEscape(`{"label":["none=1"]}`)
	for _, request := range []struct {
		name, path string
		n          int
	}{{"_ping", "/_ping", 4000}, {"inspect", "/v1.41/containers/" + s.file + "/json", 1000}, {"none listed", none, 4000}} {
		b.Run(request.name, func(b *testing.B) {
			used, n := make([]time.Duration, len(doors)), 0
			for ; b.Loop(); n += request.n {
				for i, d := range doors {
					before := cpuTime(b, d.cmd.Process.Pid)
					var left atomic.Int64
					left.Store(int64(request.n))
					must(s.b, parallel(16, func(int) error {
						for left.Add(-1) >= 0 {
							if _, err := d.get(b.Context(), request.path); err != nil {
								return err
							}
						}
						return nil
					}))
					used[i] += cpuTime(b, d.cmd.Process.Pid) - before
				}
			}
			b.ReportMetric(0, "ns/op")
			for i, u := range used {
				b.ReportMetric(float64(u.Microseconds())/float64(n), names[i]+"-cpu-us/req")
			}
			b.ReportMetric(float64(used[0])/float64(used[1]), "of-plain")
		})
	}
}
