package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"runtime"
	"strings"
	"sync"
)

// outsideAddr is in a network for documentation, so that nothing else has it.
const outsideAddr = "198.51.100.2:7"

// outside stands for the world beyond the engine's host: a network namespace with
// a server in it, reached over the one link that leads out of the engine's.
type outside struct {
	listener net.Listener
	serving  sync.WaitGroup
}

func newOutside(ctx context.Context, engineNetns, outerNetns string) (*outside, error) {
	if err := makeNetns(outerNetns); err != nil {
		return nil, err
	}
	err := inNetns(engineNetns, func() error {
		return ip("link add out type veth peer name in", "link set in netns "+outerNetns,
			"addr add 198.51.100.1/30 dev out", "link set out up")
	})
	if err != nil {
		return nil, err
	}
	o := new(outside)
	err = inNetns(outerNetns, func() error {
		if err := ip("addr add 198.51.100.2/30 dev in", "link set in up"); err != nil {
			return err
		}
		var err error
		o.listener, err = new(net.ListenConfig).Listen(ctx, "tcp", outsideAddr)
		return err
	})
	if err != nil {
		return nil, err
	}
	o.serving.Go(func() {
		for {
			conn, err := o.listener.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = io.WriteString(conn, "outside\n")
				_ = conn.Close()
			}
		}
	})
	return o, nil
}

func (o *outside) close() error {
	err := o.listener.Close()
	o.serving.Wait()
	return err
}

// ip runs commands of iproute2 in this thread's network namespace.
func ip(commands ...string) error {
	path, err := find("ip")
	if err != nil {
		return err
	}
	for _, c := range commands {
		if out, err := exec.Command(path, strings.Fields(c)...).CombinedOutput(); err != nil {
			return fmt.Errorf("ip %s: %w: %s", c, err, out)
		}
	}
	return nil
}

// inNetns runs a function on a thread that is in a network namespace, and ends with it.
func inNetns(path string, f func() error) error {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		err := enterNetns(path)
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}
