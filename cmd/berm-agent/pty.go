package main

import (
	"cmp"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
)

const (
	defaultRows = 24
	defaultCols = 80
)

// openPTY opens a pseudo-terminal: the master for this process, and the other side for a program.
func openPTY(rows, cols int) (mine, its *os.File, err error) {
	const master = "/dev/ptmx"
	fd, err := unix.Open(master, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, &os.PathError{Op: "open", Path: master, Err: err}
	}
	defer func() {
		if err != nil {
			_ = unix.Close(fd)
		}
	}()
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		return nil, nil, &os.PathError{Op: "unlock", Path: master, Err: err}
	}
	n, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		return nil, nil, &os.PathError{Op: "find the other side of", Path: master, Err: err}
	}
	if err := setSize(fd, rows, cols); err != nil {
		return nil, nil, &os.PathError{Op: "set the size of", Path: master, Err: err}
	}
	// os.OpenFile would make it non-blocking, which programs don't expect of a terminal.
	other := "/dev/pts/" + strconv.Itoa(n)
	itsFd, err := unix.Open(other, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, &os.PathError{Op: "open", Path: other, Err: err}
	}
	return os.NewFile(uintptr(fd), master), os.NewFile(uintptr(itsFd), other), nil
}

// setSize sets the size of a terminal; 0 is the default.
func setSize(fd, rows, cols int) error {
	return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: uint16(cmp.Or(rows, defaultRows)), Col: uint16(cmp.Or(cols, defaultCols))})
}

// endOfFile is the character that ends a terminal's input.
func endOfFile(fd int) []byte {
	if t, err := unix.IoctlGetTermios(fd, unix.TCGETS); err == nil {
		return t.Cc[unix.VEOF : unix.VEOF+1]
	}
	return []byte{4}
}
