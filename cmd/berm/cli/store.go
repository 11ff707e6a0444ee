package cli

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/lifecycle/store"
)

func newStoreCommand() *cobra.Command {
	return config.Group("store", "Back up, check or restore the server's store", newStoreBackupCommand(), newStoreCheckCommand(), newStoreRestoreCommand())
}

// storeAction is action for commands on a store, which end cleanly on a signal.
func storeAction(f func(ctx context.Context, cmd *cobra.Command, cfg *config.Config, args []string) error) func(*cobra.Command, []string) error {
	return config.Action(func(cmd *cobra.Command, args []string) error {
		cfg, err := config.FromFlags(cmd)
		if err != nil {
			return err
		}
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

A backup is a tar: manifest.json says what it is of, and berm.db is the database with the
records of sandboxes, workspaces, chats and files. With it go the instance's id and the key
of its labels' seals, by which a server knows its sandboxes. What chats hold isn't in it: back up sandbox.chats_root
after it. Neither are the configuration, the policy, tokens and signing keys.

A backup is a secret: the environments of sandboxes and the seals' key are in it. FILE is for its owner only;
what standard output goes to is the shell's, which heeds umask.`,
		Example: `  berm store backup /backup/berm.tar --state-dir /var/lib/berm
  berm store backup berm.tar --config /etc/berm/berm.yaml --force
  (umask 077; docker compose exec -T berm /berm store backup - > berm.tar)`,
		Args: cobra.ExactArgs(1),
		RunE: storeAction(func(ctx context.Context, cmd *cobra.Command, cfg *config.Config, args []string) error {
			if args[0] == "-" {
				if isTerminal(cmd.OutOrStdout()) {
					return &config.ExitError{Code: config.ExitUsage, Err: errors.New("a backup is nothing for a terminal: name a file, or pipe it")}
				}
				return backUp(ctx, cmd, cfg, func(write func(io.Writer) error) error { return write(cmd.OutOrStdout()) })
			}
			if err := serve.MayPut(args[0], force); err != nil {
				return err
			}
			return backUp(ctx, cmd, cfg, func(write func(io.Writer) error) error { return serve.PutBackup(args[0], force, write) })
		}),
	}
	config.AddFlags(cmd, "state-dir")
	cmd.Flags().BoolVar(&force, "force", false, "replace a file that is there")
	return cmd
}

// backUp makes a backup, for which put provides a place.
func backUp(ctx context.Context, cmd *cobra.Command, cfg *config.Config, put func(write func(io.Writer) error) error) (err error) {
	dir := cfg.StateDir
	instance, err := knownInstance(cfg)
	if err != nil {
		return err
	}
	if err := errors.Join(serve.NoRestorePending(dir), serve.OwnState(dir)); err != nil {
		return err
	}
	work, err := serve.OpenScratch(dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, work.Close()) }()
	key, err := serve.SealKey(dir)
	if err != nil {
		return err
	}
	m := serve.Manifest{Format: serve.BackupFormat, SealKey: hex.EncodeToString(key), Berm: config.Version, Instance: instance, Created: time.Now().UTC().Truncate(time.Millisecond)}
	if key == nil { // an earlier version's
		m.Format = 1
	}
	copied := filepath.Join(work.Dir, serve.StateStore)
	if err := store.Snapshot(ctx, filepath.Join(dir, serve.StateStore), copied); err != nil {
		return err
	}
	report, err := store.Check(ctx, copied, work.Dir)
	if err != nil {
		return fmt.Errorf("the store isn't sound, so there is no backup: %w", err)
	}
	m.Schema = report.Schema
	info, err := os.Stat(copied)
	if err != nil {
		return err
	}
	err = put(func(w io.Writer) error {
		p := NewProgress(cmd.ErrOrStderr(), info.Size())
		defer p.Close()
		if p != nil {
			w = io.MultiWriter(w, p)
		}
		return serve.WriteBackup(ctx, w, m, copied)
	})
	if err != nil {
		return fmt.Errorf("write the backup: %w", err)
	}
	// Standard output may be the backup's.
	_, err = fmt.Fprintf(cmd.ErrOrStderr(), "backed up instance %s: %s in %.1f MiB\n", instance, reportLine(report), float64(info.Size())/(1<<20))
	return err
}

