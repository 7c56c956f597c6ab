"""Reasoning Gym scorers. Run in a worker process: some play a whole game to check an answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import reasoning_gym

from miles.rollout.reward.text import extract_boxed
from miles.rollout.reward.types import BadLabel, Metadata

_TAGGED = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def grade(reply: str, label: str, metadata: Metadata) -> float:
    """Score the response's answer with the task's scorer: between ``<answer>`` tags, or boxed, or all of it.

    ``metadata["entry"]``, or ``metadata``, is the whole entry with ``question``, ``answer`` and ``metadata``; or
    ``metadata`` is the entry's own, and the label its answer. The task is named by its ``source_dataset``.
    """
    entry = metadata if isinstance(metadata.get("metadata"), dict) else metadata.get("entry")
    if not isinstance(entry, dict):
        entry = {"question": metadata.get("question", ""), "answer": label or None, "metadata": dict(metadata)}
    entry_metadata = entry.get("metadata")
    name = entry_metadata.get("source_dataset") if isinstance(entry_metadata, dict) else None
    name = name or metadata.get("source_dataset")
    if not isinstance(name, str):
        raise BadLabel("its metadata names no task in source_dataset, as an entry of reasoning_gym does")
    return float(_scorer(name)(extract_answer(reply), entry))


def extract_answer(reply: str) -> str:
    """The answer in a response."""
    final_text = reply.rpartition("</think>")[2]
    tagged = _TAGGED.findall(final_text)
    return (tagged[-1] if tagged else extract_boxed(final_text) or final_text).strip()


@cache
def _scorer(name: str) -> Callable[[str, Any], float]:
    try:
        return reasoning_gym.get_score_answer_fn(name)  # type: ignore[return-value]
    except ValueError as error:
        raise BadLabel(f"reasoning_gym has no task {name}") from error
