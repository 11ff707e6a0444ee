package engineapi

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/image"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const loadPolicy = `version: 1
images: {allow: ["berm.local/*"]}
profiles: {default: {engine_api: {commit: "on", tags: ["loaded.local/*", "berm.local/mine"], load: ["loaded.local/mine/*", "berm.local/*"]}}}
`

var asTar = http.Header{"Content-Type": {"application/x-tar"}}

// An image of one layer.
func loadLayer(t *testing.T) string { return string(tarOf(t, "f", "content")) }

func digestOf(text string) string { return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(text))) }

func loadConfig(digest, config string) string {
	return fmt.Sprintf(`{"architecture":"amd64","os":"linux","config":{%s},"rootfs":{"type":"layers","diff_ids":[%q]},"container_config":{"Env":["SECRET=x"]},"parent":"sha256:00"}`, config, digest)
}

func loadManifest(names, layers string) string {
	return fmt.Sprintf(`[{"Config":"c.json","RepoTags":[%s],"Layers":[%s],"Parent":"sha256:00","LayerSources":{"sha256:00":{"urls":["http://192.0.2.1/x"]}}}]`, names, layers)
}

// loadDoor is a door before an engine that keeps what it is to load, and says that it did.
func loadDoor(t *testing.T, got *bytes.Buffer) *testDoor {
	s := &standIn{t: t, handler: func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasSuffix(r.URL.Path, "/images/load"):
			_, _ = got.ReadFrom(r.Body)
		case strings.HasSuffix(r.URL.Path, "/images/json"):
			_, _ = io.WriteString(w, "[]")
		default:
			http.NotFound(w, r)
		}
	}}
	return doorBefore(t, s, loadPolicy)
}

// TestLoadWrites looks at what the engine gets.
func TestLoadWrites(t *testing.T) {
	var got bytes.Buffer
	d := loadDoor(t, &got)
	layer := loadLayer(t)
	packed := string(squeezed(t, []byte(layer))["gzip"])
	forged := `"Labels":{"a":"b","berm.tenant":"victim","BERM.seal":"x","berm.other":"y"},"Env":["A=1"],"User":"7"`
	archive := tarOf(t, "l/layer.tar", packed, "m/layer.tar", "->../l/layer.tar", "c.json", loadConfig(digestOf(layer), forged),
		"repositories", `{"berm.local/busybox":{"latest":"00"}}`, "index.json", `{"manifests":[{"annotations":{"io.containerd.image.name":"berm.local/busybox:latest"}}]}`,
		"manifest.json", loadManifest(`"loaded.local/mine/a:1"`, `"m/layer.tar"`))
	_, _ = sayWith(t, d.listen(Caller{Name: "l", Tenant: "l"}), http.MethodPost, "/v1.41/images/load", asTar, string(archive))
	files := map[string]string{}
	for tr := tar.NewReader(&got); ; {
		h, err := tr.Next()
		if err != nil {
			break
		}
		if h.Typeflag != tar.TypeReg {
			t.Errorf("%s is of type %c", h.Name, h.Typeflag)
		}
		files[h.Name] = string(check.Value(io.ReadAll(tr))(t))
	}
	var manifest []map[string]any
	must(t, json.Unmarshal([]byte(files["manifest.json"]), &manifest))
	name := strings.TrimPrefix(digestOf(layer), "sha256:") + "/layer.tar"
	if len(files) != 3 || len(manifest) != 1 || len(manifest[0]) != 2 || fmt.Sprint(manifest[0]["Layers"]) != "["+name+"]" || files[name] != layer {
		t.Fatalf("the engine gets %v, %s", manifest, files["manifest.json"])
	}
	config := files[fmt.Sprint(manifest[0]["Config"])]
	var told struct {
		Config    struct{ Labels map[string]string }
		Container any `json:"container_config"`
		Parent    any
	}
	must(t, json.Unmarshal([]byte(config), &told))
	labels := told.Config.Labels
	if labels[lifecycle.LabelTenant] != "l" || labels["a"] != "b" || labels["berm.other"] != "" || !d.opts.Sealer.Valid(lifecycle.ObjectImage, "", labels) || told.Container != nil || told.Parent != nil {
		t.Errorf("the engine gets %s", config)
	}
}

func TestLoadRefuses(t *testing.T) {
	var got bytes.Buffer
	d := loadDoor(t, &got)
	address := d.listen(Caller{Name: "l", Tenant: "l"})
	layer := loadLayer(t)
	other := digestOf("the layer of another's image")
	good, config := loadManifest(`"loaded.local/mine/a:1"`, `"l.tar"`), loadConfig(digestOf(layer), "")
	many := "[" + strings.TrimSuffix(strings.Repeat(good[1:len(good)-1]+",", maxImages+1), ",") + "]"
	for name, tt := range map[string]struct {
		files []string
		want  string
	}{
		"no manifest":            {[]string{"l.tar", layer}, "manifest.json"},
		"another's layer":        {[]string{"l.tar", layer, "c.json", loadConfig(other, ""), "manifest.json", good}, "isn't the one"},
		"no layer":               {[]string{"c.json", loadConfig(other, ""), "manifest.json", good}, "no file"},
		"fewer layers":           {[]string{"l.tar", layer, "c.json", loadConfig(other, ""), "manifest.json", loadManifest("", "")}, "other layers"},
		"an empty layer":         {[]string{"l.tar", "", "c.json", loadConfig(digestOf(""), ""), "manifest.json", good}, "tar"},
		"packed twice":           {[]string{"l.tar", string(squeezed(t, squeezed(t, []byte(layer))["gzip"])["gzip"]), "c.json", config, "manifest.json", good}, "tar"},
		"an allowed name":        {[]string{"l.tar", layer, "c.json", config, "manifest.json", loadManifest(`"berm.local/busybox:latest"`, `"l.tar"`)}, "images.tags"},
		"a second name":          {[]string{"l.tar", layer, "c.json", config, "manifest.json", loadManifest(`"loaded.local/mine/a:1","berm.local/busybox"`, `"l.tar"`)}, "images.tags"},
		"a name of tags only":    {[]string{"l.tar", layer, "c.json", config, "manifest.json", loadManifest(`"loaded.local/other:1"`, `"l.tar"`)}, "images.load"},
		"a digest":               {[]string{"l.tar", layer, "c.json", config, "manifest.json", loadManifest(`"loaded.local/mine/a@`+other+`"`, `"l.tar"`)}, "images.syntax"},
		"a link to itself":       {[]string{"l.tar", "->l.tar", "c.json", config, "manifest.json", good}, "no file"},
		"a link to the host":     {[]string{"l.tar", "->/etc/passwd", "c.json", config, "manifest.json", good}, "no file"},
		"a link upwards":         {[]string{"l.tar", "->../../../etc/passwd", "c.json", config, "manifest.json", good}, "no file"},
		"a path upwards":         {[]string{"../l.tar", layer, "c.json", config, "manifest.json", good}, "leads out"},
		"a config of the host's": {[]string{"l.tar", layer, "c.json", "->/etc/passwd", "manifest.json", good}, "no file"},
		"twice":                  {[]string{"l.tar", layer, "c.json", config, "manifest.json", good, "./manifest.json", good}, "twice"},
		"a link beside it":       {[]string{"l.tar", layer, "c.json", config, "manifest.json", good, "l.tar", "->c.json"}, "twice"},
		"a directory of /proc":   {[]string{"l.tar", layer, "c.json", loadConfig(digestOf(layer), `"WorkingDir":"/x/../proc/self/fd/8"`), "manifest.json", good}, "file system of the kernel"},
		"another system":         {[]string{"l.tar", layer, "c.json", strings.Replace(config, "linux", "windows", 1), "manifest.json", good}, "linux"},
		"many images":            {[]string{"l.tar", layer, "c.json", config, "manifest.json", many}, "images"},
		"no JSON":                {[]string{"l.tar", layer, "c.json", "x", "manifest.json", good}, "JSON"},
		"a long manifest":        {[]string{"manifest.json", strings.Repeat(" ", maxImageFile) + good}, "larger"},
	} {
		resp, text := sayWith(t, address, http.MethodPost, "/v1.41/images/load", asTar, string(tarOf(t, tt.files...)))
		if resp.StatusCode/100 != 4 || !strings.Contains(text, tt.want) {
			t.Errorf("%s: %s %s", name, resp.Status, text)
		}
		if got.Len() > 0 {
			t.Errorf("%s: the engine got it", name)
			got.Reset()
		}
	}
}

// TestLoad saves an image, and loads it again under the same name.
func TestLoad(t *testing.T) {
	d, direct := engineDoor(t, loadPolicy)
	ctx := t.Context()
	const name = "loaded.local/mine/app:1"
	id := d.made(direct, "mine", "", container.Config{Cmd: []string{"sh", "-c", "echo proof > /proof; sleep 1000"}})
	eventually(t, func() bool { _, err := direct.ContainerStatPath(ctx, id, "/proof"); return err == nil })
	mine, other := d.listen(Caller{Name: "mine", Tenant: "mine"}), d.client("other")
	run, file := mustDocker(t, mine), t.TempDir()+"/app.tar"
	run("commit", "-c", "CMD cat /proof", "-c", "LABEL a=b", id, name)
	run("save", "--output", file, name)
	run("rmi", name)
	if out := run("load", "--input", file); out != "Loaded image: "+name {
		t.Errorf("load: %s", out)
	}
	img := check.Value(direct.ImageInspect(ctx, name))(t)
	if l := img.Config.Labels; l[lifecycle.LabelTenant] != "mine" || l["a"] != "b" || !d.opts.Sealer.Valid(lifecycle.ObjectImage, "", l) {
		t.Errorf("loaded %v", l)
	}
	if out := run("run", "--rm", name); out != "proof" {
		t.Errorf("run: %s", out)
	}
	wantErr(t, errdefs.IsNotFound, errOf(other.ImageInspect(ctx, name)), "another sees it")
	// Another can load the same archive, but not take the name.
	wantErr(t, errdefs.IsConflict, errOf(other.ImageLoad(ctx, bytes.NewReader(readFile(t, file)))), "another takes the name")
	run("save", "--output", file, img.ID)
	if out := run("load", "--quiet", "--input", file); !strings.HasPrefix(out, "Loaded image ID: sha256:") {
		t.Errorf("load without a name: %s", out)
	}
	run("rmi", name)
	// A layer of the engine's that the archive only names.
	base := check.Value(direct.ImageInspect(ctx, testImage))(t)
	layer := base.RootFS.Layers[0]
	junk := loadLayer(t)
	resp, err := newClient(t, mine).ImageLoad(ctx, bytes.NewReader(tarOf(t, "l.tar", junk, "c.json", loadConfig(layer, ""), "manifest.json", loadManifest("", `"l.tar"`))))
	if !errdefs.IsPermissionDenied(err) {
		t.Errorf("a layer by its digest alone: %+v, %v", resp, err)
	}
	theirs := check.Value(direct.ImageLoad(ctx, bytes.NewReader(tarOf(t, "l.tar", junk, "c.json", loadConfig(layer, ""), "manifest.json", loadManifest(`"fixture.local/stolen:1"`, `"l.tar"`)))))(t)
	_ = theirs.Body.Close()
	if _, err := direct.ImageRemove(ctx, "fixture.local/stolen:1", image.RemoveOptions{}); err != nil {
		t.Logf("this engine wants a layer's content: %v", err)
	}
}

// TestImport makes an image of an archive of files.
func TestImport(t *testing.T) {
	d, direct := engineDoor(t, loadPolicy)
	c, ctx := d.client("mine"), t.Context()
	send := func(ref, from string, files []byte, o image.ImportOptions) (string, error) {
		r, err := c.ImageImport(ctx, image.ImportSource{Source: bytes.NewReader(files), SourceName: from}, ref, o)
		if err != nil {
			return "", err
		}
		defer r.Close()
		var m struct{ Status string }
		err = json.NewDecoder(r).Decode(&m)
		return m.Status, err
	}
	files := []byte(loadLayer(t))
	for how, text := range squeezed(t, files) {
		ref := "loaded.local/mine/" + strings.ReplaceAll(how, " ", "-") + ":1"
		_, err := send(ref, "-", text, image.ImportOptions{Message: "a message", Changes: []string{"CMD x", "LABEL a=b"}})
		img, inspectErr := direct.ImageInspect(ctx, ref)
		if err != nil || inspectErr != nil {
			t.Fatalf("%s: %v, %v", how, err, inspectErr)
		}
		if img.Comment != "a message" || img.Config.Cmd[0] != "/bin/sh" || img.Config.Labels["a"] != "b" || img.Config.Labels[lifecycle.LabelTenant] != "mine" {
			t.Errorf("%s: %q, %+v", how, img.Comment, img.Config)
		}
	}
	for name, try := range map[string]func() (string, error){
		"name":        func() (string, error) { return send("elsewhere.local/x:1", "-", files, image.ImportOptions{}) },
		"everybody's": func() (string, error) { return send(testImage, "-", files, image.ImportOptions{}) },
		"address":     func() (string, error) { return send("", "http://192.0.2.1/x", nil, image.ImportOptions{}) },
		"instructions": func() (string, error) {
			return send("", "-", files, image.ImportOptions{Changes: []string{"ONBUILD USER 0"}})
		},
		"label": func() (string, error) {
			return send("", "-", files, image.ImportOptions{Changes: []string{"LABEL berm.tenant=x"}})
		},
	} {
		if id, err := try(); !errdefs.IsPermissionDenied(err) {
			t.Errorf("%s: %q, %v", name, id, err)
		}
	}
	if id, err := send("", "-", squeezed(t, squeezed(t, files)["gzip"])["gzip"], image.ImportOptions{}); err == nil || !strings.Contains(err.Error(), "not a ") {
		t.Errorf("gzip twice: %q, %v", id, err)
	}
	d = doorTo(t, d.host, basePolicy)
	if id, err := send("", "-", files, image.ImportOptions{}); err != nil {
		t.Errorf("without a name: %q, %v", id, err)
	}
	c = d.client("mine")
	if id, err := send("", "-", files, image.ImportOptions{}); !errdefs.IsPermissionDenied(err) {
		t.Errorf("without load: %q, %v", id, err)
	}
}
