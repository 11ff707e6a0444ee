package e2e

import (
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	collogs "go.opentelemetry.io/proto/otlp/collector/logs/v1"
	colmetrics "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	coltrace "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	resource "go.opentelemetry.io/proto/otlp/resource/v1"
	"google.golang.org/protobuf/proto"
)

// collector is an OTLP/HTTP receiver that keeps what it is sent.
type collector struct {
	*httptest.Server

	mu        sync.Mutex
	wrong     []string            // requests that no receiver takes
	resources map[string]bool     // what sends, as its attributes
	logs      map[string]string   // severity by message
	metrics   map[string]bool     // by name
	spans     map[string]spanSent // by name, the last
}

// collectorKey is what each request has as X-Key.
const collectorKey = "hush-hush"

type spanSent struct{ trace, parent string } // in hex; a root's parent is empty

func newCollector(t *testing.T) *collector {
	c := &collector{
		resources: map[string]bool{}, logs: map[string]string{}, metrics: map[string]bool{}, spans: map[string]spanSent{},
	}
	c.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c.mu.Lock()
		defer c.mu.Unlock()
		err := c.take(r)
		if got := r.Header.Get("X-Key"); err == nil && got != collectorKey {
			err = fmt.Errorf("the key is %q", got)
		}
		if err != nil {
			c.wrong = append(c.wrong, r.Method+" "+r.URL.Path+": "+err.Error())
			w.WriteHeader(http.StatusBadRequest)
		}
	}))
	t.Cleanup(c.Close)
	return c
}

func (c *collector) take(r *http.Request) error {
	if r.Method != http.MethodPost || r.Header.Get("Content-Type") != "application/x-protobuf" {
		return errors.New("no OTLP: " + r.Header.Get("Content-Type"))
	}
	body := io.Reader(r.Body)
	if r.Header.Get("Content-Encoding") == "gzip" {
		var err error
		if body, err = gzip.NewReader(body); err != nil {
			return err
		}
	}
	data, err := io.ReadAll(body)
	if err != nil {
		return err
	}
	switch r.URL.Path {
	case "/v1/logs":
		var got collogs.ExportLogsServiceRequest
		err = proto.Unmarshal(data, &got)
		for _, from := range got.ResourceLogs {
			c.from(from.Resource)
			for _, scope := range from.ScopeLogs {
				for _, l := range scope.LogRecords {
					c.logs[l.Body.GetStringValue()] = l.SeverityText
				}
			}
		}
	case "/v1/metrics":
		var got colmetrics.ExportMetricsServiceRequest
		err = proto.Unmarshal(data, &got)
		for _, from := range got.ResourceMetrics {
			c.from(from.Resource)
			for _, scope := range from.ScopeMetrics {
				for _, m := range scope.Metrics {
					c.metrics[m.Name] = true
				}
			}
		}
	case "/v1/traces":
		var got coltrace.ExportTraceServiceRequest
		err = proto.Unmarshal(data, &got)
		for _, from := range got.ResourceSpans {
			c.from(from.Resource)
			for _, scope := range from.ScopeSpans {
				for _, s := range scope.Spans {
					c.spans[s.Name] = spanSent{fmt.Sprintf("%x", s.TraceId), fmt.Sprintf("%x", s.ParentSpanId)}
				}
			}
		}
	default:
		err = errors.New("no such path")
	}
	return err
}

func (c *collector) from(r *resource.Resource) { c.resources[attributeText(r.GetAttributes())] = true }

// attributeText is "a=1,b=2", sorted.
func attributeText(attributes []*common.KeyValue) string {
	all := map[string]bool{}
	for _, a := range attributes {
		all[a.Key+"="+a.Value.GetStringValue()] = true
	}
	return strings.Join(slices.Sorted(maps.Keys(all)), ",")
}

// got gives what was kept, once its senders are done, and checks that all was well-formed
// and came from one place.
func (c *collector) got(t *testing.T, instance string) *collector {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.wrong {
		t.Error(w)
	}
	for message, severity := range c.logs {
		if severity == "DEBUG" {
			t.Errorf("%s is below the log's level", message)
		}
	}
	var build struct{ Version string }
	version, stderr, _ := berm(t, "", "version", "-o", "json")
	if err := json.Unmarshal([]byte(version), &build); err != nil {
		t.Fatalf("%v: %s", err, stderr)
	}
	want := map[string]bool{"service.instance.id=" + instance + ",service.name=berm,service.version=" + build.Version: true}
	if diff := cmp.Diff(want, c.resources); diff != "" {
		t.Errorf("what sent it (-want +got):\n%s", diff)
	}
	return c
}
