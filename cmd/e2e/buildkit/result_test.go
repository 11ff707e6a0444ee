package buildkit

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/docker/docker/api/types/image"
	control "github.com/moby/buildkit/api/services/control"
	gateway "github.com/moby/buildkit/frontend/gateway/pb"
)

// snapshot tells which images the engine has by what names.
func (s *side) snapshot(ctx context.Context) map[string]string {
	images, err := s.docker.ImageList(ctx, image.ListOptions{All: true})
	if err != nil {
		return map[string]string{"": err.Error()}
	}
	found := map[string]string{}
	for _, i := range images {
		for _, name := range i.RepoTags {
			found[name] = i.ID
		}
	}
	return found
}

// taking builds an image, and fails unless it changed a name that isn't Bob's.
func taking(name string, b build) attack {
	return attack{name: name, try: func(ctx context.Context, s *side) error {
		b := b
		b.dockerfile = "FROM " + base + "\nRUN echo " + s.word()
		b.outputs = nil
		old := b.change
		b.change = func(req *control.SolveRequest) { old(req) }
		return s.changes(ctx, b, func(name string) bool { return strings.HasPrefix(name, "team.local/bob") })
	}}
}

func (s *side) changes(ctx context.Context, b build, own func(name string) bool) error {
	before := s.snapshot(ctx)
	_, err := s.bob.run(ctx, b)
	after := s.snapshot(ctx)
	for name, id := range after {
		if before[name] != id && !own(name) {
			_, undo := s.docker.ImageRemove(ctx, name, image.RemoveOptions{Force: true})
			if was := before[name]; was != "" {
				undo = errors.Join(undo, s.docker.ImageTag(ctx, was, name))
			}
			if undo != nil && s.bare {
				return fmt.Errorf("undo: %w", undo)
			}
			return nil
		}
	}
	return errors.Join(err, harmless(err))
}

func output(kind string, attrs map[string]string) build {
	return build{change: func(req *control.SolveRequest) { req.Exporters = []*control.Exporter{{Type: kind, Attrs: attrs}} }}
}

var resultAttacks = []attack{
	taking("name of the policy's", output("moby", map[string]string{"name": base})),
	taking("name of the operator's", output("moby", map[string]string{"name": foreign})),
	taking("name of another's", output("moby", map[string]string{"name": alices})),
	taking("name among own ones", output("moby", map[string]string{"name": "team.local/bob:1," + base})),
	taking("name that no pattern has", output("moby", map[string]string{"name": "docker.io/evil/x:1"})),
	taking("name of a pin", output("moby", map[string]string{"name": pinOf("bob", "x")})),
	taking("name of another type", output("image", map[string]string{"name": "docker.io/library/" + base})).tamed("2: only the image store has it"),
	taking("deprecated field", build{change: func(req *control.SolveRequest) {
		req.ExporterDeprecated, req.ExporterAttrsDeprecated = "moby", map[string]string{"name": base}
	}}),
	taking("deprecated field besides", build{change: func(req *control.SolveRequest) {
		req.Exporters = []*control.Exporter{{Type: "moby", Attrs: map[string]string{"name": "team.local/bob:2"}}}
		req.ExporterDeprecated, req.ExporterAttrsDeprecated = "moby", map[string]string{"name": base}
	}}).tamed(": it is ignored"),
	taking("name of a dangling image", output("image", map[string]string{"dangling-name-prefix": "docker.io/library/busybox"})).tamed("2: only the image store has it"),
	taking("canonical name", output("image", map[string]string{"name": "team.local/bob:3", "name-canonical": "true"})).tamed(": it is a name more at most"),
	taking("name in the annotations", output("image", map[string]string{"annotation.io.containerd.image.name": base})).tamed(": it is a name more at most"),
	{name: "push", tame: "2: only the image store has it", try: func(ctx context.Context, s *side) error {
		_, err := s.bob.run(ctx, build{dockerfile: "FROM " + base, outputs: []*control.Exporter{{Type: "image", Attrs: map[string]string{"name": "127.0.0.1:1/x:1", "push": "true"}}}})
		return fetched(err)
	}},
	{name: "session exporter", try: func(ctx context.Context, s *side) error {
		_, err := s.bob.run(ctx, build{dockerfile: "FROM " + base, change: func(req *control.SolveRequest) { req.EnableSessionExporter = true }})
		return fetched(err)
	}},
	labelled("labels in a Dockerfile", "LABEL berm.owner=evil berm.tenant=alice"),
	labelled("labels in capitals", "LABEL DEV.BERM.TENANT=alice Berm.Tenant=alice BERM.tenant=alice"),
	labelled("labels by ARG", "ARG N=berm.tenant\nLABEL $N=alice"),
	labelled("label attribute", "", with("label:berm.tenant", "alice")),
	labelled("label attribute in capitals", "", with("label:BERM.Tenant", "alice")),
	labelled("no label", "", with("label:berm.tenant", "")),
	{name: "forged configuration", try: returned(func(own *gateway.Result) *gateway.Result {
		own.Metadata = map[string][]byte{"containerimage.config": []byte(`{"architecture":"amd64","os":"linux","config":{"Labels":{"evil":"evil"}},"rootfs":{"type":"layers"}}`)}
		return own
	})},
	{name: "forged result", tame: "2: only the image store has it", try: returned(func(*gateway.Result) *gateway.Result {
		return &gateway.Result{
			Metadata: map[string][]byte{"containerimage.config": []byte(`{"architecture":"amd64","os":"linux","config":{"Labels":{"evil":"evil"}},"rootfs":{"type":"layers"}}`)},
			Result:   &gateway.Result_Ref{Ref: &gateway.Ref{}},
		}
	})},
	{name: "result of a subrequest", tame: "2: some make an image of it", try: returned(func(*gateway.Result) *gateway.Result { return nil })},
	{name: "two images", tame: "2: only the image store has it", try: func(ctx context.Context, s *side) error {
		before := s.all(ctx)
		_, err := s.bob.run(ctx, build{dockerfile: "FROM " + base + "\nRUN echo " + s.word(), outputs: []*control.Exporter{
			{Type: "image", Attrs: map[string]string{"compression": "gzip", "force-compression": "true"}},
			{Type: "image", Attrs: map[string]string{"name": "team.local/bob:4", "compression": "zstd", "oci-mediatypes": "true", "force-compression": "true"}},
		}})
		return s.unowned(ctx, before, err)
	}},
}

