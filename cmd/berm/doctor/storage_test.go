package doctor

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	goruntime "runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/quota"
	"github.com/bermhq/berm/lifecycle/restart"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

func TestDoctorJudgesStorage(t *testing.T) {
	t.Parallel()
	unsupported := errdefs.ErrNotImplemented.WithMessage("no")
	for name, tt := range map[string]struct {
		change func(*storageFacts, *config.Config)
		id     string
		grade  grade
		found  string
	}{
		"all well":         {nil, "storage.state_dir", gradeOK, "/s, ext4, 100 GiB free"},
		"not there":        {func(s *storageFacts, _ *config.Config) { s.state.there = false }, "storage.state_dir", gradeOK, "which berm serve makes"},
		"not ours":         {func(s *storageFacts, _ *config.Config) { s.state.err = fs.ErrPermission }, "storage.state_dir", gradeBad, ""},
		"not ours, in use": {func(s *storageFacts, _ *config.Config) { s.state.err, s.lockedBy = fs.ErrPermission, "7" }, "storage.state_dir", gradeSoft, "by process 7"},
		"nfs":              {func(s *storageFacts, _ *config.Config) { s.state.remote = true }, "storage.state_dir", gradeSoft, ""},
		"tmpfs":            {func(s *storageFacts, _ *config.Config) { s.state.kind = "tmpfs" }, "storage.state_dir", gradeSoft, "tmpfs"},
		"full":             {func(s *storageFacts, _ *config.Config) { s.state.free = 1536 << 10 }, "storage.state_dir", gradeSoft, "1.5 MiB free"},
		"instance":         {func(s *storageFacts, _ *config.Config) { s.instance = "me" }, "storage.instance", gradeOK, "me"},
		"bad instance":     {func(s *storageFacts, _ *config.Config) { s.instanceErr = errors.New("no id") }, "storage.instance", gradeBad, "no id"},
		"no database":      {func(s *storageFacts, _ *config.Config) { s.databaseErr = fs.ErrNotExist }, "storage.database", gradeOK, "none yet"},
		"bad database":     {func(s *storageFacts, _ *config.Config) { s.databaseErr = errors.New("it is no database") }, "storage.database", gradeBad, "no database"},
		"newer database":   {func(s *storageFacts, _ *config.Config) { s.database.Schema = 9 }, "storage.database", gradeBad, "version 9"},
		"older database":   {func(s *storageFacts, _ *config.Config) { s.database.Schema = 1 }, "storage.database", gradeOK, "schema 1, which berm serve brings up to 2"},
		"being written":    {func(s *storageFacts, _ *config.Config) { s.database = store.Database{Known: 2, Merging: true} }, "storage.database", gradeOK, "isn't merged yet"},
		"a server's": {func(s *storageFacts, _ *config.Config) {
			s.database, s.lockedBy = store.Database{Known: 2, Merging: true}, "7"
		}, "storage.database", gradeOK, "in use"},
		"its, in use":      {func(s *storageFacts, _ *config.Config) { s.databaseErr, s.lockedBy = fs.ErrPermission, "7" }, "storage.database", gradeSoft, ""},
		"another's":        {func(s *storageFacts, _ *config.Config) { s.databaseErr = fs.ErrPermission }, "storage.database", gradeBad, ""},
		"stuck":            {func(s *storageFacts, _ *config.Config) { s.databaseErr = serve.ErrStuck }, "storage.database", gradeBad, serve.ErrStuck.Error()},
		"no chats":         {func(s *storageFacts, _ *config.Config) { s.chats = dirFacts{} }, "storage.chats_root", gradeOK, "are off"},
		"chats missing":    {func(s *storageFacts, _ *config.Config) { s.chats.there = false }, "storage.chats_root", gradeBad, "isn't there"},
		"chats to be made": {func(s *storageFacts, _ *config.Config) { s.chats.there, s.chats.created = false, true }, "storage.chats_root", gradeOK, ""},
		"chats elsewhere":  {func(s *storageFacts, _ *config.Config) { s.unused = true }, "storage.chats_root", gradeSoft, "never used"},
		"first chats":      {func(s *storageFacts, _ *config.Config) { s.unused, s.databaseErr = true, fs.ErrNotExist }, "storage.chats_root", gradeOK, ""},
		"little for chats": {func(s *storageFacts, _ *config.Config) { s.chats.free = 1 << 30 }, "storage.chats_root", gradeSoft, "1.0 GiB"},
		"hard":             {nil, "storage.quotas", gradeOK, "10240 MiB a workspace, by project quotas"},
		"measured":         {func(s *storageFacts, _ *config.Config) { s.quotas = unsupported }, "storage.quotas", gradeSoft, "measured: no"},
		"required": {func(s *storageFacts, c *config.Config) {
			s.quotas, c.Storage.ProjectQuotas = unsupported, config.ProjectQuotasRequired
		}, "storage.quotas", gradeBad, ""},
		"turned off":      {func(_ *storageFacts, c *config.Config) { c.Storage.ProjectQuotas = config.ProjectQuotasOff }, "storage.quotas", gradeSoft, "is off"},
		"no quota":        {func(_ *storageFacts, c *config.Config) { c.Storage.WorkspaceQuotaMB = 0 }, "storage.quotas", gradeSoft, "no quota"},
		"another failure": {func(s *storageFacts, _ *config.Config) { s.quotas = errors.New("other") }, "storage.quotas", gradeBad, "other"},
		"dependencies":    {func(s *storageFacts, _ *config.Config) { s.dependencies = dirFacts{path: "/d"} }, "storage.dependencies", gradeBad, "/d isn't there"},
		"read-only tools": {func(s *storageFacts, _ *config.Config) { s.tools = dirFacts{path: "/t", there: true, err: unix.EROFS} }, "storage.tools", gradeOK, "/t"},
		"nowhere for build": {func(s *storageFacts, c *config.Config) {
			s.temporary.err, c.EngineAPI.Listeners = unix.EROFS, make([]config.Listener, 1)
		}, "storage.temporary", gradeSoft, ""},
	} {
		s := &storageFacts{
			state: dirFacts{path: "/s", there: true, kind: "ext4", free: 100 << 30, created: true}, database: store.Database{Schema: 2, Known: 2},
			chats: dirFacts{path: "/c", there: true, kind: "xfs", free: 100 << 30},
		}
		cfg := config.Default()
		if tt.change != nil {
			tt.change(s, cfg)
		}
		findings := s.judge(cfg, hostFacts{caps: 1 << unix.CAP_SYS_ADMIN})
		t.Run(name, func(t *testing.T) { wantFinding(t, findings, tt.id, tt.grade, tt.found) })
		if name == "hard" {
			wantFinding(t, s.judge(cfg, hostFacts{}), "storage.quotas", gradeSoft, "CAP_SYS_ADMIN")
		}
	}
}