// knownInstance is the id of the instance whose state directory it is.
func knownInstance(cfg *config.Config) (string, error) {
	instance, err := serve.Instance(cfg.StateDir, cfg.Engine.Instance)
	if err == nil && instance == "" {
		err = fmt.Errorf("%s has no instance id, and engine.instance isn't set: is it the server's state directory, and the server's configuration?", cfg.StateDir)
	}
	return instance, err
}

func newStoreCheckCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "check [FILE|-]",
		Short: "Check the store, or a backup",
		Long: `Check the store, also while a server runs, or a backup; - is standard input. Every page
and every record is read, and nothing is changed. The exit code is 0 if all is sound.

A backup, and a store of an earlier version's schema, is copied to $TMPDIR for that. That
such a copy can be brought up to date is checked as well: so run the new version's check
before an upgrade.`,
		Example: `  berm store check --state-dir /var/lib/berm
  berm store check /backup/berm.tar
  ssh backup cat berm.tar | berm store check -`,
		Args: cobra.MaximumNArgs(1),
		RunE: storeAction(func(ctx context.Context, cmd *cobra.Command, cfg *config.Config, args []string) (err error) {
			if len(args) == 0 {
				return checkStore(ctx, cmd, cfg)
			}
			backup, err := OpenLocal(cmd, args[0])
			if err != nil {
				return err
			}
			defer backup.Close()
			work, err := os.MkdirTemp("", "berm-check-")
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, os.RemoveAll(work)) }()
			m, report, err := serve.ReadBackup(ctx, backup.Content, work)
			backup.Close()
			if err != nil {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "sound: %s\n%s\n", m, reportLine(report))
			return err
		}),
	}
	config.AddFlags(cmd, "state-dir")
	return cmd
}

func checkStore(ctx context.Context, cmd *cobra.Command, cfg *config.Config) error {
	if err := errors.Join(serve.NoRestorePending(cfg.StateDir), serve.OwnState(cfg.StateDir)); err != nil {
		return err
	}
	instance, instanceErr := knownInstance(cfg)
	report, err := store.Check(ctx, filepath.Join(cfg.StateDir, serve.StateStore), "")
	if err := errors.Join(instanceErr, err); err != nil {
		return err
	}
	_, err = fmt.Fprintf(cmd.OutOrStdout(), "sound: the store of instance %s\n%s\n", instance, reportLine(report))
	return err
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
		Example: `  berm store restore /backup/berm.tar --state-dir /var/lib/berm
  berm store restore berm.tar --config /etc/berm/berm.yaml --force`,
		Args: cobra.ExactArgs(1),
		RunE: storeAction(func(ctx context.Context, cmd *cobra.Command, cfg *config.Config, args []string) error {
			backup, err := OpenLocal(cmd, args[0])
			if err != nil {
				return err
			}
			defer backup.Close()
			r, err := serve.RestoreState(ctx, cfg.StateDir, cfg.Engine.Instance, backup.Content, force, os.Rename)
			backup.Close()
			if err != nil {
				return err
			}
			if r.Earlier != "" {
				if _, err := fmt.Fprintln(cmd.OutOrStdout(), r.Earlier); err != nil {
					return err
				}
			}
			if _, err := fmt.Fprintf(cmd.OutOrStdout(), "restored into %s: %s\n%s\n", cfg.StateDir, r.Manifest, reportLine(r.Report)); err != nil || r.Kept == "" {
				return err
			}
			_, err = fmt.Fprintf(cmd.OutOrStdout(), "what was there is kept in %s\n", r.Kept)
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

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}
