"""Cases of images, registries, networks and volumes."""

import base64
import json
import os

from tap import case, equal, unique, within
from wire import IMAGE, context

HELLO = os.environ["HELLO"]  # an image of the registry
REGISTRY = os.environ["REGISTRY"]  # wants credentials, and takes any


def auth(**fields):
    return {"X-Registry-Auth": base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()}


def build(t, tag, *lines, **query):
    t.undo("DELETE", "/images/" + tag, force="true")
    data = context(Dockerfile="\n".join(("FROM " + IMAGE,) + lines), x="copied")
    answer = t.call("POST", "/build", data, {"Content-Type": "application/x-tar", "X-Registry-Config": base64.urlsafe_b64encode(b"{}").decode()}, chunked=True, t=tag, **query)
    return "".join(line.get("stream", "") + line.get("error", "") for line in answer.lines())


@case
def images(t):
    within(IMAGE, [tag for i in t.get("/images/json") for tag in i["RepoTags"] or []])
    for filters in ({"dangling": ["false"]}, {"dangling": {"false": True}}, {"reference": [IMAGE]}):
        within(IMAGE, str(t.get("/images/json", all="0", filters=filters)))
    equal(t.get("/images/json", all="true", filters={"reference": ["missing:*"]}), [])


@case
def image_inspect(t):
    i = t.get("/images/%s/json" % IMAGE)
    within(IMAGE, i["RepoTags"])
    for field in ("Id", "Created", "Architecture", "Os", "Size", "RootFS", "Config"):
        within(field, i)
    equal(t.get("/images/%s/json" % i["Id"])["Id"], i["Id"])
    within("CreatedBy", t.get("/images/%s/history" % IMAGE)[0])


@case
def pull(t):
    t.undo("DELETE", "/images/%s:1" % HELLO, force="true")
    lines = t.post("/images/create", fromImage=HELLO, tag="1").lines()
    within("Pulling from", lines[0]["status"])
    within("Digest", str(lines))
    equal([line for line in lines if "error" in line], [])
    within(HELLO + ":1", t.get("/images/%s:1/json" % HELLO)["RepoTags"])


@case
def pull_of_java(t):
    t.undo("DELETE", "/images/%s:1" % HELLO, force="true")
    t.call("POST", "/images/create", b"", auth(username="u", password="p", serveraddress=HELLO.split("/")[0]), fromImage=HELLO, tag="1", platform="linux/amd64")


@case
def pull_of_what_is_not_there(t):
    a = t.post("/images/create", fromImage=HELLO, tag="missing", want=range(600))
    within("not found", a.text)


@case
def login(t):
    a = t.post("/auth", {"username": "u", "password": "p", "email": "", "serveraddress": REGISTRY})
    equal(a.json()["Status"], "Login Succeeded")


@case
def login_with_a_password(t):
    equal(t.post("/auth", {"username": "user", "password": "password", "serveraddress": os.environ["LOGIN"]}).json()["Status"], "Login Succeeded")
    t.post("/auth", {"username": "user", "password": "wrong", "serveraddress": os.environ["LOGIN"]}, want=[401, 500])


@case
def push(t):
    name = "%s/py/ide" % REGISTRY
    build(t, name + ":1", "RUN echo pushed >/x")
    lines = t.call("POST", "/images/%s/push" % name, b"", auth(username="u", password="p"), tag="1").lines()
    equal([line for line in lines if "error" in line], [])
    within("digest", str(lines))
    within("Descriptor", t.get("/distribution/%s:1/json" % name))


@case
def build_by_chunks(t):
    tag = "langs.local/py/%s:1" % unique("ide")
    within("Successfully built", build(t, tag, "COPY x /x", "ARG A", 'LABEL a="$A"', dockerfile="Dockerfile", rm="true", buildargs={"A": "given"}, labels={"k": "v"}, q="false", nocache="false"))
    equal(t.get("/images/%s/json" % tag)["Config"]["Labels"], {"a": "given", "k": "v"})


@case
def build_that_fails(t):
    within("non-zero code: 3", build(t, "langs.local/py/fails:1", "RUN exit 3", forcerm="true"))


@case
def image_tag_and_remove(t):
    tag = "langs.local/py/tagged"
    build(t, tag + ":1", "RUN echo tagged >/x")
    t.undo("DELETE", "/images/%s:2" % tag, force="true")
    t.call("POST", "/images/%s:1/tag" % tag, want=[201], repo=tag, tag="2", force="0")
    within({"Untagged": tag + ":2"}, t.call("DELETE", "/images/%s:2" % tag, force="true", noprune="true").json())


