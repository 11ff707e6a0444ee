package proxy_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/runtime/runtimetest/pipes"
)

const (
	bodyToken  = "token-of-a-body-test"
	otherToken = "token-of-another-tenant"
	thirdToken = "token-of-a-third-tenant"
	bodyLimit  = 23 << 20
)

type dataBody struct {
	Data []byte   `json:"data"`
	List []string `json:"list"`
}

// bodyTokens are of three tenants.
func bodyTokens(t *testing.T) *proxy.Tokens {
	t.Helper()
	tokens, err := proxy.ParseTokens(fmt.Appendf(nil, "tokens:\n- {name: a, tenant: red, token: %s}\n- {name: b, tenant: blue, token: %s}\n- {name: c, tenant: green, token: %s}\n", bodyToken, otherToken, thirdToken))
	must(t, err)
	return tokens
}

// servePipes serves a handler that is given each decoded body, until the test ends.
func servePipes(t *testing.T, bodies *proxy.Bodies, h func(b *dataBody)) *pipes.Listener {
	t.Helper()
	_, door := newDoor(t, proxy.GateOptions{Tokens: bodyTokens(t), Bodies: bodies}, func(w http.ResponseWriter, r *http.Request) error {
		var b dataBody
		if r.Header.Get("X-Unread") != "" {
			return fine(w, r)
		}
		if err := proxy.DecodeBody(w, r, bodyLimit, false, &b); err != nil {
			return err
		}
		h(&b)
		return fine(w, r)
	})
	p := pipes.Listen()
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = proxy.Serve(ctx, p, door, proxy.ServeOptions{DrainTimeout: time.Second}) // the listener is closed under it
	}()
	t.Cleanup(func() {
		cancel()
		_ = p.Close()
		<-served
	})
	return p
}

// post is a request's header.
func post(path, token string, length int64) string {
	h := "POST " + path + " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nX-Api-Token: " + token + "\r\n"
	if length < 0 {
		return h + "Transfer-Encoding: chunked\r\n\r\n"
	}
	return h + fmt.Sprintf("Content-Length: %d\r\n\r\n", length)
}

// answered sends what text gives, and reads one answer; 0 is none.
func answered(conn net.Conn, text io.Reader) int {
	go func() { _, _ = io.Copy(conn, text) }()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode
}

// bigBody is a JSON body with n bytes of data, which takes no memory.
func bigBody(n int64) (io.Reader, int64) {
	const head, tail = `{"data":"`, `"}`
	size := int64(base64.StdEncoding.EncodedLen(int(n)))
	return io.MultiReader(strings.NewReader(head), io.LimitReader(endless('A'), size), strings.NewReader(tail)), size + int64(len(head)+len(tail))
}

// endless is a reader of one byte again and again.
type endless byte

func (e endless) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = byte(e)
	}
	return len(b), nil
}

// TestBodiesHoldMemory sends more large bodies at once than there is memory for.
func TestBodiesHoldMemory(t *testing.T) {
	const callers = 8
	manyValues := `{"list":[` + strings.Repeat(`"",`, 30_000) + `""]}`
	for name, tt := range map[string]struct {
		body  func() (io.Reader, int64)
		chunk bool
		most  uint64 // of the heap, MiB
	}{
		"base64":            {body: func() (io.Reader, int64) { return bigBody(12 << 20) }, most: 130},
		"of unknown length": {body: func() (io.Reader, int64) { return bigBody(12 << 20) }, chunk: true, most: 130},
		"of many values":    {body: func() (io.Reader, int64) { return strings.NewReader(manyValues), int64(len(manyValues)) }, most: 60},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var before, now runtime.MemStats
				runtime.GC()
				runtime.ReadMemStats(&before)
				var mu sync.Mutex
				var most uint64
				p := servePipes(t, nil, func(b *dataBody) {
					mu.Lock()
					runtime.GC()
					runtime.ReadMemStats(&now)
					most = max(most, now.HeapAlloc-min(before.HeapAlloc, now.HeapAlloc))
					mu.Unlock()
					time.Sleep(time.Minute)
					runtime.KeepAlive(b)
				})
				var got [600]atomic.Int64
				var wg sync.WaitGroup
				for range callers {
					wg.Go(func() {
						conn := p.Dial()
						defer func() { _ = conn.Close() }()
						body, size := tt.body()
						if tt.chunk {
							body, size = &chunks{body: body}, -1
						}
						got[answered(conn, io.MultiReader(strings.NewReader(post("/x", bodyToken, size)), body))].Add(1)
					})
				}
				wg.Wait()
				if ok, full := got[200].Load(), got[429].Load(); ok == 0 || full == 0 || ok+full != callers {
					t.Errorf("of %d requests %d were served and %d told to come again", callers, ok, full)
				}
				if most >>= 20; most > tt.most {
					t.Errorf("bodies took %d MiB", most)
				}
			})
		})
	}
}

