package lifecycle

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/bermhq/berm/policy"
)

// Bounds of what a caller can keep with a sandbox.
const (
	maxMetadata      = 64
	maxMetadataName  = 128
	maxMetadataValue = 4096
	maxAgentID       = 256
)

// judge checks a request and asks the policy about it.
func (c *creator) judge(req CreateRequest) (*desired, error) {
	id, err := parseID(req.Tenant, req.Key)
	if err != nil {
		return nil, err
	}
	if req.Tenant == "" {
		return nil, &InvalidError{Field: "tenant", Message: "is mandatory"}
	}
	if err := checkMetadata(req.Metadata); err != nil {
		return nil, err
	}
	if len(req.AgentID) > maxAgentID || strings.ContainsFunc(req.AgentID, isControl) {
		return nil, &InvalidError{Field: "agent_id", Message: fmt.Sprintf("must be at most %d bytes without control characters", maxAgentID)}
	}
	volume := req.VolumePath
	preq := req.Request
	if volume != "" {
		if !path.IsAbs(volume) {
			return nil, &InvalidError{Field: "volume_host_path", Message: "must be an absolute path"}
		}
		volume = path.Clean(volume)
		preq.ExtraMounts = append(slices.Clone(preq.ExtraMounts), policy.MountRequest{
			HostPath: volume, MountPath: c.opts.Settings.VolumePath, Mode: "rw",
		})
	}
	verdict := c.opts.Policy().Sandbox(preq)
	if err := verdict.Err(); err != nil {
		return nil, err
	}
	if err := c.opts.Settings.overlap(verdict.Spec); err != nil {
		return nil, err
	}
	sb := Sandbox{
		Tenant: id.tenant, Key: id.key, Spec: verdict.Spec, Overridden: verdict.Overridden,
		Metadata: map[string]string{}, AgentID: req.AgentID, VolumePath: volume,
	}
	maps.Copy(sb.Metadata, req.Metadata)
	return &desired{sb, len(req.Request.Env) > 0, req.MaxSandboxes}, nil
}

func isControl(r rune) bool { return r < 0x20 || r == 0x7f }

func checkMetadata(md map[string]string) error {
	if len(md) > maxMetadata {
		return &InvalidError{Field: "metadata", Message: fmt.Sprintf("at most %d entries", maxMetadata)}
	}
	for name, value := range md {
		if name == "" || len(name) > maxMetadataName || !utf8.ValidString(name) {
			return &InvalidError{Field: "metadata", Message: fmt.Sprintf("names must have 1 to %d bytes", maxMetadataName)}
		}
		if len(value) > maxMetadataValue || !utf8.ValidString(value) {
			return &InvalidError{Field: "metadata." + name, Message: fmt.Sprintf("values must have at most %d bytes", maxMetadataValue)}
		}
	}
	return nil
}

// judgeAgain asks the policy in force about a sandbox that an earlier one allowed.
func (c *creator) judgeAgain(sb Sandbox, adopted bool) (*desired, error) {
	s := sb.Spec
	req := CreateRequest{
		Tenant: sb.Tenant, Key: sb.Key, Metadata: sb.Metadata, AgentID: sb.AgentID, VolumePath: sb.VolumePath,
		Request: policy.Request{
			Profile: s.Profile, Image: &s.Image, Network: &s.Network, HostPath: &s.HostPath, HostPathMode: &s.HostPathMode,
			MountPath: &s.MountPath, CPUs: &s.CPUs, MemoryMB: &s.MemoryMB, PidsLimit: &s.PidsLimit,
			ReadOnlyRootfs: &s.ReadOnlyRootfs, WorkspaceQuotaMB: &s.WorkspaceQuotaMB, Env: s.Env, TTL: &s.TTL, IdleTTL: &s.IdleTTL,
		},
	}
	for _, mt := range s.ExtraMounts {
		if sb.VolumePath == "" || mt.MountPath != c.opts.Settings.VolumePath { // judge adds the volume
			req.Request.ExtraMounts = append(req.Request.ExtraMounts, policy.MountRequest{HostPath: mt.HostPath, MountPath: mt.MountPath, Mode: mt.Mode})
		}
	}
	want, err := c.judge(req)
	if err != nil {
		return nil, err
	}
	if d := want.differences(sb, adopted); len(d) > 0 {
		return nil, &ConflictError{Key: sb.Key, SessionID: sb.SessionID, ContainerID: sb.ContainerID, Differences: d}
	}
	want.Overridden = sb.Overridden
	return want, nil
}
