package lifecycle

import (
	"encoding/json"
	"strings"
	"time"
)

// kind is what a process in a sandbox is to its caller. The ID of a process in its sandbox
// begins with the kind.
type kind string

const (
	kindExec    kind = "exec."
	kindProcess kind = "proc."
)

// use returns how a process of the kind counts.
func (k kind) use() use {
	if k == kindProcess {
		return useProcess
	}
	return useCommand
}

func kindOf(proc string) (kind, string) {
	for _, k := range []kind{kindExec, kindProcess} {
		if id, ok := strings.CutPrefix(proc, string(k)); ok && idPattern.MatchString(id) {
			return k, id
		}
	}
	return "", ""
}

// label is what Berm attaches to a process in a sandbox. The sandbox can read and forge it.
type label struct {
	Hash       string `json:"h,omitempty"` // of the request
	TimeoutMS  int64  `json:"t,omitempty"`
	Stdin      bool   `json:"i,omitempty"`
	Serialized bool   `json:"s,omitempty"`
}

func (l label) String() string {
	b, _ := json.Marshal(l) // strings and numbers can't fail
	return string(b)
}

// maxTimeout is more than any policy allows.
const maxTimeout = 10 * 365 * 24 * time.Hour

// parseLabel decodes a process label. It returns the zero label if s is malformed.
func parseLabel(s string) (l label) {
	if len(s) > 1024 || json.Unmarshal([]byte(s), &l) != nil || l.TimeoutMS < 0 || l.TimeoutMS > int64(maxTimeout/time.Millisecond) {
		return label{}
	}
	return l
}

func (l label) timeout() time.Duration { return time.Duration(l.TimeoutMS) * time.Millisecond }