@case
def image_save_and_load(t):
    tag = "langs.local/py/saved:1"
    build(t, tag, "RUN echo saved >/x")
    data = t.call("GET", "/images/get", names=tag).body
    t.call("DELETE", "/images/" + tag, force="true")
    a = t.call("POST", "/images/load", data, {"Content-Type": "application/x-tar"}, chunked=True, quiet="1")
    within("Loaded image", a.text)
    t.get("/images/%s/json" % tag)


@case
def commit(t):
    name, tag = t.run(["touch", "/made"]), "langs.local/py/committed"
    t.post("/containers/%s/wait" % name)
    t.undo("DELETE", "/images/%s:1" % tag, force="true")
    body = {"Cmd": ["ls", "/made"], "Env": ["A=b"], "ExposedPorts": {}, "Volumes": {}, "OpenStdin": False, "Tty": False, "User": "", "WorkingDir": ""}
    within("Id", t.post("/commit", body, container=name, repo=tag, tag="1", comment="c", author="a", pause="1").json())
    equal(t.get("/images/%s:1/json" % tag)["Config"]["Cmd"], ["ls", "/made"])


@case
def prune_images(t):
    for filters in ({"dangling": ["true"]}, {"dangling": {"true": True}}):
        within("SpaceReclaimed", t.post("/images/prune", filters=filters).json())
    within("SpaceReclaimed", t.post("/build/prune").json())


@case
def networks(t):
    name = unique("ide")
    made = t.post("/networks/create", {"Name": name, "CheckDuplicate": True, "Driver": "bridge", "Internal": False, "Attachable": False, "EnableIPv6": False, "IPAM": {"Driver": "default", "Config": []}, "Options": {}, "Labels": {"k": "v"}}).json()
    t.undo("DELETE", "/networks/" + name)
    within("Warning", made)
    n = t.get("/networks/" + made["Id"], verbose="false", scope="local")
    equal((n["Name"], n["Driver"], n["Scope"], n["Labels"]), (name, "bridge", "local", {"k": "v"}))
    for filters in ({"name": [name]}, {"id": [made["Id"]]}, {"label": ["k=v"], "driver": ["bridge"]}, {"type": ["custom"]}):
        within(name, [n["Name"] for n in t.get("/networks", filters=filters)])
    for builtin in ("bridge", "host", "none"):
        within(builtin, [n["Name"] for n in t.get("/networks")])
        equal(t.get("/networks/" + builtin)["Name"], builtin)


@case
def network_connect(t):
    name, c = unique("ide"), t.run()
    t.post("/networks/create", {"Name": name})
    t.undo("DELETE", "/networks/" + name)
    t.post("/networks/%s/connect" % name, {"Container": c, "EndpointConfig": {"Aliases": ["alias"], "IPAMConfig": None, "Links": None}})
    within("alias", t.get("/containers/%s/json" % c)["NetworkSettings"]["Networks"][name]["Aliases"])
    equal([v["Name"] for v in t.get("/networks/" + name)["Containers"].values()], [c])
    t.post("/networks/%s/disconnect" % name, {"Container": c, "Force": True})


@case
def volumes(t):
    name = unique("ide")
    made = t.post("/volumes/create", {"Name": name, "Driver": "local", "DriverOpts": {}, "Labels": {"k": "v"}}).json()
    t.undo("DELETE", "/volumes/" + name)
    equal((made["Name"], made["Driver"], made["Labels"], made["Scope"]), (name, "local", {"k": "v"}, "local"))
    equal(t.get("/volumes/" + name)["Mountpoint"], made["Mountpoint"])
    for filters in ({"name": [name]}, {"label": ["k=v"]}, {"dangling": ["true"], "driver": ["local"]}, {"name": {name: True}}):
        found = t.get("/volumes", filters=filters)
        within(name, [v["Name"] for v in found["Volumes"]])
    within("Warnings", found)
    t.call("DELETE", "/volumes/" + name, want=[204], force="false")


@case
def volume_of_a_container(t):
    name = unique("ide")
    t.undo("DELETE", "/volumes/" + name, force="1")
    c = t.run(host={"Binds": [name + ":/data:rw"]})
    m = t.get("/containers/%s/json" % c)["Mounts"][0]
    equal((m["Type"], m["Name"], m["Destination"], m["RW"]), ("volume", name, "/data", True))
    within(name, str(t.get("/containers/json", filters={"volume": [name]})))
    within("in use", t.call("DELETE", "/volumes/" + name, want=[409]).text)


@case
def prune_volumes_and_networks(t):
    within("SpaceReclaimed", t.post("/volumes/prune", filters={"label": ["missing"]}).json())
    t.post("/networks/prune", filters={"label": ["missing"]})