// chunks is a body in chunks of 64 KiB.
type chunks struct {
	body io.Reader
	text bytes.Buffer // of the chunk that is read now
	end  bool
}

func (c *chunks) Read(b []byte) (int, error) {
	if c.text.Len() == 0 && !c.end {
		piece := make([]byte, 64<<10)
		n, err := io.ReadFull(c.body, piece)
		if n > 0 {
			fmt.Fprintf(&c.text, "%x\r\n%s\r\n", n, piece[:n])
		}
		if c.end = err != nil; c.end {
			c.text.WriteString("0\r\n\r\n")
		}
	}
	return c.text.Read(b)
}

// TestBodiesAreShared checks that one tenant can't keep others out, nor large bodies small ones.
func TestBodiesAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := servePipes(t, nil, func(*dataBody) {})
		send := func(token string, n int64) (int, time.Duration) {
			conn := p.Dial()
			defer func() { _ = conn.Close() }()
			body, size := bigBody(n)
			begun := time.Now()
			return answered(conn, io.MultiReader(strings.NewReader(post("/x", token, size)), body)), time.Since(begun)
		}
		var held []net.Conn
		for range 4 { // which lease all that one tenant may have, and send nothing
			conn := p.Dial()
			held = append(held, conn)
			if _, err := io.WriteString(conn, post("/x", bodyToken, 16<<20)); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		if got, took := send(otherToken, 4<<20); got != 200 || took > 0 {
			t.Errorf("another tenant: %d after %s", got, took)
		}
		if got, took := send(bodyToken, 100); got != 200 || took > 0 {
			t.Errorf("a small body: %d after %s", got, took)
		}
		if got, took := send(bodyToken, 16<<20); got != 429 && got != 200 || took == 0 {
			t.Errorf("a large body, which has to wait: %d after %s", got, took)
		}
		time.Sleep(time.Minute) // the stalled ones are cut off by now
		if got, took := send(bodyToken, 16<<20); got != 200 || took > 0 {
			t.Errorf("a large body afterwards: %d after %s", got, took)
		}
		for _, conn := range held {
			_ = conn.Close()
		}
	})
}

// TestSmallBodiesAreShared has two tenants hold all that they may have for bodies of up to
// MaxBody bytes, and send nothing of them: a third one's bodies need not wait.
func TestSmallBodiesAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := servePipes(t, nil, func(*dataBody) {})
		var held []net.Conn
		for _, token := range []string{bodyToken, otherToken} {
			// Each takes twice its length and 16 KiB, of 16 MiB.
			for _, length := range append(slices.Repeat([]int64{proxy.MaxBody}, 7), proxy.MaxBody-64<<10) {
				conn := p.Dial()
				held = append(held, conn)
				if _, err := io.WriteString(conn, post("/x", token, length)); err != nil {
					t.Fatal(err)
				}
			}
		}
		synctest.Wait()
		send := func(token string, length int64) (int, time.Duration) {
			conn := p.Dial()
			defer func() { _ = conn.Close() }()
			begun := time.Now()
			body := io.MultiReader(strings.NewReader(post("/x", token, length)), strings.NewReader("{}"), io.LimitReader(endless(' '), length-2))
			return answered(conn, body), time.Since(begun)
		}
		if got, took := send(thirdToken, proxy.MaxBody); got != 200 || took > 0 {
			t.Errorf("a third tenant: %d after %s", got, took)
		}
		if _, took := send(bodyToken, 100); took == 0 {
			t.Error("the first tenant has more than its share")
		}
		for _, conn := range held {
			_ = conn.Close()
		}
	})
}

// slowly gives a text in pieces, each after a while.
type slowly struct {
	pieces []string
	every  time.Duration
}

