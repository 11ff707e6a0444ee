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

// engineFacts are facts about the engine, and about what this process shares with it.
type engineFacts struct {
	cfg     *config.Config // heeds the container that this process is
	asked   string         // the address, without a user
	user    bool           // it was given with one
	socket  string         // empty if it has none
	open    bool           // every user of this machine can reach the socket
	view    serve.View
	inside  bool // this process is in a container
	self    serve.Self
	selfErr error // why it isn't known which
	settled error // why the configuration can't be followed in it
	hidden  bool  // the engine's process can't be seen from here
	client  runtime.Runtime
	survey  runtime.Survey
	err     error // why there is no survey
	agent   error // why there is no agent; nil if there can be one
}

// lookAtEngine does with the engine what berm serve does at its start, but makes nothing.
func lookAtEngine(ctx context.Context, limit time.Duration, given *config.Config) *engineFacts {
	asked := serve.EngineAddress(given.Engine)
	bare := *given
	if runtime.WithoutUser(asked) != asked { // it may be a secret, and clients tell their address
		bare.Engine.Address = runtime.WithoutUser(asked)
	}
	given = &bare
	located := bare
	e := &engineFacts{cfg: &located, asked: runtime.WithoutUser(asked), user: runtime.WithoutUser(asked) != asked, socket: serve.EngineSocket(given.Engine), inside: serve.InContainer()}
	e.view, _ = serve.Within(ctx, limit, func(ctx context.Context) (serve.View, error) { return serve.EngineView(ctx, given.Engine), nil })
	if e.socket != "" {
		pid, err := serve.Within(ctx, limit, func(ctx context.Context) (int, error) { return serve.Peer(ctx, e.socket) })
		e.hidden = err == nil && pid == 0
		e.open, _ = serve.Within(ctx, limit, func(context.Context) (bool, error) { return openToAll(e.socket), nil })
	}
	e.client, e.survey, e.err = surveyEngine(ctx, limit, given, e.socket)
	if e.err == nil {
		e.self, e.selfErr = serve.Within(ctx, limit, func(ctx context.Context) (serve.Self, error) {
			return serve.FindSelf(ctx, given.Engine, e.view, time.Second)
		})
	}
	e.settled = e.self.Settle(e.cfg)
	_, e.agent = serve.Within(ctx, limit, func(context.Context) ([]byte, error) { return serve.CheckAgent(e.cfg.Engine, e.cfg.StateDir, e.view) })
	return e
}

// local reports whether the engine is on this machine, so that this kernel limits its sandboxes.
func (e *engineFacts) local() bool { return e.view.Root && e.socket != "" }

// surveyEngine returns a client and its survey. The client needn't be closed, since it ends with
// the program.
func surveyEngine(ctx context.Context, limit time.Duration, cfg *config.Config, socket string) (runtime.Runtime, runtime.Survey, error) {
	engine := cfg.Engine
	engine.CallTimeout = limit
	client, err := reading(ctx, limit, "the files that engine names", func() (serve.Engine, error) { return serve.OpenRuntime(engine, cfg.StateDir, nil) })
	if err != nil {
		return nil, runtime.Survey{}, &refusedError{err}
	}
	if socket != "" { // the kernel says more plainly what is in the way than clients do
		if _, err := serve.Peer(ctx, socket); err != nil {
			return nil, runtime.Survey{}, err
		}
	}
	begun := time.Now()
	survey, err := serve.Within(ctx, limit, client.Survey)
	if err != nil && time.Since(begun) >= limit { // clients say so in words of their own
		err = serve.ErrStuck
	}
	return client, survey, err
}

// refusedError is an error with which berm serve wouldn't start.
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

