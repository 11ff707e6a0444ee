"""Cases of images: the collection, builds, registries."""

import io
import os
import tarfile
import tempfile

import docker

from fixture import IMAGE
from tap import case, equal, raises, refused, within

REGISTRY = os.environ.get("REGISTRY", "")  # address of a registry on loopback


def dockerfile(*lines):
    return io.BytesIO("\n".join(("FROM " + IMAGE,) + lines).encode())


def context(files, mode="w"):
    """context is an archive of files."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=mode) as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    data.seek(0)
    return data


def build(t, *args, **options):
    image, _ = t.client.images.build(*args, rm=True, forcerm=True, **options)
    t.image(image.id)
    return image


@case
def image_get(t):
    image = t.client.images.get(IMAGE)
    within(IMAGE, image.tags)
    for key in (image.id, image.id.split(":")[1], image.short_id.split(":")[-1]):
        equal(t.client.images.get(key).id, image.id)


@case
def image_get_missing(t):
    e = raises(docker.errors.ImageNotFound, t.client.images.get, IMAGE + "missing")
    within("No such image", str(e))


@case
def image_inspect_fields(t):
    got = t.api.inspect_image(IMAGE)
    for key in ("Id", "RepoTags", "RepoDigests", "Created", "Config", "Architecture", "Os", "Size", "RootFS", "GraphDriver"):
        within(key, got)


@case
def image_list(t):
    image = t.client.images.get(IMAGE)
    repository = IMAGE.rsplit(":", 1)[0]
    within(image.id, [x.id for x in t.client.images.list()])
    within(image.id, [x.id for x in t.client.images.list(all=True)])
    within(image.id, [x.id for x in t.client.images.list(name=repository)])
    within(image.id, [x.id for x in t.client.images.list(filters={"reference": repository, "dangling": False})])


@case
def image_list_quiet(t):
    within(t.client.images.get(IMAGE).id, t.api.images(quiet=True))


@case
def image_history(t):
    equal(len(t.client.images.get(IMAGE).history()) > 0, True)


@case
def image_tag(t):
    image = t.client.images.get(IMAGE)
    equal(image.tag("langs.local/py/tagged", tag="one"), True)
    t.image("langs.local/py/tagged:one")
    within("langs.local/py/tagged:one", t.client.images.get(IMAGE).tags)


@case
def image_tag_force(t):
    equal(t.api.tag(IMAGE, "langs.local/py/tagged", "two", force=True), True)
    t.image("langs.local/py/tagged:two")


@case
def image_remove_tag(t):
    t.api.tag(IMAGE, "langs.local/py/untag", "one")
    t.client.images.remove("langs.local/py/untag:one")
    raises(docker.errors.ImageNotFound, t.client.images.get, "langs.local/py/untag:one")


@case
def image_remove(t):
    image = build(t, fileobj=dockerfile("RUN echo remove > /x"))
    t.client.images.remove(image.id, force=True, noprune=False)
    raises(docker.errors.ImageNotFound, t.client.images.get, image.id)


@case
def image_remove_missing(t):
    raises(docker.errors.ImageNotFound, t.client.images.remove, "langs.local/py/missing")


@case
def image_save_load(t):
    image = build(t, fileobj=dockerfile("RUN echo save > /x"), tag="langs.local/py/save:one")
    data = b"".join(image.save(named=True))
    t.client.images.remove(image.id, force=True)
    loaded = t.client.images.load(data)
    equal([x.id for x in loaded], [image.id])


@case
def image_save_by_id(t):
    image = t.client.images.get(IMAGE)
    within("manifest.json", tarfile.open(fileobj=io.BytesIO(b"".join(image.save()))).getnames())


@case
def image_get_image(t):
    data = b"".join(t.api.get_image(IMAGE))
    within("manifest.json", tarfile.open(fileobj=io.BytesIO(data)).getnames())


@case
def image_load_invalid(t):
    e = raises((docker.errors.APIError, docker.errors.ImageLoadError), t.client.images.load, b"nonsense")
    equal(getattr(e, "status_code", None) in (None, 400, 403, 500), True)


@case
def image_prune(t):
    build(t, fileobj=dockerfile("RUN echo prune > /x"))
    within("SpaceReclaimed", t.client.images.prune(filters={"dangling": True}))


@case
def image_prune_builds(t):
    within("SpaceReclaimed", t.client.images.prune_builds())


@case
def image_pull_missing(t):
    raises((docker.errors.APIError), t.client.images.pull, REGISTRY + "/missing" if REGISTRY else "localhost:1/missing", tag="x")


@case
def build_fileobj(t):
    image = build(t, fileobj=dockerfile("RUN echo built > /x", 'CMD ["cat", "/x"]'))
    equal(t.client.containers.run(image, remove=True), b"built\n")


@case
def build_path(t):
    with tempfile.TemporaryDirectory() as d:
        with open(d + "/Dockerfile", "w") as f:
            f.write("FROM %s\nCOPY a /a\nCMD cat /a\n" % IMAGE)
        with open(d + "/a", "w") as f:
            f.write("from a\n")
        with open(d + "/.dockerignore", "w") as f:
            f.write("b\n")
        with open(d + "/b", "w") as f:
            f.write("b")
        image = build(t, path=d)
    equal(t.client.containers.run(image, remove=True), b"from a\n")


@case
def build_path_dockerfile(t):
    with tempfile.TemporaryDirectory() as d:
        os.mkdir(d + "/sub")
        with open(d + "/sub/File", "w") as f:
            f.write("FROM %s\nCMD echo sub\n" % IMAGE)
        image = build(t, path=d, dockerfile="sub/File")
    equal(t.client.containers.run(image, remove=True), b"sub\n")


@case
def build_path_dockerfile_outside(t):
    with tempfile.TemporaryDirectory() as d, tempfile.NamedTemporaryFile("w") as f:
        f.write("FROM %s\nCMD echo outside\n" % IMAGE)
        f.flush()
        image = build(t, path=d, dockerfile=f.name)
    equal(t.client.containers.run(image, remove=True), b"outside\n")


@case
def build_path_gzip(t):
    with tempfile.TemporaryDirectory() as d:
        with open(d + "/Dockerfile", "w") as f:
            f.write("FROM %s\nCMD echo gzip\n" % IMAGE)
        image = build(t, path=d, gzip=True)
    equal(t.client.containers.run(image, remove=True), b"gzip\n")


@case
def build_custom_context(t):
    data = context({"Dockerfile": dockerfile("COPY a /a").read(), "a": b"x"})
    build(t, fileobj=data, custom_context=True)


@case
def build_custom_context_gzip(t):
    data = context({"Dockerfile": dockerfile("COPY a /a").read(), "a": b"x"}, "w:gz")
    build(t, fileobj=data, custom_context=True, encoding="gzip")


@case
def build_custom_context_compressed(t):
    for mode, encoding in (("w:bz2", "bzip2"), ("w:xz", "xz")):
        data = context({"Dockerfile": dockerfile("COPY a /a").read(), "a": b"x"}, mode)
        build(t, fileobj=data, custom_context=True, encoding=encoding)


@case
def build_tag(t):
    image = build(t, fileobj=dockerfile("RUN true"), tag="langs.local/py/built:one")
    within("langs.local/py/built:one", image.tags)


@case
def build_args(t):
    image = build(t, fileobj=dockerfile("ARG A=1", "RUN echo $A > /x", "CMD cat /x"), buildargs={"A": "2"})
    equal(t.client.containers.run(image, remove=True), b"2\n")


@case
def build_labels(t):
    equal(build(t, fileobj=dockerfile(), labels={"one": "1"}).labels["one"], "1")


@case
def build_labels_exact(t):
    equal(build(t, fileobj=dockerfile(), labels={"one": "1"}).labels, {"one": "1"})


@case
def build_target(t):
    image = build(t, fileobj=dockerfile("RUN echo", "FROM %s AS two" % IMAGE, "CMD echo two", "FROM " + IMAGE), target="two")
    equal(t.client.containers.run(image, remove=True), b"two\n")


@case
def build_stages(t):
    image = build(t, fileobj=io.BytesIO(("FROM %s AS one\nRUN echo one > /one\nFROM %s\nCOPY --from=one /one /\nCMD cat /one" % (IMAGE, IMAGE)).encode()))
    equal(t.client.containers.run(image, remove=True), b"one\n")


@case
def build_limits(t):
    build(t, fileobj=dockerfile("RUN true"), container_limits={"memory": 128 << 20, "memswap": 128 << 20, "cpushares": 100, "cpusetcpus": "0"})


@case
def build_shmsize(t):
    build(t, fileobj=dockerfile("RUN df /dev/shm"), shmsize=32 << 20)


@case
def build_network_none(t):
    build(t, fileobj=dockerfile("RUN true"), network_mode="none")


@case
def build_cache_from(t):
    build(t, fileobj=dockerfile("RUN echo cached > /x"), tag="langs.local/py/cache:one")
    lines = list(t.api.build(fileobj=dockerfile("RUN echo cached > /x"), cache_from=["langs.local/py/cache:one"], decode=True))
    t.image([line["aux"]["ID"] for line in lines if "aux" in line][-1])
    within("Using cache", str(lines))


@case
def build_nocache_pull_quiet(t):
    build(t, fileobj=dockerfile("RUN true"), nocache=True, pull=False, quiet=False)


@case
def build_squash_off_extra_hosts(t):
    build(t, fileobj=dockerfile("RUN grep extra /etc/hosts"), extra_hosts={"extra": "192.0.2.7"}, squash=False)


@case
def build_isolation_platform(t):
    build(t, fileobj=dockerfile("RUN true"), isolation="default", platform="linux/amd64")


@case
def build_error(t):
    e = raises(docker.errors.BuildError, t.client.images.build, fileobj=dockerfile("RUN exit 3"), rm=True, forcerm=True)
    within("returned a non-zero code: 3", str(e))


@case
def build_syntax_error(t):
    raises((docker.errors.BuildError, docker.errors.APIError), t.client.images.build, fileobj=dockerfile("NONSENSE"), rm=True)


@case
def build_low_level_stream(t):
    lines = list(t.api.build(fileobj=dockerfile("RUN echo streamed"), decode=True, rm=True, forcerm=True))
    within("streamed", "".join(x.get("stream", "") for x in lines))
    t.image(next(x["aux"]["ID"] for x in lines if "aux" in x))


@case
def build_onbuild_and_more(t):
    build(t, fileobj=dockerfile("ENV A=b", "WORKDIR /w", "USER 1000", "EXPOSE 80", "VOLUME /data", "STOPSIGNAL SIGINT", "HEALTHCHECK CMD true",
                                'ENTRYPOINT ["sh"]', "LABEL a=b", "SHELL [\"/bin/sh\", \"-c\"]"))


@case
def commit_low_level(t):
    c = t.run("touch /low")
    c.wait()
    id = t.api.commit(c.id, repository="langs.local/py/low", tag="one")["Id"]
    t.image(id)
    equal(t.api.inspect_image(id)["Parent"] in ("", t.client.images.get(IMAGE).id), True)


@case
def commit_changes(t):
    c = t.run("true")
    c.wait()
    id = t.api.commit(c.id, changes="CMD [\"echo\", \"changed\"]\nLABEL a=b")["Id"]
    t.image(id)
    equal(t.client.containers.run(id, remove=True), b"changed\n")


@case
def push_and_pull(t):
    if not REGISTRY:
        return
    name = REGISTRY + "/py/pushed"
    image = build(t, fileobj=dockerfile("RUN echo pushed > /x", "CMD cat /x"), tag=name + ":one")
    lines = list(t.client.images.push(name, tag="one", stream=True, decode=True))
    equal([x["error"] for x in lines if "error" in x], [])
    t.client.images.remove(image.id, force=True)
    pulled = t.client.images.pull(name, tag="one")
    t.image(pulled.id)
    equal(t.client.containers.run(pulled, remove=True), b"pushed\n")


@case
def push_auth_config(t):
    if not REGISTRY:
        return
    name = REGISTRY + "/py/auth"
    build(t, fileobj=dockerfile("RUN echo auth > /x"), tag=name + ":one")
    out = t.api.push(name, tag="one", auth_config={"username": "u", "password": "p"})
    equal("errorDetail" in out, False)


@case
def pull_low_level(t):
    if not REGISTRY:
        return
    name = REGISTRY + "/py/low"
    image = build(t, fileobj=dockerfile("RUN echo low > /x"), tag=name + ":one")
    t.api.push(name, tag="one")
    t.client.images.remove(image.id, force=True)
    lines = list(t.api.pull(name, tag="one", stream=True, decode=True))
    within("Status: ", lines[-1]["status"])
    t.image(name + ":one")


@case
def registry_data(t):
    if not REGISTRY:
        return
    name = REGISTRY + "/py/data"
    build(t, fileobj=dockerfile("RUN echo data > /x"), tag=name + ":one")
    t.api.push(name, tag="one")
    data = t.client.images.get_registry_data(name + ":one")
    equal(data.id.startswith("sha256:"), True)


@case
def login(t):
    if REGISTRY:
        equal(t.client.login("u", "p", registry=REGISTRY, reauth=True).get("Status"), "Login Succeeded")


@refused
def login_by_http(t):
    t.client.login("u", "p", registry="http://" + REGISTRY, reauth=True)


@case
def import_image(t):
    data = context({"x": b"imported"})
    out = t.api.import_image_from_data(data.read(), repository="langs.local/py/import", tag="one")
    t.image("langs.local/py/import:one")
    within("sha256:", out)
