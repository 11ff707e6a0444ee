package lifecycle

import "github.com/bermhq/berm/policy"

// OtherMounts answers what callers had mounted into all sandboxes, of whatever
// tenant, that are there or on the way, but for one session. Those whose container
// is dead are left out: nothing runs in them.
func (m *Manager) OtherMounts(sessionID string) []policy.Mount {
	m.mu.Lock()
	defer m.mu.Unlock()
	var mounts []policy.Mount
	add := func(sb Sandbox, adopted bool) {
		if sb.SessionID == sessionID {
			return
		}
		mounts = append(mounts, sb.Spec.Mounts...)
		if adopted && sb.VolumePath != "" { // made by the old service, outside of any spec
			mounts = append(mounts, policy.Mount{Source: sb.VolumePath, Local: sb.VolumePath, Mode: "rw"})
		}
	}
	for _, s := range m.slots {
		if s.record != nil && s.record.sb.Status != StatusStopped {
			add(s.record.sb, s.record.adopted)
		}
		if s.flight != nil {
			add(s.flight.starting, false)
		}
	}
	return mounts
}
