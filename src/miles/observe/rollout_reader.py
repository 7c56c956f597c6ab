"""Reader of rollout dumps (see ``observe.rollouts``): reconstructs the exact groups of a training step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from miles.core.errors import DataError
from miles.core.media import ImageInput, Images, PlacedImage
from miles.core.serialization import SerializationError
from miles.core.types import Array, Author, Group, Prompt, Reward, Span, Status, Trajectory, Version
from miles.observe.rollouts import AUTHORS, CODEC, FORMAT_VERSION, read_file

_AUTHOR_BY_CODE = {code: author for author, code in AUTHORS.items()}
VOCABULARY = "vocabulary"
"""Metadata key: the vocabulary of the file's tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    """The groups that one step was trained on.

    ``probe`` identifies probe samples by prompt, trajectory and digest (``rollouts.compute_sample_digest``).
    ``advantages`` are by group, trajectory and branch; None if the branch yielded no sample. ``times`` are by group and
    trajectory, as in ``Trajectory``, which has none here: they are of another process. ``lost`` names values that
    a file cannot hold, with their types; ``excluded_extras`` the extras that were left out.
    """

    path: Path
    step: int
    tickets: tuple[int, ...]
    groups: tuple[Group, ...]
    probe: tuple[tuple[int, int, str], ...]
    advantages: tuple[tuple[tuple[Array | None, ...], ...], ...]
    times: tuple[tuple[Mapping[str, float], ...], ...]
    vocabulary: str | None
    lost: Mapping[str, str]
    excluded_extras: tuple[str, ...]


def read_step_rollouts(path: Path) -> StepRollouts:
    """Read the groups of one file; DataError if it is not a complete rollout dump."""
    rows, file_metadata = read_file(path)
    version = file_metadata.get("miles.rollouts")
    if version != FORMAT_VERSION:
        problem = "is not a rollout dump" if version is None else f"has format {version}, which lacks parts of a group"
        raise DataError(f"{path} {problem}; write it again with this version of Miles.")
    lost: dict[str, str] = {}
    try:
        rows_by_group = [list(part) for _, part in groupby(rows, key=lambda row: row["ticket"])]
        groups = tuple(_read_group(part, lost) for part in rows_by_group)
        probe = tuple((int(p), int(t), str(digest)) for p, t, digest in json.loads(file_metadata["probe"]))
        step = int(file_metadata["step"])
        excluded_extras = tuple(map(str, json.loads(file_metadata["without"])))
    except (KeyError, ValueError, TypeError, SerializationError) as error:
        raise DataError(f"{path} does not hold complete groups: {error}") from error
    return StepRollouts(
        path=path,
        step=step,
        tickets=tuple(part[0]["ticket"] for part in rows_by_group),
        groups=groups,
        probe=probe,
        advantages=tuple(
            tuple(tuple(r["advantages"] for r in branches) for branches in _split_trajectories(part))
            for part in rows_by_group
        ),
        times=tuple(
            tuple(_read_times(branches[0]) for branches in _split_trajectories(part)) for part in rows_by_group
        ),
        vocabulary=file_metadata.get(VOCABULARY),
        lost=lost,
        excluded_extras=excluded_extras,
    )


def _read_times(row: Mapping[str, Any]) -> dict[str, float]:
    columns = {"started": "started", "generate": "generate_seconds", "grade": "grade_seconds"}
    return {name: row[column] for name, column in columns.items() if row.get(column) is not None}


def _read_group(rows: list[dict[str, Any]], lost: dict[str, str]) -> Group:
    content = CODEC.unpack(rows[0]["prompt"])[1]
    lost |= content["lost"]
    prompt = Prompt(
        id=rows[0]["prompt_id"],
        messages=content["messages"],
        label=rows[0]["label"],
        epoch=rows[0]["epoch"],
        metadata=content["metadata"],
    )
    return Group(prompt=prompt, trajectories=tuple(_read_trajectory(part, lost) for part in _split_trajectories(rows)))


def _split_trajectories(rows: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each trajectory; the first row of each has metadata."""
    branches: list[dict[str, Any]] = []
    for row in rows:
        if row["metadata"] is not None and branches:
            yield branches
            branches = []
        branches.append(row)
    yield branches


def _read_trajectory(rows: list[dict[str, Any]], lost: dict[str, str]) -> Trajectory:
    first = rows[0]
    content = CODEC.unpack(first["metadata"])[1]
    lost |= content["lost"]
    reward = None if first["reward"] is None else Reward(value=first["reward"], parts=first["reward_parts"])
    return Trajectory(
        branches=tuple(tuple(_read_spans(row)) for row in rows),
        status=Status(first["status"]),
        reward=reward,
        index=first["trajectory"],
        metadata=content["metadata"],
    )


def _read_spans(row: Mapping[str, Any]) -> Iterator[Span]:
    lengths = row["span_lengths"]
    extras = ({},) * len(lengths) if row["extras"] is None else CODEC.unpack(row["extras"])[1]
    ends = np.cumsum(lengths)
    images = _read_images(row.get("images"), len(lengths))
    columns = zip(
        lengths, ends, row["span_authors"], row["span_versions"], row["span_policies"], extras, images, strict=True
    )
    for length, end, code, number, policy, span_extras, span_images in columns:
        author, part = _AUTHOR_BY_CODE[int(code)], slice(end - length, end)
        sampled = author is Author.POLICY
        yield Span(
            author=author,
            tokens=row["tokens"][part].copy(),
            logprobs=row["logprobs"][part].copy() if sampled else None,
            version=Version(policy, int(number)) if sampled else None,
            extras=span_extras,
            images=span_images,
        )


def _read_images(text: str | None, num_spans: int) -> list[Images]:
    """Return the images of each span: hashes and places, without pixels (see ``restore_images``)."""
    images: list[list[PlacedImage]] = [[] for _ in range(num_spans)]
    for each in json.loads(text) if text else ():
        image = ImageInput(
            digest=each["digest"],
            num_features=each["num_features"],
            arrays={},
            kind=each["kind"],
            source=each["source"],
        )
        images[each["span"]].append(PlacedImage(start=each["start"], length=each["length"], image=image))
    return [tuple(each) for each in images]


def restore_images(rollouts: StepRollouts, load: Callable[[str], ImageInput]) -> StepRollouts:
    """Return the groups with the pixels of their images; ``load`` processes a file by its hash again.

    DataError where that gives other pixels than the trajectories were sampled with.
    """
    return replace(rollouts, groups=tuple(_restore_group(group, load, rollouts.path) for group in rollouts.groups))


def _restore_group(group: Group, load: Callable[[str], ImageInput], path: Path) -> Group:
    if not any(span.images for trajectory in group.trajectories for span in trajectory.spans):
        return group

    def restore(placed: PlacedImage) -> PlacedImage:
        image = load(placed.image.source)
        if image.digest != placed.image.digest:
            raise DataError(
                f"{path}: image {placed.image.source[:12]} has other pixels now than when it was sampled from; use the "
                "versions of transformers and Pillow, and the checkpoint, of that run."
            )
        return replace(placed, image=image)

    def restore_span(span: Span) -> Span:
        return replace(span, images=tuple(map(restore, span.images))) if span.images else span

    trajectories = tuple(
        replace(trajectory, branches=tuple(tuple(map(restore_span, branch)) for branch in trajectory.branches))
        for trajectory in group.trajectories
    )
    return replace(group, trajectories=trajectories)
