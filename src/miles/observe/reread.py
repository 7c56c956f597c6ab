"""Groups made again from a step's file (see ``observe.rollouts``), as they were when they were trained on."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from miles.core.errors import DataError
from miles.core.types import Array, Author, Group, Prompt, Reward, Span, Status, Trajectory, Version
from miles.core.wire import WireError
from miles.observe.rollouts import AUTHORS, CODEC, FORM, read_file

_WHO = {code: author for author, code in AUTHORS.items()}
VOCABULARY = "vocabulary"
"""Under which a file names the vocabulary its tokens are of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """What one step was trained on.

    ``probe`` names rows that waited for a later step and were looked at, by prompt, attempt and digest
    (``rollouts.digest_of``). ``advantages`` go by group, attempt and branch; None where credit made no row.
    ``lost`` names values that a file cannot hold, with their types; ``without`` the extras that were left out of it.
    """

    path: Path
    step: int
    tickets: tuple[int, ...]
    groups: tuple[Group, ...]
    probe: tuple[tuple[int, int, str], ...]
    advantages: tuple[tuple[tuple[Array | None, ...], ...], ...]
    vocabulary: str | None
    lost: Mapping[str, str]
    without: tuple[str, ...]


def read_taken(path: Path) -> Taken:
    """The groups of one file; a DataError where it is none, or not whole."""
    rows, about = read_file(path)
    form = about.get("miles.rollouts")
    if form != FORM:
        why = "is no file of rollouts" if form is None else f"is of form {form}, which does not hold all of a group"
        raise DataError(f"{path} {why}; make it again with this version of Miles.")
    lost: dict[str, str] = {}
    try:
        whole = [list(part) for _, part in groupby(rows, key=lambda row: row["ticket"])]
        groups = tuple(_group(part, lost) for part in whole)
        probe = tuple((int(p), int(t), str(digest)) for p, t, digest in json.loads(about["probe"]))
        step, without = int(about["step"]), tuple(map(str, json.loads(about["without"])))
    except (KeyError, ValueError, TypeError, WireError) as error:
        raise DataError(f"{path} does not hold whole groups: {error}") from error
    return Taken(
        path=path,
        step=step,
        tickets=tuple(part[0]["ticket"] for part in whole),
        groups=groups,
        probe=probe,
        advantages=tuple(tuple(tuple(r["advantages"] for r in rs) for rs in _attempts(part)) for part in whole),
        vocabulary=about.get(VOCABULARY),
        lost=lost,
        without=without,
    )


def _group(rows: list[dict[str, Any]], lost: dict[str, str]) -> Group:
    told = CODEC.unpack(rows[0]["prompt"])[1]
    lost |= told["lost"]
    prompt = Prompt(
        id=rows[0]["prompt_id"],
        messages=told["messages"],
        label=rows[0]["label"],
        epoch=rows[0]["epoch"],
        metadata=told["metadata"],
    )
    return Group(prompt=prompt, trajectories=tuple(_trajectory(part, lost) for part in _attempts(rows)))


def _attempts(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The rows of each attempt; one begins where there is metadata."""
    waiting: list[dict[str, Any]] = []
    for row in rows:
        if row["metadata"] is not None and waiting:
            yield waiting
            waiting = []
        waiting.append(row)
    yield waiting


def _trajectory(rows: list[dict[str, Any]], lost: dict[str, str]) -> Trajectory:
    first = rows[0]
    told = CODEC.unpack(first["metadata"])[1]
    lost |= told["lost"]
    reward = None if first["reward"] is None else Reward(value=first["reward"], parts=first["reward_parts"])
    return Trajectory(
        branches=tuple(tuple(_spans(row)) for row in rows),
        status=Status(first["status"]),
        reward=reward,
        index=first["trajectory"],
        metadata=told["metadata"],
    )


def _spans(row: Mapping[str, Any]) -> Iterator[Span]:
    lengths = row["span_lengths"]
    extras = ({},) * len(lengths) if row["extras"] is None else CODEC.unpack(row["extras"])[1]
    ends = np.cumsum(lengths)
    columns = zip(lengths, ends, row["span_authors"], row["span_versions"], row["span_policies"], extras, strict=True)
    for length, end, code, number, policy, more in columns:
        author, part = _WHO[int(code)], slice(end - length, end)
        written = author is Author.POLICY
        yield Span(
            author=author,
            tokens=row["tokens"][part].copy(),
            logprobs=row["logprobs"][part].copy() if written else None,
            version=Version(policy, int(number)) if written else None,
            extras=more,
        )
