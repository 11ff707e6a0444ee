"""Runs what Docker support in editors sends, as plain HTTP."""

import containers  # noqa: F401
import objects  # noqa: F401
import streams  # noqa: F401
import tap
import wire

tap.main(wire.T)
