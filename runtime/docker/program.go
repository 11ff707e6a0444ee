package docker

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"path"
	goruntime "runtime"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/mount"
	"github.com/docker/docker/api/types/volume"

	"github.com/bermhq/berm/runtime"
)

// An engine that doesn't see this host's files keeps Berm's program in a volume. A
// container gets the file itself, as a read-only bind mount. Create compares the file in
// each container before the start, so nothing depends on who else writes to the volume.

const (
	programVolume = "berm-program-" // followed by the program's SHA-256
	programLabel  = "berm-program"
	programFile   = "berm-init"
	programDir    = "/berm"   // the volume's path in the container that fills it
	maxProgram    = 128 << 20 // larger than any program
)

// errOtherProgram says that a volume doesn't have the program that its name promises.
var errOtherProgram = runtime.Unavailable(errors.New("the program in the engine's volume was changed; it is put there anew"))

// storedProgram returns the path of the program on the engine's host. It puts the program into a
// volume first, unless it has done so. Image is any image that the engine has.
func (r *Runtime) storedProgram(ctx context.Context, s *session, image string) (string, error) {
	name, err := r.programName()
	switch {
	case err != nil:
		return "", runtime.Precondition("this berm has no program for its sandboxes: %w", err)
	case s.info.Architecture != goruntime.GOARCH:
		return "", runtime.Precondition("the engine's machine is %s, this berm's program for sandboxes is for %s", s.info.Architecture, goruntime.GOARCH)
	}
	unlock, err := r.starts.Lock(ctx, name) // no container has such an ID
	if err != nil {
		return "", ctx.Err()
	}
	defer unlock()
	v, err := s.VolumeInspect(ctx, name)
	if errdefs.IsNotFound(err) {
		r.stored.Store(false)
		v, err = s.VolumeCreate(ctx, volume.CreateOptions{Name: name, Driver: "local", Labels: programLabels()})
	}
	if err != nil {
		return "", err
	}
	if v.Driver != "local" || len(v.Options) > 0 || !path.IsAbs(v.Mountpoint) || v.Labels[programLabel] == "" {
		return "", runtime.Precondition("the engine's volume %s isn't Berm's, or no directory of its own: remove it", name)
	}
	if !r.stored.Load() {
		if err := r.fillVolume(ctx, s, name, image); err != nil {
			return "", fmt.Errorf("put Berm's program into the engine's volume %s: %w", name, err)
		}
		r.stored.Store(true)
		if err := removeUnused(ctx, s, name); err != nil {
			r.log.WarnContext(ctx, "program_volumes_left", "error", err)
		}
	}
	return path.Join(v.Mountpoint, programFile), nil
}

// programLabels returns the labels of a volume for a program.
func programLabels() map[string]string { return map[string]string{programLabel: "yes"} }

// nameProgram returns the name of the volume for a program, which has its hash.
func nameProgram(read func() ([]byte, error)) (string, error) {
	if read == nil {
		return "", errors.New("none is built in")
	}
	program, err := read()
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(program)
	return programVolume + hex.EncodeToString(sum[:]), nil
}

// removeUnused removes the volumes of other programs, such as those of earlier versions, unless
// a container has a mount from one.
func removeUnused(ctx context.Context, s *session, current string) error {
	volumes, err := s.VolumeList(ctx, volume.ListOptions{Filters: labelFilter(map[string]string{programLabel: ""})})
	if err != nil {
		return err
	}
	containers, err := s.ContainerList(ctx, container.ListOptions{All: true})
	if err != nil {
		return err
	}
	var errs []error
	for _, v := range volumes.Volumes {
		used := slices.ContainsFunc(containers, func(c container.Summary) bool {
			return slices.ContainsFunc(c.Mounts, func(m container.MountPoint) bool { return runtime.Below(m.Source, v.Mountpoint) })
		})
		if !used && v.Name != current && strings.HasPrefix(v.Name, programVolume) {
			errs = append(errs, s.VolumeRemove(ctx, v.Name, false))
		}
	}
	return errors.Join(errs...)
}

// fillVolume writes the program to the volume, by way of a container that never runs. It first
// removes one that a killed Berm left.
func (r *Runtime) fillVolume(ctx context.Context, s *session, name, image string) error {
	program, err := r.readProgram()
	if err != nil {
		return err
	}
	if err := remove(ctx, s, name); err != nil {
		return err
	}
	made, err := s.ContainerCreate(ctx, &container.Config{Image: image, Entrypoint: []string{programDir + "/" + programFile}},
		&container.HostConfig{NetworkMode: "none", Mounts: []mount.Mount{{
			// NoCopy keeps the image's files out. The engine makes the volume again if another Berm has just removed it.
			Type: mount.TypeVolume, Source: name, Target: programDir, VolumeOptions: &mount.VolumeOptions{NoCopy: true, Labels: programLabels()},
		}}}, nil, nil, name)
	if err != nil {
		return err
	}
	var archive bytes.Buffer
	w := tar.NewWriter(&archive)
	err = w.WriteHeader(&tar.Header{Name: programFile, Typeflag: tar.TypeReg, Mode: 0o755, Size: int64(len(program))})
	if err == nil {
		_, err = w.Write(program)
	}
	if err = errors.Join(err, w.Close()); err == nil {
		err = s.CopyToContainer(ctx, made.ID, programDir, &archive, container.CopyToContainerOptions{})
	}
	cleanCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	return errors.Join(err, remove(cleanCtx, s, made.ID))
}

// checkProgram returns an error if a container, before its start, has another program.
func (r *Runtime) checkProgram(ctx context.Context, s *session, id string) error {
	body, _, err := s.CopyFromContainer(ctx, id, runtime.AgentProgram)
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	archive := tar.NewReader(body)
	header, err := archive.Next()
	if err != nil {
		return err
	}
	content := sha256.New()
	if _, err := io.Copy(content, io.LimitReader(archive, maxProgram)); err != nil {
		return err
	}
	name, err := r.programName()
	if err == nil && (header.Typeflag != tar.TypeReg || header.Mode&0o7777 != 0o755 || name != programVolume+hex.EncodeToString(content.Sum(nil))) {
		err = errOtherProgram
	}
	if errors.Is(err, errOtherProgram) {
		r.stored.Store(false)
	}
	return err
}
