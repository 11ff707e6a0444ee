package doctor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/cmd/berm/serve"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy/engineapi"
	"github.com/bermhq/berm/runtime"
)

// engineFacts are what is known of the engine, and of where this process stands to it.
type engineFacts struct {
	cfg     *config.Config // heeds the container that this process is
	asked   string         // the address, without a user
	user    bool           // it was given with one
	socket  string         // empty if it has none
	open    bool           // every user of this machine can reach the socket
	view    serve.View
	inside  bool // this process is in a container
	self    *serve.Self
	selfErr error // why it isn't known which
	settled error // why the configuration can't be followed in it
	hidden  bool  // the engine's process can't be seen from here
	client  runtime.Runtime
	survey  runtime.Survey
	err     error // why there is no survey
	agent   error // why there is no agent; nil if there can be one
}

// surveyor is an engine's client that can tell how the engine is set up.
type surveyor interface {
	Survey(ctx context.Context) (runtime.Survey, error)
}

// lookAtEngine does what berm serve does with the engine at its start, but for making
// anything.
func lookAtEngine(ctx context.Context, limit time.Duration, given *config.Config) *engineFacts {
	asked := serve.EngineAddress(given.Engine)
	bare := *given
	if withoutUser(asked) != asked { // it may be a secret, and clients tell their address
		bare.Engine.Address = withoutUser(asked)
	}
	given = &bare
	located := bare
	e := &engineFacts{cfg: &located, asked: withoutUser(asked), user: withoutUser(asked) != asked, socket: serve.EngineSocket(given.Engine), inside: serve.InContainer()}
	e.view, _ = serve.Within(ctx, limit, func(ctx context.Context) (serve.View, error) { return serve.EngineView(ctx, given.Engine), nil })
	if e.socket != "" {
		pid, err := serve.Within(ctx, limit, func(ctx context.Context) (int, error) { return serve.Peer(ctx, e.socket) })
		e.hidden = err == nil && pid == 0
		e.open, _ = serve.Within(ctx, limit, func(context.Context) (bool, error) { return openToAll(e.socket), nil })
	}
	e.client, e.survey, e.err = surveyEngine(ctx, limit, given, e.socket)
	if e.err == nil {
		e.self, e.selfErr = serve.Within(ctx, limit, func(ctx context.Context) (*serve.Self, error) {
			return serve.FindSelf(ctx, given.Engine, e.view, time.Second)
		})
	}
	e.settled = e.self.Settle(e.cfg)
	_, e.agent = serve.Within(ctx, limit, func(context.Context) ([]byte, error) { return serve.CheckAgent(e.cfg.Engine, e.cfg.StateDir, e.view) })
	return e
}

// local tells whether the engine is on this machine, and its sandboxes' limits are this
// kernel's.
func (e *engineFacts) local() bool { return e.view.Root && e.socket != "" }

// surveyEngine gives a client that needn't be closed, as it ends with the program.
func surveyEngine(ctx context.Context, limit time.Duration, cfg *config.Config, socket string) (runtime.Runtime, runtime.Survey, error) {
	engine := cfg.Engine
	engine.CallTimeout = limit
	client, err := reading(ctx, limit, "the files that engine names", func() (runtime.Runtime, error) { return serve.OpenRuntime(engine, cfg.StateDir, nil) })
	if err != nil {
		return nil, runtime.Survey{}, &refusedError{err}
	}
	if socket != "" { // the kernel says more plainly what is in the way than clients do
		if _, err := serve.Peer(ctx, socket); err != nil {
			return nil, runtime.Survey{}, err
		}
	}
	s, can := client.(surveyor)
	if !can {
		return nil, runtime.Survey{}, fmt.Errorf("the client of %s can't tell how it is set up", engine.Kind) // a defect of ours
	}
	begun := time.Now()
	survey, err := serve.Within(ctx, limit, s.Survey)
	if err != nil && time.Since(begun) >= limit { // clients say so in words of their own
		err = serve.ErrStuck
	}
	return client, survey, err
}

