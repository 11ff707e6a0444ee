package serve

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/docker"
)

// Labels by which Docker Compose finds the objects of a project. Berm sets these two on its
// containers, so that everybody sees which project they belong to. It doesn't set Compose's
// further labels, config-hash and oneoff. Without those, neither down nor --remove-orphans
// removes sandboxes that are in use.
const (
	labelProject = "com.docker.compose.project"
	labelService = "com.docker.compose.service"
	ownService   = "berm-sandbox"
)

// selfWait bounds the search for Berm's own container at the start. An engine that starts with
// its host starts containers before it answers.
const selfWait = 10 * time.Second

// Self is the container that this process runs in, as its engine knows it. The zero value means
// that there is none.
type Self struct {
	ID       string
	project  string               // of Docker Compose; empty outside of one
	Paths    []policy.PathMapping // of the container's mounted directories
	Networks []string             // names of its networks, except host, none and bridge
}

// selfFacts are facts about this process's container that the kernel shows.
type selfFacts struct {
	ids      []string // possible IDs of the container, the likeliest first
	upperDir string   // of the root file system; empty unless that is an overlay
	mounts   map[string]string
}

var (
	containerID   = regexp.MustCompile(`[0-9a-f]{64}`)
	shortID       = regexp.MustCompile(`^[0-9a-f]{12,64}$`)
	engineFile    = regexp.MustCompile(`/([0-9a-f]{64})/(?:hostname|hosts|resolv\.conf)$`)
	upperDirValue = regexp.MustCompile(`(?:^|,)upperdir=([^,]*)`)
	unescape      = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`) // what the kernel escapes in options
)

// maxGuesses bounds the IDs that the engine is asked about.
const maxGuesses = 8

// readSelf reads the facts from a directory like /proc/self. A hostname may be the container's ID.
func readSelf(proc, hostname string) (*selfFacts, error) {
	t := &selfFacts{mounts: map[string]string{}}
	cgroups, err := os.ReadFile(filepath.Join(proc, "cgroup"))
	if err != nil {
		return nil, err
	}
	for line := range bytes.Lines(cgroups) {
		found := containerID.FindAllString(string(line), -1)
		slices.Reverse(found) // for an engine that runs in a container, the inner ID comes last
		t.guess(found...)
	}
	table, err := os.ReadFile(filepath.Join(proc, "mountinfo"))
	if err != nil {
		return nil, err
	}
	mounts, err := mountinfo.GetMountsFromReader(bytes.NewReader(table), nil)
	if err != nil {
		return nil, err
	}
	for _, mount := range mounts {
		t.mounts[mount.Mountpoint] = mount.Root // the last mount at a mount point hides the others
		if m := engineFile.FindStringSubmatch(mount.Root); m != nil && path.Dir(mount.Mountpoint) == "/etc" {
			t.guess(m[1])
		}
		if mount.Mountpoint == "/" && mount.FSType == "overlay" {
			if m := upperDirValue.FindStringSubmatch(mount.VFSOptions); m != nil {
				t.upperDir = unescape.Replace(m[1])
			}
		}
	}
	if shortID.MatchString(hostname) { // anything else might be another container's name
		t.guess(hostname)
	}
	return t, nil
}

func (t *selfFacts) guess(ids ...string) {
	for _, id := range ids {
		if len(t.ids) < maxGuesses && !slices.Contains(t.ids, id) {
			t.ids = append(t.ids, id)
		}
	}
}

// fits reports whether a container can be the one with these facts. A container whose network
// namespace this one shares must not fit, although its ID is in the mounts of both.
func (t *selfFacts) fits(d docker.Description) bool {
	if !d.Running {
		return false
	}
	if t.upperDir != "" && d.UpperDir != "" {
		return t.upperDir == d.UpperDir || !path.IsAbs(t.upperDir) && strings.HasSuffix(d.UpperDir, "/"+t.upperDir)
	}
	// Without an upper directory to compare, all mounts must agree.
	for _, m := range d.Mounts {
		if !t.agrees(m) {
			return false
		}
	}
	for target := range t.mounts {
		given := slices.ContainsFunc(d.Mounts, func(m docker.DescribedMount) bool { return runtime.Below(target, m.Target) })
		if !given && !usualMount(target) {
			return false
		}
	}
	return len(d.Mounts) > 0
}

// agrees reports whether the kernel has the engine's mount at its target. The kernel shows only
// the path of a directory within its file system. The path on the host ends with that path. If
// the host has mounted only a part of the file system, it is the other way round.
func (t *selfFacts) agrees(m docker.DescribedMount) bool {
	root, ok := t.mounts[path.Clean(m.Target)]
	return ok && (root == "/" || strings.HasSuffix(m.Source, root) || strings.HasSuffix(root, m.Source))
}

// usualMount reports whether engines mount something at target by themselves.
func usualMount(target string) bool {
	return slices.Contains([]string{"/", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/sbin/docker-init", "/run/secrets", "/tmp"}, target) ||
		slices.ContainsFunc([]string{"/proc", "/sys", "/dev"}, func(dir string) bool { return runtime.Below(target, dir) })
}

// describer describes containers.
type describer interface {
	Describe(ctx context.Context, id string) (docker.Description, error)
}

// find asks the engine about every possible ID. It retries until ctx ends while the engine is
// unavailable.
func (t *selfFacts) find(ctx context.Context, engine describer) (found Self, err error) {
	_ = runtime.Poll(ctx, 200*time.Millisecond, func() (bool, error) {
		found, err = t.ask(ctx, engine)
		return !errdefs.IsUnavailable(err), nil
	})
	return found, err
}

// ask asks the engine about every possible ID. It returns the zero Self if no container fits.
func (t *selfFacts) ask(ctx context.Context, engine describer) (Self, error) {
	for _, id := range t.ids {
		d, err := engine.Describe(ctx, id)
		switch {
		case errdefs.IsNotFound(err):
		case err != nil:
			return Self{}, err
		case strings.HasPrefix(d.ID, id) && t.fits(d):
			return t.self(d), nil
		}
	}
	return Self{}, nil
}

// self returns the container that was found.
func (t *selfFacts) self(d docker.Description) Self {
	s := Self{ID: d.ID, project: d.Labels[labelProject]}
	for _, m := range d.Mounts {
		if fi, err := os.Stat(m.Target); err == nil && fi.IsDir() && t.agrees(m) {
			s.Paths = append(s.Paths, policy.PathMapping{Engine: path.Clean(m.Source), Local: path.Clean(m.Target), Volume: m.Volume})
		}
	}
	for _, name := range d.Networks {
		if !slices.Contains([]string{"host", "none", "bridge"}, name) {
			s.Networks = append(s.Networks, name)
		}
	}
	return s
}

// FindSelf finds the container of the engine in which this process runs. It returns the zero Self
// if there is none, if the engine shares this process's root file system, or for containerd. An
// error means that FindSelf couldn't find out.
func FindSelf(ctx context.Context, cfg config.Engine, v View, wait time.Duration) (Self, error) {
	if v.Root || cfg.Kind != "docker" {
		return Self{}, nil
	}
	hostname, _ := os.Hostname() // without it, there is a guess less
	t, err := readSelf("/proc/self", hostname)
	if err != nil || len(t.ids) == 0 {
		return Self{}, err
	}
	engine, err := newDocker(cfg, nil)
	if err != nil {
		return Self{}, err
	}
	defer func() { _ = engine.Close() }()
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	return t.find(ctx, engine)
}

// Locate finds this process's container, logs the outcome, and calls Settle. If it can't find
// out, it goes on without a container.
func Locate(ctx context.Context, cfg *config.Config, v View, log *slog.Logger) (Self, error) {
	s, err := FindSelf(ctx, cfg.Engine, v, selfWait)
	switch {
	case err != nil:
		log.WarnContext(ctx, "self_unknown", "error", err.Error())
	case s.ID != "":
		log.InfoContext(ctx, "self_found", "container", s.ID, "project", s.project, "networks", s.Networks, "mounts", len(s.Paths))
	}
	return s, s.Settle(cfg)
}

// Settle sets settings that depend on this process's container: a network of auto, and an empty
// Engine.AgentDir.
func (s Self) Settle(cfg *config.Config) error {
	if cfg.Sandbox.Network == config.NetworkAuto {
		name, err := s.network()
		if err != nil {
			return fmt.Errorf("sandbox.network is %s, but %w", config.NetworkAuto, err)
		}
		cfg.Sandbox.Network = name
	}
	if dir, ok := s.enginePath(filepath.Join(cfg.StateDir, "agents")); ok && cfg.Engine.AgentDir == "" {
		cfg.Engine.AgentDir = dir
	}
	return nil
}

// network returns the only network of this container, which sandboxes then share.
func (s Self) network() (string, error) {
	switch {
	case s.ID == "":
		return "", errors.New("Berm isn't a container of its engine, or that couldn't be found out: name a network") //nolint:staticcheck // a name
	case len(s.Networks) == 0:
		return "", errors.New("Berm's container is in no network of its own, only in one of the engine's: name a network") //nolint:staticcheck // a name
	case len(s.Networks) > 1:
		return "", fmt.Errorf("Berm's container is in several networks: name one of %s", strings.Join(s.Networks, ", ")) //nolint:staticcheck // a name
	}
	return s.Networks[0], nil
}

// enginePath returns the path on the engine's host of one of this container's paths. It returns
// false if no mounted directory holds the path.
func (s Self) enginePath(local string) (string, bool) {
	var best policy.PathMapping
	for _, m := range s.Paths {
		if runtime.Below(local, m.Local) && len(m.Local) > len(best.Local) {
			best = m
		}
	}
	return path.Join(best.Engine, strings.TrimPrefix(local, best.Local)), best.Local != ""
}

// Labels returns the labels of Docker Compose for containers that Berm makes, or nil outside of a
// project.
func (s Self) Labels() map[string]string {
	if s.project == "" {
		return nil
	}
	return map[string]string{labelProject: s.project, labelService: ownService}
}
