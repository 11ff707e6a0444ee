package engineapi

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	requests   *prometheus.CounterVec
	mismatches prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{requests: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "berm_engine_api_requests_total", Help: "Requests to the Docker Engine API, by the route's template and what was decided.",
	}, []string{"route", "verdict"}), mismatches: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "berm_engine_api_bind_mismatches_total", Help: "Containers that were removed because they had another directory mounted than was held.",
	})}
	if reg == nil {
		return m, nil
	}
	return m, errors.Join(reg.Register(m.requests), reg.Register(m.mismatches))
}
