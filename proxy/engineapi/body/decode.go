// Package body decodes the body of a create and translates it for the policy. It encodes the
// judged spec for the engine, and compares the created container with that spec. It is pure.
package body

import (
	"cmp"
	"encoding/json"
	"fmt"
	"math"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/docker/docker/api/types/container"
	"github.com/docker/docker/api/types/network"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/runtime"
)

// Create is the body of a container's creation. It has every field of the API's versions 1.24 to 1.51,
// and further ones that some clients send. The engine gets it as it was decoded only in mode audit.
type Create struct {
	Config
	HostConfig       *Host                      `json:"HostConfig,omitempty"`
	NetworkingConfig map[string]json.RawMessage `json:"NetworkingConfig,omitempty"` // see Endpoints
}

// Config is a container's configuration, except for Host.
type Config struct {
	container.Config
	Runtime     string   `json:"Runtime,omitempty"`     // some clients send it here, and no engine reads it
	VolumesFrom []string `json:"VolumesFrom,omitempty"` // likewise; may only be empty
	PortSpecs   []string `json:"PortSpecs,omitempty"`   // of old versions; may only be empty
}

// Host is a container's HostConfig.
type Host struct {
	container.HostConfig
	Capabilities []string `json:"Capabilities,omitempty"` // of one version, and withdrawn
	DiskQuota    int64    `json:"DiskQuota,omitempty"`    // of old versions
	LxcConf      []string `json:"LxcConf,omitempty"`      // of old clients; may only be empty
}

// Update is the body of a container's update.
type Update struct {
	container.UpdateConfig
	DiskQuota int64 `json:"DiskQuota,omitempty"` // of old versions
}

// Endpoints decodes NetworkingConfig. Its only field is EndpointsConfig, but the Python client
// also sends a null under the network's name.
func (b *Create) Endpoints() (map[string]*network.EndpointSettings, error) {
	const field = "EndpointsConfig"
	for name, raw := range b.NetworkingConfig {
		if name != field && raw != nil {
			return nil, proxy.Malformed(fmt.Sprintf("unknown field %q", "NetworkingConfig."+Shorten(name)))
		}
	}
	if b.NetworkingConfig[field] == nil {
		return nil, nil
	}
	var list map[string]*network.EndpointSettings
	err := proxy.DecodeJSONNulls(b.NetworkingConfig[field], &list)
	return list, err
}

// Bounds of what a body may have.
const (
	maxWords       = 8192
	MaxListed      = 1024 // entries of a list that costs only its length
	MaxLookedUp    = 128  // mounts, and networks: each is looked up at the engine
	MaxStopSeconds = 3600
	minHealthPause = time.Second
	minHealthTime  = time.Millisecond // the engine's own minimum
)

// Patterns of names and other short texts.
var (
	hostName   = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9._-]{0,61}[a-zA-Z0-9])?$`)
	DomainName = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9._-]{0,251}[a-zA-Z0-9])?$`)
	stopSignal = regexp.MustCompile(`^[A-Za-z0-9+-]{1,16}$`)
	cpuset     = regexp.MustCompile(`^([0-9]{1,4}(-[0-9]{1,4})?(,|$)){0,64}$`) // some engines walk any range
	Platform   = regexp.MustCompile(`^[a-z0-9]{1,32}(/[a-z0-9_]{1,32}){0,2}$`)
)

// Check bounds the fields that the policy doesn't judge, since they have no effect outside of the
// container.
func (b *Create) Check() error {
	switch {
	case b.Hostname != "" && !hostName.MatchString(b.Hostname):
		return proxy.Malformed("invalid hostname format: " + Shorten(b.Hostname))
	case b.Domainname != "" && !DomainName.MatchString(b.Domainname):
		return proxy.Malformed("invalid domainname format: " + Shorten(b.Domainname))
	case b.WorkingDir != "" && (!path.IsAbs(b.WorkingDir) || len(b.WorkingDir) > 4096 || strings.ContainsRune(b.WorkingDir, 0) || runtime.KernelPath(b.WorkingDir)):
		return proxy.Malformed("the working directory '" + Shorten(b.WorkingDir) + "' is invalid, it needs to be an absolute path")
	case b.StopSignal != "" && !stopSignal.MatchString(b.StopSignal):
		return proxy.Malformed("Invalid signal: " + Shorten(b.StopSignal))
	case b.StopTimeout != nil && (*b.StopTimeout < 0 || *b.StopTimeout > MaxStopSeconds):
		return proxy.Malformed(fmt.Sprintf("StopTimeout is not from 0 to %d seconds", MaxStopSeconds))
	case len(b.Cmd)+len(b.Entrypoint)+len(b.Shell) > maxWords:
		return proxy.Malformed(fmt.Sprintf("the command has more than %d words", maxWords))
	case b.HostConfig.ConsoleSize[0] > 1<<16 || b.HostConfig.ConsoleSize[1] > 1<<16:
		return proxy.Malformed("a terminal's size is not a number of characters")
	}
	nul := func(s string) bool { return strings.ContainsRune(s, 0) }
	if slices.ContainsFunc(slices.Concat(b.Cmd, b.Entrypoint, b.Shell), nul) {
		return proxy.Malformed("the command has a NUL in it")
	}
	return cmp.Or(b.checkLengths(), checkHealth(b.Healthcheck), CheckChangeable(&b.HostConfig.Resources, b.HostConfig.RestartPolicy))
}

