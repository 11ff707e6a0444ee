package main

import (
	"bytes"
	"debug/buildinfo"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

func newVersionCommand() *cobra.Command {
	var output string
	var sbom bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version, the commit and the Go version, or all that went into this binary",
		Long: `Print the version, the commit and the Go version. With -o json also the modules
that this binary was built from, and those of the berm-agent in it; with --sbom the
same as a bill of materials in CycloneDX 1.5.`,
		Example: "  berm version\n  berm version -o json\n  berm version --sbom > berm.cdx.json",
		Args:    cobra.NoArgs,
		RunE: action(func(cmd *cobra.Command, _ []string) error {
			if output != "text" && output != "json" {
				return &exitError{code: exitUsage, err: fmt.Errorf("--output is %q, want text or json", output)}
			}
			if output == "text" && !sbom {
				_, err := fmt.Fprintln(cmd.OutOrStdout(), versionLine())
				return err
			}
			about, err := aboutBuild()
			if err != nil {
				return err
			}
			if sbom {
				return writeJSON(cmd.OutOrStdout(), about.bill())
			}
			return writeJSON(cmd.OutOrStdout(), about)
		}),
	}
	cmd.Flags().StringVarP(&output, "output", "o", "text", "text or json")
	cmd.Flags().BoolVar(&sbom, "sbom", false, "print a bill of materials, CycloneDX JSON")
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]cobra.Completion{"text", "json"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// versionLine tells what this binary was built from. The commit is known when the
// build recorded it.
func versionLine() string {
	line := "berm " + version
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return line
	}
	if commit := commitOf(info); commit != "" {
		line += ", commit " + commit
	}
	return line + ", " + info.GoVersion
}

// commitOf is the commit that a build recorded, or was told; empty if neither.
func commitOf(info *debug.BuildInfo) string {
	if commit := setting(info, "vcs.revision"); commit != "" {
		return commit
	}
	return strings.TrimPrefix(revision, "unknown")
}

func setting(info *debug.BuildInfo, key string) string {
	for _, s := range info.Settings {
		if s.Key == key {
			return s.Value
		}
	}
	return ""
}

// buildAbout is what a build recorded of itself.
type buildAbout struct {
	Version   string        `json:"version"`
	Commit    string        `json:"commit,omitempty"`
	Time      string        `json:"time,omitempty"`     // of the commit, RFC 3339
	Modified  bool          `json:"modified,omitempty"` // the sources weren't quite that commit's
	GoVersion string        `json:"go_version"`
	Platform  string        `json:"platform"`
	Modules   []buildModule `json:"modules"`
	Agent     *agentAbout   `json:"agent,omitempty"` // nil in a build without it
}

type buildModule struct {
	Path    string `json:"path"`
	Version string `json:"version"`
	Sum     string `json:"sum,omitempty"` // as in go.sum
}

type agentAbout struct {
	GoVersion string        `json:"go_version"`
	Modules   []buildModule `json:"modules"`
}

func aboutBuild() (*buildAbout, error) {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return nil, errors.New("this binary carries no build information")
	}
	about := &buildAbout{
		Version: version, Commit: commitOf(info), Time: setting(info, "vcs.time"), Modified: setting(info, "vcs.modified") == "true",
		GoVersion: info.GoVersion, Platform: setting(info, "GOOS") + "/" + setting(info, "GOARCH"), Modules: modulesOf(info),
	}
	program, err := builtinAgent()
	if errors.Is(err, errNoAgent) {
		return about, nil
	}
	if err != nil {
		return nil, err
	}
	inner, err := buildinfo.Read(bytes.NewReader(program))
	if err != nil {
		return nil, fmt.Errorf("read the build information of berm-agent: %w", err)
	}
	about.Agent = &agentAbout{GoVersion: inner.GoVersion, Modules: modulesOf(inner)}
	return about, nil
}

// modulesOf are the modules whose code is in a program, but for its own.
func modulesOf(info *debug.BuildInfo) []buildModule {
	modules := []buildModule{}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		modules = append(modules, buildModule{Path: m.Path, Version: m.Version, Sum: m.Sum})
	}
	return modules
}

// A bill of materials as CycloneDX 1.5 has it, as far as it is used here.
type bill struct {
	Format      string       `json:"bomFormat"`
	SpecVersion string       `json:"specVersion"`
	Version     int          `json:"version"`
	Metadata    billMetadata `json:"metadata"`
	Components  []billPart   `json:"components"`
}

type billMetadata struct {
	Timestamp string   `json:"timestamp,omitempty"`
	Component billPart `json:"component"`
}

type billPart struct {
	Type       string         `json:"type"`
	Ref        string         `json:"bom-ref"`
	Name       string         `json:"name"`
	Version    string         `json:"version"`
	PURL       string         `json:"purl,omitempty"`
	Properties []billProperty `json:"properties,omitempty"`
}

type billProperty struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// bill is the same each time for the same binary.
func (b *buildAbout) bill() bill {
	const self = "pkg:golang/github.com/bermhq/berm"
	part := func(kind, name, version string, properties ...billProperty) billPart {
		purl := "pkg:golang/" + name + "@" + version
		return billPart{kind, purl, name, version, purl, properties}
	}
	own := billPart{
		Type: "application", Ref: self + "@" + b.Version, Name: "berm", Version: b.Version, PURL: self + "@" + b.Version,
		Properties: []billProperty{{"berm:platform", b.Platform}},
	}
	if b.Commit != "" {
		own.Properties = append(own.Properties, billProperty{"berm:commit", b.Commit})
	}
	std := func(version string) billPart { return part("library", "std", strings.TrimPrefix(version, "go")) }
	parts := []billPart{std(b.GoVersion)}
	add := func(modules []buildModule) {
		for _, m := range modules {
			var properties []billProperty
			if m.Sum != "" {
				properties = append(properties, billProperty{"go:sum", m.Sum})
			}
			parts = append(parts, part("library", m.Path, m.Version, properties...))
		}
	}
	add(b.Modules)
	if b.Agent != nil {
		parts = append(parts, billPart{
			Type: "application", Ref: self + "/cmd/berm-agent@" + b.Version, Name: "berm-agent", Version: b.Version,
			PURL: self + "@" + b.Version + "#cmd/berm-agent",
		}, std(b.Agent.GoVersion))
		add(b.Agent.Modules)
	}
	slices.SortStableFunc(parts, func(x, y billPart) int { return strings.Compare(x.Ref, y.Ref) })
	parts = slices.CompactFunc(parts, func(x, y billPart) bool { return x.Ref == y.Ref })
	return bill{"CycloneDX", "1.5", 1, billMetadata{b.Time, own}, parts}
}
