package clients

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const (
	resultsFile = "testdata/results.txt"
	beforeFile  = "testdata/before.txt" // of the clients on the release before
	pageFile    = "../../../docs/clients.md"
)

// group is the cases of one file on one engine.
type group struct {
	engine, client, file string
}

// summary is what a group's cases came to. Others are the cases that didn't pass.
type summary struct {
	passed, counted int
	others          []outcome
}

// results are what groups came to.
type results map[group]summary

func summarize(ran []outcome) summary {
	var s summary
	for _, o := range ran {
		switch o.verdict {
		case passed:
			s.passed++
			s.counted++
			continue
		case failed:
			s.counted++
		}
		s.others = append(s.others, o)
	}
	return s
}

// replace puts in a new summary. A case that still fails keeps what was written of it.
func (r results) replace(g group, s summary) {
	for i, o := range s.others {
		for _, old := range r[g].others {
			if old.name == o.name && old.verdict == o.verdict {
				s.others[i].why = old.why
			}
		}
	}
	r[g] = s
}

// readResults reads lines of engine, client, file, passed and counted; below each, indented,
// verdict, name and reason of the others.
func readResults() (results, error) {
	r := results{}
	b, err := os.ReadFile(resultsFile)
	if err != nil {
		return nil, err
	}
	var g group
	for line := range strings.Lines(string(b)) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		switch {
		case len(f) == 4 && f[0] == "":
			s := r[g]
			s.others = append(s.others, outcome{f[2], f[1], f[3]})
			r[g] = s
		case len(f) == 5:
			g = group{f[0], f[1], f[2]}
			p, err := strconv.Atoi(f[3])
			n, err2 := strconv.Atoi(f[4])
			if cmp.Or(err, err2) != nil {
				return nil, fmt.Errorf("%s: %q", resultsFile, line)
			}
			r[g] = summary{passed: p, counted: n}
		default:
			return nil, fmt.Errorf("%s: %q", resultsFile, line)
		}
	}
	return r, nil
}

func (r results) sorted() []group {
	return slices.SortedFunc(maps.Keys(r), func(a, b group) int {
		return cmp.Or(cmp.Compare(a.client, b.client), cmp.Compare(a.engine, b.engine), cmp.Compare(a.file, b.file))
	})
}

func (r results) write(t *testing.T) {
	var b strings.Builder
	for _, g := range r.sorted() {
		s := r[g]
		fmt.Fprintf(&b, "%s\t%s\t%s\t%d\t%d\n", g.engine, g.client, g.file, s.passed, s.counted)
		for _, o := range s.others {
			fmt.Fprintf(&b, "\t%s\t%s\t%s\n", o.verdict, o.name, o.why)
		}
	}
	must(t, os.WriteFile(resultsFile, []byte(b.String()), 0o644))
}

// before maps "engine client" to a share, as in "120 of 204".
func before(t *testing.T) map[string]string {
	b, err := os.ReadFile(beforeFile)
	must(t, err)
	shares := map[string]string{}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) != 4 {
			t.Fatalf("%s: %q", beforeFile, line)
		}
		shares[f[0]+" "+f[1]] = percent(f[2], f[3])
	}
	return shares
}

func percent(part, whole string) string {
	p, _ := strconv.Atoi(part)
	w, _ := strconv.Atoi(whole)
	if w == 0 {
		return "-"
	}
	return fmt.Sprintf("%.1f %%", float64(p)*100/float64(w))
}

const (
	beginning = "<!-- results: make clients, with UPDATE=-update -->\n"
	ending    = "<!-- end of results -->\n"
)

// table is what the page has between the marks: how many cases pass, and which don't.
func (r results) table(t *testing.T) string {
	var b strings.Builder
	b.WriteString("| client | engine | alone | through Berm | share | before | refused | BuildKit |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n")
	earlier, totals, order := before(t), map[group]summary{}, []group(nil)
	where := map[string][]string{} // by case and reason, in the order of cases
	var cases []string
	left := map[string][]string{} // cases that don't count, by their verdict
	for _, g := range r.sorted() {
		row := group{g.engine, g.client, ""}
		s, ok := totals[row]
		if !ok {
			order = append(order, row)
		}
		s.passed, s.counted, s.others = s.passed+r[g].passed, s.counted+r[g].counted, append(s.others, r[g].others...)
		totals[row] = s
		for _, o := range r[g].others {
			if o.verdict != failed {
				if !slices.Contains(left[o.verdict], o.name) {
					left[o.verdict] = append(left[o.verdict], o.name)
				}
				continue
			}
			key := strings.ReplaceAll(o.name, "|", `\|`) + " | " + strings.ReplaceAll(o.why, "|", `\|`)
			if where[key] == nil {
				cases = append(cases, key)
			}
			where[key] = append(where[key], g.client+" on "+g.engine)
		}
	}
	count := func(s summary, verdict string) (n int) {
		for _, o := range s.others {
			if o.verdict == verdict {
				n++
			}
		}
		return n
	}
	for _, g := range order {
		s := totals[g]
		fmt.Fprintf(&b, "| %s | %s | %d | %d | %s | %s | %d | %d |\n", g.client, g.engine, s.counted, s.passed, percent(strconv.Itoa(s.passed), strconv.Itoa(s.counted)),
			cmp.Or(earlier[g.engine+" "+g.client], "-"), count(s, refused), count(s, buildkit))
	}
	if len(cases) > 0 {
		b.WriteString("\n| fails | why | where |\n| --- | --- | --- |\n")
	}
	for _, key := range cases {
		fmt.Fprintf(&b, "| %s | %s |\n", key, briefly(where[key], order))
	}
	for _, verdict := range []string{refused, buildkit} {
		if names := left[verdict]; len(names) > 0 {
			fmt.Fprintf(&b, "\n%s: %s.\n", map[string]string{refused: "Refused", buildkit: "Need BuildKit on 20.10"}[verdict], strings.Join(names, "; "))
		}
	}
	return b.String()
}

// briefly says where a case fails: only the client if it's on all engines that the client ran on.
func briefly(where []string, ran []group) string {
	all := map[string][]string{} // the engines of each client
	for _, g := range ran {
		all[g.client] = append(all[g.client], g.engine)
	}
	var said []string
	for client, ranOn := range all {
		var engines []string
		for _, engine := range ranOn {
			if slices.Contains(where, client+" on "+engine) {
				engines = append(engines, engine)
			}
		}
		switch len(engines) {
		case 0:
		case len(ranOn):
			said = append(said, client)
		default:
			said = append(said, client+" on "+strings.Join(engines, " and "))
		}
	}
	slices.Sort(said)
	return strings.Join(said, ", ")
}

func writePage(t *testing.T, r results) {
	old, err := os.ReadFile(pageFile)
	must(t, err)
	must(t, os.WriteFile(pageFile, []byte(withPage(t, string(old), r)), 0o644))
}

func withPage(t *testing.T, page string, r results) string {
	head, rest, found := strings.Cut(page, beginning)
	_, tail, ends := strings.Cut(rest, ending)
	if !found || !ends {
		t.Fatalf("%s has no marks", pageFile)
	}
	return head + beginning + r.table(t) + ending + tail
}

// The page has what results.txt says.
func TestDocsClients(t *testing.T) {
	r, err := readResults()
	must(t, err)
	if *update {
		writePage(t, r)
	}
	page, err := os.ReadFile(pageFile)
	must(t, err)
	if string(page) != withPage(t, string(page), r) {
		t.Errorf("%s isn't what %s says: go test ./clients -run TestDocsClients -update", pageFile, resultsFile)
	}
}
