"""Option declaration: a dataclass field whose name is its flag (``eps_clip`` <-> ``--eps-clip``)."""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, field
from typing import Any, Literal

from miles.config.value_types import NumberRange


def option(
    default: Any = MISSING,
    help: str = "",
    *,
    factory: Callable[[], Any] | None = None,
    off: str | None = None,
    aliases: tuple[str, ...] = (),
    unit: str | None = None,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    or_value: float | None = None,
    path: bool | Literal["pairs", "tables"] = False,
    schemes: tuple[str, ...] = (),
    inner: tuple[str, ...] = (),
    text: bool = False,
    hub: Literal["model", "dataset"] | None = None,
    secret: bool = False,
    presets: Mapping[str, Any] | None = None,
) -> Any:
    """Declare an option with its default and a one-sentence help text.

    ``off`` names the flag that sets a true default to false. ``aliases`` are other flags for the same option.
    ``unit`` is what the value counts, shown as its placeholder. ``ge``, ``gt``, ``le`` and ``lt`` bound a number
    (each number of a list); ``or_value`` is allowed outside the bounds as well.

    ``path`` says that a relative value in a file is relative to that file ("pairs": every second value of a list is
    such a path, the others are names; "tables": the paths are under the keys ``inner`` of every table in a table);
    ``scheme:rest`` is not a path for any of ``schemes``.

    ``hub`` says that a path option also takes a name on the Hugging Face hub, or a URL, of that kind.

    ``text`` says that ``@file`` stands for the content of a file, read at once, so that the config has the text.

    ``secret`` keeps the value out of everything that is written or printed. ``presets`` are flags without a value,
    each with the value it sets the option to.
    """
    bounds = NumberRange(ge=ge, gt=gt, le=le, lt=lt, or_value=or_value)
    metadata = {
        "help": help,
        "off": off,
        "aliases": aliases,
        "unit": unit,
        "range": bounds,
        "path": path,
        "schemes": schemes,
        "inner": inner,
        "text": text,
        "hub": hub,
        "secret": secret,
        "presets": presets or {},
    }
    if factory is not None:
        return field(default_factory=factory, metadata=metadata)
    return field(metadata=metadata) if default is MISSING else field(default=default, metadata=metadata)


def passthrough(prefix: str, help: str = "") -> Any:
    """Declare flags of another program: every ``--{prefix}-*`` flag is passed on with the prefix removed."""
    return field(default=(), metadata={"passthrough": prefix, "help": help})
