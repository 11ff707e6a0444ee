// Command attacker is what runs in a sandbox of the attack tests: each of its modes
// tries one way to hurt what isn't its own. It prints what came of it.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// The files by which a mode that goes on tells that it has begun, and is told to end.
const (
	onFile  = "/tmp/on"
	offFile = "/tmp/off"
)

func main() {
	if len(os.Args) < 2 {
		fail("usage: attacker MODE [ARG…]")
	}
	args := os.Args[2:]
	switch mode := os.Args[1]; mode {
	case "trace":
		try(traces())
	case "tamper":
		try(tampers())
	case "limit":
		limitInit()
	case "stop":
		stopAll()
	case "files":
		takeFiles()
	case "bomb":
		bomb()
	case "hog":
		hog()
	case "swap":
		swap(args[0], args[1])
	case "names":
		names(args[0])
	case "impostor":
		impostor()
	case "listen":
		listen(args[0], args[1])
	default:
		fail("no mode " + mode)
	}
}

func fail(why string) {
	fmt.Fprintln(os.Stderr, why)
	os.Exit(2)
}

func must(err error) {
	if err != nil {
		fail(err.Error())
	}
}

// begun says that a mode that goes on is at it.
func begun() { must(os.WriteFile(onFile, nil, 0o644)) }

// over tells whether it is to end.
func over() bool {
	_, err := os.Stat(offFile)
	return err == nil
}

func untilOver() {
	for !over() {
		time.Sleep(10 * time.Millisecond)
	}
}

// attempt is something that must not come off.
type attempt struct {
	name string
	do   func() error
}

// try tries, and prints a line for each: its name and the error, or "done".
func try(attempts []attempt) {
	for _, a := range attempts {
		how := "done"
		if err := a.do(); err != nil {
			how = "refused: " + err.Error()
		}
		fmt.Printf("%s: %s\n", a.name, how)
	}
}

// limitInit takes from the first process what a process of the same user may.
func limitInit() {
	for _, what := range []int{unix.RLIMIT_NOFILE, unix.RLIMIT_NPROC, unix.RLIMIT_FSIZE} {
		if err := unix.Prlimit(1, what, &unix.Rlimit{}, nil); err != nil {
			fmt.Println(err)
		}
	}
	fmt.Println("tried")
}

// stopAll freezes everything that it can see, again and again, but itself.
func stopAll() {
	begun()
	own := os.Getpid()
	for !over() {
		entries, err := os.ReadDir("/proc")
		must(err)
		for _, e := range entries {
			var pid int
			if _, err := fmt.Sscan(e.Name(), &pid); err == nil && pid != own {
				_ = unix.Kill(pid, unix.SIGSTOP)
			}
		}
	}
}

// takeFiles opens all files it can, and keeps them.
func takeFiles() {
	var limit unix.Rlimit
	must(unix.Getrlimit(unix.RLIMIT_NOFILE, &limit))
	limit.Cur = limit.Max
	_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &limit)
	must(os.WriteFile(onFile, nil, 0o644))
	taken := 0
	for taken < 1<<17 { // the machine's other tests need some, too
		if _, err := unix.Open("/dev/null", unix.O_RDONLY, 0); err != nil {
			break
		}
		taken++
	}
	fmt.Println("taken", taken)
	for unix.Access(offFile, unix.F_OK) != nil {
		time.Sleep(10 * time.Millisecond)
	}
}

// bomb forks without end, and so does whatever was forked. What has only one thread of
// this program does nothing else.
func bomb() {
	runtime.LockOSThread()
	debug.SetGCPercent(-1)
	for {
		_, _, _ = unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	}
}

func hog() {
	var kept [][]byte
	for {
		b := make([]byte, 1<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		kept = append(kept, b)
		if len(kept) > 1<<14 {
			fail("nothing ended it")
		}
	}
}

// swap exchanges two names without end.
func swap(a, b string) {
	signal.Ignore(unix.SIGHUP)
	begun()
	n := 0
	for !over() {
		for range 1000 {
			if unix.Renameat2(unix.AT_FDCWD, a, unix.AT_FDCWD, b, unix.RENAME_EXCHANGE) == nil {
				n++
			}
		}
	}
	fmt.Println("swapped", n > 0)
}

// nasty are names that a careless reader takes for something else.
var nasty = []string{
	"line\nbreak", "cr\rlf\r\n", "nul-ish\x01\x02\x1b[31m", "quote\"}],\"files\":[", "back\\slash\\u0000", "\xff\xfe", "half\xc3", "\xed\xa0\x80",
	"\xf4\x90\x80\x80", " ", "-rf", "\u2028\u2029", "\u202egnp", "data: {}\n\nevent: x", "<script>", strings.Repeat("\xfe", 255), strings.Repeat("\n", 255),
}

func names(dir string) {
	for _, name := range nasty {
		must(os.WriteFile(dir+"/"+name, []byte("needle "+name+"\n"), 0o644))
		must(os.Symlink(name, dir+"/l"+name[:min(len(name), 100)]))
	}
	fmt.Println(len(nasty))
}
