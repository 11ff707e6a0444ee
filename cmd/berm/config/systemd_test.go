package config

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestBound(t *testing.T) {
	const tcp = "engine_api: {listeners: [{address: 'systemd:docker', callers: [{name: a, tenant: a}]}]}\n"
	const socket = "engine_api: {listeners: [{address: 'systemd:docker', callers: [{name: a, tenant: a, uids: [5]}]}]}\n"
	tests := map[string]struct {
		file    string
		sockets map[string]string
		want    string // of the error; empty: what is bound is next
		listen  string
		engine  string
	}{
		"nothing":      {listen: "127.0.0.1:7070"},
		"unix":         {file: "http: {listen: 'systemd:http'}\n", sockets: map[string]string{"http": "unix:///run/berm/http.sock"}, listen: "unix:///run/berm/http.sock"},
		"everywhere":   {file: "http: {listen: 'systemd:http'}\n", sockets: map[string]string{"http": "[::]:7070"}, listen: "[::]:7070"},
		"both":         {file: socket, sockets: map[string]string{"docker": "unix:///run/d.sock"}, listen: "127.0.0.1:7070", engine: "unix:///run/d.sock"},
		"loopback":     {file: tcp, sockets: map[string]string{"docker": "127.0.0.1:2375"}, listen: "127.0.0.1:7070", engine: "tcp://127.0.0.1:2375"},
		"missing":      {file: "http: {listen: 'systemd:http'}\n", want: "http.listen: systemd has passed no socket of the name http"},
		"another":      {file: "http: {listen: 'systemd:http'}\n", sockets: map[string]string{"http": "[::]:1", "b.socket": "[::]:2"}, want: "systemd has passed the socket b.socket, and no address"},
		"not asked":    {sockets: map[string]string{"http": "[::]:1"}, want: "systemd has passed the socket http, and no address"},
		"exposed":      {file: tcp, sockets: map[string]string{"docker": "0.0.0.0:2375"}, want: "lets everybody in who reaches it"},
		"uids of TCP":  {file: socket, sockets: map[string]string{"docker": "127.0.0.1:2375"}, want: "uids: only a unix socket tells them"},
		"abstract":     {file: "http: {listen: 'systemd:http'}\n", sockets: map[string]string{"http": "unix://@berm"}, want: "http.listen: want unix:// and an absolute path"},
		"one for both": {file: socket, sockets: map[string]string{"docker": "127.0.0.1:7070"}, want: "is the same as http.listen"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			c, err := parse([]byte(tt.file), Options{})
			if err != nil {
				t.Fatal(err)
			}
			before := c.EngineAPI
			got, err := c.Bound(tt.sockets)
			if tt.want != "" {
				if err == nil || !strings.Contains(err.Error(), tt.want) {
					t.Errorf("got %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if got.HTTP.Listen != tt.listen || len(got.EngineAPI.Listeners) > 0 && got.EngineAPI.Listeners[0].Address != tt.engine {
				t.Errorf("got %s, %+v", got.HTTP.Listen, got.EngineAPI.Listeners)
			}
			if diff := cmp.Diff(before, c.EngineAPI); diff != "" {
				t.Errorf("the original changed:\n%s", diff)
			}
		})
	}
}

func TestPassedNames(t *testing.T) {
	for file, want := range map[string]string{
		"http: {listen: 'systemd:'}\n":    "http.listen: want systemd: and a socket's name",
		"http: {listen: 'systemd:a:b'}\n": "http.listen: want systemd: and a socket's name",
		"http: {listen: 'systemd:a'}\nengine_api: {listeners: [{address: 'systemd:a', callers: [{name: a, tenant: a}]}]}\n":                "is the same as http.listen",
		"engine_api: {listeners: [{address: 'systemd:a', socket_mode: '0600', callers: [{name: a, tenant: a}]}]}\n":                        "of a socket that is passed, its unit has them",
		"engine_api: {listeners: [{address: 'systemd:a', tls_cert_file: /c, callers: [{name: a, tenant: a}]}]}\n":                          "a certificate and its key belong together",
		"engine_api: {listeners: [{address: 'systemd:a', callers: [{name: a, tenant: a, uids: [1]}, {name: b, tenant: b, uids: [1]}]}]}\n": "is another caller's as well",
	} {
		if _, err := parse([]byte(file), Options{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", file, err)
		}
	}
}

func TestChanged(t *testing.T) {
	a, b := Default(), Default()
	if got := Changed(a, b); len(got) != 0 {
		t.Errorf("between defaults: %q", got)
	}
	b.Logging.Level, b.Sandbox.Env = "debug", map[string]string{"A": "b"}
	b.EngineAPI.Listeners = []Listener{{Address: "tcp://127.0.0.1:1"}}
	if diff := cmp.Diff([]string{"engine_api.listeners", "logging.level", "sandbox.env"}, Changed(a, b)); diff != "" {
		t.Error(diff)
	}
}
