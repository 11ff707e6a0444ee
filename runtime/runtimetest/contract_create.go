package runtimetest

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/runtime"
)

// createCases are about what a spec may hold.
func createCases() []contractCase {
	return []contractCase{
		{"create/name wanted by many", testCreateNameWanted},
		{"create/long name", testLongName},
		{"create/odd labels", testOddLabels},
		{"create/odd environment", testOddEnvironment},
		{"inspect/odd ids", testOddIDs},
		{"image/configuration", testImageConfiguration},
	}
}

// testCreateNameWanted checks that one of many creates gets the name, and that the others
// leave its container alone.
func testCreateNameWanted(t *testing.T, b *fixture) {
	spec := b.spec()
	var mu sync.Mutex
	var made []string
	var wg sync.WaitGroup
	for range 6 {
		wg.Go(func() {
			c, err := b.rt.Create(b.ctx, spec)
			if err != nil {
				class(t, "one of those without the name", err, errdefs.IsAlreadyExists, "AlreadyExists")
				return
			}
			mu.Lock()
			defer mu.Unlock()
			made = append(made, c.ID)
		})
	}
	wg.Wait()
	cs := b.list(t)
	if len(made) != 1 || len(cs) != 1 || cs[0].ID != made[0] || cs[0].State != runtime.StateRunning {
		t.Fatalf("made %v, there is %+v", made, cs)
	}
	b.alive(t, made[0])
	must(t, b.rt.Remove(b.ctx, made[0]))
	b.create(t, spec)
}

func testLongName(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.Name += "-_." + strings.Repeat("Xy0", 40)
	spec.Name = spec.Name[:128]
	spec.Hostname = strings.Repeat("h", 63)
	c := b.create(t, spec)
	if got := b.inspect(t, c.ID).Name; got != spec.Name {
		t.Errorf("name %q, want %q", got, spec.Name)
	}
	if cs := b.list(t); len(cs) != 1 || cs[0].Name != spec.Name {
		t.Errorf("listed: %+v", cs)
	}
	if b.Real {
		if got := b.output(t, c.ID, "hostname"); got != spec.Hostname {
			t.Errorf("host name %q, want %q", got, spec.Hostname)
		}
	}
	_, err := b.rt.Create(b.ctx, spec)
	class(t, "the second create", err, errdefs.IsAlreadyExists, "AlreadyExists")
}

// testOddLabels checks that labels come back, and are found by, whatever they hold. A
// sandbox's whole spec is in one label, and the names of its variables, 512 of up to 255
// characters, are in another.
func testOddLabels(t *testing.T, b *fixture) {
	values := map[string]string{
		"quotes":   `with "double" and 'single' ones`,
		"commas":   "a,b,,c,",
		"equals":   "a=b==c!=d~=e",
		"unicode":  "ünïcödé ✓ 世界 \U0001F512",
		"spaces":   " leading and trailing ",
		"lines":    "one\ntwo\ttabbed\r\n",
		"slashes":  `back\slash /and\\other`,
		"brackets": `{"json": ["{{.}}", "$(x)", "` + "`y`" + `"]}`,
		"regular":  "^.*$",
		"ours":     "berm.containerd.empty", // what a backend may write in another's place
		"ours-too": "berm.containerd.sha256:0000",
		"long":     strings.Repeat("0123456789abcdef", 200), // as an engine's own limit would have it
		"longer":   strings.Repeat("A_LONG_NAME,", 4<<10/12+1)[:4<<10],
		"large":    strings.Repeat("A_LONG_NAME,", 16<<10/12+1)[:16<<10],
		"largest":  strings.Repeat("A_LONG_NAME,", 512*256/12+1)[:512*256-1],
	}
	spec, other := b.spec(), b.spec()
	for name, value := range values {
		spec.Labels["berm.contract-"+name] = value
		other.Labels["berm.contract-"+name] = value + "x"
	}
	c := b.create(t, spec)
	b.create(t, other)
	for how, got := range map[string]runtime.Container{"created": c, "inspected": b.inspect(t, c.ID)} {
		for name, value := range spec.Labels {
			if got.Labels[name] != value {
				t.Errorf("%s: label %s is %.100q, %d bytes, want %.100q, %d bytes", how, name, got.Labels[name], len(got.Labels[name]), value, len(value))
			}
		}
		if len(got.Labels) != len(spec.Labels) {
			t.Errorf("%s: %d labels, want %d", how, len(got.Labels), len(spec.Labels))
		}
	}
	names := map[string]string{labelCase: b.name}
	for name := range values {
		key := "berm.contract-" + name
		names[key] = ""
		cs, err := b.rt.List(b.ctx, map[string]string{labelCase: b.name, key: spec.Labels[key]})
		if err != nil || len(cs) != 1 || cs[0].ID != c.ID || cs[0].Labels[key] != spec.Labels[key] {
			t.Errorf("list by %s: %d, %v", name, len(cs), err)
		}
	}
	cs, err := b.rt.List(b.ctx, spec.Labels)
	if err != nil || len(cs) != 1 || cs[0].ID != c.ID {
		t.Errorf("list by all: %d, %v", len(cs), err)
	}
	if cs, err := b.rt.List(b.ctx, names); err != nil || len(cs) != 2 {
		t.Errorf("list by all names: %d, %v", len(cs), err)
	}
}

