"""Import what a connector needs, or say what to install."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from miles.core.errors import UsageError


def package(name: str, *, environment: str, install: str) -> Any:
    """The module ``name``; UsageError when it is not installed."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = f"{error.name}, which is not installed"
        raise UsageError(f"The environment {environment} needs {missing}; pip install {install}.") from error
