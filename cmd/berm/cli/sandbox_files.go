package cli

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"io/fs"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

const exitNotFound = 1 // of grep, as grep has it

func newFilesCommand(flags *clientFlags) *cobra.Command {
	cmd := config.Group("files", "Look at, bring, take and change files in a sandbox",
		newFilesListCommand(flags), newFilesPutCommand(flags),
		newFilesMoveCommand(flags, "cp", "Copy a file or a tree within a sandbox", (*client.Client).CopyFile),
		newFilesMoveCommand(flags, "mv", "Move a file or a tree within a sandbox", (*client.Client).MoveFile),
		newFilesRemoveCommand(flags), newFilesMkdirCommand(flags), newFilesFindCommand(flags),
		newFilesGrepCommand(flags), newFilesTarCommand(flags), newFilesWatchCommand(flags),
		&cobra.Command{
			Use:     "cat KEY PATH...",
			Short:   "Print files",
			Example: "  berm sandbox files cat mine /workspace/log.txt",
			RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
				return cat(cmd, args[1:], func(name string) (io.ReadCloser, error) { return c.ReadFile(cmd.Context(), args[0], name, 0, -1) })
			}),
		},
		&cobra.Command{
			Use:   "get KEY PATH [FILE]",
			Short: "Take a file out of a sandbox",
			Long: `Take a file out of a sandbox: to a local file, which is replaced as a whole; to the
file's own name in this directory if none is said; to standard output if it is "-".`,
			Example: `  berm sandbox files get mine /workspace/result.csv
  berm sandbox files get mine /workspace/result.csv out/today.csv`,
			RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
				name := path.Base(args[1])
				if len(args) < 3 && (name == "/" || name == "." || name == "..") {
					return usage("%s is no file's name: say where to", args[1])
				}
				return download(cmd, argument(args, 2, name), func() (io.ReadCloser, error) { return c.ReadFile(cmd.Context(), args[0], args[1], 0, -1) })
			}),
		},
		&cobra.Command{
			Use:     "stat KEY PATH",
			Short:   "Tell what a file is",
			Example: "  berm sandbox files stat mine /workspace -o json",
			RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
				info, err := c.StatFile(cmd.Context(), args[0], args[1])
				return answer(flags, cmd, info, err, showFile)
			}),
		})
	cmd.Long = `Look at, bring, take and change files in a sandbox, as the sandbox's user sees them.

Paths in the sandbox are absolute.`
	return cmd
}

// shown quotes a text from a sandbox unless it is printable, so that it can't control the
// terminal.
func shown(s string) string {
	if s == "" || !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !strconv.IsPrint(r) }) {
		return strconv.Quote(s)
	}
	return s
}

// shownPath is shown for a path, whose bytes are in raw if it isn't UTF-8.
func shownPath(text string, raw []byte) string {
	if len(raw) > 0 {
		return shown(string(raw))
	}
	return shown(text)
}

// harmless replaces the control characters of a text but those in keep.
func harmless(s, keep string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && !strings.ContainsRune(keep, r) {
			return unicode.ReplacementChar
		}
		return r
	}, s)
}

func showFiles(files ...apitype.FileInfo) string {
	return columns(2, "", files, func(info apitype.FileInfo) string {
		name := shownPath(info.Path, info.PathBase64)
		if info.Target != "" {
			name += " -> " + shownPath(info.Target, info.TargetBase64)
		}
		return fmt.Sprintf("%s\t%s\t%d:%d\t%d\t%s\t%s", info.Type, info.Mode, info.UID, info.GID, info.Size, info.ModifiedAt.Format(time.RFC3339), name)
	})
}

func showFile(info *apitype.FileInfo) string { return showFiles(*info) }

// cutShort warns that a list was truncated.
func cutShort(cmd *cobra.Command, truncated bool) {
	if truncated {
		_, _ = fmt.Fprintln(cmd.ErrOrStderr(), "berm: there may be more; see --limit")
	}
}

func newFilesListCommand(flags *clientFlags) *cobra.Command {
	var depth, limit int
	cmd := &cobra.Command{
		Use:   "ls KEY PATH",
		Short: "List a directory",
		Example: `  berm sandbox files ls mine /workspace
  berm sandbox files ls mine / --depth 2 -o json`,
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			list := &apitype.FileList{Files: []apitype.FileInfo{}}
			for info, err := range c.ListFiles(cmd.Context(), args[0], args[1], depth) {
				if err != nil {
					return err
				}
				if list.Truncated = len(list.Files) >= limit; list.Truncated {
					break
				}
				list.Files = append(list.Files, info)
			}
			cutShort(cmd, list.Truncated)
			return answer(flags, cmd, list, nil, func(list *apitype.FileList) string { return showFiles(list.Files...) })
		}),
	}
	cmd.Flags().IntVar(&depth, "depth", 1, "how far down; 1 is the directory alone")
	cmd.Flags().IntVar(&limit, "limit", 10_000, "at most so many")
	return cmd
}

