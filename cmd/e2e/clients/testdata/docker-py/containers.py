"""Cases of containers: the collection, their methods, and what they are created with."""

import io
import tarfile
import time

import docker
from docker.types import Healthcheck, LogConfig, Mount, Ulimit

from fixture import IMAGE, WORK
from tap import case, equal, raises, within


@case
def container_run(t):
    equal(t.client.containers.run(IMAGE, "echo hello", remove=True), b"hello\n")


@case
def container_run_list_command(t):
    equal(t.client.containers.run(IMAGE, ["sh", "-c", "echo $0", "x"], remove=True), b"x\n")


@case
def container_run_detach(t):
    c = t.run("sh -c 'echo a; sleep 300'", name=t.name())
    within(c.status, ("created", "running"))
    c.reload()
    equal(c.status, "running")


@case
def container_run_error(t):
    e = raises(docker.errors.ContainerError, t.client.containers.run, IMAGE, "sh -c 'echo no >&2; exit 3'", remove=True)
    equal(e.exit_status, 3)
    equal(e.stderr, b"no\n")


@case
def container_run_stderr(t):
    out = t.client.containers.run(IMAGE, "sh -c 'echo out; echo err >&2'", stdout=False, stderr=True, remove=True)
    equal(out, b"err\n")


@case
def container_run_stream(t):
    equal(b"".join(t.client.containers.run(IMAGE, "sh -c 'echo a; echo b'", stream=True, remove=True)), b"a\nb\n")


@case
def container_run_image_missing(t):
    raises(docker.errors.ImageNotFound, t.client.containers.create, IMAGE.split(":")[0] + ":missing", "true")


@case
def container_run_auto_remove(t):
    c = t.client.containers.run(IMAGE, "sleep 300", detach=True, auto_remove=True)
    t.adopt(c)
    c.kill()
    for _ in range(100):
        if not t.client.containers.list(all=True, filters={"id": c.id}, ignore_removed=True):
            return
        time.sleep(0.1)
    raise AssertionError("it is still there")


@case
def container_run_name_and_labels(t):
    name = t.name()
    c = t.run(name=name, labels={"one": "1", "two": ""})
    equal(c.name, name)
    equal(c.labels["one"], "1")
    equal(c.labels["two"], "")


@case
def container_labels_exact(t):
    equal(t.create(labels={"one": "1"}).labels, {"one": "1"})


@case
def container_label_list(t):
    within("flag", t.create(labels=["flag"]).labels)


@case
def container_name_conflict(t):
    name = t.name()
    t.create(name=name)
    equal(raises(docker.errors.APIError, t.create, name=name).status_code, 409)


@case
def container_name_all_hex(t):
    name = t.name("h").split("-")[-1]
    c = t.create(name=name)
    equal(t.client.containers.get(name).id, c.id)


@case
def container_get(t):
    c = t.create(name=t.name())
    for key in (c.id, c.short_id, c.name):
        equal(t.client.containers.get(key).id, c.id)


@case
def container_get_missing(t):
    e = raises(docker.errors.NotFound, t.client.containers.get, "missing")
    within("No such container", str(e))


@case
def container_list(t):
    c = t.run()
    within(c.id, [x.id for x in t.client.containers.list()])
    c.kill()
    c.wait()
    equal(c.id in [x.id for x in t.client.containers.list()], False)
    within(c.id, [x.id for x in t.client.containers.list(all=True)])


@case
def container_list_limit_since_before(t):
    a, b = t.create(), t.create()
    equal([x.id for x in t.client.containers.list(limit=1)], [b.id])
    within(b.id, [x.id for x in t.client.containers.list(all=True, since=a.id)])
    within(a.id, [x.id for x in t.client.containers.list(all=True, before=b.id)])


@case
def container_list_filters(t):
    name = t.name()
    c = t.create(name=name, labels={"k": name})
    filters = [{"name": name}, {"label": "k=" + name}, {"label": ["k", "k=" + name]}, {"id": c.id},
               {"name": name, "status": "created"}, {"ancestor": IMAGE, "name": name}, {"exited": 0, "name": name}]
    for f in filters[:-1]:
        equal([x.id for x in t.client.containers.list(all=True, filters=f)], [c.id])
    equal(t.client.containers.list(all=True, filters=filters[-1]), [])


@case
def container_list_sparse(t):
    c = t.create()
    within(c.id, [x.id for x in t.client.containers.list(all=True, sparse=True)])
    within(c.id, [x.id for x in t.client.containers.list(all=True, ignore_removed=True)])


@case
def container_list_size(t):
    id = t.run("sh -c 'dd if=/dev/zero of=/file bs=1024 count=4; sleep 300'").id
    for _ in range(50):
        if t.api.containers(size=True, filters={"id": id})[0].get("SizeRw", 0) >= 4096:
            return
        time.sleep(0.1)
    raise AssertionError("no size")


