// Command berm-engine runs a command with a container engine: one that is there, or
// a private one that ends with the command. It is for development and demonstrations.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const (
	image         = "berm.local/busybox:latest"
	defaultSocket = "unix:///var/run/docker.sock"
	usage         = `usage: berm-engine [--engine docker] [--private] -- COMMAND [ARGUMENT...]

Runs COMMAND with DOCKER_HOST set to an engine, and BERM_DEMO_IMAGE to an image in
it: the engine at DOCKER_HOST or /var/run/docker.sock if it answers, else a private
one, whose packages are installed if need be. Nothing of it stays behind.
`
)

func main() {
	os.Exit(run(os.Args[1:], os.Stderr))
}

// run answers the command's exit code, 125 if it couldn't come to that, or 2 for
// wrong usage.
func run(args []string, log io.Writer) int {
	flags := flag.NewFlagSet("berm-engine", flag.ContinueOnError)
	flags.SetOutput(log)
	flags.Usage = func() { _, _ = io.WriteString(log, usage); flags.PrintDefaults() }
	kind := flags.String("engine", "docker", "kind of engine")
	private := flags.Bool("private", false, "start a private engine even if there is another")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	if *kind != "docker" || flags.NArg() == 0 {
		flags.Usage()
		return 2
	}
	log = &prefixer{w: log, fresh: true}
	// The command is killed when the thread that started it ends.
	runtime.LockOSThread()
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT)
	defer signal.Stop(signals)

	host, closeEngine, err := setUp(signals, *private, log)
	if err != nil {
		_, _ = fmt.Fprintln(log, err)
		return 125
	}
	code, err := runCommand(flags.Args(), host, signals)
	if err != nil {
		_, _ = fmt.Fprintln(log, err)
	}
	if err := closeEngine(); err != nil {
		_, _ = fmt.Fprintln(log, err)
		return cmp.Or(code, 125)
	}
	return code
}

// setUp finds or starts an engine with the image in it. A signal ends it.
func setUp(signals <-chan os.Signal, private bool, log io.Writer) (host string, closeEngine func() error, err error) {
	ctx, cancel := context.WithCancel(context.Background())
	var ending os.Signal
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		select {
		case ending = <-signals:
			cancel()
		case <-ctx.Done():
		}
	}()
	defer func() {
		cancel()
		<-stopped
		if ending == nil {
			return
		}
		if err == nil {
			err = closeEngine()
		}
		err = errors.Join(fmt.Errorf("ended by signal: %s", ending), err)
	}()
	if !private {
		if host := existing(ctx, log); host != "" {
			closeEngine, err := borrow(ctx, host)
			return host, closeEngine, err
		}
	}
	if err := engine.Install(ctx, log); err != nil {
		return "", nil, err
	}
	d, err := engine.StartDocker(ctx, engine.Options{Log: log})
	if err != nil {
		return "", nil, err
	}
	if err := d.ImportBusybox(ctx, image); err != nil {
		return "", nil, errors.Join(err, d.Close())
	}
	return d.Host(), d.Close, nil
}

// existing is the address of an engine that answers; empty if none does.
func existing(ctx context.Context, log io.Writer) string {
	hosts := []string{defaultSocket}
	if host := os.Getenv("DOCKER_HOST"); host != "" {
		hosts = []string{host, defaultSocket}
	}
	for _, host := range hosts {
		ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
		err := engine.Ping(ctx, host)
		cancel()
		if err == nil {
			_, _ = fmt.Fprintf(log, "using the engine at %s\n", host)
			return host
		}
		_, _ = fmt.Fprintf(log, "no engine at %s: %v\n", host, err)
	}
	return ""
}

// borrow puts the image into somebody's engine, unless it is there, until giveBack.
func borrow(ctx context.Context, host string) (giveBack func() error, err error) {
	found, err := engine.HasImage(ctx, host, image)
	if err != nil {
		return nil, err
	}
	if found {
		return func() error { return nil }, nil
	}
	if err := engine.ImportBusybox(ctx, host, image); err != nil {
		return nil, err
	}
	return func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		return engine.RemoveImage(ctx, host, image)
	}, nil
}

// runCommand runs it to its end and passes signals on.
func runCommand(argv []string, host string, signals <-chan os.Signal) (int, error) {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(commandEnv(os.Environ(), host), "DOCKER_HOST="+host, "BERM_DEMO_IMAGE="+image)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGTERM}
	if err := cmd.Start(); err != nil {
		return 125, fmt.Errorf("start %s: %w", argv[0], err)
	}
	ended, passed := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(passed)
		for {
			select {
			case s := <-signals:
				// What is typed at a terminal reaches the command without us.
				if typed := s == unix.SIGINT || s == unix.SIGQUIT; !typed || !isTerminal(os.Stdin) {
					_ = cmd.Process.Signal(s) // fails if it has ended
				}
			case <-ended:
				return
			}
		}
	}()
	err := cmd.Wait()
	close(ended)
	<-passed
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return 125, err
	}
	status, ok := cmd.ProcessState.Sys().(syscall.WaitStatus)
	if ok && status.Signaled() {
		return 128 + int(status.Signal()), nil
	}
	return cmd.ProcessState.ExitCode(), nil
}

// commandEnv drops what belongs to another engine than the one at host.
func commandEnv(env []string, host string) []string {
	drop := []string{"DOCKER_HOST", "BERM_DEMO_IMAGE", "DOCKER_CONTEXT"}
	if host != os.Getenv("DOCKER_HOST") {
		drop = append(drop, "DOCKER_TLS_VERIFY", "DOCKER_CERT_PATH", "DOCKER_API_VERSION")
	}
	return slices.DeleteFunc(env, func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return slices.Contains(drop, name)
	})
}

func isTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// prefixer says on each line who speaks.
type prefixer struct {
	w     io.Writer
	fresh bool // a line begins
}

func (p *prefixer) Write(b []byte) (int, error) {
	for line := range strings.Lines(string(b)) {
		if p.fresh {
			line = "berm-engine: " + line
		}
		p.fresh = strings.HasSuffix(line, "\n")
		if _, err := io.WriteString(p.w, line); err != nil {
			return 0, err
		}
	}
	return len(b), nil
}
