package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/lifecycle/quota/project"
	"github.com/bermhq/berm/lifecycle/store"
)

// littleSpace is the free space below which a file system counts as full, in bytes.
const littleSpace = 512 << 20

// storageFacts are facts about the configured directories and their files.
type storageFacts struct {
	state        dirFacts
	lockedBy     string // ID of the process that has locked the state directory; empty without one
	instance     string
	instanceErr  error
	database     store.Database
	databaseErr  error // why the database can't be used; fs.ErrNotExist: there is none yet
	chats        dirFacts
	unused       bool  // no server has ever kept chats there
	quotas       error // why the kernel can't enforce workspaces' quotas
	dependencies dirFacts
	tools        dirFacts
	temporary    dirFacts
}

// dirFacts are facts about a directory, or about the nearest existing one above it.
type dirFacts struct {
	path    string // as configured; empty: none is configured
	there   bool
	kind    string // of file system
	remote  bool   // the files are on another machine
	free    uint64 // bytes for users other than root
	err     error  // why this process can't make files in it
	created bool   // berm serve makes the directory if it is missing
}

func lookAtStorage(ctx context.Context, limit time.Duration, cfg *config.Config) *storageFacts {
	s := &storageFacts{}
	look := func(path string, made bool) dirFacts {
		d, err := serve.Within(ctx, limit, func(context.Context) (dirFacts, error) { return lookAtDir(path), nil })
		if err != nil {
			d.err = err
		}
		d.path, d.created = path, made
		return d
	}
	s.state = look(cfg.StateDir, true)
	s.chats = look(cfg.Sandbox.ChatsRoot, cfg.Sandbox.CreateRoots)
	s.dependencies = look(cfg.Sandbox.DependenciesRoot, cfg.Sandbox.CreateRoots)
	s.tools = look(cfg.Sandbox.LambdaToolsRoot, cfg.Sandbox.CreateRoots)
	s.temporary = look(cfg.SpoolDir(), true)
	if errors.Is(s.state.err, serve.ErrStuck) {
		s.instanceErr, s.databaseErr = serve.ErrStuck, serve.ErrStuck
		return s
	}
	s.lockedBy, _ = serve.Within(ctx, limit, func(context.Context) (string, error) { return lockHolder("/proc", filepath.Join(cfg.StateDir, "lock")) })
	s.instance, s.instanceErr = reading(ctx, limit, filepath.Join(cfg.StateDir, serve.StateInstance), func() (string, error) { return serve.Instance(cfg.StateDir, cfg.Engine.Instance) })
	database := filepath.Join(cfg.StateDir, serve.StateStore)
	s.database, s.databaseErr = reading(ctx, limit, database, func() (store.Database, error) { return lookAtDatabase(database) })
	if s.chats.path != "" && s.chats.err == nil {
		err := serve.Try(ctx, limit, func(context.Context) error { _, err := os.Lstat(filepath.Join(s.chats.path, ".staging")); return err }) // lifecycle/chat's
		s.unused = errors.Is(err, fs.ErrNotExist)
		s.quotas = serve.Try(ctx, limit, func(context.Context) error {
			q, err := project.Find(serve.Existing(s.chats.path))
			if err == nil {
				err = q.Close()
			}
			return err
		})
	}
	return s
}

// lookAtDatabase reads only the database's header. SQLite would make files beside the database.
func lookAtDatabase(path string) (d store.Database, err error) {
	if d, err = store.Look(path); err != nil {
		return d, err
	}
	for _, name := range []string{path, path + "-wal", path + "-shm"} {
		if err := access(name, unix.R_OK|unix.W_OK); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return d, err
		}
	}
	if d.Size < d.Whole && !d.Merging { // while it is merging, missing pages may be in the file beside it
		err = fmt.Errorf("%s is cut off: it has %d of %d bytes", path, d.Size, d.Whole)
	}
	return d, err
}

func lookAtDir(path string) dirFacts {
	if path == "" {
		return dirFacts{}
	}
	var d dirFacts
	fi, err := os.Stat(path)
	switch {
	case err == nil && !fi.IsDir():
		d.err = &os.PathError{Op: "open", Path: path, Err: unix.ENOTDIR}
		return d
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		d.err = err
		return d
	}
	d.there = err == nil
	at := serve.Existing(path)
	var st unix.Statfs_t
	if err := unix.Statfs(at, &st); err != nil {
		d.err = &os.PathError{Op: "statfs", Path: at, Err: err}
		return d
	}
	magic := int64(st.Type) & 0xffffffff //nolint:unconvert // it is smaller on some machines
	d.kind, d.remote = cmp.Or(fileSystems[magic].name, fmt.Sprintf("file system %#x", magic)), fileSystems[magic].remote
	d.free = st.Bavail * uint64(st.Bsize) //nolint:gosec // no block has less than no bytes
	d.err = access(at, unix.W_OK|unix.X_OK)
	return d
}