// judge returns all findings about the engine. The policy may be nil.
func (e *engineFacts) judge(p *policy.Policy) []finding {
	const alone = "Berm goes by its configuration alone for where directories and networks are"
	const hints = "set mounts.path_map and engine.agent_dir if mounts or the agent don't work"
	if p == nil {
		p = &policy.Policy{}
	}
	up, suits := e.err == nil, e.view.Suits(e.cfg.Engine.Kind)
	self := fmt.Sprintf("container %.12s of this engine; mounts that count: %d, networks: %d", e.self.ID, len(e.self.Paths), len(e.self.Networks))
	out := slices.Concat(e.judgeReach(),
		judge("engine.place", bad(suits != nil, "its file system or mounts are others than Berm's", wontStart, said(suits))),
		judge("engine.address", bad(e.user, "it has a user or a password before its host", "no engine is told of it, logs may tell it, and not with every scheme is the host found", "leave it out of engine.address or DOCKER_HOST")),
		judge("engine.socket",
			bad(e.open, e.socket+" can be used by every user", "everybody on this machine is as good as root", "chmod o-rw "+e.socket+", and see that the engine's settings don't open it again"),
			okay(up && e.socket != "", "not open to every user"),
			okay(up && os.Getenv("DOCKER_CERT_PATH") != "", "none: TCP with TLS"),
			soft(up, "none: TCP without TLS", "whoever reaches that port is as good as root there", "have the engine listen with TLS and set DOCKER_CERT_PATH, or keep the port in a network of Berm's own")),
		judge("engine.self",
			soft(e.selfErr != nil, "in a container, but in which isn't known: "+said(e.selfErr), alone, hints),
			okay(e.self.ID != "", self),
			soft(up && e.inside && !e.view.Root, "in a container, and not one that the engine knows", alone, hints)),
		judge("engine.network", bad(e.settled != nil, said(e.settled), wontStart, "set sandbox.network")),
		judge("engine.agent",
			soft(e.agent == nil && e.hidden, "can be given to sandboxes, whose processes can't be seen from here", "Berm doesn't listen to it: what runs in sandboxes is started through the engine, and ends with Berm", "give Berm's container the host's process namespace (pid: host)"),
			okay(e.agent == nil, "can be given to sandboxes"),
			soft(up, "off: "+said(e.agent), "the engine starts a program for commands, which takes 50 ms, and processes end with Berm", "set engine.agent_dir, or put state_dir where the engine sees it"))) // it may turn out well
	if !up {
		return out
	}
	docker := e.cfg.Engine.Kind == "docker"
	out = slices.Concat(out, e.judgeSetup(), e.judgeParts(p, docker))
	if docker {
		out = append(out, e.judgeDocker()...)
	}
	return slices.Concat(out, e.judgeClasses(p), e.judgeUserNS(p))
}

