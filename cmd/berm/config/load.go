package config

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/moby/buildkit/util/suggest"

	"github.com/bermhq/berm/policy"
)

// maxFileBytes bounds the file; a real one is a few kilobytes.
const maxFileBytes = 1 << 20

// Options say where the settings come from. The zero value gives the defaults.
type Options struct {
	File    string            // path of the YAML file; empty is none
	Environ []string          // "NAME=value", as os.Environ returns it
	Flags   map[string]string // by key ("http.listen"), with values written as in the environment
}

// Load reads the file, the environment and the flags, where each overrides the one before, and
// validates the result. The error joins all mistakes.
func Load(opts Options) (*Config, error) {
	if opts.File == "" {
		return parse(nil, opts)
	}
	data, err := ReadFile(opts.File, maxFileBytes)
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	c, err := parse(data, opts)
	if err != nil {
		return nil, err
	}
	c.file, err = filepath.Abs(opts.File)
	return c, err
}

// File is the absolute path of the file that the configuration was read from; empty without one.
func (c *Config) File() string { return c.file }

// ReadFile reads a file. It fails if the file has more than most bytes.
func ReadFile(path string, most int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > most {
		return nil, fmt.Errorf("%s is larger than %d bytes", path, most)
	}
	return data, nil
}

func parse(data []byte, opts Options) (*Config, error) {
	c := Default()
	c.source = map[string]string{}
	l := loader{config: c, fields: map[string]field{}, sections: map[string]bool{}}
	for _, f := range fields(c) {
		l.fields[f.key] = f
		if section, _, ok := strings.Cut(f.key, "."); ok {
			l.sections[section] = true
		}
	}
	l.file(data)
	l.environ(opts.Environ)
	l.flags(opts.Flags)
	l.errs = append(l.errs, c.validate()...)
	if len(l.errs) > 0 {
		return nil, errors.Join(l.errs...)
	}
	return c, nil
}

const metricsRemoved = "remove it; /metrics is always served, to tokens with the scope status:read"

// removed maps keys of earlier versions to what to do about them.
var removed = map[string]string{
	"engine.agent_file":    "remove it; berm-agent is built in",
	"metrics":              metricsRemoved,
	"metrics.enabled":      metricsRemoved,
	"sandbox.max_queued":   "remove it; 64 commands may wait for their turn in a sandbox",
	"sandbox.port_timeout": "remove it; a port has a minute to answer",
	"tracing.enabled":      "remove it; tracing.sample_ratio: 0 sends no traces",
}

type loader struct {
	config   *Config
	fields   map[string]field
	sections map[string]bool
	errs     []error
}

func (l *loader) errorf(format string, args ...any) {
	l.errs = append(l.errs, fmt.Errorf(format, args...))
}

// file takes the settings of a YAML document.
func (l *loader) file(data []byte) {
	doc := policy.Decode(data, l.config)
	bad := map[string]bool{}
	for _, p := range doc.Problems {
		bad[fieldOf(p.Path)] = true
		switch todo := removed[p.Path]; {
		case todo != "":
			l.errorf("line %d: %s: no longer a key: %s", p.Line, p.Path, todo)
		case p.Path == "":
			l.errorf("configuration file: %s", p.Message)
		default:
			l.errorf("%s", p)
		}
	}
	for _, path := range doc.Nulls {
		l.errorf("line %d: %s: has no value", doc.Lines[path], path)
		bad[fieldOf(path)] = true
	}
	defaults := fields(Default())
	for i, f := range fields(l.config) {
		switch line := doc.Lines[f.key]; {
		case bad[f.key]: // the default keeps validate from reporting the key again
			f.value.Set(defaults[i].value)
		case line == 0:
		case f.secret == "true":
			l.errorf("line %d: %s: a secret doesn't belong into the file; set %s, or name a file", line, f.key, f.env())
		default:
			l.config.source[f.key] = "file"
		}
	}
}

// fieldOf returns the key of the setting that a path in the document belongs to.
func fieldOf(path string) string {
	path, _, _ = strings.Cut(path, "[")
	if parts := strings.Split(path, "."); len(parts) > 2 {
		path = parts[0] + "." + parts[1]
	}
	return path
}

// environ takes the settings of environment variables. A variable that begins with BERM_ and a
// section's name must name a key. Other BERM_ variables, such as those of the client, are
// ignored.
func (l *loader) environ(environ []string) {
	byEnv := map[string]field{}
	for _, f := range l.fields {
		byEnv[f.env()] = f
	}
	for key := range removed {
		f := field{key: key}
		byEnv[f.env()] = f
	}
	for _, kv := range environ {
		name, value, _ := strings.Cut(kv, "=")
		if f, ok := byEnv[name]; ok {
			if todo := removed[f.key]; todo != "" {
				l.errorf("%s: no longer a key: %s", name, todo)
			} else {
				l.override(f, value, name)
			}
			continue
		}
		rest, ours := strings.CutPrefix(name, "BERM_")
		section, _, sub := strings.Cut(rest, "_")
		if ours && sub && l.sections[strings.ToLower(section)] {
			near := ""
			if match, ok := suggest.Search(name, slices.Sorted(maps.Keys(byEnv)), true); ok {
				near = "; did you mean " + match + "?"
			}
			l.errorf("%s: unknown key%s", name, near)
		}
	}
}

func (l *loader) flags(flags map[string]string) {
	for _, key := range slices.Sorted(maps.Keys(flags)) {
		l.override(l.fields[key], flags[key], "flag")
	}
}

// override sets a field from text. It takes a string as it is, and splits a list of strings at
// commas. It decodes everything else, and a list in brackets, as YAML.
func (l *loader) override(f field, text, source string) {
	bare := strings.TrimSpace(text)
	var doc *policy.Document
	switch kind := f.value.Kind(); {
	case kind == reflect.String:
		f.value.SetString(text)
	case kind == reflect.Slice && !strings.HasPrefix(bare, "[") && (f.value.Type().Elem().Kind() == reflect.String || bare == ""):
		list := reflect.MakeSlice(f.value.Type(), 0, 0)
		for part := range strings.SplitSeq(text, ",") {
			if part = strings.TrimSpace(part); part != "" {
				list = reflect.Append(list, reflect.ValueOf(part))
			}
		}
		f.value.Set(list)
	default:
		doc = policy.Decode([]byte(text), f.value.Addr().Interface())
		if bare == "" || len(doc.Nulls) > 0 {
			l.errorf("%s (from %s): has no value", f.key, source)
			return
		}
	}
	if doc == nil || len(doc.Problems) == 0 {
		l.config.source[f.key] = source
		return
	}
	for _, p := range doc.Problems {
		key, message := f.key, p.Message
		switch {
		case p.Path == "" && !strings.HasPrefix(message, "must be"):
			message = "not a value of this key" // the parser's own would quote the value
		case p.Path != "" && !strings.HasPrefix(p.Path, "["):
			key += "."
		}
		l.errorf("%s (from %s): %s", key+p.Path, source, message)
	}
}