func (s *slowly) Read(b []byte) (int, error) {
	if len(s.pieces) == 0 {
		time.Sleep(24 * time.Hour)
		return 0, io.EOF
	}
	time.Sleep(s.every)
	n := copy(b, s.pieces[0])
	if s.pieces[0] = s.pieces[0][n:]; s.pieces[0] == "" {
		s.pieces = s.pieces[1:]
	}
	return n, nil
}

// cutOff sends a request that never ends, and tells its status and how long its connection stays.
func cutOff(p *pipes.Listener, header string, body io.Reader) (status int, open time.Duration) {
	conn := p.Dial()
	begun := time.Now()
	go func() {
		_, _ = io.WriteString(conn, header)
		_, _ = io.Copy(conn, body)
	}()
	from := bufio.NewReader(conn)
	resp, err := http.ReadResponse(from, nil)
	if err == nil {
		status = resp.StatusCode
		_, _ = io.Copy(io.Discard, resp.Body)
	}
	_, _ = io.Copy(io.Discard, from)
	_ = conn.Close()
	return status, time.Since(begun)
}

func TestStalledBodies(t *testing.T) {
	drip := slices.Repeat([]string{" "}, 1000)
	for name, tt := range map[string]struct {
		path, token string
		length      int64
		pieces      []string
		every       time.Duration
		status      int
		most        time.Duration
	}{
		"nothing comes":           {"/x", bodyToken, 100, nil, 0, 400, 11 * time.Second},
		"nothing comes, chunked":  {"/x", bodyToken, -1, nil, 0, 400, 11 * time.Second},
		"half comes":              {"/x", bodyToken, 100, []string{`{"data":`}, 0, 400, 11 * time.Second},
		"half comes, chunked":     {"/x", bodyToken, -1, []string{"8\r\n" + `{"data":` + "\r\n"}, 0, 400, 11 * time.Second},
		"it drips":                {"/x", bodyToken, 1000, drip, 5 * time.Second, 400, 61 * time.Second},
		"a large one drips":       {"/x", bodyToken, 8 << 20, drip, 5 * time.Second, 400, 61 * time.Second},
		"no such path":            {"/y", bodyToken, 100, nil, 0, 404, 6 * time.Second},
		"no such path, chunked":   {"/y", bodyToken, -1, nil, 0, 404, 6 * time.Second},
		"no such path, it drips":  {"/y", bodyToken, 1000, drip, time.Second, 404, 6 * time.Second},
		"no such path, large":     {"/y", bodyToken, 1 << 30, nil, 0, 404, 6 * time.Second},
		"no token":                {"/x", "none", 100, nil, 0, 401, 6 * time.Second},
		"no token, it drips":      {"/x", "none", -1, slices.Repeat([]string{"1\r\n \r\n"}, 1000), time.Second, 401, 6 * time.Second},
		"answered all the same":   {"/x", bodyToken + "\r\nX-Unread: 1", 100, nil, 0, 200, 61 * time.Second},
		"answered, it drips":      {"/x", bodyToken + "\r\nX-Unread: 1", 1000, drip, 5 * time.Second, 200, 61 * time.Second},
		"larger than may be":      {"/x", bodyToken, bodyLimit + 1, nil, 0, 413, 6 * time.Second},
		"a header and no request": {"/x", bodyToken + "\r\nX-Drip: 1", 0, nil, 0, 400, 3 * time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := servePipes(t, nil, func(*dataBody) {})
				status, open := cutOff(p, post(tt.path, tt.token, tt.length), &slowly{slices.Clone(tt.pieces), tt.every})
				if status != tt.status || open > tt.most {
					t.Errorf("got %d, and it was open for %s", status, open)
				}
				time.Sleep(25 * time.Hour)
			})
		})
	}
}

// FuzzStall sends a body in pieces with pauses, of a length that may be another than is said.
func FuzzStall(f *testing.F) {
	f.Add([]byte(`{"data":"AAAA"}`), int64(15), uint8(3), uint8(0))
	f.Add([]byte(`{"data":"AAAA"}`), int64(1<<20), uint8(1), uint8(9))
	f.Add([]byte("4\r\n{\"li\r\n"), int64(-1), uint8(2), uint8(11))
	f.Add([]byte(`{"list":["",""]}`), int64(16), uint8(200), uint8(4))
	f.Fuzz(func(t *testing.T, body []byte, length int64, piece, pause uint8) {
		if length < -1 || len(body) > 4096 || bytes.Contains(body, []byte("HTTP/1.")) {
			t.Skip()
		}
		synctest.Test(t, func(t *testing.T) {
			p := servePipes(t, nil, func(*dataBody) {})
			s := &slowly{every: time.Duration(pause) * time.Second}
			for part := range slices.Chunk(body, int(piece)+1) {
				s.pieces = append(s.pieces, string(part))
			}
			_, open := cutOff(p, post("/x", bodyToken, length), s)
			// A minute for the body, or for the header of what follows it, and what a connection may idle.
			if open > 5*time.Minute {
				t.Errorf("it was open for %s", open)
			}
			time.Sleep(25 * time.Hour)
		})
	})
}

