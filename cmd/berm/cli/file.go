package cli

import (
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"time"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

func newFileCommand() *cobra.Command {
	var flags clientFlags
	cmd := config.Group("file", "Bring, take, list and delete the files of chats",
		newFileListCommand(&flags), newFilePutCommand(&flags), newFileRemoveCommand(&flags), newFileURLCommand(&flags),
		&cobra.Command{
			Use:   "get CHAT NAME [FILE]",
			Short: "Take a file out of a chat",
			Long: `Take a file out of a chat: to a local file, which is replaced as a whole; to the
file's own name in this directory if none is said; to standard output if it is "-".`,
			Example: `  berm file get chat-42 report.csv
  berm file get chat-42 report.csv out/today.csv`,
			RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
				name := args[1]
				if len(args) < 3 && (name == stdio || name == "" || filepath.Base(name) != name || !filepath.IsLocal(name)) {
					return usage("%s can't be a file here: say where to", shown(name))
				}
				return download(cmd, argument(args, 2, name), func() (io.ReadCloser, error) { return c.ReadChatFile(cmd.Context(), args[0], name, 0, 0) })
			}),
		},
		&cobra.Command{
			Use:     "cat CHAT NAME...",
			Short:   "Print a chat's files",
			Example: "  berm file cat chat-42 notes.txt",
			RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
				return cat(cmd, args[1:], func(name string) (io.ReadCloser, error) { return c.ReadChatFile(cmd.Context(), args[0], name, 0, 0) })
			}),
		})
	cmd.Long = `Bring, take, list and delete the files of chats.

A chat's files are there without a sandbox; its sandbox sees them, and what that writes
beside them is one of them. For all that is in a sandbox, see "berm sandbox files".`
	flags.add(cmd)
	return cmd
}

var showChatFiles = table("NAME\tSIZE\tTYPE\tMODIFIED\tID", func(file apitype.ChatFile) string {
	kind := "-"
	if file.ContentType != nil {
		kind = shown(*file.ContentType)
	}
	return fmt.Sprintf("%s\t%d\t%s\t%s\t%s", shown(file.Name), file.SizeBytes, kind, file.ModifiedAt.Format(time.RFC3339), shown(file.FileID))
})

func newFileListCommand(flags *clientFlags) *cobra.Command {
	return flags.quiet(&cobra.Command{
		Use:     "list CHAT",
		Aliases: []string{"ls"},
		Short:   "List a chat's files",
		Example: "  berm file list chat-42 -o json",
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			files, err := collect(c.ChatFiles(cmd.Context(), args[0], 0))
			if errors.Is(err, client.ErrMoreFiles) {
				_, _ = fmt.Fprintln(cmd.ErrOrStderr(), "berm: "+err.Error())
				err = nil
			}
			return answer(flags, cmd, files, err, showChatFiles)
		}),
	}, "{{.Name}}")
}

func newFilePutCommand(flags *clientFlags) *cobra.Command {
	var name string
	var opts client.PutChatFileOptions
	cmd := &cobra.Command{
		Use:   "put CHAT FILE...",
		Short: "Write local files into a chat",
		Long: `Write a local file, or standard input if that is "-", into a chat: whole, or not at
all. Several files, 1000 at most, come together: all of them, or none. They keep their
names.`,
		Example: `  berm file put chat-42 report.csv --content-type text/csv
  berm file put chat-42 *.png
  date | berm file put chat-42 - --name today.txt --no-clash`,
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			if len(args) > 2 {
				if name != "" || opts.NoClash {
					return usage("--name and --no-clash go with one file only")
				}
				return flags.putFiles(cmd, c, args[0], args[1:], opts.ContentType)
			}
			as, err := nameFor(args[1], name)
			if err != nil {
				return err
			}
			file, err := send(cmd, args[1], func(l *local) (*apitype.ChatFile, error) {
				opts := opts
				opts.Size = l.size
				return c.PutChatFile(cmd.Context(), args[0], as, l.content, opts)
			})
			return answer(flags, cmd, file, err, func(file *apitype.ChatFile) string { return showChatFiles([]apitype.ChatFile{*file}) })
		}),
	}
	f := cmd.Flags()
	f.StringVar(&name, "name", "", "name in the chat (default that of the local file)")
	f.StringVar(&opts.ContentType, "content-type", "", "what the content is, like text/csv")
	f.BoolVarP(&opts.NoClash, "no-clash", "n", false, "fail if the file is there")
	return cmd
}

