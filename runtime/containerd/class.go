package containerd

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"github.com/moby/sys/mountinfo"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/containerd/network"
)

// runtimeClass is one of the engine's OCI runtimes.
type runtimeClass struct {
	name   string // the shim, as containerd names it
	binary string // the OCI runtime for the runc shim; empty is the shim's default
	deep   bool   // binds include mounts below the source, whatever the spec says
	needs  string // program that the host must have
}

const runcShim = "io.containerd.runc.v2"

var runtimeClasses = map[string]runtimeClass{
	"":      {name: runcShim, needs: "runc"},
	"runc":  {name: runcShim, needs: "runc"},
	"crun":  {name: runcShim, binary: "crun", deep: true, needs: "crun"},
	"runsc": {name: "io.containerd.runsc.v1", needs: "containerd-shim-runsc-v1"},
	"kata":  {name: "io.containerd.kata.v2", needs: "containerd-shim-kata-v2"},
}

// classOf finds the runtime that a Spec names. It accepts no other names: containerd would take one for
// the path of a program.
func classOf(name string) (runtimeClass, error) {
	c, ok := runtimeClasses[name]
	if !ok {
		return c, runtime.Invalid("runtime class %q is unknown; runc, crun, runsc and kata can be used", name)
	}
	return c, nil
}

// options returns the options of the shim. Owner is the user and group of the host to which it
// gives the pipes of commands.
func (c runtimeClass) options(owner int) (typeurl.Any, error) {
	if c.name != runcShim {
		return nil, nil //nolint:nilnil // other shims have options of their own, and need none
	}
	out, err := typeurl.MarshalAny(&options.Options{BinaryName: c.binary, IoUid: uint32(owner), IoGid: uint32(owner)})
	if err != nil {
		return nil, fmt.Errorf("encode the runtime's options: %w", err)
	}
	return out, nil
}

// hierarchies returns the directories of cgroups version 1 in a container, each to be made read-only by
// itself. They hold the container's own limits. crun leaves them writable if only the directory above
// is listed. Version 2 has a single hierarchy, at the root; below it are the host's other cgroups.
func (c runtimeClass) hierarchies(root string) []string {
	if _, err := os.Stat(root + "/cgroup.procs"); c.binary != "crun" || err == nil {
		return nil
	}
	found, _ := filepath.Glob(root + "/*/cgroup.procs") // the pattern is good
	var out []string
	for _, file := range found {
		dir := filepath.Dir(file)
		if info, err := os.Lstat(dir); err == nil && info.IsDir() { // there are links to them, too
			out = append(out, dir)
		}
	}
	return out
}

// mounts refuses mounts whose source has mounts below it, if the runtime would show those. The policy
// never judged them. In a user namespace, no runtime can leave them out.
func (c runtimeClass) mounts(mounts []runtime.Mount, userNS bool) error {
	if !c.deep && !userNS || len(mounts) == 0 {
		return nil
	}
	points, err := mountinfo.GetMounts(nil)
	if err != nil {
		return err
	}
	for _, m := range mounts {
		source, err := filepath.EvalSymlinks(m.Source)
		if err != nil {
			return runtime.Invalid("mount of %s: %w", m.Source, err)
		}
		for _, point := range points {
			if strings.HasPrefix(point.Mountpoint, source+"/") {
				return runtime.Invalid("mount of %s: what is mounted below it, at %s, would be shown; use runc, without userns: auto", m.Source, point.Mountpoint)
			}
		}
	}
	return nil
}

// explain returns err, or InvalidArgument if the runtime's program is missing. The engine's error has
// no class then.
func (c runtimeClass) explain(err error) error {
	if errdefs.IsUnavailable(err) || errdefs.IsCanceled(err) || errdefs.IsDeadlineExceeded(err) || installed(c.needs) {
		return err
	}
	return runtime.Invalid("the runtime can't be used: %s isn't in the engine's PATH: %w", c.needs, err)
}

// installed reports whether a program is in the directories of this host where the engine looks.
func installed(program string) bool {
	_, err := network.FindProgram(program)
	return err == nil
}
