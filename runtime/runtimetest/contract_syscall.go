package runtimetest

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	goruntime "runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
)

// syscallCases make system calls that no program of an image makes. They are for
// one architecture only, as are the programs.
func syscallCases() []contractCase {
	if goruntime.GOARCH != "amd64" {
		return nil
	}
	return []contractCase{inOne("create/system calls", (*fixture).spec,
		containerCase{"foreign", testForeignSyscalls},
		containerCase{"refused", testRefusedSyscalls},
		containerCase{"ioctl requests", testIoctls},
		containerCase{"set-user-id programs", testSetuid},
	)}
}

// tinyELF is a program of a few instructions.
func tinyELF(t *testing.T, bits int, code []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	put := func(values ...any) {
		for _, v := range values {
			must(t, binary.Write(&b, binary.LittleEndian, v))
		}
	}
	const base = 0x400000
	ident := func(class byte) []byte { return append([]byte{0x7f, 'E', 'L', 'F', class, 1, 1}, make([]byte, 9)...) }
	if bits == 32 {
		const head = 52 + 32
		size := uint32(head + len(code))
		put(ident(1), uint16(2), uint16(3), uint32(1), uint32(base+head), uint32(52), uint32(0), uint32(0),
			uint16(52), uint16(32), uint16(1), uint16(0), uint16(0), uint16(0),
			uint32(1), uint32(0), uint32(base), uint32(base), size, size, uint32(5), uint32(0x1000))
	} else {
		const head = 64 + 56
		size := uint64(head + len(code))
		put(ident(2), uint16(2), uint16(62), uint32(1), uint64(base+head), uint64(64), uint64(0), uint32(0),
			uint16(64), uint16(56), uint16(1), uint16(0), uint16(0), uint16(0),
			uint32(1), uint32(5), uint64(0), uint64(base), uint64(base), size, size, uint64(0x1000))
	}
	b.Write(code)
	return b.Bytes()
}

// errnoOf is the code of a program that makes one system call, of two arguments and
// zeros, and exits with the error number.
func errnoOf(number, first, second uint32) []byte {
	code := binary.LittleEndian.AppendUint32([]byte{0xb8}, number)      // mov eax
	code = binary.LittleEndian.AppendUint32(append(code, 0xbf), first)  // mov edi
	code = binary.LittleEndian.AppendUint32(append(code, 0xbe), second) // mov esi
	return append(code, 0x31, 0xd2, 0x4d, 0x31, 0xd2, 0x0f, 0x05,       // xor edx, edx; xor r10, r10; syscall
		0xf7, 0xd8, 0x89, 0xc7, // neg eax; mov edi, eax
		0xb8, 60, 0, 0, 0, 0x0f, 0x05) // exit
}

// SyscallProgram returns a static program for x86-64 that makes one system call, of two
// arguments and zeros, and exits with the error number.
func SyscallProgram(t *testing.T, number, first, second uint32) []byte {
	return tinyELF(t, 64, errnoOf(number, first, second))
}

// programs puts programs into the directory /t of a container.
func (b *fixture) programs(t *testing.T, id string, programs map[string][]byte) {
	t.Helper()
	for name, program := range programs {
		b.write(t, id, runtime.FileOp{Path: "/t/" + name, Mode: 0o755, Parents: true}, string(program))
	}
}

// testForeignSyscalls checks that system calls of other architectures kill the process.
func testForeignSyscalls(t *testing.T, b *fixture, id string) {
	// exit(42), by syscall, by int 0x80 in 64 and 32 bits, and as x32.
	programs := map[string][]byte{
		"native": tinyELF(t, 64, []byte{0xb8, 60, 0, 0, 0, 0xbf, 42, 0, 0, 0, 0x0f, 0x05, 0x0f, 0x0b}),
		"int80":  tinyELF(t, 64, []byte{0xb8, 1, 0, 0, 0, 0xbb, 42, 0, 0, 0, 0xcd, 0x80, 0x0f, 0x0b}),
		"i386":   tinyELF(t, 32, []byte{0xb8, 1, 0, 0, 0, 0xbb, 42, 0, 0, 0, 0xcd, 0x80, 0x0f, 0x0b}),
		"x32":    tinyELF(t, 64, []byte{0xb8, 60, 0, 0, 0x40, 0xbf, 42, 0, 0, 0, 0x0f, 0x05, 0x0f, 0x0b}),
	}
	b.programs(t, id, programs)
	no32 := lacks32(t, programs["i386"])
	for name, want := range map[string]int{"native": 42, "int80": 128 + 31, "i386": 128 + 31, "x32": 128 + 31} {
		_, _, code := b.run(t, id, runtime.Exec{Command: []string{"/t/" + name}})
		if no32 && code != 42 && (name == "int80" || name == "i386") {
			continue // the kernel has no such calls
		}
		if code != want {
			t.Errorf("%s: exit code %d, want %d", name, code, want)
		}
	}
}

