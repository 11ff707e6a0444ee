package engineapi

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/build"
	"github.com/docker/docker/api/types/container"
	dockerfilters "github.com/docker/docker/api/types/filters"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/volume"
	"github.com/docker/docker/client"

	"github.com/bermhq/berm/lifecycle"
)

// ownImages removes in the end the images that the door's callers made.
func ownImages(t *testing.T, direct *client.Client, d *testDoor) {
	t.Helper()
	t.Cleanup(func() {
		ctx := context.Background()
		list, err := direct.ImageList(ctx, image.ListOptions{All: true, Filters: dockerfilters.NewArgs(dockerfilters.Arg("label", lifecycle.LabelOwner+"="+d.opts.Owner))})
		if err != nil {
			t.Error(err)
		}
		for range list { // children first, whatever the order
			for _, img := range list {
				_, _ = direct.ImageRemove(ctx, img.ID, image.RemoveOptions{Force: true, PruneChildren: true})
			}
		}
	})
}

// buildOf has a client build a Dockerfile, and gives what is said and the image's ID.
func buildOf(ctx context.Context, t *testing.T, c *client.Client, dockerfile string, o build.ImageBuildOptions) (said, id string, err error) {
	t.Helper()
	o.Version, o.Remove = build.BuilderV1, true
	resp, err := c.ImageBuild(ctx, contextOf(t, dockerfile), o)
	if err != nil {
		return "", "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if i := bytes.LastIndex(text, []byte(`{"aux":{"ID":"`)); i >= 0 {
		id, _, _ = strings.Cut(string(text[i+len(`{"aux":{"ID":"`):]), `"`)
	}
	if bytes.Contains(text, []byte(`"error"`)) {
		err = errors.Join(err, errors.New(string(text)))
	}
	return string(text), id, err
}

// everything counts what the engine has of containers, and of images with those in between.
func everything(t *testing.T, direct *client.Client) (containers, images int) {
	t.Helper()
	list := must(direct.ContainerList(context.Background(), container.ListOptions{All: true}))(t)
	all := must(direct.ImageList(context.Background(), image.ListOptions{All: true}))(t)
	return len(list), len(all)
}

func TestClientsImages(t *testing.T) {
	host, direct := testEngine(t)
	d := doorTo(t, host, strings.NewReplacer(`["berm.local/*"]`, `["berm.local/*", "listed.local/mine/*"]`, `["built.local/mine/*"]`, `["built.local/mine/*", "listed.local/mine/*"]`).Replace(buildPolicy))
	ownImages(t, direct, d)
	left := sweepOwn(t, direct, d)
	address := d.listen(Caller{Name: "images", Tenant: "images"})
	t.Setenv("DOCKER_BUILDKIT", "0")
	for name, binary := range dockerCLIs {
		t.Run(name, func(t *testing.T) {
			docker := func(args ...string) (string, string, error) { return dockerCLI(t, binary, address, args...) }
			must := mustDocker(t, binary, address)
			dir := workDir(t)
			for file, text := range map[string]string{
				"Dockerfile": "FROM " + testImage + " AS first\nARG WHO=nobody\nCOPY . /in\nRUN echo $WHO > /who \\\n  && ls /in > /list\nLABEL seen=yes \"and this\"=that\n" +
					"FROM " + testImage + " AS second\nCOPY --from=first /who /list /out/\nENV A=\"b c\"\nCMD [\"cat\", \"/out/who\", \"/out/list\"]\n",
				"sub/Other":     "FROM " + testImage + "\n# a comment\nRUN ls /sys/class/net > /nets\nCMD cat /nets\n",
				".dockerignore": "secret\n",
				"secret":        "s",
				"file":          "f",
			} {
				noError(t, errors.Join(os.MkdirAll(dir+"/sub", 0o755), os.WriteFile(dir+"/"+file, []byte(text), 0o644)))
			}
			tag := "built.local/mine/cli-" + name
			out := must("build", "-t", tag+":1", "-t", tag+":2", "--build-arg", "WHO=me", "--label", "l=m", dir)
			if !strings.Contains(out, "Successfully tagged "+tag+":1") || !strings.Contains(out, "Successfully tagged "+tag+":2") {
				t.Errorf("build said %s", out)
			}
			if out := must("run", "--rm", tag+":1"); !strings.HasPrefix(out, "me\n") || !strings.Contains(out, "file") || strings.Contains(out, "secret") {
				t.Errorf("what was built says %q", out)
			}
			img, err := direct.ImageInspect(t.Context(), tag+":2")
			if err != nil || img.Config.Labels["l"] != "m" || img.Config.Labels[lifecycle.LabelTenant] != "images" || !slices.Contains(img.Config.Env, "A=b c") {
				t.Fatalf("built: %+v, %v", img.Config, err)
			}
			id := must("build", "-q", "-t", tag+":quiet", "--target", "first", dir)
			if quiet, err := direct.ImageInspect(t.Context(), tag+":quiet"); err != nil || quiet.ID != id || quiet.Config.Labels["seen"] != "yes" || quiet.Config.Labels["and this"] != "that" {
				t.Errorf("quietly: %q is not %s, %v", id, quiet.ID, err)
			}
			must("build", "-t", tag+":other", "-f", dir+"/sub/Other", "--network", "none", "--no-cache", dir)
			if out := must("run", "--rm", tag+":other"); strings.Contains(out, "eth0") {
				t.Errorf("the build had a network: %q", out)
			}
			if out := must("images", "-q", "--no-trunc", tag); len(strings.Fields(out)) != 4 {
				t.Errorf("images of the name: %q", out)
			}
			if out := must("images"); strings.Contains(out, "hidden.local") {
				t.Errorf("images: %s", out)
			}
			must("history", tag+":1")
			must("image", "inspect", tag+":1")
			must("tag", tag+":1", tag+":again")
			must("tag", testImage, "listed.local/mine/x")
			must("rmi", "listed.local/mine/x", tag+":again")
			if saved := must("save", tag+":1"); !strings.Contains(saved, "cli-"+name) || !strings.Contains(saved, "manifest.json") {
				t.Errorf("saved: %d bytes", len(saved))
			}
			archive := dir + "/archive.tar"
			noError(t, os.WriteFile(archive, make([]byte, 40<<20), 0o600))
			for what, tt := range map[string]struct {
				args []string
				rule string
			}{
				"load":         {[]string{"load", "-i", archive}, "operations.off"},
				"import":       {[]string{"import", archive, "x"}, "operations.off"},
				"push":         {[]string{"push", tag + ":1"}, "operations.off"},
				"search":       {[]string{"search", "x"}, "endpoints.unknown"},
				"others' name": {[]string{"tag", tag + ":1", testImage}, "images.tags"},
				"an address":   {[]string{"build", "http://127.0.0.1:1/x"}, "build.options"},
				"host's net":   {[]string{"build", "--network", "host", dir}, "networks.host"},
				"no base":      {[]string{"build", "-f", archive + ".x", dir}, "images.allow"},
				"pull":         {[]string{"pull", "alpine"}, "images.allow"},
			} {
				if what == "no base" {
					_ = os.Remove(archive)
					noError(t, os.WriteFile(archive+".x", []byte("FROM alpine\n"), 0o600))
				} else if err := os.WriteFile(archive, make([]byte, 40<<20), 0o600); err != nil {
					t.Fatal(err)
				}
				_, errs, err := docker(tt.args...)
				line := errs[strings.Index(errs, "Error")+1:]
				if strings.HasPrefix(what, "an address") && err != nil {
					continue // fetched by the client itself, which can't
				}
				if err == nil || !strings.Contains(line, "(rule "+tt.rule+")") || strings.Count(strings.TrimSpace(line), "\n") > 0 {
					t.Errorf("%s: %v, %q", what, err, errs)
				}
			}
			must("rmi", tag+":1", tag+":2", tag+":quiet", tag+":other")
			must("volume", "create", "images-vol-"+name)
			must("network", "create", "images-net-"+name)
			must("create", "--name", "images-ct-"+name, testImage)
			must("system", "df")
			must("system", "df", "-v")
			must("info")
			must("version")
			must("system", "prune", "-f", "--volumes")
			must("image", "prune", "-af")
			must("volume", "prune", "-f")
			must("container", "prune", "-f")
			must("network", "prune", "-f")
			must("volume", "rm", "-f", "images-vol-"+name)
			if all := left(); len(all) != 0 {
				t.Errorf("left: %v", all)
			}
			if list, err := direct.ImageList(t.Context(), image.ListOptions{Filters: dockerfilters.NewArgs(dockerfilters.Arg("label", lifecycle.LabelOwner+"="+d.opts.Owner))}); err != nil || len(list) != 0 {
				t.Errorf("images that are left: %+v, %v", list, err)
			}
		})
	}
	must(direct.ImageInspect(t.Context(), testImage))(t)
}

// TestBuildsAreApart has two tenants build the same.
func TestBuildsAreApart(t *testing.T) {
	d, direct := engineDoor(t, buildPolicy)
	ownImages(t, direct, d)
	mine, other, ctx := d.client("mine"), d.client("other"), t.Context()
	dockerfile := "FROM " + testImage + "\nRUN cat /proc/sys/kernel/random/uuid > /u\n"
	const tag = "built.local/mine/apart:1"
	said := func(c *client.Client, tags ...string) string {
		text, _, err := buildOf(ctx, t, c, dockerfile, build.ImageBuildOptions{Tags: tags})
		if err != nil {
			t.Fatal(err)
		}
		return strings.SplitAfterN(text, "RUN", 2)[1]
	}
	if said(mine); !strings.Contains(said(mine, tag), "Using cache") {
		t.Error("what one built itself isn't taken from the cache")
	}
	if strings.Contains(said(other), "Using cache") {
		t.Error("what another built is taken from the cache")
	}
	// A name of one's own isn't another's to take, even if the policy lets both give it.
	was := must(direct.ImageInspect(ctx, tag))(t)
	if _, _, err := buildOf(ctx, t, other, "FROM "+testImage+"\n", build.ImageBuildOptions{Tags: []string{tag}}); err == nil || !strings.Contains(err.Error(), "is taken") {
		t.Errorf("another's name: %v", err)
	}
	if is, err := direct.ImageInspect(ctx, tag); err != nil || is.ID != was.ID {
		t.Errorf("the name was moved: %v", err)
	}
	if _, _, err := buildOf(ctx, t, other, "FROM "+tag+"\n", build.ImageBuildOptions{}); !errdefs.IsPermissionDenied(err) && !errdefs.IsNotFound(err) {
		t.Errorf("another's base: %v", err)
	}
	auditing := newClient(t, d.listen(Caller{Name: "auditor", Tenant: "other", Audit: true}))
	for _, line := range []string{"FROM " + tag, "FROM " + was.ID, "FROM " + testImage + "\nCOPY --from=" + tag + " /u /u"} {
		if _, _, err := buildOf(ctx, t, auditing, line+"\n", build.ImageBuildOptions{}); !errdefs.IsNotFound(err) {
			t.Errorf("another's image in mode audit: %v", err)
		}
	}
	if _, _, err := buildOf(ctx, t, mine, "FROM "+tag+"\n", build.ImageBuildOptions{Labels: map[string]string{"berm.ttl": "20m"}, Tags: []string{tag}}); err != nil {
		t.Errorf("of one's own image: %v", err)
	}
	if _, _, err := buildOf(ctx, t, mine, "FROM "+tag+"\n", build.ImageBuildOptions{}); err != nil {
		t.Errorf("of one's own image with a life: %v", err)
	}
}

// TestBuildsOfImagesByOtherWays has images named where the engine and a reader of the
// Dockerfile could differ.
func TestBuildsOfImagesByOtherWays(t *testing.T) {
	d, direct := engineDoor(t, buildPolicy)
	ownImages(t, direct, d)
	c, ctx := d.client("mine"), t.Context()
	noError(t, direct.ImageTag(ctx, testImage, "hidden"))
	defer func() { _, _ = direct.ImageRemove(ctx, "hidden", image.RemoveOptions{}) }()
	trigger := must(direct.ContainerCreate(ctx, &container.Config{Image: testImage}, nil, nil, nil, ""))(t)
	const triggering = "berm.local/trigger:1"
	_, err := direct.ContainerCommit(ctx, trigger.ID, container.CommitOptions{Reference: triggering, Changes: []string{"ONBUILD ADD http://127.0.0.1:1/x /x"}})
	noError(t, errors.Join(err, direct.ContainerRemove(ctx, trigger.ID, container.RemoveOptions{})))
	defer func() { _, _ = direct.ImageRemove(ctx, triggering, image.RemoveOptions{}) }()
	for name, dockerfile := range map[string]string{
		"its own stage":             "FROM " + testImage + " AS hidden\nCOPY --from=hidden /etc /x\n",
		"a trigger":                 "FROM " + triggering + "\nRUN true\n",
		"a stage's trigger":         "FROM " + testImage + " AS hidden\nFROM " + testImage + "\nONBUILD COPY --from=hidden /etc /x\n",
		"an ID":                     "FROM " + testImage + "\nCOPY --from=sha256:0000000000000000000000000000000000000000000000000000000000000000 /etc /x\n",
		"a name, not an ID":         "FROM deadbeef\n",
		"what isn't there":          "FROM berm.local/missing\n",
		"a label, escaped":          "FROM " + testImage + "\nLABEL ber\\m.tenant=other\n",
		"a stage that is continued": "FROM " + testImage + "\nRUN true \\\u00a0\nFROM " + testImage + " AS hidden\nFROM " + testImage + "\nCOPY --from=hidden /etc /x\n",
		"an argument":               "ARG X=hidden\nFROM $X\n",
		"an address":                "FROM " + testImage + "\nADD http://127.0.0.1:1/x /x\n",
		"a label by default":        "FROM " + testImage + "\nARG X=berm\nLABEL ${X}.tenant=other\n",
	} {
		said, _, err := buildOf(ctx, t, c, dockerfile, build.ImageBuildOptions{})
		if err == nil || said != "" {
			t.Errorf("%s: %v, %s", name, err, said)
		}
	}
}

// TestBuildsLeaveNothing has builds fail, and clients leave.
func TestBuildsLeaveNothing(t *testing.T) {
	d, direct := engineDoor(t, buildPolicy)
	ownImages(t, direct, d)
	c := d.client("mine")
	containers, _ := everything(t, direct)
	_, id, err := buildOf(t.Context(), t, c, "FROM "+testImage+" AS a\nFROM "+testImage+"\nVOLUME /v\nRUN echo x > /v/x\nRUN false\n", build.ImageBuildOptions{Tags: []string{"built.local/mine/failed:1"}})
	if err == nil || !strings.Contains(err.Error(), "non-zero code: 1") || strings.Contains(err.Error(), "verify.build") {
		t.Errorf("a failing build: %s, %v", id, err)
	}
	if _, err := direct.ImageInspect(t.Context(), "built.local/mine/failed:1"); !errdefs.IsNotFound(err) {
		t.Errorf("a failed build has a name: %v", err)
	}
	ctx, leave := context.WithCancel(t.Context())
	resp := must(c.ImageBuild(ctx, contextOf(t, "FROM "+testImage+"\nRUN echo begun; sleep 1000\n"), build.ImageBuildOptions{Version: build.BuilderV1}))(t)
	heard := make([]byte, 0, 4096)
	for !bytes.Contains(heard, []byte("begun\\n")) {
		piece := make([]byte, 512)
		n, err := resp.Body.Read(piece)
		if heard = append(heard, piece[:n]...); err != nil {
			t.Fatalf("%v: %s", err, heard)
		}
	}
	if running, _ := everything(t, direct); running != containers+1 {
		t.Errorf("%d containers while it builds, and %d before", running, containers)
	}
	leave()
	_ = resp.Body.Close()
	eventually(t, func() bool { now, _ := everything(t, direct); return now == containers })
	// What failed builds leave in between is the caller's own to prune.
	report, err := c.ImagesPrune(t.Context(), dockerfilters.NewArgs())
	if err != nil || len(report.ImagesDeleted) == 0 {
		t.Errorf("prune: %+v, %v", report, err)
	}
	list, err := direct.ImageList(t.Context(), image.ListOptions{All: true, Filters: dockerfilters.NewArgs(dockerfilters.Arg("label", lifecycle.LabelOwner+"="+d.opts.Owner))})
	if err != nil || len(list) != 0 {
		t.Errorf("left: %+v, %v", list, err)
	}
	if left, err := direct.VolumeList(t.Context(), volume.ListOptions{}); err != nil || len(left.Volumes) != 0 {
		t.Logf("volumes that are there: %d, %v", len(left.Volumes), err)
	}
}

func TestRewriteIsBounded(t *testing.T) {
	var b bytes.Buffer
	block := func(name string, kind byte, size int) {
		h := make([]byte, tarBlock)
		copy(h, name)
		copy(h[100:], "0000644\x000000000\x000000000\x00")
		copy(h[124:], fmt.Sprintf("%011o\x0000000000000\x00", size))
		copy(h[148:], "        ")
		h[156] = kind
		copy(h[257:], "ustar\x0000")
		sum := 0
		for _, c := range h {
			sum += int(c)
		}
		copy(h[148:], fmt.Sprintf("%06o\x00 ", sum))
		b.Write(h)
	}
	records := ""
	for _, r := range []string{"GNU.sparse.size=1099511627776", "GNU.sparse.numblocks=1", "GNU.sparse.map=0,0"} {
		records += fmt.Sprintf("%d %s\n", len(r)+4, r)
	}
	block("pax", tar.TypeXHeader, len(records))
	b.Write(append([]byte(records), make([]byte, tarBlock-len(records))...))
	block("large", tar.TypeReg, 0)
	b.Write(make([]byte, 2*tarBlock))
	if h, err := func() (*tar.Header, error) { return tar.NewReader(bytes.NewReader(b.Bytes())).Next() }(); err != nil || h.Size != 1<<40 {
		t.Fatalf("the archive isn't what it should be: %+v, %v", h, err)
	}
	err := rewrite(io.Discard, &b, "Dockerfile", nil)
	if err == nil || !strings.Contains(err.Error(), "larger than") {
		t.Errorf("a file of 1 TiB: %v", err)
	}
}

// loadBare gives the engine an image whose configuration says nothing but its layers.
func loadBare(t *testing.T, direct *client.Client, name string) {
	t.Helper()
	layer := tarOf(t, "file", "content")
	config := fmt.Sprintf(`{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":["sha256:%x"]}}`, sha256.Sum256(layer))
	manifest := `[{"Config":"config.json","RepoTags":["` + name + `"],"Layers":["layer.tar"]}]`
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for file, content := range map[string][]byte{"layer.tar": layer, "config.json": []byte(config), "manifest.json": []byte(manifest)} {
		noError(t, w.WriteHeader(&tar.Header{Name: file, Size: int64(len(content)), Mode: 0o644}))
		must(w.Write(content))(t)
	}
	noError(t, w.Close())
	resp := must(direct.ImageLoad(t.Context(), &b))(t)
	said, _ := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if _, err := direct.ImageInspect(t.Context(), name); err != nil {
		t.Fatalf("%v: %s", err, said)
	}
	t.Cleanup(func() { _, _ = direct.ImageRemove(context.Background(), name, image.RemoveOptions{}) })
}
