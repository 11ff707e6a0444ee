package runtime

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
)

// TestSeccompIoctls has a filter of the rules judge all that they compare.
func TestSeccompIoctls(t *testing.T) {
	rules := SeccompIoctls()
	for request := range uint64(1 << 16) {
		allowed := 0
		for _, rule := range rules {
			if arg := rule.Args[0]; request&arg.Value == arg.ValueTwo {
				allowed++
			}
		}
		want := 1
		if request == 0x401c5820&0xffff || request == 0x40086602&0xffff {
			want = 0
		}
		if allowed != want {
			t.Errorf("%#x matches %d rules, want %d", request, allowed, want)
		}
	}
	if len(rules) > 32 {
		t.Errorf("%d rules", len(rules))
	}
}

func TestSeccompOption(t *testing.T) {
	for arch, native := range map[string]string{"amd64": "SCMP_ARCH_X86_64", "arm64": "SCMP_ARCH_AARCH64", "s390x": "SCMP_ARCH_S390X"} {
		opt, err := SeccompOption(arch)
		must(t, err)
		var got struct {
			DefaultAction string
			Architectures []string
			ArchMap       []any
			Syscalls      []any
		}
		must(t, json.Unmarshal([]byte(strings.TrimPrefix(opt, "seccomp=")), &got))
		if got.DefaultAction != "SCMP_ACT_ERRNO" || !slices.Equal(got.Architectures, []string{native}) ||
			got.ArchMap != nil || len(got.Syscalls) < 10 {
			t.Errorf("%s: %+v", arch, got)
		}
		if strings.Contains(opt, `"io_setup"`) {
			t.Errorf("%s: io_setup is allowed", arch)
		}
	}
	if _, err := SeccompOption("pdp11"); err == nil {
		t.Error("an unknown architecture got a profile")
	}
}