func newFilesPutCommand(flags *clientFlags) *cobra.Command {
	var opts client.WriteOptions
	var mode string
	cmd := &cobra.Command{
		Use:   "put KEY FILE PATH",
		Short: "Write a file into a sandbox",
		Long: `Write a local file, or standard input if that is "-", into a sandbox: whole, or not
at all. A PATH that ends in a slash is a directory to put it in.`,
		Example: `  berm sandbox files put mine data.csv /workspace/
  echo hello | berm sandbox files put mine - /tmp/greeting --mode 0600`,
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			var err error
			if opts.Mode, err = octal(mode); err != nil {
				return err
			}
			info, err := put(cmd, c, args[0], args[1], args[2], opts)
			return answer(flags, cmd, info, err, showFile)
		}),
	}
	f := cmd.Flags()
	f.StringVar(&mode, "mode", "", "permissions of a new file, octal (default those of the local file)")
	f.BoolVarP(&opts.Mkdir, "parents", "p", false, "make the directories above it")
	f.BoolVarP(&opts.Append, "append", "a", false, "add to the end of the file")
	f.BoolVarP(&opts.NoClash, "no-clobber", "n", false, "fail if the file is there")
	return cmd
}

// put writes a local file into a sandbox. A mode of 0 is that of the local file.
func put(cmd *cobra.Command, c *client.Client, key, from, to string, opts client.WriteOptions) (*apitype.FileInfo, error) {
	if strings.HasSuffix(to, "/") {
		if from == stdio {
			return nil, usage("standard input has no name of its own: say the whole path")
		}
		to += filepath.Base(from)
	}
	return send(cmd, from, func(l *local) (*apitype.FileInfo, error) {
		opts.Mode = cmp.Or(opts.Mode, l.mode)
		return c.WriteFile(cmd.Context(), key, to, l.content, opts)
	})
}

// octal parses permissions. It returns 0 for an empty text.
func octal(s string) (fs.FileMode, error) {
	if s == "" {
		return 0, nil
	}
	mode, err := strconv.ParseUint(s, 8, 9)
	if err != nil {
		return 0, usage("--mode is %q, want octal permissions, from 0000 to 0777", s)
	}
	return fs.FileMode(mode), nil
}

func newFilesRemoveCommand(flags *clientFlags) *cobra.Command {
	var recursive bool
	cmd := &cobra.Command{
		Use:   "rm KEY PATH...",
		Short: "Remove files",
		Example: `  berm sandbox files rm mine /tmp/a /tmp/b
  berm sandbox files rm mine -r /workspace/build`,
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			return each(args[1:], func(name string) error { return c.RemoveFile(cmd.Context(), args[0], name, recursive) })
		}),
	}
	cmd.Flags().BoolVarP(&recursive, "recursive", "r", false, "directories with all that is in them")
	return cmd
}

func newFilesMkdirCommand(flags *clientFlags) *cobra.Command {
	var mode string
	var parents bool
	cmd := &cobra.Command{
		Use:     "mkdir KEY PATH...",
		Short:   "Make directories",
		Example: "  berm sandbox files mkdir mine -p /workspace/a/b",
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			perm, err := octal(mode)
			if err != nil {
				return err
			}
			return each(args[1:], func(name string) error { return c.Mkdir(cmd.Context(), args[0], name, perm, parents) })
		}),
	}
	cmd.Flags().StringVar(&mode, "mode", "", "permissions, octal (default 0755)")
	cmd.Flags().BoolVarP(&parents, "parents", "p", false, "also the directories above; one that is there is no error")
	return cmd
}

func newFilesFindCommand(flags *clientFlags) *cobra.Command {
	var limit int
	cmd := &cobra.Command{
		Use:   "find KEY PATH PATTERN",
		Short: "Find files below a directory by their names",
		Long: `Find files below a directory by a pattern, in which * stands for anything in one
name, and ** for any number of directories.`,
		Example: `  berm sandbox files find mine /workspace '**/*.go'`,
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			list, err := c.GlobFiles(cmd.Context(), args[0], args[1], args[2], limit)
			if err != nil {
				return err
			}
			cutShort(cmd, list.Truncated)
			return answer(flags, cmd, list, nil, func(list *apitype.FileList) string {
				return lines(func(info apitype.FileInfo) string { return shownPath(info.Path, info.PathBase64) })(list.Files)
			})
		}),
	}
	cmd.Flags().IntVar(&limit, "limit", 0, "at most so many (default 1000)")
	return cmd
}