func TestLookAtDir(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write(t, filepath.Join(dir, "file"), "")
	if d := lookAtDir(filepath.Join(dir, "a", "b")); d.there || d.err != nil || d.kind == "" || d.free == 0 {
		t.Errorf("one to be made: %+v", d)
	}
	if d := lookAtDir(filepath.Join(dir, "file")); !errors.Is(d.err, syscall.ENOTDIR) {
		t.Errorf("a file: %+v", d)
	}
	if d := lookAtDir(filepath.Join(dir, "file", "a")); d.err == nil {
		t.Errorf("below a file: %+v", d)
	}
	if d := lookAtDir("/proc"); !d.there || d.kind == "ext4" {
		t.Errorf("/proc: %+v", d)
	}
}

// madeStore makes a database, and gives its path.
func madeStore(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), serve.StateStore)
	db := check.Value(store.Open(t.Context(), store.Options{Path: path}))(t)
	must(t, db.Close())
	return path
}

func TestLookAtDatabase(t *testing.T) {
	t.Parallel()
	path := madeStore(t)
	look := func(want string) {
		t.Helper()
		d, err := lookAtDatabase(path)
		if want == "" && (err != nil || d.Known == 0) || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%+v, %v, want %q", d, err, want)
		}
		if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() == serve.StateStore+"-shm" }) {
			t.Errorf("something was made: %v, %v", entries, err)
		}
	}
	look("")
	must(t, os.Truncate(path, 4096))
	look("is cut off: it has 4096 of")
	write(t, path+"-wal", "what it lacks")
	look("")
	write(t, path, "SQLite")
	look("is no database")
	write(t, path, "")
	look("")
}

