// Package doctor examines the host, the engine and the configuration without changing
// anything, and runs the checks that berm serve runs at its start.
package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/runtime"
)

// NewCommand makes the command doctor.
func NewCommand() *cobra.Command {
	var output string
	var strict, enter bool
	var limit time.Duration
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Look at the host, the engine and the configuration, and say what won't work, or not as hard as it could",
		Long: `Look at all that berm serve would need with the same configuration file, environment
and flags, and say of each what was found:

  ok    as it should be
  soft  it works, but a limit, a wall or a guarantee isn't there: what follows, and what to do
  bad   berm serve would refuse to start, or be of no use or a danger: what follows, and what to do

Nothing is started, made or changed, and a server that runs isn't disturbed. The exit
code is 1 when something is bad, with --strict also when something is soft. Run it as
the user, and in the container, that berm serve is to run as and in. NO_COLOR is heeded.`,
		Example: `  berm doctor
  berm doctor --config /etc/berm/berm.yaml --policy /etc/berm/policy.yaml
  BERM_ENGINE_KIND=containerd berm doctor --strict
  berm doctor -o json | jq -r '.findings[] | select(.grade != "ok") | .id'
  docker exec berm /berm doctor`,
		Args: cobra.NoArgs,
		RunE: config.Action(func(cmd *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return &config.ExitError{Code: config.ExitUsage, Err: fmt.Errorf("--output is %q, want text or json", output)}
			}
			if limit <= 0 {
				return &config.ExitError{Code: config.ExitUsage, Err: fmt.Errorf("--timeout is %s, want more than 0", limit)}
			}
			x := examination{limit: limit, file: config.FileOf(cmd)}
			x.cfg, x.err = reading(cmd.Context(), limit, cmp.Or(x.file, "the configuration"), func() (*config.Config, error) { return config.FromFlags(cmd) })
			if x.err == nil && enter {
				done, err := serve.EnterEngine(cmd.Context(), x.cfg.Engine)
				if done {
					return err
				}
				x.outside = err
			}
			r := x.run(cmd.Context())
			var err error
			if output == "json" {
				err = config.WriteJSON(cmd.OutOrStdout(), r)
			} else {
				err = r.print(cmd.OutOrStdout())
			}
			if err == nil && (r.Grade == gradeBad || strict && r.Grade == gradeSoft) {
				err = &config.ExitError{Code: config.ExitFailure}
			}
			return err
		}),
	}
	config.AddFlags(cmd)
	cmd.Flags().DurationVar(&limit, "timeout", 10*time.Second, "how long each look at something may take")
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	cmd.Flags().BoolVar(&strict, "strict", false, "exit with 1 also when something is soft")
	cmd.Flags().BoolVar(&enter, "enter-engine", false, "look from where berm serve --enter-engine works")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]cobra.Completion{"text", "json"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// grade is the result of a check.
type grade string

const (
	gradeOK   grade = "ok"
	gradeSoft grade = "soft"
	gradeBad  grade = "bad"
)

// finding is the outcome of a check. Several findings may have the same ID, such as those of
// listeners.
type finding struct {
	ID    string `json:"id"` // stable: a group, a dot and a name
	Grade grade  `json:"grade"`
	Found string `json:"found"`
	Means string `json:"means,omitempty"` // the consequence; empty if the grade is ok
	Fix   string `json:"fix,omitempty"`   // advice for the operator
}

// rule is a finding without an ID, and whether it applies.
type rule struct {
	holds bool
	finding
}

func okay(holds bool, found string) rule {
	return rule{holds, finding{Grade: gradeOK, Found: found}}
}

func soft(holds bool, found, means, fix string) rule {
	return rule{holds, finding{"", gradeSoft, found, means, fix}}
}

func bad(holds bool, found, means, fix string) rule {
	return rule{holds, finding{"", gradeBad, found, means, fix}}
}

// judge returns the finding of the first rule that holds, or none.
func judge(id string, rules ...rule) []finding {
	i := slices.IndexFunc(rules, func(r rule) bool { return r.holds })
	if i < 0 {
		return nil
	}
	f := rules[i].finding
	f.ID = id
	return []finding{f}
}

// said returns an error's text on one line, or "" for nil.
func said(err error) string {
	if err == nil {
		return ""
	}
	return config.OneLine(err).Error()
}

// wontStart is the consequence of settings that berm serve refuses.
const wontStart = "berm serve refuses to start"

// report has all findings.
type report struct {
	Berm     string    `json:"berm"`
	Grade    grade     `json:"grade"` // the worst
	Findings []finding `json:"findings"`
}

// examination examines one configuration.
type examination struct {
	cfg     *config.Config // nil with an error
	err     error
	file    string        // of the configuration; empty without one
	outside error         // why the engine's mount namespace couldn't be entered
	limit   time.Duration // timeout of each check
}

// run runs all checks.
func (x examination) run(ctx context.Context) report {
	host, err := serve.Within(ctx, x.limit, func(context.Context) (hostFacts, error) { return lookAtHost("/", os.Geteuid()) })
	host.err = err
	if x.err != nil {
		return newReport(append(host.judge("docker", true), judge("config.file", bad(true, strings.ReplaceAll(said(x.err), ":;", ":"), wontStart,
			"berm config print shows every key, what it means and where its value comes from"))...))
	}
	e := lookAtEngine(ctx, x.limit, x.cfg)
	p := lookAtPolicy(ctx, x.limit, e)
	s := lookAtStorage(ctx, x.limit, e.cfg)
	source := "no file: defaults, environment and flags"
	if x.file != "" {
		source = x.file + ", environment and flags"
	}
	return newReport(slices.Concat(host.judge(e.cfg.Engine.Kind, e.local()),
		judge("config.file", okay(true, source)),
		judge("engine.enter", bad(x.outside != nil, said(x.outside), wontStart, "have the engine run before berm, or leave --enter-engine out on the engine's own host")),
		e.judge(p.policy), p.judge(e), host.judgeOwner(p.policy, e.cfg.Sandbox.ChatsRoot), s.judge(e.cfg, host),
		checkSeals(ctx, x.limit, e, s), checkDoors(ctx, x.limit, e.cfg, s)))
}

func newReport(findings []finding) report {
	r := report{Berm: config.VersionLine(), Grade: gradeOK, Findings: findings}
	for i, f := range findings {
		findings[i].Found, findings[i].Means, findings[i].Fix = runtime.WithoutUser(f.Found), runtime.WithoutUser(f.Means), runtime.WithoutUser(f.Fix)
		if f.Grade == gradeBad || f.Grade == gradeSoft && r.Grade == gradeOK {
			r.Grade = f.Grade
		}
	}
	return r
}

// reading is serve.Within for a read of files. It adds what is read to ErrStuck, which doesn't
// name a file.
func reading[T any](ctx context.Context, limit time.Duration, what string, read func() (T, error)) (T, error) {
	v, err := serve.Within(ctx, limit, func(context.Context) (T, error) { return read() })
	if errors.Is(err, serve.ErrStuck) {
		err = fmt.Errorf("%s: %w", what, err)
	}
	return v, err
}
