package buildkit

import (
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

const (
	// A message within another may take two bytes on the wire, and hundreds once decoded.
	// So all messages in one are bounded by its size, and by maxParts.
	fewParts  = 1000
	maxParts  = 50_000
	partBytes = 32
	maxDepth  = 100
)

// codec is protobuf's codec. It refuses messages that would grow large when they are decoded.
type codec struct{ encoding.CodecV2 }

func (c codec) Unmarshal(data mem.BufferSlice, v any) error {
	if m, ok := v.(proto.Message); ok {
		left := min(maxParts, fewParts+data.Len()/partBytes)
		if !fewMessages(m.ProtoReflect().Descriptor(), data.Materialize(), maxDepth, &left) {
			return status.Error(codes.ResourceExhausted, "the request has too many parts")
		}
	}
	return c.CodecV2.Unmarshal(data, v)
}

// fewMessages reports whether an encoded message contains at most left others, at most depth deep. The
// decoder refuses malformed ones.
func fewMessages(d protoreflect.MessageDescriptor, b []byte, depth int, left *int) bool {
	for len(b) > 0 {
		number, kind, n := protowire.ConsumeTag(b)
		if n < 0 {
			return true
		}
		b = b[n:]
		size := protowire.ConsumeFieldValue(number, kind, b)
		if size < 0 {
			return true
		}
		value, field := b[:size], d.Fields().ByNumber(number)
		b = b[size:]
		if field == nil || field.Message() == nil || kind != protowire.BytesType {
			continue
		}
		inner, _ := protowire.ConsumeBytes(value)
		if *left--; *left < 0 || depth == 0 || !fewMessages(field.Message(), inner, depth-1, left) {
			return false
		}
	}
	return true
}
