package engineapi

import "github.com/prometheus/client_golang/prometheus"

type metrics struct {
	requests *prometheus.CounterVec
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	m := &metrics{requests: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "berm_engine_api_requests_total", Help: "Requests to the Docker Engine API, by the route's template and what was decided.",
	}, []string{"route", "verdict"})}
	if reg == nil {
		return m, nil
	}
	return m, reg.Register(m.requests)
}
