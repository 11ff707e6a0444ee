package containerd

import (
	"errors"
	"io/fs"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParseStat(t *testing.T) {
	const rest = " 1 7 7 0 -1 4194304 100 0 0 0 1 2 0 0 20 0 3 0 123456 4096000 200 18446744073709551615 1 1"
	want := process{pid: 42, state: 'S', threads: 3, start: 123456, size: 4096000}
	for _, tt := range []struct {
		name, stat string
		want       process
		ok         bool
	}{
		{"plain", "42 (sleep) S" + rest, want, true},
		{"a name with spaces", "42 (a b c) S" + rest, want, true},
		{"a name that looks like the rest", "42 (x) R 1 1 1) S" + rest, want, true},
		{"a name with a line's end", "42 (x\n) S" + rest, want, true},
		{"empty", "", process{}, false},
		{"cut short", "42 (sleep) S 1 7 7", process{}, false},
		{"no number", "42 (sleep) S" + strings.Replace(rest, "123456", "x", 1), process{}, false},
	} {
		got, err := parseStat(42, []byte(tt.stat))
		if (err == nil) != tt.ok {
			t.Errorf("%s: error %v", tt.name, err)
		}
		if diff := cmp.Diff(tt.want, got, cmp.AllowUnexported(process{})); tt.ok && diff != "" {
			t.Errorf("%s: (-want +got)\n%s", tt.name, diff)
		}
	}
}

func FuzzParseStat(f *testing.F) {
	f.Add([]byte("42 (sleep) S 1 7 7 0 -1 4194304 100 0 0 0 1 2 0 0 20 0 3 0 123456 4096000 200"))
	f.Add([]byte(")"))
	f.Fuzz(func(_ *testing.T, stat []byte) { _, _ = parseStat(1, stat) })
}

func TestOver(t *testing.T) {
	for _, tt := range []struct {
		name string
		p    process
		want bool
	}{
		{"runs", process{state: 'R', threads: 1, size: 1}, false},
		{"is stopped", process{state: 'T', threads: 1, size: 1}, false},
		{"has ended", process{state: 'Z', threads: 1}, true},
		{"has ended but for a thread", process{state: 'Z', threads: 2}, false},
		{"has let go of its memory", process{state: 'D', threads: 1}, true},
	} {
		if got := tt.p.over(); got != tt.want {
			t.Errorf("%s: %t", tt.name, got)
		}
	}
}

func TestReadProcess(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	must(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill() })
	p, err := readProcess(cmd.Process.Pid)
	must(t, err)
	if p.start == 0 || p.over() {
		t.Errorf("%+v", p)
	}
	must(t, cmd.Process.Kill())
	for deadline := time.Now().Add(10 * time.Second); ; {
		if p, err = readProcess(cmd.Process.Pid); err != nil || p.over() {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("a killed process isn't over")
		}
	}
	_ = cmd.Wait()
	if _, err := readProcess(cmd.Process.Pid); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a process that was: %v", err)
	}
}
