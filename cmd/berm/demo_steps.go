package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"time"
)

// demo plays the scenes on a server.
type demo struct {
	out    io.Writer
	server *demoServer
}

// limitsScript prints what is in force inside, on cgroup v1 and v2 alike.
const limitsScript = `cd /sys/fs/cgroup
echo "memory limit: $(cat memory.max 2>/dev/null || cat memory/memory.limit_in_bytes) bytes"
echo "pids limit: $(cat pids.max 2>/dev/null || cat pids/pids.max)"
if (echo > /written) 2>/dev/null; then echo "root file system: writable"; else echo "root file system: read-only"; fi
grep -E "CapEff|NoNewPrivs|Seccomp:" /proc/self/status`

// scene is a command of this program. Its output has to match want, which may
// span lines.
type scene struct {
	title   string
	command []string // after "berm sandbox"
	code    int      // exit code
	want    string   // regular expression
}

var beforeKill = []scene{
	{"Ask for a sandbox by a key of your own, and it is made", []string{"create", "demo", "--ttl", "5m"}, 0, `created.*running`},
	{"Run a command in it", []string{"exec", "demo", "--", "sh", "-c", "echo hello from $(hostname); exit 3"}, 3, `^hello from`},
	{"Ask again, and it is the same one", []string{"create", "demo", "--ttl", "5m"}, 0, `reused`},
	{
		"Ask for the key with another spec, and nothing is changed behind your back",
		[]string{"create", "demo", "--memory-mb", "256"}, 1, `memory_mb.*sandbox_conflict|sandbox_conflict.*memory_mb`,
	},
	{"Ask for the host's /etc, and the policy says no, why, and what would do", []string{"create", "curious", "--host-path", "/etc"}, 1, `rule .*allowed:`},
	{
		"The limits are really in force inside", []string{"exec", "demo", "--", "sh", "-c", limitsScript}, 0,
		`limit: 536870912 bytes.*limit: 128.*read-only.*CapEff:\t0000000000000000.*NoNewPrivs:\t1.*Seccomp:\t2`,
	},
	{"A sandbox ends when its time is up", []string{"create", "brief", "--ttl", "2s"}, 0, `created`},
}

var afterKill = []scene{
	{"It knows its sandboxes", []string{"exec", "demo", "--", "echo", "still here"}, 0, `^still here`},
	{"Remove it", []string{"rm", "demo"}, 0, `deleted`},
}

func (d *demo) play(ctx context.Context) error {
	began := time.Now()
	d.printf("A server is up at %s, on the %s engine.\n", d.server.url, d.server.opts.engine.Kind)
	for _, s := range beforeKill {
		if err := d.show(ctx, s); err != nil {
			return err
		}
	}
	if err := d.gone(ctx, "brief"); err != nil {
		return err
	}
	d.printf("\nKill the server with SIGKILL, and start it again\n   $ kill -9 %d\n", d.server.cmd.Process.Pid)
	if err := d.server.kill(); err != nil {
		return err
	}
	if err := d.server.start(ctx); err != nil {
		return err
	}
	for _, s := range afterKill {
		if err := d.show(ctx, s); err != nil {
			return err
		}
	}
	d.printf("\nAll went as promised, in %.1f s. Nothing is left running.\n", time.Since(began).Seconds())
	return nil
}

// show runs and prints a scene, and checks its output.
func (d *demo) show(ctx context.Context, s scene) error {
	line := strings.Join(s.command, " ")
	d.printf("\n%s\n   $ berm sandbox %s\n", s.title, strings.ReplaceAll(line, "\n", "\n     "))
	out, code, err := d.run(ctx, s.command)
	if err != nil {
		return err
	}
	lines := bytes.SplitAfterN(out, []byte("\n"), 9)
	if len(lines) == 9 {
		lines[8] = []byte("...")
	}
	d.printf("%s\n", indent(string(bytes.Join(lines, nil))))
	if code != s.code || !regexp.MustCompile("(?s)"+s.want).Match(out) {
		return fmt.Errorf("%s: exit code %d, want %d, and output that matches %s", s.command[0], code, s.code, s.want)
	}
	return nil
}

// run runs this program's sandbox command. The output is stdout and stderr.
func (d *demo) run(ctx context.Context, args []string) (out []byte, code int, err error) {
	cmd := exec.CommandContext(ctx, d.server.binary, append([]string{"sandbox"}, args...)...)
	cmd.Env = append(os.Environ(), "BERM_URL="+d.server.url, "BERM_TOKEN="+d.server.token)
	out, err = cmd.CombinedOutput()
	if cmd.ProcessState == nil || ctx.Err() != nil {
		return nil, 0, err
	}
	return out, cmd.ProcessState.ExitCode(), nil
}

// gone waits until a sandbox isn't there any more.
func (d *demo) gone(ctx context.Context, key string) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		out, _, err := d.run(ctx, []string{"show", key})
		if err != nil {
			return fmt.Errorf("wait for the end of %s: %w", key, err)
		}
		if bytes.Contains(out, []byte("not_found")) {
			d.printf("   ... $ berm sandbox show %s\n%s\n", key, indent(string(out)))
			return nil
		}
		select {
		case <-time.After(200 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}
