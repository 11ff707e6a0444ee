package doctor

import (
	"fmt"
	"io"
	"os"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/moby/term"
)

// groups are the titles of groups of findings, by the first part of their IDs.
var groups = map[string]string{
	"host": "Host", "config": "Configuration", "engine": "Engine", "policy": "Policy", "storage": "Storage", "doors": "Doors",
}

// colours are escape sequences of a terminal, by grade.
var colours = map[grade]string{gradeOK: "\x1b[32m", gradeSoft: "\x1b[33m", gradeBad: "\x1b[31m"}

const (
	bold  = "\x1b[1m"
	reset = "\x1b[0m" // ends a colour or bold
)

// minWidth is the least width for which fold breaks lines. A narrower terminal breaks them itself.
const minWidth = 60

// print writes a line for each finding, and a second one if its grade isn't ok.
func (r report) print(w io.Writer) error {
	width, colour := 0, false
	if fd, ok := term.GetFdInfo(w); ok {
		if size, err := term.GetWinsize(fd); err == nil {
			width = int(size.Width)
		}
		colour = os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb"
	}
	_, err := io.WriteString(w, r.text(width, colour))
	return err
}

// text returns what print writes. A width of 0 breaks no lines. Findings of the same group must
// follow each other.
func (r report) text(width int, colour bool) string {
	paint := func(code, s string) string {
		if !colour {
			return s
		}
		return code + s + reset
	}
	labels := 0
	for _, f := range r.Findings {
		_, label := f.name()
		labels = max(labels, len(label))
	}
	var b strings.Builder
	last, count := "", map[grade]int{}
	indent := "  " + strings.Repeat(" ", len(gradeSoft)+2+labels+2)
	for _, f := range r.Findings {
		count[f.Grade]++
		group, label := f.name()
		if group != last {
			if last != "" {
				b.WriteString("\n")
			}
			fmt.Fprintf(&b, "%s\n", paint(bold, groups[group]))
			last = group
		}
		head := fmt.Sprintf("  %s%s  %-*s  ", paint(colours[f.Grade], string(f.Grade)), strings.Repeat(" ", len(gradeSoft)-len(f.Grade)), labels, label)
		b.WriteString(head + fold(f.Found, indent, width) + "\n")
		if f.Means != "" {
			advice := f.Means
			if f.Fix != "" {
				advice += "; fix: " + f.Fix
			}
			b.WriteString(indent + fold(advice, indent, width) + "\n")
		}
	}
	verdict := "berm serve works here"
	switch r.Grade {
	case gradeBad:
		verdict = "berm serve doesn't work here as it should: mend what is bad first"
	case gradeSoft:
		verdict += "; what is soft is weaker than it could be"
	}
	tally := fmt.Sprintf("%d ok, %d soft, %d bad: ", count[gradeOK], count[gradeSoft], count[gradeBad])
	return b.String() + "\n" + fold(tally+verdict, "", width) + "\n"
}

// name returns the two parts of the ID, the label with spaces for underscores.
func (f finding) name() (group, label string) {
	group, label, _ = strings.Cut(f.ID, ".")
	return group, strings.ReplaceAll(label, "_", " ")
}

// fold breaks a text between words into lines of at most width, which begin with indent. It
// replaces control characters, which could garble a terminal.
func fold(text, indent string, width int) string {
	text = strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case !unicode.IsPrint(r):
			return '?'
		}
		return r
	}, text)
	if width < minWidth {
		return text
	}
	room := width - utf8.RuneCountInString(indent)
	var lines []string
	line := ""
	for word := range strings.FieldsSeq(text) {
		if line != "" && utf8.RuneCountInString(line+" "+word) > room {
			lines, line = append(lines, line), ""
		}
		line = strings.TrimPrefix(line+" "+word, " ")
	}
	return strings.Join(append(lines, line), "\n"+indent)
}
