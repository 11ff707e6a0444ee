package engineapi

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/build"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/registry"
	"github.com/docker/docker/client"
	"github.com/docker/go-connections/nat"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/runtimetest/check"
	private "github.com/bermhq/berm/runtime/runtimetest/engine"
)

const buildPolicy = `version: 1
images: {allow: ["berm.local/*"]}
profiles: {default: {engine_api: {build: "on", tags: ["built.local/mine/*"]}}}
`

// contextOf is an archive with a Dockerfile.
func contextOf(t *testing.T, dockerfile string) io.Reader {
	t.Helper()
	return bytes.NewReader(tarOf(t, "Dockerfile", dockerfile))
}

// TestBuild has two tenants build the same.
func TestBuild(t *testing.T) {
	d, direct := engineDoor(t, buildPolicy)
	mine, other, ctx := d.client("mine"), d.client("other"), t.Context()
	const tag, second, cached = "built.local/mine/app:1", "built.local/mine/app:2", "Using cache"
	dockerfile := "FROM " + testImage + "\nLABEL a=b\nRUN cat /proc/sys/kernel/random/uuid > /u\n"
	said := func(c *client.Client, dockerfile string, o build.ImageBuildOptions) (text, id string) {
		t.Helper()
		text, id, err := buildOf(ctx, t, c, dockerfile, o)
		must(t, err)
		return text, id
	}
	first, id := said(mine, dockerfile, build.ImageBuildOptions{Tags: []string{tag}})
	was := check.Value(direct.ImageInspect(ctx, tag))(t)
	if !strings.Contains(first, "Successfully tagged "+tag) || was.ID != id || was.Config.Labels[lifecycle.LabelTenant] != "mine" || was.Config.Labels["a"] != "b" {
		t.Errorf("built: %+v, %s", was.Config, first)
	}
	if list, err := mine.ImageList(ctx, image.ListOptions{}); err != nil || !slices.ContainsFunc(list, func(i image.Summary) bool { return i.ID == id }) {
		t.Errorf("the builder doesn't see it: %v", err)
	}
	if text, _ := said(mine, dockerfile, build.ImageBuildOptions{CacheFrom: []string{tag, "built.local/mine/none:1"}}); !strings.Contains(text, cached) {
		t.Errorf("what one built itself isn't taken from the cache: %s", text)
	}
	if text, _ := said(other, dockerfile, build.ImageBuildOptions{}); strings.Contains(strings.SplitAfterN(text, "RUN", 2)[1], cached) {
		t.Error("what another built is taken from the cache")
	}
	if text, _, err := buildOf(ctx, t, other, dockerfile, build.ImageBuildOptions{CacheFrom: []string{tag, id}}); err == nil {
		t.Errorf("from another's cache: %s", text)
	}
	// A name of one's own isn't another's to take or remove, even if the policy lets both give it.
	if _, _, err := buildOf(ctx, t, other, "FROM "+testImage+"\n", build.ImageBuildOptions{Tags: []string{tag}}); err == nil || !strings.Contains(err.Error(), "is taken") {
		t.Errorf("another's name: %v", err)
	}
	const listed = "berm.local/built-theirs:1"
	must(t, direct.ImageTag(ctx, tag, listed))
	wantErr(t, errdefs.IsPermissionDenied, errOf(other.ImageRemove(ctx, listed, image.RemoveOptions{})), "another removes it by a name on the allow-list")
	check.Value(direct.ImageRemove(ctx, listed, image.RemoveOptions{}))(t)
	if is, err := direct.ImageInspect(ctx, tag); err != nil || is.ID != id {
		t.Errorf("the name was moved: %v", err)
	}
	if _, _, err := buildOf(ctx, t, other, "FROM "+tag+"\n", build.ImageBuildOptions{}); !errdefs.IsPermissionDenied(err) && !errdefs.IsNotFound(err) {
		t.Errorf("another's base: %v", err)
	}
	auditing := newClient(t, d.listen(Caller{Name: "auditor", Tenant: "other", Audit: true}))
	for _, line := range []string{"FROM " + tag, "FROM " + id, "FROM " + testImage + "\nCOPY --from=" + tag + " /u /u"} {
		if _, _, err := buildOf(ctx, t, auditing, line+"\n", build.ImageBuildOptions{}); !errdefs.IsNotFound(err) {
			t.Errorf("another's image in mode audit: %v", err)
		}
	}
	said(mine, "FROM "+tag+"\n", build.ImageBuildOptions{Labels: map[string]string{"berm.ttl": "20m"}, Tags: []string{tag}})
	_, last := said(mine, "FROM "+tag+"\n", build.ImageBuildOptions{Tags: []string{second}}) // of one's own with a life
	check.Value(mine.ImageRemove(ctx, second, image.RemoveOptions{}))(t)
	wantErr(t, errdefs.IsNotFound, errOf(direct.ImageInspect(ctx, last)), "removed, and still there")
}