// refusedError is what berm serve wouldn't start with.
type refusedError struct{ error }

func (e *refusedError) Unwrap() error { return e.error }

// openToAll tells whether every user of this machine may connect to a socket.
func openToAll(socket string) bool {
	fi, err := os.Stat(socket)
	if err != nil || fi.Mode().Perm()&0o002 == 0 {
		return false
	}
	path, err := filepath.EvalSymlinks(socket)
	for err == nil && path != "/" {
		path = filepath.Dir(path)
		if fi, err = os.Stat(path); err == nil && fi.Mode().Perm()&0o001 == 0 {
			return false
		}
	}
	return err == nil
}

// judge says what is to be said of the engine. The policy may be nil.
func (e *engineFacts) judge(p *policy.Policy) []finding {
	out := []finding{e.judgeReach()}
	if err := e.view.Suits(e.cfg.Engine.Kind); err != nil {
		out = append(out, bad("engine.place", "its file system or mounts are others than Berm's", wontStart, err.Error()))
	}
	if e.user {
		out = append(out, bad("engine.address", "it has a user or a password before its host", "no engine is told of it, logs may tell it, and not with every scheme is the host found", "leave it out of engine.address or DOCKER_HOST"))
	}
	if e.err == nil || e.open {
		out = append(out, e.judgeSocket())
	}
	out = append(out, e.judgeSelf()...)
	var off *serve.AgentOffError
	if e.err == nil || !errors.As(e.agent, &off) { // else it may turn out well
		out = append(out, e.judgeAgent())
	}
	if e.err != nil {
		return out
	}
	docker := e.cfg.Engine.Kind == "docker"
	out = append(out, e.judgeSetup())
	if parts := e.judgeParts(p); !docker || parts.Grade != gradeOK {
		out = append(out, parts)
	}
	if docker { // the rest is what Docker tells
		out = append(out, e.judgeSecurity(), e.judgeLimits(), e.judgeClock(), e.judgeHolders())
		if len(e.cfg.EngineAPI.Listeners) > 0 {
			out = append(out, e.judgeArchives())
		}
	}
	return append(out, e.judgeClasses(p), e.judgeUserNS(p))
}

func (e *engineFacts) judgeSocket() finding {
	const id = "engine.socket"
	return first(
		rule{e.open, bad(id, e.socket+" can be used by every user", "everybody on this machine is as good as root", "chmod o-rw "+e.socket+", and see that the engine's settings don't open it again")},
		rule{e.socket != "", okay(id, "not open to every user")},
		rule{os.Getenv("DOCKER_CERT_PATH") != "", okay(id, "none: TCP with TLS")},
		rule{true, soft(id, "none: TCP without TLS", "whoever reaches that port is as good as root there", "have the engine listen with TLS and set DOCKER_CERT_PATH, or keep the port in a network of Berm's own")},
	)
}

// judgeSelf is about the container that this process is in.
func (e *engineFacts) judgeSelf() []finding {
	const id = "engine.self"
	var out []finding
	switch {
	case e.selfErr != nil:
		out = append(out, soft(id, "in a container, but in which isn't known: "+said(e.selfErr),
			"Berm goes by its configuration alone for where directories and networks are", "set mounts.path_map and engine.agent_dir if mounts or the agent don't work"))
	case e.self != nil:
		out = append(out, okay(id, fmt.Sprintf("container %.12s of this engine; mounts that count: %d, networks: %d", e.self.ID, len(e.self.Paths), len(e.self.Networks))))
	case e.err == nil && e.inside && !e.view.Root:
		out = append(out, soft(id, "in a container, and not one that the engine knows",
			"Berm goes by its configuration alone for where directories and networks are", "set mounts.path_map and engine.agent_dir if mounts or the agent don't work"))
	}
	if e.settled != nil {
		out = append(out, bad("engine.network", said(e.settled), wontStart, "set sandbox.network"))
	}
	return out
}

