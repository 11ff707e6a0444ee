package buildkit

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/docker/docker/api/types/image"
	control "github.com/moby/buildkit/api/services/control"
)

// tagged is the output that makes an image of the engine's.
func tagged(name string) []*control.Exporter {
	return []*control.Exporter{{Type: "moby", Attrs: map[string]string{"name": name}}}
}

const (
	cat      = "\nRUN echo WORD; cat /secret"
	copied   = "FROM " + base + "\nCOPY --from=" + alices + " /secret /s\nRUN echo WORD; cat /s"
	operator = "FROM " + foreign + "\nRUN echo WORD; echo $SECRET"

	otherRepository = ": the digest isn't of that repository, but where the store looks for digests only"
)

var imageAttacks = []attack{
	leaking("FROM", "FROM "+alices+cat),
	leaking("FROM in full", "FROM docker.io/team.local/../"+alices+cat).tamed(": no such name"),
	leaking("FROM of the operator's", operator),
	leaking("ARG", "ARG I="+alices+"\nFROM $I"+cat),
	leaking("build argument", "ARG I\nFROM $I"+cat, with("build-arg:I", alices)),
	leaking("COPY --from", copied),
	leaking("mount", "FROM "+base+"\nRUN --mount=type=bind,from="+alices+",target=/m echo WORD; cat /m/secret"),
	leaking("cache mount", "FROM "+base+"\nRUN --mount=type=cache,id=WORD,from="+alices+",target=/m echo WORD; cat /m/secret"),
	leaking("named context", "FROM x"+cat, with("context:x", "docker-image://"+alices)),
	leaking("override of a base", "FROM "+base+cat, with("context:busybox", "docker-image://"+alices)),
	leaking("override for a platform", "FROM "+base+cat, with("context:busybox::linux/amd64", "docker-image://"+alices)),
	leaking("stage of that name", "FROM "+alices+" AS x\nFROM busybox AS team.local\nFROM x"+cat),
	{name: "ID", tame: ": BuildKit takes names only", try: byID(func(i image.InspectResponse) string { return i.ID })},
	{name: "ID without its algorithm", tame: ": BuildKit takes names only", try: byID(func(i image.InspectResponse) string { return strings.TrimPrefix(i.ID, "sha256:") })},
	{name: "start of the ID", tame: ": BuildKit takes names only", try: byID(func(i image.InspectResponse) string { return i.ID[7:19] })},
	{name: "digest under an allowed name", tame: otherRepository, try: byID(func(i image.InspectResponse) string { return "busybox@" + i.ID })},
	{name: "digest under an allowed name and tag", tame: otherRepository, try: byID(func(i image.InspectResponse) string { return base + "@" + i.ID })},
	{name: "digest under its name", tame: otherRepository, try: byID(func(i image.InspectResponse) string { return strings.TrimSuffix(alices, ":1") + "@" + i.ID })},
	{name: "pin of another's", tame: ": it has no pins", try: byID(func(i image.InspectResponse) string { return pinOf("alice", i.ID) })},
	{name: "own pin of another's", tame: ": it has no pins", try: byID(func(i image.InspectResponse) string { return pinOf("bob", i.ID) })},
	{name: "ONBUILD", try: onBuild},
	{name: "tag moved", try: tagMoved},
}

// byID reads Alice's image by a reference that is made of her ID.
func byID(ref func(image.InspectResponse) string) func(context.Context, *side) error {
	return func(ctx context.Context, s *side) error {
		i, err := s.docker.ImageInspect(ctx, alices)
		if err != nil {
			return err
		}
		return s.leaks(ctx, build{dockerfile: "FROM " + ref(i) + "\nRUN echo " + s.word() + "; cat /secret"})
	}
}

