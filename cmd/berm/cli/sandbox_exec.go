package cli

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

const (
	maxStdin    = 16 << 20 // bytes; what the API takes in one call
	outputLimit = 4 << 20  // bytes per stream; all that the API gives in one answer

	exitExec     = 125 // exec itself failed, not the command
	exitTimedOut = 124 // as timeout(1) has it
	exitKilled   = 137 // as a shell has it
	exitSignal   = 128 // and the signal's number
)

// execFlags say how to run a command.
type execFlags struct {
	env                []string
	cwd, id            string
	timeout            time.Duration
	limit              int
	stdin, tty, detach bool
}

func newExecCommand(flags *clientFlags) *cobra.Command {
	var e execFlags
	cmd := &cobra.Command{
		Use:   "exec KEY [flags] -- COMMAND [ARG...]",
		Short: "Run a command in a sandbox",
		Long: `Run a command in a sandbox, and print what it prints as it comes. The exit code is
the command's own; 124 if it ran out of time, 137 if it was killed, and 125 if it
couldn't be run at all.

Signals go on to the command; three of a kind within a second kill it, and so does the end
of what reads its output. Ctrl-P Ctrl-Q on a terminal leaves it running. With -o json
the command runs to its end, and the whole result is printed; with --detach, only what
was started.`,
		Example: `  berm sandbox exec mine -- ls -la /
  berm sandbox exec mine --timeout 2m -e CI=1 -w /workspace/src -- make test
  tar c . | berm sandbox exec mine -i -- tar x
  berm sandbox exec mine -it -- top
  berm sandbox exec mine -d -- ./long-job`,
	}
	cmd.RunE = flags.commandAction(func(cmd *cobra.Command, c *client.Client, args []string) (int, error) {
		return flags.exec(cmd, c, args[0], args[1:], e)
	})
	f := cmd.Flags()
	f.SetInterspersed(true)
	f.StringArrayVarP(&e.env, "env", "e", nil, "NAME=VALUE, or NAME to take it from here; may be given many times")
	f.StringVarP(&e.cwd, "workdir", "w", "", "working directory (default the mounted directory)")
	f.StringVar(&e.cwd, "cwd", "", "the same as --workdir")
	f.DurationVar(&e.timeout, "timeout", 0, "longest run (default and maximum are the profile's)")
	f.BoolVarP(&e.stdin, "stdin", "i", false, "give the command this standard input")
	f.BoolVarP(&e.tty, "tty", "t", false, "give the command a terminal, in the place of this one")
	f.BoolVarP(&e.detach, "detach", "d", false, "leave the command running, and print its id")
	f.StringVar(&e.id, "id", "", "name of the command; one that is there under it is followed, rather than started")
	f.IntVar(&e.limit, "output-limit", outputLimit, "bytes of each stream that are kept where it isn't streamed")
	_ = f.MarkHidden("cwd")
	return cmd
}

// commandAction is clientAction for a function that returns the command's exit code. An error
// beside a code is printed, and the code stays.
func (f *clientFlags) commandAction(do func(cmd *cobra.Command, c *client.Client, args []string) (int, error)) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		c, err := f.connect()
		code := 0
		if err == nil {
			code, err = do(cmd, c, args)
		}
		exit, ok := errors.AsType[*config.ExitError](err)
		switch {
		case err == nil && code == 0:
			return nil
		case ok:
			return exit
		case code == 0:
			code = exitExec
		}
		return &config.ExitError{Code: code, Err: explain(err)}
	}
}

// check refuses flags that exclude each other.
func (e execFlags) check(output string) error {
	switch {
	case e.detach && (e.stdin || e.tty):
		return usage("--detach can't go together with --stdin or --tty: nobody is there to type")
	case e.tty && output != formatTable:
		return usage("--tty can't go together with -o json")
	case e.id != "" && output != formatTable && !e.detach:
		return usage("--id can't go together with -o json, but for --detach")
	}
	return nil
}

