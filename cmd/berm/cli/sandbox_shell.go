package cli

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

// maxShells bounds the names that are tried for a shell.
const maxShells = 100

func newShellCommand(flags *clientFlags) *cobra.Command {
	var command, cwd string
	var env []string
	cmd := &cobra.Command{
		Use:   "shell KEY",
		Short: "Work in a sandbox on a terminal",
		Long: `Work in a sandbox on a terminal: in /bin/bash where there is one, else in /bin/sh.
The shell is a process of the sandbox like those of "berm sandbox process", so no
command's longest run ends it, and it keeps the sandbox from idling out. Ctrl-P Ctrl-Q
leaves it running; "berm sandbox process attach" comes back to it. When the connection
is lost, it goes on as well.`,
		Example: `  berm sandbox shell mine
  berm sandbox shell mine -w /tmp --command "python3 -q"`,
	}
	cmd.RunE = flags.commandAction(func(cmd *cobra.Command, c *client.Client, args []string) (int, error) {
		term, err := terminalOf(cmd.InOrStdin(), cmd.OutOrStdout())
		if err != nil {
			return 0, usage("%w", err)
		}
		size := term.size()
		req := apitype.ProcessRequest{Cwd: cwd, TTY: true, Rows: size.Rows, Cols: size.Cols}
		if req.Env, err = environment(env); err != nil {
			return 0, err
		}
		req.Env = withTerm(req.Env)
		words := strings.Fields(command)
		if len(words) == 0 {
			words = []string{"/bin/sh", "-c", "test -x /bin/bash && exec /bin/bash; exec /bin/sh"}
		}
		req.Command, req.Args = words[0], words[1:]
		p, err := startShell(cmd, c, args[0], req)
		if err != nil {
			return 0, err
		}
		s := &session{in: cmd.InOrStdin(), stdout: cmd.OutOrStdout(), stderr: cmd.ErrOrStderr(), terminal: term}
		return attachProcess(cmd.Context(), c, s, args[0], p.ProcessID, client.AttachOptions{}, -1)
	})
	f := cmd.Flags()
	f.StringVar(&command, "command", "", "what to run instead of a shell, split at blanks")
	f.StringArrayVarP(&env, "env", "e", nil, "NAME=VALUE, or NAME to take it from here; may be given many times")
	f.StringVarP(&cwd, "workdir", "w", "", "working directory (default the mounted directory)")
	return cmd
}

// startShell starts a process under the first name that no running process has.
func startShell(cmd *cobra.Command, c *client.Client, key string, req apitype.ProcessRequest) (*apitype.Process, error) {
	for n := 1; ; n++ {
		req.ProcessID = fmt.Sprintf("shell-%d", n)
		p, err := c.StartProcess(cmd.Context(), key, req)
		if answer, ok := errors.AsType[*client.Error](err); ok && n < maxShells && answer.Code == "process_conflict" {
			continue
		}
		return p, err
	}
}
