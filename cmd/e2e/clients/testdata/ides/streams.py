"""Cases of streams: exec, attach, logs, archives, events, stats."""

import base64
import io
import json
import os
import struct
import tarfile
import threading
import time

from tap import case, equal, unique, within
from wire import Hijacked, context, dial


@case
def exec_with_terminal(t):
    name = t.run()
    id = t.exec(name, "sh", AttachStdin=True, Tty=True, Privileged=False, User="", Env=[], WorkingDir="/tmp", DetachKeys="ctrl-p,ctrl-q")
    h = t.hijack("POST", "/exec/%s/start" % id, {"Detach": False, "Tty": True})
    equal(h.status, 101)
    within("Upgrade: tcp", h.head)
    t.call("POST", "/exec/%s/resize" % id, h="33", w="111")
    h.sock.sendall(b"stty size; pwd\n")
    h.until(b"/tmp")
    h.sock.sendall(b"stty size | tr ' ' _\n")
    h.until(b"33_111")
    h.sock.sendall(b"exit 7\n")
    while h.file.read1(4096):
        pass
    got = t.get("/exec/%s/json" % id)
    equal((got["ExitCode"], got["Running"], got["ProcessConfig"]["tty"]), (7, False, True))


@case
def exec_without_upgrade(t):
    h = t.hijack("POST", "/exec/%s/start" % t.exec(t.run(), "echo", "hi"), {"Detach": False, "Tty": False}, upgrade="")
    equal(h.status, 200)
    equal(h.frames()[1], b"hi\n")


@case
def exec_with_both_streams(t):
    h = t.hijack("POST", "/exec/%s/start" % t.exec(t.run(), "sh", "-c", "echo out; echo err >&2"), {"Detach": False, "Tty": False})
    equal(h.frames(), {1: b"out\n", 2: b"err\n"})


@case
def exec_with_input_that_ends(t):
    h = t.hijack("POST", "/exec/%s/start" % t.exec(t.run(), "cat", AttachStdin=True), {"Detach": False, "Tty": False})
    h.sock.sendall(b"a line\n")
    h.shut()
    equal(h.frames()[1], b"a line\n")


@case
def exec_detached(t):
    name = t.run()
    t.call("POST", "/exec/%s/start" % t.exec(name, "touch", "/tmp/made"), {"Detach": True, "Tty": False})
    t.output(name, "sh", "-c", "until test -e /tmp/made; do :; done")


@case
def exec_of_dev_containers(t):
    """A shell that lives on, and gets commands with a mark at the end of their output."""
    h = t.hijack("POST", "/exec/%s/start" % t.exec(t.run(), "/bin/sh", AttachStdin=True, User="root", Env=["VSCODE_REMOTE_CONTAINERS_SESSION=x"]), {"Detach": False, "Tty": False})
    for n in range(3):
        h.sock.sendall(b"echo -n mark; ( echo \"$VSCODE_REMOTE_CONTAINERS_SESSION\" %d ); echo -n mark$?; echo -n mark >&2\n" % n)
        within(b"x %d\n" % n, h.until(b"mark0"))


@case
def attach_with_input(t):
    name = t.create(["cat"], OpenStdin=True, StdinOnce=True, AttachStdin=True, AttachStdout=True, AttachStderr=True)
    h = t.hijack("POST", "/containers/%s/attach?logs=1&stream=1&stdin=1&stdout=1&stderr=1" % name)
    equal(h.status, 101)
    t.post("/containers/%s/start" % name)
    h.sock.sendall(b"through\n")
    h.shut()
    equal(h.frames()[1], b"through\n")


@case
def attach_to_a_terminal(t):
    name = t.run(["sh"], OpenStdin=True, Tty=True)
    h = t.hijack("POST", "/containers/%s/attach?stream=1&stdin=1&stdout=1&stderr=1&detachKeys=ctrl-c" % name)
    t.post("/containers/%s/resize" % name, h="30", w="90")
    h.sock.sendall(b"stty size | tr ' ' _\n")
    h.until(b"30_90")


def frame(data):
    """frame is data as a client's message of a WebSocket."""
    mask = os.urandom(4)
    return bytes([0x82, 0x80 | len(data)]) + mask + bytes(b ^ mask[i % 4] for i, b in enumerate(data))


@case
def attach_by_websocket(t):
    name = t.run(["cat"], OpenStdin=True, Tty=True)
    h = t.hijack(
        "GET", "/containers/%s/attach/ws?logs=0&stream=1&stdin=1&stdout=1&stderr=1" % name, upgrade="websocket",
        Sec_WebSocket_Key=base64.b64encode(os.urandom(16)).decode(), Sec_WebSocket_Version="13",
    )
    equal(h.status, 101)
    h.sock.sendall(frame(b"through\n"))
    within(b"through", h.until(b"through"))


@case
def logs(t):
    name = t.run(["sh", "-c", "echo one; echo two; echo three >&2"])
    t.post("/containers/%s/wait" % name)
    read = lambda **q: t.call("GET", "/containers/%s/logs" % name, stdout="1", **q).body
    within(struct.pack(">BxxxL", 1, 4) + b"one\n", read(stderr="1", follow="0", timestamps="0", since="0", tail="all"))
    within(struct.pack(">BxxxL", 2, 6) + b"three\n", read(stderr="1", details="0"))
    equal(read(tail="2", stderr="1").count(b"\n"), 2)
    within(b"T", read(timestamps="1").split(b" ")[0])
    equal(read(until="1"), b"")