// judgeReach says who the engine is, or why it can't be asked.
func (e *engineFacts) judgeReach() finding {
	const id = "engine.reachable"
	kind := e.cfg.Engine.Kind
	if e.err == nil {
		i := e.survey.Info
		found := fmt.Sprintf("%s %s at %s", i.Backend, strings.TrimPrefix(i.Version, "v"), e.asked)
		if i.APIVersion != "" {
			found += ", API " + i.APIVersion
		}
		return okay(id, found)
	}
	var refused *refusedError
	if errors.As(e.err, &refused) {
		return bad(id, said(e.err), wontStart, "see docs/operations.md for what an engine needs")
	}
	variable := map[string]string{"docker": "DOCKER_HOST", "containerd": "CONTAINERD_ADDRESS"}[kind]
	found := fmt.Sprintf("%s at %s doesn't answer: %v", kind, e.asked, config.OneLine(e.err))
	fix := "look at its log, or name another with --engine-address"
	switch {
	case errors.Is(e.err, fs.ErrNotExist):
		found = fmt.Sprintf("there is no %s at %s", kind, e.asked)
		fix = "start it"
		if e.inside {
			fix = "mount its socket into this container"
		}
		fix += ", or say where it is with --engine-address or " + variable
		if other := otherEngine(kind); other != "" {
			fix += "; there is a " + other + " here, for --engine " + other
		}
	case errors.Is(e.err, fs.ErrPermission):
		found = fmt.Sprintf("%s at %s refuses this user", kind, e.asked)
		fix = "run berm as root, or as a user of the socket's group" + groupOf(e.socket)
	case errors.Is(e.err, syscall.ECONNREFUSED):
		found = fmt.Sprintf("no %s listens at %s", kind, e.asked)
		fix = "start it"
	case errors.Is(e.err, serve.ErrStuck):
		found = fmt.Sprintf("%s at %s is there, but doesn't answer in time", kind, e.asked)
	}
	return bad(id, found, "no sandbox can be made; berm serve starts, and waits for it", fix)
}

// groupOf tells the group of a file in words to be added; empty if it can't be seen.
func groupOf(path string) string {
	fi, err := os.Stat(path)
	if err != nil {
		return ""
	}
	st, can := fi.Sys().(*syscall.Stat_t)
	if !can {
		return ""
	}
	gid := strconv.FormatUint(uint64(st.Gid), 10)
	if g, err := user.LookupGroupId(gid); err == nil {
		return ", " + g.Name + " (" + gid + ")"
	}
	return ", " + gid
}

// otherEngine is the kind of an engine whose usual socket is there; empty if there is none.
func otherEngine(kind string) string {
	for other, socket := range map[string]string{"docker": "/var/run/docker.sock", "containerd": "/run/containerd/containerd.sock"} {
		if _, err := os.Stat(socket); err == nil && other != kind {
			return other
		}
	}
	return ""
}

func (e *engineFacts) judgeSetup() finding {
	const id = "engine.setup"
	s := e.survey
	found := s.Storage
	if s.Info.CgroupVersion != "" {
		found += ", cgroup v" + s.Info.CgroupVersion
	}
	if s.CgroupDriver != "" {
		found += " by " + s.CgroupDriver
	}
	if e.cfg.Engine.Kind == "docker" {
		found += map[bool]string{true: ", live-restore on", false: ", live-restore off: its restart ends sandboxes"}[s.LiveRestore]
	}
	if slices.Contains([]string{"vfs", "devicemapper", "aufs", "native"}, s.Storage) {
		return soft(id, found, "each sandbox takes a copy of its image, or is slow to make", "have the engine use overlay2 (overlayfs), which takes ext4 or XFS below its directory")
	}
	return okay(id, found)
}

