"""Were the instructions followed? All of them, for a reward of 1."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from miles.rollout.reward.instructions.settings import Settings
from miles.rollout.reward.instructions.table import CHECKS
from miles.rollout.reward.score import BadLabel, Metadata


def grade(reply: str, label: str, metadata: Metadata) -> dict[str, float]:
    """``score`` is 1 when every instruction is followed, ``share`` the share of them that are; thinking is not read.

    ``metadata["instruction_id_list"]`` names them, ``metadata["kwargs"]`` has an object of settings for each.
    An empty reply follows nothing.
    """
    said = reply.rpartition("</think>")[2].strip("\n")
    followed = [bool(said.strip()) and CHECKS[name](said, settings) for name, settings in _asked(metadata)]
    return {"score": float(all(followed)), "share": sum(followed) / len(followed)}


def _asked(metadata: Metadata) -> list[tuple[str, Settings]]:
    names = metadata.get("instruction_id_list")
    if not isinstance(names, list | tuple) or not names:
        raise BadLabel("its metadata names no instructions in instruction_id_list")
    for name in names:
        if name not in CHECKS:
            close = get_close_matches(str(name), CHECKS, n=1)
            raise BadLabel(f"there is no check for the instruction {name}{f'; is it {close[0]}?' if close else ''}")
    given: Any = metadata.get("kwargs") or [{}] * len(names)
    if not isinstance(given, list | tuple) or len(given) != len(names):
        raise BadLabel(f"metadata['kwargs'] must be a list with an object for each of the {len(names)} instructions")
    return [(name, _settings(name, one)) for name, one in zip(names, given, strict=True)]


def _settings(name: str, given: Any) -> Settings:
    """Without the empty columns that tables leave."""
    if given is not None and not isinstance(given, Mapping):
        raise BadLabel(f"the settings of {name} are not an object")
    return {key: value for key, value in (given or {}).items() if value is not None}
