package containerd

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/anypb"
)

// Berm's own labels in the engine's record of a container. Callers don't see them.
const (
	labelPrefix   = "berm.containerd."
	labelName     = labelPrefix + "name"
	labelImage    = labelPrefix + "image"
	labelRoot     = labelPrefix + "root"
	labelExitCode = labelPrefix + "exit-code" // this and the next two are set by settle
	labelExitedAt = labelPrefix + "exited-at"
	labelOOM      = labelPrefix + "oom-killed"

	// emptyValue stands for an empty value of a caller's label: the engine would drop the label.
	// longValue, with a digest, stands for a value that is too long or begins with labelPrefix. The
	// extension longExtension has the value itself.
	emptyValue = labelPrefix + "empty"
	longValue  = labelPrefix + "sha256:"

	longExtension = labelPrefix + "long-labels"

	// maxLabel is the engine's limit for a label's name and value together.
	maxLabel = 4096
)

// encodeLabel returns the value that the engine gets for a caller's value.
func encodeLabel(name, value string) string {
	switch {
	case value == "":
		return emptyValue
	case len(name)+len(value) > maxLabel, strings.HasPrefix(value, labelPrefix): // it mustn't pass for Berm's
		sum := sha256.Sum256([]byte(value))
		return longValue + hex.EncodeToString(sum[:])
	}
	return value
}

// encodeLabels adds a caller's labels to a record.
func encodeLabels(rec *containers.Container, labels map[string]string) error {
	long := map[string]string{}
	for name, value := range labels {
		encoded := encodeLabel(name, value)
		rec.Labels[name] = encoded
		if strings.HasPrefix(encoded, longValue) {
			long[name] = value
		}
	}
	if len(long) == 0 {
		return nil
	}
	b, err := json.Marshal(long)
	if err != nil {
		return fmt.Errorf("encode long labels: %w", err)
	}
	rec.Extensions = map[string]typeurl.Any{longExtension: &anypb.Any{TypeUrl: longExtension, Value: b}}
	return nil
}

// ownLabels returns the caller's labels, decoded.
func ownLabels(rec containers.Container) (map[string]string, error) {
	var long map[string]string
	if ext := rec.Extensions[longExtension]; ext != nil {
		if err := json.Unmarshal(ext.GetValue(), &long); err != nil {
			return nil, fmt.Errorf("read the long labels of container %s: %w", rec.ID, err)
		}
	}
	out := make(map[string]string, len(rec.Labels))
	for name, value := range rec.Labels {
		switch {
		case strings.HasPrefix(name, labelPrefix):
			continue
		case value == emptyValue:
			value = ""
		case strings.HasPrefix(value, longValue):
			value = long[name]
		}
		out[name] = value
	}
	return out, nil
}

// labelFilter selects the containers that Create made and that carry the labels.
func labelFilter(labels map[string]string) string {
	out := "labels." + strconv.Quote(labelName)
	for name, value := range labels {
		out += ",labels." + strconv.Quote(name)
		if value != "" {
			out += "==" + strconv.Quote(encodeLabel(name, value))
		}
	}
	return out
}
