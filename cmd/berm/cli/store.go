package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"syscall"

	"github.com/moby/term"
	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/runtime/atomicfile"
)

func newStoreCommand() *cobra.Command {
	return config.Group("store", "Back up, check or restore the server's store", newStoreBackupCommand(), newStoreCheckCommand(), newStoreRestoreCommand())
}

// storeAction returns the body of a command on a store. A signal cancels its context.
func storeAction(f func(ctx context.Context, cmd *cobra.Command, cfg *config.Config, args []string) error) func(*cobra.Command, []string) error {
	return config.Configured(func(cmd *cobra.Command, cfg *config.Config, args []string) error {
		ctx, stop := signal.NotifyContext(cmd.Context(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		context.AfterFunc(ctx, stop) // a second signal ends the process at once
		return f(ctx, cmd, cfg, args)
	})
}

func newStoreBackupCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "backup FILE|-",
		Short: "Write a backup of the store, also while a server runs",
		Long: `Write a backup of the store, as it is at one moment, also while a server runs and is
used; - is standard output. It is checked before it is written, and the file is there once
all of it is on the disk.

A backup is an SQLite database with the records of sandboxes, workspaces, chats and files,
the instance's id, and the key of its labels' seals. What chats hold isn't in it: copy
sandbox.chats_root after it. Neither are the configuration, the policy, tokens and signing keys.

A backup is a secret: the environments of sandboxes and the seals' key are in it. Only the
owner can read FILE; for standard output, set the shell's umask.`,
		Example: `  berm store backup /backup/berm.db --state-dir /var/lib/berm
  berm store backup berm.db --config /etc/berm/berm.yaml --force
  (umask 077; docker compose exec -T berm /berm store backup - > berm.db)`,
		RunE: storeAction(func(ctx context.Context, cmd *cobra.Command, cfg *config.Config, args []string) error {
			free := func() error { return mayWrite(args[0], force) }
			if args[0] == stdio {
				if _, ok := term.GetFdInfo(cmd.OutOrStdout()); ok {
					return usage("a backup is nothing for a terminal: name a file, or pipe it")
				}
			} else if err := free(); err != nil {
				return err
			}
			var size int64
			b, err := serve.MakeBackup(ctx, cfg, func(path string) error {
				_, err := send(cmd, path, func(l *local) (any, error) {
					size = l.size
					write := func(w io.Writer) error { _, err := io.Copy(w, l.content); return err }
					if args[0] == stdio {
						return nil, write(cmd.OutOrStdout())
					}
					return nil, atomicfile.Write(args[0], 0o600, func(w io.Writer) error { return cmp.Or(write(w), free()) }) // it took its time
				})
				return err
			})
			if err != nil {
				return err
			}
			// Standard output may be the backup's.
			_, err = fmt.Fprintf(cmd.ErrOrStderr(), "backed up instance %s: %s in %.1f MiB\n", b.Instance, reportLine(b.Report), float64(size)/(1<<20))
			return err
		}),
	}
	config.AddFlags(cmd, "state-dir")
	cmd.Flags().BoolVar(&force, "force", false, "replace a file that is there")
	return cmd
}

// mayWrite refuses to replace a file without force, and anything but a file.
func mayWrite(name string, force bool) error {
	info, err := os.Lstat(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	case !info.Mode().IsRegular():
		return fmt.Errorf("%s is there, and is no file", name)
	case !force:
		return fmt.Errorf("%s is there; --force replaces it", name)
	}
	return nil
}

func newStoreCheckCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check [FILE|-]",
		Short: "Check the store, or a backup",
		Long: `Check the store, also while a server runs, or a backup; - is standard input. Every page
and every record is read, and nothing is changed. The exit code is 0 if all is sound.

A backup, and a store of an earlier version's schema, is copied to $TMPDIR for that. The
copy is brought up to date as well: so run the new version's check before an upgrade.`,
		Example: `  berm store check --state-dir /var/lib/berm
  berm store check /backup/berm.db
  ssh backup cat berm.db | berm store check -`,
		RunE: storeAction(func(ctx context.Context, cmd *cobra.Command, cfg *config.Config, args []string) (err error) {
			if len(args) == 0 {
				instance, r, err := serve.CheckStore(ctx, cfg)
				if err != nil {
					return err
				}
				_, err = fmt.Fprintf(cmd.OutOrStdout(), "sound: the store of instance %s\n%s\n", instance, reportLine(r))
				return err
			}
			work, err := os.MkdirTemp("", "berm-check-")
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
			b, err := send(cmd, args[0], func(l *local) (serve.Backup, error) { return serve.ReadBackup(ctx, l.content, work) })
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "sound: %s\n%s\n", b, reportLine(b.Report))
			return err
		}),
	}
	config.AddFlags(cmd, "state-dir")
	return cmd
}

func newStoreRestoreCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "restore FILE|-",
		Short: "Put a backup in the place of the store, while no server runs",
		Long: `Put a backup in the place of the store, while no server runs; - is standard input. All of
it is checked before anything is changed, and whenever this is cut off, the store is the
old one or the backup's. A backup of an older version is brought up to date by the next
start, and that of a newer one is refused.

A store that isn't empty, and an instance's id that is another, are replaced with --force
only, and kept in the state directory as replaced-TIME.

The next start brings the store together with what there is. Sandboxes that were made
since the backup are found by their labels, and those that have gone are forgotten. How
far others were renewed since isn't known: they have one more TTL. Chats have the files
that lie in their directories; which workspaces and chats there are is as it was then.`,
		Example: `  berm store restore /backup/berm.db --state-dir /var/lib/berm
  berm store restore berm.db --config /etc/berm/berm.yaml --force`,
		RunE: storeAction(func(ctx context.Context, cmd *cobra.Command, cfg *config.Config, args []string) error {
			r, err := send(cmd, args[0], func(l *local) (serve.Restoration, error) { return serve.Restore(ctx, cfg, l.content, force) })
			if err != nil {
				return err
			}
			text := fmt.Sprintf("restored into %s: %s\n%s\n", cfg.StateDir, r.Backup, reportLine(r.Report))
			if r.Earlier != "" {
				text = r.Earlier + "\n" + text
			}
			if r.Kept != "" {
				text += "what was there is kept in " + r.Kept + "\n"
			}
			_, err = io.WriteString(cmd.OutOrStdout(), text)
			return err
		}),
	}
	config.AddFlags(cmd, "state-dir")
	cmd.Flags().BoolVar(&force, "force", false, "replace a store that isn't empty, or another instance's, and keep it beside")
	return cmd
}

func reportLine(r store.Report) string {
	return fmt.Sprintf("schema %d, sandboxes: %d, workspaces: %d, chats: %d, files: %d", r.Schema, r.Sandboxes, r.Workspaces, r.Chats, r.Files)
}
