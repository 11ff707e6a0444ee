package cli

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/distribution/reference"
	"github.com/spf13/cobra"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/compose"
)

func newInitComposeCommand() *cobra.Command {
	var opts stackOptions
	cmd := &cobra.Command{
		Use:   "compose [DIR]",
		Short: "Write a stack for docker compose, its policy and a token, ready to run",
		Long: `Write a stack for docker compose into a directory (default this one), with its policy, a
random token in secrets/token, and .env with the settings of this machine.

Stacks: minimal (Berm on this host's Docker Engine), agent-app (the same with two example
services that use it), dind (a private engine), containerd (without Docker's API), observability
(minimal with Prometheus, Grafana and a collector).

` + keeps,
		Example: `  berm init compose
  berm init compose /srv/berm --with-docker-api
  berm init compose demo --stack agent-app
  berm init compose /etc/berm --stack containerd --image registry.example/berm:1.0.0`,
		RunE: config.Action(func(cmd *cobra.Command, args []string) error {
			opts.dir = argument(args, 0, ".")
			if err := opts.complete(); err != nil {
				return usage("%w", err)
			}
			files, err := opts.files()
			if err == nil {
				err = opts.write(files)
			}
			if err != nil {
				return err
			}
			return opts.tell(cmd.OutOrStdout(), files)
		}),
	}
	f := cmd.Flags()
	f.StringVar(&opts.stack, "stack", "minimal", "minimal, agent-app, dind, containerd or observability")
	f.BoolVar(&opts.dockerAPI, "with-docker-api", false, "open the Docker Engine API too, as tcp://berm:2375 in a network of its own")
	f.StringVar(&opts.image, "image", "", "Berm's image, with a tag or digest (default berm:VERSION, which make image builds)")
	f.BoolVar(&opts.force, "force", false, "replace files that are there")
	return cmd
}

// stackOptions are the options of init compose.
type stackOptions struct {
	target
	stack, image string
	dockerAPI    bool
}

// complete sets defaults, and refuses options that exclude each other.
func (o *stackOptions) complete() error {
	if !slices.Contains(compose.Stacks, o.stack) {
		return fmt.Errorf("--stack is %q, want %s", o.stack, strings.Join(compose.Stacks, ", "))
	}
	if o.dockerAPI && o.stack == "containerd" {
		return errors.New("--with-docker-api needs a Docker Engine: take another --stack")
	}
	if o.image == "" {
		o.image = "berm:" + config.Version
		if _, err := reference.ParseNormalizedNamed(o.image); err != nil {
			o.image = "berm:devel"
		}
	}
	ref, err := reference.ParseNormalizedNamed(o.image)
	if err != nil {
		return fmt.Errorf("--image %s: %w", o.image, err)
	}
	if tagged, ok := ref.(reference.Tagged); reference.IsNameOnly(ref) || ok && tagged.Tag() == "latest" {
		return fmt.Errorf("--image %s: name a version, by a tag other than latest or a digest", o.image)
	}
	return o.target.complete()
}

const secretsDir = "secrets"

// files returns the files of the stack. The ones that start it are last.
func (o *stackOptions) files() ([]newFile, error) {
	files, err := o.secrets()
	if err != nil {
		return nil, err
	}
	files = append(files, newFile{".env", o.env(), 0o644})
	var errs []error
	add := func(name, source string) {
		content, err := compose.Files.ReadFile(source)
		files, errs = append(files, newFile{name, content, 0o644}), append(errs, err)
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
func (o *stackOptions) secrets() ([]newFile, error) {
	files := []newFile{{path.Join(secretsDir, ".gitignore"), []byte("*\n"), 0o644}}
	secret := func(name string, mode fs.FileMode) (string, error) {
		f, err := o.secret(path.Join(secretsDir, name), mode)
		files = append(files, f)
		return strings.TrimSpace(string(f.content)), err
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
	return append(files, newFile{path.Join(secretsDir, "tokens"), []byte(tokens), 0o600}), nil
}

// tell prints what was written and what to do next.
func (o *stackOptions) tell(out io.Writer, files []newFile) error {
	var b strings.Builder
	b.WriteString(o.wrote(files))
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
