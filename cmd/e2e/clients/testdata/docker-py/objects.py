"""Cases of execs, networks, volumes, events and the system."""

import datetime
import os
import threading
import time

import docker
from docker.types import IPAMConfig, IPAMPool

from fixture import IMAGE
from tap import case, equal, raises, within


@case
def exec_run(t):
    equal(tuple(t.run().exec_run("echo hello")), (0, b"hello\n"))


@case
def exec_run_code(t):
    equal(t.run().exec_run("sh -c 'exit 3'").exit_code, 3)


@case
def exec_run_stream(t):
    _, stream = t.run().exec_run("sh -c 'echo a; echo b'", stream=True)
    equal(b"".join(stream), b"a\nb\n")


@case
def exec_run_demux(t):
    equal(t.run().exec_run("sh -c 'echo a; echo b >&2'", demux=True).output, (b"a\n", b"b\n"))


@case
def exec_run_detach(t):
    c = t.run()
    equal(len(c.exec_run("touch /x", detach=True).output), 0)
    for _ in range(50):
        if c.exec_run("ls /x").exit_code == 0:
            return
        time.sleep(0.1)
    raise AssertionError("it didn't run")


@case
def exec_run_options(t):
    out = t.run().exec_run("sh -c 'echo $A $PWD; id -u'", environment={"A": "b"}, workdir="/tmp", user="1000").output
    equal(out, b"b /tmp\n1000\n")


@case
def exec_run_environment_list(t):
    equal(t.run().exec_run("sh -c 'echo $A'", environment=["A=b"]).output, b"b\n")


@case
def exec_run_tty(t):
    equal(t.run().exec_run("echo a", tty=True).output, b"a\r\n")


@case
def exec_run_socket(t):
    _, s = t.run().exec_run("cat", socket=True, stdin=True)
    s._sock.sendall(b"ping\n")
    equal(s._sock.recv(100), b"\x01\0\0\0\0\0\0\x05ping\n")
    s._sock.close()


@case
def exec_run_tty_socket(t):
    _, s = t.run().exec_run("sh", socket=True, stdin=True, tty=True)
    s._sock.sendall(b"exit\n")
    equal(len(s._sock.recv(100)) > 0, True)
    s._sock.close()


@case
def exec_inspect(t):
    c = t.run()
    e = t.api.exec_create(c.id, ["sh", "-c", "exit 4"], stdout=True, stderr=False)
    t.api.exec_start(e)
    got = t.api.exec_inspect(e["Id"])
    equal((got["Running"], got["ExitCode"], got["ContainerID"]), (False, 4, c.id))


@case
def exec_resize(t):
    e = t.api.exec_create(t.run().id, "sleep 30", tty=True, stdin=True)
    s = t.api.exec_start(e, socket=True, tty=True)
    t.api.exec_resize(e, height=40, width=100)
    s._sock.close()


@case
def exec_detach_keys(t):
    t.api.exec_create(t.run().id, "cat", stdin=True, tty=True, detach_keys="ctrl-p")


@case
def exec_not_running(t):
    equal(raises(docker.errors.APIError, t.create().exec_run, "true").status_code, 409)


@case
def exec_missing_program(t):
    code = t.run().exec_run("missing-program").exit_code
    within(code, (126, 127))


@case
def exec_ids(t):
    c = t.run()
    e = t.api.exec_create(c.id, "sleep 30")
    s = t.api.exec_start(e, socket=True)
    within(e["Id"], t.api.inspect_container(c.id)["ExecIDs"])
    s._sock.close()


@case
def network_create(t):
    n = t.network(driver="bridge", labels={"k": "v"}, internal=False, attachable=False, check_duplicate=True)
    n.reload()
    equal((n.attrs["Driver"], n.attrs["Labels"]), ("bridge", {"k": "v"}))


@case
def network_create_internal(t):
    n = t.network(internal=True)
    n.reload()
    equal(n.attrs["Internal"], True)


@case
def network_create_options(t):
    n = t.network(options={"com.docker.network.driver.mtu": "1400"})
    n.reload()
    equal(n.attrs["Options"]["com.docker.network.driver.mtu"], "1400")


@case
def network_create_ipam(t):
    ipam = IPAMConfig(driver="default", pool_configs=[IPAMPool(subnet="10.199.7.0/24", gateway="10.199.7.1")])
    n = t.network(ipam=ipam)
    n.reload()
    equal(n.attrs["IPAM"]["Config"][0]["Subnet"], "10.199.7.0/24")


@case
def network_create_attachable(t):
    t.network(attachable=True)


@case
def network_get(t):
    n = t.network()
    for key in (n.id, n.short_id, n.name):
        equal(t.client.networks.get(key).id, n.id)


