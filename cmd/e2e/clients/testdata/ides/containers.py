"""Cases of containers and of the engine itself."""

import contextlib
import json
import re

from tap import case, equal, refused, unique, within
from wire import IMAGE, WEB, Connection


@case
def ping(t):
    a = t.call("GET", "/_ping")
    equal((a.text, a.headers["Ostype"]), ("OK", "linux"))
    within("Api-Version", a.headers)


@case
def ping_head(t):
    a = t.call("HEAD", "/_ping")
    equal(a.body, b"")
    within("Api-Version", a.headers)


@case
def paths_of_versions(t):
    engine = t.get("/version")
    number = lambda v: tuple(int(n) for n in v.split("."))
    for minor in range(24, 44):
        v = "1.%d" % minor
        good = number(engine["MinAPIVersion"]) <= number(v) <= number(engine["ApiVersion"])
        a = t.call("GET", "/v%s/containers/json" % v, all="1", want=[200, 400])
        equal((v, a.status), (v, 200 if good else 400))
        if not good:
            within("message", a.json())


@case
def version(t):
    v = t.get("/version")
    for field in ("Version", "ApiVersion", "MinAPIVersion", "Os", "Arch", "KernelVersion", "Components"):
        within(field, v)


@case
def info(t):
    i = t.get("/info")
    for field in ("ServerVersion", "OSType", "Architecture", "NCPU", "MemTotal", "Name", "Containers", "Images", "Driver", "SecurityOptions"):
        within(field, i)
    within("Swarm", i)


@case
def hosts(t):
    for host in ("localhost", "localhost:2375", "docker", "docker.sock", "api.moby.localhost", "127.0.0.1:0", ""):
        t.call("GET", "/containers/json", headers={"Host": host})


@case
def headers_of_java(t):
    a = t.call("GET", "/info", headers={"Accept": "application/json", "Accept-Encoding": "gzip, x-gzip, deflate", "User-Agent": "docker-java", "Connection": "keep-alive"})
    within("ServerVersion", a.json())


@case
def one_connection(t):
    with contextlib.closing(Connection()) as c:
        for path, status in (("/info", 200), ("/containers/missing/json", 404), ("/containers/json", 200)):
            c.request("GET", path)
            r = c.getresponse()
            r.read()
            equal((path, r.status), (path, status))


@case
def nodes_of_swarm(t):
    for path in ("/services", "/swarm", "/nodes", "/secrets", "/configs", "/tasks"):
        within("message", t.call("GET", path, want=[503]).json())


@case
def plugins(t):
    equal(t.get("/plugins"), [])


@case
def disk_usage(t):
    for field in ("Images", "Containers", "Volumes", "BuildCache"):
        within(field, t.get("/system/df"))


@case
def containers_with_filters(t):
    label = unique("label")
    name = t.run(Labels={"devcontainer.local_folder": label})
    for filters in (
        {"label": ["devcontainer.local_folder=" + label]},
        {"label": {"devcontainer.local_folder=" + label: True}},
        {"name": [name], "status": ["running"]},
        {"name": ["^/" + name + "$"]},
        {"ancestor": [IMAGE], "label": ["devcontainer.local_folder=" + label]},
        {"status": ["created", "running"], "label": ["devcontainer.local_folder=" + label]},
    ):
        found = t.get("/containers/json", all="1", filters=filters)
        equal([c["Names"] for c in found], [["/" + name]])
    equal(t.get("/containers/json", filters={"label": ["devcontainer.local_folder=missing"]}), [])


@case
def containers_of_java(t):
    name = t.run()
    found = t.get("/containers/json", all="true", limit="-1", size="true")
    c = [c for c in found if c["Names"] == ["/" + name]][0]
    within("SizeRootFs", c)
    equal((c["State"], c["Image"]), ("running", IMAGE))
    within("NetworkSettings", c)


