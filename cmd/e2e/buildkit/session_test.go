package buildkit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	contentapi "github.com/containerd/containerd/api/services/content/v1"
	control "github.com/moby/buildkit/api/services/control"
	gateway "github.com/moby/buildkit/frontend/gateway/pb"
	"github.com/opencontainers/go-digest"
	"google.golang.org/grpc/metadata"
)

// alicesSession opens a session of hers with a secret and a file.
func (s *side) alicesSession(ctx context.Context) (string, error) {
	opened, err := s.alice.openSession(ctx, build{
		dockerfile: "FROM " + base + "\nCOPY s /s\nRUN echo " + s.word() + "; cat /s", files: map[string]string{"s": marker + "context"},
		secrets: map[string][]byte{"t": []byte(marker + "secret")},
	})
	if err != nil {
		return "", err
	}
	time.Sleep(300 * time.Millisecond) // it opens in the background
	return opened.ID(), nil
}

const readsSecret = "FROM " + base + "\nRUN --mount=type=secret,id=t,required=true echo WORD; cat /run/secrets/t"

func inHers(name string, change func(req *control.SolveRequest, hers string)) attack {
	return attack{name: name, try: func(ctx context.Context, s *side) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		hers, err := s.alicesSession(ctx)
		if err != nil {
			return err
		}
		return s.leaks(ctx, build{dockerfile: strings.ReplaceAll(readsSecret, "WORD", s.word()), change: func(req *control.SolveRequest) { change(req, hers) }})
	}}
}

var sessionAttacks = []attack{
	inHers("another's", func(req *control.SolveRequest, hers string) { req.Session = hers }),
	inHers("another's with a prefix", func(req *control.SolveRequest, hers string) { req.Session = "x:" + hers }).tamed(": the prefix is that of directories"),
	inHers("another's context", func(req *control.SolveRequest, hers string) {
		req.FrontendAttrs["local-sessionid:context"], req.FrontendAttrs["local-sessionid:dockerfile"] = hers, hers
	}),
	inHers("another's for policies", func(req *control.SolveRequest, hers string) {
		req.SourcePolicySession = hers
		req.Session = hers
	}).tamed(": hers has none"),
	{name: "ID taken", tame: ": the later one is refused or lost", try: func(ctx context.Context, s *side) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		hers, err := s.alicesSession(ctx)
		if err != nil {
			return err
		}
		conn, err := s.bob.upgrade(ctx, "/session", map[string][]string{"X-Docker-Expose-Session-Uuid": {hers}, "X-Docker-Expose-Session-Name": {"x"}})
		if err == nil {
			_ = conn.Close()
		}
		_, err = s.alice.run(ctx, build{change: func(req *control.SolveRequest) { req.Session = hers }})
		if err != nil {
			return nil // hers doesn't work any more
		}
		return errHarmless
	}},
	{name: "ID twice", tame: ": the later one takes the place", try: func(ctx context.Context, s *side) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		opened, err := s.bob.openSession(ctx, build{})
		if err != nil {
			return err
		}
		time.Sleep(300 * time.Millisecond)
		conn, err := s.bob.upgrade(ctx, "/session", map[string][]string{"X-Docker-Expose-Session-Uuid": {opened.ID()}})
		if err == nil {
			_ = conn.Close()
		}
		return err
	}},
	{name: "odd ID", try: func(ctx context.Context, s *side) error {
		conn, err := s.bob.upgrade(ctx, "/session", map[string][]string{"X-Docker-Expose-Session-Uuid": {"a:b/../c"}})
		if err == nil {
			_ = conn.Close()
		}
		return err
	}},
	{name: "shared key", try: func(ctx context.Context, s *side) error {
		word, stamp := s.word(), time.Unix(1_700_000_000, 0)
		b := build{dockerfile: "FROM " + base + "\nCOPY s /s\nRUN echo WORD; cat /s", files: map[string]string{"s": marker + word}, stamp: stamp, sharedKey: "key" + word}
		hers := b
		hers.dockerfile = strings.Replace(b.dockerfile, "WORD", "her"+word, 1)
		if _, err := s.alice.run(ctx, hers); err != nil {
			return fmt.Errorf("alice: %w", err)
		}
		b.dockerfile = strings.Replace(b.dockerfile, "WORD", "his"+word, 1)
		b.files = map[string]string{"s": strings.Repeat("x", len(marker+word))}
		return s.leaks(ctx, b)
	}},
	{name: "methods that aren't offered", tame: ": it is the client's own", try: func(ctx context.Context, s *side) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		conn, err := s.bob.upgrade(ctx, "/session", map[string][]string{
			"X-Docker-Expose-Session-Uuid":        {newRef()},
			"X-Docker-Expose-Session-Grpc-Method": {"/moby.exporter.v1.Exporter/FindExporters", "/containerd.services.content.v1.Content/Read", "/moby.sourcepolicy.v1.PolicyVerifier/CheckPolicy"},
		})
		if err == nil {
			_ = conn.Close()
		}
		return errors.Join(err, harmless(err))
	}},
}

