"""Hook loading: ``pkg.mod:name``, ``pkg.mod.name``, ``file.py:name`` or a built-in's name -> a checked callable.

A class is instantiated without arguments, and the instance is the hook. The signature is checked before anything
starts: the number of arguments, and plain or async.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, cast

from miles.core.errors import HookError, MilesError, describe_error

if TYPE_CHECKING:
    from miles.hooks.compat.types import UpstreamContext

P = TypeVar("P")
NO_BUILTINS: Mapping[str, str] = MappingProxyType({})


def load_hook(
    path: str,
    protocol: type[P],
    *,
    builtins: Mapping[str, str] = NO_BUILTINS,
    flag: str | None = None,
    is_factory: bool = False,
    only_check: bool = False,
    run: UpstreamContext | None = None,
) -> P:
    """Load the object at ``path`` and check it against ``protocol``.

    ``builtins`` maps short names to paths; ``flag`` is for error messages. A class is instantiated, unless the hook
    ``is_factory``; ``only_check`` does not instantiate, and its result must not be called. With a ``run``, functions
    with upstream signatures are adapted.
    """
    source = f"{flag} {path}" if flag else path
    if run is not None:
        _install_upstream_modules()
    hook = _find(path, builtins, source)
    if inspect.isclass(hook) and not is_factory:
        hook = _instance(hook, source, only_check=only_check)
    if run is not None:
        hook = _adapt_upstream(hook, protocol, run, source)
    check_signature(hook, protocol, source)
    return cast(P, hook)


def find_object(path: str, *, flag: str | None = None, upstream: bool = False) -> Any:
    """Load the object at ``path`` without checking its signature; ``upstream`` lets it import upstream's modules."""
    if upstream:
        _install_upstream_modules()
    return _find(path, NO_BUILTINS, f"{flag} {path}" if flag else path)


def is_path(path: str) -> bool:
    """Whether ``path`` looks like an address and not like a built-in's short name."""
    return ":" in path or "." in path


def format_signature(protocol: type) -> str:
    """The signature of the protocol as a user would write it: ``async def (prompt: Prompt, ...) -> Reward``."""
    method = _call_method(protocol)
    signature = inspect.signature(method)
    parameters = [
        p.replace(annotation=_plain_annotation(p.annotation)) for p in list(signature.parameters.values())[1:]
    ]
    text = str(
        signature.replace(parameters=parameters, return_annotation=_plain_annotation(signature.return_annotation))
    )
    return f"{'async ' if inspect.iscoroutinefunction(method) else ''}def {text.replace(chr(39), '')}"


def check_object(obj: Any, protocol: type, source: str) -> None:
    """Raise HookError for an object that lacks a method of the protocol, or whose method has other parameters."""
    methods = _public_methods(protocol)
    expected = f"{protocol.__name__} wants {', '.join(_format_method(protocol, method) for method in methods)}"
    for method in methods:
        if not callable(getattr(obj, method, None)):
            raise HookError(f"{source} gave a {type(obj).__name__} without {method}; {expected}.")
        wanted = list(inspect.signature(getattr(protocol, method)).parameters)[1:]
        try:
            inspect.signature(getattr(obj, method)).bind(*wanted)
        except TypeError as error:
            raise HookError(f"{source} gave a {type(obj).__name__} whose {method} has {error}; {expected}.") from error


def check_signature(hook: Any, protocol: type, source: str) -> None:
    """Raise HookError for wrong parameters, or for a plain function where an async one is needed, or the reverse."""
    expected = f"{protocol.__name__} wants {format_signature(protocol)}"
    if not callable(hook):
        raise HookError(f"{source} is a {type(hook).__name__}, which cannot be called; {expected}.")
    wanted = list(inspect.signature(_call_method(protocol)).parameters)[1:]
    try:
        signature = inspect.signature(hook)
    except ValueError as error:
        raise HookError(f"{source} has no signature that can be read; {expected}.") from error
    try:
        signature.bind(*wanted)
    except TypeError as error:
        raise HookError(f"{source} takes {signature}, but {expected}.") from error
    first = next(iter(signature.parameters.values()))
    if first.name == "args" and first.kind is not inspect.Parameter.VAR_POSITIONAL:
        raise HookError(
            f"{source} takes {signature}, as upstream hooks with all arguments do; here a hook gets only what it "
            f"needs: {expected}."
        )
    for given, parameter in zip(wanted, signature.parameters.values(), strict=False):
        if parameter.default is not parameter.empty and parameter.name != given:
            raise HookError(
                f"{source} takes {signature}, whose optional parameter {parameter.name} would be given the {given}; "
                f"{expected}, so write a function whose first parameters are these."
            )
    asynchronous = is_async(hook)
    if asynchronous != is_async(_call_method(protocol)):
        kind, fix = ("async", "drop its async") if asynchronous else ("a plain function", "write async def")
        raise HookError(f"{source} is {kind}, but {expected}; {fix}.")


def _find(path: str, builtins: Mapping[str, str], source: str) -> Any:
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


def _instance(cls: type, source: str, *, only_check: bool) -> Any:
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise HookError(
            f"{source} is a class whose constructor needs arguments ({error}); give them defaults."
        ) from error
    calls = next((vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base)), None)
    if only_check and calls is not None:
        return partial(calls, None)
    try:
        return cls()
    except (Exception, SystemExit) as error:
        if isinstance(error, MilesError):
            raise
        raise HookError(f"{source} cannot be created: {describe_error(error)}.") from error


def _call_method(protocol: type) -> Any:
    return protocol.__call__


def _public_methods(protocol: type) -> list[str]:
    return [name for name, value in vars(protocol).items() if inspect.isfunction(value) and not name.startswith("_")]


def _format_method(protocol: type, method: str) -> str:
    signature = inspect.signature(getattr(protocol, method))
    shown = signature.replace(parameters=list(signature.parameters.values())[1:])
    return f"{method}{shown}".replace(chr(39), "")


def _install_upstream_modules() -> None:
    # Imported on demand: command-line help must not load numpy.
    from miles.hooks.compat.signature_adapter import install_upstream_modules

    install_upstream_modules()


def _adapt_upstream(hook: Any, protocol: type, run: UpstreamContext, source: str) -> Any:
    from miles.hooks.compat.signature_adapter import adapt_signature

    return adapt_signature(hook, protocol.__name__, run, source)


def is_async(hook: Any) -> bool:
    """Whether calling ``hook`` returns a coroutine."""
    while hasattr(hook, "func"):  # functools.partial
        hook = hook.func
    return inspect.iscoroutinefunction(hook) or inspect.iscoroutinefunction(getattr(hook, "__call__", None))  # noqa: B004


def _plain_annotation(annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return annotation
    return annotation.__name__ if isinstance(annotation, type) else annotation
