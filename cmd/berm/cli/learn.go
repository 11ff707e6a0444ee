package cli

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi"
)

// maxAuditLine bounds a line of an audit log, in bytes. Real ones have a few hundred.
const maxAuditLine = 1 << 20

func newLearnCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "learn AUDIT_LOG...",
		Short: "Print the smallest policy that would have allowed what audit logs say was refused",
		Long: `Read audit logs of the Docker Engine API, and print the smallest addition to the
policy in force that would have allowed what was refused, or would have been in mode
audit. What no policy allows is listed in comments.

Callers chose what is in it: read it before you take it over. A request that was refused
at one step may be refused again at the next.`,
		Example: `  berm policy learn --policy policy.yaml /var/log/berm/audit.log
  cat audit.log.1 audit.log | berm policy learn -`,
		RunE: config.Action(func(cmd *cobra.Command, args []string) error {
			p, err := readPolicy(cmd)
			if err != nil {
				return err
			}
			var records []policy.LearnRecord
			for _, name := range args {
				more, err := send(cmd, name, func(l *local) ([]policy.LearnRecord, error) { return refusals(l.content) })
				if err != nil {
					return fmt.Errorf("read the audit log %s: %w", name, err)
				}
				records = append(records, more...)
			}
			out, err := p.Learn(records)
			if err != nil {
				return err
			}
			_, err = cmd.OutOrStdout().Write(out)
			return err
		}),
	}
	config.AddFlags(cmd, "policy")
	return cmd
}

// refusals returns the distinct refusals of an audit log. It leaves out a last line without
// its end, which is being written.
func refusals(r io.Reader) (records []policy.LearnRecord, err error) {
	in := bufio.NewReaderSize(r, maxAuditLine)
	seen := map[string]bool{}
	for number := 1; ; number++ {
		line, err := in.ReadSlice('\n')
		switch {
		case errors.Is(err, io.EOF):
			return records, nil
		case errors.Is(err, bufio.ErrBufferFull):
			return nil, fmt.Errorf("line %d has more than %d bytes", number, maxAuditLine)
		case err != nil:
			return nil, err
		}
		var rec engineapi.Record
		if err := proxy.DecodeJSON(bytes.TrimSpace(line), &rec); err != nil {
			return nil, fmt.Errorf("line %d: %w", number, err)
		}
		if rec.Verdict != engineapi.VerdictDenied && rec.Verdict != engineapi.VerdictWouldDeny {
			continue
		}
		if key := fmt.Sprintf("%q %#v", rec.Profile, rec.Reasons); !seen[key] {
			seen[key] = true
			records = append(records, policy.LearnRecord{Profile: rec.Profile, Reasons: rec.Reasons})
		}
	}
}
