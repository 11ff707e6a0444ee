// Package body reads the body of a create, translates it for the policy, writes what was
// judged for the engine, and compares the container that was made with that. It is pure.
package body

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/runtime"
)

// Create is the body of a container's creation: every field that some version of
// the API from 1.24 to 1.51 has, and that some client sends. It is written back as it
// was read only in mode audit.
type Create struct {
	Config
	HostConfig       *Host                      `json:"HostConfig,omitempty"`
	NetworkingConfig map[string]json.RawMessage `json:"NetworkingConfig,omitempty"` // see endpoints
}

// Config is what a container is, apart from what confines it.
type Config struct {
	Hostname        string              `json:"Hostname"`
	Domainname      string              `json:"Domainname"`
	User            string              `json:"User"`
	AttachStdin     bool                `json:"AttachStdin"`
	AttachStdout    bool                `json:"AttachStdout"`
	AttachStderr    bool                `json:"AttachStderr"`
	ExposedPorts    map[string]struct{} `json:"ExposedPorts,omitempty"`
	Tty             bool                `json:"Tty"`
	OpenStdin       bool                `json:"OpenStdin"`
	StdinOnce       bool                `json:"StdinOnce"`
	Env             []string            `json:"Env"`
	Cmd             Words               `json:"Cmd"`
	Healthcheck     *Health             `json:"Healthcheck,omitempty"`
	ArgsEscaped     bool                `json:"ArgsEscaped,omitempty"`
	Image           string              `json:"Image"`
	Volumes         map[string]struct{} `json:"Volumes"`
	WorkingDir      string              `json:"WorkingDir"`
	Entrypoint      Words               `json:"Entrypoint"`
	NetworkDisabled bool                `json:"NetworkDisabled,omitempty"`
	MacAddress      string              `json:"MacAddress,omitempty"`
	OnBuild         []string            `json:"OnBuild"`
	Labels          map[string]string   `json:"Labels"`
	StopSignal      string              `json:"StopSignal,omitempty"`
	StopTimeout     *int64              `json:"StopTimeout,omitempty"`
	Shell           Words               `json:"Shell,omitempty"`
	Runtime         string              `json:"Runtime,omitempty"` // where some clients put it, and no engine reads it
}

// Health is a health check.
type Health struct {
	Test          []string `json:"Test,omitempty"`
	Interval      int64    `json:"Interval,omitempty"`
	Timeout       int64    `json:"Timeout,omitempty"`
	StartPeriod   int64    `json:"StartPeriod,omitempty"`
	StartInterval int64    `json:"StartInterval,omitempty"`
	Retries       int64    `json:"Retries,omitempty"`
}

// Host is what confines a container.
type Host struct {
	resourcesBody
	Binds           []string              `json:"Binds"`
	ContainerIDFile string                `json:"ContainerIDFile"`
	LogConfig       logBody               `json:"LogConfig"`
	NetworkMode     string                `json:"NetworkMode"`
	PortBindings    map[string][]portBody `json:"PortBindings"`
	RestartPolicy   Restart               `json:"RestartPolicy"`
	AutoRemove      bool                  `json:"AutoRemove"`
	VolumeDriver    string                `json:"VolumeDriver"`
	VolumesFrom     []string              `json:"VolumesFrom"`
	ConsoleSize     [2]uint               `json:"ConsoleSize"`
	Annotations     map[string]string     `json:"Annotations,omitempty"`
	CapAdd          Words                 `json:"CapAdd"`
	CapDrop         Words                 `json:"CapDrop"`
	Capabilities    []string              `json:"Capabilities,omitempty"` // of one version that was taken back
	CgroupnsMode    string                `json:"CgroupnsMode,omitempty"`
	DNS             []string              `json:"Dns"`
	DNSOptions      []string              `json:"DnsOptions"`
	DNSSearch       []string              `json:"DnsSearch"`
	ExtraHosts      []string              `json:"ExtraHosts"`
	GroupAdd        []string              `json:"GroupAdd"`
	IpcMode         string                `json:"IpcMode"`
	Cgroup          string                `json:"Cgroup"`
	Links           []string              `json:"Links"`
	OomScoreAdj     int                   `json:"OomScoreAdj"`
	PidMode         string                `json:"PidMode"`
	Privileged      bool                  `json:"Privileged"`
	PublishAllPorts bool                  `json:"PublishAllPorts"`
	ReadonlyRootfs  bool                  `json:"ReadonlyRootfs"`
	SecurityOpt     []string              `json:"SecurityOpt"`
	StorageOpt      map[string]string     `json:"StorageOpt,omitempty"`
	Tmpfs           map[string]string     `json:"Tmpfs,omitempty"`
	UTSMode         string                `json:"UTSMode"`
	UsernsMode      string                `json:"UsernsMode"`
	ShmSize         int64                 `json:"ShmSize"`
	Sysctls         map[string]string     `json:"Sysctls,omitempty"`
	Runtime         string                `json:"Runtime,omitempty"`
	Isolation       string                `json:"Isolation"`
	Mounts          []MountBody           `json:"Mounts,omitempty"`
	MaskedPaths     []string              `json:"MaskedPaths"`
	ReadonlyPaths   []string              `json:"ReadonlyPaths"`
	Init            *bool                 `json:"Init,omitempty"`
}

