package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"go.yaml.in/yaml/v3"

	"github.com/bermhq/berm/cmd/berm/config"
)

var promQL = parser.NewParser(parser.Options{})

// scraped gives the labels of all that a scrape of a server has, by the name in queries,
// those that Prometheus adds included.
func scraped(t *testing.T) map[string]map[string]bool {
	t.Helper()
	tel, err := newTelemetry(t.Context(), config.Default(), "me", new(bytes.Buffer))
	if err != nil {
		t.Fatal(err)
	}
	registerAll(t, filled{tel.registry})
	families, err := tel.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]map[string]bool{"up": {"job": true, "instance": true}}
	for _, f := range families {
		names := map[string]bool{"job": true, "instance": true}
		for _, l := range f.Metric[0].Label {
			names[l.GetName()] = true
		}
		if f.GetType() != dto.MetricType_HISTOGRAM {
			all[f.GetName()] = names
			continue
		}
		all[f.GetName()+"_sum"], all[f.GetName()+"_count"] = names, names
		bucket := maps.Clone(names)
		bucket["le"] = true
		all[f.GetName()+"_bucket"] = bucket
	}
	return all
}

// checkQuery checks that a query is one, and asks only for what there is. It gives the
// labels of what it asks for.
func checkQuery(t *testing.T, known map[string]map[string]bool, page, query string) map[string]bool {
	t.Helper()
	expr, err := promQL.ParseExpr(strings.ReplaceAll(query, "$__rate_interval", "5m"))
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
	page, err := os.ReadFile("../../docs/observability.md")
	if err != nil {
		t.Fatal(err)
	}
	return string(page)
}

var placeholder = regexp.MustCompile(`\{\{\s*(?:\$labels\.)?(\w+)\s*\}\}`)

func TestDashboard(t *testing.T) {
	data, err := os.ReadFile("../../compose/observability/dashboard.json")
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			ID      int
			Title   string
			Type    string
			GridPos struct{ X, Y, W, H int }
			Targets []struct{ Expr, LegendFormat string }
		}
	}
	if err := json.Unmarshal(data, &board); err != nil {
		t.Fatal(err)
	}
	known, page := scraped(t), observabilityPage(t)
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

// rules is the form of a file of Prometheus' rules, as far as it is used.
type rules struct {
	Groups []struct {
		Name  string
		Rules []struct {
			Alert, Expr, For    string
			Labels, Annotations map[string]string
		}
	}
}

// Prometheus' own package for such files needs half of Kubernetes' client, so their form is
// checked here.
func TestAlerts(t *testing.T) {
	data, err := os.ReadFile("../../compose/observability/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var file rules
	dec := yaml.NewDecoder(bytes.NewReader(data))
	dec.KnownFields(true)
	if err := dec.Decode(&file); err != nil {
		t.Fatal(err)
	}
	known, page, seen := scraped(t), observabilityPage(t), map[string]bool{}
	for _, g := range file.Groups {
		for _, rule := range g.Rules {
			t.Run(rule.Alert, func(t *testing.T) {
				if seen[rule.Alert] || !alertName.MatchString(rule.Alert) {
					t.Error("its name is another's too, or none")
				}
				seen[rule.Alert] = true
				names := checkQuery(t, known, page, rule.Expr)
				if expr, err := promQL.ParseExpr(rule.Expr); err != nil || !compares(expr) {
					t.Errorf("it doesn't compare, and so fires always: %v", err)
				}
				if _, err := model.ParseDuration(cmp.Or(rule.For, "0s")); err != nil {
					t.Errorf("for: %v", err)
				}
				if !slices.Contains([]string{"critical", "warning", "info"}, rule.Labels["severity"]) {
					t.Errorf("its severity is %q", rule.Labels["severity"])
				}
				for _, name := range []string{"summary", "description"} {
					text := rule.Annotations[name]
					if len(text) < 20 {
						t.Errorf("its %s is %q", name, text)
					}
					for _, m := range placeholder.FindAllStringSubmatch(text, -1) {
						if !names[m[1]] {
							t.Errorf("its %s names %s, which there isn't", name, m[1])
						}
					}
				}
			})
		}
	}
	if len(seen) < 5 {
		t.Errorf("there are %d alerts", len(seen))
	}
}

var alertName = regexp.MustCompile(`^Berm[A-Za-z]+$`)

// compares tells whether a query's answer can be empty: it keeps what compares so.
func compares(expr parser.Expr) bool {
	binary, ok := expr.(*parser.BinaryExpr)
	return ok && binary.Op.IsComparisonOperator() && !binary.ReturnBool
}

// Each counter of which an alert looks for an increase is there, with 0, before the first
// one: increase doesn't see a counter that comes with its first.
func TestAlertsSeeTheFirst(t *testing.T) {
	data, err := os.ReadFile("../../compose/observability/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	reg := prometheus.NewRegistry()
	registerAll(t, reg)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]bool{}
	for _, f := range families {
		for _, m := range f.Metric {
			for _, l := range m.Label {
				there[f.GetName()+" "+l.GetName()+" "+l.GetValue()] = true
			}
		}
	}
	looked := 0
	for _, m := range regexp.MustCompile(`increase\((\w+)\{(\w+)="(\w+)"\}\[\w+\]\)+ > 0`).FindAllStringSubmatch(string(data), -1) {
		if m[1] == "berm_engine_api_requests_total" {
			continue // has a series per route; the next request of that kind is seen
		}
		if looked++; !there[strings.Join(m[1:], " ")] {
			t.Errorf("%s{%s=%q} isn't there before its first increase", m[1], m[2], m[3])
		}
	}
	if looked < 3 {
		t.Errorf("%d were found", looked)
	}
}
