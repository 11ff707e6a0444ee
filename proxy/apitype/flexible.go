package apitype

import (
	"encoding/json"
	"errors"
	"math"
	"strconv"
	"strings"
	"time"
)

// Seconds is a whole number of seconds that may be left out. The zero value is left out. In
// JSON it may come as 30, 30.0 or "30".
type Seconds struct {
	n   int64
	set bool
}

// SecondsOf returns n seconds.
func SecondsOf(n int64) Seconds { return Seconds{n, true} }

// IsZero reports whether s is left out.
func (s Seconds) IsZero() bool { return !s.set }

// Value returns the seconds, or nil if s is left out.
func (s Seconds) Value() *int64 {
	if !s.set {
		return nil
	}
	return &s.n
}

// MarshalJSON gives a number, or null when left out.
func (s Seconds) MarshalJSON() ([]byte, error) { return json.Marshal(s.Value()) }

// UnmarshalJSON takes a whole number, also with a fraction of zero or as a string.
func (s *Seconds) UnmarshalJSON(b []byte) error {
	n, ok := whole(unquote(b))
	if !ok {
		return errors.New("must be a whole number of seconds")
	}
	*s = SecondsOf(n)
	return nil
}

// Duration is a span of time. Its JSON is a whole number of seconds (30, 30.0, "30") or a
// string like "1h30m". It always encodes as a string with units.
type Duration time.Duration

// MarshalJSON gives a string like "1h30m0s".
func (d Duration) MarshalJSON() ([]byte, error) { return json.Marshal(time.Duration(d).String()) }

// UnmarshalJSON takes whole seconds or a string with units.
func (d *Duration) UnmarshalJSON(b []byte) error {
	s := unquote(b)
	if n, ok := whole(s); ok {
		if n > math.MaxInt64/int64(time.Second) || n < math.MinInt64/int64(time.Second) {
			return errors.New("is too long")
		}
		*d = Duration(time.Duration(n) * time.Second)
		return nil
	}
	v, err := time.ParseDuration(s)
	if err != nil || len(b) == 0 || b[0] != '"' {
		return errors.New(`must be a whole number of seconds, or a string like "1h30m"`)
	}
	*d = Duration(v)
	return nil
}

// unquote returns the value of a JSON string, or the text of any other JSON as it is.
func unquote(b []byte) string {
	var s string
	if len(b) > 0 && b[0] == '"' && json.Unmarshal(b, &s) == nil {
		return s
	}
	return string(b)
}

// whole parses an integer: digits, and at most a fraction that is zero.
func whole(s string) (int64, bool) {
	i, frac, dotted := strings.Cut(s, ".")
	if dotted && (frac == "" || strings.Trim(frac, "0") != "") || strings.HasPrefix(i, "+") {
		return 0, false
	}
	n, err := strconv.ParseInt(i, 10, 64)
	return n, err == nil
}
