package engineapi

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy/engineapi/body"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// nestedIn is what a container was allowed that has mounts at these paths in a bind at target.
func nestedIn(target, runtime string, inner ...string) effective {
	e := effective{Granted: body.Granted{ContainerSpec: policy.ContainerSpec{Runtime: runtime, Binds: []policy.Mount{{Source: "/srv/app", MountPath: target, Mode: "rw"}}}}}
	for _, at := range inner {
		e.Tmpfs = append(e.Tmpfs, policy.ContainerMount{Type: "tmpfs", Target: at})
	}
	return e
}

// TestRefuseWriters starts a container beside others that could lead an old runc elsewhere.
func TestRefuseWriters(t *testing.T) {
	bound := func(tenant, source string, writes bool) string {
		return fmt.Sprintf(`{"Id":%q,"Labels":{"tenant":%q},"Mounts":[{"Type":"bind","Source":%q,"Destination":"/x","RW":%v}]}`, theirsID, tenant, source, writes)
	}
	const (
		runc  = `{"Version":"28.0.0","Components":[{"Name":"runc","Version":%q}]}`
		crun  = `{"Version":"28.0.0","Components":[{"Name":"crun","Version":"9.9.9"}]}`
		fails = "!"
	)
	tmp := nestedIn("/app", "", "/app/tmp")
	sibling := fmt.Sprintf(`{"Id":%q,"Labels":{"tenant":"mine"}}`, theirsID)
	self := fmt.Sprintf(`{"Id":%q,"Labels":{"tenant":"mine"},"Mounts":[{"Type":"bind","Source":"/srv/app","Destination":"/app","RW":true}]}`, mineID)
	for name, tt := range map[string]struct {
		e             effective
		version, list string
		rule          string
	}{
		"alone":                               {tmp, fmt.Sprintf(runc, "1.1.5"), self, ""},
		"one of the tenant's":                 {tmp, fmt.Sprintf(runc, "1.1.5"), self + "," + sibling, ruleNested},
		"a stranger":                          {tmp, fmt.Sprintf(runc, "1.1.5"), bound("theirs", "/srv/other", true), ""},
		"a stranger that reads":               {tmp, fmt.Sprintf(runc, "1.1.5"), bound("theirs", "/srv/app", false), ""},
		"a stranger that writes":              {tmp, fmt.Sprintf(runc, "1.1.5"), bound("theirs", "/srv", true), ruleNested},
		"a stranger that writes below":        {tmp, fmt.Sprintf(runc, "1.1.5"), bound("theirs", "/srv/app/tmp", true), ruleNested},
		"nothing is nested":                   {nestedIn("/app", "", "/tmp"), fmt.Sprintf(runc, "1.1.5"), sibling, ""},
		"only what the engine mounts":         {nestedIn("/etc", ""), fmt.Sprintf(runc, "1.1.5"), sibling, ruleNested},
		"a safe runc":                         {tmp, fmt.Sprintf(runc, "1.3.3"), sibling, ""},
		"a safe runc, by its name":            {nestedIn("/app", "runc", "/app/tmp"), fmt.Sprintf(runc, "1.3.3"), sibling, ""},
		"a safe runc, and another runtime":    {nestedIn("/app", "kata", "/app/tmp"), fmt.Sprintf(runc, "1.3.3"), sibling, ruleNested},
		"another runtime is the default":      {tmp, crun, sibling, ruleNested},
		"the engine doesn't tell its version": {tmp, "500 no", self, fails},
		"the engine doesn't list":             {tmp, fmt.Sprintf(runc, "1.1.5"), "", fails},
	} {
		t.Run(name, func(t *testing.T) {
			d, s, _ := scripted(t, "1.51", "")
			s.answers["GET /"] = tt.version // of /version
			labels := d.sealed(lifecycle.ObjectContainer, "mine")
			if s.answers["GET /containers/json"] = "500 no"; tt.list != "" {
				s.answers["GET /containers/json"] = "[" + strings.ReplaceAll(tt.list, `{"tenant":"mine"}`, labels) + "]"
			}
			ct := &container.InspectResponse{
				ContainerJSONBase: &container.ContainerJSONBase{ID: mineID}, Config: &container.Config{Labels: d.labels(lifecycle.ObjectContainer, "mine")},
				Mounts: []container.MountPoint{{Type: mount.TypeBind, Source: "/srv/app", Destination: "/app", RW: true}},
			}
			c := &call{Proxy: d.Proxy, ctx: t.Context(), rules: d.opts.Policy(), caller: Caller{Name: "mine", Tenant: "mine"}, version: 51}
			err := refuseWriters(c, tt.e, ct)
			var denied *policy.DeniedError
			switch is := errors.As(err, &denied); {
			case tt.rule == "" && err != nil, tt.rule == fails && (err == nil || is):
				t.Error(err)
			case tt.rule == ruleNested && (!is || denied.Reasons[0].Rule != ruleNested):
				t.Error(err)
			}
		})
	}
}

