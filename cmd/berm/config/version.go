package config

import (
	"runtime/debug"
	"strings"
)

// Version is the version of the build, and Revision the commit for builds that can't see
// it. The linker stamps both.
var Version, Revision = "devel", ""

// VersionLine tells what this binary was built from. The commit is known when the
// build recorded it.
func VersionLine() string {
	line := "berm " + Version
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return line
	}
	if commit := Commit(info); commit != "" {
		line += ", commit " + commit
	}
	return line + ", " + info.GoVersion
}

// Commit is the commit that a build recorded, or was told; empty if neither.
func Commit(info *debug.BuildInfo) string {
	if commit := Setting(info, "vcs.revision"); commit != "" {
		return commit
	}
	return strings.TrimPrefix(Revision, "unknown")
}

func Setting(info *debug.BuildInfo, key string) string {
	for _, s := range info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}
