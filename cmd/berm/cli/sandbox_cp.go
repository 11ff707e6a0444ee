package cli

import (
	"io"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/proxy/client"
)

func newCpCommand(flags *clientFlags) *cobra.Command {
	return &cobra.Command{
		Use:   "cp FROM TO",
		Short: "Copy a file into a sandbox, or out of one",
		Long: `Copy a file into a sandbox, or out of one. One side is KEY:PATH, the other a local
file, or - for standard input and output. A directory as TO gets the file under its own
name: local, or in the sandbox if it ends in a slash. "berm sandbox files" has directories
("tar") and copies within a sandbox ("cp").`,
		Example: `  berm cp data.csv mine:/workspace/
  berm cp mine:/workspace/result.csv .
  berm cp mine:/workspace/log.txt - | tail`,
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			fromKey, from := sandboxPath(args[0])
			toKey, to := sandboxPath(args[1])
			switch {
			case fromKey != "" && toKey == "":
				name := path.Base(from)
				if info, err := os.Stat(to); err == nil && info.IsDir() {
					if name == "/" || name == "." || name == ".." {
						return usage("%s is no file's name: say where to", from)
					}
					to = filepath.Join(to, name)
				}
				return download(cmd, to, func() (io.ReadCloser, error) { return c.ReadFile(cmd.Context(), fromKey, from, 0, -1) })
			case toKey != "" && fromKey == "":
				_, err := put(cmd, c, toKey, from, to, client.WriteOptions{})
				return err
			}
			return usage("one of FROM and TO has to be in a sandbox, as KEY:PATH, and the other a local file")
		}),
	}
}

// sandboxPath splits KEY:PATH. Paths in a sandbox are absolute, and keys may have colons. The
// key is empty for a local file, like a or ./a:/b.
func sandboxPath(arg string) (key, path string) {
	key, path, ok := strings.Cut(arg, ":/")
	if !ok || strings.Contains(key, "/") {
		return "", arg
	}
	return key, "/" + path
}
