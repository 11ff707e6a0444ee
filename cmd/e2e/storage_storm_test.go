package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/crc32"
	"iter"
	mrand "math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
	"github.com/bermhq/berm/proxy/sandboxapi/openapitest"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const (
	storageWorkers = 4 // each with a chat of its own
	storageNames   = 4 // of files in a chat
	maxStormFile   = 300 << 10
	maxStormEntry  = 30 << 10
)

// storageStorm calls the server's storage at random, and remembers what it was answered.
type storageStorm struct {
	t         *testing.T
	client    *client.Client
	workspace string
	chats     [storageWorkers]stormChat
}

// stormChat is one worker's. What was answered is certain; what was cut off may have
// happened or not.
type stormChat struct {
	id       string
	deleted  bool                          // a delete of the whole chat was cut off
	files    [storageNames]map[string]bool // what each may hold, by stamp; "" is that it isn't there
	history  []string                      // the entries that were answered
	entry    string                        // one that was cut off
	replaced bool                          // the history was replaced by entry, rather than appended to
}

func newStormChat(worker int) stormChat {
	c := stormChat{id: fmt.Sprintf("chat-%d", worker)}
	c.forget()
	return c
}

// forget is what becomes of a chat that is deleted.
func (c *stormChat) forget() {
	for n := range c.files {
		c.files[n] = map[string]bool{"": true}
	}
	c.history, c.entry, c.replaced, c.deleted = nil, "", false, false
}

// stamped is content that tells whether all of it is there.
func stamped(size int) (stamp string, content []byte) {
	body := make([]byte, mrand.IntN(size))
	_, _ = rand.Read(body)
	stamp = fmt.Sprintf("%s %d %08x\n", rand.Text(), len(body), crc32.ChecksumIEEE(body))
	return stamp, append([]byte(stamp), body...)
}

// stampOf checks that content is whole.
func stampOf(content []byte) (string, error) {
	stamp, body, ok := bytes.Cut(content, []byte("\n"))
	var id string
	var size int
	var sum uint32
	if _, err := fmt.Sscanf(string(stamp), "%s %d %x", &id, &size, &sum); !ok || err != nil || size != len(body) || sum != crc32.ChecksumIEEE(body) {
		return "", fmt.Errorf("%d bytes that begin with %.60q aren't all that was sent", len(content), stamp)
	}
	return string(stamp) + "\n", nil
}

func inTurn(files []client.NewChatFile) iter.Seq2[client.NewChatFile, error] {
	return func(yield func(client.NewChatFile, error) bool) {
		for _, f := range files {
			if !yield(f, nil) {
				return
			}
		}
	}
}

func stormName(n int) string { return fmt.Sprintf("file %d.bin", n) }

func (s *storageStorm) blow(ctx context.Context) {
	var wg sync.WaitGroup
	for i := range s.chats {
		wg.Go(func() {
			for ctx.Err() == nil {
				s.chats[i].once(s.t.Context(), s)
			}
		})
	}
	wg.Wait()
}

