// Package runtime defines what Berm needs of a container engine: to make one
// hardened container per sandbox, start a program in it, list what exists, and
// remove it. Each backend is a package below this one, and passes the contract
// suite in runtimetest.
package runtime

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/containerd/errdefs"
)

// Runtime is a container engine as Berm sees it.
//
// All methods may be called from many goroutines at once. Every call ends when
// its context does. All calls but Pull, Logs and Watch also end within the
// backend's own timeout, so that a hung engine can't hang a caller.
//
// Errors belong to the classes of github.com/containerd/errdefs:
//
//   - NotFound: no such container, image or network.
//   - AlreadyExists: the name of a new container is taken.
//   - InvalidArgument: the engine refuses the value; asking again won't help.
//   - FailedPrecondition: the object isn't in a state that allows the call
//     (an exec in a container that isn't running, say).
//   - ResourceExhausted: the container has no room for what is asked.
//   - Unavailable: the engine can't be reached or didn't answer in time.
//   - Canceled, DeadlineExceeded: the caller's context ended.
type Runtime interface {
	// Info asks the engine for its version and its host's size. It also serves as the health check.
	Info(ctx context.Context) (Info, error)

	// Image looks an image up in the engine's own store, without a network.
	// NotFound when it isn't there.
	Image(ctx context.Context, ref string) (Image, error)

	// Pull brings an image from its registry. Progress, when not nil, is called
	// from one goroutine at a time, until Pull returns. An image that the registry
	// doesn't have, or won't give, is NotFound.
	Pull(ctx context.Context, ref string, progress func(PullProgress)) (Image, error)

	// EnsureNetwork makes a network unless one of this name exists, whatever its
	// labels. If that one differs, EnsureNetwork leaves it as it is and returns
	// FailedPrecondition.
	EnsureNetwork(ctx context.Context, n Network) error

	// Create makes a container and starts it. When it returns, the main process is
	// running, and the container's address is known if it has a network. When it
	// returns an error, it has removed what it made. If that removal failed too, the
	// container that is left carries the Spec's labels.
	Create(ctx context.Context, spec Spec) (Container, error)

	// Inspect returns one container with all fields. NotFound when it doesn't exist.
	Inspect(ctx context.Context, id string) (Container, error)

	// List returns every container, running or not, that carries all the given
	// labels. A label with an empty value selects on the name alone. List leaves the
	// fields empty that only other methods fill in.
	List(ctx context.Context, labels map[string]string) ([]Container, error)

	// Remove kills a container, whatever its state, and removes it with all that Create made for it. A
	// missing container is no error.
	Remove(ctx context.Context, id string) error

	// Pause freezes a container's processes, and Resume lets them go on. Pausing a
	// paused container and resuming a running one are no errors.
	Pause(ctx context.Context, id string) error
	Resume(ctx context.Context, id string) error

	// Logs copies what the container's main process printed to the writers, in order.
	// A nil writer discards. With Follow, Logs goes on until the container or ctx
	// ends, and returns nil then.
	Logs(ctx context.Context, id string, opts LogOptions, stdout, stderr io.Writer) error

	// Stats measures a container's use of resources.
	Stats(ctx context.Context, id string) (Stats, error)

	// Watch calls f for each event of containers that carry all the given labels,
	// one at a time, until ctx ends (nil) or the engine goes away (Unavailable).
	// Ready, when not nil, is called once. Watch misses no event after that call, and
	// replays no earlier one, so list after ready. A pause or a resume may be reported
	// more than once; the last report is right.
	Watch(ctx context.Context, labels map[string]string, ready func(), f func(Event)) error

	// Networks lists the networks that carry all the given labels.
	Networks(ctx context.Context, labels map[string]string) ([]Network, error)

	// RemoveNetwork removes a network. A missing network is no error. One that containers use is
	// FailedPrecondition.
	RemoveNetwork(ctx context.Context, name string) error

	// Sweep removes parts of containers that List doesn't return. A Create or Remove
	// leaves them if this process or the engine ends meanwhile. Sweep removes only what
	// this client, or an earlier one with the same settings, made. It spares parts of
	// a container, and parts that a call under way uses. It goes on after a failure,
	// and returns all failures joined.
	Sweep(ctx context.Context) error
}

