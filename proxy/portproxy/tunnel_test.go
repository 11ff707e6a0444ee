package portproxy

import (
	"errors"
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"
)

type pipeConn struct{ net.Conn }

func (pipeConn) CloseWrite() error { return errors.ErrUnsupported }

// A connection whose sides are just silent stays for as long as they like.
func TestTunnelSilent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ours, caller := net.Pipe()
		theirs, port := net.Pipe()
		tun := newTunnel(ours, newPatientConn(pipeConn{theirs}, time.Minute), time.Minute)
		time.Sleep(24 * time.Hour)
		for _, c := range []net.Conn{caller, port} {
			_ = c.SetReadDeadline(time.Now())
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Errorf("it was closed: %v", err)
			}
			_ = c.Close()
		}
		tun.stop()
	})
}
