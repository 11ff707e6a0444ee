package serve

import (
	"context"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"log/slog"
	"maps"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/bermhq/berm/cmd/berm/config"
	"github.com/bermhq/berm/lifecycle"
	"github.com/bermhq/berm/lifecycle/chat"
	"github.com/bermhq/berm/lifecycle/mountpin/mountpintest"
	"github.com/bermhq/berm/lifecycle/store"
	"github.com/bermhq/berm/policy"
	"github.com/bermhq/berm/proxy"
	"github.com/bermhq/berm/proxy/engineapi"
	"github.com/bermhq/berm/proxy/sandboxapi"
	"github.com/bermhq/berm/runtime/runtimetest"
	"github.com/bermhq/berm/runtime/runtimetest/check"
)

// descriptions is a registry that only notes what is registered.
type descriptions struct{ metrics map[string]string }

var (
	metricName   = regexp.MustCompile(`fqName: "([^"]+)"`)
	metricLabels = regexp.MustCompile(`variableLabels: \{([^}]*)\}`)
)

func (d *descriptions) Register(c prometheus.Collector) error {
	ch := make(chan *prometheus.Desc, 16)
	c.Describe(ch)
	close(ch)
	for desc := range ch {
		d.metrics[metricName.FindStringSubmatch(desc.String())[1]] = metricLabels.FindStringSubmatch(desc.String())[1]
	}
	return nil
}

func (d *descriptions) MustRegister(cs ...prometheus.Collector) {
	for _, c := range cs {
		_ = d.Register(c)
	}
}

func (d *descriptions) Unregister(prometheus.Collector) bool { return false }

var docRow = regexp.MustCompile("(?m)^(?:- `|\\| `)([^`]*)`(?:[^|\n]*\\|([^|\n]*)\\|([^|\n]*))?")

// section gives the rows of the tables and lists below a heading of docs/observability.md:
// what is in backquotes, and the next two cells of a table.
func section(t *testing.T, heading string) (rows [][]string) {
	t.Helper()
	doc := check.Value(os.ReadFile("../../../docs/observability.md"))(t)
	_, rest, found := strings.Cut(string(doc), "\n## "+heading+"\n")
	if !found {
		t.Fatalf("no section %s", heading)
	}
	rest, _, _ = strings.Cut(rest, "\n## ")
	for _, m := range docRow.FindAllStringSubmatch(rest, -1) {
		rows = append(rows, []string{m[1], strings.TrimSpace(m[2]), strings.ReplaceAll(strings.TrimSpace(m[3]), "`", "")})
	}
	return rows
}

