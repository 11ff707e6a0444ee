package sandboxapi_test

import (
	"context"
	"io"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/containerd/errdefs"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/sandboxapi"
)

func (s *scripted) Files(ctx context.Context, tenant, key string) (*lifecycle.Access, error) {
	return s.access(ctx, tenant, key, (*lifecycle.Service).Files)
}

func (s *scripted) Ports(ctx context.Context, tenant, key string) (*lifecycle.Access, error) {
	return s.access(ctx, tenant, key, (*lifecycle.Service).Ports)
}

func (s *scripted) access(ctx context.Context, tenant, key string, to func(*lifecycle.Service, context.Context, string, string) (*lifecycle.Access, error)) (*lifecycle.Access, error) {
	if _, err := s.outcome(); err != nil {
		return nil, err
	}
	if s.house == nil {
		return nil, errdefs.ErrNotImplemented
	}
	return to(s.house.Service, ctx, tenant, key)
}

// fileAnswers goes through every status of the files calls.
func fileAnswers(d *door) {
	d.calm()
	d.manager.house = newHouse(d.t, nil)
	for _, name := range []string{"/d/f", "/d/g", "/d/h"} {
		d.manager.house.put(name, "find me\n")
	}
	const octets, tarball = "application/octet-stream", "application/x-tar"
	all := slices.Concat(engine, []outcome{missing, wrongState, capacity, cant})
	for _, op := range []operation{
		{"GET", at("", "/d/f"), "", 200, false, all},
		{"HEAD", at("", "/d/f"), "", 200, false, all},
		{"GET", at("/stat", "/d/f"), "", 200, false, all},
		{"GET", at("/list", "/d", "depth", "2", "limit", "2"), "", 200, false, all},
		{"GET", at("/glob", "/d", "pattern", "*"), "", 200, false, all},
		{"GET", at("/search", "/d", "pattern", "me", "literal", "true", "ignore_case", "false", "include", "*"), "", 200, false, all},
		{"GET", at("/tar", "/d"), "", 200, false, all},
		{"GET", at("/watch", "/none", "recursive", "true"), "", 404, false, all}, // another has no end to wait for
	} {
		d.answers(op, "", powerless, d.manager.fail)
	}
	d.answers(operation{"DELETE", at("", "/d/h", "recursive", "true"), "", 204, false, all}, "", "", d.manager.fail)
	d.answers(operation{"POST", filesPath + "/move", `{"from":"/d/g","to":"/d/h"}`, 204, false, all}, jsonType, "", d.manager.fail)
	all = append(all, overQuota)
	d.answers(operation{"PUT", at("", "/d/x", "mode", "0600", "mkdir", "true", "append", "false"), "x", 200, false, all}, octets, "", d.manager.fail)
	d.answers(operation{"PUT", at("/tar", "/d"), string(make([]byte, 1024)), 204, false, all}, tarball, "", d.manager.fail)
	d.answers(operation{"POST", filesPath + "/mkdir", `{"path":"/d/e","mode":"0700","parents":true}`, 204, false, all}, jsonType, "", d.manager.fail)
	d.answers(operation{"POST", filesPath + "/copy", `{"from":"/d/f","to":"/d/c"}`, 204, false, all}, jsonType, "", d.manager.fail)
	resp := d.do(d.t.Context(), "GET", at("/watch", "/d"), "")
	if _, err := io.ReadFull(resp.Body, make([]byte, len("event: ready\n"))); err != nil {
		d.t.Error(err)
	}
	_ = resp.Body.Close()

	d.want(206, "", "GET", at("", "/d/f"), "", withHeader("Range", "bytes=1-2"))
	d.want(416, "range", "GET", at("", "/d/f"), "", withHeader("Range", "bytes=100-"))
	d.want(304, "", "GET", at("", "/d/f"), "", withHeader("If-None-Match", "*"))
	d.want(304, "", "HEAD", at("", "/d/f"), "", withHeader("If-None-Match", "*"))
	d.want(200, "", "GET", at("/list", "/d"), "", withHeader("Accept", "application/x-ndjson"))
	d.want(200, "", "GET", at("/glob", "/d", "pattern", "*"), "", withHeader("Accept", "application/x-ndjson"))
	d.want(200, "", "GET", at("/search", "/d", "pattern", "me"), "", withHeader("Accept", "application/x-ndjson"))
	d.want(412, "precondition_failed", "PUT", at("", "/d/f"), "x", withHeader("Content-Type", octets), withHeader("If-None-Match", "*"))
	for _, path := range []string{at("", "/d/f"), at("/tar", "/d")} {
		d.want(415, "unsupported_media_type", "PUT", path, "x", withHeader("Content-Type", octets), withHeader("Content-Encoding", "br"))
	}
}

// portAnswers goes through every status of the ports' calls.
func portAnswers(d *door) {
	d.calm()
	h := newHouse(d.t, nil)
	d.manager.house = h
	h.serve(8000, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") }))
	stop := make(chan struct{})
	h.fake.Listen(8001, func(c net.Conn) {
		go func() { _, _ = io.Copy(io.Discard, c) }()
		<-stop // says nothing
		_ = c.Close()
	})
	defer close(stop)
	urls := operation{"POST", "/api/v1/sandboxes/k/urls", `{"port":8000,"ttl":"1h"}`, 201, false, slices.Concat(engine, []outcome{missing, wrongState, capacity, cant})}
	d.answers(urls, jsonType, "", d.manager.fail)

	sign := func(d *door, body string) string {
		var u apitype.PortURL
		d.want(201, "", "POST", "/api/v1/sandboxes/k/urls", body).decode(d.t, &u)
		return u.Path
	}
	impatient := d.rebuilt(func(o *sandboxapi.Options) { o.PortTimeout = 50 * time.Millisecond })
	impatient.want(504, "port_timeout", "GET", "/api/v1/sandboxes/k/ports/8001/x", "")
	impatient.want(504, "port_timeout", "GET", sign(impatient, `{"port":8001}`)+"x", "")
	open, dead := sign(d, `{"port":8000}`), sign(d, `{"port":8002}`)
	outcomes := slices.Concat(engine[:2], []outcome{wrongState, capacity, cant})
	d.want(200, "", "GET", portPath+"/x", "")
	d.want(401, "unauthorized", "GET", portPath+"/x", "", withToken(""))
	d.want(403, "origin_refused", "GET", portPath+"/x", "", withHeader("Origin", "https://evil.example"))
	d.want(421, "host_refused", "GET", portPath+"/x", "", withHost("evil.example"))
	d.want(422, "validation", "GET", "/api/v1/sandboxes/k/ports/99999/x", "")
	d.want(400, "malformed", "GET", "/api/v1/sandboxes/k%2f/ports/8000/x", "")
	d.want(502, "port_unreachable", "GET", "/api/v1/sandboxes/k/ports/8002/x", "")
	d.want(200, "", "GET", open+"x", "", withToken(""))
	d.want(421, "host_refused", "GET", open+"x", "", withHost("evil.example"))
	d.want(403, "url_invalid", "GET", "/p/x/x", "", withToken(""))
	d.want(502, "port_unreachable", "GET", dead+"x", "", withToken(""))
	for _, o := range outcomes {
		d.manager.err = o.err
		d.want(o.status, o.code, "GET", portPath+"/x", "")
		d.want(o.status, o.code, "GET", open+"x", "", withToken(""))
	}
	d.manager.err = missing.err
	d.want(404, "not_found", "GET", portPath+"/x", "")
	d.want(410, "url_expired", "GET", open+"x", "", withToken(""))
	d.manager.err = nil
}