// resourcesBody are the fields that can be changed later as well.
type resourcesBody struct {
	CPUShares            int64           `json:"CpuShares"`
	Memory               int64           `json:"Memory"`
	NanoCPUs             int64           `json:"NanoCpus"`
	CgroupParent         string          `json:"CgroupParent"`
	BlkioWeight          int64           `json:"BlkioWeight"`
	BlkioWeightDevice    []blkioBody     `json:"BlkioWeightDevice"`
	BlkioDeviceReadBps   []blkioBody     `json:"BlkioDeviceReadBps"`
	BlkioDeviceWriteBps  []blkioBody     `json:"BlkioDeviceWriteBps"`
	BlkioDeviceReadIOps  []blkioBody     `json:"BlkioDeviceReadIOps"`
	BlkioDeviceWriteIOps []blkioBody     `json:"BlkioDeviceWriteIOps"`
	CPUPeriod            int64           `json:"CpuPeriod"`
	CPUQuota             int64           `json:"CpuQuota"`
	CPURealtimePeriod    int64           `json:"CpuRealtimePeriod"`
	CPURealtimeRuntime   int64           `json:"CpuRealtimeRuntime"`
	CpusetCpus           string          `json:"CpusetCpus"`
	CpusetMems           string          `json:"CpusetMems"`
	Devices              []deviceBody    `json:"Devices"`
	DeviceCgroupRules    []string        `json:"DeviceCgroupRules"`
	DeviceRequests       []deviceRequest `json:"DeviceRequests"`
	DiskQuota            int64           `json:"DiskQuota,omitempty"`
	KernelMemory         int64           `json:"KernelMemory,omitempty"`
	KernelMemoryTCP      int64           `json:"KernelMemoryTCP,omitempty"`
	MemoryReservation    int64           `json:"MemoryReservation"`
	MemorySwap           int64           `json:"MemorySwap"`
	MemorySwappiness     *int64          `json:"MemorySwappiness"`
	OomKillDisable       *bool           `json:"OomKillDisable"`
	PidsLimit            *int64          `json:"PidsLimit"`
	Ulimits              []ulimitBody    `json:"Ulimits"`
	CPUCount             int64           `json:"CpuCount"`
	CPUPercent           int64           `json:"CpuPercent"`
	IOMaximumIOps        int64           `json:"IOMaximumIOps"`
	IOMaximumBandwidth   int64           `json:"IOMaximumBandwidth"`
}

// Update is the body of a container's update.
type Update struct {
	resourcesBody
	RestartPolicy Restart `json:"RestartPolicy"`
}

type logBody struct {
	Type   string            `json:"Type"`
	Config map[string]string `json:"Config"`
}

type portBody struct {
	HostIP   string `json:"HostIp"`
	HostPort string `json:"HostPort"`
}

// Restart is a restart policy.
type Restart struct {
	Name              string `json:"Name"`
	MaximumRetryCount int64  `json:"MaximumRetryCount"`
}

type blkioBody struct {
	Path   string `json:"Path"`
	Weight int64  `json:"Weight,omitempty"`
	Rate   int64  `json:"Rate,omitempty"`
}

type deviceBody struct {
	PathOnHost        string `json:"PathOnHost"`
	PathInContainer   string `json:"PathInContainer"`
	CgroupPermissions string `json:"CgroupPermissions"`
}

