package lifecycle

import (
	"errors"
	"time"

	"github.com/containerd/errdefs"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/bermhq/berm/policy"
)

type metrics struct {
	creates       *prometheus.CounterVec
	deletes       *prometheus.CounterVec
	commands      *prometheus.CounterVec
	runtimeErrors *prometheus.CounterVec
	runtimeTime   *prometheus.HistogramVec
	cleanups      *prometheus.CounterVec
	cleanupErrors *prometheus.CounterVec
	objects       *prometheus.CounterVec
	active        prometheus.Gauge
	available     prometheus.Gauge
}

func newMetrics(reg prometheus.Registerer) *metrics {
	with := promauto.With(reg) // which may be nil
	m := &metrics{
		creates: with.NewCounterVec(prometheus.CounterOpts{
			Name: "berm_sandbox_creates_total", Help: "Creates, by what they came to.",
		}, []string{"result"}),
		deletes: with.NewCounterVec(prometheus.CounterOpts{
			Name: "berm_sandbox_deletes_total", Help: "Deletes, by what they came to.",
		}, []string{"result"}),
		commands: with.NewCounterVec(prometheus.CounterOpts{
			Name: "berm_sandbox_commands_total", Help: "Commands that were run to their end, by how they ended.",
		}, []string{"status"}),
		runtimeErrors: with.NewCounterVec(prometheus.CounterOpts{
			Name: "berm_runtime_errors_total", Help: "Failed calls to the engine, by operation and error type.",
		}, []string{"operation", "error_type"}),
		runtimeTime: with.NewHistogramVec(prometheus.HistogramOpts{
			Name: "berm_runtime_operation_duration_seconds", Help: "Duration of calls to the engine.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300},
		}, []string{"operation", "result"}),
		cleanups: with.NewCounterVec(prometheus.CounterOpts{
			Name: "berm_sandbox_cleanups_total", Help: "Sandboxes and orphans that sweeps tried to collect, by what came of it.",
		}, []string{"result"}),
		cleanupErrors: with.NewCounterVec(prometheus.CounterOpts{
			Name: "berm_sandbox_cleanup_errors_total", Help: "Failed collections, by error type.",
		}, []string{"error_type"}),
		objects: with.NewCounterVec(prometheus.CounterOpts{
			Name: "berm_engine_api_cleanups_total", Help: "Containers, networks and volumes of the engine's own API that sweeps tried to collect, by kind and what came of it.",
		}, []string{"kind", "result"}),
		active: with.NewGauge(prometheus.GaugeOpts{
			Name: "berm_sandboxes_active", Help: "Sandboxes on record.",
		}),
		available: with.NewGauge(prometheus.GaugeOpts{
			Name: "berm_runtime_available", Help: "1 while the engine answers and its containers are reconciled, else 0.",
		}),
	}
	// Every series begins at 0, so that a rate has a start.
	for _, r := range []Result{ResultCreated, ResultReused, ResultReplaced, ResultConflict, ResultError} {
		m.creates.WithLabelValues(string(r))
	}
	for _, r := range []Result{ResultDeleted, ResultNotFound, ResultError} {
		m.deletes.WithLabelValues(string(r))
	}
	for _, r := range []Result{ResultDeleted, ResultError} {
		m.cleanups.WithLabelValues(string(r))
		for _, kind := range ObjectKinds() {
			m.objects.WithLabelValues(string(kind), string(r))
		}
	}
	return m
}

// command counts a command that ended.
func (m *metrics) command(status ExecStatus) {
	m.commands.WithLabelValues(string(status)).Inc()
}

// operation counts one call to the engine.
func (m *metrics) operation(op string, took time.Duration, err error) {
	result := "ok"
	if err != nil {
		result = "error"
		m.runtimeErrors.WithLabelValues(op, ErrorType(err)).Inc()
	}
	m.runtimeTime.WithLabelValues(op, result).Observe(took.Seconds())
}

// errorClasses name the classes of errors. The first class that matches applies.
var errorClasses = []struct {
	is   func(error) bool
	name string
}{
	{func(err error) bool { _, ok := errors.AsType[*policy.DeniedError](err); return ok }, "policy_denied"},
	{errdefs.IsCanceled, "canceled"},
	{errdefs.IsDeadlineExceeded, "deadline_exceeded"},
	{errdefs.IsUnavailable, "unavailable"},
	{errdefs.IsNotFound, "not_found"},
	{errdefs.IsAlreadyExists, "already_exists"},
	{errdefs.IsInvalidArgument, "invalid_argument"},
	{errdefs.IsFailedPrecondition, "failed_precondition"},
	{errdefs.IsConflict, "conflict"},
	{errdefs.IsResourceExhausted, "resource_exhausted"},
	{errdefs.IsNotImplemented, "not_implemented"},
	{errdefs.IsOutOfRange, "out_of_range"},
	{errdefs.IsAborted, "aborted"},
}

// ErrorType returns the name of an error's class, for metrics and spans.
func ErrorType(err error) string {
	for _, class := range errorClasses {
		if class.is(err) {
			return class.name
		}
	}
	return "internal"
}
