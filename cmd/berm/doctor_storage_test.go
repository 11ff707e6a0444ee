package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle/project"
)

func TestDoctorJudgesStorage(t *testing.T) {
	t.Parallel()
	unsupported := &project.UnsupportedError{Dir: "/c", Reason: "no"}
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
		"newer database":   {func(s *storageFacts, _ *config.Config) { s.schema = 9 }, "storage.database", gradeBad, "version 9"},
		"older database":   {func(s *storageFacts, _ *config.Config) { s.schema = 1 }, "storage.database", gradeOK, "schema 1, which berm serve brings up to 2"},
		"being written":    {func(s *storageFacts, _ *config.Config) { s.schema, s.merging = 0, true }, "storage.database", gradeOK, "isn't merged yet"},
		"no chats":         {func(s *storageFacts, _ *config.Config) { s.chats = dirFacts{} }, "storage.chats_root", gradeOK, "are off"},
		"chats missing":    {func(s *storageFacts, _ *config.Config) { s.chats.there = false }, "storage.chats_root", gradeBad, "isn't there"},
		"chats to be made": {func(s *storageFacts, _ *config.Config) { s.chats.there, s.chats.created = false, true }, "storage.chats_root", gradeOK, ""},
		"little for chats": {func(s *storageFacts, _ *config.Config) { s.chats.free = 1 << 30 }, "storage.chats_root", gradeSoft, "1.0 GiB"},
		"hard":             {nil, "storage.quotas", gradeOK, "10240 MiB a workspace, by project quotas"},
		"measured":         {func(s *storageFacts, _ *config.Config) { s.quotas = unsupported }, "storage.quotas", gradeSoft, "measured: there are no project quotas"},
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
			state: dirFacts{path: "/s", there: true, kind: "ext4", free: 100 << 30, created: true}, schema: 2, knownSchema: 2,
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

func TestLockHolder(t *testing.T) {
	t.Parallel()
	st, err := openState(filepath.Join(t.TempDir(), "state"))
	if err != nil {
		t.Fatal(err)
	}
	lock := filepath.Join(st.dir, "lock")
	fi, err := os.Stat(lock)
	if err != nil {
		t.Fatal(err)
	}
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
	if err := st.Close(); err != nil {
		t.Fatal(err)
	}
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
		f := checkSandboxAPI(t.Context(), time.Minute, cfg, tt.served)
		t.Run(tt.name, func(t *testing.T) { wantFinding(t, []finding{f}, "doors.sandbox_api", tt.grade, tt.found) })
	}
}

// Looking whether an address is free neither takes it nor is in the way of who does.
func TestListenable(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	if err := listenable(t.Context(), "unix://"+socket); err != nil {
		t.Errorf("a socket to be made: %v", err)
	}
	wantEmptyDir(t, dir)
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	if err := listenable(t.Context(), "unix://"+socket); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("one that is listened on: %v", err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := listenable(t.Context(), "unix://"+socket); err != nil {
		t.Errorf("one that was left: %v", err)
	}
	write(t, filepath.Join(dir, "file"), "")
	for _, address := range []string{"unix://" + filepath.Join(dir, "file"), "unix:///nonexistent/s", "127.0.0.1", "127.0.0.1:nonsense"} {
		if err := listenable(t.Context(), address); err == nil || errors.Is(err, unix.EADDRINUSE) {
			t.Errorf("%s: %v", address, err)
		}
	}
	tcp, err := net.Listen("tcp", "127.77.7.7:0") // where no other test takes the port once it is free
	if err != nil {
		t.Fatal(err)
	}
	address := tcp.Addr().String()
	if err := listenable(t.Context(), address); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("a port that is listened on: %v", err)
	}
	if err := tcp.Close(); err != nil {
		t.Fatal(err)
	}
	if err := listenable(t.Context(), address); err != nil {
		t.Errorf("a port that is free: %v", err)
	}
}

func TestDoctorListener(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	taken := filepath.Join(dir, "taken")
	l, err := net.Listen("unix", taken)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	ca := newAuthority(t, t.TempDir())
	ca.issue(t, "soon", "") // for an hour
	soon := config.Listener{Address: "tcp://127.0.0.1:0", TLSCertFile: filepath.Join(ca.dir, "soon.pem"), TLSKeyFile: filepath.Join(ca.dir, "soon-key.pem")}
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
		"for one of all":  {config.Listener{Address: "unix://" + dir + "/s", SocketMode: "0666", Callers: one}, false, gradeOK, "mode 0666"},
		"audit":           {config.Listener{Address: "unix://" + dir + "/s", Callers: []config.Caller{{Name: "ci", Mode: config.ModeAudit}}}, false, gradeSoft, "mode: audit for ci"},
		"plain":           {config.Listener{Address: "tcp://0.0.0.0:0", AllowPlain: true, Callers: all}, false, gradeSoft, "without client certificates"},
		"ends soon":       {soon, false, gradeSoft, "certificate until"},
		"nowhere to make": {config.Listener{Address: "unix:///nonexistent/s", Callers: all}, false, gradeBad, "can't be listened on"},
	} {
		f := checkListener(t.Context(), time.Minute, tt.listener, tt.served)
		t.Run(name, func(t *testing.T) { wantFinding(t, []finding{f}, "doors.engine_api", tt.grade, tt.found) })
	}
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
		f := checkCollector(ctx, time.Minute, tt.cfg)
		cancel()
		wantFinding(t, []finding{f}, "doors.telemetry", tt.grade, "")
		if strings.Contains(f.Found, "hush") {
			t.Errorf("%s tells a secret: %s", name, f.Found)
		}
	}
}

func TestDoctorTokens(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		listen, tokens, id string
		grade              grade
	}{
		"none":    {"127.0.0.1:1", "", "doors.tokens", gradeSoft},
		"exposed": {"0.0.0.0:1", "", "doors.tokens", gradeBad},
		"given":   {"127.0.0.1:1", testToken, "doors.tokens", gradeOK},
		"plain":   {"0.0.0.0:1", testToken, "doors.tls", gradeSoft},
		"broken":  {"127.0.0.1:1", "hush", "doors.tokens", gradeBad},
	} {
		cfg := config.Default()
		cfg.HTTP.Listen, cfg.Security.Tokens = tt.listen, tt.tokens
		findings := checkTokens(cfg)
		t.Run(name, func(t *testing.T) { wantFinding(t, findings, tt.id, tt.grade, "") })
		if strings.Contains(fmt.Sprint(findings), "hush") {
			t.Errorf("%s tells a secret: %+v", name, findings)
		}
	}
}

func TestDoctorSecrets(t *testing.T) {
	t.Parallel()
	cfg := config.Default()
	cfg.Security.TokenFile, cfg.Otel.HeadersFile = filepath.Join(t.TempDir(), "token"), filepath.Join(t.TempDir(), "none")
	write(t, cfg.Security.TokenFile, testToken)
	for mode, open := range map[os.FileMode]bool{0o600: false, 0o640: false, 0o644: true} {
		if err := os.Chmod(cfg.Security.TokenFile, mode); err != nil {
			t.Fatal(err)
		}
		findings := checkSecrets(cfg)
		if len(findings) > 0 != open {
			t.Errorf("mode %o: %+v", mode, findings)
		}
		if open {
			wantFinding(t, findings, "doors.secrets", gradeSoft, cfg.Security.TokenFile)
		}
	}
}