// onBuild has the engine read the image where Bob's base says so.
func onBuild(ctx context.Context, s *side) error {
	name := "team.local/onbuild:" + s.word()
	if _, err := s.bob.run(ctx, build{dockerfile: "FROM " + base + "\nONBUILD COPY --from=" + alices + " /secret /s\nONBUILD RUN echo " + s.word() + "; cat /s", outputs: tagged(name)}); err != nil {
		return fmt.Errorf("the base: %w", err)
	}
	return s.leaks(ctx, build{dockerfile: "FROM " + name})
}

// tagMoved has somebody give Bob's name to Alice's image and back, all the time.
func tagMoved(ctx context.Context, s *side) error {
	const name = "team.local/moving:1"
	if _, err := s.bob.run(ctx, build{dockerfile: "FROM " + base + "\nCOPY secret /secret", files: map[string]string{"secret": "bob"}, outputs: tagged(name)}); err != nil {
		return err
	}
	i, err := s.docker.ImageInspect(ctx, name)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var moving sync.WaitGroup
	moving.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			_ = s.docker.ImageTag(ctx, []string{i.ID, alices}[n%2], name)
		}
	})
	defer moving.Wait()
	defer cancel()
	built := 0
	for range 12 {
		err := s.leaks(ctx, build{dockerfile: "FROM " + name + "\nRUN echo " + s.word() + "; cat /secret"})
		if err == nil {
			return nil
		}
		if s.clean(err) == nil && strings.Contains(err.Error(), errHarmless.Error()) {
			built++
		}
	}
	return fmt.Errorf("%w: %d builds of 12 passed", errHarmless, built)
}

var frontendAttacks = []attack{
	fronted("syntax", "# syntax=front.local/front:1\nFROM "+base),
	fronted("syntax with //", "// syntax=front.local/front:1\nFROM "+base),
	fronted("syntax after #!", "#!/usr/bin/env x\n# syntax=front.local/front:1\nFROM "+base),
	fronted("syntax in JSON", `{"syntax": "front.local/front:1"}`),
	fronted("SYNTAX", "#SYNTAX = front.local/front:1\nFROM "+base).tamed(": it isn't one"),
	fronted("after a mark of its encoding", "\ufeff# syntax=front.local/front:1\nFROM "+base).tamed(": some read on"),
	fronted("build argument", "FROM "+base, with("build-arg:BUILDKIT_SYNTAX", "front.local/front:1")),
	fronted("cmdline", "# syntax=front.local/front:1\nFROM "+base, with("cmdline", "")).tamed(": it isn't one"),
	fronted("source", "FROM "+base, with("source", "front.local/front:1"), frontend("gateway.v0")),
	fronted("gateway.v0", "FROM "+base, with("source", "front.local/front:1"), with("cmdline", "x"), frontend("gateway.v0")),
	{name: "gateway.v0 of a frontend", try: func(ctx context.Context, s *side) error {
		return s.bridged(ctx, gatewaySolve("gateway.v0", map[string]string{"source": "front.local/front:1"}))
	}},
	{name: "syntax of a frontend", try: func(ctx context.Context, s *side) error {
		return s.bridged(ctx, gatewaySolve("dockerfile.v0", map[string]string{"build-arg:BUILDKIT_SYNTAX": "front.local/front:1"}))
	}},
	fronted("another frontend", "FROM "+base, frontend("gateway.v1")).tamed(": it isn't one"),
}

func frontend(name string) func(*build) {
	return func(b *build) { b.change = func(req *control.SolveRequest) { req.Frontend = name } }
}

// fronted has an image be the frontend. It exits with 42.
func fronted(name, dockerfile string, change ...func(*build)) attack {
	return attack{name: name, try: func(ctx context.Context, s *side) error {
		b := build{dockerfile: dockerfile, attrs: map[string]string{}}
		for _, f := range change {
			f(&b)
		}
		_, err := s.bob.run(ctx, b)
		return exited(err)
	}}
}

func exited(err error) error {
	if err != nil && strings.Contains(err.Error(), "42") {
		return nil
	}
	if err == nil {
		return errHarmless
	}
	return err
}