// once makes one call. Whatever isn't answered may have been done.
func (c *stormChat) once(ctx context.Context, s *storageStorm) {
	if c.deleted || c.entry != "" {
		time.Sleep(time.Millisecond)
		return // it is to be found out first what a call came to
	}
	n := mrand.IntN(storageNames)
	switch dice := mrand.IntN(20); {
	case dice < 7:
		stamp, content := stamped(maxStormFile)
		c.files[n][stamp] = true
		if _, err := s.client.PutChatFile(ctx, c.id, stormName(n), bytes.NewReader(content), client.PutChatFileOptions{ContentType: "application/x-storm"}); s.answered(err) {
			c.files[n] = map[string]bool{stamp: true}
		}
	case dice < 9:
		m := (n + 1) % storageNames
		stamps, uploads := [2]string{}, [2]client.NewChatFile{}
		for i, name := range []int{n, m} {
			var content []byte
			stamps[i], content = stamped(maxStormFile)
			uploads[i] = client.NewChatFile{Name: stormName(name), Content: bytes.NewReader(content)}
			c.files[name][stamps[i]] = true
		}
		if _, err := s.client.PutChatFiles(ctx, c.id, inTurn(uploads[:])); s.answered(err) {
			c.files[n], c.files[m] = map[string]bool{stamps[0]: true}, map[string]bool{stamps[1]: true}
		}
	case dice < 12:
		held := c.files[n]
		c.files[n][""] = true
		err := s.client.DeleteChatFile(ctx, c.id, stormName(n))
		switch {
		case err == nil:
			c.files[n] = map[string]bool{"": true}
		case refusal(err).Code == "chat_file_not_found":
			if !held[""] {
				s.t.Errorf("%s: %s was there, and isn't", c.id, stormName(n))
			}
			c.files[n] = map[string]bool{"": true}
		default:
			s.answered(err)
		}
	case dice < 18:
		stamp, content := stamped(maxStormEntry)
		c.entry = string(content)
		if _, err := s.client.AppendHistory(ctx, c.id, bytes.NewReader(content)); s.answered(err) {
			c.history, c.entry = append(c.history, stamp), ""
		}
	case dice < 19:
		stamp, content := stamped(maxStormEntry)
		c.entry, c.replaced = string(content), true
		if _, err := s.client.PutHistory(ctx, c.id, bytes.NewReader(content)); s.answered(err) {
			c.history, c.entry, c.replaced = []string{stamp}, "", false
		}
	default:
		c.deleted = true
		if err := s.client.DeleteChat(ctx, c.id); s.answered(err) {
			c.forget()
			c.deleted = true
			if _, err := s.client.EnsureChat(ctx, c.id, s.workspace); s.answered(err) {
				c.deleted = false
			}
		}
	}
}

// answered tells whether a call succeeded. One that was cut off didn't; one that was
// refused is a defect.
func (s *storageStorm) answered(err error) bool {
	if refused := refusal(err); refused.Status != 0 && refused.Code != "backend_unavailable" {
		s.t.Errorf("refused: %v", err)
	}
	return err == nil
}

// check compares all that is there, and its records, with what was answered.
func (s *storageStorm) check(ctx context.Context, root string) {
	var used int64
	for i := range s.chats {
		c := &s.chats[i]
		if _, err := s.client.EnsureChat(ctx, c.id, s.workspace); err != nil {
			s.t.Errorf("%s: %v", c.id, err)
			continue
		}
		used += s.checkChat(ctx, root, c)
	}
	usage, err := s.client.WorkspaceUsage(ctx, s.workspace)
	if err != nil || usage.UsedBytes != used {
		s.t.Errorf("usage is %+v (%v), %d bytes are there", usage, err, used)
	}
}

func (s *storageStorm) checkChat(ctx context.Context, root string, c *stormChat) (used int64) {
	records := map[string]apitype.ChatFile{}
	for f, err := range s.client.ChatFiles(ctx, c.id, 0) {
		if err != nil {
			s.t.Errorf("%s: %v", c.id, err)
			return 0
		}
		records[f.Name] = f
	}
	entries, err := os.ReadDir(filepath.Join(root, c.id))
	if err != nil {
		s.t.Errorf("%s: %v", c.id, err)
	}
	for _, e := range entries {
		fi, err := e.Info()
		if err != nil {
			s.t.Errorf("%s: %v", c.id, err)
			continue
		}
		used += fi.Size()
		if f, ok := records[e.Name()]; e.Name() != "history.md" && (!ok || f.SizeBytes != fi.Size()) {
			s.t.Errorf("%s: %s has %d bytes, its record is %+v", c.id, e.Name(), fi.Size(), f)
		}
	}
	found := [storageNames]string{}
	for n := range storageNames {
		if f, ok := records[stormName(n)]; ok {
			found[n] = s.read(c, f)
		}
		delete(records, stormName(n))
	}
	if len(records) > 0 {
		s.t.Errorf("%s: there are records of %v", c.id, records)
	}
	history := s.readHistory(c)
	if c.deleted { // all of it, or nothing
		if len(history) == 0 && found == [storageNames]string{} {
			c.forget()
		}
		c.deleted = false
	}
	for n, stamp := range found {
		if !c.files[n][stamp] {
			s.t.Errorf("%s: %s is %.60q, of which %d were possible", c.id, stormName(n), stamp, len(c.files[n]))
		}
		c.files[n] = map[string]bool{stamp: true}
	}
	s.settleHistory(c, history)
	return used
}

