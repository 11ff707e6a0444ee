package containerd

import "testing"

// What is there is only compared at first: a Create shouldn't read two megabytes.
func TestAgentPath(t *testing.T) {
	r := newRuntimeWith(t, Options{Address: "/nonexistent", Root: t.TempDir(), Agent: []byte("x")})
	first, err := r.agentPath()
	must(t, err)
	second, err := r.agentPath()
	if err != nil || first != second || first != r.root.path("bin", "berm-agent-2d711642b726") {
		t.Errorf("%s and %s, %v", first, second, err)
	}
}
