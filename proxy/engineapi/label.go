package engineapi

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	jsonv2 "github.com/go-json-experiment/json"

	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/proxy"
)

// showsLabels reports whether the caller sees Berm's own labels.
func showsLabels(c *call) bool {
	p, _ := c.rules.Profile(c.caller.Profile)
	return p.EngineAPI.ShowLabels
}

// hiddenLabel reports whether a label is one of Berm's own. The TTL that a caller gives isn't.
func hiddenLabel(name, value string) bool {
	return lifecycle.IsOwnLabel(name) && (name != labelTTL || value == "")
}

// hideLabels removes Berm's own labels at the path from the engine's JSON, unless the caller
// sees them.
func hideLabels(c *call, raw json.RawMessage, path ...string) (json.RawMessage, error) {
	if showsLabels(c) {
		return raw, nil
	}
	return withoutLabels(raw, path...)
}

// answerShown answers the engine's JSON after hideLabels.
func answerShown(c *call, status int, raw json.RawMessage, path ...string) error {
	raw, err := hideLabels(c, raw, path...)
	if err != nil {
		return err
	}
	return c.answer(status, raw)
}

// withoutLabels is hideLabels for a caller who doesn't see them.
func withoutLabels(raw json.RawMessage, path ...string) (json.RawMessage, error) {
	return edit(raw, func(labels *map[string]string) { maps.DeleteFunc(*labels, hiddenLabel) }, path...)
}

// edit changes the value at a path in the engine's JSON. It returns JSON without such a value as
// it is.
func edit[T any](raw json.RawMessage, change func(*T), path ...string) (json.RawMessage, error) {
	if len(path) > 0 {
		before, old, after := proxy.CutField(raw, path[0])
		if old == nil {
			return raw, nil
		}
		inner, err := edit(old, change, path[1:]...)
		return slices.Concat(before, inner, after), err
	}
	var value T
	if err := jsonv2.Unmarshal(raw, &value); err != nil {
		return nil, fmt.Errorf("the engine's answer can't be read: %w", err)
	}
	change(&value)
	return json.Marshal(value)
}

// hideFilters rewrites filters for Berm's own labels so that they match as if no object had such labels.
func hideFilters(c *call, f filters) {
	if len(f["label"])+len(f["label!"]) == 0 || showsLabels(c) {
		return
	}
	hidden := func(s string) bool {
		name, _, _ := strings.Cut(s, "=")
		return lifecycle.IsOwnLabel(name) && name != labelTTL
	}
	for i, s := range f["label"] {
		if hidden(s) {
			f["label"][i] = labelPrefix + "none" // no object has this label
		}
	}
	if f["label!"] = slices.DeleteFunc(f["label!"], hidden); len(f["label!"]) == 0 {
		delete(f, "label!")
	}
}