// judgeReach names the engine and its version, or says why it can't be asked.
func (e *engineFacts) judgeReach() []finding {
	const id = "engine.reachable"
	kind := e.cfg.Engine.Kind
	if e.err == nil {
		i := e.survey.Info
		found := fmt.Sprintf("%s %s at %s", i.Backend, strings.TrimPrefix(i.Version, "v"), e.asked)
		if i.APIVersion != "" {
			found += ", API " + i.APIVersion
		}
		return judge(id, okay(true, found))
	}
	if _, refused := errors.AsType[*refusedError](e.err); refused {
		return judge(id, bad(true, said(e.err), wontStart, "see docs/operations.md for what an engine needs"))
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
	return judge(id, bad(true, found, "no sandbox can be made; berm serve starts, and waits for it", fix))
}

// groupOf returns words that name the group of a file, or "" if the group isn't known.
func groupOf(path string) string {
	fi, err := os.Stat(path)
	if err != nil {
		return ""
	}
	gid := strconv.FormatUint(uint64(fi.Sys().(*syscall.Stat_t).Gid), 10)
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

func (e *engineFacts) judgeSetup() []finding {
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
	return judge("engine.setup",
		soft(slices.Contains([]string{"vfs", "devicemapper", "aufs", "native"}, s.Storage), found, "each sandbox takes a copy of its image, or is slow to make", "have the engine use overlay2 (overlayfs), which takes ext4 or XFS below its directory"),
		okay(true, found))
}

// judgeParts is about programs and plug-ins. Docker has its own, so that nothing is said of
// them if all is well.
func (e *engineFacts) judgeParts(p *policy.Policy, docker bool) []finding {
	missing := e.survey.MissingForNetworks
	found, fix := "missing: "+strings.Join(missing, "; "), "install containernetworking-plugins and iptables, or name the plug-ins' directory in engine.cni_plugin_dirs"
	pr, known := p.Profile("")
	return judge("engine.parts",
		bad(len(e.survey.Missing) > 0, "missing: "+strings.Join(e.survey.Missing, "; "), "no sandbox can be made", "install it on the engine's host"),
		soft(len(missing) > 0 && (!known || pr.Network == "off"), found, "sandboxes with a network can't be made, those without can", fix),
		bad(len(missing) > 0, found, "sandboxes with a network can't be made, and the profile default gives one", fix),
		okay(!docker, "snapshotter, runc, its shim, iptables and the CNI plug-ins are there"))
}

// judgeDocker judges facts that only Docker reports.
func (e *engineFacts) judgeDocker() []finding {
	s := e.survey
	security := strings.Join(s.Security, ", ")
	rooted := security
	if !slices.Contains(s.Security, "rootless") && !slices.Contains(s.Security, "userns") {
		rooted += "; root in a sandbox is uid 0 on the host, without capabilities"
	}
	unlimited := slices.Clone(s.Unlimited)
	if e.local() { // then host.swap says it, and whether there is any
		unlimited = slices.DeleteFunc(unlimited, func(s string) bool { return s == "swap" })
	}
	var holders []string
	for _, h := range s.Holders {
		if h.ID != e.self.ID {
			holders = append(holders, h.Name)
		}
	}
	held := "a running container has the engine's socket: " + some(holders)
	if len(holders) > 1 {
		held = fmt.Sprintf("%d running containers have the engine's socket: %s", len(holders), some(holders))
	}
	release, listens := s.Info.Version, len(e.cfg.EngineAPI.Listeners) > 0
	return slices.Concat(
		judge("engine.security",
			bad(!slices.Contains(s.Security, "seccomp"), "without seccomp: "+security, "no sandbox can be made, since each has a filter of system calls", "run the engine on a kernel with seccomp"),
			okay(true, rooted)),
		judge("engine.limits",
			okay(len(unlimited) == 0, "memory, CPUs and processes can be limited"),
			soft(slices.Equal(unlimited, []string{"swap"}), "swap isn't limited", "a sandbox can take swap beyond its memory limit", "boot the engine's host with swapaccount=1, or turn its swap off"),
			bad(true, "not limited: "+strings.Join(unlimited, ", "), "one sandbox can take all that the host has", "turn the cgroup controllers on when the engine's host boots; if it is rootless, delegate them")),
		judge("engine.clock",
			okay(s.Skew == 0, "as here"),
			soft(true, "differs from this one by "+s.Skew.Round(time.Second).String(), "times in logs and answers don't fit each other", "have both hosts keep time by NTP")),
		judge("engine.socket_holders",
			okay(len(s.Holders) == 0, "no running container is seen to have the engine's socket"),
			okay(len(holders) == 0, "no running container but this one is seen to have the engine's socket"),
			soft(true, held, "each is as good as root on the host, whatever the policy says", "take it away from all but Berm, see docs/guide-compose.md")),
		judge("engine.archives", // whether docker cp is safe
			okay(listens && engineapi.SafeArchives(release), "docker cp is safe with engine "+release),
			okay(listens && e.cfg.EngineAPI.ArchiveFixed, "docker cp is safe with engine "+release+", as engine_api.archive_fixed asserts"),
			soft(listens, "engine "+release+" lacks the fixes of CVE-2026-41568 and CVE-2026-42306", "docker cp with running containers is refused, unless their root is read-only",
				"update the engine to "+engineapi.ArchiveFixed+", or set engine_api.archive_fixed if it has the fixes all the same")))
}

// judgeClasses is about the OCI runtimes that the policy names.
func (e *engineFacts) judgeClasses(p *policy.Policy) []finding {
	there := e.survey.Classes
	var missing, lacking []string // classes, and profiles without theirs
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
	return judge("engine.runtimes",
		bad(len(lacking) > 0, "the engine lacks the runtime_class of the profiles "+some(lacking)+"; it has "+some(there), "nothing can be made with them", "install it and name it in the engine's settings, or change the policy"),
		soft(len(missing) > 0, "the engine lacks "+some(missing)+", which the policy allows; it has "+some(there), "who asks for it is refused by the engine", "install it and name it in the engine's settings"),
		okay(true, some(there)))
}

// judgeUserNS is about the profiles with userns: auto.
func (e *engineFacts) judgeUserNS(p *policy.Policy) []finding {
	var asking []string
	for _, name := range p.Profiles() {
		if pr, _ := p.Profile(name); pr.Userns == policy.UsernsAuto {
			asking = append(asking, name)
		}
	}
	why := e.survey.NoUserNS
	return judge("engine.userns",
		okay(why == "", "profiles can say userns: auto"),
		okay(len(asking) == 0, "no profile says userns: auto, and none could: "+why),
		bad(true, "userns: auto can't be had: "+why, "nothing can be made with the profiles "+some(asking), "bring the engine up to that, or take the key out of them"))
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