@case
def container_inspect(t):
    name = t.run(Labels={"a": "b"}, Env=["A=b"])
    c = t.get("/containers/%s/json" % name, size="1")
    within("SizeRw", c)
    equal((c["Name"], c["State"]["Status"], c["Config"]["Labels"], c["Config"]["Image"]), ("/" + name, "running", {"a": "b"}, IMAGE))
    within("A=b", c["Config"]["Env"])
    for field in ("Created", "Path", "Args", "Image", "HostConfig", "Mounts", "NetworkSettings", "RestartCount", "Platform"):
        within(field, c)


@case
def create_of_java(t):
    name = t.create(
        Hostname="h", Domainname="", User="", AttachStdin=False, AttachStdout=False, AttachStderr=False, PortSpecs=None, Tty=False, OpenStdin=False, StdinOnce=False,
        Env=["A=b"], ArgsEscaped=None, Entrypoint=None, Volumes={}, WorkingDir="", MacAddress=None, OnBuild=None, NetworkDisabled=None, ExposedPorts={"8080/tcp": {}}, StopSignal=None,
        StopTimeout=None, Labels={}, Shell=None, NetworkingConfig=None, Healthcheck=None,
        host={
            "Binds": [], "BlkioWeight": None, "BlkioWeightDevice": None, "MemorySwappiness": None, "NanoCpus": None, "CapAdd": None, "CapDrop": None, "ContainerIDFile": "", "CpuPeriod": None,
            "CpuRealtimePeriod": None, "CpuRealtimeRuntime": None, "CpuShares": None, "CpuQuota": None, "CpusetCpus": None, "CpusetMems": None, "Devices": None, "DeviceCgroupRules": None,
            "DeviceRequests": None, "DiskQuota": None, "Dns": None, "DnsOptions": None, "DnsSearch": None, "ExtraHosts": None, "GroupAdd": None, "IpcMode": None, "Cgroup": None, "Links": [],
            "LogConfig": {"Type": "json-file", "Config": {}}, "LxcConf": None, "Memory": 67108864, "MemorySwap": None, "MemoryReservation": None, "KernelMemory": None, "NetworkMode": None,
            "OomKillDisable": None, "Init": None, "AutoRemove": False, "OomScoreAdj": None, "PortBindings": {"8080/tcp": [{"HostIp": "", "HostPort": ""}]}, "Privileged": False,
            "PublishAllPorts": False, "ReadonlyRootfs": False, "RestartPolicy": {"MaximumRetryCount": 0, "Name": ""}, "Ulimits": None, "CpuCount": None, "CpuPercent": None, "IOMaximumIOps": None,
            "IOMaximumBandwidth": None, "VolumesFrom": [], "Mounts": None, "PidMode": None, "Isolation": None, "SecurityOpt": None, "StorageOpt": None, "CgroupParent": None, "VolumeDriver": None,
            "ShmSize": None, "PidsLimit": None, "Runtime": None, "Tmpfs": None, "UTSMode": None, "UsernsMode": None, "Sysctls": None, "ConsoleSize": None, "CgroupnsMode": None,
        },
    )
    t.post("/containers/%s/start" % name)
    equal(t.get("/containers/%s/json" % name)["Config"]["Hostname"], "h")


@case
def create_by_chunks(t):
    name = unique("ide")
    t.undo("DELETE", "/containers/" + name, force="1")
    body = json.dumps({"Image": IMAGE, "Cmd": ["true"]}).encode()
    within("Id", t.call("POST", "/containers/create", body, {"Content-Type": "application/json"}, chunked=True, name=name).json())


@case
def create_of_dev_containers(t):
    command = 'echo Container started\ntrap "exit 0" 15\n\nexec "$@"\nwhile sleep 1 & wait $!; do :; done'
    name = t.create(
        ["-c", command, "-"], Entrypoint=["/bin/sh"], AttachStdout=True, AttachStderr=True, Labels={"devcontainer.local_folder": "/w", "devcontainer.metadata": '[{"remoteUser":"root"}]'}, User="root", Env=["HOME=/root"],
        host={"Init": True, "Mounts": [{"Type": "volume", "Source": "vscode", "Target": "/vscode"}], "NetworkMode": "default", "ConsoleSize": [0, 0], "LogConfig": {"Type": "", "Config": {}}},
    )
    t.undo("DELETE", "/volumes/vscode", force="1")
    h = t.hijack("POST", "/containers/%s/attach?stderr=1&stdout=1&stream=1" % name)
    t.post("/containers/%s/start" % name)
    within(b"Container started", h.until(b"started\n"))
    t.post("/containers/%s/stop" % name, t="5")
    equal(t.get("/containers/%s/json" % name)["State"]["ExitCode"], 0)