// running has Alice's build run, and calls f with its ref and a reference in it.
func (s *side) running(ctx context.Context, f func(ref, result string) error) error {
	var came error
	_, err := s.alice.run(ctx, build{
		dockerfile: "FROM " + base + "\nCOPY s /s\nARG X\nRUN echo $X; cat /s", files: map[string]string{"s": marker + "context"},
		frontend: func(ctx context.Context, ref, session string) error {
			in := inBuild(ctx, ref)
			own, err := gatewaySolve("dockerfile.v0", map[string]string{"build-arg:X": s.word()})(in, s.alice, session)
			if err == nil {
				came = f(ref, own.GetRef().GetId())
			}
			return s.alice.returns(in, own, err)
		},
	})
	if err != nil && s.bare && came == nil {
		err = nil // the attack has ended it
	}
	return errors.Join(came, errIf(err, "alice"))
}

func inHerBuild(name string, f func(ctx context.Context, s *side, ref, result string) error) attack {
	return attack{name: name, try: func(ctx context.Context, s *side) error {
		return s.running(ctx, func(ref, result string) error { return f(ctx, s, ref, result) })
	}}
}

var refAttacks = []attack{
	inHerBuild("status", func(ctx context.Context, s *side, ref, _ string) error {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		stream, err := s.bob.control().Status(ctx, &control.StatusRequest{Ref: ref})
		for err == nil {
			var m *control.StatusResponse
			if m, err = stream.Recv(); err == nil {
				for _, l := range m.Logs {
					if strings.Contains(string(l.Msg), marker) {
						return nil
					}
				}
			}
		}
		return err
	}),
	inHerBuild("ping", func(ctx context.Context, s *side, ref, _ string) error {
		_, err := s.bob.gateway().Ping(inBuild(ctx, ref), &gateway.PingRequest{})
		return err
	}),
	inHerBuild("read file", func(ctx context.Context, s *side, ref, result string) error {
		got, err := s.bob.gateway().ReadFile(inBuild(ctx, ref), &gateway.ReadFileRequest{FilePath: "/s", Ref: result})
		if err == nil && !strings.Contains(string(got.Data), marker) {
			err = errHarmless
		}
		return err
	}),
	inHerBuild("read her reference in his build", func(ctx context.Context, s *side, _, result string) error {
		return s.bridged(ctx, func(ctx context.Context, c *client, _ string) (*gateway.Result, error) {
			got, err := c.gateway().ReadFile(ctx, &gateway.ReadFileRequest{FilePath: "/s", Ref: result})
			if err == nil && strings.Contains(string(got.Data), marker) {
				err = errors.New("42")
			}
			return nil, err
		})
	}).tamed(": references are a build's"), // the engine looks for it in Bob's only
	inHerBuild("read directory", func(ctx context.Context, s *side, ref, result string) error {
		_, err := s.bob.gateway().ReadDir(inBuild(ctx, ref), &gateway.ReadDirRequest{DirPath: "/", Ref: result})
		return err
	}),
	inHerBuild("stat", func(ctx context.Context, s *side, ref, result string) error {
		_, err := s.bob.gateway().StatFile(inBuild(ctx, ref), &gateway.StatFileRequest{Path: "/s", Ref: result})
		return err
	}),
	inHerBuild("solve", func(ctx context.Context, s *side, ref, _ string) error {
		_, err := gatewaySolve("dockerfile.v0", map[string]string{"build-arg:X": "y"})(inBuild(ctx, ref), s.bob, "")
		return err
	}),
	inHerBuild("evaluate", func(ctx context.Context, s *side, ref, result string) error {
		_, err := s.bob.gateway().Evaluate(inBuild(ctx, ref), &gateway.EvaluateRequest{Ref: result})
		return err
	}),
	inHerBuild("warn", func(ctx context.Context, s *side, ref, _ string) error {
		_, err := s.bob.gateway().Warn(inBuild(ctx, ref), &gateway.WarnRequest{Digest: string(digest.FromString("x")), Short: []byte("evil")})
		return err
	}),
	inHerBuild("return", func(ctx context.Context, s *side, ref, _ string) error {
		return s.bob.returns(inBuild(ctx, ref), nil, errors.New("evil"))
	}),
	inHerBuild("its ref", func(ctx context.Context, s *side, ref, _ string) error {
		_, err := s.bob.run(ctx, build{dockerfile: "FROM " + base, change: func(req *control.SolveRequest) { req.Ref = ref }})
		if err != nil && s.bare {
			return nil // who is first has it
		}
		if err == nil {
			return errHarmless // his is another
		}
		return err
	}),
	{name: "own ref twice", tame: ": the second fails, too", try: func(ctx context.Context, s *side) error {
		ref := newRef()
		for range 2 {
			if _, err := s.bob.run(ctx, build{dockerfile: "FROM " + base, change: func(req *control.SolveRequest) { req.Ref = ref }}); err != nil {
				return err
			}
		}
		return nil
	}},
	{name: "odd ref", try: func(ctx context.Context, s *side) error {
		_, err := s.bob.run(ctx, build{dockerfile: "FROM " + base, change: func(req *control.SolveRequest) { req.Ref = "../" + newRef() }})
		return err
	}},
	{name: "all of the history", try: func(ctx context.Context, s *side) error {
		_, err := s.bob.histories(ctx, "")
		return err
	}},
	{name: "her history", try: func(ctx context.Context, s *side) error {
		r, err := s.alice.run(ctx, build{dockerfile: "FROM " + base})
		if err != nil {
			return err
		}
		_, err = s.bob.histories(ctx, r.ref)
		return err
	}},
	{name: "delete of her history", try: func(ctx context.Context, s *side) error {
		r, err := s.alice.run(ctx, build{dockerfile: "FROM " + base})
		if err != nil {
			return err
		}
		_, err = s.bob.control().UpdateBuildHistory(ctx, &control.UpdateBuildHistoryRequest{Ref: r.ref, Delete: true})
		return err
	}},
	{name: "pin of own history", try: func(ctx context.Context, s *side) error {
		r, err := s.bob.run(ctx, build{dockerfile: "FROM " + base})
		if err != nil {
			return err
		}
		_, err = s.bob.control().UpdateBuildHistory(ctx, &control.UpdateBuildHistoryRequest{Ref: r.ref, Pinned: true})
		return err
	}},
}

