package main

import (
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/proxy/apitype"
)

const (
	maxStdin    = 16 << 20 // bytes; what the API takes
	outputLimit = 4 << 20  // bytes per stream; all that the API gives

	exitTimedOut = 124 // as timeout(1) has it
	exitKilled   = 137 // as a shell has it
	exitSignal   = 128 // and the signal's number
)

func newExecCommand(flags *clientFlags) *cobra.Command {
	var env []string
	var cwd string
	var timeout time.Duration
	var limit int
	var stdin bool
	cmd := &cobra.Command{
		Use:   "exec KEY -- COMMAND [ARG...]",
		Short: "Run a command in a sandbox to its end",
		Long: `Run a command in a sandbox to its end, and print what it printed. The exit code is
the command's own; 124 if it ran out of time, 137 if it was killed, and 125 if it
couldn't be run at all.`,
		Example: `  berm sandbox exec mine -- ls -la /
  berm sandbox exec mine --timeout 2m --env CI=1 -- make test
  berm sandbox exec mine --stdin -- wc -l < file`,
		Args: cobra.MinimumNArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			req := apitype.ExecRequest{Command: args[1:], Cwd: cwd, OutputLimit: &limit, Raw: flags.output != "json"}
			code, err := func() (int, error) {
				var err error
				if req.Env, err = environment(env); err != nil {
					return 0, err
				}
				if cmd.Flags().Changed("timeout") {
					req.Timeout = apitype.SecondsOf(seconds(timeout))
				}
				if stdin {
					if req.StdinBase64, err = io.ReadAll(io.LimitReader(cmd.InOrStdin(), maxStdin+1)); err != nil {
						return 0, fmt.Errorf("read standard input: %w", err)
					}
					if len(req.StdinBase64) > maxStdin {
						return 0, fmt.Errorf("standard input is larger than %d bytes", maxStdin)
					}
				}
				return flags.exec(cmd, args[0], req)
			}()
			if err == nil && code == 0 {
				return nil
			}
			var exit *exitError
			if errors.As(err, &exit) {
				return exit
			}
			if code == 0 {
				code = exitExec
			}
			return &exitError{code: code, err: err}
		},
	}
	cmd.Flags().StringArrayVar(&env, "env", nil, "NAME=VALUE, or NAME to take it from here; may be given many times")
	cmd.Flags().StringVar(&cwd, "cwd", "", "working directory (default the mounted directory)")
	cmd.Flags().DurationVar(&timeout, "timeout", 0, "longest run (default and maximum are the profile's)")
	cmd.Flags().IntVar(&limit, "output-limit", outputLimit, "bytes of each stream that are kept")
	cmd.Flags().BoolVar(&stdin, "stdin", false, "give the command this standard input, read to its end first")
	return cmd
}

// exec runs the command and prints what came of it. An error beside a code is what
// to say about it.
func (f *clientFlags) exec(cmd *cobra.Command, key string, req apitype.ExecRequest) (int, error) {
	c, err := f.connect()
	if err != nil {
		return 0, err
	}
	res, err := c.Exec(cmd.Context(), key, req)
	if err != nil {
		return 0, explain(err)
	}
	if f.output == "json" {
		err = writeJSON(cmd.OutOrStdout(), res)
	} else {
		_, outErr := cmd.OutOrStdout().Write(res.StdoutBase64)
		_, errErr := cmd.ErrOrStderr().Write(res.StderrBase64)
		err = errors.Join(outErr, errErr)
	}
	if err != nil {
		return 0, fmt.Errorf("print the output: %w", err)
	}
	if res.StdoutTruncated || res.StderrTruncated {
		_, _ = fmt.Fprintln(cmd.ErrOrStderr(), "berm: the output was longer than --output-limit, and was cut")
	}
	return endCode(apitype.AttachEnd{ExitCode: res.ExitCode, Status: res.Status}, time.Duration(res.Timeout))
}

// endCode is the exit code for how a command ended, and what to say about it.
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
