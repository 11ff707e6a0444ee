package cli

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	goruntime "runtime"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
)

func newDemoCommand() *cobra.Command {
	d := &demo{token: rand.Text()}
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Start a server on a real engine and show what it does",
		Long: `Start berm serve with a state directory, a port and a token of its own, and show
commands and their output: sandboxes made, reused, refused, used and collected, and
a server that is killed and knows its sandboxes when it is back. Every output is
checked; the exit code is 1 if one isn't as promised. Nothing is left behind.

The engine's further settings come from the environment: BERM_ENGINE_NAMESPACE (or
CONTAINERD_NAMESPACE) and its like.`,
		Example: "  berm demo --image busybox\n  DOCKER_HOST=unix:///run/docker.sock berm demo\n  BERM_ENGINE_NAMESPACE=demo berm demo --engine containerd",
		Args:    cobra.NoArgs,
		RunE: config.Action(func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			d.out = cmd.OutOrStdout()
			return d.run(ctx)
		}),
	}
	cmd.Flags().StringVar(&d.image, "image", os.Getenv("BERM_DEMO_IMAGE"), "image of the sandboxes, with a shell (default $BERM_DEMO_IMAGE, else the policy's, pulled if missing)")
	cmd.Flags().StringVar(&d.kind, "engine", "docker", "docker or containerd")
	cmd.Flags().StringVar(&d.address, "engine-address", "", "the engine's address (default $DOCKER_HOST or $CONTAINERD_ADDRESS, else the engine's own)")
	cmd.Flags().StringVar(&d.listen, "listen", "127.0.0.1:0", "address of the server")
	return cmd
}

// demo plays scenes on a server in a process of its own, which can be killed.
type demo struct {
	image, kind, address, listen string
	token                        string

	out    io.Writer
	dir    string // holds all that the server writes
	binary string
	url    string // of the server, once it is ready
	cmd    *exec.Cmd
	done   chan struct{} // closed when cmd has ended
}

// demoPolicy has sandboxes run as a user that isn't Berm's, as the stacks in compose do.
const demoPolicy = `version: 1
profiles: {default: {user: "1000:1000"}}
mounts: {owner: "1000:1000"}
`

// run plays the demo and removes everything, whatever happens.
func (d *demo) run(ctx context.Context) (err error) {
	// A child's parent-death signal is tied to the thread that started it.
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()

	if d.binary, err = os.Executable(); err != nil {
		return err
	}
	if d.dir, err = os.MkdirTemp("", "berm-demo-"); err != nil {
		return err
	}
	if err = os.WriteFile(filepath.Join(d.dir, "policy.yaml"), []byte(demoPolicy), 0o600); err == nil {
		err = d.start(ctx)
	}
	if err == nil {
		err = d.play(ctx)
	}
	if ctx.Err() != nil {
		err = errors.New("interrupted; everything was removed")
	}
	return errors.Join(err, d.clear(context.WithoutCancel(ctx), err != nil && ctx.Err() == nil), os.RemoveAll(d.dir))
}

// clear removes the sandboxes and stops the server.
func (d *demo) clear(ctx context.Context, failed bool) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var err error
	if d.url != "" {
		select {
		case <-d.done: // it was killed
			err = d.start(ctx)
		default:
		}
		if out, code, removeErr := d.sandbox(ctx, []string{"rm", "demo", "brief"}); code != 0 || removeErr != nil {
			err = errors.Join(err, removeErr, fmt.Errorf("remove the sandboxes: %s", out))
		}
	}
	d.stop(syscall.SIGTERM)
	if failed {
		log, _ := os.ReadFile(filepath.Join(d.dir, "server.log")) // what there is of it
		d.printf("\nThe server's log ends with:\n%s\n", indent(string(log[max(0, len(log)-4<<10):])))
	}
	return err
}