// Chats' records without what they hold are refused by berm serve, and told of before.
func TestDoctorLostChats(t *testing.T) {
	t.Parallel()
	path, root := madeStore(t), t.TempDir()
	args := []string{"--state-dir", filepath.Dir(path), "--engine-address", "unix://" + root + "/engine.sock", "--config", filepath.Join(t.TempDir(), "berm.yaml")}
	write(t, args[5], "sandbox: {chats_root: "+root+"}\n")
	db := check.Value(store.Open(t.Context(), store.Options{Path: path}))(t)
	_, _, err := db.EnsureWorkspace(t.Context(), quota.Workspace{Tenant: "a", ID: "w", UserID: "u"})
	if err == nil {
		_, _, err = db.EnsureChat(t.Context(), chat.Chat{Tenant: "a", ID: "c", WorkspaceID: "w"})
	}
	must(t, err, db.Close())
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second) // it ends then if it isn't refused
	defer cancel()
	var log strings.Builder
	if code := run(ctx, append([]string{"serve", "--listen", "127.0.0.1:0"}, args...), strings.NewReader(""), io.Discard, &log); code != 1 || !strings.Contains(log.String(), "no directory .staging") {
		t.Errorf("berm serve ends with %d: %s", code, &log)
	}
	const says = "without a directory .staging"
	wantFinding(t, runDoctor(t, 1, args...).Findings, "storage.chats_root", gradeSoft, says)
	must(t, os.Mkdir(filepath.Join(root, ".staging"), 0o700))
	if found := fmt.Sprint(runDoctor(t, 1, args...).Findings); strings.Contains(found, says) {
		t.Errorf("with it: %s", found)
	}
}

// What is another user's can be read, but not used.
func TestLookAtAnothersDatabase(t *testing.T) {
	t.Parallel()
	path := madeStore(t)
	write(t, path+"-wal", "")
	dir := filepath.Dir(path)
	must(t, os.Chmod(filepath.Dir(dir), 0o755), os.Chmod(path, 0o444), os.Chmod(path+"-wal", 0o444))
	for _, name := range []string{path, path + "-wal"} {
		done := make(chan error)
		go func() {
			goruntime.LockOSThread() // and it ends with this
			if err := unix.Setfsuid(12345); err != nil {
				done <- err
				return
			}
			_, err := lookAtDatabase(path)
			done <- err
		}()
		var refused *os.PathError
		if err := <-done; !errors.As(err, &refused) || !errors.Is(err, fs.ErrPermission) || refused.Path != name {
			t.Errorf("%s: %v", name, err)
		}
		must(t, os.Chmod(name, 0o666))
	}
}

