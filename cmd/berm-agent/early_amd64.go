package main

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Each command that an engine starts comes through this program, and where cgroups are
// hybrid each call of crun. Go takes longer to begin than becoming either does: 1.7 ms,
// with threads that are made, and have to end. So that is done before, where it is plain.

// enter is where the kernel begins this program, if it is linked so: -E main.enter. It
// calls early, and goes on to where Go begins.
func enter()

// early is how enter finds the function: what is called by its name from there takes its
// argument in another way.
var early = becomeEarly

var _, _ = enter, early // used where a linter doesn't look

// becomeEarly becomes a command ("exec", see become) or crun ("--root", see becomeCrun)
// where nothing is amiss. It gets the stack as the kernel gives it: the number of
// arguments, the arguments, the environment. Else it comes back, and all is done again by
// those who have the words for what is wrong.
//
// There is nothing of Go yet: no memory to be had, no stack to grow, no panic.
//
//go:nosplit
//go:norace
func becomeEarly(stack unsafe.Pointer) {
	argc, argv := uintptr(word(stack, 0)), unsafe.Add(stack, wordSize)
	env := unsafe.Add(argv, (argc+1)*wordSize)
	var home, list unsafe.Pointer
	for i := uintptr(0); word(env, i) != nil; i++ { // the first of a name counts
		if home == nil {
			home = after(word(env, i), "HOME=")
		}
		if list == nil {
			list = after(word(env, i), "PATH=")
		}
	}
	switch {
	case argc > 1 && after(word(argv, 1), "--root\x00") != nil:
		crunEarly(list, argv, env)
	case argc < 5 || after(word(argv, 1), "exec\x00") == nil || after(word(argv, 3), "--\x00") == nil:
	case home == nil || char(home) == 0: // see setHome
	case char(word(argv, 2)) != '/' || char(word(argv, 4)) == 0: // a relative directory can't be entered twice
	case call(syscall.SYS_CHDIR, uintptr(word(argv, 2)), 0, 0) == 0:
		execEarly(list, unsafe.Add(argv, 4*wordSize), env)
	}
}

//go:nosplit
//go:norace
func execEarly(list, argv, env unsafe.Pointer) {
	command := word(argv, 0)
	for c := command; char(c) != 0; c = unsafe.Add(c, 1) {
		if char(c) == '/' {
			_ = call(syscall.SYS_EXECVE, uintptr(command), uintptr(argv), uintptr(env))
			return
		}
	}
	for list != nil {
		var fits bool
		if list, fits = inNext(list, command); !fits {
			continue
		}
		path := uintptr(unsafe.Pointer(&earlyPath))
		errno := call(syscall.SYS_EXECVE, path, uintptr(argv), uintptr(env))
		missing := errno == syscall.ENOENT || errno == syscall.ENOTDIR
		if !missing || call(syscall.SYS_ACCESS, path, 0, 0) == 0 { // its interpreter may be what is missing
			return
		}
	}
}

//go:nosplit
//go:norace
func crunEarly(list, argv, env unsafe.Pointer) {
	crun, root, none := text("crun\x00"), text("/\x00"), text("\x00")
	unified, tmpfs, options := text(unifiedCgroup+"\x00"), text("tmpfs\x00"), text(coverOptions+"\x00")
	path := uintptr(unsafe.Pointer(&earlyPath))
	for list != nil {
		var fits bool
		if list, fits = inNext(list, crun); !fits || call(syscall.SYS_ACCESS, path, unix.X_OK, 0) != 0 {
			continue
		}
		if call(syscall.SYS_UNSHARE, syscall.CLONE_NEWNS, 0, 0) != 0 {
			return
		}
		if mount(none, root, none, unix.MS_SLAVE|unix.MS_REC, none) != 0 || mount(tmpfs, unified, tmpfs, coverFlags, options) != 0 {
			return
		}
		*(*uintptr)(argv) = uintptr(crun)
		_ = call(syscall.SYS_EXECVE, path, uintptr(argv), uintptr(env))
		return
	}
}

// earlyPath is where a program is looked for.
var earlyPath [earlySize]byte

const (
	earlySize = 4096
	wordSize  = unsafe.Sizeof(uintptr(0))
)

// inNext makes the path of a program in the first directory of a list, and answers the rest
// of that, nil if there is none. An empty one is left out, as is what is too long.
//
//go:nosplit
//go:norace
func inNext(list, name unsafe.Pointer) (rest unsafe.Pointer, fits bool) {
	n, end := put(0, list, ':')
	fits = n > 0
	for char(end) != 0 && char(end) != ':' {
		end = unsafe.Add(end, 1)
	}
	if char(end) != 0 {
		rest = unsafe.Add(end, 1)
	}
	n, _ = put(n, text("/\x00"), 0)
	n, _ = put(n, name, 0)
	return rest, fits && n < earlySize-1
}

// put copies a string, up to its end or a byte, to a place in the path, as much as there
// is room for. It answers where that ended, in both.
//
//go:nosplit
//go:norace
func put(n uintptr, from unsafe.Pointer, stop byte) (uintptr, unsafe.Pointer) {
	for ; n < earlySize-1 && char(from) != 0 && char(from) != stop; n++ {
		*(*byte)(unsafe.Add(unsafe.Pointer(&earlyPath), n)) = char(from)
		from = unsafe.Add(from, 1)
	}
	*(*byte)(unsafe.Add(unsafe.Pointer(&earlyPath), n)) = 0
	return n, from
}

// text is a string that ends with a zero byte, as the kernel takes it.
//
//go:nosplit
//go:norace
func text(s string) unsafe.Pointer { return unsafe.Pointer(unsafe.StringData(s)) }

// word is one of a list of pointers.
//
//go:nosplit
//go:norace
func word(list unsafe.Pointer, i uintptr) unsafe.Pointer {
	return *(*unsafe.Pointer)(unsafe.Add(list, i*wordSize))
}

//go:nosplit
//go:norace
func char(at unsafe.Pointer) byte { return *(*byte)(at) }

// after is what follows in a string that begins so; nil is that it doesn't.
//
//go:nosplit
//go:norace
func after(s unsafe.Pointer, prefix string) unsafe.Pointer {
	for i := range len(prefix) {
		if char(s) != prefix[i] {
			return nil
		}
		s = unsafe.Add(s, 1)
	}
	return s
}

//go:nosplit
//go:norace
func call(number, a, b, c uintptr) syscall.Errno {
	_, _, errno := syscall.RawSyscall(number, a, b, c)
	return errno
}

//go:nosplit
//go:norace
func mount(source, target, kind unsafe.Pointer, flags uintptr, options unsafe.Pointer) syscall.Errno {
	_, _, errno := syscall.RawSyscall6(syscall.SYS_MOUNT, uintptr(source), uintptr(target), uintptr(kind), flags, uintptr(options), 0)
	return errno
}
