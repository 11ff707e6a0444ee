package cli

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/compose"
	"github.com/bermhq/berm/runtime/atomicfile"
)

const (
	defaultConfigDir = "/etc/berm"

	keeps = `A file that is there is an error, and then nothing is written. With --force it is replaced,
but for secrets: those stay. Nothing is asked, and nothing is started.`
)

func newInitCommand() *cobra.Command {
	cmd := config.Group("init", "Write a configuration, a policy and a token to begin with",
		newInitHostCommand("machine", "this machine's Docker Engine"),
		newInitComposeCommand(),
		newInitHostCommand("containerd", "this machine's containerd, without Docker"))
	cmd.SuggestFor = []string{"compose"} // of earlier versions
	return cmd
}

// newInitHostCommand returns a command that writes the files for a server outside of a container.
func newInitHostCommand(name, engine string) *cobra.Command {
	var to target
	cmd := &cobra.Command{
		Use:   name + " [DIR]",
		Short: "Write them for a server on " + engine,
		Long: `Write berm.yaml, policy.yaml and a random token into a directory (default ` + defaultConfigDir + `), for
a server on ` + engine + `.

` + keeps,
		Example: "  sudo berm init " + name + "\n  berm init " + name + " ./berm",
		RunE: config.Action(func(cmd *cobra.Command, args []string) error {
			to.dir = argument(args, 0, defaultConfigDir)
			if err := to.complete(); err != nil {
				return usage("%w", err)
			}
			settings, err1 := compose.Files.ReadFile("host/" + name + ".yaml")
			policy, err2 := compose.Files.ReadFile("policy/" + name + ".yaml")
			token, err3 := to.secret("token", 0o600)
			if err := errors.Join(err1, err2, err3); err != nil {
				return err
			}
			files := []newFile{
				{"berm.yaml", []byte(strings.ReplaceAll(string(settings), defaultConfigDir, to.dir)), 0o644},
				{"policy.yaml", policy, 0o644}, token,
			}
			if err := to.write(files); err != nil {
				return err
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), `%s
Next, as root:
  berm doctor --config %[2]s/berm.yaml
  berm serve --config %[2]s/berm.yaml       # or: systemctl enable --now berm
Then:
  export BERM_TOKEN=$(sudo cat %[2]s/token)
  berm sandbox create demo
  berm exec demo -- echo hello
`, to.wrote(files), to.dir)
			return err
		}),
	}
	cmd.Flags().BoolVar(&to.force, "force", false, "replace files that are there")
	return cmd
}

// target is a directory to write files into.
type target struct {
	dir   string
	force bool // replace files
}

// newFile is a file to be written, path relative to the directory.
type newFile struct {
	path    string
	content []byte
	mode    fs.FileMode
}

// complete makes the directory absolute.
func (to *target) complete() (err error) {
	to.dir, err = filepath.Abs(to.dir)
	if err == nil && strings.ContainsAny(to.dir, "\n\r'\"$\\#:") {
		err = fmt.Errorf("directory %q: the files can't name such a path", to.dir)
	}
	return err
}

// secret makes a file with a random secret. With force it keeps the one that is there.
func (to *target) secret(name string, mode fs.FileMode) (newFile, error) {
	value := rand.Text()
	if to.force {
		data, err := os.ReadFile(filepath.Join(to.dir, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return newFile{}, err
		}
		value = cmp.Or(strings.TrimSpace(string(data)), value)
	}
	return newFile{name, []byte(value + "\n"), mode}, nil
}

// write writes the files: all of them, or none without force.
func (to *target) write(files []newFile) (err error) {
	if !to.force {
		for _, f := range files {
			if _, statErr := os.Lstat(filepath.Join(to.dir, f.path)); statErr == nil {
				err = errors.Join(err, fmt.Errorf("%s is there already", filepath.Join(to.dir, f.path)))
			}
		}
		if err != nil {
			return fmt.Errorf("nothing was written:\n%w\nchoose another directory, or replace them with --force", err)
		}
	}
	var written []string
	defer func() {
		if err != nil && !to.force {
			for _, name := range written {
				err = errors.Join(err, os.Remove(name))
			}
		}
	}()
	for _, f := range files {
		name := filepath.Join(to.dir, f.path)
		if err := to.makeDir(filepath.Dir(f.path)); err != nil {
			return err
		}
		if err := atomicfile.WriteString(name, f.mode, string(f.content)); err != nil {
			return fmt.Errorf("write %s: %w", name, err)
		}
		written = append(written, name)
	}
	return nil
}

// makeDir makes a directory below the target. Only the owner may enter that of the secrets: some
// files in it are readable for all, since a container's service may run as any user.
func (to *target) makeDir(rel string) error {
	dir := filepath.Join(to.dir, rel)
	if rel != secretsDir {
		return os.MkdirAll(dir, 0o755) //nolint:gosec // what is in there is no secret
	}
	if err := to.makeDir("."); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	if !info.IsDir() || info.Mode().Perm()&0o077 != 0 {
		return fmt.Errorf("%s is open to others, or no directory: chmod 700 it", dir)
	}
	return nil
}

// wrote lists the files that were written.
func (to *target) wrote(files []newFile) string {
	return "Wrote into " + to.dir + ":\n" + lines(func(f newFile) string { return "  " + f.path })(files)
}