type deviceRequest struct {
	Driver       string            `json:"Driver"`
	Count        int64             `json:"Count"`
	DeviceIDs    []string          `json:"DeviceIDs"`
	Capabilities [][]string        `json:"Capabilities"`
	Options      map[string]string `json:"Options"`
}

type ulimitBody struct {
	Name string `json:"Name"`
	Soft int64  `json:"Soft"`
	Hard int64  `json:"Hard"`
}

// MountBody is a mount of the form that has a field for everything.
type MountBody struct {
	Type           string         `json:"Type,omitempty"`
	Source         string         `json:"Source,omitempty"`
	Target         string         `json:"Target,omitempty"`
	ReadOnly       bool           `json:"ReadOnly,omitempty"`
	Consistency    string         `json:"Consistency,omitempty"`
	BindOptions    *bindBody      `json:"BindOptions,omitempty"`
	VolumeOptions  *VolumeOptions `json:"VolumeOptions,omitempty"`
	ImageOptions   *subpathBody   `json:"ImageOptions,omitempty"`
	TmpfsOptions   *tmpfsBody     `json:"TmpfsOptions,omitempty"`
	ClusterOptions *struct{}      `json:"ClusterOptions,omitempty"`
}

type bindBody struct {
	Propagation            string `json:"Propagation,omitempty"`
	NonRecursive           bool   `json:"NonRecursive,omitempty"`
	CreateMountpoint       bool   `json:"CreateMountpoint,omitempty"`
	ReadOnlyNonRecursive   bool   `json:"ReadOnlyNonRecursive,omitempty"`
	ReadOnlyForceRecursive bool   `json:"ReadOnlyForceRecursive,omitempty"`
}

// VolumeOptions are a mount's options of a volume.
type VolumeOptions struct {
	NoCopy       bool              `json:"NoCopy,omitempty"`
	Labels       map[string]string `json:"Labels,omitempty"`
	Subpath      string            `json:"Subpath,omitempty"`
	DriverConfig *driverBody       `json:"DriverConfig,omitempty"`
}

type driverBody struct {
	Name    string            `json:"Name,omitempty"`
	Options map[string]string `json:"Options,omitempty"`
}

type subpathBody struct {
	Subpath string `json:"Subpath,omitempty"`
}

type tmpfsBody struct {
	SizeBytes int64      `json:"SizeBytes,omitempty"`
	Mode      int64      `json:"Mode,omitempty"`
	Options   [][]string `json:"Options,omitempty"`
}

// Endpoints reads NetworkingConfig, of which EndpointsConfig is the only field. The Python
// client has null beside it, by the network's name.
func (b *Create) Endpoints() (map[string]*Endpoint, error) {
	const field = "EndpointsConfig"
	for name, raw := range b.NetworkingConfig {
		if name != field && raw != nil {
			return nil, proxy.Malformed(fmt.Sprintf("unknown field %q", "NetworkingConfig."+Shorten(name)))
		}
	}
	if b.NetworkingConfig[field] == nil {
		return nil, nil
	}
	var list map[string]*Endpoint
	err := proxy.DecodeJSONNulls(b.NetworkingConfig[field], &list)
	return list, err
}

// Endpoint is how a container joins a network. From NetworkID on it is what the
// engine reports; clients send it back, and nobody reads it.
type Endpoint struct {
	IPAMConfig          *addressBody      `json:"IPAMConfig"`
	Links               []string          `json:"Links"`
	Aliases             []string          `json:"Aliases"`
	MacAddress          string            `json:"MacAddress"`
	DriverOpts          map[string]string `json:"DriverOpts"`
	GwPriority          int64             `json:"GwPriority,omitempty"`
	NetworkID           string            `json:"NetworkID"`
	EndpointID          string            `json:"EndpointID"`
	Gateway             string            `json:"Gateway"`
	IPAddress           string            `json:"IPAddress"`
	IPPrefixLen         int64             `json:"IPPrefixLen"`
	IPv6Gateway         string            `json:"IPv6Gateway"`
	GlobalIPv6Address   string            `json:"GlobalIPv6Address"`
	GlobalIPv6PrefixLen int64             `json:"GlobalIPv6PrefixLen"`
	DNSNames            []string          `json:"DNSNames"`
}

