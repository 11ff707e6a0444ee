package runtime

import "testing"

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