// TestBuildRewritten has the engine read what Berm writes of a Dockerfile.
func TestBuildRewritten(t *testing.T) {
	d, direct := engineDoor(t, strings.Replace(buildPolicy, `build: "on"`, `build: "on", build_add_url: ["http://127.0.0.1:1/pub/"]`, 1))
	c, ctx, tag := d.client("mine"), t.Context(), "latest"
	dockerfile := "# syntax=evil.local/x\n# escape=`\nARG NAME=evil.local/x\nARG TAG\nFROM ${NAME}:$TAG AS Base\n" +
		"RUN echo \\a `\n  b\nENV A=\"b $HOME c\" D=e\nENV f g  h\nLABEL \"a b\"='c $D' i=$D\nEXPOSE 80 81\nHEALTHCHECK --retries=2 CMD [\"a b\", \"<<\"]\n" +
		"ONBUILD USER 1\nFROM base\nONBUILD COPY a b\nVOLUME [\"/a b\"]\nCMD [ -e /x ] && echo 'a' \\$B\n"
	_, id, err := buildOf(ctx, t, c, dockerfile, build.ImageBuildOptions{BuildArgs: map[string]*string{"TAG": &tag, "NAME": new("berm.local/busybox")}})
	if err != nil {
		t.Fatal(err)
	}
	img := check.Value(direct.ImageInspect(ctx, id))(t)
	got, _ := json.Marshal(struct{ Env, Cmd, Test, OnBuild, Volumes, Ports, Labels any }{
		img.Config.Env[len(img.Config.Env)-3:], img.Config.Cmd, img.Config.Healthcheck, img.Config.OnBuild, img.Config.Volumes, img.Config.ExposedPorts, []string{img.Config.Labels["a b"], img.Config.Labels["i"]},
	})
	const want = `{"Env":["A=b  c","D=e","f=g  h"],"Cmd":["/bin/sh","-c","[ -e /x ] \u0026\u0026 echo 'a' \\$B"],"Test":{"Test":["CMD","a b","\u003c\u003c"],"Retries":2},` +
		`"OnBuild":["COPY a b"],"Volumes":{"/a b":{}},"Ports":{"80/tcp":{},"81/tcp":{}},"Labels":["c $D","e"]}`
	if string(got) != want {
		t.Errorf("built: %s", got)
	}
	_, _, err = buildOf(ctx, t, c, "FROM "+testImage+"\nADD http://127.0.0.1:1/pub/x /x\n", build.ImageBuildOptions{})
	if err == nil || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("an address that the policy allows: %v", err)
	}
}

