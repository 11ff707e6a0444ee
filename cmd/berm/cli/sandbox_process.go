package cli

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

const (
	defaultProcess = "default" // the ID of a process that was given none
	maxShown       = 80        // characters of a command in a list
)

func newProcessCommand(flags *clientFlags) *cobra.Command {
	cmd := config.Group("process", "Start, follow and stop long-running processes in a sandbox",
		newProcessStartCommand(flags), newProcessLogsCommand(flags), newProcessAttachCommand(flags),
		flags.quiet(&cobra.Command{
			Use:     "list KEY",
			Aliases: []string{"ls"},
			Short:   "List a sandbox's processes",
			Example: "  berm sandbox process list mine",
			RunE: ask(flags, (*client.Client).Processes, table("ID\tSTATUS\tATTACHED\tSTARTED\tCOMMAND", func(p apitype.Process) string {
				return fmt.Sprintf("%s\t%s\t%t\t%s\t%s", p.ProcessID, processStatus(p), p.Attached, p.StartedAt.Format(time.RFC3339), oneLine(p.Command))
			})),
		}, "{{.ProcessID}}"),
		&cobra.Command{
			Use:   "stop KEY [ID]",
			Short: "Stop a process",
			Long: `Stop a process: its input is closed, it gets TERM, and whatever is left of it after
five seconds is killed.`,
			Example: "  berm sandbox process stop mine web",
			RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
				p, err := c.StopProcess(cmd.Context(), args[0], processID(args))
				return answer(flags, cmd, p, err, showProcess)
			}),
		},
		&cobra.Command{
			Use:   "signal KEY ID SIGNAL",
			Short: "Send a signal to a process",
			Example: `  berm sandbox process signal mine web HUP
  berm sandbox process signal mine default 9`,
			RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
				sig, err := apitype.ParseSignal(args[2])
				if err != nil {
					return usage("signal %q: %w", args[2], err)
				}
				p, err := c.SignalProcess(cmd.Context(), args[0], args[1], sig)
				return answer(flags, cmd, p, err, showProcess)
			}),
		},
		&cobra.Command{
			Use:     "wait KEY [ID]",
			Short:   "Wait for a process' end; its exit code is this command's",
			Example: "  berm sandbox process wait mine web",
			RunE: flags.commandAction(func(cmd *cobra.Command, c *client.Client, args []string) (int, error) {
				p, err := c.WaitProcess(cmd.Context(), args[0], processID(args), 0)
				if err := answer(flags, cmd, p, err, showProcess); err != nil {
					return 0, err
				}
				return endCode(apitype.AttachEnd{ExitCode: p.ExitCode, Signal: p.Signal, Status: p.State}, 0)
			}),
		})
	cmd.Long = `Start, follow and stop long-running processes in a sandbox.

A process has an ID, "` + defaultProcess + `" if none is said, no longest run, and its input stays open. A
running one keeps its sandbox from idling out.`
	return cmd
}

// processID returns the second argument, or the default ID.
func processID(args []string) string { return argument(args, 1, defaultProcess) }

func newProcessStartCommand(flags *clientFlags) *cobra.Command {
	var req apitype.ProcessRequest
	var env []string
	var ready apitype.Readiness
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "start KEY [flags] -- COMMAND [ARG...]",
		Short: "Start a process",
		Long: `Start a process, and print what was started. With --ready-port or --ready-line it
waits until the process is ready, and fails if it doesn't get there.`,
		Example: `  berm sandbox process start mine -- python3 -m http.server 8000
  berm sandbox process start mine --id web --ready-port 8000 -- python3 -m http.server 8000
  berm sandbox process start mine --id tools --replace -e DEBUG=1 -- ./server --stdio`,
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			req.Command, req.Args = args[1], args[2:]
			var err error
			if req.Env, err = environment(env); err != nil {
				return err
			}
			if ready.Port != 0 || ready.Line != "" {
				req.Ready = &ready
				if cmd.Flags().Changed("ready-timeout") {
					ready.Timeout = (*apitype.Duration)(&timeout)
				}
			}
			p, err := c.StartProcess(cmd.Context(), args[0], req)
			if err := answer(flags, cmd, p, err, showProcess); err != nil {
				return err
			}
			if p.Ready != nil && !*p.Ready {
				return fmt.Errorf("process %s didn't get ready in time; it is %s", p.ProcessID, p.State)
			}
			return nil
		}),
	}
	f := cmd.Flags()
	f.StringVar(&req.ProcessID, "id", defaultProcess, "ID of the process")
	f.BoolVar(&req.Replace, "replace", false, "stop the process of this ID first, if one runs")
	f.StringArrayVarP(&env, "env", "e", nil, "NAME=VALUE, or NAME to take it from here; may be given many times")
	f.StringVarP(&req.Cwd, "workdir", "w", "", "working directory (default the mounted directory)")
	f.BoolVarP(&req.TTY, "tty", "t", false, "give the process a terminal")
	f.IntVar(&ready.Port, "ready-port", 0, "wait until somebody listens at this port")
	f.StringVar(&ready.Line, "ready-line", "", "wait for a line of output that contains this")
	f.DurationVar(&timeout, "ready-timeout", 0, "how long to wait for that (default 30s)")
	return cmd
}