// judgeArchives says whether docker cp is safe with the engine.
func (e *engineFacts) judgeArchives() finding {
	const id = "engine.archives"
	release := e.survey.Info.Version
	switch {
	case engineapi.SafeArchives(release):
		return okay(id, "docker cp is safe with engine "+release)
	case e.cfg.EngineAPI.ArchiveFixed:
		return okay(id, "docker cp is safe with engine "+release+", as engine_api.archive_fixed asserts")
	}
	return soft(id, "engine "+release+" lacks the fixes of CVE-2026-41568 and CVE-2026-42306", "docker cp with running containers is refused, unless their root is read-only",
		"update the engine to "+engineapi.ArchiveFixed+", or set engine_api.archive_fixed if it has the fixes all the same")
}

func (e *engineFacts) judgeAgent() finding {
	const id = "engine.agent"
	var off *serve.AgentOffError
	return first(
		rule{e.agent == nil && e.hidden, soft(id, "can be given to sandboxes, whose processes can't be seen from here", "Berm doesn't listen to it: commands go through the engine, some fifty times slower, and processes end with Berm", "give Berm's container the host's process namespace (pid: host)")},
		rule{e.agent == nil, okay(id, "can be given to sandboxes")},
		rule{errors.As(e.agent, &off), soft(id, "off: "+said(e.agent), "the engine starts a program for commands, which takes 50 ms, and processes end with Berm", "set engine.agent_dir, or put state_dir where the engine sees it")},
		rule{true, bad(id, said(e.agent), wontStart, "set engine.agent_file right, or leave it out")},
	)
}

// judgeParts is about programs and plug-ins.
func (e *engineFacts) judgeParts(p *policy.Policy) finding {
	const id = "engine.parts"
	missing := e.survey.MissingForNetworks
	found, fix := "missing: "+strings.Join(missing, "; "), "install containernetworking-plugins and iptables, or name the plug-ins' directory in engine.cni_plugin_dirs"
	pr, _ := defaultProfile(p)
	return first(
		rule{len(e.survey.Missing) > 0, bad(id, "missing: "+strings.Join(e.survey.Missing, "; "), "no sandbox can be made", "install it on the engine's host")},
		rule{len(missing) > 0 && pr.Network == "off", soft(id, found, "sandboxes with a network can't be made, those without can", fix)},
		rule{len(missing) > 0, bad(id, found, "sandboxes with a network can't be made, and the profile default gives one", fix)},
		rule{true, okay(id, "snapshotter, runc, its shim, iptables and the CNI plug-ins are there")},
	)
}

// defaultProfile is a policy's; false without a policy.
func defaultProfile(p *policy.Policy) (policy.Profile, bool) {
	if p == nil {
		return policy.Profile{Network: "off"}, false
	}
	return p.Profile("")
}

func (e *engineFacts) judgeSecurity() finding {
	const id = "engine.security"
	found := strings.Join(e.survey.Security, ", ")
	if !slices.Contains(e.survey.Security, "seccomp") {
		return bad(id, "without seccomp: "+found, "no sandbox can be made, since each has a filter of system calls", "run the engine on a kernel with seccomp")
	}
	if !slices.Contains(e.survey.Security, "rootless") && !slices.Contains(e.survey.Security, "userns") {
		found += "; root in a sandbox is uid 0 on the host, without capabilities"
	}
	return okay(id, found)
}

func (e *engineFacts) judgeLimits() finding {
	const id = "engine.limits"
	unlimited := slices.Clone(e.survey.Unlimited)
	if e.local() { // then host.swap says it, and whether there is any
		unlimited = slices.DeleteFunc(unlimited, func(s string) bool { return s == "swap" })
	}
	return first(
		rule{len(unlimited) == 0, okay(id, "memory, CPUs and processes can be limited")},
		rule{slices.Equal(unlimited, []string{"swap"}), soft(id, "swap isn't limited", "a sandbox can take swap beyond its memory limit", "boot the engine's host with swapaccount=1, or turn its swap off")},
		rule{true, bad(id, "not limited: "+strings.Join(unlimited, ", "), "one sandbox can take all that the host has", "turn the cgroup controllers on when the engine's host boots; if it is rootless, delegate them")},
	)
}