@case
def network_get_verbose_scope(t):
    n = t.network()
    equal(t.client.networks.get(n.id, verbose=True, scope="local").id, n.id)


@case
def network_get_missing(t):
    raises(docker.errors.NotFound, t.client.networks.get, "missing")


@case
def network_list(t):
    n = t.network(labels={"k": "v"})
    within(n.id, [x.id for x in t.client.networks.list()])
    equal([x.id for x in t.client.networks.list(names=[n.name])], [n.id])
    equal([x.id for x in t.client.networks.list(ids=[n.id])], [n.id])
    equal([x.id for x in t.client.networks.list(filters={"label": "k=v", "driver": "bridge", "type": "custom"})], [n.id])


@case
def network_list_greedy(t):
    n = t.network()
    within(n.id, [x.id for x in t.client.networks.list(greedy=True)])


@case
def network_bridge(t):
    equal(t.client.networks.get("bridge").name, "bridge")


@case
def network_predefined_listed(t):
    names = [x.name for x in t.client.networks.list()]
    for name in ("bridge", "host", "none"):
        within(name, names)


@case
def network_connect(t):
    n, c = t.network(), t.run()
    n.connect(c, aliases=["alias"])
    n.reload()
    equal([x.id for x in n.containers], [c.id])
    n.disconnect(c)
    n.reload()
    equal(n.containers, [])


@case
def network_connect_force_disconnect(t):
    n, c = t.network(), t.run()
    n.connect(c.name)
    n.disconnect(c.name, force=True)


@case
def network_connect_address(t):
    ipam = IPAMConfig(pool_configs=[IPAMPool(subnet="10.199.8.0/24")])
    n, c = t.network(ipam=ipam), t.run()
    n.connect(c, ipv4_address="10.199.8.77")
    c.reload()
    equal(c.attrs["NetworkSettings"]["Networks"][n.name]["IPAddress"], "10.199.8.77")


@case
def network_aliases_resolve(t):
    n = t.network()
    a = t.run("sh -c 'echo hi >/tmp/x; exec httpd -f -h /tmp'")
    n.connect(a, aliases=["server"])
    equal(a.exec_run("sh -c 'until wget -q -O - http://127.0.0.1/x; do sleep 0.1; done'").exit_code, 0)
    b = t.run(network=n.name)
    equal(b.exec_run("wget -q -O - http://server/x").output, b"hi\n")


@case
def network_connect_links(t):
    n, a = t.network(), t.run()
    n.connect(a)
    b = t.run()
    n.connect(b, links=[(a.name, "linked")])


@case
def network_remove(t):
    n = t.client.networks.create(t.name("n"))
    n.remove()
    raises(docker.errors.NotFound, n.reload)


@case
def network_remove_in_use(t):
    n = t.network()
    t.run(network=n.name)
    equal(raises(docker.errors.APIError, n.remove).status_code, 403)


@case
def network_prune(t):
    n = t.network()
    within(n.name, t.client.networks.prune()["NetworksDeleted"])


@case
def network_ipv6(t):
    ipam = IPAMConfig(pool_configs=[IPAMPool(subnet="fd00:7::/64")])
    n = t.network(enable_ipv6=True, ipam=ipam)
    n.reload()
    equal(n.attrs["EnableIPv6"], True)


@case
def volume_create(t):
    name = t.name("v")
    v = t.client.volumes.create(name=name, driver="local", labels={"k": "v"})
    t.undo(v.remove)
    equal((v.name, v.attrs["Driver"], v.attrs["Labels"]), (name, "local", {"k": "v"}))


@case
def volume_create_anonymous(t):
    v = t.client.volumes.create()
    t.undo(v.remove)
    equal(len(v.name), 64)


@case
def volume_create_twice(t):
    v = t.volume()
    equal(t.client.volumes.create(name=v.name).name, v.name)


@case
def volume_create_invalid(t):
    equal(raises(docker.errors.APIError, t.client.volumes.create, name="with/slash").status_code, 400)


@case
def volume_create_unknown_driver(t):
    raises(docker.errors.APIError, t.client.volumes.create, name=t.name("v"), driver="missing")


@case
def volume_get(t):
    v = t.volume()
    equal(t.client.volumes.get(v.id).attrs["Mountpoint"] != "", True)


@case
def volume_get_missing(t):
    raises(docker.errors.NotFound, t.client.volumes.get, "missing")


@case
def volume_list(t):
    v = t.volume(labels={"k": "v"})
    within(v.name, [x.name for x in t.client.volumes.list()])
    for f in ({"name": v.name}, {"label": "k=v"}, {"dangling": True, "name": v.name}):
        equal([x.name for x in t.client.volumes.list(filters=f)], [v.name])