// TestMountPoints makes mount points in binds, where a directory may be made and no link leads away.
func TestMountPoints(t *testing.T) {
	dir := workDir(t)
	app, conf, outside := dir+"/app", dir+"/conf", dir+"/outside"
	must(t, errors.Join(os.Mkdir(app, 0o755), os.Mkdir(conf, 0o755), os.Mkdir(outside, 0o755), os.Mkdir(app+"/there", 0o755), os.WriteFile(app+"/file", nil, 0o644),
		os.Symlink(outside, app+"/link"), os.Symlink("there", app+"/inner"), os.Mkdir(conf+"/only", 0o755)))
	d, _, _ := scripted(t, "1.51", workRules(dir))
	c := &call{Proxy: d.Proxy, ctx: t.Context(), rules: d.opts.Policy()}
	for name, tt := range map[string]struct {
		n      body.Nested
		mode   string
		reason string // in the refusal; empty is none
		made   bool
	}{
		"a directory":                       {body.Nested{Rel: "there"}, "rw", "", true},
		"a directory, read-only":            {body.Nested{Rel: "there"}, "ro", "", true},
		"a file":                            {body.Nested{Rel: "file", File: true}, "rw", "", true},
		"of another bind":                   {body.Nested{Outer: 1, Rel: "only"}, "ro", "", true},
		"of the wrong bind":                 {body.Nested{Rel: "only"}, "ro", "no directory there", false},
		"missing":                           {body.Nested{Rel: "a/b"}, "rw", "", true},
		"missing, read-only":                {body.Nested{Rel: "c"}, "ro", "no directory there", false},
		"a file that is missing":            {body.Nested{Rel: "f", File: true}, "rw", "no file there", false},
		"a file for a directory":            {body.Nested{Rel: "file"}, "rw", "no directory there", true},
		"below a file":                      {body.Nested{Rel: "file/x"}, "rw", "no directory there", false},
		"a directory for a file":            {body.Nested{Rel: "there", File: true}, "rw", "no file there", true},
		"a link":                            {body.Nested{Rel: "link"}, "rw", "only by a link", true},
		"a link within":                     {body.Nested{Rel: "inner"}, "rw", "only by a link", true},
		"below a link":                      {body.Nested{Rel: "link/x"}, "rw", "only by a link", false},
		"below a link within":               {body.Nested{Rel: "inner/x"}, "rw", "only by a link", false},
		"a file of the engine's, in a bind": {body.Nested{Target: "/app/hosts", File: true}, "rw", "", true},
	} {
		t.Run(name, func(t *testing.T) {
			e := effective{Granted: body.Granted{ContainerSpec: policy.ContainerSpec{Binds: []policy.Mount{{MountPath: "/app", Mode: tt.mode}, {MountPath: "/conf", Mode: tt.mode}}}, Sources: []string{app, conf}}}
			err := mountPoints(c, &e, []body.Nested{tt.n})
			if (err == nil) != (tt.reason == "") || err != nil && !strings.Contains(err.Error(), tt.reason) {
				t.Errorf("%v, not %q", err, tt.reason)
			}
			if _, err := os.Lstat(e.Sources[tt.n.Outer] + "/" + tt.n.Rel); (err == nil) != tt.made {
				t.Errorf("%v", err)
			}
			if left, err := os.ReadDir(outside); err != nil || len(left) > 0 {
				t.Errorf("made outside: %v, %v", left, err)
			}
		})
	}
	if left, err := os.ReadDir(app + "/there"); err != nil || len(left) > 0 {
		t.Errorf("made through a link: %v, %v", left, err)
	}
	c.rules = check.Value(policy.Parse([]byte(workRules(dir)), policy.Options{DefaultImage: testImage, MakeDir: func(dir, rel string, _ *policy.Owner) error {
		return os.Symlink(outside, dir+"/"+rel) // as another exchanges what was made
	}}))(t)
	e := effective{Granted: body.Granted{ContainerSpec: policy.ContainerSpec{Binds: []policy.Mount{{MountPath: "/app", Mode: "rw"}}}, Sources: []string{app}}}
	if err := mountPoints(c, &e, []body.Nested{{Rel: "swapped"}}); err == nil {
		t.Error("a link took the place of what was made")
	}
}
