package lifecycle

// What the fuzzers of package lifecycle_test need to see.

// Split is split.
var Split = split

// TextCollector is textCollector.
type TextCollector struct{ textCollector }

// NewTextCollector returns a collector of at most limit code points.
func NewTextCollector(limit int) *TextCollector {
	return &TextCollector{textCollector{limit: limit}}
}

// Collected is collected.
func (c *TextCollector) Collected() (string, bool) { return c.collected() }
