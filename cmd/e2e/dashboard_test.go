package e2e

import (
	"encoding/json"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
)

var docRow = regexp.MustCompile("(?m)^(?:- `|\\| `)([^`]*)`(?:[^|\n]*\\|([^|\n]*)\\|([^|\n]*))?")

// section gives the rows of the tables and lists below a heading of docs/observability.md:
// what is in backquotes, and the next two cells of a table.
func section(t *testing.T, heading string) (rows [][]string) {
	t.Helper()
	_, rest, found := strings.Cut(observabilityPage(t), "\n## "+heading+"\n")
	if !found {
		t.Fatalf("no section %s", heading)
	}
	rest, _, _ = strings.Cut(rest, "\n## ")
	for _, m := range docRow.FindAllStringSubmatch(rest, -1) {
		rows = append(rows, []string{m[1], strings.TrimSpace(m[2]), strings.ReplaceAll(strings.TrimSpace(m[3]), "`", "")})
	}
	return rows
}

// documented returns the labels of all that a scrape of a server has, by the name in
// queries, as docs/observability.md has them. A test of serve holds it to the code.
func documented(t *testing.T) map[string]map[string]bool {
	t.Helper()
	all := map[string]map[string]bool{"up": {"job": true, "instance": true}}
	for _, name := range []string{"process_resident_memory_bytes", "process_cpu_seconds_total", "process_open_fds", "process_max_fds", "process_start_time_seconds", "go_goroutines", "go_memstats_heap_inuse_bytes"} {
		all[name] = all["up"]
	}
	for _, row := range section(t, "Metrics") {
		names := maps.Clone(all["up"])
		for label := range strings.SplitSeq(row[2], ",") {
			names[strings.TrimSpace(label)] = true
		}
		if row[1] != "histogram" {
			all[row[0]] = names
			continue
		}
		all[row[0]+"_sum"], all[row[0]+"_count"] = names, names
		bucket := maps.Clone(names)
		bucket["le"] = true
		all[row[0]+"_bucket"] = bucket
	}
	return all
}

// checkQuery checks that a query is one, and asks only for what there is. It gives the
// labels of what it asks for.
func checkQuery(t *testing.T, known map[string]map[string]bool, page, query string) map[string]bool {
	t.Helper()
	expr, err := parser.ParseExpr(strings.ReplaceAll(query, "$__rate_interval", "5m"))
	if err != nil {
		t.Errorf("%s: %v", query, err)
		return nil
	}
	every := map[string]bool{}
	parser.Inspect(expr, func(node parser.Node, path []parser.Node) error {
		selector, ok := node.(*parser.VectorSelector)
		if !ok {
			return nil
		}
		names, ok := known[selector.Name]
		if !ok {
			t.Errorf("%s: Berm exports no %s", query, selector.Name)
			return nil
		}
		maps.Copy(every, names)
		for _, m := range selector.LabelMatchers {
			switch {
			case m.Name == model.MetricNameLabel:
			case !names[m.Name]:
				t.Errorf("%s: %s has no label %s", query, selector.Name, m.Name)
			case m.Type == labels.MatchEqual && m.Name != "job" && !strings.Contains(page, "`"+m.Value+"`"):
				t.Errorf("%s: docs/observability.md knows of no value %s", query, m.Value)
			}
		}
		for _, above := range path {
			agg, ok := above.(*parser.AggregateExpr)
			if !ok {
				continue
			}
			for _, by := range agg.Grouping {
				if !names[by] {
					t.Errorf("%s: %s has no label %s to group by", query, selector.Name, by)
				}
			}
		}
		return nil
	})
	return every
}

func observabilityPage(t *testing.T) string {
	t.Helper()
	return readString(t, "../../docs/observability.md")
}

var placeholder = regexp.MustCompile(`\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}`)

func TestDashboard(t *testing.T) {
	data := readString(t, "../../compose/observability/dashboard.json")
	var board struct {
		Panels []struct {
			ID      int
			Title   string
			Type    string
			GridPos struct{ X, Y, W, H int }
			Targets []struct{ Expr, LegendFormat string }
		}
	}
	must(t, json.Unmarshal([]byte(data), &board))
	known, page := documented(t), observabilityPage(t)
	ids, shown, taken := map[int]bool{}, map[string]bool{}, map[[2]int]string{}
	for _, p := range board.Panels {
		if ids[p.ID] {
			t.Errorf("two panels have the id %d", p.ID)
		}
		ids[p.ID] = true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other := taken[[2]int{x, y}]; other != "" || x >= 24 {
					t.Errorf("panel %s lies over %q, or beside the grid", p.Title, other)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %s asks for nothing", p.Title)
		}
		for _, target := range p.Targets {
			names := checkQuery(t, known, page, target.Expr)
			for _, m := range placeholder.FindAllStringSubmatch(target.LegendFormat, -1) {
				if !names[m[1]] {
					t.Errorf("panel %s: its legend names %s, which there isn't", p.Title, m[1])
				}
			}
			shown[target.Expr] = true
		}
	}
	queries := strings.Join(slices.Sorted(maps.Keys(shown)), "\n")
	for _, row := range section(t, "Metrics") {
		if !strings.Contains(queries, row[0]) {
			t.Errorf("the dashboard doesn't show %s", row[0])
		}
	}
}
