package proxy_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/runtime/runtimetest/pipes"
)

// TestServeBoundsConnections counts a client's connections, also those that are taken over.
func TestServeBoundsConnections(t *testing.T) {
	t.Run("of a client", func(t *testing.T) { boundsConnections(t, false) })
	t.Run("of all", func(t *testing.T) { boundsConnections(t, true) })
}

// strangers has each connection come from another address.
type strangers struct {
	net.Listener
	n byte
}

type stranger struct {
	net.Conn
	n byte
}

func (l *strangers) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	l.n++
	return stranger{conn, l.n}, err
}

func (c stranger) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(10, 0, 0, c.n)} }

func boundsConnections(t *testing.T, one bool) {
	synctest.Test(t, func(t *testing.T) {
		l := pipes.Listen()
		var from net.Listener = l
		if one {
			from = &strangers{Listener: l}
		}
		ctx, cancel := context.WithCancel(context.Background())
		served := make(chan struct{})
		go func() {
			defer close(served)
			_ = proxy.Serve(ctx, from, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.URL.Path != "/take" {
					return
				}
				conn, _, err := http.NewResponseController(w).Hijack()
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\n\r\n")
				_, _ = io.Copy(io.Discard, conn)
				_ = conn.Close()
			}), proxy.ServeOptions{MaxConns: 2, OneClient: one, DrainTimeout: time.Second})
		}()
		open := func(path string) (net.Conn, error) {
			conn := l.Dial()
			_, _ = io.WriteString(conn, "GET "+path+" HTTP/1.1\r\nHost: localhost\r\n\r\n") // to one that may be closed
			_, err := http.ReadResponse(bufio.NewReader(conn), nil)
			return conn, err
		}
		for range 3 {
			taken, err1 := open("/take")
			kept, err2 := open("/")
			third, err3 := open("/")
			if err1 != nil || err2 != nil || err3 == nil {
				t.Errorf("got %v, %v, and the third %v", err1, err2, err3)
			}
			_, _, _ = taken.Close(), kept.Close(), third.Close()
			synctest.Wait()
		}
		cancel()
		_ = l.Close()
		<-served
	})
}

func TestListenUnix(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "berm.sock")
	l, err := proxy.Listen(t.Context(), "unix://"+path, 0o640)
	must(t, err)
	fi, err := os.Lstat(path)
	if err != nil || fi.Mode().Perm() != 0o640 || fi.Mode().Type() != fs.ModeSocket {
		t.Errorf("got %v, %v", fi.Mode(), err)
	}
	if got := l.Addr().String(); got != path { // where others find it
		t.Errorf("its address is %s", got)
	}
	if _, err := proxy.Listen(t.Context(), "unix://"+path, 0o600); err == nil {
		t.Error("a socket in use was taken over")
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		t.Errorf("left behind: %v, %v", entries, err)
	}

	t.Run("directory", func(t *testing.T) { // like /run/berm after a boot
		below := filepath.Join(dir, "run", "berm")
		if _, err := proxy.Listen(t.Context(), "unix://"+filepath.Join(below, "s"), 0o600); err == nil {
			t.Error("more than one directory was made")
		}
		l, err := proxy.Listen(t.Context(), "unix://"+filepath.Join(dir, "run", "s"), 0o600)
		must(t, err)
		if fi, err := os.Stat(filepath.Join(dir, "run")); err != nil || fi.Mode().Perm()&0o022 != 0 {
			t.Errorf("the directory: %v, %v", fi, err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Run("stale", func(t *testing.T) {
		stale, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
		must(t, err)
		stale.SetUnlinkOnClose(false)
		must(t, stale.Close())
		l, err := proxy.Listen(t.Context(), "unix://"+path, 0o600)
		must(t, err)
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Run("a file", func(t *testing.T) {
		must(t, os.WriteFile(path, []byte("precious"), 0o600))
		if _, err := proxy.Listen(t.Context(), "unix://"+path, 0o600); err == nil {
			t.Error("a file was replaced")
		}
		if b, err := os.ReadFile(path); err != nil || string(b) != "precious" {
			t.Errorf("the file is %q now, %v", b, err)
		}
	})
	t.Run("relative", func(t *testing.T) {
		if _, err := proxy.Listen(t.Context(), "unix://berm.sock", 0o600); err == nil {
			t.Error("a relative path was taken")
		}
	})
}

// serve starts a server and says how to stop it and what it came to.
func serve(t *testing.T, h http.Handler, drain time.Duration) (url string, stop context.CancelFunc, done chan error) {
	t.Helper()
	l, err := proxy.Listen(t.Context(), "127.0.0.1:0", 0)
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	done = make(chan error, 1)
	go func() { done <- proxy.Serve(ctx, l, h, proxy.ServeOptions{DrainTimeout: drain}) }()
	return "http://" + l.Addr().String(), cancel, done
}

// answerOf gives the body of an answer, or the error.
func answerOf(url string) <-chan string {
	body := make(chan string, 1)
	go func() {
		resp, err := http.Get(url)
		if err != nil {
			body <- err.Error()
			return
		}
		b, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		body <- string(b)
	}()
	return body
}

func TestServeDrains(t *testing.T) {
	began, finish := make(chan struct{}), make(chan struct{})
	url, stop, done := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		close(began)
		<-finish
		if r.Context().Err() != nil {
			t.Error("a request in flight was cancelled")
		}
		_, _ = io.WriteString(w, "finished")
	}), time.Minute)
	body := answerOf(url)
	<-began
	stop()
	for { // until it takes no more
		c, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
		if err != nil {
			break
		}
		_ = c.Close()
	}
	select {
	case err := <-done:
		t.Fatalf("it didn't wait: %v", err)
	default:
	}
	close(finish)
	if got := <-body; got != "finished" {
		t.Errorf("got %q", got)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestServeEndsStreamsAtOnce(t *testing.T) {
	began := make(chan struct{})
	url, stop, done := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := proxy.UntilDrain(r.Context())
		defer cancel()
		close(began)
		<-ctx.Done()
		if !proxy.GoingDown(ctx) || proxy.GoingDown(r.Context()) {
			t.Error("it isn't told why, or the request is ended as well")
		}
		_, _ = io.WriteString(w, "the end")
	}), time.Hour)
	body := answerOf(url)
	<-began
	stop()
	if got := <-body; got != "the end" {
		t.Errorf("got %q", got)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// A handler that has taken over its connection is waited for like any other.
func TestServeWaitsForTakenOver(t *testing.T) {
	for name, drain := range map[string]time.Duration{"ends": time.Hour, "goes on": 20 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			began, end, ended := make(chan struct{}), make(chan struct{}), make(chan struct{})
			url, stop, done := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				c, _, err := http.NewResponseController(w).Hijack()
				if err != nil {
					t.Error(err)
					return
				}
				defer func() { _ = c.Close() }()
				close(began)
				select {
				case <-end:
				case <-r.Context().Done():
				}
				close(ended)
			}), drain)
			go func() {
				if resp, err := http.Get(url); err == nil {
					_ = resp.Body.Close()
				}
			}()
			<-began
			stop()
			if name == "ends" {
				select {
				case err := <-done:
					t.Fatalf("it didn't wait: %v", err)
				case <-time.After(20 * time.Millisecond):
				}
				close(end)
			}
			if err := <-done; err != nil {
				t.Error(err)
			}
			<-ended
		})
	}
}