@refused
def create_privileged(t):
    t.create(host={"Privileged": True})


@refused
def create_with_all_capabilities(t):
    t.create(host={"CapAdd": ["SYS_PTRACE"], "SecurityOpt": ["seccomp=unconfined"]})


@case
def life(t):
    name = t.create()
    path = "/containers/" + name
    t.call("POST", path + "/start", want=[204])
    t.call("POST", path + "/start", want=[304])
    t.post(path + "/pause")
    equal(t.get(path + "/json")["State"]["Paused"], True)
    t.post(path + "/unpause")
    t.post(path + "/restart", t="0")
    t.post(path + "/rename", name=name + "-renamed")
    t.post("/containers/%s-renamed/rename" % name, name=name)
    t.post(path + "/kill", signal="SIGKILL")
    equal(t.post(path + "/wait", condition="not-running").json()["StatusCode"], 137)
    t.call("POST", path + "/stop", want=[304], t="1")
    t.call("DELETE", path, want=[204], v="true", force="false")
    within("No such container", t.call("GET", path + "/json", want=[404]).json()["message"])


@case
def names_that_conflict(t):
    name = t.create()
    within("Conflict", t.post("/containers/create", {"Image": IMAGE}, name=name, want=[409]).json()["message"])


@case
def errors(t):
    for method, path, body, status in (
        ("GET", "/containers/missing/json", None, 404), ("POST", "/containers/missing/start", None, 404), ("GET", "/images/missing/json", None, 404), ("GET", "/networks/missing", None, 404),
        ("GET", "/volumes/missing", None, 404), ("POST", "/containers/create", {"Image": "missing"}, 404), ("GET", "/exec/missing/json", None, 404),
    ):
        a = t.call(method, path, body, {"Content-Type": "application/json"}, want=range(600))
        equal((path, a.status), (path, status))
        within("message", a.json())


@case
def ports(t):
    name = t.run(WEB, ExposedPorts={"8080/tcp": {}}, host={"PortBindings": {"8080/tcp": [{"HostPort": "0"}]}})
    bound = t.get("/containers/%s/json" % name)["NetworkSettings"]["Ports"]["8080/tcp"]
    within(int(bound[0]["HostPort"]), range(1, 65536))
    listed = [c for c in t.get("/containers/json") if c["Names"] == ["/" + name]][0]["Ports"]
    equal((listed[0]["PrivatePort"], listed[0]["PublicPort"], listed[0]["Type"]), (8080, int(bound[0]["HostPort"]), "tcp"))


@case
def processes(t):
    name = t.run()
    top = t.get("/containers/%s/top" % name, ps_args="-ef")
    within("sleep 300", str(top["Processes"]))
    within("PID", top["Titles"])


@case
def changes(t):
    name = t.run(["sh", "-c", "touch /made; sleep 300"])
    t.output(name, "sh", "-c", "until test -e /made; do :; done")
    within({"Path": "/made", "Kind": 1}, t.get("/containers/%s/changes" % name))


@case
def update(t):
    name = t.run()
    within("Warnings", t.post("/containers/%s/update" % name, {"Memory": 100 << 20, "MemorySwap": 100 << 20}).json())
    equal(t.get("/containers/%s/json" % name)["HostConfig"]["Memory"], 100 << 20)


@case
def stats_once(t):
    s = t.get("/containers/%s/stats" % t.run(), stream="false")
    within("memory_stats", s)
    equal(len(re.findall("total_usage", json.dumps(s))), 2)


@case
def prune_containers(t):
    label = unique("prune")
    name = t.create(Labels={label: "1"})
    gone = t.post("/containers/prune", filters={"label": [label]}).json()
    equal(len(gone["ContainersDeleted"]), 1)
    t.call("GET", "/containers/%s/json" % name, want=[404])
