"""The version of the package: that of the tag it was built from, which the build writes to ``_version.py``."""

from __future__ import annotations

from importlib.util import find_spec

__all__ = ["read_package_version"]


def read_package_version() -> str:
    """The version of an installed package; ``0+checkout`` for sources that were never built."""
    if find_spec("miles.core._version") is None:
        return "0+checkout"
    from miles.core._version import version  # pyright: ignore[reportMissingImports]

    return str(version)
