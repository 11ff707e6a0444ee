package buildkit

import (
	"context"
	"crypto/sha256"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	control "github.com/moby/buildkit/api/services/control"
	gateway "github.com/moby/buildkit/frontend/gateway/pb"
	"github.com/moby/buildkit/solver/pb"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

const (
	maxEnded   = 64        // builds of a tenant whose history is kept
	maxOps     = 4096      // operations that are remembered of a build
	maxResults = 32        // of a build
	maxBytes   = 16 << 20  // of a build's results
	maxKept    = 256 << 10 // bytes of metadata of a build's operations, which stay after the build
	// buildWait is how long a call waits for its build, which another call begins.
	buildWait = 5 * time.Second
)

// build is one Solve from a client. It runs as one or more jobs of the engine.
type build struct {
	server *Server
	tenant string
	ref    string // the client's
	judge  Build
	req    *request
	login  Login
	begun  chan struct{} // closed once the first job has started
	over   chan struct{} // closed at the end
	err    error         // how it ended; to be read once it is over

	mu      sync.Mutex
	sources *sources
	job     *job
	changed chan struct{}               // closed when there is another job
	results map[string]*gateway.Result  // the engine's, by the ID of each reference in them; nil once the build has ended
	bytes   int                         // of the results
	kept    int                         // bytes of metadata in ops
	ops     map[[32]byte]*pb.OpMetadata // of operations that the engine returned, by their digests
	digests map[string]bool             // of the content that the build's record names
}

// job is one Solve that the engine runs.
type job struct {
	ref    string
	cancel context.CancelFunc
	done   chan struct{}
	resp   *control.SolveResponse
	err    error
}

// Solve runs a client's build.
func (s service) Solve(ctx context.Context, in *control.SolveRequest) (_ *control.SolveResponse, err error) {
	caller := callerOf(ctx)
	if !refName(in.Ref) {
		return nil, denied("solve", "Ref", "the ref is malformed", "8 to 64 lower-case letters and digits")
	}
	b := &build{
		server: s.Server, tenant: caller.Tenant(), ref: in.Ref, begun: make(chan struct{}), over: make(chan struct{}), changed: make(chan struct{}),
		results: map[string]*gateway.Result{}, ops: map[[32]byte]*pb.OpMetadata{}, digests: map[string]bool{},
	}
	if err := s.add(b); err != nil {
		return nil, err
	}
	defer func() { s.end(b, err) }()
	if b.judge, err = caller.Begin(ctx); err != nil {
		return nil, err
	}
	defer func() { b.judge.End(err) }()
	ctx = b.judge.Context()
	b.req, err = judgeSolve(b.judge, b.tenant, in, func(id string) (string, error) {
		found, err := s.sessions.await(ctx, b.tenant, id)
		if err != nil {
			return "", err
		}
		b.login = found.credentials
		return found.id, nil
	})
	if err != nil {
		return nil, err
	}
	b.sources = newSources(b.judge.URLs())
	for _, url := range b.req.uploads {
		b.sources.uploads[url] = true
	}
	defer b.stop()
	b.mu.Lock()
	b.start()
	b.mu.Unlock()
	close(b.begun)
	return b.run()
}

// add adds a build under its tenant and ref. It fails if there is one already.
func (s *Server) add(b *build) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := [2]string{b.tenant, b.ref}
	if s.builds[key] != nil {
		return status.Error(codes.AlreadyExists, "the build exists")
	}
	s.builds[key] = b
	close(s.changed)
	s.changed = make(chan struct{})
	return nil
}

// end notes that a build is over. Its ref and its history stay known for a while.
func (s *Server) end(b *build, err error) {
	b.err = err
	close(b.over)
	s.mu.Lock()
	defer s.mu.Unlock()
	ended := append(s.ended[b.tenant], b)
	if len(ended) > maxEnded {
		delete(s.builds, [2]string{b.tenant, ended[0].ref})
		ended = slices.Clone(ended[1:])
	}
	s.ended[b.tenant] = ended
}

// stop releases what a build holds.
func (b *build) stop() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.job.cancel()
	b.sources.release()
	b.results = nil
}

