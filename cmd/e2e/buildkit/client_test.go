package buildkit

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	control "github.com/moby/buildkit/api/services/control"
	gateway "github.com/moby/buildkit/frontend/gateway/pb"
	"github.com/moby/buildkit/session"
	"github.com/moby/buildkit/session/filesync"
	"github.com/moby/buildkit/session/secrets/secretsprovider"
	"github.com/tonistiigi/fsutil"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
)

// client speaks to BuildKit behind a socket of a Docker Engine's API.
type client struct {
	socket string
	grpc   *grpc.ClientConn
	http   *http.Client
}

// patience is for calls that must be answered.
const patience = time.Minute

func dial(t *testing.T, socket string) *client {
	c := &client{socket: socket}
	var err error
	c.grpc, err = grpc.NewClient("passthrough:buildkit", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return c.upgrade(ctx, "/grpc", nil) }),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(1<<30), grpc.MaxCallSendMsgSize(1<<30)))
	must(t, err)
	t.Cleanup(func() { _ = c.grpc.Close() })
	c.http = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", socket)
	}}}
	t.Cleanup(c.http.CloseIdleConnections)
	return c
}

// upgraded is a connection of which some is read already.
type upgraded struct {
	net.Conn
	r *bufio.Reader
}

func (u upgraded) Read(p []byte) (int, error) { return u.r.Read(p) }

// upgrade opens a connection to an endpoint.
func (c *client) upgrade(ctx context.Context, path string, header map[string][]string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", c.socket)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://docker"+path, nil)
	if err != nil {
		return nil, err
	}
	for k, v := range header {
		req.Header[http.CanonicalHeaderKey(k)] = v
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", "h2c")
	if err := req.Write(conn); err != nil {
		return nil, err
	}
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, req)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		text, _ := io.ReadAll(resp.Body)
		_ = conn.Close()
		return nil, fmt.Errorf("POST %s: %s %s", path, resp.Status, named(resp.StatusCode, string(text)))
	}
	return upgraded{conn, r}, nil
}

// named gives a status of HTTP the name of its like in gRPC.
func named(status int, text string) string {
	switch status {
	case http.StatusForbidden:
		return "PermissionDenied: " + text
	case http.StatusNotFound:
		return "NotFound: " + text
	case http.StatusBadRequest:
		return "InvalidArgument: " + text
	case http.StatusTooManyRequests:
		return "ResourceExhausted: " + text
	}
	return text
}

// rest makes a call of the Docker Engine's API.
func (c *client) rest(ctx context.Context, method, path string, body []byte) (string, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://docker"+path, bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if resp.StatusCode >= 300 {
		return "", fmt.Errorf("%s %s: %s %s", method, path, resp.Status, named(resp.StatusCode, string(text)))
	}
	return string(text), err
}

func (c *client) control() control.ControlClient { return control.NewControlClient(c.grpc) }

func (c *client) gateway() gateway.LLBBridgeClient { return gateway.NewLLBBridgeClient(c.grpc) }

// newRef returns a ref that is new.
func newRef() string {
	b := make([]byte, 12)
	_, _ = rand.Read(b)
	return hex.EncodeToString(b)
}

// build is what a client asks for.
type build struct {
	dockerfile string
	files      map[string]string
	stamp      time.Time // of all files
	sharedKey  string
	attrs      map[string]string
	secrets    map[string][]byte
	outputs    []*control.Exporter
	more       []session.Attachable
	change     func(*control.SolveRequest) // the last word on the request
	// frontend, if not nil, is the build's own.
	frontend func(ctx context.Context, ref, session string) error
}

// result is what came of a build.
type result struct {
	ref  string
	log  string // what steps printed, and names of vertexes
	resp *control.SolveResponse
}