// read answers a file's stamp.
func (s *storageStorm) read(c *stormChat, f apitype.ChatFile) string {
	content, err := all(s.client.ReadChatFile(s.t.Context(), c.id, f.Name, 0, 0))
	stamp, wrong := stampOf([]byte(content))
	if err := errors.Join(err, wrong); err != nil || int64(len(content)) != f.SizeBytes {
		s.t.Errorf("%s: %s, %d bytes: %v", c.id, f.Name, f.SizeBytes, err)
	}
	return stamp
}

// readHistory answers the stamps of a history's entries.
func (s *storageStorm) readHistory(c *stormChat) (stamps []string) {
	history, err := all(s.client.History(s.t.Context(), c.id, 0, 0))
	if err != nil {
		s.t.Errorf("%s: %v", c.id, err)
	}
	for rest := []byte(history); len(rest) > 0; {
		stamp, _, _ := bytes.Cut(rest, []byte("\n"))
		var id string
		var size int
		_, _ = fmt.Sscanf(string(stamp), "%s %d", &id, &size)
		end := len(stamp) + 1 + size
		if end > len(rest) {
			s.t.Errorf("%s: its history ends with half an entry", c.id)
			return stamps
		}
		whole, err := stampOf(rest[:end])
		if err != nil {
			s.t.Errorf("%s: its history has an entry of which %v", c.id, err)
			return stamps
		}
		stamps, rest = append(stamps, whole), rest[end:]
	}
	return stamps
}

// settleHistory compares a history with what it may be.
func (s *storageStorm) settleHistory(c *stormChat, got []string) {
	possible := [][]string{c.history}
	if c.entry != "" {
		stamp, _, _ := strings.Cut(c.entry, "\n")
		after := []string{stamp + "\n"}
		if !c.replaced {
			after = append(slices.Clone(c.history), after...)
		}
		possible = append(possible, after)
	}
	if !slices.ContainsFunc(possible, func(p []string) bool { return slices.Equal(p, got) }) {
		s.t.Errorf("%s: its history has %d entries, %d were answered, and one more is possible: %v", c.id, len(got), len(c.history), c.entry != "")
	}
	c.history, c.entry, c.replaced = got, "", false
}

// The server is killed at random instants of a storm of uploads, deletes and changes of
// histories. After each restart no file and no entry is half there, each file has its
// record and each record its file, and the usage is what is there.
func TestSoakStorage(t *testing.T) {
	t.Parallel()
	e := commonEngine(t, "docker")
	dir := e.dir(t)
	root := filepath.Join(dir, "chats")
	server := newServer(t, e, dir, testImage)
	server.env = append(server.env, "BERM_SANDBOX_CHATS_ROOT="+root, "BERM_SANDBOX_CREATE_ROOTS=true")
	s := &storageStorm{t: t}
	for i := range s.chats {
		s.chats[i] = newStormChat(i)
	}
	checker := openapitest.New(t)
	start := func() {
		server.start(t)
		s.client = server.client(t, checker.Transport(nil))
	}
	start()
	w := check.Value(s.client.EnsureWorkspace(t.Context(), "somebody"))(t)
	s.workspace = w.WorkspaceID
	s.check(t.Context(), root)
	for range 50 {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { s.blow(ctx); close(done) }()
		time.Sleep(mrand.N(400 * time.Millisecond))
		server.Kill()
		cancel()
		<-done
		start()
		s.check(t.Context(), root)
	}
	until(t, "nothing is left in staging", func() bool { return stagingEmpty(root) })
	server.stop()
}
