package main

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"os"
	"strings"
)

// answers are what a port can say to a request.
var answers = map[string]func(c net.Conn){
	"garbage": func(c net.Conn) { _, _ = c.Write(bytes.Repeat([]byte("\x00\xff not http\r\n"), 1<<10)) },
	"headers": func(c net.Conn) {
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n")
		for {
			if _, err := io.WriteString(c, "X-"+strings.Repeat("a", 1000)+": b\r\n"); err != nil {
				return
			}
		}
	},
	"header": func(c net.Conn) { // a line without end
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nX: ")
		for {
			if _, err := io.WriteString(c, strings.Repeat("a", 1000)); err != nil {
				return
			}
		}
	},
	"early": func(c net.Conn) {
		for {
			if _, err := io.WriteString(c, "HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"); err != nil {
				return
			}
		}
	},
	"never": func(c net.Conn) { _, _ = io.Copy(io.Discard, c) },
	"close": func(net.Conn) {},
	"endless": func(c net.Conn) {
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
		for {
			if _, err := io.WriteString(c, "400\r\n"+strings.Repeat("a", 1024)+"\r\n"); err != nil {
				return
			}
		}
	},
	"short": func(c net.Conn) { _, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\nshort") },
	"smuggle": func(c net.Conn) {
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nother")
	},
	"upgrade": func(c net.Conn) {
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
		_, _ = io.Copy(io.Discard, c)
	},
}

// listen answers every request at a port in one way; "tell" answers what it was asked.
func listen(kind, port string) {
	ln, err := net.Listen("tcp", "127.0.0.1:"+port)
	must(err)
	begun()
	go func() {
		untilOver()
		os.Exit(0)
	}()
	for {
		c, err := ln.Accept()
		must(err)
		go func() {
			defer func() { _ = c.Close() }()
			r, err := http.ReadRequest(bufio.NewReader(c))
			if err != nil {
				return
			}
			if kind != "tell" {
				answers[kind](c)
				return
			}
			asked, _ := httputil.DumpRequest(r, true)
			resp := &http.Response{StatusCode: http.StatusOK, ProtoMajor: 1, ProtoMinor: 1, Body: io.NopCloser(bytes.NewReader(asked)), ContentLength: int64(len(asked))}
			_ = resp.Write(c)
		}()
	}
}
