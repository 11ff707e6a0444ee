"""A registry of images in memory, on a free port of loopback. It prints the address."""

import http.server
import re
import socket
import sys
import uuid
from hashlib import sha256
from urllib.parse import parse_qs, urlsplit

BLOBS, MANIFESTS, UPLOADS = {}, {}, {}


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def handle(self):
        if self.connection.recv(1, socket.MSG_PEEK) == b"\x16":  # of TLS, which clients try first
            return self.wfile.write(b"HTTP/1.0 400 Bad Request\r\n\r\n")
        super().handle()

    def answer(self, status, body=b"", **headers):
        self.send_response(status)
        self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        if "Content_Length" not in headers:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def body(self):
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline(), 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def handle_any(self):
        body, url = self.body(), urlsplit(self.path)
        if url.path == "/v2/":
            return self.answer(200, b"{}", Content_Type="application/json")
        m = re.fullmatch(r"/v2/(.+)/(manifests|blobs|blobs/uploads)/([^/]*)", url.path)
        if not m:
            return self.answer(404)
        name, kind, last = m.groups()
        if kind == "blobs/uploads":
            return self.upload(name, last, body, parse_qs(url.query))
        store, key = (MANIFESTS, (name, last)) if kind == "manifests" else (BLOBS, last)
        if self.command == "PUT":
            digest = "sha256:" + sha256(body).hexdigest()
            for k in (last, digest):
                MANIFESTS[name, k] = (body, self.headers["Content-Type"])
            return self.answer(201, Docker_Content_Digest=digest, Location=url.path)
        if key not in store:
            return self.answer(404, b'{"errors":[{"code":"MANIFEST_UNKNOWN","message":"manifest unknown"}]}', Content_Type="application/json")
        data, media = store[key]
        self.answer(200, data, Content_Type=media, Docker_Content_Digest="sha256:" + sha256(data).hexdigest(), Content_Length=str(len(data)))

    def upload(self, name, id, body, query):
        if self.command == "POST":
            id = uuid.uuid4().hex
            UPLOADS[id] = b""
        data = UPLOADS[id] = UPLOADS.get(id, b"") + body
        location = "/v2/%s/blobs/uploads/%s" % (name, id)
        if "digest" in query:
            digest = query["digest"][0]
            BLOBS[digest] = (UPLOADS.pop(id), "application/octet-stream")
            return self.answer(201, Location="/v2/%s/blobs/%s" % (name, digest), Docker_Content_Digest=digest)
        self.answer(202, Location=location, Range="0-%d" % max(len(data) - 1, 0), Docker_Upload_UUID=id)

    do_GET = do_HEAD = do_PUT = do_POST = do_PATCH = handle_any


if __name__ == "__main__":
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1]) if len(sys.argv) > 1 else 0), Handler)
    print("127.0.0.1:%d" % server.server_address[1], flush=True)
    server.serve_forever()
