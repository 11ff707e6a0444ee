package engineapi

import (
	"io"
	"net/http"
)

func systemRoutes() []route {
	return []route{
		{method: http.MethodGet, template: "/_ping", serve: (*call).ping},
		{method: http.MethodHead, template: "/_ping", serve: (*call).ping},
	}
}

// ping tells that the engine answers, and in which version it is to be spoken to.
func (c *call) ping() error {
	resp, err := c.ask(ask{path: "/_ping"})
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return failure(resp)
	}
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, bufferSize))
	_ = resp.Body.Close()
	most, err := c.engine.max(c.ctx)
	if err != nil {
		return err
	}
	h := c.w.Header()
	for _, name := range []string{"Docker-Experimental", "Ostype", "Server", "Builder-Version"} {
		h[name] = resp.Header[name]
	}
	h.Set("Builder-Version", "1") // the classic builder is the only one behind this door
	h.Set("Api-Version", most.String())
	h.Set("Content-Type", "text/plain; charset=utf-8")
	if c.r.Method == http.MethodGet {
		_, _ = io.WriteString(c.w, "OK")
	}
	return nil
}