// openSession opens a session with files and secrets. It ends with ctx.
func (c *client) openSession(ctx context.Context, b build) (*session.Session, error) {
	dir, err := os.MkdirTemp("", "bk")
	if err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, func() { _ = os.RemoveAll(dir) })
	files := map[string]string{"Dockerfile": b.dockerfile}
	for name, text := range b.files {
		files[name] = text
	}
	for name, text := range files {
		file := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o644)); err != nil {
			return nil, err
		}
		if !b.stamp.IsZero() {
			if err := os.Chtimes(file, b.stamp, b.stamp); err != nil {
				return nil, err
			}
		}
	}
	fs, err := fsutil.NewFS(dir)
	if err != nil {
		return nil, err
	}
	s, err := session.NewSession(ctx, b.sharedKey)
	if err != nil {
		return nil, err
	}
	s.Allow(filesync.NewFSSyncProvider(filesync.StaticDirSource{"context": fs, "dockerfile": fs}))
	s.Allow(secretsprovider.FromMap(b.secrets))
	for _, a := range b.more {
		s.Allow(a)
	}
	go func() {
		err := s.Run(ctx, func(ctx context.Context, _ string, meta map[string][]string) (net.Conn, error) {
			return c.upgrade(ctx, "/session", meta)
		})
		if err != nil && ctx.Err() == nil {
			fmt.Printf("a session ended: %v\n", err)
		}
	}()
	context.AfterFunc(ctx, func() { _ = s.Close() })
	return s, nil
}

// run builds, and follows the build.
func (c *client) run(ctx context.Context, b build) (*result, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	s, err := c.openSession(ctx, b)
	if err != nil {
		return nil, err
	}
	req := &control.SolveRequest{
		Ref: newRef(), Session: s.ID(), Frontend: "dockerfile.v0", FrontendAttrs: map[string]string{}, Exporters: b.outputs, Cache: &control.CacheOptions{},
	}
	if b.frontend != nil {
		req.Frontend = ""
	}
	for k, v := range b.attrs {
		req.FrontendAttrs[k] = v
	}
	if b.change != nil {
		b.change(req)
	}
	r := &result{ref: req.Ref}
	followed, stop := context.WithCancel(ctx)
	var all sync.WaitGroup
	var log strings.Builder
	all.Go(func() {
		stream, err := c.control().Status(followed, &control.StatusRequest{Ref: req.Ref})
		for err == nil {
			var m *control.StatusResponse
			if m, err = stream.Recv(); err == nil {
				for _, v := range m.Vertexes {
					log.WriteString(v.Name + "\n" + v.Error + "\n")
				}
				for _, l := range m.Logs {
					log.Write(l.Msg)
				}
			}
		}
	})
	var front error
	if b.frontend != nil {
		all.Go(func() { front = b.frontend(followed, req.Ref, req.Session) })
	}
	r.resp, err = c.control().Solve(ctx, req)
	time.AfterFunc(3*time.Second, stop) // the status has its own end
	if err != nil {
		stop()
	}
	all.Wait()
	stop()
	r.log = log.String()
	return r, errors.Join(err, front)
}

// inBuild returns a context for calls of a build's frontend.
func inBuild(ctx context.Context, ref string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "buildkit-controlapi-buildid", ref)
}

// web is a server in the engine's network namespace. It has /pub, which everybody may read,
// /private, and /pub/away, which leads there.
type web struct{ addr string }

func newWeb(t *testing.T, netns string) *web {
	listening := make(chan net.Listener, 1)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		f, err := os.Open(netns)
		if err == nil {
			err = unix.Setns(int(f.Fd()), unix.CLONE_NEWNET)
			_ = f.Close()
		}
		var l net.Listener
		if err == nil {
			l, err = new(net.ListenConfig).Listen(context.Background(), "tcp", "127.0.0.1:0")
		}
		if err != nil {
			t.Error(err)
		}
		listening <- l
	}()
	l := <-listening
	if l == nil {
		t.FailNow()
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/private/", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, marker+"web\n") })
	mux.HandleFunc("/pub/f", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "public\n") })
	mux.HandleFunc("/pub/away", func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/private/f", http.StatusFound) })
	s := &http.Server{Handler: mux, ReadHeaderTimeout: patience}
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close() })
	return &web{addr: l.Addr().String()}
}