// access returns why this process may not use a file or a directory, or nil.
func access(path string, mode uint32) error {
	if err := unix.Faccessat(unix.AT_FDCWD, path, mode, unix.AT_EACCESS); err != nil {
		return &os.PathError{Op: "write to", Path: path, Err: err}
	}
	return nil
}

// fileSystems are the kinds that are known by name, by their magic numbers.
var fileSystems = map[int64]struct {
	name   string
	remote bool // its files are on another machine
}{
	unix.EXT4_SUPER_MAGIC: {"ext4", false}, unix.XFS_SUPER_MAGIC: {"xfs", false}, unix.BTRFS_SUPER_MAGIC: {"btrfs", false}, 0x2fc12fc1: {"zfs", false},
	unix.TMPFS_MAGIC: {"tmpfs", false}, unix.OVERLAYFS_SUPER_MAGIC: {"overlay", false},
	unix.NFS_SUPER_MAGIC: {"nfs", true}, 0xff534d42: {"smb", true}, 0xfe534d42: {"smb", true}, 0x517b: {"smb", true}, unix.V9FS_MAGIC: {"9p", true},
	0x65735546: {"fuse", true}, 0x00c36400: {"ceph", true},
}

// lockHolder returns the ID of the process that has locked a file, from proc, which is like /proc.
// It returns "" if there is none, and "0" for a process that this one can't see.
func lockHolder(proc, path string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return "", err
	}
	table, err := os.ReadFile(filepath.Join(proc, "locks"))
	if err != nil {
		return "", err
	}
	file := fmt.Sprintf("%02x:%02x:%d", unix.Major(st.Dev), unix.Minor(st.Dev), st.Ino)
	for line := range strings.Lines(string(table)) {
		if f := strings.Fields(line); len(f) > 5 && f[1] == "FLOCK" && f[5] == file {
			return f[4], nil
		}
	}
	return "", nil
}

func (s *storageFacts) judge(cfg *config.Config, host hostFacts) []finding {
	out := slices.Concat(s.judgeState(),
		judge("storage.instance",
			bad(s.instanceErr != nil && s.state.err == nil, said(s.instanceErr), wontStart, "restore the file, or set engine.instance to the id on the containers' label berm.owner"),
			okay(s.instance != "", s.instance)),
		s.judgeDatabase(), s.judgeChats(cfg))
	if s.chats.path != "" && s.chats.err == nil {
		out = append(out, s.judgeQuotas(cfg.Storage, host)...)
	}
	for _, d := range []struct {
		id, key string
		dirFacts
	}{{"storage.dependencies", "sandbox.dependencies_root", s.dependencies}, {"storage.tools", "sandbox.lambda_tools_root", s.tools}} {
		const means = "what asks for it can't be made"
		readable := d.err == nil || errors.Is(d.err, fs.ErrPermission) || errors.Is(d.err, unix.EROFS) // only read
		if d.path != "" {
			out = append(out, judge(d.id,
				okay(d.there && readable, d.path),
				bad(d.err != nil, said(d.err), means, "set "+d.key+" right"),
				bad(!d.created, d.path+" isn't there", means, "make it, or set sandbox.create_roots"),
				okay(true, d.path+", which berm serve makes"))...)
		}
	}
	return append(out, judge("storage.temporary",
		soft(s.temporary.err != nil && len(cfg.EngineAPI.Listeners) > 0, said(s.temporary.err), "docker build by way of Berm fails", "choose another with engine_api.spool_dir"))...)
}

func (s *storageFacts) judgeState() []finding {
	d := s.state
	found := d.path
	switch {
	case s.lockedBy != "" && s.lockedBy != "0":
		found += ", in use by process " + s.lockedBy
	case s.lockedBy != "":
		found += ", in use by a process that can't be seen from here"
	case !d.there:
		found += ", which berm serve makes"
	}
	of := fmt.Sprintf("%s, %s, %s free", found, d.kind, size(d.free))
	return judge("storage.state_dir",
		soft(d.err != nil && s.lockedBy != "", found+"; "+said(d.err), "who may not write there sees less of it, and of the server", "run berm doctor as the server's user"),
		bad(d.err != nil, d.path+": "+said(d.err), wontStart, "run it as a user who may write there, or choose another with --state-dir"),
		soft(d.remote, of, "SQLite and file locks don't hold over a network as they do on a disk", "put state_dir on a file system of this machine"),
		soft(d.kind == "tmpfs", of, "with a restart of the machine it is gone, and whose chats are whose with it", "put state_dir on a disk"),
		soft(d.kind == "overlay" && serve.InContainer(), of, "it goes with this container, and whose chats are whose with it", "mount a volume on "+d.path),
		soft(d.free < littleSpace, of, "a full file system stops whatever has to be written down", "free some space"),
		okay(true, of))
}

