package engineapi

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// TestUnreadAnswers has a caller ask for much and not read it.
func TestUnreadAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var inspected string
		d, l := boundedDoor(t, Options{}, func(w http.ResponseWriter, r *http.Request) {
			switch {
			case strings.HasSuffix(r.URL.Path, "/containers/json"):
				_, _ = io.WriteString(w, "["+inspected+"]")
			case strings.HasSuffix(r.URL.Path, "/json"):
				_, _ = io.WriteString(w, strings.Replace(inspected, "{", `{"Args":["`+strings.Repeat("x", 1<<20)+`"],`, 1))
			}
		}, "red")
		labels := d.sealed(lifecycle.ObjectContainer, "red")
		inspected = fmt.Sprintf(`{"Id":%q,"Labels":%s,"Config":{"Labels":%s}}`, standInID, labels, labels)
		const callers, most = 24, 48 / 3 // MiB of a tenant, thrice an answer
		var conns [callers]*bufio.Reader
		for i := range conns {
			conn := l[0].Dial()
			defer conn.Close()
			check.Value(io.WriteString(conn, fmt.Sprintf(getRequest, "/containers/"+standInID+"/json")))(t)
			conns[i] = bufio.NewReader(conn)
		}
		time.Sleep(15 * time.Second) // of the bubble's clock
		got := map[int]int{}
		for _, conn := range conns {
			resp := check.Value(http.ReadResponse(conn, nil))(t)
			_, _ = io.Copy(io.Discard, resp.Body)
			got[resp.StatusCode]++
		}
		if n := got[http.StatusOK]; n < 1 || n > most || n+got[http.StatusTooManyRequests] != callers {
			t.Errorf("answers by status: %v", got)
		}
	})
}

// TestImagesOneByOne lists images while the engine is still telling of them.
func TestImagesOneByOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		image := func(id string) string {
			return fmt.Sprintf(`{"Id":"sha256:%s","RepoTags":["berm.local/%s:1"]}`, strings.Repeat(id, 64), id)
		}
		on := make(chan struct{})
		_, l := boundedDoor(t, Options{}, func(w http.ResponseWriter, r *http.Request) {
			if strings.HasSuffix(r.URL.Path, "/images/json") {
				_, _ = io.WriteString(w, "["+image("a")+`,{"Id":"sha256:0","RepoTags":["other.local/x:1"]},`+strings.Replace(image("b"), "{", `{"Labels":{"x":"`+strings.Repeat("y", 64<<10)+`"},`, 1))
				_ = http.NewResponseController(w).Flush()
				<-on
				_, _ = io.WriteString(w, ","+image("c")+"]")
			}
		}, "red")
		conn := l[0].Dial()
		defer conn.Close()
		check.Value(io.WriteString(conn, fmt.Sprintf(getRequest, "/images/json")))(t)
		resp := make(chan *http.Response, 1)
		go func() { got, _ := http.ReadResponse(bufio.NewReader(conn), nil); resp <- got }()
		select {
		case got := <-resp:
			var list []struct{ RepoTags []string }
			close(on)
			if err := json.NewDecoder(got.Body).Decode(&list); err != nil || len(list) != 3 || list[2].RepoTags[0] != "berm.local/c:1" {
				t.Errorf("%+v, %v", list, err)
			}
		case <-time.After(time.Minute): // of the bubble's clock
			close(on)
			t.Error("nothing comes before the engine has told of all")
		}
	})
}

// TestUnreadLists has callers not read lists, of which each holds a connection to the engine.
func TestUnreadLists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ended := make(chan string, 2)
		var d *Proxy
		d, l := boundedDoor(t, Options{}, func(w http.ResponseWriter, r *http.Request) {
			if !strings.HasSuffix(r.URL.Path, "/images/json") && !strings.HasSuffix(r.URL.Path, "/volumes") {
				return
			}
			labels := d.sealed(lifecycle.ObjectVolume, "red")
			entry := fmt.Sprintf(`{"Name":"v","RepoTags":["berm.local/a:1"],"Labels":%s}`, labels)
			begin := "["
			if strings.HasSuffix(r.URL.Path, "/volumes") {
				begin = `{"Volumes":[`
			}
			for _, err := io.WriteString(w, begin+entry); err == nil; {
				_, err = io.WriteString(w, ","+entry)
			}
			ended <- r.URL.Path
		}, "red")
		for _, path := range []string{"/images/json", "/volumes"} {
			conn := l[0].Dial()
			defer conn.Close()
			check.Value(io.WriteString(conn, fmt.Sprintf(getRequest, path)))(t)
		}
		for range 2 {
			select {
			case <-ended:
			case <-time.After(answerTime + time.Minute): // of the bubble's clock
				t.Fatal("a list that nobody reads goes on")
			}
		}
	})
}

// TestManyWalks has a tenant wait for what holds whole lists until the engine has walked.
func TestManyWalks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var d *Proxy
		d, l := boundedDoor(t, Options{}, func(w http.ResponseWriter, r *http.Request) {
			switch {
			case strings.HasSuffix(r.URL.Path, "/images/json"):
				_, _ = fmt.Fprintf(w, `[{"Id":%q,"Labels":%s}]`, "sha256:"+standInID, d.sealed(lifecycle.ObjectImage, "red"))
			case strings.HasSuffix(r.URL.Path, "/system/df"), r.Method == http.MethodGet && r.URL.Query().Get("size") == "1":
				time.Sleep(time.Second)
				_, _ = io.WriteString(w, map[bool]string{true: "{}", false: "[]"}[strings.HasSuffix(r.URL.Path, "/df")])
			case strings.Contains(r.URL.Path, "/images/"):
				w.WriteHeader(http.StatusNotFound)
			}
		}, "red")
		for path, most := range map[string]int{"GET /v1.41/system/df": maxUsages, "POST /v1.41/images/prune": maxPrunes, "POST /v1.41/containers/prune": maxPrunes, "GET /v1.41/containers/json?size=1": maxSizes} {
			var got [600]atomic.Int64
			var all sync.WaitGroup
			for range 2 * most {
				all.Go(func() {
					status, _ := exchange(l[0], path+" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n", strings.NewReader(""))
					got[status].Add(1)
				})
			}
			all.Wait()
			if ok, refused := got[200].Load(), got[429].Load(); ok != int64(most) || refused != int64(most) {
				t.Errorf("%s: %d are answered, %d refused", path, ok, refused)
			}
		}
	})
}

// TestOddAnswers has an engine leave out what all known ones tell.
func TestOddAnswers(t *testing.T) {
	_, s, address := scripted(t, "1.51", "")
	const img = "berm.local/busybox:latest"
	id := "sha256:" + standInID
	for _, ref := range []string{img, id} {
		s.answers["GET /images/"+ref+"/json"] = fmt.Sprintf(`{"Id":%q,"RepoTags":[%q],"Config":null}`, id, img)
	}
	s.answers["GET /images/json"], s.answers["GET /containers/json"] = "[]", "[]"
	for target, answer := range map[string]string{
		"/version":                    `{"Components":[{"Name":"Engine"},{}]}`,
		"/info":                       `{"RegistryConfig":{"InsecureRegistryCIDRs":[null]}}`,
		"/images/" + img + "/history": `[null,{"Id":"x"}]`,
	} {
		for _, asked := range []string{target, strings.Replace(target, img, id, 1), "/"} { // the last is /version
			s.answers["GET "+asked] = answer
		}
		if status, told := say(t, address, http.MethodGet, "/v1.51"+target, ""); status != http.StatusOK {
			t.Errorf("%s: %d: %s", target, status, told)
		}
	}
}
