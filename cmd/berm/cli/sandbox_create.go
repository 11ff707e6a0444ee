package cli

import (
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/bermhq/berm/proxy/apitype"
	"github.com/bermhq/berm/proxy/client"
)

func newCreateCommand(flags *clientFlags) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "create KEY",
		Short: "Make a sandbox, or get the one that is there",
		Long: `Make a sandbox, or get the one that is there under the key if its spec is the same.
What no flag says takes the value of the profile. An image that has to be pulled is
waited for.`,
		Example: `  berm sandbox create mine
  berm sandbox create build --profile network_basic --cpus 2 --memory-mb 1024 --ttl 30m
  berm sandbox create work --host-path /srv/work/a --mount /srv/data:/data:ro --env LANG=C`,
	}
	request := addSpecFlags(cmd.Flags())
	cmd.RunE = flags.clientAction(func(cmd *cobra.Command, c *client.Client, args []string) error {
		req, err := request()
		if err != nil {
			return usage("%w", err)
		}
		p := newProgress(cmd.ErrOrStderr(), 0)
		sb, err := c.CreateFunc(cmd.Context(), args[0], req, p.pull)
		p.Close()
		return answer(flags, cmd, sb, err, showSandbox)
	})
	return cmd
}

// addSpecFlags adds a flag for each field of a request. The function that it returns makes
// the request of the flags that were given.
func addSpecFlags(f *pflag.FlagSet) func() (apitype.SandboxRequest, error) {
	var req apitype.SandboxRequest
	var ttl, idleTTL *time.Duration
	given := []func(){
		optional(f, "profile", &req.Profile, f.String("profile", "", "the policy's profile")),
		optional(f, "image", &req.Image, f.String("image", "", "image reference")),
		optional(f, "network", &req.Network, f.String("network", "", "off, on, or a network of the policy")),
		optional(f, "host-path", &req.HostPath, f.String("host-path", "", "directory to be mounted; empty is the default workspace")),
		optional(f, "host-path-mode", &req.HostPathMode, f.String("host-path-mode", "", "none, ro or rw")),
		optional(f, "mount-path", &req.MountPath, f.String("mount-path", "", "where the directory is seen in the sandbox")),
		optional(f, "cpus", &req.CPUs, f.Float64("cpus", 0, "cores")),
		optional(f, "memory-mb", &req.MemoryMB, f.Int64("memory-mb", 0, "memory in MB")),
		optional(f, "pids-limit", &req.PidsLimit, f.Int64("pids-limit", 0, "processes")),
		optional(f, "read-only-rootfs", &req.ReadOnlyRootfs, f.Bool("read-only-rootfs", false, "nothing but mounts and /tmp can be written")),
		optional(f, "workspace-quota-mb", &req.WorkspaceQuotaMB, f.Int64("workspace-quota-mb", 0, "largest size of the mounted directory in MB; 0 is unlimited")),
		optional(f, "ttl", &ttl, f.Duration("ttl", 0, "life from creation")),
		optional(f, "idle-ttl", &idleTTL, f.Duration("idle-ttl", 0, "life without use; 0 is unlimited")),
		optional(f, "agent-id", &req.AgentID, f.String("agent-id", "", "agent id, set as AGENT_ID in the sandbox")),
		optional(f, "volume-host-path", &req.VolumeHostPath, f.String("volume-host-path", "", "the old service's volume, absolute")),
	}
	mounts := f.StringArray("mount", nil, "a further directory, HOST:SANDBOX[:ro|rw]; may be given many times")
	env := f.StringArray("env", nil, "NAME=VALUE, or NAME to take it from here; may be given many times")
	f.StringToStringVar(&req.Metadata, "metadata", nil, "NAME=VALUE, comma-separated")

	return func() (_ apitype.SandboxRequest, err error) {
		for _, take := range given {
			take()
		}
		req.TTL, req.IdleTTL = (*apitype.Duration)(ttl), (*apitype.Duration)(idleTTL)
		for _, m := range *mounts {
			parts := strings.Split(m, ":")
			if len(parts) < 2 || len(parts) > 3 {
				return req, fmt.Errorf("--mount is %q, want HOST:SANDBOX or HOST:SANDBOX:MODE", m)
			}
			mount := apitype.MountRequest{HostPath: parts[0], MountPath: parts[1]}
			if len(parts) == 3 {
				mount.Mode = parts[2]
			}
			req.ExtraMounts = append(req.ExtraMounts, mount)
		}
		req.Env, err = environment(*env)
		return req, err
	}
}

// optional returns a function that sets a field to the value of a flag if that was given.
func optional[T any](f *pflag.FlagSet, name string, field **T, value *T) func() {
	return func() {
		if f.Changed(name) {
			*field = value
		}
	}
}

// environment parses NAME=VALUE. A name alone takes its value from this process.
func environment(list []string) (map[string]string, error) {
	if len(list) == 0 {
		return nil, nil
	}
	env := map[string]string{}
	for _, kv := range list {
		name, value, ok := strings.Cut(kv, "=")
		if !ok {
			if value, ok = os.LookupEnv(name); !ok {
				return nil, fmt.Errorf("--env %s: there is no such variable here", name)
			}
		}
		env[name] = value
	}
	return env, nil
}

// seconds rounds up: a timeout is never shorter than asked for.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }
