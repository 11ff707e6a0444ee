package lifecycle

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// tenantsDir is the directory below the chats root for all tenants but the default one. No key
// can have its name, since no key begins with a dot.
const tenantsDir = ".tenants"

// overlap refuses a spec with a mount above or below one of the operator's.
func (s Settings) overlap(spec policy.Spec) error {
	for _, own := range [][2]string{{s.ChatsRoot, s.ChatMountPath}, {s.DependenciesRoot, s.DependenciesPath}, {s.ToolsRoot, s.ToolsPath}} {
		if own[0] == "" {
			continue
		}
		for _, mt := range spec.Mounts {
			if runtime.Below(mt.MountPath, own[1]) || runtime.Below(own[1], mt.MountPath) {
				return &InvalidError{Field: "mount_path", Message: fmt.Sprintf("%s overlaps %s, which every sandbox has", mt.MountPath, own[1])}
			}
		}
	}
	return nil
}

// MakeRoots creates missing directories of the operator's settings. It is meant for the start.
func (s Settings) MakeRoots() error {
	for _, dir := range []string{s.ChatsRoot, s.DependenciesRoot, s.ToolsRoot} {
		if dir == "" {
			continue
		}
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return fmt.Errorf("make the sandbox roots: %w", err)
		}
	}
	return nil
}

func isDir(dir string) error {
	fi, err := os.Stat(dir)
	if err == nil && !fi.IsDir() {
		err = &fs.PathError{Op: "open", Path: dir, Err: errors.New("not a directory")}
	}
	return err
}

// mounts returns the mounts of a sandbox: the operator's, then those that the policy judged.
func (c *creator) mounts(sb Sandbox) ([]policy.Mount, error) {
	own, err := c.operatorMounts(sb)
	return append(own, sb.Spec.Mounts...), err
}

// operatorMounts returns the mounts that the operator's settings give every sandbox. The policy
// doesn't judge them. Of the caller's input, only the key and the tenant are part of their paths.
func (c *creator) operatorMounts(sb Sandbox) ([]policy.Mount, error) {
	s := c.opts.Settings
	var mounts []policy.Mount
	add := func(local, target, mode string) error {
		engine, err := s.EnginePath(local)
		if err != nil {
			return err
		}
		mounts = append(mounts, policy.Mount{HostPath: local, Source: engine, Local: local, MountPath: target, Mode: mode, Operator: true})
		return nil
	}
	if s.ChatsRoot != "" && !c.neverMounts(sb.Spec) {
		dir, err := MakeChatDir(s.ChatsRoot, sb.Tenant, sb.Key, c.opts.Policy().Owner())
		if err != nil {
			return nil, fmt.Errorf("chat directory: %w", err)
		}
		if err := add(dir, s.ChatMountPath, "rw"); err != nil {
			return nil, err
		}
	}
	for _, ro := range [][2]string{{s.DependenciesRoot, s.DependenciesPath}, {s.ToolsRoot, s.ToolsPath}} {
		if ro[0] == "" {
			continue
		}
		dir, err := filepath.EvalSymlinks(ro[0])
		if err == nil {
			err = isDir(dir)
		}
		if err != nil {
			return nil, fmt.Errorf("read-only root: %w", err)
		}
		if err := add(dir, ro[1], "ro"); err != nil {
			return nil, err
		}
	}
	return mounts, nil
}

// neverMounts reports whether the policy allows no host directories with the spec's profile. Such
// a sandbox gets no chat directory either.
func (c *creator) neverMounts(spec policy.Spec) bool {
	p, ok := c.opts.Policy().Profile(spec.Profile)
	return spec.HostPathMode == "none" && (!ok || slices.Contains(p.Locked, "host_path_mode"))
}

// ChatDir returns a key's directory with every symbolic link of the root resolved, or
// fs.ErrNotExist. A symbolic link in place of the directory, or on the way to it below the
// root, is refused.
func ChatDir(chats, tenant, key string) (string, error) {
	return chatDir(chats, keyID{tenant, key}, false, nil)
}

// MakeChatDir is ChatDir, but creates missing directories, and gives the key's directory to the
// owner. It doesn't change the owner of files in it.
func MakeChatDir(chats, tenant, key string, owner *policy.Owner) (string, error) {
	return chatDir(chats, keyID{tenant, key}, true, owner)
}

func chatDir(chats string, id keyID, mkdir bool, owner *policy.Owner) (string, error) {
	resolved, err := filepath.EvalSymlinks(chats)
	if err != nil {
		return "", err
	}
	root, err := os.OpenRoot(resolved)
	if err != nil {
		return "", err
	}
	defer root.Close()
	names := []string{id.key}
	if id.tenant != DefaultTenant {
		names = []string{tenantsDir, id.tenant, id.key}
	}
	rel := ""
	for _, name := range names {
		if !filepath.IsLocal(name) || filepath.Base(name) != name {
			return "", fmt.Errorf("%q can't name a directory", name)
		}
		rel = filepath.Join(rel, name)
		if mkdir {
			if err := root.Mkdir(rel, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
				return "", err
			}
		}
		fi, err := root.Lstat(rel)
		if err != nil {
			return "", err
		}
		if !fi.IsDir() {
			return "", fmt.Errorf("%s is not a directory below the chats root", filepath.Join(resolved, rel))
		}
	}
	if mkdir && owner != nil {
		dir, err := root.Open(rel)
		if err == nil {
			err = errors.Join(owner.Give(dir), dir.Close())
		}
		if err != nil {
			return "", err
		}
	}
	return filepath.Join(resolved, rel), nil
}