// nameFor returns the name in the chat for a local file.
func nameFor(local, name string) (string, error) {
	switch {
	case name != "":
		return name, nil
	case local == stdio:
		return "", usage("standard input has no name of its own: say --name")
	}
	return filepath.Base(local), nil
}

// putFiles writes several files in one request.
func (f *clientFlags) putFiles(cmd *cobra.Command, c *client.Client, chatID string, locals []string, contentType string) error {
	files, err := c.PutChatFiles(cmd.Context(), chatID, func(yield func(client.NewChatFile, error) bool) {
		for _, path := range locals {
			name, err := nameFor(path, "")
			more := false
			if err == nil {
				more, err = send(cmd, path, func(l *local) (bool, error) {
					return yield(client.NewChatFile{Name: name, ContentType: contentType, Content: l.content}, nil), nil
				})
			}
			if err != nil {
				more = yield(client.NewChatFile{}, err)
			}
			if !more {
				return
			}
		}
	})
	return answer(f, cmd, files, err, showChatFiles)
}

func newFileRemoveCommand(flags *clientFlags) *cobra.Command {
	var all bool
	cmd := &cobra.Command{
		Use:     "rm CHAT [NAME...]",
		Aliases: []string{"delete"},
		Short:   "Delete files of a chat",
		Example: `  berm file rm chat-42 report.csv notes.txt
  berm file rm chat-42 --all`,
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			names := args[1:]
			if all == (len(names) > 0) {
				return usage("say either names or --all")
			}
			if all {
				n, err := c.DeleteChatFiles(cmd.Context(), args[0])
				return answer(flags, cmd, apitype.DeletedFiles{Deleted: n}, err, func(d apitype.DeletedFiles) string { return fmt.Sprintf("%d deleted\n", d.Deleted) })
			}
			return each(names, func(name string) error { return c.DeleteChatFile(cmd.Context(), args[0], name) })
		}),
	}
	cmd.Flags().BoolVar(&all, "all", false, "all files of the chat but its history")
	return cmd
}

func newFileURLCommand(flags *clientFlags) *cobra.Command {
	req := apitype.FileURLRequest{}
	var ttl time.Duration
	var contentType string
	var maxBytes int64
	cmd := &cobra.Command{
		Use:   "url CHAT NAME",
		Short: "Give out a URL that reads or writes one file of a chat",
		Long: `Print a URL under which whoever has it can read one file of a chat, or write it with
--method PUT, without a token, for as long as --ttl says, and while the chat is there.`,
		Example: `  berm file url chat-42 report.csv --ttl 10m
  curl -T photo.png "$(berm file url chat-42 photo.png --method PUT --content-type image/png --max-bytes 5000000)"`,
		RunE: flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
			req := req
			req.Name = args[1]
			if ttl != 0 {
				req.TTL = new(apitype.Duration(ttl))
			}
			if contentType != "" {
				req.ContentType = &contentType
			}
			if cmd.Flags().Changed("max-bytes") {
				req.MaxBytes = &maxBytes
			}
			signed, err := c.SignFileURL(cmd.Context(), args[0], req)
			if err != nil {
				return err
			}
			signed.URL = flags.here(signed.URL, signed.Path)
			return answer(flags, cmd, signed, nil, func(signed *apitype.FileURL) string { return shown(signed.URL) + "\n" })
		}),
	}
	f := cmd.Flags()
	f.StringVar(&req.Method, "method", "GET", "GET or PUT")
	f.DurationVar(&ttl, "ttl", 0, "life of the URL, up to 168h (default 1h)")
	f.StringVar(&contentType, "content-type", "", "with PUT: what the upload's Content-Type has to be (default any)")
	f.Int64Var(&maxBytes, "max-bytes", 0, "with PUT: most bytes of the upload (default what the quota has room for)")
	_ = cmd.RegisterFlagCompletionFunc("method", cobra.FixedCompletions([]cobra.Completion{"GET", "PUT"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}
