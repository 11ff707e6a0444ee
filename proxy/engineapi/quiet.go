package engineapi

import (
	"context"
	"fmt"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy/engineapi/body"

	"github.com/bermhq/berm/proxy/engineapi/upstream"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/versions"
	"github.com/moby/sys/mountinfo"

	"github.com/bermhq/berm/lifecycle/mountpin"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
)

// ArchiveFixed is the first release of Docker Engine that has the fixes of CVE-2026-41568
// and CVE-2026-42306.
const ArchiveFixed = "29.5.1"

var releaseNumber = regexp.MustCompile(`^v?([0-9]{1,6}\.[0-9]{1,6}\.[0-9]{1,6})(.*)$`)

// SafeArchives reports whether an engine of this release has the fixes of ArchiveFixed. It
// returns false for a text that isn't a release number.
func SafeArchives(release string) bool { return atLeast(release, ArchiveFixed) }

// safeRunc reports whether no process can redirect a mount point while this version of runc
// makes it. Such a version has the fixes of CVE-2024-45310, CVE-2025-31133, CVE-2025-52565 and
// CVE-2025-52881.
func safeRunc(version string) bool {
	return atLeast(version, "1.4.0") ||
		strings.HasPrefix(version, "1.3.") && atLeast(version, "1.3.3") || strings.HasPrefix(version, "1.2.") && atLeast(version, "1.2.8")
}

// atLeast reports whether a release number is at least another. It returns false for a text that
// isn't a release number. A release candidate comes before its release.
func atLeast(release, least string) bool {
	have := releaseNumber.FindStringSubmatch(release)
	if have == nil || versions.LessThan(have[1], least) {
		return false
	}
	return versions.GreaterThan(have[1], least) || !strings.HasPrefix(have[2], "-") // a release candidate
}

// useOf returns the mounts of a container. It adds the binds of its label: the engine may know
// a bind only by the path at which Berm holds it.
func useOf(id string, labels map[string]string, mounts []container.MountPoint) *mountpin.Use {
	u := &mountpin.Use{ID: id, Volumes: map[string]bool{}}
	for _, m := range mounts {
		switch m.Type {
		case mount.TypeVolume:
			u.Volumes[m.Name] = u.Volumes[m.Name] || m.RW
		case mount.TypeBind:
			u.Binds = append(u.Binds, bindOf(m))
		}
	}
	if e, ok := effectiveOf(labels); ok {
		for _, b := range e.Binds {
			if !b.Socket { // nobody can write to a socket's mount
				u.Binds = append(u.Binds, b)
			}
		}
	}
	return u
}

// claimMounts keeps archive calls away from a container's mounts until leave is called. If a
// mount lies in a bind, it keeps other starts away too. It waits until ctx ends for those under
// way.
func claimMounts(ctx context.Context, c *call, ct *container.InspectResponse) (leave func(), err error) {
	u := useOf(ct.ID, ct.Config.Labels, ct.Mounts)
	if e, ok := effectiveOf(ct.Config.Labels); ok {
		u.Alone = len(e.Nested()) > 0
	}
	return c.opts.Claims.Use(ctx, u)
}

// inspectSlow inspects a container without a timeout of its own. Another caller's archive call
// may hold the engine's lock for long.
func inspectSlow(c *call, id string) (*container.InspectResponse, error) {
	return inspected(c, upstream.Ask{Version: c.version, Long: true}, id)
}