func TestImages(t *testing.T) {
	d, direct := engineDoor(t, "version: 1\nimages: {allow: [\"berm.local/*\", \"tags.local/mine/*\"]}\nprofiles: {default: {engine_api: {tags: [\"tags.local/mine/*\", \"tags.local/unlisted/*\"]}}}\n")
	c, ctx := d.client("mine"), t.Context()
	const secret = "secret.local/other:1"
	must(t, direct.ImageTag(ctx, testImage, secret))
	defer func() { _, _ = direct.ImageRemove(ctx, secret, image.RemoveOptions{}) }()
	list, err := c.ImageList(ctx, image.ListOptions{})
	if err != nil || len(list) != 1 || !slices.Equal(list[0].RepoTags, []string{testImage}) {
		t.Errorf("list: %+v, %v", list, err)
	}
	img, err := c.ImageInspect(ctx, testImage)
	if err != nil || !slices.Equal(img.RepoTags, []string{testImage}) {
		t.Errorf("inspect: %+v, %v", img.RepoTags, err)
	}
	if driver := img.GraphDriver; driver.Name == "" || slices.ContainsFunc(slices.Collect(maps.Values(driver.Data)), func(v string) bool { return v != redacted }) {
		t.Errorf("where its layers are: %+v", driver)
	}
	if told, err := direct.ImageInspect(ctx, testImage); err != nil || len(told.GraphDriver.Data) != len(img.GraphDriver.Data) || len(told.GraphDriver.Data) == 0 {
		t.Errorf("what there is to hide: %+v, %v", told.GraphDriver, err)
	}
	history, err := c.ImageHistory(ctx, img.ID)
	if err != nil || len(history) == 0 || slices.Contains(history[0].Tags, secret) {
		t.Errorf("history: %+v, %v", history, err)
	}
	report(t, c.ImageTag(ctx, testImage, "tags.local/mine/x:1"))
	for _, target := range []string{testImage, "python:3.11-slim", "tags.local/other/x", "tags.local/unlisted/x", "other.local/x"} {
		if err := c.ImageTag(ctx, testImage, target); !errdefs.IsPermissionDenied(err) && !errdefs.IsInvalidArgument(err) {
			t.Errorf("tag %s: %v", target, err)
		}
	}
	report(t, errOf(c.ImageRemove(ctx, "tags.local/mine/x:1", image.RemoveOptions{})))
	if img, err := direct.ImageInspect(ctx, testImage); err != nil || slices.Contains(img.RepoTags, "tags.local/mine/x:1") {
		t.Errorf("removed, and still there: %v, %v", img.RepoTags, err)
	}
	wantErr(t, errdefs.IsPermissionDenied, errOf(c.ImageRemove(ctx, testImage, image.RemoveOptions{Force: true})), "by force")
	wantErr(t, errdefs.IsPermissionDenied, errOf(c.ImageRemove(ctx, testImage, image.RemoveOptions{})), "remove what nobody can pull again")
	wantErr(t, errdefs.IsNotFound, errOf(c.ImageSave(ctx, []string{testImage, "x/../../containers"})), "save what is no name")
	wantErr(t, errdefs.IsNotFound, errOf(c.ImageRemove(ctx, secret, image.RemoveOptions{})), "remove a name that isn't seen")
	wantErr(t, errdefs.IsConflict, errOf(c.ImageRemove(ctx, img.ID, image.RemoveOptions{})), "remove by ID what has another's name")
	wantErr(t, errdefs.IsPermissionDenied, errOf(c.ImagePull(ctx, "evil.local/x", image.PullOptions{})), "pull")
	if _, err := c.ImageImport(ctx, image.ImportSource{SourceName: "http://127.0.0.1/x"}, "x", image.ImportOptions{}); err == nil {
		t.Error("import was taken")
	}
	if _, err := c.ImageLoad(ctx, bytes.NewReader(nil)); err == nil {
		t.Error("load was taken")
	}
	r := check.Value(c.ImageSave(ctx, []string{testImage}))(t)
	saved, err := io.ReadAll(r)
	_ = r.Close()
	if err != nil || !bytes.Contains(saved, []byte("berm.local/busybox")) || bytes.Contains(saved, []byte("secret.local")) {
		t.Errorf("save: %d bytes, %v", len(saved), err)
	}
}