// A file that doesn't answer holds nothing up, and is told of.
func TestDoctorStuckFiles(t *testing.T) {
	t.Parallel()
	pipe := func(path string) string {
		must(t, unix.Mkfifo(path, 0o600))
		t.Cleanup(func() {
			if f, err := os.OpenFile(path, os.O_RDWR, 0); err == nil { // lets go of who reads
				_ = f.Close()
			}
		})
		return path
	}
	stuck := pipe(filepath.Join(t.TempDir(), "pipe"))
	state := t.TempDir()
	pipe(filepath.Join(state, serve.StateInstance))
	pipe(filepath.Join(state, serve.StateStore))
	pipe(filepath.Join(state, "address"))
	const limit = 50 * time.Millisecond
	doors := func(set func(*config.Config)) func(context.Context, *config.Config) []finding {
		return func(ctx context.Context, cfg *config.Config) []finding {
			set(cfg)
			return checkDoors(ctx, limit, cfg, &storageFacts{})
		}
	}
	for id, look := range map[string]func(ctx context.Context, cfg *config.Config) []finding{
		"config.file": func(context.Context, *config.Config) []finding {
			return runDoctor(t, 1, "--config", stuck, "--timeout", limit.String()).Findings
		},
		"engine.reachable": func(ctx context.Context, cfg *config.Config) []finding {
			cfg.Engine.RegistryAuthFile = stuck
			return lookAtEngine(ctx, limit, cfg).judge(nil)
		},
		"storage.instance": func(ctx context.Context, cfg *config.Config) []finding {
			return lookAtStorage(ctx, 500*time.Millisecond, cfg).judge(cfg, hostFacts{}) // enough for what isn't stuck
		},
		"storage.database": func(ctx context.Context, cfg *config.Config) []finding {
			cfg.Engine.Instance = "me"
			return lookAtStorage(ctx, 500*time.Millisecond, cfg).judge(cfg, hostFacts{})
		},
		"doors.sandbox_api": func(ctx context.Context, cfg *config.Config) []finding {
			cfg.HTTP.Listen = listening(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = fmt.Fprint(w, `{"status":"ok","version":"v7"}`) })
			return checkSandboxAPI(ctx, 2*time.Second, cfg, true) // for the address's file, and for an answer
		},
		"doors.tokens":      doors(func(cfg *config.Config) { cfg.Security.TokenFile = stuck }),
		"doors.signing_key": doors(func(cfg *config.Config) { cfg.Security.SigningKeyFile = stuck }),
		"doors.engine_api": doors(func(cfg *config.Config) {
			cfg.EngineAPI.Listeners = []config.Listener{{Address: "tcp://127.0.0.1:0", TLSCertFile: stuck, TLSKeyFile: stuck}}
		}),
		"doors.telemetry": doors(func(cfg *config.Config) { cfg.Otel = config.Otel{Endpoint: "http://127.0.0.1:1", HeadersFile: stuck} }),
	} {
		t.Run(id, func(t *testing.T) {
			t.Parallel()
			cfg := config.Default()
			cfg.StateDir, cfg.HTTP.Listen = state, "127.0.0.1:0"
			findings := look(t.Context(), cfg)
			if id == "doors.sandbox_api" {
				wantFinding(t, findings, id, gradeSoft, "berm v7 answers")
				return
			}
			wantFinding(t, findings, id, gradeBad, serve.ErrStuck.Error())
		})
	}
}

func TestLockHolder(t *testing.T) {
	t.Parallel()
	lock := filepath.Join(t.TempDir(), "lock")
	st := check.Value(os.Create(lock))(t)
	must(t, unix.Flock(int(st.Fd()), unix.LOCK_EX))
	fi := check.Value(st.Stat())(t)
	stat := fi.Sys().(*syscall.Stat_t)
	proc := t.TempDir()
	line := func(kind string, inode uint64) string {
		return fmt.Sprintf("1: %s  ADVISORY  WRITE 42 %02x:%02x:%d 0 EOF\n", kind, unix.Major(stat.Dev), unix.Minor(stat.Dev), inode)
	}
	for content, want := range map[string]string{"": "", line("FLOCK", stat.Ino): "42", line("POSIX", stat.Ino): "", line("FLOCK", stat.Ino+1): ""} {
		write(t, filepath.Join(proc, "locks"), content)
		if got, err := lockHolder(proc, lock); got != want || err != nil {
			t.Errorf("%q: %q, %v", content, got, err)
		}
	}
	must(t, st.Close())
	if got, err := lockHolder("/proc", lock); got != "" || err != nil {
		t.Errorf("the kernel's, freed: %q, %v", got, err)
	}
}

