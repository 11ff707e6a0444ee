package e2e

import (
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/storage"
	"github.com/prometheus/prometheus/template"
	"github.com/prometheus/prometheus/util/annotations"
	"go.yaml.in/yaml/v3"

	"github.com/bermhq/berm/runtime/runtimetest/check"
)

const alertsFile = "../../compose/observability/alerts.yaml"

// alertRules reads the alerts as `promtool check rules` does.
func alertRules(t *testing.T) (rules []rulefmt.Rule) {
	t.Helper()
	file, errs := rulefmt.ParseFile(alertsFile, false, model.UTF8Validation)
	if len(errs) > 0 {
		t.Fatal(errs)
	}
	for _, g := range file.Groups {
		rules = append(rules, g.Rules...)
	}
	return rules
}

func TestAlerts(t *testing.T) {
	known, page, seen := documented(t), observabilityPage(t), map[string]bool{}
	for _, rule := range alertRules(t) {
		t.Run(rule.Alert, func(t *testing.T) {
			if seen[rule.Alert] || !alertName.MatchString(rule.Alert) {
				t.Error("its name is another's too, or none")
			}
			seen[rule.Alert] = true
			names := checkQuery(t, known, page, rule.Expr)
			if expr, err := parser.ParseExpr(rule.Expr); err != nil || !compares(expr) {
				t.Errorf("it doesn't compare, and so fires always: %v", err)
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

// alertCases is a file of `promtool test rules`, as far as it is used.
type alertCases struct {
	RuleFiles []string       `yaml:"rule_files"`
	Interval  model.Duration `yaml:"evaluation_interval"`
	Tests     []struct {
		Name     string
		Interval model.Duration
		Input    []struct{ Series, Values string } `yaml:"input_series"`
		Queries  []struct {
			Expr string
			At   model.Duration `yaml:"eval_time"`
			Want []struct {
				Labels string
				Value  float64
			} `yaml:"exp_samples"`
		} `yaml:"promql_expr_test"`
	}
}

// Each alert fires on what it is for, after its time and not before, and on nothing else.
// Prometheus' parser reads the rules, its engine evaluates them and its templates write
// them. Its package that waits for `for` brings 330 others, so the waiting is done here.
func TestAlertsFire(t *testing.T) {
	const path = "testdata/alerts.yaml"
	data := readString(t, path)
	var file alertCases
	dec := yaml.NewDecoder(strings.NewReader(data))
	dec.KnownFields(true)
	must(t, dec.Decode(&file))
	if len(file.RuleFiles) != 1 || filepath.Join("testdata", file.RuleFiles[0]) != filepath.Clean(alertsFile) {
		t.Errorf("the cases are of %s", file.RuleFiles)
	}
	rules, fired := alertRules(t), map[string]bool{}
	for _, tt := range file.Tests {
		t.Run(tt.Name, func(t *testing.T) {
			var input seriesSet
			for _, in := range tt.Input {
				metric, values, err := parser.ParseSeriesDesc(in.Series + " " + in.Values)
				must(t, err)
				s := promql.Series{Metric: metric}
				for i, v := range values {
					if !v.Omitted {
						s.Floats = append(s.Floats, promql.FPoint{T: int64(i) * time.Duration(tt.Interval).Milliseconds(), F: v.Value})
					}
				}
				input = append(input, s)
			}
			for _, q := range tt.Queries {
				at, want, got := time.UnixMilli(time.Duration(q.At).Milliseconds()), map[string]float64{}, map[string]float64{}
				var alerts seriesSet
				for _, rule := range rules {
					alerts = append(alerts, alertsAt(t, input, rule, time.Duration(file.Interval), at)...)
				}
				for _, s := range query(t, alerts, q.Expr, at, at, time.Second) {
					got[s.Metric.String()] = s.Floats[0].F
				}
				for _, sample := range q.Want {
					metric := check.Value(parser.ParseMetric(sample.Labels))(t)
					want[metric.String()] = sample.Value
					if metric.Get("alertstate") == "firing" {
						fired[metric.Get(labels.AlertName)] = true
					}
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("after %s, %s (-want +got):\n%s", q.At, q.Expr, diff)
				}
			}
		})
	}
	for _, rule := range rules {
		if !fired[rule.Alert] {
			t.Errorf("no case has %s fire", rule.Alert)
		}
	}
}

// alertsAt answers a rule's part of ALERTS at a time, all evaluations since 0 considered.
func alertsAt(t *testing.T, input seriesSet, rule rulefmt.Rule, interval time.Duration, at time.Time) (alerts seriesSet) {
	t.Helper()
	for _, s := range query(t, input, rule.Expr, time.UnixMilli(0), at, interval) {
		since := at // without a gap
		for i := len(s.Floats) - 1; i >= 0 && s.Floats[i].T == since.UnixMilli(); i-- {
			since = since.Add(-interval)
		}
		if since.Equal(at) {
			continue
		}
		state := "pending"
		if at.Sub(since.Add(interval)) >= time.Duration(rule.For) {
			state = "firing"
		}
		last := s.Floats[len(s.Floats)-1].F
		for name, text := range rule.Annotations {
			const variables = "{{$labels := .Labels}}{{$value := .Value}}"
			filled, err := template.NewTemplateExpander(t.Context(), variables+text, rule.Alert, template.AlertTemplateData(s.Metric.Map(), nil, "", promql.Sample{F: last}),
				model.TimeFromUnixNano(at.UnixNano()), nil, nil, nil).Expand()
			if err != nil || strings.Contains(filled, "{{") {
				t.Errorf("the %s of %s: %s %v", name, rule.Alert, filled, err)
			}
		}
		metric := labels.NewBuilder(s.Metric).Set(labels.MetricName, "ALERTS").Set(labels.AlertName, rule.Alert).Set("alertstate", state)
		for name, value := range rule.Labels {
			metric.Set(name, value)
		}
		alerts = append(alerts, promql.Series{Metric: metric.Labels(), Floats: []promql.FPoint{{T: at.UnixMilli(), F: 1}}})
	}
	return alerts
}

// query has Prometheus' engine answer a query from begin to end.
func query(t *testing.T, from seriesSet, expr string, begin, end time.Time, step time.Duration) promql.Matrix {
	t.Helper()
	e := promql.NewEngine(promql.EngineOpts{MaxSamples: 1e6, Timeout: time.Minute})
	q := check.Value(e.NewRangeQuery(t.Context(), from, nil, expr, begin, end, step))(t)
	defer q.Close()
	return check.Value(q.Exec(t.Context()).Matrix())(t)
}

// seriesSet is a store of series.
type seriesSet []promql.Series

func (s seriesSet) Querier(int64, int64) (storage.Querier, error) {
	return &storage.MockQuerier{SelectMockFunction: func(_ bool, _ *storage.SelectHints, matchers ...*labels.Matcher) storage.SeriesSet {
		found := &foundSeries{}
		for _, series := range s {
			if !slices.ContainsFunc(matchers, func(m *labels.Matcher) bool { return !m.Matches(series.Metric.Get(m.Name)) }) {
				found.left = append(found.left, series)
			}
		}
		return found
	}}, nil
}

type foundSeries struct {
	at   promql.Series
	left []promql.Series
}

func (f *foundSeries) Next() bool {
	if len(f.left) == 0 {
		return false
	}
	f.at, f.left = f.left[0], f.left[1:]
	return true
}

func (f *foundSeries) At() storage.Series              { return promql.NewStorageSeries(f.at) }
func (*foundSeries) Err() error                        { return nil }
func (*foundSeries) Warnings() annotations.Annotations { return nil }
