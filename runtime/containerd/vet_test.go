package containerd

import (
	"archive/tar"
	"crypto/rand"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/bermhq/berm/runtime"
)

// What an image or a mounted directory could gain by where a mount comes to lie.
func TestHostileImages(t *testing.T) {
	for _, class := range []string{"runc", "crun"} {
		t.Run(class, func(t *testing.T) { testHostileImages(t, class) })
	}
}

func testHostileImages(t *testing.T, class string) {
	r := newRuntime(t, shared.Get(t))
	requireClass(t, class)
	volumes := func(paths ...string) ocispec.ImageConfig {
		c := ocispec.ImageConfig{Volumes: map[string]struct{}{}}
		for _, p := range paths {
			c.Volumes[p] = struct{}{}
		}
		return c
	}
	var many []string
	for i := range maxVolumes + 1 {
		many = append(many, fmt.Sprintf("/v%d", i))
	}
	for name, tt := range map[string]struct {
		config ocispec.ImageConfig
		entry  tar.Header
		null   string // in the mounted directory; a link's target
		why    string
		crun   bool // is right about it, as it masks with the host's device
	}{
		"null is a file":      {entry: link("workspace", "/dev"), null: "", why: errAstray.Error(), crun: true},
		"null leads to /proc": {entry: link("workspace", "/dev"), null: "/proc/keys", why: errAstray.Error(), crun: true},
		"mount over /sys":     {entry: link("workspace", "/sys"), why: errAstray.Error()},
		"volume is a loop":    {config: volumes("/loop/x"), entry: link("loop", "loop"), why: "look for directory"},
		"volume has a zero":   {config: volumes("/a\x00b"), entry: file("a", ""), why: "look for directory"},
		"volume is too long":  {config: volumes("/" + strings.Repeat("a", 5000)), entry: file("a", ""), why: "look for directory"},
		"volumes without end": {config: volumes(many...), entry: file("a", ""), why: "volumes"},
		"volume over /sys":    {config: volumes("/sys"), entry: file("a", ""), why: errAstray.Error()},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			null := filepath.Join(dir, "null")
			if tt.null != "" {
				must(t, os.Symlink(tt.null, null))
			} else if err := os.WriteFile(null, nil, 0o600); err != nil {
				t.Fatal(err)
			}
			img := (&madeImage{config: tt.config, layers: [][]tar.Header{{tt.entry, file(rand.Text(), "")}}}).build(t)
			spec := runtime.Spec{
				Name: "hostile-" + rand.Text(), Command: []string{"/never"}, RuntimeClass: class,
				Image:  r.mustImport(t, img.layout(t, named("berm.local/"+strings.ToLower(rand.Text())+":latest"))).Name,
				Mounts: []runtime.Mount{{Source: dir, Target: "/workspace"}},
			}
			c, err := r.Create(t.Context(), spec)
			if err == nil {
				must(t, r.Remove(t.Context(), c.ID))
				if tt.crun && class == "crun" {
					return
				}
			}
			if !errdefs.IsInvalidArgument(err) || !strings.Contains(err.Error(), tt.why) {
				t.Errorf("error %v", err)
			}
			list, err := r.List(t.Context(), nil)
			must(t, err)
			for _, c := range list {
				if c.Name == spec.Name {
					t.Errorf("left: %+v", c)
				}
			}
		})
	}
}

func TestIsMasked(t *testing.T) {
	for path, want := range map[string]bool{"/dev/null": true, "/dev/zero": false, "/proc": false, "/proc/uptime": false, "/": false, "/etc/passwd": false} {
		var stat unix.Stat_t
		var fs unix.Statfs_t
		must(t, unix.Stat(path, &stat))
		must(t, unix.Statfs(path, &fs))
		if got := isMasked(stat, fs); got != want {
			t.Errorf("%s: %t", path, got)
		}
	}
}
