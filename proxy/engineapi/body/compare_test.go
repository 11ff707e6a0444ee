package body

import (
	"encoding/json"
	"strings"
	"testing"
)

// TestGrantedKeepsSources checks that the label, which callers see, names no path of a pin,
// and that none comes from it.
func TestGrantedKeepsSources(t *testing.T) {
	label, err := json.Marshal(Granted{Sources: []string{"/pins/1"}})
	if err != nil || strings.Contains(string(label), "ources") {
		t.Errorf("label %s, error %v; want no sources", label, err)
	}
	var g Granted
	if err := json.Unmarshal([]byte(`{"Sources":["/pins/1"]}`), &g); err != nil || g.Sources != nil {
		t.Errorf("sources %v, error %v; want none", g.Sources, err)
	}
}