func newFilesGrepCommand(flags *clientFlags) *cobra.Command {
	var opts client.SearchOptions
	cmd := &cobra.Command{
		Use:   "grep KEY PATTERN PATH",
		Short: "Find lines in files",
		Long: `Find lines in a file, or in all those below a directory, by a regular expression in
Go's syntax. The exit code is 1 when there is none.`,
		Example: `  berm sandbox files grep mine 'func \w+Sandbox' /workspace --include '*.go'
  berm sandbox files grep mine -F -i todo /workspace`,
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			opts.Pattern = args[1]
			found, err := c.SearchFiles(cmd.Context(), args[0], args[2], opts)
			if err != nil {
				return err
			}
			cutShort(cmd, found.Truncated)
			err = answer(flags, cmd, found, nil, func(found *apitype.FileMatches) string {
				return lines(func(m apitype.FileMatch) string {
					return fmt.Sprintf("%s:%d:%s", shownPath(m.Path, m.PathBase64), m.Line, harmless(m.Text, "\t"))
				})(found.Matches)
			})
			if err == nil && len(found.Matches) == 0 {
				err = &config.ExitError{Code: exitNotFound}
			}
			return err
		}),
	}
	f := cmd.Flags()
	f.BoolVarP(&opts.Literal, "fixed-strings", "F", false, "the pattern is what to find, and no expression")
	f.BoolVarP(&opts.IgnoreCase, "ignore-case", "i", false, "upper and lower case are the same")
	f.StringVar(&opts.Include, "include", "", "only files whose name matches, like '*.go'")
	f.IntVar(&opts.Limit, "limit", 0, "at most so many (default 1000)")
	return cmd
}

func newFilesTarCommand(flags *clientFlags) *cobra.Command {
	var extract bool
	cmd := &cobra.Command{
		Use:   "tar KEY PATH",
		Short: "Take a tree out of a sandbox as a tar archive, or unpack one there",
		Long: `Write a file or a tree of a sandbox to standard output as a tar archive, or, with
--extract, unpack the archive from standard input in the directory PATH.`,
		Example: `  berm sandbox files tar mine /workspace > workspace.tar
  tar c src | berm sandbox files tar mine --extract /workspace`,
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			if extract {
				return c.WriteTar(cmd.Context(), args[0], args[1], cmd.InOrStdin())
			}
			r, err := c.ReadTar(cmd.Context(), args[0], args[1])
			return copyAll(cmd.OutOrStdout(), r, err)
		}),
	}
	cmd.Flags().BoolVarP(&extract, "extract", "x", false, "unpack, instead of packing")
	return cmd
}

func newFilesWatchCommand(flags *clientFlags) *cobra.Command {
	var recursive bool
	cmd := &cobra.Command{
		Use:   "watch KEY PATH",
		Short: "Tell of changes in a directory as they happen",
		Long: `Tell of changes in a directory as they happen, one in a line, until Ctrl-C. The first
line, "ready", says that changes from then on are seen.`,
		Example: "  berm sandbox files watch mine /workspace --recursive",
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			for e, err := range c.WatchFiles(cmd.Context(), args[0], args[1], recursive) {
				if err != nil {
					return err
				}
				line := shown(e.Type)
				if e.Path != "" {
					line += " " + shownPath(e.Path, e.PathBase64)
				}
				printed, err := flags.event(cmd.OutOrStdout(), e)
				if !printed {
					_, err = fmt.Fprintln(cmd.OutOrStdout(), line)
				}
				if err != nil {
					return err
				}
			}
			return nil
		}),
	}
	cmd.Flags().BoolVarP(&recursive, "recursive", "r", false, "also in all directories below")
	return cmd
}

func newFilesMoveCommand(flags *clientFlags, name, short string, do func(c *client.Client, ctx context.Context, key, from, to string, replace bool) error) *cobra.Command {
	var replace bool
	cmd := &cobra.Command{
		Use:     name + " KEY FROM TO",
		Short:   short,
		Example: "  berm sandbox files " + name + " mine /workspace/a /workspace/b --replace",
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			return do(c, cmd.Context(), args[0], args[1], args[2], replace)
		}),
	}
	cmd.Flags().BoolVar(&replace, "replace", false, "replace what is there, but for a directory that isn't empty")
	return cmd
}