// lacks32 reports whether this kernel can't run a program of 32 bits at all.
func lacks32(t *testing.T, program []byte) bool {
	t.Helper()
	file := filepath.Join(t.TempDir(), "i386")
	must(t, os.WriteFile(file, program, 0o755))
	return errors.Is(exec.CommandContext(t.Context(), file).Run(), unix.ENOEXEC)
}

// testRefusedSyscalls makes calls that any user may make, but for the profile.
func testRefusedSyscalls(t *testing.T, b *fixture, id string) {
	const eperm = 1
	calls := map[string][]byte{
		"keyctl":         errnoOf(250, 0, 0xfffffffd), // the serial number of the session's keyring
		"add_key":        errnoOf(248, 0, 0),
		"io_uring_setup": errnoOf(425, 1, 0),
		"unshare":        errnoOf(272, 0x10000000, 0), // a user namespace
		"userfaultfd":    errnoOf(323, 1, 0),
		"io_setup":       errnoOf(206, 1, 0),
		"a project":      errnoOf(16, 0xffffffff, 0x401c5820), // FS_IOC_FSSETXATTR
		"flags":          errnoOf(16, 0xffffffff, 0x40086602), // FS_IOC_SETFLAGS
	}
	programs := map[string][]byte{"getpid": tinyELF(t, 64, errnoOf(39, 0, 0))}
	for name, code := range calls {
		programs[name] = tinyELF(t, 64, code)
	}
	b.programs(t, id, programs)
	for name := range calls {
		if _, _, code := b.run(t, id, runtime.Exec{Command: []string{"/t/" + name}}); code != eperm {
			t.Errorf("%s: error number %d, want EPERM", name, code)
		}
	}
	if _, _, code := b.run(t, id, runtime.Exec{Command: []string{"/t/getpid"}}); code == eperm {
		t.Error("getpid is refused, too: the programs prove nothing")
	}
}

// testIoctls makes ioctl requests with all values of the lower 16 bits, on no file, which
// is another error than what the profile refuses: FS_IOC_FSSETXATTR and FS_IOC_SETFLAGS,
// whatever is above, and nothing else.
func testIoctls(t *testing.T, b *fixture, id string) {
	// The exit code is the number of those that answered EPERM.
	count := func(above uint64) []byte {
		code := []byte{0x31, 0xdb, 0x45, 0x31, 0xe4} // xor ebx, ebx; xor r12d, r12d
		loop := len(code)
		code = binary.LittleEndian.AppendUint64(append(code, 0x48, 0xbe), above) // movabs rsi
		code = append(code, 0x48, 0x09, 0xde, 0xbf, 0xff, 0xff, 0xff, 0xff,      // or rsi, rbx; mov edi, -1
			0x31, 0xd2, 0xb8, 16, 0, 0, 0, 0x0f, 0x05, // xor edx, edx; mov eax, 16; syscall
			0x83, 0xf8, 0xff, 0x75, 3, 0x41, 0xff, 0xc4, // cmp eax, -1; jne +3; inc r12d
			0xff, 0xc3, 0x81, 0xfb, 0, 0, 1, 0) // inc ebx; cmp ebx, 65536
		code = append(code, 0x75, byte(loop-len(code)-2))                    // jne loop
		return append(code, 0x44, 0x89, 0xe7, 0xb8, 60, 0, 0, 0, 0x0f, 0x05) // mov edi, r12d; exit
	}
	b.programs(t, id, map[string][]byte{
		"usual":    tinyELF(t, 64, count(0x401c0000)),
		"extended": tinyELF(t, 64, count(0xffffffff80040000)), // as C libraries with an int do
		"none":     tinyELF(t, 64, count(0)),
		// file_setattr(2): not there, or refused, but never a complaint about its arguments.
		"file_setattr": tinyELF(t, 64, errnoOf(469, 0xffffffff, 0)),
	})
	for _, name := range []string{"usual", "extended", "none"} {
		if _, _, refused := b.run(t, id, runtime.Exec{Command: []string{"/t/" + name}}); refused != 2 {
			t.Errorf("%s: %d requests are refused, want 2", name, refused)
		}
	}
	const eperm, enosys = 1, 38
	if _, _, code := b.run(t, id, runtime.Exec{Command: []string{"/t/file_setattr"}}); code != eperm && code != enosys {
		t.Errorf("file_setattr: error number %d, want EPERM or ENOSYS", code)
	}
}

// testSetuid runs a program that belongs to root, with the bit set, as another user.
func testSetuid(t *testing.T, b *fixture, id string) {
	// exit(geteuid())
	b.programs(t, id, map[string][]byte{"euid": tinyELF(t, 64, []byte{0xb8, 107, 0, 0, 0, 0x0f, 0x05, 0x89, 0xc7, 0xb8, 60, 0, 0, 0, 0x0f, 0x05})})
	b.output(t, id, "sh", "-c", "chmod 4755 /t/euid && test -u /t/euid")
	for _, user := range []string{"0:0", "7:7"} {
		_, _, code := b.run(t, id, runtime.Exec{Command: []string{"/t/euid"}, User: user})
		if want := int(user[0] - '0'); code != want {
			t.Errorf("as user %s it ran as %d", user, code)
		}
	}
}