// listening serves a handler at a port of the system's choice.
func listening(t *testing.T, h http.HandlerFunc) string {
	t.Helper()
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	return server.Listener.Addr().String()
}

func TestDoctorSandboxAPI(t *testing.T) {
	t.Parallel()
	ready := http.StatusOK
	server := listening(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/readyz" {
			w.WriteHeader(ready)
		}
		_, _ = fmt.Fprint(w, `{"status":"ok","version":"v7"}`)
	})
	stranger := listening(t, http.NotFound)
	_, port, err := net.SplitHostPort(stranger)
	if err != nil {
		t.Fatal(err)
	}
	const gone = "127.0.0.1:1"
	for _, tt := range []struct {
		name, listen, announced string
		served                  bool
		ready                   int
		grade                   grade
		found                   string
	}{
		{"off", config.ListenNone, "", false, 200, gradeOK, "off"},
		{"free", "127.0.0.1:0", "", false, 200, gradeOK, "is free"},
		{"passed", "systemd:http", "", false, 200, gradeOK, "systemd:http, which systemd passes"},
		{"passed, and answers", "systemd:http", server, true, 200, gradeOK, "berm v7 answers"},
		{"answers", "127.0.0.1:0", server, true, 200, gradeOK, "berm v7 answers"},
		{"not ready", server, server, true, 503, gradeSoft, "isn't ready"},
		{"another berm's", server, "", false, 200, gradeBad, "another state directory"},
		{"a stranger's", stranger, "", false, 200, gradeBad, "another process"},
		{"a stranger's, everywhere", ":" + port, "", false, 200, gradeBad, "another process"},
		{"gone", "127.0.0.1:0", gone, true, 200, gradeBad, "doesn't answer"},
		{"left by one that was killed", "127.0.0.1:0", gone, false, 200, gradeOK, "is free"},
		{"nobody's address", "192.0.2.1:7070", "", false, 200, gradeBad, "can't be listened on"},
	} {
		cfg := config.Default()
		cfg.StateDir, cfg.HTTP.Listen, ready = t.TempDir(), tt.listen, tt.ready
		if tt.announced != "" {
			write(t, filepath.Join(cfg.StateDir, "address"), tt.announced+"\n")
		}
		findings := checkSandboxAPI(t.Context(), time.Minute, cfg, tt.served)
		t.Run(tt.name, func(t *testing.T) { wantFinding(t, findings, "doors.sandbox_api", tt.grade, tt.found) })
	}
}

// Looking whether an address is free makes nothing, and leaves it free.
func TestListenable(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	if err := listenable(t.Context(), "unix://"+socket); err != nil {
		t.Errorf("a socket to be made: %v", err)
	}
	wantEmptyDir(t, dir)
	l := check.Value(net.Listen("unix", socket))(t)
	if err := listenable(t.Context(), "unix://"+socket); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("one that is listened on: %v", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	must(t, l.Close())
	if err := listenable(t.Context(), "unix://"+socket); err != nil {
		t.Errorf("one that was left: %v", err)
	}
	if err := listenable(t.Context(), "unix://"+filepath.Join(dir, "run", "s")); err != nil {
		t.Errorf("one in a directory that the server makes: %v", err)
	}
	write(t, filepath.Join(dir, "file"), "")
	for _, address := range []string{"unix://" + filepath.Join(dir, "file"), "unix:///nonexistent/deep/s", "127.0.0.1", "127.0.0.1:nonsense"} {
		if err := listenable(t.Context(), address); err == nil || errors.Is(err, unix.EADDRINUSE) {
			t.Errorf("%s: %v", address, err)
		}
	}
	tcp := check.Value(net.Listen("tcp", "127.77.7.7:0"))(t) // where no other test takes the port once it is free
	address := tcp.Addr().String()
	if err := listenable(t.Context(), address); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("a port that is listened on: %v", err)
	}
	must(t, tcp.Close())
	for range 2 {
		if err := listenable(t.Context(), address); err != nil {
			t.Errorf("a port that is free: %v", err)
		}
	}
}

