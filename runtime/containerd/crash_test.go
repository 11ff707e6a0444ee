package containerd

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/bermhq/berm/runtime"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

const (
	crashLabel = "crash"
	victimEnv  = "CONTAINERD_TEST_VICTIM" // file with the Options of the process that is killed
	crashNet   = "crash-net"
)

// churn makes, uses and removes containers until its context ends, with names that
// come again.
func churn(ctx context.Context, r *Runtime) {
	var wg sync.WaitGroup
	for worker := range 4 {
		wg.Go(func() {
			for n := 0; ctx.Err() == nil; n++ {
				spec := runtime.Spec{
					Name: fmt.Sprintf("crash-%d-%d", worker, n%2), Image: testImage,
					Command: []string{"sh", "-c", "while echo x; do sleep 0.1; done"}, Labels: map[string]string{crashLabel: "yes"},
				}
				if n%2 == 0 {
					spec.Network = crashNet
				}
				c, err := r.Create(ctx, spec)
				if err != nil {
					continue
				}
				_, _, _, _ = runtimetest.Output(ctx, r, c.ID, "", "/bin/true")
				_ = r.Remove(ctx, c.ID)
			}
		})
	}
	wg.Wait()
}

// TestVictim is the process that TestSoakKilledClient kills; by itself it does nothing.
func TestVictim(t *testing.T) {
	file := os.Getenv(victimEnv)
	if file == "" {
		return
	}
	config, err := os.ReadFile(file)
	must(t, err)
	var o victimOptions
	must(t, json.Unmarshal(config, &o))
	churn(t.Context(), newRuntimeWith(t, Options{
		Address: o.Address, Namespace: o.Namespace, Root: o.Root, CgroupParent: o.CgroupParent, Netns: o.Netns, Agent: o.Agent,
	}))
}

// victimOptions are the Options that matter to it.
type victimOptions struct {
	Address, Namespace, Root, CgroupParent, Netns string
	Agent                                         []byte
}

func crashEngine(t *testing.T) (*engine.Containerd, *Runtime) {
	t.Helper()
	d := engine.Own(t, "containerd", engine.StartContainerd, engine.Options{Image: testImage})
	r := newRuntime(t, d)
	must(t, r.EnsureNetwork(t.Context(), runtime.Network{Name: crashNet}))
	return d, r
}

// recoverAll does what a start of Berm and its sweeps do, and checks that nothing is left.
// What a client asked for last, the engine may do after the client's end.
func recoverAll(t *testing.T, d *engine.Containerd, r *Runtime) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	left, err := d.Settled(ctx, r.opts.Root, func(ctx context.Context) error {
		cs, err := r.List(ctx, map[string]string{crashLabel: "yes"})
		for _, c := range cs {
			if e := r.Remove(ctx, c.ID); e != nil {
				err = errors.Join(err, fmt.Errorf("%s, which is %s: %w", c.Name, c.State, e))
			}
		}
		return errors.Join(err, r.Sweep(ctx))
	})
	if err != nil || len(left) > 0 {
		t.Fatalf("%v, left:\n%s", err, strings.Join(left, "\n"))
	}
}

func TestSoakKilledClient(t *testing.T) {
	d, r := crashEngine(t)
	o := r.opts
	config, err := json.Marshal(victimOptions{o.Address, o.Namespace, o.Root, o.CgroupParent, o.Netns, o.Agent})
	must(t, err)
	file := filepath.Join(t.TempDir(), "options")
	must(t, os.WriteFile(file, config, 0o600))
	goruntime.LockOSThread() // the victim dies with the thread that starts it
	defer goruntime.UnlockOSThread()
	for round := range 25 {
		victim := exec.Command(os.Args[0], "-test.run", "^TestVictim$")
		victim.Env = append(os.Environ(), victimEnv+"="+file)
		victim.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		must(t, victim.Start())
		<-time.After(300*time.Millisecond + rand.N(500*time.Millisecond)) // any instant
		must(t, victim.Process.Kill())
		var exit *exec.ExitError
		if err := victim.Wait(); !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
			t.Fatalf("the victim ended by itself: %v", err)
		}
		t.Log("round", round)
		recoverAll(t, d, r)
	}
}

func TestSoakKilledEngine(t *testing.T) {
	d, r := crashEngine(t)
	for round := range 15 {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			churn(ctx, r)
		}()
		<-time.After(200*time.Millisecond + rand.N(500*time.Millisecond)) // any instant
		d.Kill()
		cancel()
		<-done
		must(t, d.Start(t.Context()))
		awaitEngine(t.Context(), t, r)
		t.Log("round", round)
		recoverAll(t, d, r)
	}
}

// awaitEngine waits until the client has dialled an engine again that was away.
func awaitEngine(ctx context.Context, t *testing.T, r *Runtime) {
	t.Helper()
	err := await(ctx, func() (bool, error) {
		_, err := r.Info(ctx)
		return err == nil, nil
	})
	if err != nil {
		t.Fatalf("the engine isn't seen again: %v", err)
	}
}
