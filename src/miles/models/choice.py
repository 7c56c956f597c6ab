"""Who computes a checkpoint: our decoder where it has a spec, or transformers' own module where that was asked for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from miles.core.errors import UsageError
from miles.models.families import spec_of
from miles.models.files import read_config
from miles.models.foreign.spec import foreign_spec
from miles.models.spec import DecoderSpec

ModelImpl = Literal["auto", "native", "transformers"]


def chosen_spec(folder: Path | str, impl: ModelImpl) -> DecoderSpec:
    """The spec of the checkpoint in ``folder``; a ForeignSpec where transformers is to compute it.

    ``auto`` never takes the slow way on its own: it refuses what has no spec, and says how to go on.
    """
    config = read_config(folder)
    if impl == "transformers":
        return foreign_spec(config, folder)
    try:
        return spec_of(config)
    except UsageError as error:
        if impl == "native":
            raise
        raise UsageError([*error.problems[:-1], f"{error.problems[-1]} {_way_out(config)}"]) from error


def _way_out(config: Mapping[str, Any]) -> str:
    """What a user can still do with an architecture that has no spec."""
    how = "--model-impl transformers trains and samples transformers' own module instead, more slowly"
    if config.get("auto_map"):
        return f"It comes with code of its own: with --trust-remote-code, {how}."
    if known_to_transformers(str(config.get("model_type"))):
        return f"{how}."
    from importlib.metadata import version

    here = version("transformers")
    return f"The installed transformers {here} does not know it either: a newer one may, and then {how}."


def known_to_transformers(model_type: str) -> bool:
    """Does the installed transformers have a folder for it? Looked up without importing it."""
    from importlib.util import find_spec

    found = find_spec("transformers")
    if found is None or found.origin is None or not model_type.replace("-", "_").isidentifier():
        return False
    return (Path(found.origin).parent / "models" / model_type.replace("-", "_")).is_dir()