func TestCommit(t *testing.T) {
	host, direct := testEngine(t)
	d := doorTo(t, host, `version: 1
images: {allow: ["berm.local/*"]}
profiles: {default: {engine_api: {commit: "on", tags: ["commit.local/mine/*"], redact_env: ["*_TOKEN"]}}}
`)
	id := d.made(direct, "mine", "commit", container.Config{Env: []string{"PLAIN=seen"}})
	redacted := d.made(direct, "mine", "commit-redacted", container.Config{Env: []string{"API_TOKEN=hunter2"}})
	foreign := d.made(direct, "other", "commit-other", container.Config{})
	c, ctx := d.client("mine"), t.Context()
	made := check.Value(c.ContainerCommit(ctx, id, container.CommitOptions{Reference: "commit.local/mine/x:1", Comment: "a comment"}))(t)
	img, err := direct.ImageInspect(ctx, "commit.local/mine/x:1")
	if err != nil || img.ID != made.ID || img.Config.Labels[lifecycle.LabelTenant] != "mine" {
		t.Errorf("committed: %+v, %v", img.Config, err)
	}
	if env := strings.Join(img.Config.Env, " "); !strings.Contains(env, "PLAIN=seen") {
		t.Errorf("env: %q", env)
	}
	var shown struct{ Config, ContainerConfig json.RawMessage }
	_, raw, err := c.ImageInspectWithRaw(ctx, made.ID) //nolint:staticcheck // the raw answer is what counts
	must(t, err)
	if err := json.Unmarshal(raw, &shown); err != nil || shown.ContainerConfig != nil && !bytes.Equal(shown.ContainerConfig, shown.Config) {
		t.Errorf("what it was made of is shown: %s, %v", raw, err)
	}
	wantErr(t, errdefs.IsPermissionDenied, errOf(c.ContainerCommit(ctx, redacted, container.CommitOptions{})), "with what is redacted")
	for name, options := range map[string]container.CommitOptions{
		"tag":     {Reference: testImage},
		"changes": {Changes: []string{"ONBUILD USER 0"}},
		"config":  {Config: &container.Config{OnBuild: []string{"USER 0"}}},
		"labels":  {Config: &container.Config{Labels: map[string]string{lifecycle.LabelTenant: "other"}}},
		"line":    {Config: &container.Config{User: "0\nONBUILD USER 0"}},
	} {
		wantErr(t, errdefs.IsPermissionDenied, errOf(c.ContainerCommit(ctx, id, options)), "%s", name)
	}
	configured := check.Value(c.ContainerCommit(ctx, id, container.CommitOptions{Changes: []string{"ENV LATER=$A"}, Config: &container.Config{
		Entrypoint: []string{"echo", `"<$x>"`}, Cmd: []string{"a b"}, Env: []string{"A=b c", "Q=$A\\\""}, User: "1:2", WorkingDir: "/tmp/$x", Labels: map[string]string{"l.x": "v $x"},
		ExposedPorts: nat.PortSet{"80/tcp": {}}, Volumes: map[string]struct{}{"/v 1": {}},
	}}))(t)
	got := check.Value(direct.ImageInspect(ctx, configured.ID))(t).Config
	if all := fmt.Sprint(got.Entrypoint, got.Cmd, got.Env[len(got.Env)-3:], got.User, got.WorkingDir, got.Labels["l.x"], got.Labels[lifecycle.LabelTenant], got.ExposedPorts, got.Volumes); all !=
		`[echo "<$x>"] [a b] [A=b c Q=$A\" LATER=b c]1:2/tmp/$xv $xminemap[80/tcp:{}] map[/v 1:{}]` {
		t.Errorf("configured: %s", all)
	}
	wantErr(t, errdefs.IsNotFound, errOf(c.ContainerCommit(ctx, foreign, container.CommitOptions{})), "another's container")
}