func TestDoctorListener(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	taken := filepath.Join(dir, "taken")
	l := check.Value(net.Listen("unix", taken))(t)
	defer func() { _ = l.Close() }()
	soon := config.Listener{Address: "tcp://127.0.0.1:0", TLSCertFile: filepath.Join(dir, "soon.pem"), TLSKeyFile: filepath.Join(dir, "soon-key.pem")}
	issue(t, soon.TLSCertFile, soon.TLSKeyFile)
	all, one := []config.Caller{{Name: "all"}}, []config.Caller{{Name: "one", UIDs: []uint32{1}}}
	for name, tt := range map[string]struct {
		listener config.Listener
		served   bool
		grade    grade
		found    string
	}{
		"free":            {config.Listener{Address: "unix://" + dir + "/s", Callers: one}, false, gradeOK, "is free, mode 0660, callers: 1"},
		"taken":           {config.Listener{Address: "unix://" + taken, Callers: one}, false, gradeBad, "another process"},
		"served":          {config.Listener{Address: "unix://" + taken, Callers: one}, true, gradeOK, "is listened on"},
		"not served":      {config.Listener{Address: "unix://" + dir + "/s", Callers: one}, true, gradeSoft, "isn't listened on"},
		"for everybody":   {config.Listener{Address: "unix://" + dir + "/s", SocketMode: "0666", Callers: all}, false, gradeSoft, "mode 0666"},
		"to write to":     {config.Listener{Address: "unix://" + dir + "/s", SocketMode: "0602", Callers: all}, false, gradeSoft, "mode 0602"},
		"for one of all":  {config.Listener{Address: "unix://" + dir + "/s", SocketMode: "0666", Callers: one}, false, gradeOK, "mode 0666"},
		"audit":           {config.Listener{Address: "unix://" + dir + "/s", Callers: []config.Caller{{Name: "ci", Mode: config.ModeAudit}}}, false, gradeSoft, "mode: audit for ci"},
		"plain":           {config.Listener{Address: "tcp://0.0.0.0:0", AllowPlain: true, Callers: all}, false, gradeSoft, "without client certificates"},
		"passed":          {config.Listener{Address: "systemd:docker", Callers: one}, true, gradeOK, "which systemd passes, callers: 1"},
		"ends soon":       {soon, false, gradeSoft, "certificate until"},
		"nowhere to make": {config.Listener{Address: "unix:///nonexistent/deep/s", Callers: all}, false, gradeBad, "can't be listened on"},
	} {
		cfg, s := config.Default(), &storageFacts{databaseErr: fs.ErrNotExist}
		cfg.HTTP.Listen, cfg.EngineAPI.Listeners = config.ListenNone, []config.Listener{tt.listener}
		if tt.served {
			s.lockedBy = "1"
		}
		findings := checkDoors(t.Context(), time.Minute, cfg, s)
		t.Run(name, func(t *testing.T) { wantFinding(t, findings, "doors.engine_api", tt.grade, tt.found) })
	}
}

func TestDoctorRestarts(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), serve.StateStore)
	look := func() []finding { return checkRestarts(t.Context(), time.Minute, path) }
	wantFinding(t, look(), "doors.restarts", gradeSoft, "no such file")
	db := check.Value(store.Open(t.Context(), store.Options{Path: path}))(t)
	defer func() { _ = db.Close() }() // the server's
	wantFinding(t, look(), "doors.restarts", gradeOK, "restart policy: 0;")
	for _, r := range []restart.Row{{ContainerID: "a", Count: 2}, {ContainerID: strings.Repeat("b", 64), Count: 3, Next: time.Unix(1, 0)}} {
		must(t, db.PutRestart(t.Context(), r))
	}
	wantFinding(t, look(), "doors.restarts", gradeOK, "restart policy: 2; restarts since they were last started by hand: 5; waiting for the next: bbbbbbbbbbbb until 1970-01-01T00:00:01Z")
}