func (s *storageFacts) judgeDatabase() []finding {
	d, err := s.database, s.databaseErr
	hidden := s.lockedBy != "" || s.state.err != nil // by a server, or for the reason of storage.state_dir
	foreign, stuck := errors.Is(err, fs.ErrPermission), errors.Is(err, serve.ErrStuck)
	return judge("storage.database",
		okay(errors.Is(err, fs.ErrNotExist), "none yet: berm serve makes it"),
		soft(hidden && (foreign || stuck), said(err), "whether it can be used isn't known", "run berm doctor as the server's user"),
		bad(foreign, said(err), wontStart, "run it as the user whose it is, or give that file to this one"),
		bad(stuck, said(err), "berm serve is stuck there, too", "see what keeps it from being read"),
		bad(err != nil, said(err), wontStart, "restore it; with the file moved away no sandbox is lost, but whose the chats are"),
		bad(d.Schema > d.Known, fmt.Sprintf("its schema is version %d, and this berm knows %d", d.Schema, d.Known), wontStart, "use the newer berm"),
		okay(d.Merging && d.Schema < d.Known && s.lockedBy != "", "in use"),
		okay(d.Merging && d.Schema < d.Known, "left by a crash: what is new in it isn't merged yet, as berm serve will"),
		okay(d.Schema < d.Known, fmt.Sprintf("schema %d, which berm serve brings up to %d", d.Schema, d.Known)),
		okay(true, fmt.Sprintf("schema %d, the newest that this berm knows", d.Schema)))
}

func (s *storageFacts) judgeChats(cfg *config.Config) []finding {
	d := s.chats
	found := fmt.Sprintf("%s, %s, %s free", d.path, d.kind, size(d.free))
	quota := uint64(max(cfg.Storage.WorkspaceQuotaMB, 0)) << 20
	return judge("storage.chats_root",
		okay(d.path == "", "none: workspaces, chats and files are off"),
		bad(d.err != nil, said(d.err), wontStart, "set sandbox.chats_root to a directory that berm may write to"),
		bad(!d.there && !d.created, d.path+" isn't there", wontStart, "make it, mount what holds it, or set sandbox.create_roots"),
		soft(s.unused && !errors.Is(s.databaseErr, fs.ErrNotExist), found+", without a directory .staging, and so never used", "if there are chats, they are elsewhere, and "+wontStart, "mount the file system that holds them there; if there are none, start berm serve"),
		soft(d.remote, found, "what is durable on a disk may not be over a network", "put it on a file system of this machine"),
		soft(d.kind == "tmpfs", found, "with a restart of the machine all chats are gone", "put it on a disk"),
		soft(d.kind == "overlay" && serve.InContainer(), found, "all chats go with this container", "mount a directory of the host on "+d.path),
		soft(d.free < littleSpace, found, "chats have no room", "free some space"),
		soft(quota > d.free, found, "that is less than one workspace may hold", "lower storage.workspace_quota_mb, or give it a larger file system"),
		okay(true, found))
}

func (s *storageFacts) judgeQuotas(cfg config.Storage, host hostFacts) []finding {
	const how = "use ext4 made with -O project,quota, or XFS, mounted with prjquota, and run berm as root with CAP_SYS_ADMIN"
	const means = "sandboxes can pass it for as long as it takes to measure"
	quota := fmt.Sprintf("%d MiB a workspace", cfg.WorkspaceQuotaMB)
	why := s.quotas
	if why == nil && !host.has(unix.CAP_SYS_ADMIN) {
		why = errors.New("limits can't be set; that takes CAP_SYS_ADMIN")
	}
	return judge("storage.quotas",
		soft(cfg.WorkspaceQuotaMB == 0, "workspaces have no quota", "one user can fill the file system of all", "set storage.workspace_quota_mb"),
		soft(cfg.ProjectQuotas == config.ProjectQuotasOff, quota+", measured: storage.project_quotas is off", means, "set it to auto, and "+how),
		okay(why == nil, quota+", by project quotas of the kernel"),
		bad(cfg.ProjectQuotas == config.ProjectQuotasRequired, said(why), wontStart+", as storage.project_quotas is required", how),
		soft(errdefs.IsNotImplemented(why) || s.quotas == nil, quota+", measured: "+said(why), means, how),
		bad(true, said(why), wontStart, how))
}

// size formats a number of bytes with a unit.
func size(n uint64) string {
	units := []string{"B", "KiB", "MiB", "GiB", "TiB", "PiB"}
	i, f := 0, float64(n)
	for ; f >= 1024 && i < len(units)-1; i++ {
		f /= 1024
	}
	if f >= 10 || i == 0 {
		return fmt.Sprintf("%.0f %s", f, units[i])
	}
	return fmt.Sprintf("%.1f %s", f, units[i])
}
