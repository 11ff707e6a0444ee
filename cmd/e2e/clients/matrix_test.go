// Package clients runs the clients that people have against Docker Engines, straight and
// through Berm, and compares.
//
// A client is a directory of testdata. One with a run.sh is a program: run.sh prints a line
// of TAP for each case, "ok 1 - name" or "not ok 1 - name # reason". A setup.sh beside it
// installs what it needs into $CACHE, and runs first, with the host's network.
//
// Otherwise each file NAME.sh holds cases: a line "### name", and the lines up to the next
// one, run by sh -eu. Lines before the first case begin every case, after those of functions.sh.
//
// A name may end with a tag. "[policy]" means that Berm has to refuse the case with
// "denied by policy", "[buildkit]" that it needs BuildKit, which Berm doesn't offer on 20.10;
// both are counted by themselves. A case that fails without Berm isn't counted.
//
// A case runs in an empty directory that may be mounted, in the network namespace of the
// engine. It has these variables, and PATH with the client's programs first:
//
//	DOCKER_HOST    the engine or Berm
//	DOCKER_CONFIG  an own directory
//	CASE           a name for what it makes
//	IMAGE          an image of busybox, also called busybox, alpine and cafe
//	REGISTRY       a registry that has hello:1
//	LOGIN          a registry that wants the user user and the password password
//	SRC, CACHE     of a program: its directory, and what setup.sh has filled
//
// All that the engine has besides is removed after each case, or after run.sh.
package clients

import (
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

var (
	update = flag.Bool("update", false, "write results.txt and docs/clients.md")
	table  = flag.String("table", "", "write what this run came to into this `file`")
)

// engines are the Docker Engines, with the programs of newer.sh that each consists of. None
// means the distribution's.
var engines = []struct {
	name     string
	programs []string
}{
	{"20.10", nil},
	{"28", []string{"dockerd-28", "containerd-2", "runc"}},
	{"29", []string{"dockerd-29", "containerd-2", "runc"}},
}

// client is a program that people use.
type client struct {
	name     string
	dir      string   // below testdata
	programs []string // of newer.sh; none means the distribution's
	classic  bool     // builds with DOCKER_BUILDKIT=0
}

// clients are those of files with cases, and each directory with a run.sh.
func clients(t *testing.T) []client {
	all := []client{
		{"docker-20.10", "docker", nil, true},
		{"docker-29", "docker", []string{"docker-cli", "buildx"}, true},
		{"compose-1.29", "compose", nil, true},
		{"compose-2.40", "compose", []string{"compose-2", "docker-cli", "buildx"}, true},
		{"compose-5", "compose", []string{"compose", "docker-cli", "buildx"}, false},
		{"buildx", "buildx", []string{"docker-cli", "buildx"}, false},
	}
	programs, err := filepath.Glob("testdata/*/run.sh")
	if err != nil {
		t.Fatal(err)
	}
	for _, run := range programs {
		name := filepath.Base(filepath.Dir(run))
		all = append(all, client{name: name, dir: name})
	}
	return all
}

// Each case that passes on an engine passes through Berm, unless results.txt says otherwise.
func TestClientsMatrix(t *testing.T) {
	engine.Require(t, "docker")
	known, err := readResults()
	if err != nil {
		t.Fatal(err)
	}
	m := &matrix{known: known, now: results{}}
	for _, e := range engines {
		t.Run(e.name, func(t *testing.T) {
			engine.RequireNewer(t, e.programs)
			t.Setenv("PATH", engine.NewerPath(e.programs))
			for _, c := range clients(t) {
				t.Run(c.name, func(t *testing.T) {
					engine.RequireNewer(t, c.programs)
					t.Parallel()
					c.run(t, e.name, m)
				})
			}
		})
	}
	if *update {
		writePage(t, known)
	}
	if *table != "" {
		must(t, os.WriteFile(*table, []byte(m.now.table(t)), 0o644))
	}
}

// matrix is a run of all groups, beside what they came to before. Mu guards both.
type matrix struct {
	mu         sync.Mutex
	known, now results
}

// run runs all groups of a client's cases, each with an engine of its own.
func (c client) run(t *testing.T, engine string, m *matrix) {
	dir := filepath.Join("testdata", c.dir)
	if exists(filepath.Join(dir, "run.sh")) {
		t.Run("all", func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, c, engine)
			m.finish(t, group{engine, c.name, "all"}, f.program(t, dir))
		})
		return
	}
	files, err := filepath.Glob(dir + "/*.sh")
	if err != nil || len(files) == 0 {
		t.Fatalf("%s has no cases: %v", dir, err)
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".sh")
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cases, err := readCases(file)
			if err != nil {
				t.Fatal(err)
			}
			f := newFixture(t, c, engine)
			var ran []outcome
			for _, one := range cases {
				t.Run(one.name, func(t *testing.T) {
					ran = append(ran, f.compare(t, one))
				})
			}
			if len(ran) == len(cases) { // none is filtered out
				m.finish(t, group{engine, c.name, name}, ran)
			}
		})
	}
}

// finish compares a group's outcomes with those that are known, or replaces them in an update.
func (m *matrix) finish(t *testing.T, g group, ran []outcome) {
	got := summarize(ran)
	t.Logf("%s: %d of %d passed", t.Name(), got.passed, got.counted)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.now[g] = got
	if *update {
		m.known.replace(g, got)
		m.known.write(t)
		return
	}
	before, ok := m.known[g]
	for _, o := range got.others {
		if ok && o.verdict == failed && !slices.ContainsFunc(before.others, func(b outcome) bool { return b.name == o.name }) {
			t.Errorf("%s passed before, and fails: %s", o.name, o.why)
		}
	}
}
