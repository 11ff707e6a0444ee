package mountpin

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
)

var _ lifecycle.Holder = (*Trusted)(nil)

// Trusted allows only mounts whose paths no sandbox can change. It is for a process that can't
// pin. It is safe for many goroutines.
type Trusted struct {
	Claims Claims // of every container, also of those that aren't judged here

	judge func(m policy.Mount, others []policy.Mount) error
	dir   string
}

// NewTrusted returns a Trusted that asks judge about each mount. Others are all mounts that
// exist or are being made. Dir records which directories were mounted writable since the host
// started, as a process may have passed a descriptor of one to another container. It is made
// when needed.
func NewTrusted(dir string, judge func(m policy.Mount, others []policy.Mount) error, inUse func(context.Context) ([]policy.Mount, error)) *Trusted {
	// No descriptor outlives the kernel. Without its id, marks stay for longer than needed.
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return &Trusted{judge: judge, dir: filepath.Join(dir, "boot-"+strings.TrimSpace(string(boot))), Claims: Claims{InUse: inUse}}
}

// Mode returns ModeTrusted.
func (*Trusted) Mode() string { return ModeTrusted }

// Clean forgets what was mounted before the host started.
func (t *Trusted) Clean() error {
	entries, err := os.ReadDir(filepath.Dir(t.dir))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		if e.Name() != filepath.Base(t.dir) {
			errs = append(errs, os.RemoveAll(filepath.Join(filepath.Dir(t.dir), e.Name())))
		}
	}
	return errors.Join(errs...)
}

// Hold returns the mounts' own paths. It returns a *policy.DeniedError if one of them
// isn't allowed, and ErrExchanged if one leads through a symbolic link.
func (t *Trusted) Hold(ctx context.Context, name string, mounts []policy.Mount) ([]string, func() error, error) {
	others, release, err := t.Claims.Enter(ctx, name, mounts)
	if err != nil {
		return nil, nil, err
	}
	sources := make([]string, len(mounts))
	for i, m := range mounts {
		if err = t.allow(m, others); err != nil {
			break
		}
		sources[i] = m.Source
	}
	if err == nil {
		err = t.Mark(mounts)
	}
	if err != nil {
		release()
		return nil, nil, err
	}
	return sources, func() error { release(); return nil }, nil
}

// Mark records the directories that are mounted writable, also by a Pinner, as a process may
// pass a descriptor of one to another container. Nothing below them is trusted until the host
// restarts.
func (t *Trusted) Mark(mounts []policy.Mount) error {
	for _, m := range mounts {
		if m.Mode != "ro" && !m.Operator {
			if err := os.MkdirAll(t.mark(m.Source), 0o700); err != nil {
				return fmt.Errorf("mark a writable mount: %w", err)
			}
		}
	}
	return nil
}

func (t *Trusted) allow(m policy.Mount, others []policy.Mount) error {
	written, err := t.writtenAround(m.Source)
	if err != nil {
		return err
	}
	if err := t.judge(m, append(written, others...)); err != nil {
		return err
	}
	f, err := open(m)
	if err != nil {
		return err
	}
	return f.Close()
}

// writtenAround returns the parents of source that were mounted writable since the host
// started.
func (t *Trusted) writtenAround(source string) (out []policy.Mount, err error) {
	for dir := path.Clean(source); dir != "/"; {
		dir = path.Dir(dir)
		_, err := os.Lstat(t.mark(dir))
		if err == nil {
			out = append(out, policy.Mount{Source: dir, Mode: "rw"})
		} else if !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
	}
	return out, nil
}

// mark returns the path whose existence says that a directory was mounted writable.
func (t *Trusted) mark(source string) string {
	sum := sha256.Sum256([]byte(source))
	return filepath.Join(t.dir, hex.EncodeToString(sum[:]))
}
