package buildkit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	control "github.com/moby/buildkit/api/services/control"
	"github.com/moby/buildkit/session"
	"github.com/moby/buildkit/session/filesync"

	"github.com/bermhq/berm/runtime/runtimetest/engine"
)

// attack does harm, or says why it doesn't.
type attack struct {
	name string
	try  func(ctx context.Context, s *side) error
	tame string // why it does no harm on the engines whose names begin so: "28: reason"
}

// tamed says why an attack does no harm on some engines.
func (a attack) tamed(why string) attack {
	a.tame = why
	return a
}

// classes are all attacks.
var classes = []struct {
	name    string
	attacks []attack
}{
	{"image", imageAttacks}, {"frontend", frontendAttacks}, {"source", sourceAttacks}, {"definition", definitionAttacks}, {"strange", strangeAttacks},
	{"privilege", privilegeAttacks}, {"result", resultAttacks}, {"cache", cacheAttacks}, {"session", sessionAttacks},
	{"ref", refAttacks}, {"store", storeAttacks}, {"pin", pinAttacks}, {"wire", wireAttacks},
}

// TestSoakBuildKitAttacks has Bob attack, on each engine with each store.
func TestSoakBuildKitAttacks(t *testing.T) {
	engine.Require(t, "docker")
	for _, e := range engines {
		t.Run(e.name, func(t *testing.T) {
			engine.RequireNewer(t, e.programs)
			t.Setenv("PATH", engine.NewerPath(e.programs))
			r := newRig(t, map[string]any{"features": map[string]bool{"containerd-snapshotter": e.containerd}})
			r.name = e.name
			r.serve(t)
			r.attack(t)
		})
	}
}

func (r *rig) attack(t *testing.T) {
	sides := r.sides(t)
	must(t, sides[1].prepare(t.Context()))
	r.keep(t, alices)
	calm := r.weight(t)
	bit, all := 0, 0
	for _, class := range classes {
		t.Run(class.name, func(t *testing.T) {
			for _, a := range class.attacks {
				t.Run(a.name, func(t *testing.T) {
					all++
					if r.one(t, sides, a) {
						bit++
					}
				})
			}
		})
	}
	t.Logf("of %d attacks, %d did harm on the engine itself", all, bit)
	if err := sides[1].innocent(t.Context()); err != nil {
		t.Errorf("an innocent build: %v", err)
	}
	if err := sides[1].twoOutputs(t.Context()); err != nil {
		t.Errorf("a build with two outputs: %v", err)
	}
	r.rests(t, calm)
}

// one tries an attack on both sides. It reports whether it did harm on the engine itself.
func (r *rig) one(t *testing.T, sides []*side, a attack) (bit bool) {
	try := func(s *side) error {
		ctx, cancel := context.WithTimeout(t.Context(), 2*patience)
		defer cancel()
		return a.try(ctx, s)
	}
	err := try(sides[0])
	begun := time.Now()
	names, _, _ := strings.Cut(a.tame, ": ")
	switch tame := a.tame != "" && strings.HasPrefix(r.name, names); {
	case err == nil && tame:
		t.Logf("it does harm on the engine, although %q", a.tame)
	case err != nil && !tame:
		t.Errorf("it does no harm on the engine: %v", err)
	}
	bit = err == nil
	if err := try(sides[1]); err == nil {
		t.Error("it does harm through Berm")
	} else if clean := sides[1].clean(err); clean != nil {
		t.Error(clean)
	} else {
		t.Logf("%.200s (%v)", strings.ReplaceAll(err.Error(), "\n", " "), time.Since(begun).Round(time.Millisecond))
	}
	return bit
}

// prepare builds what is Alice's.
func (s *side) prepare(ctx context.Context) error {
	r, err := s.alice.run(ctx, build{
		dockerfile: "FROM " + base + "\nCOPY secret /secret\nCMD cat /secret",
		files:      map[string]string{"secret": marker + "alice\n"},
		outputs:    tagged(alices),
	})
	if err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	if _, err := s.alice.rest(ctx, "GET", "/images/"+alices+"/json", nil); err != nil {
		return fmt.Errorf("prepare: %w: %v", err, r.resp)
	}
	return nil
}

// innocent is a build that must pass.
func (s *side) innocent(ctx context.Context) error {
	word := s.word()
	r, err := s.bob.run(ctx, build{dockerfile: "FROM " + base + "\nRUN echo " + word + " | tr a-z A-Z"})
	if err == nil && !strings.Contains(r.log, strings.ToUpper(word)) {
		err = fmt.Errorf("it printed %q", r.log)
	}
	return err
}

// twoOutputs builds an image that the engine keeps and the client gets as well, in another form.
func (s *side) twoOutputs(ctx context.Context) error {
	const name = "team.local/both:1"
	file, err := os.Create(filepath.Join(s.root, "both.tar"))
	if err != nil {
		return err
	}
	second := &control.Exporter{Type: "oci", Attrs: map[string]string{"compression": "zstd"}}
	if strings.HasSuffix(s.name, "overlay2") { // which has no oci
		second = &control.Exporter{Type: "tar"}
	}
	_, err = s.bob.run(ctx, build{
		dockerfile: "FROM " + base + "\nRUN dd if=/dev/urandom of=/f bs=1M count=20",
		more:       []session.Attachable{filesync.NewFSSyncTarget(filesync.WithFSSync(1, func(map[string]string) (io.WriteCloser, error) { return file, nil }))},
		outputs:    append(tagged(name), second),
	})
	if err != nil {
		return err
	}
	fi, err := os.Stat(file.Name())
	if err != nil {
		return err
	}
	if fi.Size() < 20<<20 {
		return fmt.Errorf("the client got %d bytes", fi.Size())
	}
	_, err = s.bob.rest(ctx, "GET", "/images/"+name+"/json", nil)
	return err
}

// leaks builds, and fails unless the build told a secret.
func (s *side) leaks(ctx context.Context, b build) error {
	r, err := s.bob.run(ctx, b)
	return told(r, err)
}

func told(r *result, err error) error {
	if r != nil && strings.Contains(r.log, marker) {
		return nil
	}
	return errors.Join(err, harmless(err))
}

// harmless says so of a step that ran, and found nothing, or of no error at all.
func harmless(err error) error {
	if err == nil || strings.Contains(err.Error(), "exit code: ") {
		return errHarmless
	}
	return nil
}

// leaking is an attack by a Dockerfile. WORD in it is new for each try.
func leaking(name, dockerfile string, change ...func(*build)) attack {
	return attack{name: name, try: func(ctx context.Context, s *side) error {
		b := build{dockerfile: strings.ReplaceAll(dockerfile, "WORD", s.word()), attrs: map[string]string{}}
		for _, f := range change {
			f(&b)
		}
		return s.leaks(ctx, b)
	}}
}

func with(key, value string) func(*build) {
	return func(b *build) { b.attrs[key] = value }
}
