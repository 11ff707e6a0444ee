// Command berm-engine runs a command with a container engine: one that is there, or
// a private one that ends with the command. It is for development.
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
	image = "berm.local/busybox:latest"
	usage = `usage: berm-engine [--engine docker|containerd] [--private] -- COMMAND [ARGUMENT...]

Runs COMMAND with an engine, and with BERM_DEMO_IMAGE set to an image in it: the
engine that DOCKER_HOST or CONTAINERD_ADDRESS names, or the one at the usual socket,
if it answers, else a private one, whose packages are installed if need be. Nothing
of it stays behind.

COMMAND finds a Docker Engine by DOCKER_HOST, and a containerd by CONTAINERD_ADDRESS
and CONTAINERD_NAMESPACE; what else berm needs for a private one is in
BERM_ENGINE_NETNS and BERM_ENGINE_CGROUP_PARENT.
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
	name := flags.String("engine", "docker", "kind of engine")
	private := flags.Bool("private", false, "start a private engine even if there is another")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		return 2
	}
	k, ok := kindOf(*name)
	if !ok || flags.NArg() == 0 {
		flags.Usage()
		return 2
	}
	log = &prefixer{w: log, fresh: true}
	// The command is killed when the thread that started it ends.
	runtime.LockOSThread()
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT)
	defer signal.Stop(signals)

	env, closeEngine, err := setUp(signals, k, *private, log)
	if err != nil {
		_, _ = fmt.Fprintln(log, err)
		return 125
	}
	code, err := runCommand(flags.Args(), env, signals)
	if err != nil {
		_, _ = fmt.Fprintln(log, err)
	}
	if err := closeEngine(); err != nil {
		_, _ = fmt.Fprintln(log, err)
		return cmp.Or(code, 125)
	}
	return code
}

// setUp finds or starts an engine with the image in it, and answers the environment
// for a command that is to use it. A signal ends it.
func setUp(signals <-chan os.Signal, k kind, private bool, log io.Writer) (env []string, closeEngine func() error, err error) {
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
		if address := existing(ctx, k, log); address != "" {
			closeEngine, err := borrow(ctx, k.at(address))
			return commandEnv(os.Environ(), k, address, nil), closeEngine, err
		}
	}
	if err := engine.Install(ctx, k.name, log); err != nil {
		return nil, nil, err
	}
	p, err := k.start(ctx, log)
	if err != nil {
		return nil, nil, err
	}
	if err := p.ImportBusybox(ctx, image); err != nil {
		return nil, nil, errors.Join(err, p.close())
	}
	return commandEnv(os.Environ(), k, p.address, p.env), p.close, nil
}

// existing is the address of an engine that answers; empty if none does.
func existing(ctx context.Context, k kind, log io.Writer) string {
	addresses := []string{k.address}
	if address := os.Getenv(k.addressVar); address != "" {
		addresses = []string{address, k.address}
	}
	for _, address := range addresses {
		ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
		err := k.at(address).Ping(ctx)
		cancel()
		if err == nil {
			_, _ = fmt.Fprintf(log, "using the engine at %s\n", address)
			return address
		}
		_, _ = fmt.Fprintf(log, "no engine at %s: %v\n", address, err)
	}
	return ""
}

// borrow puts the image into somebody's engine, unless it is there, until giveBack.
func borrow(ctx context.Context, s store) (giveBack func() error, err error) {
	found, err := s.HasImage(ctx, image)
	if err != nil {
		return nil, err
	}
	if found {
		return func() error { return nil }, nil
	}
	removeNamespace := func(context.Context) error { return nil }
	if n, ok := s.(namespaced); ok {
		if there, err := n.HasNamespace(ctx); err != nil {
			return nil, err
		} else if !there {
			removeNamespace = n.RemoveNamespace
		}
	}
	if err := s.ImportBusybox(ctx, image); err != nil {
		return nil, err
	}
	return func() error {
		ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
		defer cancel()
		return errors.Join(s.RemoveImage(ctx, image), removeNamespace(ctx))
	}, nil
}

// runCommand runs it to its end and passes signals on.
func runCommand(argv, env []string, signals <-chan os.Signal) (int, error) {
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = env
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

// commandEnv tells of the engine at an address, and drops what belongs to another one.
func commandEnv(env []string, k kind, address string, more []string) []string {
	drop := []string{k.addressVar, "BERM_DEMO_IMAGE", "DOCKER_CONTEXT", "BERM_ENGINE_ADDRESS"}
	if address != os.Getenv(k.addressVar) {
		drop = append(drop, "BERM_ENGINE_NETNS", "BERM_ENGINE_CGROUP_PARENT", "BERM_ENGINE_SNAPSHOTTER")
		drop = append(drop, k.alsoVars...)
	}
	env = slices.DeleteFunc(env, func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return slices.Contains(drop, name)
	})
	env = append(env, k.addressVar+"="+address, "BERM_DEMO_IMAGE="+image)
	if k.name == "containerd" {
		env = append(env, "CONTAINERD_NAMESPACE="+namespace())
	}
	return append(env, more...)
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
