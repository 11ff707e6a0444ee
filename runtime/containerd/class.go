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
	name   string // of containerd's
	binary string // for its runc shim; empty is the shim's own
	deep   bool   // binds what is mounted below a mount's source, too, whatever the spec says
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

// classOf finds the runtime that a Spec names. The list is closed: containerd would
// take a name for the path of a program.
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

// hierarchies are the places of cgroups in a container that have to be made read-only,
// each by itself: those of version 1, which crun leaves writable when only the place
// above them is listed. In them are the container's own limits. Of version 2 there is but
// the one at the root, and below it other cgroups of the host.
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

// mounts refuses what the runtime would show beyond the spec's mounts: what is mounted
// below a source was never judged. In a user namespace no runtime can leave it out.
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

// explain says that the runtime is missing, if that is why no task could be made:
// the engine has no class for it.
func (c runtimeClass) explain(err error) error {
	if errdefs.IsUnavailable(err) || errdefs.IsCanceled(err) || errdefs.IsDeadlineExceeded(err) || installed(c.needs) {
		return err
	}
	return runtime.Invalid("the runtime can't be used: %s isn't in the engine's PATH: %w", c.needs, err)
}

// installed looks where the engine does, which is on this host.
func installed(program string) bool {
	_, err := network.FindProgram(program)
	return err == nil
}
