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

// Labels by which Docker Compose tells its projects apart. What Berm makes has these two
// and none of the others that Compose asks for as well (its config-hash, or oneoff), so
// that everybody sees what belongs to the project, and neither down nor --remove-orphans,
// which deployments use with up, ends sandboxes that somebody works in.
const (
	labelProject = "com.docker.compose.project"
	labelService = "com.docker.compose.service"
	ownService   = "berm-sandbox"
)

// selfWait bounds the search for oneself at the start: an engine that comes up with its
// host starts containers before it answers.
const selfWait = 10 * time.Second

// Self is the container that this process runs in, as its engine knows it. The zero
// value is none.
type Self struct {
	ID       string
	project  string               // of Docker Compose; empty outside of one
	Paths    []policy.PathMapping // of what it has mounted, and nothing else
	Networks []string             // names of those that containers can be given
}

// selfFacts are what the kernel shows a process of its container.
type selfFacts struct {
	ids      []string // who it might be, the likeliest first
	upperDir string   // of the root file system; empty unless it is an overlay
	mounts   map[string]string
}

var (
	containerID   = regexp.MustCompile(`[0-9a-f]{64}`)
	shortID       = regexp.MustCompile(`^[0-9a-f]{12,64}$`)
	engineFile    = regexp.MustCompile(`/([0-9a-f]{64})/(?:hostname|hosts|resolv\.conf)$`)
	upperDirValue = regexp.MustCompile(`(?:^|,)upperdir=([^,]*)`)
	unescape      = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`) // what the kernel escapes in options
)

// maxGuesses bounds what the engine is asked about.
const maxGuesses = 8

// readSelf reads from a directory like /proc/self.
func readSelf(proc, hostname string) (*selfFacts, error) {
	t := &selfFacts{mounts: map[string]string{}}
	cgroups, err := os.ReadFile(filepath.Join(proc, "cgroup"))
	if err != nil {
		return nil, err
	}
	for line := range bytes.Lines(cgroups) {
		found := containerID.FindAllString(string(line), -1)
		slices.Reverse(found) // an engine in a container has its own below that
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
		t.mounts[mount.Mountpoint] = mount.Root // of several at one place, the last is seen
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

// fits tells whether a container can be the one that has these facts. One whose network
// namespace this container shares isn't, though its ID is in both's mounts.
func (t *selfFacts) fits(d docker.Description) bool {
	if !d.Running {
		return false
	}
	if t.upperDir != "" && d.UpperDir != "" {
		return t.upperDir == d.UpperDir || !path.IsAbs(t.upperDir) && strings.HasSuffix(d.UpperDir, "/"+t.upperDir)
	}
	// Without the root file system's word for it, all mounts have to be the same.
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

// agrees tells whether the kernel shows at a mount's target what the engine says. It
// knows a directory's path in its own file system only, which that on the host ends in,
// or which ends in that where the host has a part of the file system mounted.
func (t *selfFacts) agrees(m docker.DescribedMount) bool {
	root, ok := t.mounts[path.Clean(m.Target)]
	return ok && (root == "/" || strings.HasSuffix(m.Source, root) || strings.HasSuffix(root, m.Source))
}

// usualMount tells whether engines mount something there without being asked to.
func usualMount(target string) bool {
	return slices.Contains([]string{"/", "/etc/hosts", "/etc/hostname", "/etc/resolv.conf", "/sbin/docker-init", "/run/secrets", "/tmp"}, target) ||
		slices.ContainsFunc([]string{"/proc", "/sys", "/dev"}, func(dir string) bool { return runtime.Below(target, dir) })
}

// describer describes containers.
type describer interface {
	Describe(ctx context.Context, id string) (docker.Description, error)
}

// find asks the engine about every guess, again while it is away, until ctx ends.
func (t *selfFacts) find(ctx context.Context, engine describer) (found Self, err error) {
	_ = runtime.Poll(ctx, 200*time.Millisecond, func() (bool, error) {
		found, err = t.ask(ctx, engine)
		return !errdefs.IsUnavailable(err), nil
	})
	return found, err
}

// ask answers the zero value if the engine knows none of the guesses, or another container by it.
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

// self is what counts of the container that was found.
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

// FindSelf finds out whether this process is a container of the engine that it uses, and
// which. Where the engine shares its root file system there is nothing to find, and an
// error says only that it couldn't be found out.
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

// Locate has a configuration heed the container that this process is, if it is one: what
// it says itself goes first.
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

// Settle sets what a configuration leaves to the container that this process is.
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

// network is the one that sandboxes are to share with this container.
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

// enginePath is where the engine's host has one of this container's paths, if it does.
func (s Self) enginePath(local string) (string, bool) {
	var best policy.PathMapping
	for _, m := range s.Paths {
		if runtime.Below(local, m.Local) && len(m.Local) > len(best.Local) {
			best = m
		}
	}
	return path.Join(best.Engine, strings.TrimPrefix(local, best.Local)), best.Local != ""
}

// Labels are those that what is made here has beside Berm's own.
func (s Self) Labels() map[string]string {
	if s.project == "" {
		return nil
	}
	return map[string]string{labelProject: s.project, labelService: ownService}
}
