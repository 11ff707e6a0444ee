package clients

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const (
	caseTimeout    = 2 * time.Minute
	programTimeout = 20 * time.Minute
)

// one is a case of a file.
type one struct {
	name, tag, script string
}

// What a case came to.
const (
	passed   = "passed"
	failed   = "failed"   // through Berm only
	lacks    = "lacks"    // fails without Berm
	refused  = "policy"   // refused by the policy, as it has to be
	buildkit = "buildkit" // fails, and needs BuildKit, which Berm doesn't offer on that engine
)

// outcome is what a case came to.
type outcome struct {
	name, verdict, why string
}

var tagged = regexp.MustCompile(`^(.*?)\s*(?:\[(policy|buildkit)\])?$`)

// split takes the tag off a case's name.
func split(title string) (name, tag string) {
	m := tagged.FindStringSubmatch(strings.TrimSpace(title))
	return m[1], m[2]
}

func readCases(file string) ([]one, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	functions, err := os.ReadFile("testdata/functions.sh")
	if err != nil {
		return nil, err
	}
	parts := strings.Split("\n"+string(b), "\n### ")
	var cases []one
	seen := map[string]bool{}
	for _, part := range parts[1:] {
		title, script, _ := strings.Cut(part, "\n")
		name, tag := split(title)
		if seen[name] {
			return nil, fmt.Errorf("%s: two cases are called %q", file, name)
		}
		seen[name] = true
		cases = append(cases, one{name, tag, string(functions) + parts[0] + "\n" + script})
	}
	return cases, nil
}

// judge compares how a case ended without Berm and with it.
func (f *fixture) judge(name, tag string, direct, through error) outcome {
	switch {
	case direct != nil:
		return outcome{name, lacks, direct.Error()}
	case tag == "policy" && through == nil:
		return outcome{name, failed, "passed, though the policy refuses it"}
	case tag == "policy" && strings.Contains(through.Error(), "denied by policy"):
		return outcome{name, refused, ""}
	case through == nil:
		return outcome{name, passed, ""}
	case tag == "buildkit" && !f.buildkit:
		return outcome{name, buildkit, through.Error()}
	}
	return outcome{name, failed, through.Error()}
}

// compare runs a case on the engine and through Berm.
func (f *fixture) compare(t *testing.T, c one) outcome {
	try := func(host string) error {
		defer f.clean(t)
		out, err := f.run(t, host, caseTimeout, nil, "sh", "-euc", c.script)
		if err == nil {
			return nil
		}
		t.Logf("%s: %v:\n%s", host, err, out)
		return fmt.Errorf("%s", reason(out, err))
	}
	if err := try(f.engine.Host()); err != nil {
		return f.judge(c.name, c.tag, err, nil)
	}
	return f.judge(c.name, c.tag, nil, try(f.berm))
}

// program runs a program's cases on the engine and through Berm.
func (f *fixture) program(t *testing.T, dir string) []outcome {
	src, err := filepath.Abs(dir)
	if err != nil {
		t.Fatal(err)
	}
	cache := filepath.Join(engine.NewerDir(), "clients", filepath.Base(dir))
	if err := os.MkdirAll(cache, 0o755); err != nil {
		t.Fatal(err)
	}
	env := []string{"SRC=" + src, "CACHE=" + cache}
	if setup := filepath.Join(src, "setup.sh"); exists(setup) {
		cmd := exec.CommandContext(t.Context(), "sh", "-eu", setup)
		cmd.Dir, cmd.Env = cache, append(os.Environ(), env...)
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("setup.sh: %v:\n%s", err, out)
		}
	}
	tap := func(host string) (names []string, ended map[string]error, tags map[string]string) {
		defer f.clean(t)
		out, err := f.run(t, host, programTimeout, env, "sh", "-eu", filepath.Join(src, "run.sh"))
		t.Logf("%s: %v:\n%s", host, err, out)
		return readTAP(out)
	}
	names, direct, tags := tap(f.engine.Host())
	_, through, _ := tap(f.berm)
	var ran []outcome
	for _, name := range names {
		err, ok := through[name]
		if !ok {
			err = fmt.Errorf("it didn't run")
		}
		ran = append(ran, f.judge(name, tags[name], direct[name], err))
	}
	return ran
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

var tapLine = regexp.MustCompile(`^(ok|not ok)\b *\d* *-? *(.*?)(?: +# *(.*))?$`)

// readTAP reads which cases ran, in their order, with errors for those that failed.
// Skipped ones are left out.
func readTAP(out string) (names []string, ended map[string]error, tags map[string]string) {
	ended, tags = map[string]error{}, map[string]string{}
	for line := range strings.Lines(out) {
		m := tapLine.FindStringSubmatch(strings.TrimRight(line, "\r\n"))
		if m == nil || strings.HasPrefix(strings.ToUpper(m[3]), "SKIP") {
			continue
		}
		name, tag := split(m[2])
		for plain, n := name, 2; ; n++ {
			if _, twice := ended[name]; !twice {
				break
			}
			name = fmt.Sprintf("%s (%d)", plain, n)
		}
		var err error
		if m[1] == "not ok" {
			err = fmt.Errorf("%s", reason(m[3], fmt.Errorf("it failed")))
		}
		names, tags[name], ended[name] = append(names, name), tag, err
	}
	return names, ended, tags
}

var temporary = regexp.MustCompile(`/tmp/[^\s"':,]*|\b[0-9a-f]{12,64}\b|127\.0\.0\.1:\d+`)

// reason is the line of an output that says most about a failure.
func reason(out string, err error) string {
	best := err.Error()
	for line := range strings.Lines(out) {
		line = strings.TrimSpace(temporary.ReplaceAllString(strings.ReplaceAll(line, "\t", " "), "…"))
		if strings.Contains(line, "denied by policy") {
			return line[:min(len(line), 300)]
		}
		if line != "" {
			best = line
		}
	}
	return best[:min(len(best), 200)]
}

// run runs a program of a case in a directory of its own, and answers all that it printed.
func (f *fixture) run(t *testing.T, host string, timeout time.Duration, env []string, program string, args ...string) (string, error) {
	f.cases++
	name := fmt.Sprintf("case%d", f.cases)
	dir := filepath.Join(f.work, name)
	config := filepath.Join(f.work, name+"-config")
	for _, d := range []string{dir, config} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(config, "config.json"), []byte(`{"cliPluginsExtraDirs": ["`+f.plugins+`"]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + f.engine.Netns(), program}, args...)...)
	cmd.Dir = dir
	cmd.Env = append([]string{
		"PATH=" + f.path, "HOME=" + config, "TMPDIR=" + dir, "LANG=C.UTF-8", "TERM=vt100",
		"DOCKER_HOST=" + host, "DOCKER_CONFIG=" + config, "COMPOSE_DOCKER_CLI_BUILD=0",
		"CASE=" + name, "IMAGE=" + image, "REGISTRY=" + f.registry.Host(), "LOGIN=" + f.login.Host(),
	}, env...)
	if f.classic {
		cmd.Env = append(cmd.Env, "DOCKER_BUILDKIT=0")
	}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 5 * time.Second
	err := cmd.Run()
	if ctx.Err() != nil {
		err = fmt.Errorf("it didn't end in %s", timeout)
	}
	return out.String(), err
}
