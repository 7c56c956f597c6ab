"""``pkg.mod:name``, ``pkg.mod.name``, ``file.py:name`` or a built-in's short name -> a callable that fits its door.

A class is instantiated without arguments, and the instance is the plug. The fit is checked before
anything is started: how many arguments, and plain or async.
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

from miles.core.errors import PlugError

if TYPE_CHECKING:
    from miles.plug.upstream.run import Run

P = TypeVar("P")
NO_BUILTINS: Mapping[str, str] = MappingProxyType({})


def load(
    path: str,
    door: type[P],
    *,
    builtins: Mapping[str, str] = NO_BUILTINS,
    flag: str | None = None,
    makes: bool = False,
    only_check: bool = False,
    run: Run | None = None,
) -> P:
    """The object named by ``path``, checked against the protocol ``door``.

    ``builtins`` maps short names to paths; ``flag`` is who asked, for the error's sake. A class is made an instance,
    unless the door ``makes`` what is used; ``only_check`` makes none, and what it gives is not to be called. With a
    ``run``, functions of upstream's signatures are fitted to the door.
    """
    asker = f"{flag} {path}" if flag else path
    if run is not None:
        _offer()
    plug = _find(path, builtins, asker)
    if inspect.isclass(plug) and not makes:
        plug = _instance(plug, asker, only_check=only_check)
    if run is not None:
        plug = _fitted(plug, door, run, asker)
    check_fit(plug, door, asker)
    return cast(P, plug)


def find(path: str, *, flag: str | None = None) -> Any:
    """The object named by ``path``, as it stands there: for those who check the fit themselves."""
    return _find(path, NO_BUILTINS, f"{flag} {path}" if flag else path)


def is_path(path: str) -> bool:
    """Whether ``path`` is spelled like a plug's address, as against a built-in's short name."""
    return ":" in path or "." in path


def signature_of(door: type) -> str:
    """The door's one verb as a user would write it: ``async def (prompt: Prompt, ...) -> Reward``."""
    verb = _verb(door)
    signature = inspect.signature(verb)
    parameters = [p.replace(annotation=_plain(p.annotation)) for p in list(signature.parameters.values())[1:]]
    text = str(signature.replace(parameters=parameters, return_annotation=_plain(signature.return_annotation)))
    return f"{'async ' if inspect.iscoroutinefunction(verb) else ''}def {text.replace(chr(39), '')}"


def check_object(thing: Any, door: type, asker: str) -> None:
    """Refuse (PlugError) what lacks one of the verbs of the protocol ``door``, or cannot be called as it is."""
    expected = f"{door.__name__} wants {', '.join(_described(door, verb) for verb in _verbs(door))}"
    for verb in _verbs(door):
        if not callable(getattr(thing, verb, None)):
            raise PlugError(f"{asker} gave a {type(thing).__name__} without {verb}; {expected}.")
        wanted = list(inspect.signature(getattr(door, verb)).parameters)[1:]
        try:
            inspect.signature(getattr(thing, verb)).bind(*wanted)
        except TypeError as error:
            raise PlugError(f"{asker} gave a {type(thing).__name__} whose {verb} has {error}; {expected}.") from error


def check_fit(plug: Any, door: type, asker: str) -> None:
    """Refuse (PlugError) what cannot be called as ``door`` is: wrong arguments, or plain where async is due."""
    expected = f"{door.__name__} wants {signature_of(door)}"
    if not callable(plug):
        raise PlugError(f"{asker} is a {type(plug).__name__}, which cannot be called; {expected}.")
    wanted = list(inspect.signature(_verb(door)).parameters)[1:]
    try:
        signature = inspect.signature(plug)
    except ValueError as error:
        raise PlugError(f"{asker} has no signature that can be read; {expected}.") from error
    try:
        signature.bind(*wanted)
    except TypeError as error:
        raise PlugError(f"{asker} takes {signature}, but {expected}.") from error
    first = next(iter(signature.parameters.values()))
    if first.name == "args" and first.kind is not inspect.Parameter.VAR_POSITIONAL:
        raise PlugError(
            f"{asker} takes {signature}, as hooks that are handed all arguments do; here a plug is handed only what it "
            f"needs: {expected}."
        )
    is_async = _is_async(plug)
    if is_async != _is_async(_verb(door)):
        kind, mend = ("async", "drop its async") if is_async else ("a plain function", "write async def")
        raise PlugError(f"{asker} is {kind}, but {expected}; {mend}.")