// AgentRuntime is a Runtime in whose containers Berm's program runs.
type AgentRuntime interface {
	Runtime
	Insider
}

// ErrNotKilled marks an error of Exec after which processes of the command may
// still be running in the container.
var ErrNotKilled = errors.New("the command's processes could not be killed")

// ErrNoRoom is the error of an Exec whose command never started, because the container has
// no room for it: its processes are at their limit, or it has too little memory. It is in
// the ResourceExhausted class.
var ErrNoRoom = WithClass(errdefs.ErrResourceExhausted,
	errors.New("the command can't be started: there may be no room for another process, or too little memory"))

// ErrInterrupted marks an error of Exec whose container ended while the command ran. It also
// marks an error of an Insider whose program in the container ended during an operation.
var ErrInterrupted = errors.New("the container ended while the command ran")

// Collector lists and removes volumes, and removes networks, that callers make through an
// engine's own API. A removed object's name may be used again, and several networks may
// share one.
type Collector interface {
	// Volumes lists the volumes that carry all the given labels.
	Volumes(ctx context.Context, labels map[string]string) ([]Volume, error)
	// RemoveVolume removes a volume and its content. A missing volume is no error. One
	// that a container has, running or not, is FailedPrecondition.
	RemoveVolume(ctx context.Context, name string) error
	// RemoveNetworkID removes the network with this Network.ID. A missing network is no
	// error. One that containers use is FailedPrecondition.
	RemoveNetworkID(ctx context.Context, id string) error
}

// Info is what an engine reports of itself.
type Info struct {
	Backend       string // "docker", "containerd", "fake"
	Version       string // the engine's own
	APIVersion    string // as negotiated; empty where there is no such thing
	OS            string // operating system of the host, as the engine tells it
	Architecture  string // in Go's terms: "amd64", "arm64"
	CPUs          int    // of the host
	MemoryBytes   int64  // of the host
	CgroupVersion string // "1" or "2"
}

// Image is an image in the engine's store.
type Image struct {
	ID      string   // content-addressed: what Spec.Image should carry
	Digests []string // "repository@sha256:…" as registries gave them; may be empty
	Env     []string // the image's own environment, "NAME=value"
	Command []string // entrypoint and command, joined
	User    string   // the image's own user; empty is root
	// Labels are those that the engine gives to the image's containers, besides a Spec's.
	Labels map[string]string
}

// PullProgress is the progress of a pull, over all layers. Total grows as layers' sizes become known.
type PullProgress struct {
	Status       string
	CurrentBytes int64
	TotalBytes   int64
}

// Network is a bridge network that sandboxes attach to.
type Network struct {
	Name string
	// ID is the engine's; filled in by Networks only.
	ID     string
	Labels map[string]string
	// Internal networks have no way out of the host.
	Internal bool
	// Isolated keeps the containers on the network from reaching each other.
	Isolated bool
	// External makes EnsureNetwork return NotFound rather than make a missing network. The
	// network may then differ in Isolated.
	External bool
	// CreatedAt is filled in by Networks only.
	CreatedAt time.Time
}

// Volume is a volume of the engine.
type Volume struct {
	Name      string
	Labels    map[string]string
	CreatedAt time.Time
}

// Spec describes a container to create. It has no field for what is the same in every container. A
// container drops all capabilities but CapAdd, and can't gain privileges. Its seccomp profile is the
// default one for the machine's own architecture alone, without what SeccompNames and SeccompIoctls
// leave out. The container has private namespaces, masked and read-only /proc paths, an init process
// that reaps, and no swap. The engine never restarts it.
type Spec struct {
	Name           string            // mandatory; unique in the engine
	Image          string            // mandatory; an Image.ID, or a reference that is in the store
	Command        []string          // nil is the image's own entrypoint and command; otherwise replaces both
	Env            []string          // "NAME=value", over the image's own
	Unset          []string          // names of the image's variables that the container doesn't get; none of Env
	Labels         map[string]string // all of them come back in Container.Labels
	User           string            // "uid[:gid]"; empty is the image's own
	Hostname       string            // empty lets the engine choose
	WorkingDir     string            // absolute; empty is the image's own; made if missing
	Network        string            // name of a network; empty is a namespace with loopback only
	Mounts         []Mount
	Tmpfs          []Tmpfs
	CPUs           float64  // limit in cores; more than the host has counts as all of them; 0 is none
	MemoryBytes    int64    // limit, swap included; 0 is none
	PidsLimit      int64    // 0 is none
	ReadOnlyRootfs bool     // nothing but Mounts and Tmpfs can be written
	CapAdd         []string // "CAP_NET_BIND_SERVICE", …
	RuntimeClass   string   // the engine's OCI runtime by name; empty is its default
	UserNS         bool     // a user namespace with 65536 of the host's uids and gids that nobody else has; InvalidArgument where it can't be had
	LogMaxBytes    int64    // of the main process's output that is kept; 0 is 10 MiB
	Agent          *Agent   // Berm's program as the init process; nil is the engine's, or the backend's, own
}

