package engineapi

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/build"
	"github.com/docker/docker/api/types/image"
	"github.com/docker/docker/api/types/registry"

	private "github.com/bermhq/berm/runtime/runtimetest/engine"
)

// TestPull brings images from a registry that asks for a password.
func TestPull(t *testing.T) {
	host, direct := testEngine(t)
	ctx := t.Context()
	const user, password = "puller", "p4ssw0rd-of-the-registry"
	shop := must(private.StartRegistry(ctx, private.RegistryOptions{Netns: shared.engine.Netns(), User: user, Password: password}))(t)
	t.Cleanup(func() {
		if err := shop.Close(); err != nil {
			t.Error(err)
		}
	})
	noError(t, errors.Join(shop.Push(ctx, "team/tool:1", "ENV A=1"), shop.Push(ctx, "team/tool:2"), shop.Push(ctx, "secret/x:1")))
	repo := shop.Host() + "/team/tool"
	rules := func(more string) string {
		return "version: 1\nimages: {allow: [" + repo + "], " + more + "}\nprofiles: {default: {engine_api: {build: \"on\"}}}\n"
	}
	d := doorTo(t, host, rules("require_digest: false"))
	ownImages(t, direct, d)
	c := d.client("pull")
	text := must(json.Marshal(registry.AuthConfig{Username: user, Password: password, ServerAddress: shop.Host()}))(t)
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
		if _, err := direct.ImageRemove(ctx, ref, image.RemoveOptions{Force: true}); err != nil {
			t.Error(err)
		}
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
	if err := c.ImageTag(ctx, repo+":1", "x/y"); !errdefs.IsPermissionDenied(err) {
		t.Errorf("tag: %v", err)
	}
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
	c = doorTo(t, host, rules("pins: {"+repo+":2: "+digest+"}")).client("pins")
	if said, err := pull(repo+":2", auth); err != nil || !strings.Contains(said, digest) {
		t.Errorf("pinned: %v, %s", err, said)
	}
	list, err := direct.ImageList(ctx, image.ListOptions{})
	if err != nil || !slices.ContainsFunc(list, func(i image.Summary) bool { return slices.Contains(i.RepoDigests, repo+"@"+digest) }) ||
		slices.ContainsFunc(list, func(i image.Summary) bool { return slices.Contains(i.RepoTags, repo+":2") }) {
		t.Errorf("pinned: %+v, %v", list, err)
	}
	remove(repo + "@" + digest)

	for name, binary := range dockerCLIs {
		dir := t.TempDir()
		config := fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, shop.Host(), base64.StdEncoding.EncodeToString([]byte(user+":"+password)))
		noError(t, os.WriteFile(dir+"/config.json", []byte(config), 0o600))
		address := d.listen(Caller{Name: "cli-" + name, Tenant: "pull"})
		if out, errs, err := dockerCLI(t, binary, address, "--config", dir, "pull", repo+":2"); err != nil || !strings.Contains(out, "Downloaded newer image") {
			t.Errorf("%s: %v, %s%s", name, err, out, errs)
		}
		if out, errs, err := dockerCLI(t, binary, address, "rmi", repo+":2"); err != nil || !strings.Contains(out, "Deleted: sha256:") {
			t.Errorf("%s: %v, %s%s", name, err, out, errs)
		}
	}
	if log := readFile(t, d.audit); bytes.Contains(log, []byte(password)) || bytes.Contains(log, []byte(auth)) || !bytes.Contains(log, []byte(`"/images/create"`)) {
		t.Errorf("the audit log tells the password, or nothing: %s", log)
	}
}
