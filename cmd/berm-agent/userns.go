package main

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"
)

// keepUserNS sets limits of this process's user namespace: "userns NAME=VALUE…", by their
// names below /proc/sys/user. It says so with an empty line, and keeps the namespace until
// its input ends.
func keepUserNS(limits []string) int {
	for _, limit := range limits {
		name, value, _ := strings.Cut(limit, "=")
		err := os.WriteFile("/proc/sys/user/"+name, []byte(value), 0)
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // an older kernel doesn't have all of them
			return complain(name+": "+reason(err), 1)
		}
	}
	_, _ = os.Stdout.WriteString("\n")
	_, _ = io.Copy(io.Discard, os.Stdin)
	return 0
}