func (f *clientFlags) exec(cmd *cobra.Command, c *client.Client, key string, command []string, e execFlags) (int, error) {
	err := e.check(f.output)
	if err != nil {
		return 0, err
	}
	req := apitype.ExecRequest{Command: command, Cwd: e.cwd, ExecID: e.id}
	if req.Env, err = environment(e.env); err != nil {
		return 0, err
	}
	if cmd.Flags().Changed("timeout") {
		req.Timeout = apitype.SecondsOf(seconds(e.timeout))
	}
	switch {
	case e.detach:
		x, err := c.StartExec(cmd.Context(), key, req)
		return 0, answer(f, cmd, x, err, func(x *apitype.Execution) string { return x.ExecID + "\n" })
	case f.output != formatTable:
		return f.execWhole(cmd, c, key, req, e)
	}
	return execStreamed(cmd, c, key, req, e)
}

// execWhole runs the command to its end, and prints the result as JSON or by a template.
func (f *clientFlags) execWhole(cmd *cobra.Command, c *client.Client, key string, req apitype.ExecRequest, e execFlags) (int, error) {
	req.OutputLimit = &e.limit
	if e.stdin {
		var err error
		if req.StdinBase64, err = io.ReadAll(io.LimitReader(cmd.InOrStdin(), maxStdin+1)); err != nil {
			return 0, fmt.Errorf("read standard input: %w", err)
		}
		if len(req.StdinBase64) > maxStdin {
			return 0, fmt.Errorf("standard input is larger than %d bytes, which is all that a command takes that isn't streamed", maxStdin)
		}
	}
	res, err := c.Exec(cmd.Context(), key, req)
	if err != nil {
		return 0, err
	}
	if err := answer(f, cmd, res, nil, nil); err != nil {
		return 0, fmt.Errorf("print the result: %w", err)
	}
	if res.StdoutTruncated || res.StderrTruncated {
		_, _ = fmt.Fprintln(cmd.ErrOrStderr(), "berm: the output was longer than --output-limit, and was cut")
	}
	return endCode(apitype.AttachEnd{ExitCode: res.ExitCode, Status: res.Status}, time.Duration(res.Timeout))
}

// endCode returns the exit code for the end of a command, and an error that explains it.
func endCode(end apitype.AttachEnd, timeout time.Duration) (int, error) {
	switch {
	case end.Status == "timed_out":
		return exitTimedOut, fmt.Errorf("the command was killed after %s", timeout)
	case end.Status == "oom_killed":
		return exitKilled, errors.New("the command was killed for want of memory")
	case end.ExitCode != nil:
		return *end.ExitCode, nil
	case end.Signal > 0:
		return exitSignal + end.Signal, nil
	}
	return exitKilled, fmt.Errorf("the command was ended: %s", end.Status)
}

// execStreamed starts the command and follows it.
func execStreamed(cmd *cobra.Command, c *client.Client, key string, req apitype.ExecRequest, e execFlags) (int, error) {
	s := &session{stdout: cmd.OutOrStdout(), stderr: cmd.ErrOrStderr()}
	if e.tty {
		var err error
		if s.terminal, err = terminalOf(cmd.InOrStdin(), cmd.OutOrStdout()); err != nil {
			return 0, usage("%w", err)
		}
		size := s.terminal.size()
		req.TTY, req.Rows, req.Cols = true, size.Rows, size.Cols
		req.Env = withTerm(req.Env)
	}
	if e.stdin || e.tty {
		s.in, req.StdinOpen = cmd.InOrStdin(), true
	}
	if req.ExecID == "" {
		req.ExecID = "cli-" + strings.ToLower(rand.Text()) // a name, for the calls about it
	}
	x := streamConnection{session: s, c: c, key: key, req: req}
	x.req.Raw = true
	s.attach = x.attach
	s.kill = func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(cmd.Context()), killTime)
		defer cancel()
		_, _ = c.KillExec(ctx, key, req.ExecID) // its own timeout ends it all the same
	}
	return s.stay(cmd.Context(), "command", req.ExecID)
}

// withTerm sets TERM unless env has it.
func withTerm(env map[string]string) map[string]string {
	out := map[string]string{"TERM": cmp.Or(os.Getenv("TERM"), "xterm")}
	maps.Copy(out, env)
	return out
}