func TestDoctorCollector(t *testing.T) {
	t.Parallel()
	there := "http://user:hush@" + listening(t, http.NotFound)
	for name, tt := range map[string]struct {
		cfg   config.Otel
		grade grade
	}{
		"none": {config.Otel{}, gradeOK}, "there": {config.Otel{Endpoint: there}, gradeOK},
		"gone": {config.Otel{Endpoint: "http://user:hush@127.0.0.1:1"}, gradeSoft},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		findings := checkCollector(ctx, time.Minute, tt.cfg)
		cancel()
		wantFinding(t, findings, "doors.telemetry", tt.grade, "")
		if strings.Contains(fmt.Sprint(findings), "hush") {
			t.Errorf("%s tells a secret: %s", name, findings)
		}
	}
}

func TestDoctorTokens(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		listen, tokens, id string
		grade              grade
	}{
		"none":            {"127.0.0.1:1", "", "doors.tokens", gradeSoft},
		"exposed":         {"0.0.0.0:1", "", "doors.tokens", gradeBad},
		"open socket":     {"unix:///s", "", "doors.tokens", gradeSoft},
		"given":           {"127.0.0.1:1", testToken, "doors.tokens", gradeOK},
		"plain":           {"0.0.0.0:1", testToken, "doors.tls", gradeSoft},
		"broken":          {"127.0.0.1:1", "hush", "doors.tokens", gradeBad},
		"passed":          {"systemd:http", testToken, "doors.tokens", gradeOK},
		"passed, without": {"systemd:http", "", "doors.tokens", gradeSoft},
	} {
		cfg := config.Default()
		cfg.HTTP.Listen, cfg.HTTP.SocketMode, cfg.Security.Tokens = tt.listen, "0666", tt.tokens
		findings := checkDoors(t.Context(), time.Minute, cfg, &storageFacts{})
		t.Run(name, func(t *testing.T) { wantFinding(t, findings, tt.id, tt.grade, "") })
		if strings.Contains(fmt.Sprint(findings), "hush") {
			t.Errorf("%s tells a secret: %+v", name, findings)
		}
		if open := name == "open socket"; open != strings.Contains(fmt.Sprint(findings), "every user of this machine reaches unix:///s, mode 0666") {
			t.Errorf("%s: %+v", name, findings)
		}
		if passed := strings.HasPrefix(name, "passed"); passed != strings.Contains(fmt.Sprint(findings), "TCP beyond loopback") {
			t.Errorf("%s: %+v", name, findings)
		}
	}
}

func TestDoctorSecrets(t *testing.T) {
	t.Parallel()
	cfg := config.Default()
	cfg.Security.TokenFile, cfg.Otel.HeadersFile = filepath.Join(t.TempDir(), "token"), filepath.Join(t.TempDir(), "none")
	write(t, cfg.Security.TokenFile, testToken)
	for mode, open := range map[os.FileMode]bool{0o600: false, 0o640: false, 0o644: true} {
		must(t, os.Chmod(cfg.Security.TokenFile, mode))
		findings := checkSecrets(t.Context(), time.Minute, cfg)
		if len(findings) > 0 != open {
			t.Errorf("mode %o: %+v", mode, findings)
		}
		if open {
			wantFinding(t, findings, "doors.secrets", gradeSoft, cfg.Security.TokenFile)
		}
	}
}

// issue writes a certificate for an hour, signed by its own key.
func issue(t *testing.T, certFile, keyFile string) {
	t.Helper()
	key := check.Value(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))(t)
	c := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	cert := check.Value(x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key))(t)
	private := check.Value(x509.MarshalPKCS8PrivateKey(key))(t)
	write(t, certFile, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert})))
	write(t, keyFile, string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private})))
}