// histories are the records of builds.
func (c *client) histories(ctx context.Context, ref string) (found []*control.BuildHistoryRecord, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	stream, err := c.control().ListenBuildHistory(ctx, &control.BuildHistoryRequest{Ref: ref, EarlyExit: true})
	for err == nil {
		var e *control.BuildHistoryEvent
		if e, err = stream.Recv(); err == nil && e.Record != nil {
			found = append(found, e.Record)
		}
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	if err == nil && len(found) == 0 {
		err = errHarmless
	}
	return found, err
}

// herBlob is the digest of content that the record of a build of Alice's names.
func (s *side) herBlob(ctx context.Context) (string, error) {
	r, err := s.alice.run(ctx, build{dockerfile: "FROM " + base + "\nRUN echo " + s.word() + " " + marker + "log"})
	if err != nil {
		return "", err
	}
	for range 50 { // it is completed in the background
		found, err := s.alice.histories(ctx, r.ref)
		if err == nil && found[0].GetLogs().GetDigest() != "" {
			return found[0].Logs.Digest, nil
		}
		time.Sleep(100 * time.Millisecond)
	}
	return "", errors.New("alice: her build has no log")
}

func (c *client) content() contentapi.ContentClient { return contentapi.NewContentClient(c.grpc) }

func inHistory(ctx context.Context, namespace string) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "containerd-namespace", namespace)
}

