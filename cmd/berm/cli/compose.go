package cli

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/distribution/reference"
	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/compose"
	"github.com/bermhq/berm/runtime/atomicfile"
)

func newComposeCommand() *cobra.Command {
	return config.Group("compose", "Write stacks for docker compose", newComposeInitCommand())
}

func newComposeInitCommand() *cobra.Command {
	var opts stackOptions
	cmd := &cobra.Command{
		Use:   "init",
		Short: "Write a stack, its policy and a token, ready to run",
		Long: `Write a stack for docker compose into a directory, with its policy, a random token in
secrets/token, and .env with the settings of this machine. Nothing is asked, and nothing is
started.

Stacks: minimal (Berm on this host's Docker Engine), agent-app (the same with two example
services that use it), dind (a private engine), containerd (without Docker's API), observability
(minimal with Prometheus, Grafana and a collector).

A file that is there is an error, and then nothing is written. With --force it is replaced,
but for secrets: those stay.`,
		Example: `  berm compose init
  berm compose init --dir /srv/berm --with-docker-api
  berm compose init --dir demo --stack agent-app
  berm compose init --dir /etc/berm --engine containerd --image registry.example/berm:1.0.0`,
		RunE: config.Action(func(cmd *cobra.Command, _ []string) error {
			if err := opts.complete(); err != nil {
				return usage("%w", err)
			}
			return opts.write(cmd.OutOrStdout())
		}),
	}
	f := cmd.Flags()
	f.StringVar(&opts.dir, "dir", ".", "directory, made if missing")
	f.StringVar(&opts.stack, "stack", "", "minimal, agent-app, dind, containerd or observability (default minimal, or what --engine says)")
	f.StringVar(&opts.engine, "engine", "", "docker, dind or containerd (default what --stack has)")
	f.BoolVar(&opts.dockerAPI, "with-docker-api", false, "open the Docker Engine API too, as tcp://berm:2375 in a network of its own")
	f.StringVar(&opts.image, "image", "", "Berm's image, with a tag or digest (default berm:VERSION, which make image builds)")
	f.BoolVar(&opts.force, "force", false, "replace files that are there")
	return cmd
}

// stackOptions are the options of compose init.
type stackOptions struct {
	dir, stack, engine, image string
	dockerAPI, force          bool
}

// stackEngines are the engines of the stacks that don't use the host's Docker Engine.
var stackEngines = map[string]string{"dind": "dind", "containerd": "containerd"}

