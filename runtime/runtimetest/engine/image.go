package engine

import (
	"archive/tar"
	"bytes"
	"context"
	"debug/elf"
	"fmt"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
)

var baseChanges = []string{"ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", `CMD ["sh"]`}

// ImportBusybox puts an image into the engine that is made of this machine's static
// busybox: all its applets, users root and nobody, /tmp. Changes are lines of a
// Dockerfile (ENV, USER, VOLUME and such) to be applied.
func (d *Docker) ImportBusybox(ctx context.Context, ref string, changes ...string) error {
	return ImportBusybox(ctx, d.Host(), ref, changes...)
}

// ImportBusybox is Docker.ImportBusybox for the engine at a host, as in DOCKER_HOST.
func ImportBusybox(ctx context.Context, host, ref string, changes ...string) error {
	rootfs, err := busyboxRootfs(ctx)
	if err != nil {
		return fmt.Errorf("build image %s: %w", ref, err)
	}
	if err := importImage(ctx, host, ref, append(slices.Clone(baseChanges), changes...), rootfs); err != nil {
		return fmt.Errorf("import image %s: %w", ref, err)
	}
	return nil
}

// findBusybox finds one that runs without shared libraries.
func findBusybox() (string, error) {
	file, err := find("busybox")
	if err != nil {
		return "", err
	}
	e, err := elf.Open(file)
	if err != nil {
		return "", fmt.Errorf("read %s: %w", file, err)
	}
	interp := slices.ContainsFunc(e.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP })
	if err := e.Close(); err != nil {
		return "", err
	}
	if interp {
		return "", fmt.Errorf("%s isn't static (package busybox-static): %w", file, errdefs.ErrFailedPrecondition)
	}
	return file, nil
}

// busyboxRootfs is a tar file, the same each time.
func busyboxRootfs(ctx context.Context) ([]byte, error) {
	file, err := findBusybox()
	if err != nil {
		return nil, err
	}
	binary, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	applets, err := exec.CommandContext(ctx, file, "--list-full").Output()
	if err != nil {
		return nil, fmt.Errorf("%s --list-full: %w", file, err)
	}
	entries := []*tar.Header{
		{Name: "bin/busybox", Mode: 0o755},
		{Name: "etc/passwd", Mode: 0o644}, {Name: "etc/group", Mode: 0o644},
		{Name: "tmp/", Mode: 0o1777}, {Name: "root/", Mode: 0o700},
	}
	for _, dir := range []string{"bin/", "dev/", "etc/", "home/", "proc/", "sbin/", "sys/", "usr/", "usr/bin/", "usr/sbin/", "var/"} {
		entries = append(entries, &tar.Header{Name: dir, Mode: 0o755})
	}
	for applet := range strings.FieldsSeq(string(applets)) {
		if name := path.Clean(applet); name != "bin/busybox" && path.Dir(name) != "." {
			entries = append(entries, &tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: "/bin/busybox", Mode: 0o777})
		}
	}
	contents := map[string][]byte{
		"bin/busybox": binary,
		"etc/passwd":  []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n"),
		"etc/group":   []byte("root:x:0:\nnogroup:x:65534:\n"),
	}
	slices.SortFunc(entries, func(a, b *tar.Header) int { return strings.Compare(a.Name, b.Name) })
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range entries {
		content := contents[h.Name]
		h.Size, h.ModTime = int64(len(content)), time.Unix(0, 0)
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := w.Write(content); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}
