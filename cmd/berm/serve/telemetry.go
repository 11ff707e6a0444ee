package serve

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/contrib/bridges/otelslog"
	prombridge "go.opentelemetry.io/contrib/bridges/prometheus"
	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlplog/otlploghttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlpmetric/otlpmetrichttp"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	sdklog "go.opentelemetry.io/otel/sdk/log"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"

	"github.com/bermhq/berm/cmd/berm/config"
)

// telemetry holds a server's log, its metrics and its tracer. All of them go to a collector
// as well if there is one.
type telemetry struct {
	logger   *slog.Logger
	level    *slog.LevelVar // of all logs
	registry *prometheus.Registry
	tracer   trace.TracerProvider // nil without tracing

	closers []func(context.Context) error
}

// localLogger writes to standard error only.
func localLogger(w io.Writer, format string, level slog.Leveler) *slog.Logger {
	opts := &slog.HandlerOptions{Level: level}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// connect adds a collector.
func (t *telemetry) connect(ctx context.Context, cfg *config.Config, headers map[string]string, instance string) (err error) {
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("set up telemetry: %w", err), t.Close(ctx))
		}
	}()
	base := strings.TrimSuffix(cfg.Otel.Endpoint, "/")
	res := resource.NewSchemaless(
		attribute.String("service.name", cfg.Otel.ServiceName),
		attribute.String("service.version", config.Version),
		attribute.String("service.instance.id", instance),
	)

	local := t.logger
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		local.Warn("telemetry_failed", "error", err.Error()) // not to the collector that it is about
	}))
	logs, err := otlploghttp.New(ctx, otlploghttp.WithEndpointURL(base+"/v1/logs"), otlploghttp.WithHeaders(headers))
	if err != nil {
		return err
	}
	logProvider := sdklog.NewLoggerProvider(sdklog.WithResource(res), sdklog.WithProcessor(sdklog.NewBatchProcessor(logs)))
	t.closers = append(t.closers, logProvider.Shutdown)
	t.logger = slog.New(slog.NewMultiHandler(local.Handler(),
		minLevel{otelslog.NewHandler("berm", otelslog.WithLoggerProvider(logProvider)), t.level}))

	metrics, err := otlpmetrichttp.New(ctx, otlpmetrichttp.WithEndpointURL(base+"/v1/metrics"), otlpmetrichttp.WithHeaders(headers))
	if err != nil {
		return err
	}
	reader := sdkmetric.NewPeriodicReader(metrics, sdkmetric.WithProducer(prombridge.NewMetricProducer(prombridge.WithGatherer(t.registry))))
	t.closers = append(t.closers, sdkmetric.NewMeterProvider(sdkmetric.WithResource(res), sdkmetric.WithReader(reader)).Shutdown)

	if cfg.Tracing.SampleRatio == 0 {
		return nil
	}
	spans, err := otlptracehttp.New(ctx, otlptracehttp.WithEndpointURL(base+"/v1/traces"), otlptracehttp.WithHeaders(headers))
	if err != nil {
		return err
	}
	tracer := sdktrace.NewTracerProvider(sdktrace.WithResource(res), sdktrace.WithBatcher(spans),
		sdktrace.WithSampler(sdktrace.ParentBased(sdktrace.TraceIDRatioBased(cfg.Tracing.SampleRatio))))
	t.closers = append(t.closers, tracer.Shutdown)
	t.tracer = tracer
	return nil
}

// Close flushes and closes the exporters.
func (t *telemetry) Close(ctx context.Context) error {
	var errs []error
	for _, f := range t.closers {
		errs = append(errs, f(ctx))
	}
	t.closers = nil
	return errors.Join(errs...)
}

// otelHeaders reads the NAME=VALUE pairs of the headers. Its errors don't quote them.
func otelHeaders(cfg config.Otel) (map[string]string, error) {
	text, _, err := secretOf("BERM_OTEL_HEADERS", cfg.Headers, "otel.headers_file", cfg.HeadersFile)
	if err != nil {
		return nil, err
	}
	headers := map[string]string{}
	for part := range strings.FieldsFuncSeq(string(text), func(r rune) bool { return r == ',' || r == '\n' }) {
		name, value, ok := strings.Cut(strings.TrimSpace(part), "=")
		if !ok || name == "" {
			return nil, errors.New("otel.headers: want NAME=VALUE, comma-separated")
		}
		headers[name] = value
	}
	return headers, nil
}

// minLevel is a handler that drops records below a level.
type minLevel struct {
	slog.Handler
	level slog.Leveler
}

func (h minLevel) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= h.level.Level() && h.Handler.Enabled(ctx, l)
}

func (h minLevel) WithAttrs(attrs []slog.Attr) slog.Handler {
	return minLevel{h.Handler.WithAttrs(attrs), h.level}
}

func (h minLevel) WithGroup(name string) slog.Handler {
	return minLevel{h.Handler.WithGroup(name), h.level}
}
