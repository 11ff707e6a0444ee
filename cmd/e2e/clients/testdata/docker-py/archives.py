"""Cases of archives, and of containers that are watched."""

import io
import tarfile
import threading
import time

import docker

from fixture import IMAGE
from tap import case, equal, raises, within


@case
def container_put_archive(t):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        info = tarfile.TarInfo("file")
        info.size = 4
        tar.addfile(info, io.BytesIO(b"data"))
    c = t.create("cat /tmp/file")
    equal(c.put_archive("/tmp", data.getvalue()), True)
    c.start()
    c.wait()
    equal(c.logs(), b"data")


@case
def container_get_archive(t):
    c = t.run("sh -c 'echo -n data > /file'")
    c.wait()
    stream, stat = c.get_archive("/file")
    equal((stat["name"], stat["size"]), ("file", 4))
    tar = tarfile.open(fileobj=io.BytesIO(b"".join(stream)))
    equal(tar.extractfile("file").read(), b"data")


@case
def container_get_archive_encoded(t):
    stream, _ = t.create().get_archive("/etc", encode_stream=True)
    equal(len(b"".join(stream)) > 0, True)


@case
def container_get_archive_missing(t):
    raises(docker.errors.NotFound, t.create().get_archive, "/missing")


@case
def container_image_attribute(t):
    within(IMAGE, t.create().image.tags)


@case
def container_wait_in_thread(t):
    c, got = t.run(), []
    waiter = threading.Thread(target=lambda: got.append(c.wait()["StatusCode"]))
    waiter.start()
    time.sleep(0.5)
    c.kill()
    waiter.join()
    equal(got, [137])


@case
def container_inspect_config(t):
    c = t.create(environment={"A": "b"}, working_dir="/tmp", user="1000", hostname="h", domainname="d", tty=True, stdin_open=True)
    got = t.api.inspect_container(c.id)["Config"]
    within("A=b", got["Env"])
    equal([got[k] for k in ("WorkingDir", "User", "Hostname", "Domainname", "Tty", "OpenStdin")], ["/tmp", "1000", "h", "d", True, True])
