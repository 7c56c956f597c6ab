"""Lazy exports of a package: a name is imported when it is first used, so that importing the package stays fast.

Its version too: the build writes that of the tag to ``_version.py``, which a checkout does not have.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def build_getattr(package: str, exports: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package; ``exports`` maps each name to ``module:name``, or to a subpackage."""

    def get_export(name: str) -> Any:
        if name not in exports:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = _load(exports[name])
        setattr(sys.modules[package], name, value)
        return value

    return get_export


def make_callable(package: str, function: str) -> str:
    """Make a package callable: calling it calls ``function``, given as ``module:name``, which is returned.

    It is for a function and a package of the same name, since a name of the parent can be only one of the two.
    """
    sys.modules[package].__class__ = CallablePackage
    return function


class CallablePackage(ModuleType):
    """A package that is called as the function that it names in ``__callable__``."""

    __callable__: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return _load(self.__callable__)(*args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of the function."""
        return inspect.signature(_load(self.__callable__))


def _load(address: str) -> Any:
    module, _, name = address.partition(":")
    return getattr(import_module(module), name) if name else import_module(module)


def read_package_version() -> str:
    """The version of the package that was built; ``0+checkout`` for sources that never were."""
    built = find_spec("miles.core._version") is not None
    return str(import_module("miles.core._version").version) if built else "0+checkout"
