package doctor

import (
	"bytes"
	"context"
	"io"
	"strings"
	"testing"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const testToken = "a-token-for-tests-only"

// run runs berm doctor or berm serve in this process.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	root := &cobra.Command{Use: "berm"}
	root.AddCommand(NewCommand(), serve.NewCommand())
	return config.Run(ctx, root, args, stdin, stdout, stderr)
}

func berm(t *testing.T, stdin string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errs bytes.Buffer
	code = run(t.Context(), args, strings.NewReader(stdin), &out, &errs)
	return out.String(), errs.String(), code
}

var (
	must         = check.Must // ends a test if a step of its own fails
	write        = check.Write
	wantEmptyDir = check.EmptyDir
)
