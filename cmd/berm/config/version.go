package config

import (
	"runtime/debug"
	"strings"
)

// Version is the version of the build. The linker stamps it.
var Version = "devel"

// Revision is the commit, for a build that can't see it. The linker stamps it.
var Revision string

// VersionLine names the version, the commit if the build recorded it, and the Go version.
func VersionLine() string {
	line := "berm " + Version
	info, _ := debug.ReadBuildInfo() // a module's binary always has it
	if commit := Commit(info); commit != "" {
		line += ", commit " + commit
	}
	return line + ", " + info.GoVersion
}

// Commit returns the commit that a build recorded or was stamped with; empty if neither.
func Commit(info *debug.BuildInfo) string {
	if commit := Setting(info, "vcs.revision"); commit != "" {
		return commit
	}
	return strings.TrimPrefix(Revision, "unknown")
}

// Setting returns a setting of a build; empty if it has none of the name.
func Setting(info *debug.BuildInfo, key string) string {
	for _, s := range info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}
