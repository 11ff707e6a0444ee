package lifecycle

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/bermhq/berm/policy"
)

// ObjectKind is what an Object is.
type ObjectKind string

// The labels of a sandbox's container. They describe the sandbox, its tenant and its end. They
// never have secrets.
const (
	LabelOwner     = "berm.owner"      // ID of the instance that made it
	LabelTenant    = "berm.tenant"     // the tenant that it belongs to
	LabelKey       = "berm.key"        // the tenant's name for it
	LabelSessionID = "berm.session_id" // UUID
	LabelProfile   = "berm.profile"
	LabelCreatedAt = "berm.created_at" // RFC 3339, UTC, as are the two below
	LabelExpiresAt = "berm.expires_at" // as of creation; renewals are in the store
	LabelDeadline  = "berm.deadline"   // no renewal goes past it
	LabelSpec      = "berm.spec"       // digest of the effective spec
	LabelEffective = "berm.effective"  // the effective spec itself, as JSON, without env
	LabelEnv       = "berm.env"        // names of the caller's variables, comma-separated
	LabelAgent     = "berm.agent"      // runtime.AgentVersion; missing in sandboxes of the first version

	LabelDoor   = "berm.door"   // DoorEngine or DoorEngineImage for the engine proxy; missing on sandboxes
	LabelCaller = "berm.caller" // the name of the caller that made it, with LabelDoor only

	LabelAgentID = "berm.agent_id"         // only if given
	LabelVolume  = "berm.volume_host_path" // only if given
	LabelInode   = "berm.workspace_inode"  // only with a workspace quota
)

// DoorEngine is the LabelDoor of objects that callers made through the engine proxy. Such an
// object has a tenant and an end, but no key: it isn't a sandbox.
const DoorEngine = "engine"

// DoorEngineImage is the LabelDoor of images made through the engine proxy. A container that
// others make from such an image inherits the label, and must not count as an object.
const DoorEngineImage = "engine-image"

// The unprefixed labels of the old sandbox service. Containers that carry all six
// can be adopted.
const (
	LegacySessionID = "session_id"
	LegacyChatID    = "chat_id"
	LegacyExpiresAt = "expires_at"
	LegacyAgentID   = "agent_id"
	LegacyVolume    = "volume_host_path"
	LegacyPort      = "endpoint_port"
)

var legacyLabels = []string{LegacySessionID, LegacyChatID, LegacyExpiresAt, LegacyAgentID, LegacyVolume, LegacyPort}

func legacySelector() map[string]string {
	selector := map[string]string{}
	for _, name := range legacyLabels {
		selector[name] = ""
	}
	return selector
}

// sandboxFromLabels rebuilds a sandbox from its container's labels and environment. The error
// joins all mistakes in them.
func sandboxFromLabels(labels map[string]string, env []string) (Sandbox, error) {
	var errs []error
	fail := func(label string, err error) {
		errs = append(errs, fmt.Errorf("label %s: %w", label, err))
	}
	instant := func(label string) time.Time {
		t, err := time.Parse(time.RFC3339Nano, labels[label])
		if err != nil {
			fail(label, errors.New("not an RFC 3339 time"))
		}
		return t.UTC()
	}
	sb := Sandbox{
		Tenant:     labels[LabelTenant],
		Key:        labels[LabelKey],
		SessionID:  labels[LabelSessionID],
		AgentID:    labels[LabelAgentID],
		VolumePath: labels[LabelVolume],

		WorkspaceInode: labels[LabelInode],

		CreatedAt: instant(LabelCreatedAt),
		ExpiresAt: instant(LabelExpiresAt),
		Deadline:  instant(LabelDeadline),
		Metadata:  map[string]string{},
	}
	sb.LastUsedAt = sb.CreatedAt
	if sb.Tenant == "" {
		fail(LabelTenant, errors.New("missing"))
	}
	if key, err := ParseKey(sb.Key); err != nil || key != sb.Key {
		fail(LabelKey, errors.New("not a key"))
	}
	if _, err := uuid.Parse(sb.SessionID); err != nil {
		fail(LabelSessionID, errors.New("not a UUID"))
	}
	if err := json.Unmarshal([]byte(labels[LabelEffective]), &sb.Spec); err != nil {
		fail(LabelEffective, errors.New("not a spec"))
	} else if sb.Spec.Digest() != labels[LabelSpec] {
		fail(LabelSpec, errors.New("is not the digest of the spec"))
	}
	sb.Spec.Env = pickEnv(labels[LabelEnv], env)
	return sb, errors.Join(errs...)
}

// pickEnv returns the variables of a container that are in names.
func pickEnv(names string, env []string) map[string]string {
	if names == "" {
		return nil
	}
	wanted := strings.Split(names, ",")
	picked := make(map[string]string, len(wanted))
	for _, e := range env {
		if name, value, ok := strings.Cut(e, "="); ok && slices.Contains(wanted, name) {
			picked[name] = value
		}
	}
	return picked
}

// sandboxFromLegacy rebuilds a sandbox from the labels of the old service. Fields that the old
// service didn't have come from spec, which is that of an empty request.
func sandboxFromLegacy(labels map[string]string, created time.Time, spec policy.Spec) (Sandbox, error) {
	var errs []error
	expires, err := time.Parse(time.RFC3339Nano, labels[LegacyExpiresAt])
	if err != nil {
		errs = append(errs, fmt.Errorf("label %s: not an RFC 3339 time", LegacyExpiresAt))
	}
	key, err := uuid.Parse(labels[LegacyChatID])
	if err != nil {
		errs = append(errs, fmt.Errorf("label %s: not a UUID", LegacyChatID))
	}
	if _, err := uuid.Parse(labels[LegacySessionID]); err != nil {
		errs = append(errs, fmt.Errorf("label %s: not a UUID", LegacySessionID))
	}
	if labels[LegacyAgentID] == "" {
		errs = append(errs, fmt.Errorf("label %s: blank", LegacyAgentID))
	}
	port, err := strconv.Atoi(labels[LegacyPort])
	if err != nil || port < 1 || port > 65535 {
		errs = append(errs, fmt.Errorf("label %s: not a port", LegacyPort))
	}
	deadline := created.Add(spec.MaxLifetime).UTC()
	if deadline.Before(expires) {
		deadline = expires.UTC()
	}
	return Sandbox{
		Tenant:     DefaultTenant,
		Key:        key.String(),
		SessionID:  labels[LegacySessionID],
		Spec:       spec,
		Metadata:   map[string]string{},
		AgentID:    labels[LegacyAgentID],
		VolumePath: labels[LegacyVolume],
		Endpoint:   Endpoint{Port: port},
		CreatedAt:  created.UTC(),
		ExpiresAt:  expires.UTC(),
		Deadline:   deadline,
		LastUsedAt: created.UTC(),
	}, errors.Join(errs...)
}

// The kinds of objects, in the order in which they can be removed: an earlier one may use a later
// one.
const (
	ObjectContainer ObjectKind = "container"
	ObjectNetwork   ObjectKind = "network"
	ObjectVolume    ObjectKind = "volume"
	ObjectImage     ObjectKind = "image" // is sealed, but not collected
)

// ObjectKinds returns the kinds that are collected, in that order.
func ObjectKinds() []ObjectKind { return []ObjectKind{ObjectContainer, ObjectNetwork, ObjectVolume} }

// isObject reports whether labels are an object's. A sandbox's container has a key, even if its
// image has a LabelDoor.
func isObject(labels map[string]string) bool {
	return labels[LabelDoor] == DoorEngine && labels[LabelKey] == ""
}
