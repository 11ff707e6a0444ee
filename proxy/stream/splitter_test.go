package stream

import (
	"fmt"
	"strings"
	"testing"

	"github.com/bermhq/berm/runtime"
)

func TestSplitter(t *testing.T) {
	long := strings.Repeat("x", maxEvent-1)
	for name, tt := range map[string]struct {
		told   Place
		chunks []string // of stdout, or of stderr after a "!"
		want   string   // pieces, and the place after each
	}{
		"lines sent in part":   {Place{2, 6}, []string{"a\n\nb", "!c\n", "d\n"}, `""@3,6 "bd"@8`},
		"lines":                {Place{}, []string{"a\n\nb", "!c\n", "d\n"}, `"a"@2 ""@3 !"c"@3,6 "bd"@8`},
		"line without an end":  {Place{}, []string{"a\nb"}, `"a"@2 "b"…@3`},
		"line that is as long": {Place{}, []string{long + "\n"}, fmt.Sprintf("%q@%d", long, maxEvent)},
		"line that is longer":  {Place{}, []string{long + "€\n"}, fmt.Sprintf("%q…@%d \"€\"@%d", long, maxEvent-1, maxEvent+3)},
	} {
		s := newSplitter(tt.told)
		var got []string
		emit := func(p piece) error {
			mark, more := "", ""
			if p.stderr {
				mark = "!"
			}
			if p.partial {
				more = "…"
			}
			text := fmt.Sprintf("%q", p.data)
			got = append(got, fmt.Sprintf("%s%s%s@%s", mark, text, more, s.place()))
			return nil
		}
		seq := int64(0)
		for _, c := range tt.chunks {
			data, stderr := strings.CutPrefix(c, "!")
			seq += int64(len(data))
			if err := s.feed(runtime.Chunk{Seq: seq, Stderr: stderr, Data: []byte(data)}, emit); err != nil {
				t.Error(err)
			}
		}
		if err := s.rest(emit); err != nil {
			t.Error(err)
		}
		if text := strings.Join(got, " "); text != tt.want {
			t.Errorf("%s: %.300s, want %.300s", name, text, tt.want)
		}
	}
}