var tagPattern = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$`)

// complete sets defaults, and refuses options that exclude each other.
func (o *stackOptions) complete() error {
	if !slices.Contains([]string{"", "docker", "dind", "containerd"}, o.engine) {
		return fmt.Errorf("--engine is %q, want docker, dind or containerd", o.engine)
	}
	if o.stack == "" {
		o.stack = cmp.Or(stackEngines[o.engine], "minimal")
	}
	if !slices.Contains(compose.Stacks, o.stack) {
		return fmt.Errorf("--stack is %q, want %s", o.stack, strings.Join(compose.Stacks, ", "))
	}
	if has := cmp.Or(stackEngines[o.stack], "docker"); o.engine != "" && o.engine != has {
		return fmt.Errorf("--engine %s doesn't go with --stack %s, which is on %s", o.engine, o.stack, has)
	}
	if o.dockerAPI && o.stack == "containerd" {
		return errors.New("--with-docker-api needs a Docker Engine: take another --stack")
	}
	if o.image == "" {
		tag := config.Version
		if !tagPattern.MatchString(tag) {
			tag = "devel"
		}
		o.image = "berm:" + tag
	}
	ref, err := reference.ParseNormalizedNamed(o.image)
	if err != nil {
		return fmt.Errorf("--image %s: %w", o.image, err)
	}
	if tagged, ok := ref.(reference.Tagged); reference.IsNameOnly(ref) || ok && tagged.Tag() == "latest" {
		return fmt.Errorf("--image %s: name a version, by a tag other than latest or a digest", o.image)
	}
	o.dir, err = filepath.Abs(o.dir)
	if err == nil && strings.ContainsAny(o.dir, "\n\r'\"$\\#:") {
		err = fmt.Errorf("--dir %q: compose files can't name such a path", o.dir)
	}
	return err
}

// stackFile is a file of a stack, path relative to its directory.
type stackFile struct {
	path    string
	content []byte
	mode    fs.FileMode
}

// write writes the stack's files and tells what to do next.
func (o *stackOptions) write(out io.Writer) (err error) {
	files, err := o.files()
	if err != nil {
		return err
	}
	if !o.force {
		for _, f := range files {
			if _, statErr := os.Lstat(filepath.Join(o.dir, f.path)); statErr == nil {
				err = errors.Join(err, fmt.Errorf("%s is there already", filepath.Join(o.dir, f.path)))
			}
		}
		if err != nil {
			return fmt.Errorf("nothing was written:\n%w\nchoose another --dir, or replace them with --force", err)
		}
	}
	var written []string
	defer func() {
		if err != nil && !o.force {
			for _, target := range written {
				err = errors.Join(err, os.Remove(target))
			}
		}
	}()
	for _, f := range files {
		target := filepath.Join(o.dir, f.path)
		if err := o.makeDir(filepath.Dir(f.path)); err != nil {
			return err
		}
		if err := atomicfile.WriteString(target, f.mode, string(f.content)); err != nil {
			return fmt.Errorf("write the stack: %w", err)
		}
		written = append(written, target)
	}
	return o.tell(out, files)
}

// makeDir makes a directory of the stack. Only the owner may enter that of the secrets, as
// services of any user have to read some of the files in it.
func (o *stackOptions) makeDir(rel string) error {
	dir := filepath.Join(o.dir, rel)
	if rel != secretsDir {
		return os.MkdirAll(dir, 0o755) //nolint:gosec // what is in there is no secret
	}
	if err := o.makeDir("."); err != nil {
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

const secretsDir = "secrets"

// files returns the files of the stack. The ones that start it are last.
func (o *stackOptions) files() ([]stackFile, error) {
	files, err := o.secrets()
	if err != nil {
		return nil, err
	}
	files = append(files, stackFile{".env", o.env(), 0o644})
	var errs []error
	add := func(name, source string) {
		content, err := compose.Files.ReadFile(source)
		files, errs = append(files, stackFile{name, content, 0o644}), append(errs, err)
	}
	policy := path.Join("policy", o.stack+".yaml")
	add(policy, policy)
	if dir := map[string]string{"agent-app": "app", "observability": "observability"}[o.stack]; dir != "" {
		entries, err := compose.Files.ReadDir(dir)
		errs = append(errs, err)
		for _, e := range entries {
			add(path.Join(dir, e.Name()), path.Join(dir, e.Name()))
		}
	}
	add("compose.yaml", o.stack+".yaml")
	if o.dockerAPI && o.stack != "agent-app" { // which has it
		add("compose.override.yaml", "docker-api.yaml")
	}
	return files, errors.Join(errs...)
}

// env returns the settings that compose reads by itself.
func (o *stackOptions) env() []byte {
	var b bytes.Buffer
	b.WriteString("# Settings of this stack; compose.yaml has the others, with their defaults.\n")
	fmt.Fprintf(&b, "BERM_IMAGE=%s\n", o.image)
	if o.stack == "agent-app" {
		fmt.Fprintf(&b, "# Who may read secrets/token.\nSTACK_USER=%d:%d\n", os.Getuid(), os.Getgid())
	}
	if o.stack == "containerd" {
		fmt.Fprintf(&b, "# Where this file is.\nBERM_DIR=%s\n", o.dir)
	}
	return b.Bytes()
}

// secrets returns the files with tokens and passwords. With force it keeps existing ones.
func (o *stackOptions) secrets() ([]stackFile, error) {
	files := []stackFile{{path.Join(secretsDir, ".gitignore"), []byte("*\n"), 0o644}}
	secret := func(name string, mode fs.FileMode) (string, error) {
		name = path.Join(secretsDir, name)
		value := rand.Text()
		if o.force {
			data, err := os.ReadFile(filepath.Join(o.dir, name))
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return "", err
			}
			value = cmp.Or(strings.TrimSpace(string(data)), value)
		}
		files = append(files, stackFile{name, []byte(value + "\n"), mode})
		return value, nil
	}
	token, err := secret("token", 0o600)
	if err != nil || o.stack != "observability" {
		return files, err
	}
	scrape, err := secret("scrape-token", 0o644)
	if err != nil {
		return nil, err
	}
	if _, err := secret("grafana", 0o644); err != nil {
		return nil, err
	}
	tokens := fmt.Sprintf(`tokens:
  - {name: callers, sha256: %x}
  - {name: prometheus, sha256: %x, scopes: ["status:read"]}
`, sha256.Sum256([]byte(token)), sha256.Sum256([]byte(scrape)))
	return append(files, stackFile{path.Join(secretsDir, "tokens"), []byte(tokens), 0o600}), nil
}

// tell prints what was written and what to do next.
func (o *stackOptions) tell(out io.Writer, files []stackFile) error {
	var b strings.Builder
	fmt.Fprintf(&b, "Wrote into %s:\n", o.dir)
	for _, f := range files {
		fmt.Fprintf(&b, "  %s\n", f.path)
	}
	token := "/run/secrets/token"
	if o.stack == "containerd" { // whose server sees the host's files
		token = filepath.Join(o.dir, secretsDir, "token")
	}
	b.WriteString("\nNext:\n")
	if here, _ := os.Getwd(); o.dir != here {
		fmt.Fprintf(&b, "  cd %s\n", o.dir)
	}
	b.WriteString("  docker compose up -d\n")
	fmt.Fprintf(&b, "  docker compose exec berm /berm sandbox --token-file %s create demo\n", token)
	fmt.Fprintf(&b, "  docker compose exec berm /berm sandbox --token-file %s exec demo -- echo hello\n", token)
	if o.stack == "observability" {
		b.WriteString("  open http://127.0.0.1:3000 as admin, with the password of secrets/grafana\n")
	}
	if o.stack == "agent-app" {
		b.WriteString("  docker compose logs -f app ci\n")
	}
	if o.dockerAPI && o.stack != "agent-app" {
		b.WriteString("Services with `networks: [docker-api]` and DOCKER_HOST=tcp://berm:2375 use Berm as their engine.\n")
	}
	fmt.Fprintf(&b, "The image has to be there as %s, or as what BERM_IMAGE in .env says; make image builds it.\nWhat sandboxes may be is in policy/%s.yaml.\n", o.image, o.stack)
	_, err := io.WriteString(out, b.String())
	return err
}
