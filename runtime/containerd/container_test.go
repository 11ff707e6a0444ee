package containerd

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/v2/client"
	"github.com/containerd/containerd/v2/core/containers"
	"google.golang.org/grpc"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// hookedTasks calls hooks around the engine's own methods; nil is none.
type hookedTasks struct {
	tasks.TasksClient
	beforeCreate, afterList, afterGet func()
}

func (h hookedTasks) Create(ctx context.Context, in *tasks.CreateTaskRequest, opts ...grpc.CallOption) (*tasks.CreateTaskResponse, error) {
	if h.beforeCreate != nil {
		h.beforeCreate()
	}
	return h.TasksClient.Create(ctx, in, opts...)
}

func (h hookedTasks) List(ctx context.Context, in *tasks.ListTasksRequest, opts ...grpc.CallOption) (*tasks.ListTasksResponse, error) {
	out, err := h.TasksClient.List(ctx, in, opts...)
	if h.afterList != nil {
		h.afterList()
	}
	return out, err
}

func (h hookedTasks) Get(ctx context.Context, in *tasks.GetRequest, opts ...grpc.CallOption) (*tasks.GetResponse, error) {
	out, err := h.TasksClient.Get(ctx, in, opts...)
	if h.afterGet != nil {
		h.afterGet()
	}
	return out, err
}

func newHooked(t *testing.T, c *engine.Containerd, h hookedTasks) *Runtime {
	t.Helper()
	r := newRuntime(t, c)
	h.TasksClient = r.client.TaskService()
	hooked, err := client.New(r.opts.Address, client.WithDefaultNamespace(r.opts.Namespace), client.WithServices(client.WithTaskClient(h)))
	must(t, err)
	t.Cleanup(func() { _ = hooked.Close() })
	r.client = hooked
	return r
}

// A container that is started after the engine was asked for its processes has not
// ended.
func TestStartedMeanwhile(t *testing.T) {
	c := shared.Get(t)
	label := map[string]string{"meanwhile": "yes"}
	for name, look := range map[string]func(r *Runtime, id string) (runtime.Container, error){
		"inspect": func(r *Runtime, id string) (runtime.Container, error) { return r.Inspect(t.Context(), id) },
		"list": func(r *Runtime, _ string) (runtime.Container, error) {
			cs, err := r.List(t.Context(), label)
			if err != nil || len(cs) != 1 {
				t.Fatalf("listed %v, %v", cs, err)
			}
			return cs[0], nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			registered, proceed, made := make(chan struct{}), make(chan struct{}), make(chan error, 1)
			maker := newHooked(t, c, hookedTasks{beforeCreate: func() { close(registered); <-proceed }})
			go func() {
				_, err := maker.Create(t.Context(), runtime.Spec{
					Name: "meanwhile-" + name, Image: testImage, Command: []string{"sleep", "1000"}, Labels: label,
				})
				made <- err
			}()
			<-registered
			cs, err := maker.List(t.Context(), label)
			if err != nil || len(cs) != 1 || cs[0].State != runtime.StateCreated {
				t.Fatalf("listed %v, %v", cs, err)
			}
			t.Cleanup(func() {
				must(t, maker.Remove(context.WithoutCancel(t.Context()), cs[0].ID))
			})
			start := sync.OnceFunc(func() {
				close(proceed)
				if err := <-made; err != nil {
					t.Error(err)
				}
			})
			got, err := look(newHooked(t, c, hookedTasks{afterList: start, afterGet: start}), cs[0].ID)
			if err != nil || got.State == runtime.StateExited {
				t.Errorf("it is %s, %v", got.State, err)
			}
			if got, err = maker.Inspect(t.Context(), cs[0].ID); err != nil || got.State != runtime.StateRunning {
				t.Errorf("afterwards it is %s, %v", got.State, err)
			}
		})
	}
}

// What has been started and has no process any more, and no note of its end, ended
// with the host.
func TestLostWithHost(t *testing.T) {
	started := time.Now()
	out, err := tell(containers.Container{}, started, nil)
	if err == nil {
		err = new(Runtime).tellEnd(t.Context(), &out, containers.Container{}, nil)
	}
	if err != nil || out.State != runtime.StateExited || out.ExitCode != exitLost || !out.FinishedAt.Equal(started) {
		t.Errorf("got %+v, %v", out, err)
	}
	if out, err = tell(containers.Container{}, time.Time{}, nil); err != nil || out.State != runtime.StateCreated {
		t.Errorf("never started: %+v, %v", out, err)
	}
}