def _find(path: str, builtins: Mapping[str, str], asker: str) -> Any:
    address = builtins.get(path, path)
    if not is_path(address):
        close = get_close_matches(path, builtins, n=1)
        hint = f"did you mean {close[0]}?" if close else "a plug of your own is package.module:name."
        listed = f" (there are {', '.join(builtins)})" if builtins else ""
        raise PlugError(f"{asker} is not a built-in{listed}; {hint}")
    where, _, name = address.rpartition(":" if ":" in address else ".")
    if not where or not all(part.isidentifier() for part in name.split(".")):
        raise PlugError(f"{asker} is not an address; write package.module:name.")
    found: Any = _module(where, asker)
    for part in name.split("."):
        if not hasattr(found, part):
            close = get_close_matches(part, dir(found), n=1)
            hint = f"; did you mean {close[0]}?" if close else "."
            raise PlugError(f"{asker}: {where} has no {part}{hint}")
        found = getattr(found, part)
    return found


def _module(where: str, asker: str) -> ModuleType:
    # The console script puts its own folder on the path, not the one the user stands in.
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        return _file_module(where) if where.endswith(".py") else importlib.import_module(where)
    except FileNotFoundError as error:
        raise PlugError(f"{asker}: there is no file {where}.") from error
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(f"{error.name}.")):
            reason = f"there is no module {error.name} on the path or in {os.getcwd()}"
        else:
            reason = f"{where} imports {error.name}, which is not installed"
        raise PlugError(f"{asker}: {reason}.") from error
    except Exception as error:  # whatever a user's module may raise while it is imported
        raise PlugError(f"{asker}: {where} fails when imported, with {type(error).__name__}: {error}.") from error


def _file_module(where: str) -> ModuleType:
    if not os.path.isfile(where):
        raise FileNotFoundError(where)
    name = "miles_plug_" + re.sub(r"\W", "_", os.path.abspath(where))
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


def _instance(cls: type, asker: str, *, only_check: bool) -> Any:
    try:
        inspect.signature(cls).bind()
    except TypeError as error:
        raise PlugError(
            f"{asker} is a class whose constructor needs arguments ({error}); give them defaults."
        ) from error
    calls = next((vars(base)["__call__"] for base in cls.__mro__ if "__call__" in vars(base)), None)
    return partial(calls, None) if only_check and calls is not None else cls()


def _verb(door: type) -> Any:
    return door.__call__


def _verbs(door: type) -> list[str]:
    return [name for name, value in vars(door).items() if inspect.isfunction(value) and not name.startswith("_")]


def _described(door: type, verb: str) -> str:
    signature = inspect.signature(getattr(door, verb))
    shown = signature.replace(parameters=list(signature.parameters.values())[1:])
    return f"{verb}{shown}".replace(chr(39), "")


def _offer() -> None:
    # numpy, and whatever else a function of upstream's needs, is not for those who only ask for help.
    from miles.plug.upstream.modules import offer

    offer()


def _fitted(plug: Any, door: type, run: Run, asker: str) -> Any:
    from miles.plug.upstream.fit import fit

    return fit(plug, door.__name__, run, asker)


def _is_async(plug: Any) -> bool:
    while hasattr(plug, "func"):  # functools.partial
        plug = plug.func
    return inspect.iscoroutinefunction(plug) or inspect.iscoroutinefunction(getattr(plug, "__call__", None))  # noqa: B004


def _plain(annotation: Any) -> Any:
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return annotation
    return annotation.__name__ if isinstance(annotation, type) else annotation
