"""What the cases share: the client, and what makes objects that a case's end removes."""

import contextlib
import os

import docker

from tap import equal, unique

IMAGE = os.environ["IMAGE"]
WORK = os.environ.get("WORK", "")  # a directory of the host that may be mounted


class T:
    """T is what a case works with; what it registers is undone at the case's end."""

    def __init__(self, stack):
        self.stack = stack
        self.client = docker.from_env(timeout=30)
        self.api = self.client.api
        stack.callback(self.client.close)

    def name(self, kind="c"):
        return unique("py-" + kind)

    def undo(self, function, *args, **options):
        def quietly():
            with contextlib.suppress(docker.errors.APIError, docker.errors.NotFound):
                function(*args, **options)

        self.stack.callback(quietly)

    def adopt(self, container):
        self.undo(self.api.remove_container, getattr(container, "id", container), force=True, v=True)
        return container

    def create(self, command="sleep 300", **options):
        return self.adopt(self.client.containers.create(IMAGE, command, **options))

    def run(self, command="sleep 300", **options):
        return self.adopt(self.client.containers.run(IMAGE, command, detach=True, **options))

    def low(self, command="sleep 300", **options):
        id = self.api.create_container(IMAGE, command, **options)["Id"]
        return self.adopt(id)

    def output(self, command, **options):
        """output runs a command to its end and returns what it printed."""
        c = self.run(command, **options)
        equal(c.wait(timeout=30)["StatusCode"], 0)
        return c.logs().decode().strip()

    def host_output(self, command, **config):
        """host_output is output with a low-level host configuration."""
        id = self.low(command, host_config=self.api.create_host_config(**config))
        self.api.start(id)
        self.api.wait(id, timeout=30)
        return self.api.logs(id).decode().strip()

    def network(self, **options):
        n = self.client.networks.create(self.name("n"), **options)
        self.undo(n.remove)
        return n

    def volume(self, **options):
        v = self.client.volumes.create(self.name("v"), **options)
        self.undo(v.remove, force=True)
        return v

    def image(self, id):
        self.undo(self.api.remove_image, id, force=True)
        return id