// quietly serves an archive call while no process can replace the directories that the engine
// mounts for it. Engines without the fixes of ArchiveFixed mount a container's volumes, binds
// and network files by paths inside its root. A process could redirect these mounts to any
// directory of the host. With fixed engines, a link in a mount could still redirect an archive
// into a read-only root.
func quietly(c *call, ct *container.InspectResponse, serve func(*container.InspectResponse) error) (err error) {
	fixed, release := c.opts.ArchiveFixed, ""
	if !fixed {
		if release, err = c.engine.Release(c.ctx); err != nil {
			return err
		}
		fixed = SafeArchives(release)
	}
	kept := c.route.change && ct.HostConfig.ReadonlyRootfs
	if fixed && !kept {
		return serve(ct)
	}
	u := useOf(ct.ID, ct.Config.Labels, ct.Mounts)
	u.Archive = true
	leave, err := c.opts.Claims.Use(c.ctx, u)
	if err != nil {
		return err
	}
	defer leave()
	if ct, err = inspectSlow(c, ct.ID); err != nil {
		return err
	}
	sharer, err := findSharer(c, u, !fixed)
	if err != nil {
		return err
	}
	running := ct.State.Running || ct.State.Paused || ct.State.Restarting
	var reason policy.Reason
	switch {
	case !fixed && running && !rootHolds(ct):
		reason = policy.Reason{Rule: "archive.engine", Message: fmt.Sprintf("engine %q mounts what a container has by paths that its processes can exchange, and the container runs", body.Shorten(release)),
			Allowed: "a stopped container, tar by docker exec, or engine " + ArchiveFixed}
	case !fixed && !running && sharer != "":
		reason = policy.Reason{Rule: "archive.engine", Message: fmt.Sprintf("engine %q mounts what a container has by paths that may lead through a mount, and another of the tenant's containers runs, or one that can write to the mount", body.Shorten(release)),
			Allowed: "no running container of the tenant's or with the same volumes or binds, or engine " + ArchiveFixed}
	case kept && (running || sharer != ""):
		reason = policy.Reason{Rule: "archive.read_only", Message: "the container's root is read-only, and a process could lead the archive into it by a link in a mount",
			Allowed: "a stopped container whose mounts no running one can write to, or tar by docker exec"}
	default:
		return serve(ct)
	}
	if err := c.allow([]policy.Reason{reason}); err != nil {
		return err
	}
	return serve(ct)
}

// findSharer returns the ID of a running container, of any tenant, that can write to one of u's
// mounts. For a sandbox it returns "sandbox". With tenants, any running container of the
// caller's tenant counts too: a process in it may have received a file descriptor while the
// mount was shared.
func findSharer(c *call, u *mountpin.Use, tenants bool) (id string, err error) {
	if len(u.Volumes)+len(u.Binds) == 0 {
		return "", nil
	}
	if (&mountpin.Use{Binds: c.opts.Mounts()}).Writes(u) {
		return "sandbox", nil
	}
	err = each(c.ctx, c.Proxy, c.version, lifecycle.ObjectContainer, nil, func(ct *listed) {
		if ct.ID != u.ID && (useOf(ct.ID, ct.Labels, ct.Mounts).Writes(u) || tenants && c.tenants(ct.Labels)) {
			id = ct.ID
		}
	})
	return id, err
}

// rootHolds reports whether no process of a running container can replace a directory on the
// way to a mount. That is so if the root is read-only, each mount is at its very target, not
// behind a link of the image, and no mount lies in another.
func rootHolds(ct *container.InspectResponse) bool {
	if !ct.HostConfig.ReadonlyRootfs || ct.State.Pid <= 0 {
		return false
	}
	table, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", ct.State.Pid))
	if err != nil {
		return false // Berm may not see the engine's processes
	}
	defer func() { _ = table.Close() }()
	mounts, err := mountinfo.GetMountsFromReader(table, nil)
	if err != nil {
		return false
	}
	roots := map[string]string{}
	for _, m := range mounts {
		roots[m.Mountpoint] = m.Root
	}
	// The process is the container's if it has the container's own file there.
	if own := roots["/etc/hostname"]; !strings.HasSuffix(own, "/hostname") || !strings.HasSuffix(ct.HostnamePath, own) || len(own) < len(ct.ID) {
		return false
	}
	targets := slices.Clone(policy.NetworkFiles)
	for _, m := range ct.Mounts {
		targets = append(targets, path.Clean(m.Destination))
	}
	for i, t := range targets {
		if _, there := roots[t]; !there || strings.ContainsAny(t, " \t\n\\") {
			return false
		}
		if slices.ContainsFunc(targets[:i], func(o string) bool { return runtime.Below(t, o) || runtime.Below(o, t) }) {
			return false
		}
	}
	return true
}