type addressBody struct {
	IPv4Address  string   `json:"IPv4Address,omitempty"`
	IPv6Address  string   `json:"IPv6Address,omitempty"`
	LinkLocalIPs []string `json:"LinkLocalIPs,omitempty"`
}

// Words is a command: a list of its words, or one of them by itself.
type Words []string

// UnmarshalJSON reads either form.
func (w *Words) UnmarshalJSON(data []byte) error {
	if len(data) > 0 && data[0] == '"' {
		var word string
		if err := json.Unmarshal(data, &word); err != nil {
			return err
		}
		*w = Words{word}
		return nil
	}
	var list []string
	if json.Unmarshal(data, &list) != nil {
		return errors.New("must be a string, or an array of strings")
	}
	*w = list
	return nil
}

// Bounds of what a body may have.
const (
	maxWords       = 8192
	MaxListed      = 1024 // entries of a list that costs nothing but its length
	MaxLookedUp    = 128  // mounts, and networks: the engine is asked of each
	MaxStopSeconds = 3600
	minHealthPause = time.Second
	minHealthTime  = time.Millisecond // as the engine has it
)

// What names and other short texts look like.
var (
	hostName   = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9._-]{0,61}[a-zA-Z0-9])?$`)
	DomainName = regexp.MustCompile(`^[a-zA-Z0-9]([a-zA-Z0-9._-]{0,251}[a-zA-Z0-9])?$`)
	stopSignal = regexp.MustCompile(`^[A-Za-z0-9+-]{1,16}$`)
	cpuset     = regexp.MustCompile(`^([0-9]{1,4}(-[0-9]{1,4})?(,|$)){0,64}$`) // engines have counted to the end of any range
	Platform   = regexp.MustCompile(`^[a-z0-9]{1,32}(/[a-z0-9_]{1,32}){0,2}$`)
)

// Check bounds what is passed on without being asked of the policy: it has no effect
// outside of the container.
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
	case b.HostConfig.RestartPolicy.MaximumRetryCount < 0 || b.HostConfig.RestartPolicy.MaximumRetryCount > math.MaxInt32:
		return proxy.Malformed("maximum retry count cannot be negative, or that large")
	case b.HostConfig.ConsoleSize[0] > 1<<16 || b.HostConfig.ConsoleSize[1] > 1<<16:
		return proxy.Malformed("a terminal's size is not a number of characters")
	}
	for _, w := range [][]string{b.Cmd, b.Entrypoint, b.Shell} {
		for _, s := range w {
			if strings.ContainsRune(s, 0) {
				return proxy.Malformed("the command has a NUL in it")
			}
		}
	}
	if err := b.checkLengths(); err != nil {
		return err
	}
	if err := b.Healthcheck.Check(); err != nil {
		return err
	}
	return b.HostConfig.Check()
}

// checkLengths bounds what the policy would have to go through, and the engine be asked of.
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
	if len(h.Binds)+len(h.Mounts)+len(h.Tmpfs)+len(b.Volumes) > MaxLookedUp {
		return proxy.Malformed(fmt.Sprintf("there are more than %d mounts", MaxLookedUp))
	}
	return nil
}

// Check refuses a health check that would keep the engine busy.
func (h *Health) Check() error {
	if h == nil {
		return nil
	}
	for _, f := range []struct {
		name  string
		ns    int64
		least time.Duration
	}{
		{"Interval", h.Interval, minHealthPause}, {"StartInterval", h.StartInterval, minHealthPause},
		{"Timeout", h.Timeout, minHealthTime}, {"StartPeriod", h.StartPeriod, minHealthTime},
	} {
		if f.ns != 0 && (f.ns < int64(f.least) || f.ns > int64(24*time.Hour)) {
			return proxy.Malformed(fmt.Sprintf("Healthcheck.%s is not 0 or from %v to 24h, in nanoseconds", f.name, f.least))
		}
	}
	if h.Retries < 0 || h.Retries > 1000 || len(h.Test) > maxWords {
		return proxy.Malformed("Healthcheck.Retries is not from 0 to 1000, or its command too long")
	}
	return nil
}

// Check bounds the resources that the policy isn't asked of.
func (r *resourcesBody) Check() error {
	switch {
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

// Shorten makes a caller's text fit to be shown.
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
