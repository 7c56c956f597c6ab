"""Declare a knob: a dataclass field whose name is its flag (``eps_clip`` <-> ``--eps-clip``)."""

from collections.abc import Callable
from dataclasses import MISSING, field
from typing import Any, Literal


def knob(
    default: Any = MISSING,
    help: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    off: str | None = None,
    aliases: tuple[str, ...] = (),
    unit: str | None = None,
    path: bool | Literal["pairs", "tables"] = False,
    schemes: tuple[str, ...] = (),
    inner: tuple[str, ...] = (),
) -> Any:
    """A field with help, one sentence. ``off`` names the flag that turns a true default false.

    ``aliases`` are other flags for the same knob; ``unit`` is what the value counts, shown as its
    placeholder; ``path`` says a relative value in a file is relative to that file ("pairs": every
    second value of a list is such a path, the others are names; "tables": such paths stand under the keys ``inner`` of
    every table in a table); ``scheme:rest`` is no path for any of ``schemes``.
    """
    meta = {"help": help, "off": off, "aliases": aliases, "unit": unit, "path": path, "schemes": schemes}
    meta |= {"inner": inner}
    if factory is not None:
        return field(default_factory=factory, metadata=meta)
    return field(metadata=meta) if default is MISSING else field(default=default, metadata=meta)


def mail(prefix: str, help: str = "") -> Any:
    """Flags we do not own: every ``--{prefix}-*`` token, prefix removed, delivered unopened."""
    return field(default=(), metadata={"mail": prefix, "help": help})
