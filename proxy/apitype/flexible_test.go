package apitype_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/bermhq/berm/proxy/apitype"
)

func TestSecondsUnmarshal(t *testing.T) {
	for in, want := range map[string]int64{
		`30`: 30, `"30"`: 30, `30.0`: 30, `"30.00"`: 30, `999.0`: 999, `"999"`: 999, `-1`: -1, `0`: 0,
	} {
		var s apitype.Seconds
		if err := json.Unmarshal([]byte(in), &s); err != nil {
			t.Errorf("%s: %v", in, err)
		} else if s.Value() == nil || *s.Value() != want {
			t.Errorf("%s: got %v, want %d", in, s.Value(), want)
		}
	}
	for _, in := range []string{
		`30.5`, `999.5`, `""`, `null`, `"30."`, `" 30"`, `"+30"`, `"0x1e"`, `true`, `[30]`, `{}`, `1e3`, `99999999999999999999`, `"30s"`,
	} {
		var s apitype.Seconds
		if err := json.Unmarshal([]byte(in), &s); err == nil {
			t.Errorf("%s: accepted as %v", in, *s.Value())
		}
	}
}

func TestSecondsLeftOut(t *testing.T) {
	got, err := json.Marshal(apitype.ExecRequest{Command: apitype.Command{"true"}})
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"command":["true"]}`; string(got) != want {
		t.Errorf("got %s, want %s", got, want)
	}
	got, err = json.Marshal(apitype.ExecRequest{Command: apitype.Command{"true"}, Timeout: apitype.SecondsOf(0)})
	if err != nil {
		t.Fatal(err)
	}
	if want := `{"command":["true"],"timeout":0}`; string(got) != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestDurationUnmarshal(t *testing.T) {
	for in, want := range map[string]time.Duration{
		`30`: 30 * time.Second, `"30"`: 30 * time.Second, `30.0`: 30 * time.Second,
		`"30m"`: 30 * time.Minute, `"1h30m"`: 90 * time.Minute, `"1.5s"`: 1500 * time.Millisecond, `0`: 0,
	} {
		var d apitype.Duration
		if err := json.Unmarshal([]byte(in), &d); err != nil {
			t.Errorf("%s: %v", in, err)
		} else if time.Duration(d) != want {
			t.Errorf("%s: got %v, want %v", in, time.Duration(d), want)
		}
	}
	for _, in := range []string{`30.5`, `""`, `null`, `"x"`, `true`, `9223372037`, `"9999999h"`, `[]`} {
		var d apitype.Duration
		if err := json.Unmarshal([]byte(in), &d); err == nil {
			t.Errorf("%s: accepted as %v", in, time.Duration(d))
		}
	}
}

func TestDurationRoundTrip(t *testing.T) {
	for _, d := range []time.Duration{0, time.Second, 90 * time.Minute, 1500 * time.Millisecond} {
		b, err := json.Marshal(apitype.Duration(d))
		if err != nil {
			t.Fatal(err)
		}
		var got apitype.Duration
		if err := json.Unmarshal(b, &got); err != nil || time.Duration(got) != d {
			t.Errorf("%s came back as %v, %v", b, time.Duration(got), err)
		}
	}
}

func TestCommandUnmarshal(t *testing.T) {
	for in, want := range map[string]apitype.Command{
		`["echo","a b"]`: {"echo", "a b"},
		`"echo a | cat"`: {"/bin/sh", "-c", "echo a | cat"},
		`[]`:             {},
	} {
		var c apitype.Command
		if err := json.Unmarshal([]byte(in), &c); err != nil {
			t.Errorf("%s: %v", in, err)
		} else if diff := cmp.Diff(want, c); diff != "" {
			t.Errorf("%s: %s", in, diff)
		}
	}
	for _, in := range []string{`null`, `1`, `["a",null]`, `["a",1]`, `{}`} {
		var c apitype.Command
		if err := json.Unmarshal([]byte(in), &c); err == nil {
			t.Errorf("%s: accepted as %q", in, c)
		}
	}
}
