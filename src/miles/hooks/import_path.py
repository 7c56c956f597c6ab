"""Import paths of user code: ``pkg.mod:name``, ``pkg.mod.name`` or ``file.py:name`` -> the object there."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from types import MappingProxyType, ModuleType
from typing import Any

from miles.core.errors import HookError, describe_error

NO_BUILTINS: Mapping[str, str] = MappingProxyType({})


def find_object(path: str, *, flag: str | None = None) -> Any:
    """Load the object at ``path`` without checking its signature."""
    return find_address(path, NO_BUILTINS, f"{flag} {path}" if flag else path)


def is_path(path: str) -> bool:
    """Whether ``path`` looks like an address and not like a built-in's short name."""
    return ":" in path or "." in path


def find_address(path: str, builtins: Mapping[str, str], source: str) -> Any:
    """The object of a built-in's name or at an address; ``source`` is for error messages."""
    address = builtins.get(path, path)
    if not is_path(address):
        close = get_close_matches(path, builtins, n=1)
        hint = f"did you mean {close[0]}?" if close else "a hook of your own is package.module:name."
        listed = f" (there are {', '.join(builtins)})" if builtins else ""
        raise HookError(f"{source} is not a built-in{listed}; {hint}")
    where, _, name = address.rpartition(":" if ":" in address else ".")
    if not where or not all(part.isidentifier() for part in name.split(".")):
        raise HookError(f"{source} is not an address; write package.module:name.")
    found: Any = _module(where, source)
    for part in name.split("."):
        if not hasattr(found, part):
            close = get_close_matches(part, dir(found), n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise HookError(f"{source}: {where} has no {part}{hint}")
        found = getattr(found, part)
    return found


def _module(where: str, source: str) -> ModuleType:
    # The console script adds its own folder to the path, not the working directory.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return _file_module(where) if where.endswith(".py") else importlib.import_module(where)
    except FileNotFoundError as error:
        raise HookError(f"{source}: there is no file {where}.") from error
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            reason = f"there is no module {error.name} on the path or in {os.getcwd()}"
        else:
            reason = f"{where} imports {error.name}, which is not installed"
        raise HookError(f"{source}: {reason}.") from error
    except (Exception, SystemExit) as error:  # any error of a user's module
        raise HookError(f"{source}: {where} fails when imported, with {describe_error(error)}.") from error


def _file_module(where: str) -> ModuleType:
    if not os.path.isfile(where):
        raise FileNotFoundError(where)
    name = "miles_hook_" + re.sub(r"\W", "_", os.path.abspath(where))
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, where)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