// start runs the server and returns when it is ready to serve.
func (d *demo) start(ctx context.Context) error {
	log, err := os.OpenFile(filepath.Join(d.dir, "server.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }() // the child has its own
	d.cmd = exec.Command(d.binary, "serve", "--listen", d.listen, "--state-dir", filepath.Join(d.dir, "state"))
	d.cmd.Stdout, d.cmd.Stderr = log, log
	if namespace := os.Getenv("CONTAINERD_NAMESPACE"); namespace != "" && d.kind == "containerd" {
		d.cmd.Env = append(d.cmd.Env, "BERM_ENGINE_NAMESPACE="+namespace)
	}
	for _, kv := range os.Environ() { // the last of a name counts
		if !strings.HasPrefix(kv, "BERM_") || strings.HasPrefix(kv, "BERM_ENGINE_") && !strings.HasPrefix(kv, "BERM_ENGINE_API_") {
			d.cmd.Env = append(d.cmd.Env, kv)
		}
	}
	d.cmd.Env = append(d.cmd.Env, "BERM_SECURITY_TOKENS="+d.token, "BERM_POLICY_FILE="+filepath.Join(d.dir, "policy.yaml"), "BERM_SANDBOX_CLEANUP_INTERVAL=500ms",
		"BERM_ENGINE_KIND="+d.kind, "BERM_ENGINE_INSTANCE=demo-"+strings.ToLower(d.token[:8]))
	for name, value := range map[string]string{"BERM_ENGINE_ADDRESS": d.address, "BERM_SANDBOX_IMAGE": d.image} {
		if value != "" {
			d.cmd.Env = append(d.cmd.Env, name+"="+value)
		}
	}
	// A group of its own, or Ctrl-C would end it before the demo has cleaned up.
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	if err := d.cmd.Start(); err != nil {
		return fmt.Errorf("start the server: %w", err)
	}
	d.done = make(chan struct{})
	go func(cmd *exec.Cmd, done chan struct{}) {
		_ = cmd.Wait()
		close(done)
	}(d.cmd, d.done)
	return d.ready(ctx)
}

// ready waits until the server has announced its address and is ready.
func (d *demo) ready(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	for {
		address, err := serve.Announced(filepath.Join(d.dir, "state"), serve.StateAddress)
		if err == nil && address != "" && serve.AskHealth(ctx, address, "/readyz", nil) == nil {
			d.listen, d.url = address, "http://"+address // where it starts again
			return nil
		}
		select {
		case <-time.After(20 * time.Millisecond):
		case <-d.done:
			return errors.New("the server ended while it started")
		case <-ctx.Done():
			return fmt.Errorf("the server isn't ready; start the %s engine, or say where it is with --engine-address: %w", d.kind, ctx.Err())
		}
	}
}

// stop signals the server and waits for its end. It kills a server that takes too long.
func (d *demo) stop(sig syscall.Signal) {
	if d.done == nil {
		return
	}
	_ = d.cmd.Process.Signal(sig) // fails only if it has ended
	select {
	case <-d.done:
	case <-time.After(15 * time.Second):
		_ = d.cmd.Process.Kill()
		<-d.done
	}
}

// limitsScript prints what is in force inside, on cgroup v1 and v2 alike.
const limitsScript = `cd /sys/fs/cgroup
echo "memory limit: $(cat memory.max 2>/dev/null || cat memory/memory.limit_in_bytes) bytes"
echo "pids limit: $(cat pids.max 2>/dev/null || cat pids/pids.max)"
if (echo > /written) 2>/dev/null; then echo "root file system: writable"; else echo "root file system: read-only"; fi
grep -E "Uid|CapEff|NoNewPrivs|Seccomp:" /proc/self/status`

// scene is a command of this program. Its output has to match want, which may
// span lines.
type scene struct {
	title   string
	command []string // after "berm sandbox"
	code    int      // exit code
	want    string   // regular expression
	wait    bool     // until the output matches
}

var beforeKill = []scene{
	{title: "Ask for a sandbox by a key of your own, and it is made", command: []string{"create", "demo", "--ttl", "5m"}, want: `created.*running`},
	{title: "Run a command in it", command: []string{"exec", "demo", "--", "sh", "-c", "echo hello from $(hostname); exit 3"}, code: 3, want: `^hello from`},
	{title: "Ask again, and it is the same one", command: []string{"create", "demo", "--ttl", "5m"}, want: `reused`},
	{
		title:   "Ask for the key with another spec, and nothing is changed behind your back",
		command: []string{"create", "demo", "--memory-mb", "256"}, code: 1, want: `memory_mb.*sandbox_conflict|sandbox_conflict.*memory_mb`,
	},
	{title: "Ask for the host's /etc, and the policy says no, why, and what would do", command: []string{"create", "curious", "--host-path", "/etc"}, code: 1, want: `rule .*allowed:`},
	{
		title: "The limits are really in force inside", command: []string{"exec", "demo", "--", "sh", "-c", limitsScript},
		want: `limit: 536870912 bytes.*limit: 128.*read-only.*Uid:\t1000\t.*CapEff:\t0000000000000000.*NoNewPrivs:\t1.*Seccomp:\t2`,
	},
	{title: "A sandbox ends when its time is up", command: []string{"create", "brief", "--ttl", "2s"}, want: `created`},
	{title: "... and it is gone", command: []string{"show", "brief"}, code: 1, want: "not_found", wait: true},
}

var afterKill = []scene{
	{title: "It knows its sandboxes", command: []string{"exec", "demo", "--", "echo", "still here"}, want: `^still here`},
	{title: "Remove it", command: []string{"rm", "demo"}, want: `deleted`},
}

func (d *demo) play(ctx context.Context) error {
	began := time.Now()
	d.printf("A server is up at %s, on the %s engine.\n", d.url, d.kind)
	for _, s := range beforeKill {
		if err := d.show(ctx, s); err != nil {
			return err
		}
	}
	d.printf("\nKill the server with SIGKILL, and start it again\n   $ kill -9 %d\n", d.cmd.Process.Pid)
	d.stop(syscall.SIGKILL)
	if err := d.start(ctx); err != nil {
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
	began := time.Now()
	out, code, err := d.sandbox(ctx, s.command)
	promised := func() bool { return code == s.code && regexp.MustCompile("(?s)"+s.want).Match(out) }
	for s.wait && err == nil && !promised() && time.Since(began) < 30*time.Second {
		time.Sleep(200 * time.Millisecond)
		out, code, err = d.sandbox(ctx, s.command)
	}
	if err != nil {
		return err
	}
	lines := bytes.SplitAfterN(out, []byte("\n"), 9)
	if len(lines) == 9 {
		lines[8] = []byte("...")
	}
	d.printf("%s\n", indent(string(bytes.Join(lines, nil))))
	if !promised() {
		return fmt.Errorf("%s: exit code %d, want %d, and output that matches %s", s.command[0], code, s.code, s.want)
	}
	return nil
}

// sandbox runs this program's sandbox command. The output is stdout and stderr.
func (d *demo) sandbox(ctx context.Context, args []string) (out []byte, code int, err error) {
	cmd := exec.CommandContext(ctx, d.binary, append([]string{"sandbox"}, args...)...)
	cmd.Env = append(os.Environ(), "BERM_URL="+d.url, "BERM_TOKEN="+d.token)
	out, err = cmd.CombinedOutput()
	if cmd.ProcessState == nil || ctx.Err() != nil {
		return nil, 0, err
	}
	return out, cmd.ProcessState.ExitCode(), nil
}

func (d *demo) printf(format string, args ...any) { _, _ = fmt.Fprintf(d.out, format, args...) }

func indent(text string) string {
	return "     " + strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n     ")
}
