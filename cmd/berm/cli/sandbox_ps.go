package cli

import (
	"fmt"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

func newPsCommand(flags *clientFlags) *cobra.Command {
	var all, quiet bool
	cmd := &cobra.Command{
		Use:   "ps [KEY]",
		Short: "List sandboxes, or what runs in one: commands and processes",
		Example: `  berm ps
  berm ps mine --all -o json`,
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			if quiet {
				flags.output = map[bool]string{true: "{{.Key}}", false: "{{.ID}}"}[len(args) == 0]
				if err := flags.parseFormat(); err != nil {
					return err
				}
			}
			if len(args) == 0 {
				return flags.listSandboxes(cmd, c, client.ListOptions{})
			}
			execs, err := c.Executions(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			processes, err := c.Processes(cmd.Context(), args[0])
			if !all {
				execs = slices.DeleteFunc(execs, func(x apitype.Execution) bool { return x.Status != stateRunning })
				processes = slices.DeleteFunc(processes, func(p apitype.Process) bool { return p.State != stateRunning })
			}
			list := running{append([]apitype.Execution{}, execs...), append([]apitype.Process{}, processes...)} // [] in JSON, never null
			return answer(flags, cmd, list, err, func(list running) string { return showRunning(list.rows()) })
		}),
	}
	cmd.Flags().BoolVarP(&all, "all", "a", false, "also commands and processes that have ended")
	cmd.Flags().BoolVarP(&quiet, "quiet", "q", false, "print names only")
	return cmd
}

const stateRunning = "running"

// running lists the commands and processes of a sandbox.
type running struct {
	Execs     []apitype.Execution `json:"execs"`
	Processes []apitype.Process   `json:"processes"`
}

// runningRow is a command or a process, for tables and templates.
type runningRow struct {
	Kind, ID, Status string
	StartedAt        time.Time
	Command          []string
}

func (list running) rows() []runningRow {
	var rows []runningRow
	for _, x := range list.Execs {
		rows = append(rows, runningRow{"exec", x.ExecID, statusOf(x.Status, x.ExitCode, x.Signal), x.StartedAt, x.Command})
	}
	for _, p := range list.Processes {
		rows = append(rows, runningRow{"process", p.ProcessID, processStatus(p), p.StartedAt, p.Command})
	}
	return rows
}

var showRunning = table("KIND\tID\tSTATUS\tSTARTED\tCOMMAND", func(row runningRow) string {
	return fmt.Sprintf("%s\t%s\t%s\t%s\t%s", row.Kind, row.ID, row.Status, row.StartedAt.Format(time.RFC3339), oneLine(row.Command))
})