@case
def volume_remove(t):
    v = t.client.volumes.create(t.name("v"))
    v.remove()
    raises(docker.errors.NotFound, v.reload)


@case
def volume_remove_in_use(t):
    v = t.volume()
    t.create(volumes={v.name: {"bind": "/data"}})
    equal(raises(docker.errors.APIError, v.remove).status_code, 409)


@case
def volume_remove_force(t):
    v = t.volume()
    t.api.remove_volume(v.name, force=True)
    raises(docker.errors.NotFound, v.reload)


@case
def volume_prune(t):
    v = t.volume()
    pruned = t.client.volumes.prune(filters={"all": "true"} if docker.utils.version_gte(t.api.version()["ApiVersion"], "1.42") else None)
    within(v.name, pruned["VolumesDeleted"])


@case
def volume_keeps_data(t):
    v = t.volume()
    mounts = {v.name: {"bind": "/data", "mode": "rw"}}
    t.output("sh -c 'echo kept > /data/x'", volumes=mounts)
    equal(t.output("cat /data/x", volumes={v.name: {"bind": "/data", "mode": "ro"}}), "kept")


@case
def events_container(t):
    stream = t.client.events(decode=True, filters={"type": "container"})
    c = t.run("true")
    c.wait()
    seen = []
    for event in stream:
        if event["Actor"]["ID"] == c.id:
            seen.append(event["Action"])
            if event["Action"] == "die":
                break
    stream.close()
    equal(seen[:2] + seen[-1:], ["create", "attach", "die"] if "attach" in seen else ["create", "start", "die"])


@case
def events_since_until(t):
    since = time.time()
    c = t.run("true")
    c.wait()
    now = datetime.datetime.utcfromtimestamp(time.time() + 1)
    events = list(t.api.events(since=int(since), until=now, decode=True, filters={"container": c.id, "event": ["create", "die"]}))
    equal([e["Action"] for e in events], ["create", "die"])


@case
def events_undecoded(t):
    since = int(time.time())
    c = t.create()
    until = int(time.time()) + 1
    within(c.id.encode(), b"".join(t.api.events(since=since, until=until)))


@case
def events_network_and_volume(t):
    stream = t.client.events(decode=True, filters={"type": ["network", "volume"]})
    v = t.volume()
    got = next(stream)
    equal((got["Type"], got["Action"], got["Actor"]["ID"]), ("volume", "create", v.name))
    stream.close()


@case
def events_label(t):
    stream = t.client.events(decode=True, filters={"label": "mine"})
    c = t.create(labels={"mine": "1"})
    equal(next(stream)["Actor"]["ID"], c.id)
    stream.close()


@case
def events_closed_by_client(t):
    stream = t.client.events(decode=True)
    timer = threading.Timer(0.5, stream.close)
    timer.start()
    for _ in stream:
        pass
    timer.join()


@case
def system_ping(t):
    equal(t.client.ping(), True)


@case
def system_version(t):
    version = t.client.version()
    for key in ("Version", "ApiVersion", "MinAPIVersion", "Os", "Arch", "GoVersion", "GitCommit", "KernelVersion", "Components"):
        within(key, version)
    t.client.api.version(api_version=False)


@case
def system_info(t):
    info = t.client.info()
    for key in ("ID", "Containers", "ContainersRunning", "Images", "Driver", "OSType", "NCPU", "MemTotal", "ServerVersion", "OperatingSystem",
                "Name", "DockerRootDir", "Swarm", "Plugins", "Runtimes", "DefaultRuntime", "SecurityOptions", "RegistryConfig", "Labels"):
        within(key, info)


@case
def system_df(t):
    df = t.client.df()
    for key in ("LayersSize", "Images", "Containers", "Volumes", "BuildCache"):
        within(key, df)


@case
def system_auto_version(t):
    c = docker.APIClient(base_url=os.environ["DOCKER_HOST"], version="auto")
    equal(c.ping(), True)
    c.close()


@case
def system_old_version(t):
    minimum = t.api.version()["MinAPIVersion"]
    c = docker.APIClient(base_url=os.environ["DOCKER_HOST"], version=max(minimum, "1.21") if minimum.count(".") == 1 else minimum)
    equal(c.version()["ApiVersion"] != "", True)
    c.close()


@case
def system_future_version(t):
    c = docker.APIClient(base_url=os.environ["DOCKER_HOST"], version="1.99")
    e = raises(docker.errors.APIError, c.containers)
    equal(e.status_code, 400)
    within("too new", str(e))
    c.close()