// Mount is a directory of the engine's host, seen in the container. Source must exist;
// no backend makes it. The mount is private (no propagation), and nosuid and nodev where
// the engine supports that. Mounts below the source aren't seen in the container.
type Mount struct {
	Source   string
	Target   string
	ReadOnly bool
}

// Tmpfs is an empty file system in memory, mode 1777, nosuid and nodev.
type Tmpfs struct {
	Target    string
	SizeBytes int64 // mandatory
}

// State of a container.
type State string

// The states that a container can be in.
const (
	StateCreated State = "created" // made, never started
	StateRunning State = "running"
	StatePaused  State = "paused"
	StateExited  State = "exited"
	StateUnknown State = "unknown" // being removed, dead, or a state that Berm has no word for
)

// Container is what the engine reports of a container.
type Container struct {
	ID         string
	Name       string
	Image      string // ID of the image
	State      State
	Labels     map[string]string
	Env        []string // "NAME=value", the image's own included; Inspect and Create only
	IP         string   // address on Spec.Network; empty without one; Inspect and Create only
	CreatedAt  time.Time
	StartedAt  time.Time // zero if never started; Inspect and Create only
	FinishedAt time.Time // zero while it runs; Inspect and Create only
	ExitCode   int       // of the main process, once exited; Inspect only
	OOMKilled  bool      // the kernel killed a process in it for want of memory; Inspect only
	Pid        int       // of the main process, as the engine's host counts; 0 once it has ended; Inspect and Create only
}

// Exec is a command to be run in a container.
type Exec struct {
	Command    []string  // mandatory: program and arguments, no shell in between
	Env        []string  // "NAME=value", over the container's own
	WorkingDir string    // absolute, made if missing; empty is the container's own
	User       string    // "uid[:gid]"; empty is the container's own
	Stdin      io.Reader // copied in, then closed; nil closes it at once
	Stdout     io.Writer // nil discards; writes come from one goroutine at a time
	Stderr     io.Writer // like Stdout, but another goroutine may write at the same time: lock a shared writer
}

// ExecResult is how a command ended.
type ExecResult struct {
	// ExitCode as the engine reports it: 128+n for a process that signal n killed.
	ExitCode int
	// OOMKilled says that the kernel killed the process for want of memory.
	OOMKilled bool
	// CPUTime and PeakMemoryBytes are as in ProcessInfo; 0 where they aren't known.
	CPUTime         time.Duration
	PeakMemoryBytes int64
}

// LogOptions select a part of a container's log.
type LogOptions struct {
	Follow     bool
	Tail       int       // last lines only; 0 is all
	Since      time.Time // zero is from the start
	Timestamps bool      // RFC 3339 with nanoseconds and a space before each line
}

// Stats is a container's use of resources at one moment.
type Stats struct {
	Time             time.Time
	CPUUsage         time.Duration // since it was started, over all cores
	MemoryBytes      int64         // in use, without page cache that can be dropped
	MemoryLimitBytes int64
	Pids             int64
	RxBytes, TxBytes int64 // over all interfaces
}

// EventType is a kind of event.
type EventType string

// The types of events.
const (
	EventStart   EventType = "start"
	EventExit    EventType = "exit" // the main process ended
	EventOOM     EventType = "oom"  // a process in it was killed for want of memory
	EventRemoved EventType = "removed"
	EventPaused  EventType = "paused"
	EventResumed EventType = "resumed"
)

// Event is something that happened to a container.
type Event struct {
	Type        EventType
	ContainerID string
	Labels      map[string]string
	ExitCode    int // with EventExit; 137 if the engine has lost it
	Time        time.Time
}
