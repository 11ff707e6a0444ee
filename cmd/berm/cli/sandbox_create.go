package cli

import (
	"fmt"
	"maps"
	"os"
	"slices"
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
		sb, err := c.Create(cmd.Context(), args[0], req)
		return answer(flags, cmd, sb, err, showSandbox)
	})
	return cmd
}

// addSpecFlags adds a flag for each field of a request. The function that it returns makes
// the request of the flags that were given.
func addSpecFlags(f *pflag.FlagSet) func() (apitype.SandboxRequest, error) {
	f.String("profile", "", "the policy's profile")
	f.String("image", "", "image reference")
	f.String("network", "", "off, on, or a network of the policy")
	f.String("host-path", "", "directory to be mounted; empty is the default workspace")
	f.String("host-path-mode", "", "none, ro or rw")
	f.String("mount-path", "", "where the directory is seen in the sandbox")
	f.StringArray("mount", nil, "a further directory, HOST:SANDBOX[:ro|rw]; may be given many times")
	f.Float64("cpus", 0, "cores")
	f.Int64("memory-mb", 0, "memory in MB")
	f.Int64("pids-limit", 0, "processes")
	f.Bool("read-only-rootfs", false, "nothing but mounts and /tmp can be written")
	f.Int64("workspace-quota-mb", 0, "largest size of the mounted directory in MB; 0 is unlimited")
	f.StringArray("env", nil, "NAME=VALUE, or NAME to take it from here; may be given many times")
	f.Duration("ttl", 0, "life from creation")
	f.Duration("idle-ttl", 0, "life without use; 0 is unlimited")
	f.StringToString("metadata", nil, "NAME=VALUE, comma-separated")
	f.String("agent-id", "", "agent id, set as AGENT_ID in the sandbox")
	f.String("volume-host-path", "", "the old service's volume, absolute")

	return func() (apitype.SandboxRequest, error) {
		req := apitype.SandboxRequest{
			Profile: given(f, "profile", f.GetString), Image: given(f, "image", f.GetString), Network: given(f, "network", f.GetString),
			HostPath: given(f, "host-path", f.GetString), HostPathMode: given(f, "host-path-mode", f.GetString),
			MountPath: given(f, "mount-path", f.GetString), CPUs: given(f, "cpus", f.GetFloat64),
			MemoryMB: given(f, "memory-mb", f.GetInt64), PidsLimit: given(f, "pids-limit", f.GetInt64),
			ReadOnlyRootfs: given(f, "read-only-rootfs", f.GetBool), WorkspaceQuotaMB: given(f, "workspace-quota-mb", f.GetInt64),
			TTL: (*apitype.Duration)(given(f, "ttl", f.GetDuration)), IdleTTL: (*apitype.Duration)(given(f, "idle-ttl", f.GetDuration)),
			AgentID: given(f, "agent-id", f.GetString), VolumeHostPath: given(f, "volume-host-path", f.GetString),
		}
		var err error
		if req.Metadata, err = f.GetStringToString("metadata"); err != nil {
			return req, err
		}
		mounts, err := f.GetStringArray("mount")
		if err != nil {
			return req, err
		}
		for _, m := range mounts {
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
		env, err := f.GetStringArray("env")
		if err != nil {
			return req, err
		}
		req.Env, err = environment(env)
		return req, err
	}
}

// given returns the value of a flag, or nil if the flag wasn't given.
func given[T any](f *pflag.FlagSet, name string, get func(string) (T, error)) *T {
	if !f.Changed(name) {
		return nil
	}
	v, err := get(name)
	if err != nil {
		return nil // the flag has another type
	}
	return &v
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

func sortedNames(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }

// seconds rounds up: a timeout is never shorter than asked for.
func seconds(d time.Duration) int64 { return int64((d + time.Second - 1) / time.Second) }