// processStatus returns a process's state with its exit code or signal.
func processStatus(p apitype.Process) string {
	return statusOf(p.State, p.ExitCode, p.Signal)
}

func statusOf(state string, code *int, signal int) string {
	switch {
	case signal > 0:
		return fmt.Sprintf("%s (signal %d)", state, signal)
	case code != nil:
		return fmt.Sprintf("%s (%d)", state, *code)
	}
	return state
}

// oneLine joins the words of a command. It quotes words that could be mistaken.
func oneLine(command []string) string {
	words := make([]string, len(command))
	for i, word := range command {
		words[i] = word
		if word == "" || strings.ContainsFunc(word, func(r rune) bool { return r <= ' ' || r == '"' || !strconv.IsPrint(r) }) {
			words[i] = strconv.Quote(word)
		}
	}
	line := []rune(strings.Join(words, " "))
	if len(line) > maxShown {
		return string(line[:maxShown]) + "…"
	}
	return string(line)
}

func newProcessLogsCommand(flags *clientFlags) *cobra.Command {
	var follow bool
	var after int64
	cmd := &cobra.Command{
		Use:   "logs KEY [ID]",
		Short: "Print what a process has printed",
		Long: `Print what a process has printed, as far as it is kept, on standard output and
standard error as it was. With -o json it comes as events, one in a line.`,
		Example: `  berm sandbox process logs mine web
  berm sandbox process logs mine web --follow`,
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			opts := client.StreamOptions{Raw: true}
			if after >= 0 {
				opts.After = &after
			}
			events := c.ProcessLogs(cmd.Context(), args[0], processID(args), opts)
			if follow {
				events = c.FollowProcess(cmd.Context(), args[0], processID(args), opts)
			}
			for ev, err := range events {
				if err != nil {
					return err
				}
				printed, err := flags.event(cmd.OutOrStdout(), ev)
				switch {
				case printed:
				case ev.Event == apitype.EventStdout:
					err = printTo(cmd.OutOrStdout(), ev.DataBase64)
				case ev.Event == apitype.EventStderr:
					err = printTo(cmd.ErrOrStderr(), ev.DataBase64)
				}
				if err != nil {
					return err
				}
			}
			return nil
		}),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on until the process ends")
	cmd.Flags().Int64Var(&after, "after", -1, "only what follows this place in the output (default all that is kept)")
	return cmd
}

func showProcess(p *apitype.Process) string { return p.ProcessID + ": " + processStatus(*p) + "\n" }

func newProcessAttachCommand(flags *clientFlags) *cobra.Command {
	var takeOver, noInput bool
	var after int64
	cmd := &cobra.Command{
		Use:   "attach KEY [ID]",
		Short: "Take the place of a process' input and output",
		Long: `Take the place of a process' input and output, until it ends; its exit code is this
command's. Ctrl-C leaves it running, and so do Ctrl-P Ctrl-Q where it has a terminal,
to which Ctrl-C goes then. The end of standard input closes the process' own.`,
		Example: `  berm sandbox process attach mine tools
  berm sandbox process attach mine tools --take-over --no-stdin`,
	}
	cmd.RunE = flags.commandAction(func(cmd *cobra.Command, c *client.Client, args []string) (int, error) {
		p, err := c.Process(cmd.Context(), args[0], processID(args))
		if err != nil {
			return 0, err
		}
		s := &session{stdout: cmd.OutOrStdout(), stderr: cmd.ErrOrStderr(), detach: true}
		if !noInput {
			s.in = cmd.InOrStdin()
		}
		if p.TTY && !noInput {
			// Without a terminal here, lines of input still reach the one there.
			s.terminal, _ = terminalOf(cmd.InOrStdin(), cmd.OutOrStdout())
		}
		return attachProcess(cmd.Context(), c, s, args[0], p.ProcessID, client.AttachOptions{TakeOver: takeOver}, after)
	})
	f := cmd.Flags()
	f.BoolVar(&takeOver, "take-over", false, "in the place of who is attached already")
	f.BoolVar(&noInput, "no-stdin", false, "leave the process' input alone")
	f.Int64Var(&after, "after", -1, "only what follows this place in the output (default all that is kept)")
	return cmd
}
