package serve

import (
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// codeResident is how much of a program's code is mapped, in kB.
func codeResident(t *testing.T) int {
	t.Helper()
	b := check.Value(os.ReadFile("/proc/self/smaps"))(t)
	program := check.Value(os.Readlink("/proc/self/exe"))(t)
	total, code := 0, false
	for line := range strings.Lines(string(b)) {
		fields := strings.Fields(line)
		switch {
		case strings.Contains(fields[0], "-"):
			code = len(fields) == 6 && fields[5] == program && fields[1] == "r-xp"
		case code && fields[0] == "Rss:":
			n := check.Value(strconv.Atoi(fields[1]))(t)
			total += n
		}
	}
	return total
}

func TestTrim(t *testing.T) {
	before := codeResident(t)
	must(t, trim())
	if after := codeResident(t); before == 0 || after > before*3/4 {
		t.Errorf("%d kB of code are mapped, after %d", after, before)
	}
}