@case
def logs_that_go_on(t):
    name = t.run(["sh", "-c", "while true; do echo again; sleep 0.2; done"], Tty=True)
    r = t.stream("GET", "/containers/%s/logs" % name, follow="true", stdout="true", stderr="true", timestamps="true", tail="10", since="0")
    for _ in range(3):
        within(b"again", r.readline())


@case
def logs_that_end(t):
    name = t.run(["sh", "-c", "echo one; sleep 0.5; echo two"])
    body = t.call("GET", "/containers/%s/logs" % name, follow="1", stdout="1", stderr="1").body
    within(b"one\n", body)
    within(b"two\n", body)


@case
def archives(t):
    name = t.run()
    path = "/containers/%s/archive" % name
    t.call("PUT", path, context(a="one"), {"Content-Type": "application/x-tar"}, path="/tmp")
    t.call("PUT", path, context(b="two"), {"Content-Type": "application/x-tar"}, chunked=True, path="/tmp", noOverwriteDirNonDir="true")
    equal(t.output(name, "cat", "/tmp/a", "/tmp/b"), "onetwo")
    a = t.call("GET", path, path="/tmp/a")
    equal(a.headers["Content-Type"], "application/x-tar")
    equal(tarfile.open(fileobj=io.BytesIO(a.body)).extractfile("a").read(), b"one")
    for stat in (a, t.call("HEAD", path, path="/tmp/a")):
        got = json.loads(base64.b64decode(stat.headers["X-Docker-Container-Path-Stat"]))
        equal((got["name"], got["size"], got["linkTarget"]), ("a", 3, ""))
    t.call("GET", path, path="/missing", want=[404])
    t.call("PUT", path, context(a="x"), path="/missing", want=[404])


@case
def archive_of_a_stopped_container(t):
    name = t.create()
    path = "/containers/%s/archive" % name
    t.call("PUT", path, context(a="one"), {"Content-Type": "application/x-tar"}, path="/", noOverwriteDirNonDir="false")
    within(b"one", t.call("GET", path, path="/a").body)


@case
def expect_continue(t):
    name, data = t.run(), context(a="x" * 70000)
    h = Hijacked.__new__(Hijacked)
    h.sock = dial()
    t.stack.callback(h.sock.close)
    h.file = h.sock.makefile("rb")
    h.sock.sendall(("PUT /containers/%s/archive?path=/tmp HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-tar\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n" % (name, len(data))).encode())
    h.read_head()
    equal(h.status, 100)
    h.sock.sendall(data)
    h.read_head()
    equal(h.status, 200)
    equal(t.output(name, "wc", "-c", "/tmp/a").split()[0], "70000")


@case
def export(t):
    within(b"bin/", t.call("GET", "/containers/%s/export" % t.create()).body)


def next_event(response, wanted):
    while True:
        event = json.loads(response.readline())
        if wanted(event):
            return event


@case
def events(t):
    label = unique("events")
    r = t.stream("GET", "/events", filters={"type": ["container"], "event": ["start", "die"], "label": [label]})
    name = t.run(["true"], Labels={label: "1"})
    for action in ("start", "die"):
        e = next_event(r, lambda e: True)
        equal((e["Action"], e["Type"], e["Actor"]["Attributes"]["name"], e["status"] if "status" in e else action), (action, "container", name, action))


@case
def events_of_all_kinds(t):
    r = t.stream("GET", "/events")
    name, volume, network = t.run(), unique("v"), unique("n")
    t.post("/volumes/create", {"Name": volume})
    t.undo("DELETE", "/volumes/" + volume)
    t.post("/networks/create", {"Name": network})
    t.undo("DELETE", "/networks/" + network)
    next_event(r, lambda e: e["Type"] == "container" and e["Actor"]["Attributes"].get("name") == name)
    next_event(r, lambda e: e["Type"] == "volume" and e["Actor"]["ID"] == volume)
    next_event(r, lambda e: e["Type"] == "network" and e["Actor"]["Attributes"]["name"] == network)


@case
def events_of_the_past(t):
    begin, name = int(time.time()) - 1, t.run()
    lines = t.call("GET", "/events", since=str(begin), until=str(int(time.time()) + 1), filters={"container": [name]}).lines()
    within("create", [e["Action"] for e in lines])


@case
def stats_that_go_on(t):
    r = t.stream("GET", "/containers/%s/stats" % t.run(), stream="true")
    for _ in range(2):
        within("cpu_stats", json.loads(r.readline()))


@case
def wait_for_the_end(t):
    name, codes = t.create(["sh", "-c", "exit 3"]), []
    waiting = threading.Thread(target=lambda: codes.append(t.post("/containers/%s/wait" % name, condition="next-exit").json()["StatusCode"]))
    waiting.start()
    time.sleep(0.3)
    t.post("/containers/%s/start" % name)
    waiting.join(20)
    equal(codes, [3])
