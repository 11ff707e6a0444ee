package chat

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"

	"github.com/bermhq/berm/lifecycle"
)

type metrics struct {
	operations *prometheus.CounterVec
	repairs    *prometheus.CounterVec
	written    prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	with := promauto.With(reg) // which may be nil
	m := &metrics{
		operations: with.NewCounterVec(prometheus.CounterOpts{
			Name: "berm_chat_operations_total", Help: "Operations on chats and their files, by what they came to: ok, or an error type.",
		}, []string{"operation", "result"}),
		repairs: with.NewCounterVec(prometheus.CounterOpts{
			Name: "berm_chat_repairs_total", Help: "Differences between records and content that were mended, by what was done.",
		}, []string{"kind"}),
		written: with.NewCounter(prometheus.CounterOpts{
			Name: "berm_chat_written_bytes_total", Help: "Bytes that were written for chats, whether or not they came to stay.",
		}),
	}
	// A counter is exported from the start, so that its first rate is right.
	for _, op := range []string{"make", "delete", "list", "read", "write", "append", "delete_file", "archive", "unpack"} {
		m.operations.WithLabelValues(op, "ok")
	}
	for _, kind := range []string{"dropped", "removed", "remade"} {
		m.repairs.WithLabelValues(kind)
	}
	return m
}

func (m *metrics) count(operation string, err error) {
	result := "ok"
	if err != nil {
		result = lifecycle.ErrorType(err)
	}
	m.operations.WithLabelValues(operation, result).Inc()
}

func (m *metrics) repaired(kind string, n int) { m.repairs.WithLabelValues(kind).Add(float64(n)) }
