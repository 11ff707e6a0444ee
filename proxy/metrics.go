package proxy

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	duration *prometheus.HistogramVec
}

func newMetrics(r prometheus.Registerer) (*metrics, error) {
	m := &metrics{duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "berm_http_request_duration_seconds",
		Help:    "Time from a request's header to the end of its answer.",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300},
	}, []string{"route", "method", "status"})}
	if r == nil {
		return m, nil
	}
	err := r.Register(m.duration)
	var there prometheus.AlreadyRegisteredError
	if errors.As(err, &there) { // by another door's Gate
		if own, ok := there.ExistingCollector.(*prometheus.HistogramVec); ok {
			m.duration = own
			return m, nil
		}
	}
	return m, err
}