@case
def container_list_quiet_latest(t):
    c = t.create()
    equal(t.api.containers(latest=True)[0]["Id"], c.id)
    equal(t.api.containers(quiet=True, all=True, limit=1)[0], {"Id": c.id})


@case
def container_start_stop(t):
    c = t.create("sh -c 'trap \"exit 4\" TERM; while :; do sleep 0.1; done'")
    c.start()
    c.stop(timeout=10)
    equal(c.wait()["StatusCode"], 4)


@case
def container_stop_signal(t):
    c = t.run("sh -c 'trap \"exit 5\" INT; while :; do sleep 0.1; done'", stop_signal="SIGINT")
    time.sleep(0.5)
    c.stop()
    equal(c.wait()["StatusCode"], 5)


@case
def container_restart(t):
    c = t.run()
    before = t.api.inspect_container(c.id)["State"]["StartedAt"]
    c.restart(timeout=0)
    after = t.api.inspect_container(c.id)["State"]
    equal((after["Running"], after["StartedAt"] != before), (True, True))


@case
def container_kill(t):
    c = t.run()
    c.kill(signal=9)
    equal(c.wait()["StatusCode"], 137)


@case
def container_kill_signal_name(t):
    c = t.run("sh -c 'trap \"exit 6\" USR1; while :; do sleep 0.1; done'")
    time.sleep(0.5)
    c.kill("SIGUSR1")
    equal(c.wait()["StatusCode"], 6)


@case
def container_kill_stopped(t):
    e = raises(docker.errors.APIError, t.create().kill)
    equal(e.status_code, 409)


@case
def container_pause(t):
    c = t.run()
    c.pause()
    c.reload()
    equal(c.status, "paused")
    c.unpause()
    c.reload()
    equal(c.status, "running")


@case
def container_rename(t):
    c, name = t.create(), t.name()
    c.rename(name)
    c.reload()
    equal(c.name, name)


@case
def container_remove(t):
    c = t.run()
    raises(docker.errors.APIError, c.remove)
    c.remove(force=True)
    raises(docker.errors.NotFound, t.client.containers.get, c.id)


@case
def container_remove_volumes(t):
    c = t.run(volumes=["/data"])
    c.reload()
    volume = c.attrs["Mounts"][0]["Name"]
    c.remove(v=True, force=True)
    raises(docker.errors.NotFound, t.client.volumes.get, volume)


@case
def container_wait(t):
    equal(t.run("sh -c 'exit 7'").wait()["StatusCode"], 7)


@case
def container_wait_next_exit(t):
    c = t.run("sleep 1")
    equal(c.wait(condition="next-exit")["StatusCode"], 0)


@case
def container_wait_removed(t):
    c = t.run("sleep 1", auto_remove=True)
    equal(c.wait(condition="removed")["StatusCode"], 0)


@case
def container_wait_not_running(t):
    c = t.create()
    equal(c.wait(condition="not-running")["StatusCode"], 0)


@case
def container_logs(t):
    c = t.run("sh -c 'echo out; echo err >&2'")
    c.wait()
    equal(c.logs(stderr=False), b"out\n")
    equal(c.logs(stdout=False), b"err\n")


@case
def container_logs_tail(t):
    c = t.run("sh -c 'echo a; echo b; echo c'")
    c.wait()
    equal(c.logs(tail=1), b"c\n")
    equal(c.logs(tail=0), b"")
    equal(c.logs(tail="all"), b"a\nb\nc\n")


@case
def container_logs_timestamps(t):
    c = t.run("echo a")
    c.wait()
    within(b"Z a\n", c.logs(timestamps=True))


@case
def container_logs_since_until(t):
    c = t.run("echo a")
    c.wait()
    now = int(time.time())
    equal(c.logs(since=now + 100), b"")
    equal(c.logs(until=now - 100), b"")
    equal(c.logs(since=now - 100, until=now + 100), b"a\n")


@case
def container_logs_stream(t):
    c = t.run("sh -c 'for i in 1 2 3; do echo $i; done'")
    equal(b"".join(c.logs(stream=True, follow=True)), b"1\n2\n3\n")


@case
def container_logs_stream_cancel(t):
    stream = t.run("sh -c 'while :; do echo x; sleep 0.1; done'").logs(stream=True)
    equal(next(iter(stream)), b"x\n")
    stream.close()


@case
def container_logs_tty(t):
    c = t.run("echo a", tty=True)
    c.wait()
    equal(c.logs(), b"a\r\n")


@case
def container_attach_stream(t):
    c = t.create("sh -c 'echo a; echo b >&2'")
    stream = c.attach(stream=True, demux=True, logs=True)
    c.start()
    parts = list(stream)
    equal(b"".join(x[0] or b"" for x in parts), b"a\n")
    equal(b"".join(x[1] or b"" for x in parts), b"b\n")