// TestBudget checks what leases hold, wait for and give back.
func TestBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := proxy.NewBudget("bytes", 100, 60)
		one, two, other := b.Lease("red"), b.Lease("red"), b.Lease("blue")
		refused := func(err error) bool {
			var f *proxy.Fault
			return errors.As(err, &f) && f.Status == http.StatusTooManyRequests && f.RetryAfter > 0
		}
		begun := time.Now()
		for _, err := range []error{one.Resize(t.Context(), 40), other.Resize(t.Context(), 60), one.Resize(t.Context(), 30)} {
			if err != nil || time.Since(begun) > 0 {
				t.Fatalf("%v after %s", err, time.Since(begun))
			}
		}
		if err := two.Resize(t.Context(), 40); !refused(err) || time.Since(begun) == 0 {
			t.Errorf("more than its tenant may have: %v after %s", err, time.Since(begun))
		}
		if err := two.Resize(t.Context(), 20); !refused(err) {
			t.Errorf("more than all may have: %v", err)
		}
		begun = time.Now()
		if err := two.Resize(t.Context(), 61); !refused(err) || time.Since(begun) > 0 {
			t.Errorf("more than it may ever have: %v after %s", err, time.Since(begun))
		}
		time.AfterFunc(time.Second, other.Release)
		if err := two.Resize(t.Context(), 30); err != nil || time.Since(begun) != time.Second {
			t.Errorf("what another gives back: %v after %s", err, time.Since(begun))
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := two.Resize(ctx, 31); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v", err)
		}
		one.Release()
		one.Release()
		two.Release()
		for _, tenant := range []string{"red", "blue"} {
			l := b.Lease(tenant)
			if err := l.Resize(t.Context(), 60); err != nil {
				t.Error(err)
			}
			l.Release()
		}
		var none *proxy.Budget
		if err := none.Lease("red").Resize(t.Context(), 1<<40); err != nil {
			t.Error(err)
		}
	})
}

// TestOutputHoldsMemory checks that output leases memory as it grows, by tenant and in all, and
// that commands run which print little while others hold all of it.
func TestOutputHoldsMemory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		keeping, end := make(chan error, 4), make(chan struct{})
		_, door := newDoor(t, proxy.GateOptions{Tokens: bodyTokens(t)}, func(_ http.ResponseWriter, r *http.Request) error {
			keep, release := proxy.ExchangeOf(r.Context()).LeaseOutput(r.Context())
			defer release()
			err := keep(4 << 10)
			if err != nil {
				t.Errorf("its first output: %v", err)
			}
			for err == nil {
				err = keep(4 << 10)
			}
			if again := keep(1); again == nil {
				t.Error("it keeps more than was refused")
			}
			keeping <- err
			<-end
			return err
		})
		var took []time.Duration
		run := func(token string) {
			begun := time.Now()
			go func() {
				r := httptest.NewRequest(http.MethodPost, "http://localhost/x", http.NoBody)
				r.Header.Set("X-Api-Token", token)
				door.ServeHTTP(httptest.NewRecorder(), r)
			}()
			var full *proxy.Fault
			if err := <-keeping; !errors.As(err, &full) || full.Status != http.StatusTooManyRequests || !strings.Contains(full.Detail, "output") {
				t.Errorf("got %v", err)
			}
			took = append(took, time.Since(begun))
		}
		run(bodyToken)
		run(bodyToken) // which finds its tenant's share taken
		run(otherToken)
		run(thirdToken) // which finds all taken
		if want := []time.Duration{0, 10 * time.Second, 0, 10 * time.Second}; !slices.Equal(took, want) {
			t.Errorf("they waited %v, want %v", took, want)
		}
		close(end)
		synctest.Wait()
		run(bodyToken)
		if took[4] != 0 {
			t.Errorf("once all is given back: %v", took[4])
		}
	})
}
