package wire

import (
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"
)

// Bounds of processes.
const (
	MaxID       = 128
	MaxLabel    = 1 << 10
	MaxKeep     = 4 << 20
	MaxTerminal = 1<<16 - 1
	MaxSignal   = 64
	MaxTimeout  = int64(1<<63-1) / 1e6 // milliseconds
)

// CheckID returns an error if id can't be the ID of a process.
func CheckID(id string) error {
	ok := id != "" && len(id) <= MaxID
	for i := 0; ok && i < len(id); i++ {
		c := id[i]
		ok = c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || i > 0 && strings.IndexByte("_.:-", c) >= 0
	}
	if !ok {
		return fmt.Errorf("the process ID %.200q isn't of the form [A-Za-z0-9][A-Za-z0-9_.:-]{0,%d}", id, MaxID-1)
	}
	return nil
}

// Check returns an error if s is invalid, whatever is in the container.
func (s *Start) Check() error {
	if s == nil {
		return errors.New("there is nothing to start")
	}
	if err := CheckID(s.ID); err != nil {
		return err
	}
	switch {
	case len(s.Command) == 0:
		return errors.New("the command is empty")
	case len(s.Label) > MaxLabel:
		return fmt.Errorf("the label has %d bytes, and may have %d", len(s.Label), MaxLabel)
	case s.Dir != "" && s.Dir[0] != '/':
		return fmt.Errorf("the working directory %.200q is not absolute", s.Dir)
	case s.TimeoutMS < 0 || s.TimeoutMS > MaxTimeout:
		return fmt.Errorf("a timeout of %d ms", s.TimeoutMS)
	case s.KeepBytes < 0 || s.KeepBytes > MaxKeep:
		return fmt.Errorf("%d bytes of output to keep: at most %d can be", s.KeepBytes, MaxKeep)
	case s.Exec && s.Follow == nil:
		return errors.New("nobody would follow it")
	}
	for _, e := range s.Env {
		if strings.IndexByte(e, '=') < 1 {
			return fmt.Errorf("the environment has %.200q, which isn't NAME=value", e)
		}
	}
	for _, list := range [][]string{s.Command, s.Env, {s.Dir, s.Label}} {
		for _, text := range list {
			if strings.IndexByte(text, 0) >= 0 || !utf8.ValidString(text) { // JSON would change them
				return fmt.Errorf("a command, its environment, directory and label are UTF-8 without zero bytes, which %.100q is not", text)
			}
		}
	}
	return CheckSize(s.Rows, s.Cols)
}

// CheckSize returns an error if a terminal can't have this size. 0 is the default.
func CheckSize(rows, cols int) error {
	if rows < 0 || rows > MaxTerminal || cols < 0 || cols > MaxTerminal {
		return fmt.Errorf("a terminal of %d rows and %d columns: each can be 0 to %d", rows, cols, MaxTerminal)
	}
	return nil
}

// CheckSignal returns an error if there is no such signal.
func CheckSignal(signal int) error {
	if signal < 1 || signal > MaxSignal {
		return fmt.Errorf("there is no signal %d: 1 to %d are", signal, MaxSignal)
	}
	return nil
}