// checkLengths bounds the lists that the policy walks, and the objects to look up at the engine.
func (b *Create) checkLengths() error {
	h := b.HostConfig
	for field, n := range map[string]int{
		"ExposedPorts": len(b.ExposedPorts), "Env": len(b.Env) / 4, "OnBuild": len(b.OnBuild), "CapAdd": len(h.CapAdd), "CapDrop": len(h.CapDrop),
		"SecurityOpt": len(h.SecurityOpt), "Dns": len(h.DNS) + len(h.DNSOptions) + len(h.DNSSearch), "ExtraHosts": len(h.ExtraHosts),
		"GroupAdd": len(h.GroupAdd), "PortBindings": len(h.PortBindings), "Sysctls": len(h.Sysctls), "LogConfig": len(h.LogConfig.Config),
		"Ulimits": len(h.Ulimits), "Devices": len(h.Devices) + len(h.DeviceRequests) + len(h.DeviceCgroupRules),
	} {
		if n > MaxListed {
			return proxy.Malformed(fmt.Sprintf("%s has more entries than anybody needs", field))
		}
	}
	if len(h.Binds)+len(h.Mounts)+len(h.Tmpfs)+len(b.Volumes)+len(h.VolumesFrom) > MaxLookedUp {
		return proxy.Malformed(fmt.Sprintf("there are more than %d mounts", MaxLookedUp))
	}
	if len(h.Links) > MaxLookedUp {
		return proxy.Malformed(fmt.Sprintf("there are more than %d links", MaxLookedUp))
	}
	return nil
}

// checkHealth refuses a health check that would keep the engine busy.
func checkHealth(h *container.HealthConfig) error {
	if h == nil {
		return nil
	}
	for _, f := range []struct {
		name        string
		time, least time.Duration
	}{
		{"Interval", h.Interval, minHealthPause}, {"StartInterval", h.StartInterval, minHealthPause},
		{"Timeout", h.Timeout, minHealthTime}, {"StartPeriod", h.StartPeriod, minHealthTime},
	} {
		if f.time != 0 && (f.time < f.least || f.time > 24*time.Hour) {
			return proxy.Malformed(fmt.Sprintf("Healthcheck.%s is not 0 or from %v to 24h, in nanoseconds", f.name, f.least))
		}
	}
	if h.Retries < 0 || h.Retries > 1000 || len(h.Test) > maxWords {
		return proxy.Malformed("Healthcheck.Retries is not from 0 to 1000, or its command too long")
	}
	return nil
}

// CheckChangeable is Check for the fields that an update can change.
func CheckChangeable(r *container.Resources, restart container.RestartPolicy) error {
	switch {
	case restart.MaximumRetryCount < 0 || restart.MaximumRetryCount > math.MaxInt32:
		return proxy.Malformed("maximum retry count cannot be negative, or that large")
	case !cpuset.MatchString(r.CpusetCpus) || !cpuset.MatchString(r.CpusetMems):
		return proxy.Malformed("Invalid value for cpuset cpus or mems")
	case r.MemorySwappiness != nil && (*r.MemorySwappiness < -1 || *r.MemorySwappiness > 100):
		return proxy.Malformed(fmt.Sprintf("Invalid value: %d, valid memory swappiness range is 0-100", *r.MemorySwappiness))
	case r.MemoryReservation < 0:
		return proxy.Malformed("the memory reservation is negative")
	case r.NanoCPUs != 0 && (r.CPUPeriod != 0 || r.CPUQuota != 0):
		return proxy.Malformed("Conflicting options: Nano CPUs and CPU Period or Quota cannot both be set")
	case r.CPUPeriod < 0 || r.CPUQuota < -1 || r.NanoCPUs < 0 || r.CPUShares < 0:
		return proxy.Malformed("a CPU limit is negative")
	}
	return nil
}

// Shorten cuts a caller's text to 128 bytes, and quotes it if it isn't printable UTF-8.
func Shorten(s string) string {
	const most = 128
	if len(s) > most {
		s = s[:most] + "…"
	}
	if !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !strconv.IsPrint(r) }) {
		s = strings.Trim(strconv.Quote(s), `"`)
	}
	return s
}