// testOddEnvironment uses any characters, and as many as the policy allows.
func testOddEnvironment(t *testing.T, b *fixture) {
	spec := b.spec()
	spec.Env = []string{`QUOTES="double" and 'single'`, "UNICODE=ünïcödé ✓ 世界", "SHELL_LIKE=$HOME `id` $(id) \\"}
	for i := range 4 {
		spec.Env = append(spec.Env, fmt.Sprintf("BIG%d=%s", i, strings.Repeat(string(rune('a'+i)), 60<<10)))
	}
	c := b.create(t, spec)
	inspected := b.inspect(t, c.ID).Env
	inside := strings.Split(b.output(t, c.ID, "env"), "\n")
	for _, v := range spec.Env {
		if !slices.Contains(inspected, v) || !slices.Contains(c.Env, v) {
			t.Errorf("%.40s… isn't in the container's Env", v)
		}
		if !slices.Contains(inside, v) {
			t.Errorf("%.40s… isn't inside", v)
		}
	}
}

// testOddIDs checks that what isn't an ID reaches nothing.
func testOddIDs(t *testing.T, b *fixture) {
	_, err := b.rt.Inspect(b.ctx, noID)
	class(t, "inspect", err, errdefs.IsNotFound, "NotFound")
	_, err = b.rt.Exec(b.ctx, noID, runtime.Exec{Command: []string{"true"}})
	class(t, "exec", err, errdefs.IsNotFound, "NotFound")
	c := b.create(t, b.spec())
	for _, id := range []string{"", ".", "..", "../..", "../" + c.ID, c.ID + "/..", c.ID + "/", "a b", strings.Repeat("f", 300), "\x00", "*", c.ID + "\n"} {
		_, err := b.rt.Inspect(b.ctx, id)
		if !errdefs.IsNotFound(err) && !errdefs.IsInvalidArgument(err) {
			t.Errorf("inspect %q: %v", id, err)
		}
		_, err = b.rt.Exec(b.ctx, id, runtime.Exec{Command: []string{"true"}})
		if !errdefs.IsNotFound(err) && !errdefs.IsInvalidArgument(err) {
			t.Errorf("exec in %q: %v", id, err)
		}
		if err := b.rt.Remove(b.ctx, id); err != nil && !errdefs.IsInvalidArgument(err) {
			t.Errorf("remove %q: %v", id, err)
		}
	}
	b.alive(t, c.ID)
}

func testImageConfiguration(t *testing.T, b *fixture) {
	img, err := b.rt.Image(b.ctx, b.Configured)
	must(t, err)
	if !slices.Contains(img.Env, "FROM_IMAGE=yes") || img.User != "nobody" || !slices.Equal(img.Command, []string{"sleep", "200000"}) {
		t.Errorf("%+v", img)
	}
	spec := b.spec()
	spec.Image, spec.Command = b.Configured, nil
	c := b.create(t, spec)
	if c.State != runtime.StateRunning || !slices.Contains(c.Env, "FROM_IMAGE=yes") {
		t.Errorf("%+v", c)
	}
	if got := b.output(t, c.ID, "id", "-u") + " " + b.output(t, c.ID, "id", "-g"); got != "65534 65534" {
		t.Errorf("a command runs as %s", got)
	}
	spec = b.spec()
	spec.Image, spec.User, spec.Env = b.Configured, "0:0", []string{"FROM_IMAGE=no"}
	c = b.create(t, spec)
	if slices.Contains(c.Env, "FROM_IMAGE=yes") || !slices.Contains(c.Env, "FROM_IMAGE=no") {
		t.Errorf("env %q", c.Env)
	}
	if got := strings.Split(b.output(t, c.ID, "env"), "\n"); slices.Contains(got, "FROM_IMAGE=yes") || !slices.Contains(got, "FROM_IMAGE=no") {
		t.Errorf("env in the container %q", got)
	}
	if got := b.output(t, c.ID, "id", "-u"); got != "0" {
		t.Errorf("a command runs as %s", got)
	}
	spec = b.spec()
	spec.Image, spec.User, spec.Env, spec.Unset = b.Configured, "0:0", []string{"A=1"}, []string{"FROM_IMAGE", "NOT_IN_IT"}
	c = b.create(t, spec)
	if !slices.Contains(c.Env, "A=1") || slices.ContainsFunc(c.Env, func(v string) bool { return strings.HasPrefix(v, "FROM_IMAGE") || !strings.Contains(v, "=") }) {
		t.Errorf("env %q", c.Env)
	}
	if got := b.output(t, c.ID, "env"); strings.Contains(got, "FROM_IMAGE") {
		t.Errorf("env in the container %q", got)
	}
}