// registerAll registers the metrics of all that a server is made of.
func registerAll(t *testing.T, got prometheus.Registerer) {
	t.Helper()
	pol := check.Value(policy.Parse(nil, policy.Options{}))(t)
	inForce := func() *policy.Policy { return pol }
	manager, err := lifecycle.New(lifecycle.Options{
		Runtime: runtimetest.NewFake(runtimetest.FakeOptions{}), Policy: inForce, Owner: "o",
		Store: struct{ lifecycle.Store }{}, Quotas: struct{ lifecycle.Quotas }{}, Holder: mountpintest.Holder{}, Registry: got,
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := sandboxapi.New(sandboxapi.Options{Manager: manager, Policy: inForce, Gate: proxy.GateOptions{Registry: got}}); err != nil {
		t.Fatal(err)
	}
	db := check.Value(store.Open(t.Context(), store.Options{Path: filepath.Join(t.TempDir(), "berm.db")}))(t)
	defer func() { _ = db.Close() }()
	cfg := config.Default()
	cfg.Sandbox.ChatsRoot = t.TempDir()
	quiet := slog.New(slog.DiscardHandler)
	quotas := check.Value(openQuotas(t.Context(), cfg, db, quiet))(t)
	if _, err := chat.New(t.Context(), chat.Options{
		Root: cfg.Sandbox.ChatsRoot, Store: db, Quotas: quotas, Sandboxes: manager, Registry: got,
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := engineapi.New(engineapi.Options{
		Dial: func(context.Context) (net.Conn, error) { return nil, errors.New("unused") }, Policy: inForce, Owner: "o", Registry: got,
	}); err != nil {
		t.Fatal(err)
	}
	if _, err := newPolicyKeeper(policyKeeperOptions{
		Logger: quiet, Registry: got,
	}); err != nil {
		t.Fatal(err)
	}
	countReloads(got, "settings")
}

func TestMetricsAreDocumented(t *testing.T) {
	got := &descriptions{metrics: map[string]string{}}
	registerAll(t, got)
	want := map[string]string{}
	for _, row := range section(t, "Metrics") {
		want[row[0]] = strings.ReplaceAll(row[2], " ", "")
	}
	if d := cmp.Diff(want, got.metrics); d != "" {
		t.Errorf("docs/observability.md (-) and the code (+):\n%s", d)
	}
}

// literals finds, in all code that a server runs, the string literals that are the
// given argument of calls of methods so named. Those that are only the start of a
// longer string end with an asterisk.
func literals(t *testing.T, argument int, methods ...string) []string {
	t.Helper()
	found := map[string]bool{}
	for _, dir := range []string{"cmd/berm", "lifecycle", "proxy", "policy", "runtime/docker", "runtime/containerd", "runtime/agent"} {
		err := filepath.WalkDir("../../../"+dir, func(path string, _ fs.DirEntry, err error) error {
			if err != nil || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
				return err
			}
			file, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
			if err != nil {
				return err
			}
			ast.Inspect(file, func(n ast.Node) bool {
				call, ok := n.(*ast.CallExpr)
				if !ok || len(call.Args) <= argument {
					return true
				}
				sel, ok := call.Fun.(*ast.SelectorExpr)
				if !ok || !slices.Contains(methods, sel.Sel.Name) {
					return true
				}
				arg, more := call.Args[argument], ""
				for {
					sum, ok := arg.(*ast.BinaryExpr)
					if !ok {
						break
					}
					arg, more = sum.X, "*"
				}
				if lit, ok := arg.(*ast.BasicLit); ok && lit.Kind == token.STRING {
					s := check.Value(strconv.Unquote(lit.Value))(t)
					found[s+more] = true
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return slices.Sorted(maps.Keys(found))
}

// wantDocumented compares names found in the code with a table's. A prefix in the
// code stands for every name of the table that begins so.
func wantDocumented(t *testing.T, rows [][]string, inCode []string) {
	t.Helper()
	covered := map[string]bool{}
	for _, name := range inCode {
		matched := false
		for _, row := range rows {
			prefix, isPrefix := strings.CutSuffix(name, "*")
			if row[0] == name || isPrefix && strings.HasPrefix(row[0], prefix) {
				covered[row[0]], matched = true, true
			}
		}
		if !matched {
			t.Errorf("%s is in the code but not in the docs", name)
		}
	}
	for _, row := range rows {
		if !covered[row[0]] {
			t.Errorf("%s is in the docs but not in the code", row[0])
		}
	}
}

func TestLogsAreDocumented(t *testing.T) {
	inCode := slices.Concat(
		literals(t, 1, "DebugContext", "InfoContext", "WarnContext", "ErrorContext"),
		literals(t, 2, "LogAttrs"), literals(t, 0, "Debug", "Info", "Warn", "Error"),
	)
	wantDocumented(t, section(t, "Logs"), inCode)
}

func TestSpansAreDocumented(t *testing.T) {
	rows := slices.DeleteFunc(section(t, "Spans"), func(row []string) bool { return row[0] == "METHOD ROUTE" })
	inCode := slices.DeleteFunc(literals(t, 1, "Start"), func(s string) bool { return !strings.Contains(s, ".") && s != "sweep" && s != "reconcile" })
	wantDocumented(t, rows, inCode)
}

// Each counter of which an alert looks for an increase is there, with 0, before the first
// one: increase doesn't see a counter that comes with its first.
func TestAlertsSeeTheFirst(t *testing.T) {
	data := check.Value(os.ReadFile("../../../compose/observability/alerts.yaml"))(t)
	reg := prometheus.NewRegistry()
	registerAll(t, reg)
	families := check.Value(reg.Gather())(t)
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