// all are the IDs of all images.
func (s *side) all(ctx context.Context) (ids []string) {
	images, err := s.docker.ImageList(ctx, image.ListOptions{All: true})
	if err != nil {
		return []string{err.Error()}
	}
	for _, i := range images {
		ids = append(ids, i.ID)
	}
	return ids
}

// unowned fails unless there is a new image without an owner, or with one that a client made up.
func (s *side) unowned(ctx context.Context, before []string, err error) error {
	for _, id := range s.all(ctx) {
		if slices.Contains(before, id) {
			continue
		}
		i, ierr := s.docker.ImageInspect(ctx, id)
		if ierr != nil || i.Config == nil {
			continue
		}
		text, _ := json.Marshal(i.Config.Labels)
		owner := false
		for name, value := range i.Config.Labels {
			owner = owner || strings.HasPrefix(name, "berm.") && value == "bob"
			if strings.EqualFold(value, "alice") || value == "evil" {
				return nil
			}
		}
		if !owner && len(i.RepoTags)+len(i.RepoDigests) >= 0 {
			if s.bare {
				return nil
			}
			return fmt.Errorf("an image has labels %s: %w", text, errors.Join(err, nil))
		}
	}
	return errors.Join(err, harmless(err))
}

// labelled makes an image with labels of Berm's.
func labelled(name, dockerfile string, change ...func(*build)) attack {
	return attack{name: name, try: func(ctx context.Context, s *side) error {
		before := s.all(ctx)
		b := build{dockerfile: "FROM " + base + "\n" + dockerfile + "\nRUN echo " + s.word(), attrs: map[string]string{}, outputs: tagged("team.local/bob:5")}
		for _, f := range change {
			f(&b)
		}
		_, err := s.bob.run(ctx, b)
		return s.unowned(ctx, before, err)
	}}
}

// returned has a frontend return something else than what was solved.
func returned(change func(own *gateway.Result) *gateway.Result) func(context.Context, *side) error {
	return func(ctx context.Context, s *side) error {
		before := s.all(ctx)
		word := s.word()
		_, err := s.bob.run(ctx, build{dockerfile: "FROM " + base + "\nRUN echo " + word, outputs: tagged("team.local/bob:6"), frontend: func(ctx context.Context, ref, session string) error {
			ctx = inBuild(ctx, ref)
			attrs := map[string]string{}
			if change(&gateway.Result{}) == nil {
				attrs["requestid"] = "frontend.outline"
			}
			own, err := gatewaySolve("dockerfile.v0", attrs)(ctx, s.bob, session)
			if err == nil {
				if now := change(own); now != nil {
					own = now
				}
			}
			if err := s.bob.returns(ctx, own, err); err != nil {
				_ = s.bob.returns(ctx, nil, err) // or nothing ends the build
				return err
			}
			return nil
		}})
		return s.unowned(ctx, before, err)
	}
}