var storeAttacks = []attack{
	{name: "blob", try: func(ctx context.Context, s *side) error {
		blob, err := s.herBlob(ctx)
		if err != nil {
			return err
		}
		stream, err := s.bob.content().Read(inHistory(ctx, "moby_history"), &contentapi.ReadContentRequest{Digest: blob})
		if err == nil {
			_, err = stream.Recv()
		}
		return err
	}},
	{name: "info", try: func(ctx context.Context, s *side) error {
		blob, err := s.herBlob(ctx)
		if err != nil {
			return err
		}
		_, err = s.bob.content().Info(inHistory(ctx, "moby_history"), &contentapi.InfoRequest{Digest: blob})
		return err
	}},
	{name: "list", try: func(ctx context.Context, s *side) error {
		stream, err := s.bob.content().List(inHistory(ctx, "moby_history"), &contentapi.ListContentRequest{})
		if err == nil {
			_, err = stream.Recv()
		}
		return err
	}},
	{name: "delete", tame: ": it is Unimplemented there, too", try: func(ctx context.Context, s *side) error {
		_, err := s.bob.content().Delete(inHistory(ctx, "moby_history"), &contentapi.DeleteContentRequest{Digest: "sha256:" + strings.Repeat("a", 64)})
		return err
	}},
	{name: "write", tame: ": it is Unimplemented there, too", try: func(ctx context.Context, s *side) error {
		stream, err := s.bob.content().Write(inHistory(ctx, "moby_history"))
		if err == nil {
			_ = stream.Send(&contentapi.WriteContentRequest{Action: contentapi.WriteAction_COMMIT, Ref: "x", Data: []byte("x"), Total: 1})
			_, err = stream.Recv()
		}
		return err
	}},
	{name: "disk usage", try: func(ctx context.Context, s *side) error {
		got, err := s.bob.control().DiskUsage(ctx, &control.DiskUsageRequest{})
		if err == nil && len(got.Record) == 0 {
			err = errHarmless
		}
		return err
	}},
	{name: "workers", try: func(ctx context.Context, s *side) error {
		got, err := s.bob.control().ListWorkers(ctx, &control.ListWorkersRequest{})
		if err != nil {
			return err
		}
		for _, w := range got.Record {
			for name := range w.Labels {
				if name != "org.mobyproject.buildkit.worker.snapshotter" {
					return nil
				}
			}
			if len(w.GCPolicy) > 0 {
				return nil
			}
		}
		return errHarmless
	}},
	{name: "prune", try: func(ctx context.Context, s *side) error {
		if err := errIf(second(s.alice.run(ctx, build{dockerfile: "FROM " + base + "\nRUN echo " + s.word()})), "alice"); err != nil {
			return err
		}
		pruned := 0
		stream, err := s.bob.control().Prune(ctx, &control.PruneRequest{All: true})
		for err == nil {
			if _, err = stream.Recv(); err == nil {
				pruned++
			}
		}
		if errors.Is(err, io.EOF) {
			err = nil
		}
		if err == nil && pruned == 0 {
			err = errHarmless
		}
		return err
	}},
}

func second(_ *result, err error) error { return err }

// pinned has Bob use the pin of a base while Alice's build reads it.
func pinned(method, path, body string) attack {
	return attack{name: "pin by " + method + " " + path, tame: "2: it has no pins", try: func(ctx context.Context, s *side) error {
		if s.bare {
			return errHarmless
		}
		i, err := s.docker.ImageInspect(ctx, base)
		if err != nil {
			return err
		}
		pin := pinOf("alice", i.ID)
		return s.running(ctx, func(string, string) error {
			if !slices.Contains(s.pins(ctx), pin) {
				return errors.New("the build has no pin " + pin)
			}
			var text []byte
			if body != "" {
				text = []byte(strings.ReplaceAll(body, "PIN", pin))
			}
			_, err := s.bob.rest(ctx, method, strings.ReplaceAll(path, "PIN", pin), text)
			return err
		})
	}}
}

var pinAttacks = []attack{
	pinned("DELETE", "/images/PIN", ""), pinned("DELETE", "/images/PIN?force=1", ""), pinned("GET", "/images/PIN/json", ""),
	pinned("GET", "/images/PIN/history", ""), pinned("POST", "/images/PIN/tag?repo=team.local/bob&tag=p", ""), pinned("GET", "/images/PIN/get", ""),
	pinned("GET", "/images/get?names=PIN", ""), pinned("POST", "/containers/create", `{"Image":"PIN"}`), pinned("POST", "/images/PIN/push", ""),
	pinned("POST", "/images/create?fromImage=PIN", ""), pinned("POST", "/images/"+base+"/tag?repo="+strings.TrimSuffix(pinOf("alice", "x"), ":1")+"&tag=1", ""),
}