func (e *engineFacts) judgeClock() finding {
	const id = "engine.clock"
	if e.survey.Skew == 0 {
		return okay(id, "as here")
	}
	return soft(id, "differs from this one by "+e.survey.Skew.Round(time.Second).String(), "times in logs and answers don't fit each other", "have both hosts keep time by NTP")
}

func (e *engineFacts) judgeHolders() finding {
	const id = "engine.socket_holders"
	var names []string
	for _, h := range e.survey.Holders {
		if e.self == nil || h.ID != e.self.ID {
			names = append(names, h.Name)
		}
	}
	switch {
	case len(names) == 0 && len(e.survey.Holders) == 0:
		return okay(id, "no running container is seen to have the engine's socket")
	case len(names) == 0:
		return okay(id, "no running container but this one is seen to have the engine's socket")
	}
	found := fmt.Sprintf("%d running containers have the engine's socket: %s", len(names), some(names))
	if len(names) == 1 {
		found = "a running container has the engine's socket: " + names[0]
	}
	return soft(id, found, "each is as good as root on the host, whatever the policy says", "take it away from all but Berm, see docs/guide-compose.md")
}

// judgeClasses is about the OCI runtimes that the policy names. It may be nil.
func (e *engineFacts) judgeClasses(p *policy.Policy) finding {
	const id = "engine.runtimes"
	there := e.survey.Classes
	var missing, lacking []string // classes, and profiles without theirs
	if p != nil {
		for _, name := range p.Profiles() {
			pr, _ := p.Profile(name)
			if pr.RuntimeClass != "" && !slices.Contains(there, pr.RuntimeClass) {
				lacking = append(lacking, name+" ("+pr.RuntimeClass+")")
			}
			for _, class := range pr.EngineAPI.Runtimes {
				if !slices.Contains(there, class) && !slices.Contains(missing, class) {
					missing = append(missing, class)
				}
			}
		}
	}
	return first(
		rule{len(lacking) > 0, bad(id, "the engine lacks the runtime_class of the profiles "+some(lacking)+"; it has "+some(there), "nothing can be made with them", "install it and name it in the engine's settings, or change the policy")},
		rule{len(missing) > 0, soft(id, "the engine lacks "+some(missing)+", which the policy allows; it has "+some(there), "who asks for it is refused by the engine", "install it and name it in the engine's settings")},
		rule{true, okay(id, some(there))},
	)
}

// judgeUserNS is about the profiles with userns: auto. The policy may be nil.
func (e *engineFacts) judgeUserNS(p *policy.Policy) finding {
	const id = "engine.userns"
	var profiles []string
	if p != nil {
		for _, name := range p.Profiles() {
			if pr, _ := p.Profile(name); pr.Userns == policy.UsernsAuto {
				profiles = append(profiles, name)
			}
		}
	}
	switch why := e.survey.NoUserNS; {
	case why == "":
		return okay(id, "profiles can say userns: auto")
	case len(profiles) == 0:
		return okay(id, "no profile says userns: auto, and none could: "+why)
	default:
		return bad(id, "userns: auto can't be had: "+why, "nothing can be made with the profiles "+some(profiles), "bring the engine up to that, or take the key out of them")
	}
}

// some lists words, of which there may be many.
func some(words []string) string {
	const most = 5
	if len(words) == 0 {
		return "none"
	}
	if len(words) > most {
		return strings.Join(words[:most], ", ") + fmt.Sprintf(" and %d more", len(words)-most)
	}
	return strings.Join(words, ", ")
}