// await returns a build of the tenant's once it has begun. It waits up to buildWait for a build
// that doesn't exist yet. For a refused build it returns the refusal, since a client shows the
// error of whichever call fails first.
func (s *Server) await(ctx context.Context, tenant, ref string) (*build, error) {
	unknown := time.NewTimer(buildWait)
	defer unknown.Stop()
	for {
		s.mu.Lock()
		b, changed := s.builds[[2]string{tenant, ref}], s.changed
		s.mu.Unlock()
		missed := unknown.C
		var begun, over <-chan struct{}
		if b != nil { // the build may have to wait for room
			begun, over, changed, missed = b.begun, b.over, nil, nil
		}
		select {
		case <-begun:
			return b, nil
		case <-changed:
			continue
		case <-over:
			if b.hasBegun() {
				return b, nil
			}
			return nil, b.err
		case <-missed:
			return nil, status.Error(codes.NotFound, "no such build")
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (b *build) hasBegun() bool {
	select {
	case <-b.begun:
		return true
	default:
		return false
	}
}

// start starts a job that may read all sources admitted so far, in place of the current job. It
// does nothing once the build has ended. The caller holds b.mu.
func (b *build) start() {
	if b.results == nil {
		return
	}
	ctx, cancel := context.WithCancel(b.judge.Context())
	req := proto.Clone(b.req.out).(*control.SolveRequest)
	old := b.job
	b.job = &job{ref: "b" + random(), cancel: cancel, done: make(chan struct{})}
	req.Ref, req.SourcePolicy = b.job.ref, b.sources.policy()
	go func(j *job) { // it ends with the context
		defer close(j.done)
		defer cancel()
		j.resp, j.err = service{Server: b.server}.control().Solve(ctx, req)
	}(b.job)
	if old != nil {
		old.cancel()
	}
	close(b.changed)
	b.changed = make(chan struct{})
}

func (b *build) current() (j *job, changed <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.job, b.changed
}

// run follows the build's jobs to the end of the last.
func (b *build) run() (*control.SolveResponse, error) {
	for {
		j, changed := b.current()
		select {
		case <-changed:
			continue
		case <-j.done:
		}
		if now, _ := b.current(); now != j {
			continue
		}
		switch {
		case j.err == nil:
			return b.finish(j.resp)
		case b.req.out.Frontend == "": // the client is the frontend, and gets this error from its own calls
			return nil, j.err
		}
		if err := b.admit(j, j.err); err != nil {
			return nil, err
		}
	}
}

// admit judges the image that a job's error names, and starts a job that may read it. It returns
// failed if the error names no image, or one that the build may read already. It does nothing if
// j isn't the current job: another call of the frontend may have replaced it.
func (b *build) admit(j *job, failed error) error {
	source := missing(failed.Error())
	b.mu.Lock()
	last, pull, full := b.job == j, b.req.pull, len(b.sources.pins) >= maxPins
	_, known := b.sources.pins[source]
	b.mu.Unlock()
	switch {
	case !last:
		return nil
	case source == "" || known:
		return failed
	case full:
		return tooManyImages()
	}
	p, err := b.pinImage(source, pull)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	_, twice := b.sources.pins[source]
	switch {
	case b.results == nil: // the build has ended
		p.release()
		return failed
	case twice:
		p.release()
		return nil
	case len(b.sources.pins) >= maxPins:
		p.release()
		return tooManyImages()
	}
	b.sources.pins[source] = p
	b.start()
	return nil
}

func tooManyImages() error {
	return denied("sources", "", "the build reads too many images", fmt.Sprintf("up to %d", maxPins))
}

// finish verifies and names the image.
func (b *build) finish(resp *control.SolveResponse) (*control.SolveResponse, error) {
	out := resp.ExporterResponse
	var ids []string
	for _, key := range []string{"containerimage.digest", "containerimage.config.digest"} {
		if id := out[key]; id != "" {
			ids = append(ids, id)
		}
	}
	if !b.req.stores || len(ids) == 0 { // a request without an image only asks about the Dockerfile
		return resp, nil
	}
	if err := b.judge.Finish(ids, b.req.names); err != nil {
		return nil, err
	}
	if len(b.req.names) > 0 {
		out["image.name"] = strings.Join(b.req.names, ",")
	}
	return resp, nil
}

// Status streams the progress of a client's build, over all of the build's jobs.
func (s service) Status(in *control.StatusRequest, stream control.Control_StatusServer) error {
	ctx := stream.Context()
	b, err := s.await(ctx, callerOf(ctx).Tenant(), in.Ref)
	if err != nil {
		return err
	}
	for {
		j, changed := b.current()
		from, err := s.control().Status(ctx, &control.StatusRequest{Ref: j.ref})
		err = each(from, err, func(m *control.StatusResponse) error {
			b.show(m)
			return stream.Send(m)
		})
		select {
		case <-changed:
		case <-b.over:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// show replaces pins by the names that the client knows. It leaves out errors after which the
// next job goes on.
func (b *build) show(m *control.StatusResponse) {
	b.mu.Lock()
	names := b.sources.shown()
	b.mu.Unlock()
	for _, v := range m.Vertexes {
		v.Name = names.Replace(v.Name)
		if missing(v.Error) != "" || strings.Contains(v.Error, context.Canceled.Error()) {
			v.Error = ""
		}
	}
	for _, v := range m.Statuses {
		v.ID, v.Name = names.Replace(v.ID), names.Replace(v.Name)
	}
}

// remember notes the operations and references of a result.
func (b *build) remember(r *gateway.Result) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.results == nil: // it has ended
		return nil
	case len(b.results) >= maxResults:
		return status.Errorf(codes.ResourceExhausted, "the build has %d results, the most that one may have", len(b.results))
	}
	if b.bytes += proto.Size(r); b.bytes > maxBytes {
		return status.Error(codes.ResourceExhausted, "the results of the build are too large")
	}
	for _, ref := range references(r) {
		b.results[ref.GetId()] = r
		for _, op := range ref.GetDef().GetDef() {
			sum := sha256.Sum256(op)
			if b.ops[sum] != nil {
				continue
			}
			meta := metadataOf(ref.Def, op)
			if size := proto.Size(meta); len(b.ops) < maxOps && b.kept+size <= maxKept {
				b.ops[sum], b.kept = meta, b.kept+size
			}
		}
	}
	return nil
}

// metadataOf returns an operation's metadata in a definition, with only the fields that Berm passes on.
func metadataOf(def *pb.Definition, op []byte) *pb.OpMetadata {
	m := def.Metadata[digestOf(op)]
	return &pb.OpMetadata{IgnoreCache: m.GetIgnoreCache(), Description: m.GetDescription(), Caps: m.GetCaps(), LinuxResources: m.GetLinuxResources()}
}

// knows reports whether the engine returned an operation to a build of the tenant's, and returns
// the operation's metadata.
func (s *Server) knows(tenant string, op []byte) (*pb.OpMetadata, bool) {
	sum := sha256.Sum256(op)
	s.mu.Lock()
	defer s.mu.Unlock()
	for key, b := range s.builds {
		if key[0] == tenant {
			if meta, ok := b.returned(sum); ok {
				return meta, true
			}
		}
	}
	return nil, false
}

func (b *build) returned(op [32]byte) (*pb.OpMetadata, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	meta, ok := b.ops[op]
	return meta, ok
}
