"""Runs the cases of the Docker SDK for Python."""

import archives  # noqa: F401
import config  # noqa: F401
import containers  # noqa: F401
import fixture
import images  # noqa: F401
import objects  # noqa: F401
import tap

tap.main(fixture.T)
