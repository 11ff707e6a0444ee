package proxy

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	duration *prometheus.HistogramVec
	panics   prometheus.Counter
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	duration, err := register(r, prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "berm_http_request_duration_seconds",
		Help:    "Time from a request's header to the end of its answer.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300},
	}, []string{"route", "method", "status"}))
	if err != nil {
		return nil, err
	}
	panics, err := register(r, prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berm_http_panics_total", Help: "Requests that a panic ended.",
	}))
	return &metrics{duration, panics}, err
}

// register registers c. It returns the one that another Gate has registered, if there is one.
func register[C prometheus.Collector](r prometheus.Registerer, c C) (C, error) {
	if r == nil {
		return c, nil
	}
	err := r.Register(c)
	if there, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if own, ok := there.ExistingCollector.(C); ok {
			return own, nil
		}
	}
	return c, err
}
