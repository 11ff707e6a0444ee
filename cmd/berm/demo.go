package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime"
)

func newDemoCommand() *cobra.Command {
	var opts demoOptions
	var keepUp bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Start a server on a real engine and show what it does, call by call",
		Long: `Start berm serve with a state directory, a port and a token of its own, and show
each call and its answer: sandboxes made, reused, refused, used and collected, and
a server that is killed and knows its sandboxes when it is back. Every answer is
checked; the exit code is 1 if one isn't as promised. Nothing is left behind.`,
		Example: "  berm demo --image busybox\n  DOCKER_HOST=unix:///run/docker.sock berm demo",
		Args:    cobra.NoArgs,
		RunE: action(func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return runDemo(ctx, opts, keepUp, cmd.OutOrStdout())
		}),
	}
	cmd.Flags().StringVar(&opts.image, "image", os.Getenv("BERM_DEMO_IMAGE"), "image of the sandboxes, with a shell (default $BERM_DEMO_IMAGE, else the policy's, pulled if missing)")
	cmd.Flags().StringVar(&opts.kind, "engine", "docker", "docker or containerd")
	cmd.Flags().StringVar(&opts.address, "engine-address", "", "the engine's address (default $DOCKER_HOST, else the engine's own)")
	cmd.Flags().StringVar(&opts.listen, "listen", "127.0.0.1:0", "address of the server")
	cmd.Flags().BoolVar(&keepUp, "keep-up", false, "show nothing: print how to call the server, and keep it up until Ctrl-C")
	return cmd
}

type demoOptions struct {
	image, kind, address, listen string
}

func (o demoOptions) engine() config.Engine {
	return config.Engine{Kind: o.kind, Address: o.address, CallTimeout: 30 * time.Second}
}

// runDemo sets the stage, plays, and clears it again, whatever happens.
func runDemo(ctx context.Context, opts demoOptions, keepUp bool, out io.Writer) (err error) {
	// A child's parent-death signal is tied to the thread that started it.
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()

	dir, err := os.MkdirTemp("", "berm-demo-")
	if err != nil {
		return err
	}
	srv := newDemoServer(dir, opts)
	defer func() {
		failed := err != nil && ctx.Err() == nil
		if failed {
			_, _ = fmt.Fprintf(out, "\nThe server's log ends with:\n%s\n", indent(srv.logTail()))
		}
		if ctx.Err() != nil {
			err = errors.New("interrupted; everything was removed")
			if keepUp {
				err = nil
			}
		}
		err = errors.Join(err, clearStage(context.WithoutCancel(ctx), srv, opts), os.RemoveAll(dir))
	}()
	if err := srv.start(ctx); err != nil {
		return err
	}
	d := &demo{out: out, server: srv}
	if keepUp {
		return d.keepUp(ctx)
	}
	return d.play(ctx)
}

// clearStage stops the server and removes what it made, by label and without it.
func clearStage(ctx context.Context, srv *demoServer, opts demoOptions) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	srv.stop()
	rt, err := openRuntime(opts.engine(), nil)
	if err != nil {
		return err
	}
	owned := map[string]string{lifecycle.LabelOwner: srv.instance}
	containers, err := rt.List(ctx, owned)
	if err != nil {
		return fmt.Errorf("look for what the demo left: %w", err)
	}
	var errs []error
	for _, c := range containers {
		errs = append(errs, rt.Remove(ctx, c.ID))
	}
	if n, ok := rt.(runtime.Networker); ok {
		errs = append(errs, n.RemoveNetwork(ctx, srv.network))
	}
	return errors.Join(errs...)
}

// keepUp tells how to call the server, and waits.
func (d *demo) keepUp(ctx context.Context) error {
	binary, err := os.Executable()
	if err != nil {
		binary = "berm"
	}
	if wd, err := os.Getwd(); err == nil {
		if rel, err := filepath.Rel(wd, binary); err == nil && !strings.HasPrefix(rel, "..") {
			binary = rel
		}
	}
	d.printf(`
Berm is up.

  export BERM_URL=%s BERM_TOKEN=%s

  curl -X PUT -H "X-API-Token: $BERM_TOKEN" $BERM_URL/api/v1/sandboxes/mine
  %[3]s sandbox exec mine -- echo hello
  %[3]s sandbox ls

What it can do: %[1]s/docs. Its log: %[4]s
Ctrl-C stops it and removes its sandboxes.
`, d.server.url, d.server.token, binary, d.server.logPath())
	return d.server.wait(ctx)
}

func (d *demo) printf(format string, args ...any) { _, _ = fmt.Fprintf(d.out, format, args...) }

func indent(text string) string {
	return "     " + strings.ReplaceAll(strings.TrimRight(text, "\n"), "\n", "\n     ")
}