// What is broken off says so, whether or not it has taken over its connection.
func TestServeLastWords(t *testing.T) {
	gate, err := proxy.NewGate(proxy.GateOptions{Fail: writeFault})
	must(t, err)
	for name, h := range map[string]proxy.Handler{
		"503 going_down": func(_ http.ResponseWriter, r *http.Request) error {
			<-r.Context().Done()
			return r.Context().Err() // whatever it is
		},
		"200 the end": func(w http.ResponseWriter, r *http.Request) error {
			c, _, err := http.NewResponseController(w).Hijack()
			if err != nil {
				return err
			}
			defer func() { _ = c.Close() }()
			<-r.Context().Done()
			if !proxy.GoingDown(r.Context()) || !proxy.Draining(r.Context()) {
				t.Error("it isn't told why")
			}
			_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nthe end")
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			began := make(chan struct{})
			url, stop, done := serve(t, gate.Wrap(gate.Handle(proxy.Route{Name: "/"}, func(w http.ResponseWriter, r *http.Request) error {
				if proxy.GoingDown(r.Context()) || proxy.Draining(r.Context()) {
					t.Error("it goes down before it is told to")
				}
				close(began)
				return h(w, r)
			})), 20*time.Millisecond)
			got := make(chan string, 1)
			go func() {
				resp, err := http.Get(url)
				if err != nil {
					got <- err.Error()
					return
				}
				b, err := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				got <- fmt.Sprint(resp.StatusCode, " ", string(b))
				if err != nil {
					t.Error(err)
				}
			}()
			<-began
			stop()
			if got := <-got; got != name {
				t.Errorf("got %q", got)
			}
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
}

func TestUntilDrainOutsideOfServe(t *testing.T) {
	parent, cancel := context.WithCancel(t.Context())
	ctx, stop := proxy.UntilDrain(parent)
	defer stop()
	if ctx.Err() != nil || proxy.Draining(ctx) {
		t.Error("it ended at once")
	}
	cancel()
	<-ctx.Done()
	if proxy.GoingDown(ctx) {
		t.Error("a caller that leaves is no server that goes down")
	}
}

// The standard library would answer OPTIONS * by itself, without asking who it is.
func TestServeHandsOnOptions(t *testing.T) {
	url, stop, done := serve(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusTeapot)
	}), time.Second)
	conn, err := net.Dial("tcp", strings.TrimPrefix(url, "http://"))
	must(t, err)
	defer func() { _ = conn.Close() }()
	if _, err := io.WriteString(conn, "OPTIONS * HTTP/1.1\r\nHost: evil\r\nConnection: close\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	answer, err := io.ReadAll(conn)
	if err != nil || !strings.HasPrefix(string(answer), "HTTP/1.1 418 ") {
		t.Errorf("%q, %v", answer, err)
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
