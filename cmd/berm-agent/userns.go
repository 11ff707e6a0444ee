package main

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"
)

// keepUserNS implements "userns NAME=VALUE…": it sets limits of this process's user namespace. The
// names are those below /proc/sys/user. It then prints an empty line, and keeps the namespace until its
// input ends.
func keepUserNS(limits []string) int {
	for _, limit := range limits {
		name, value, _ := strings.Cut(limit, "=")
		err := os.WriteFile("/proc/sys/user/"+name, []byte(value), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // an older kernel lacks some
			return complain(name+": "+reason(err), 1)
		}
	}
	_, _ = os.Stdout.WriteString("\n")
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 0
}
