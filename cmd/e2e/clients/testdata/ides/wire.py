"""Speaks HTTP to the engine at DOCKER_HOST."""

import contextlib
import http.client
import io
import json
import os
import socket
import struct
import tarfile
from urllib.parse import urlencode

import tap

IMAGE = os.environ["IMAGE"]
WEB = ["sh", "-c", "mkdir -p /www; echo hello >/www/x; exec httpd -f -p 8080 -h /www"]


def encoded(query):
    return urlencode({k: json.dumps(v) if isinstance(v, dict) else v for k, v in query.items()})


def dial():
    s = socket.socket(socket.AF_UNIX)
    s.settimeout(20)
    s.connect(os.environ["DOCKER_HOST"][len("unix://"):])
    return s


class Connection(http.client.HTTPConnection):
    def __init__(self):
        super().__init__("localhost", timeout=20)

    def connect(self):
        self.sock = dial()


class Answer:
    """Answer is a response that was read to its end."""

    def __init__(self, response):
        self.status, self.headers, self.body = response.status, response.headers, response.read()
        self.text = self.body.decode(errors="replace")

    def json(self):
        return json.loads(self.body)

    def lines(self):
        return [json.loads(line) for line in self.body.splitlines() if line.strip()]


class Hijacked:
    """Hijacked is a connection that is a stream after the head of its answer."""

    def __init__(self, method, path, body=None, upgrade="tcp", **headers):
        self.sock = dial()
        data = b"" if body is None else json.dumps(body).encode()
        lines = ["%s %s HTTP/1.1" % (method, path), "Host: localhost", "Content-Type: application/json", "Content-Length: %d" % len(data)]
        if upgrade:
            lines += ["Connection: Upgrade", "Upgrade: " + upgrade]
        lines += ["%s: %s" % (k.replace("_", "-"), v) for k, v in headers.items()]
        self.sock.sendall("\r\n".join(lines + ["", ""]).encode() + data)
        self.file = self.sock.makefile("rb")
        self.head = self.read_head()

    def read_head(self):
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            byte = self.file.read(1)
            if not byte:
                raise AssertionError("the connection ended in %r" % head)
            head += byte
        self.status = int(head.split()[1])
        return head.decode()

    def until(self, text):
        """until reads up to a text of the stream."""
        got = b""
        while text not in got:
            part = self.file.read1(4096)
            if not part:
                raise AssertionError("the stream ended: %r" % got)
            got += part
        return got

    def frames(self):
        """frames reads multiplexed output to its end."""
        out = {1: b"", 2: b""}
        while True:
            head = self.file.read(8)
            if not head:
                return out
            kind, size = struct.unpack(">BxxxL", head)
            out[kind] += self.file.read(size)

    def shut(self):
        self.sock.shutdown(socket.SHUT_WR)

    def close(self):
        self.file.close()
        self.sock.close()


class T:
    """T is what a case works with; what it makes is removed at the case's end."""

    def __init__(self, stack):
        self.stack = stack

    def call(self, method, target, body=None, headers=None, want=None, chunked=False, **query):
        """call makes a request of its own connection. Want are the statuses that are no failure."""
        path = target + ("?" + encoded(query) if query else "")
        headers = dict(headers or {})
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
            headers.setdefault("Content-Type", "application/json")
        with contextlib.closing(Connection()) as c:
            if chunked:
                c.request(method, path, iter([body[:1], body[1:]]), headers, encode_chunked=True)
            else:
                c.request(method, path, body, headers)
            answer = Answer(c.getresponse())
        if answer.status not in (want or (200, 201, 204)):
            raise AssertionError("%s %s: %d %s" % (method, path, answer.status, answer.text))
        return answer

    def get(self, path, **query):
        return self.call("GET", path, **query).json()

    def post(self, path, body=None, **query):
        return self.call("POST", path, body, **query)

    def undo(self, method, path, **query):
        self.stack.callback(lambda: self.call(method, path, want=range(600), **query))

    def stream(self, method, path, **query):
        """stream leaves the answer's body to be read."""
        c = Connection()
        self.stack.callback(c.close)
        c.request(method, path + "?" + encoded(query))
        response = c.getresponse()
        tap.equal(response.status, 200)
        return response

    def hijack(self, *args, **options):
        h = Hijacked(*args, **options)
        self.stack.callback(h.close)
        return h

    def create(self, cmd=("sleep", "300"), host=None, **config):
        name = tap.unique("ide")
        self.undo("DELETE", "/containers/" + name, force="true", v="true")
        self.post("/containers/create", dict({"Image": IMAGE, "Cmd": list(cmd), "HostConfig": host or {}}, **config), name=name)
        return name

    def run(self, *args, **options):
        name = self.create(*args, **options)
        self.post("/containers/%s/start" % name)
        return name

    def exec(self, name, *cmd, **config):
        body = dict({"AttachStdout": True, "AttachStderr": True, "Cmd": list(cmd)}, **config)
        return self.post("/containers/%s/exec" % name, body).json()["Id"]

    def output(self, name, *cmd):
        """output is what a command printed that ran in a container."""
        h = self.hijack("POST", "/exec/%s/start" % self.exec(name, *cmd), {"Detach": False, "Tty": False})
        return h.frames()[1].decode()


def context(**files):
    """context is an archive of files."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return data.getvalue()