@case
def container_attach_socket(t):
    c = t.create("cat", stdin_open=True)
    s = c.attach_socket(params={"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    c.start()
    s._sock.sendall(b"ping\n")
    got = b""
    while len(got) < 13:
        got += s._sock.recv(100)
    equal(got, b"\x01\0\0\0\0\0\0\x05ping\n")
    s.close()


@case
def container_top(t):
    top = t.run("sleep 299").top()
    within("sleep 299", top["Processes"][0][-1])


@case
def container_top_ps_args(t):
    within("PID", t.run().top(ps_args="-o pid,cmd")["Titles"])


@case
def container_stats(t):
    c = t.run()
    stats = c.stats(stream=False)
    within("memory_stats", stats)
    within("usage", stats["memory_stats"])


@case
def container_stats_stream(t):
    stream = t.run().stats(decode=True, stream=True)
    within("cpu_stats", next(stream))
    within("precpu_stats", next(stream))
    stream.close()


@case
def container_diff(t):
    c = t.run("touch /new")
    c.wait()
    within({"Path": "/new", "Kind": 1}, c.diff())


@case
def container_export(t):
    c = t.run("touch /new")
    c.wait()
    data = io.BytesIO(b"".join(c.export()))
    within("new", tarfile.open(fileobj=data).getnames())


@case
def container_port(t):
    c = t.run(ports={"80/tcp": None})
    c.reload()
    equal(len(c.attrs["NetworkSettings"]["Ports"]["80/tcp"]) > 0, True)
    equal(int(t.api.port(c.id, 80)[0]["HostPort"]) > 0, True)


@case
def container_port_given(t):
    c = t.run(ports={"80/tcp": ("127.0.0.1", 41080), "53/udp": [41053, 41054]})
    c.reload()
    equal(c.ports["80/tcp"], [{"HostIp": "127.0.0.1", "HostPort": "41080"}])
    equal(len(c.ports["53/udp"]) >= 2, True)


@case
def container_expose(t):
    equal(t.low(ports=[80, (53, "udp")]) != "", True)


@case
def container_resize(t):
    t.run(tty=True).resize(40, 120)


@case
def container_update(t):
    c = t.run(mem_limit="128m")
    c.update(mem_limit="64m", memswap_limit="64m", cpu_shares=512)
    c.reload()
    equal(c.attrs["HostConfig"]["Memory"], 64 << 20)
    equal(c.attrs["HostConfig"]["CpuShares"], 512)


@case
def container_update_restart(t):
    c = t.run()
    c.update(restart_policy={"Name": "on-failure", "MaximumRetryCount": 5})
    c.reload()
    equal(c.attrs["HostConfig"]["RestartPolicy"], {"Name": "on-failure", "MaximumRetryCount": 5})


@case
def container_prune(t):
    c = t.create()
    pruned = t.client.containers.prune()
    within(c.id, pruned["ContainersDeleted"])


@case
def container_prune_label(t):
    a, b = t.create(labels={"go": "1"}), t.create()
    equal(t.client.containers.prune(filters={"label": "go=1"})["ContainersDeleted"], [a.id])
    b.reload()


@case
def container_commit(t):
    c = t.run("touch /committed")
    c.wait()
    repository = "langs.local/py/commit"
    image = c.commit(repository=repository, tag="one", message="m", author="a", changes=["ENV A=b"], conf={"Cmd": ["ls", "/committed"]})
    t.image(image.id)
    within(repository + ":one", image.tags)
    equal(t.client.containers.run(image.id, remove=True), b"/committed\n")


@case
def container_mount_types(t):
    v = t.volume()
    mounts = [Mount("/data", v.name), Mount("/mem", None, type="tmpfs", tmpfs_size=1 << 20, tmpfs_mode=0o1777)]
    if WORK:
        mounts.append(Mount("/work", WORK, type="bind", read_only=True))
    within("tmpfs", t.output("grep /mem /proc/mounts", mounts=mounts))


@case
def container_healthcheck(t):
    c = t.run(healthcheck=Healthcheck(test=["CMD", "true"], interval=1000000000, timeout=1000000000, retries=2, start_period=0))
    for _ in range(100):
        state = t.api.inspect_container(c.id)["State"]
        if state.get("Health", {}).get("Status") == "healthy":
            return
        time.sleep(0.1)
    raise AssertionError(state)


@case
def container_log_config(t):
    c = t.create(log_config=LogConfig(type=LogConfig.types.JSON, config={"max-size": "1m", "max-file": "2"}))
    equal(c.attrs["HostConfig"]["LogConfig"]["Config"]["max-size"], "1m")


@case
def container_log_none(t):
    c = t.create(log_config=LogConfig(type="none"))
    equal(c.attrs["HostConfig"]["LogConfig"]["Type"], "none")


@case
def container_ulimits(t):
    equal(t.output("sh -c 'ulimit -n'", ulimits=[Ulimit(name="nofile", soft=512, hard=1024)]), "512")
