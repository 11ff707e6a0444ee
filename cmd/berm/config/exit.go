package config

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/spf13/cobra"
)

// Exit codes. For a command in a sandbox, berm exits with the command's own code.
const (
	ExitFailure = 1
	ExitUsage   = 2
)

// ExitError ends the program with a code. A nil Err prints no message.
type ExitError struct {
	Code int
	Err  error
}

func (e *ExitError) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit code %d", e.Code)
	}
	return e.Err.Error()
}

func (e *ExitError) Unwrap() error { return e.Err }

// Run runs a command with its arguments, and returns the program's exit code.
func Run(ctx context.Context, cmd *cobra.Command, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	cmd.SilenceUsage, cmd.SilenceErrors = true, true
	cmd.SetArgs(args)
	cmd.SetIn(stdin)
	cmd.SetOut(stdout)
	cmd.SetErr(stderr)
	err := cmd.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	exit, ok := errors.AsType[*ExitError](err)
	if !ok {
		exit = &ExitError{Code: ExitUsage, Err: err} // cobra refuses the arguments
	}
	if exit.Err != nil {
		_, _ = fmt.Fprintln(stderr, "berm: "+strings.ReplaceAll(exit.Err.Error(), "\n", "\n  "))
	}
	return exit.Code
}

// Action returns a cobra command's body that calls f. An error of f that is no *ExitError becomes
// one with ExitFailure. Other errors of cobra count as wrong usage.
func Action(f func(cmd *cobra.Command, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		err := f(cmd, args)
		if _, exit := errors.AsType[*ExitError](err); err == nil || exit {
			return err
		}
		return &ExitError{Code: ExitFailure, Err: err}
	}
}

// Configured is Action for a function that needs the configuration.
func Configured(f func(cmd *cobra.Command, cfg *Config, args []string) error) func(*cobra.Command, []string) error {
	return Action(func(cmd *cobra.Command, args []string) error {
		cfg, err := FromFlags(cmd)
		if err != nil {
			return err
		}
		return f(cmd, cfg, args)
	})
}

// Group returns a command that only holds other commands.
func Group(use, short string, children ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{Use: use, Short: short, Args: noCommand, SuggestionsMinimumDistance: 2, RunE: func(cmd *cobra.Command, _ []string) error {
		return fmt.Errorf("say what to do: %s --help lists it", cmd.CommandPath())
	}}
	Add(cmd, children...)
	return cmd
}

// noCommand refuses an argument of a group, and suggests commands with similar names.
func noCommand(cmd *cobra.Command, args []string) error {
	err := cobra.NoArgs(cmd, args)
	if err == nil {
		return nil
	}
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		err = fmt.Errorf("%w; did you mean %s?", err, strings.Join(near, " or "))
	}
	return err
}

// Add adds children to a command. A child without its own check of arguments gets one that counts
// them by its usage line.
func Add(parent *cobra.Command, children ...*cobra.Command) {
	for _, child := range children {
		if child.Args == nil {
			child.Args = argsOf(child.Use)
		}
	}
	parent.AddCommand(children...)
}

// argsOf returns a check of the number of arguments, for a usage line such as
// "get KEY PATH [FILE]".
func argsOf(use string) cobra.PositionalArgs {
	least, most := 0, 0
	for _, word := range strings.Fields(use)[1:] {
		name, optional := strings.CutPrefix(strings.TrimSuffix(word, "]"), "[")
		if name == "--" || strings.ToUpper(name) != name {
			continue // no argument
		}
		if most++; !optional {
			least++
		}
		if strings.HasSuffix(name, "...") {
			most = math.MaxInt
		}
	}
	switch {
	case most == 0:
		return cobra.NoArgs
	case most == math.MaxInt:
		return cobra.MinimumNArgs(least)
	case least == most:
		return cobra.ExactArgs(least)
	case least == 0:
		return cobra.MaximumNArgs(most)
	}
	return cobra.RangeArgs(least, most)
}

// WriteJSON prints v for programs, indented.
func WriteJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// OneLine joins the lines of an error's text with semicolons.
func OneLine(err error) error {
	if err == nil || !strings.Contains(err.Error(), "\n") {
		return err
	}
	return errors.New(strings.ReplaceAll(err.Error(), "\n", "; "))
}