// TestPull brings images from a registry that asks for a password.
func TestPull(t *testing.T) {
	ctx := t.Context()
	const user, password = "puller", "p4ssw0rd-of-the-registry"
	shop := check.Value(private.StartRegistry(ctx, private.RegistryOptions{Netns: shared.engine.Netns(), User: user, Password: password}))(t)
	t.Cleanup(func() {
		report(t, shop.Close())
	})
	must(t, errors.Join(shop.Push(ctx, "team/tool:1", "ENV A=1"), shop.Push(ctx, "team/tool:2"), shop.Push(ctx, "secret/x:1")))
	repo := shop.Host() + "/team/tool"
	rules := func(more string) string {
		return "version: 1\nimages: {allow: [" + repo + "], " + more + "}\nprofiles: {default: {engine_api: {build: \"on\"}}}\n"
	}
	d, direct := engineDoor(t, rules("require_digest: false"))
	c := d.client("pull")
	text := check.Value(json.Marshal(registry.AuthConfig{Username: user, Password: password, ServerAddress: shop.Host()}))(t)
	auth := base64.URLEncoding.EncodeToString(text)
	pull := func(ref, auth string) (string, error) {
		r, err := c.ImagePull(ctx, ref, image.PullOptions{RegistryAuth: auth})
		if err != nil {
			return "", err
		}
		defer r.Close()
		said, err := io.ReadAll(r)
		if err == nil && bytes.Contains(said, []byte(`"error"`)) {
			err = errors.New(string(said))
		}
		return string(said), err
	}
	remove := func(ref string) {
		t.Helper()
		report(t, errOf(direct.ImageRemove(ctx, ref, image.RemoveOptions{Force: true})))
	}
	if said, err := pull(repo+":1", ""); err == nil {
		t.Errorf("without a password: %s", said)
	}
	// A build has the base pulled, with the credentials of the image's own registry.
	auths := map[string]registry.AuthConfig{"elsewhere.local": {Username: "x", Password: "y"}, shop.Host(): {Username: user, Password: password}}
	if _, _, err := buildOf(ctx, t, c, "FROM "+repo+":1\nRUN true\n", build.ImageBuildOptions{}); err == nil {
		t.Error("a build has its base without a password")
	}
	if _, _, err := buildOf(ctx, t, c, "FROM "+repo+":1\nRUN true\n", build.ImageBuildOptions{AuthConfigs: auths, PullParent: true}); err != nil {
		t.Errorf("build: %v", err)
	}
	said, err := pull(repo+":1", auth)
	if err != nil || !strings.Contains(said, "Digest: sha256:") {
		t.Fatalf("pull: %v, %s", err, said)
	}
	_, digest, _ := strings.Cut(said, "Digest: ")
	digest, _, _ = strings.Cut(digest, `"`)
	wantErr(t, errdefs.IsPermissionDenied, c.ImageTag(ctx, repo+":1", "x/y"), "tag")
	if said, err := pull(shop.Host()+"/secret/x:1", auth); !errdefs.IsPermissionDenied(err) {
		t.Errorf("what isn't allowed: %v, %s", err, said)
	}
	for name, bad := range map[string]string{
		"no base64":  "&&&",
		"twice":      base64.URLEncoding.EncodeToString([]byte(`{"username":"a","username":"b"}`)),
		"a list":     base64.URLEncoding.EncodeToString([]byte(`[]`)),
		"and more":   base64.URLEncoding.EncodeToString([]byte(`{} {}`)),
		"very large": base64.URLEncoding.EncodeToString([]byte(`{"username":"` + strings.Repeat("a", maxRegistryAuth) + `"}`)),
	} {
		if said, err := pull(repo+":1", bad); !errdefs.IsInvalidArgument(err) {
			t.Errorf("credentials, %s: %v, %s", name, err, said)
		}
	}
	if _, err := c.ImageRemove(ctx, repo+":1", image.RemoveOptions{}); err != nil {
		t.Errorf("remove: %v", err)
	}

	// Pinned, the name leads to the digest, and only that is there.
	c = doorTo(t, d.host, rules("pins: {"+repo+":2: "+digest+"}")).client("pins")
	if said, err := pull(repo+":2", auth); err != nil || !strings.Contains(said, digest) {
		t.Errorf("pinned: %v, %s", err, said)
	}
	list, err := direct.ImageList(ctx, image.ListOptions{})
	if err != nil || !slices.ContainsFunc(list, func(i image.Summary) bool { return slices.Contains(i.RepoDigests, repo+"@"+digest) }) ||
		slices.ContainsFunc(list, func(i image.Summary) bool { return slices.Contains(i.RepoTags, repo+":2") }) {
		t.Errorf("pinned: %+v, %v", list, err)
	}
	remove(repo + "@" + digest)

	if log := readFile(t, d.audit); bytes.Contains(log, []byte(password)) || bytes.Contains(log, []byte(auth)) || !bytes.Contains(log, []byte(`"/images/create"`)) {
		t.Errorf("the audit log tells the password, or nothing: %s", log)
	}
}

// TestBuildLimits builds with hosts and limits that the policy allows, and with others.
func TestBuildLimits(t *testing.T) {
	rules := strings.Replace(buildPolicy, `build: "on"`, `build: "on", dns: "on", max_ulimit: 100`, 1)
	d, _ := engineDoor(t, rules)
	c, ctx := d.client("mine"), t.Context()
	files := func(most int64) []*container.Ulimit {
		return []*container.Ulimit{{Name: "nofile", Soft: 64, Hard: most}}
	}
	good := build.ImageBuildOptions{ExtraHosts: []string{"other:192.0.2.7"}, Ulimits: files(100)}
	if said, _, err := buildOf(ctx, t, c, "FROM "+testImage+"\nRUN grep 192.0.2.7 /etc/hosts && test $(ulimit -n) = 64\n", good); err != nil {
		t.Errorf("%v: %s", err, said)
	}
	strict := doorTo(t, d.host, buildPolicy).client("mine")
	for name, try := range map[string]struct {
		c *client.Client
		o build.ImageBuildOptions
	}{
		"many files": {c, build.ImageBuildOptions{Ulimits: files(101)}}, "real time": {c, build.ImageBuildOptions{Ulimits: []*container.Ulimit{{Name: "rtprio", Soft: 1, Hard: 1}}}},
		"no address": {c, build.ImageBuildOptions{ExtraHosts: []string{"other:host-gateway"}}}, "hosts": {strict, build.ImageBuildOptions{ExtraHosts: good.ExtraHosts}},
	} {
		if said, _, err := buildOf(ctx, t, try.c, "FROM "+testImage+"\n", try.o); !errdefs.IsPermissionDenied(err) {
			t.Errorf("%s: %v: %s", name, err, said)
		}
	}
}
