package proxy

import (
	"regexp"
	"strings"
	"unicode"

	"github.com/bermhq/berm/runtime"
)

// maxPullReason bounds the reason of a failed pull that callers see, in bytes.
const maxPullReason = 400

var (
	// prefixes matches words of clients and engines that don't explain the cause.
	prefixes = regexp.MustCompile(`^(pull image "[^"]*": |Error response from daemon: |failed to [a-z ]+ "[^"]*": )+`)
	query    = regexp.MustCompile(`(\w://[^\s"'?#]*)[?#][^\s"']*`)
	// assigned matches values after a word like password, and those of an Authorization header.
	assigned = regexp.MustCompile(`((?i:password|passwd|secret|token|authorization|credentials?|api[-_]?key)["']?\s*[:=]\s*["']?(?i:(?:basic|bearer)\s+)?|\b(?:Basic|Bearer)\s+)[^\s"',;]+`)
	// opaque matches words that may be keys. The sha256: is for digests, which aren't keys.
	opaque = regexp.MustCompile(`(?:sha256:)?[A-Za-z0-9+_=~-]{24,}`)
	// hostPath matches a path of the engine's host, but not one within a URL.
	hostPath = regexp.MustCompile(`(^|[\s"'(=:,])/[^/\s"':,)][^\s"':,)]*`)
)

// pullReason returns why a pull failed: the registry's or engine's message, in one line. It
// removes credentials, tokens, queries of URLs and paths of the engine's host.
func pullReason(err error) string {
	text := strings.ToValidUTF8(err.Error(), "")
	if len(text) > 16*maxPullReason { // cutting it could leave the end of a secret that no pattern finds
		return "the registry's answer is too long to show"
	}
	text = strings.Join(strings.FieldsFunc(text, func(r rune) bool { return unicode.IsSpace(r) || !unicode.IsPrint(r) }), " ")
	text = prefixes.ReplaceAllString(text, "")
	if strings.Contains(text, "no space left on device") {
		return "the engine's disk is full"
	}
	text = query.ReplaceAllString(runtime.WithoutUser(text), "$1")
	text = assigned.ReplaceAllString(text, "${1}…")
	text = opaque.ReplaceAllStringFunc(text, func(word string) string {
		if strings.HasPrefix(word, "sha256:") || !isOpaque(word) {
			return word
		}
		return "…"
	})
	return cut(hostPath.ReplaceAllString(text, "${1}…"), maxPullReason)
}

// isOpaque reports whether a word looks made by a machine: it has letters of both cases, or
// hexadecimal digits only.
func isOpaque(word string) bool {
	return strings.ToLower(word) != word && strings.ToUpper(word) != word || strings.Trim(word, "0123456789abcdef") == ""
}
