"""Every step's trajectories as ``rollouts/step-*.parquet``: one row a branch, everything per-token in lists."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from miles.core.errors import DataError
from miles.core.events import BatchTaken, Event
from miles.core.types import Array, Author, Floats, Group, Sample, Span, Tokens, Trajectory

if TYPE_CHECKING:
    import pyarrow as pa

# how ``authors`` spells who wrote a token
AUTHORS: Mapping[Author, int] = {Author.PROMPT: 0, Author.POLICY: 1, Author.ENV: 2}


def step_path(folder: Path, step: int) -> Path:
    """Where the trajectories of ``step`` lie in a run's rollouts folder.

    >>> step_path(Path("rollouts"), 12).name
    'step-000012.parquet'
    """
    return folder / f"step-{step:06d}.parquet"


class RolloutDump:
    """Writes a file a batch on a thread of its own, at most one behind; ``commit`` waits for it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts")
        self._writing: Future[None] | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, BatchTaken):
            self.commit()
            self._writing = self._thread.submit(write_step, step_path(self._folder, event.step), event)

    def commit(self) -> None:
        """Return when every batch taken so far is on the disk; what went wrong there is raised here."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        try:
            self.commit()
        finally:
            self._thread.shutdown()


def write_step(path: Path, taken: BatchTaken) -> None:
    """Write a batch's trajectories, complete or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = list(_rows(taken))
    table = pa.Table.from_pylist(rows, schema=_schema())
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        pq.write_table(table, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def read_step(path: Path) -> list[dict[str, Any]]:
    """The rows of one file, in order; per-token columns come as numpy arrays."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read as a file of rollouts: {str(error).splitlines()[0]}") from error
    columns = [_column(table, name) for name in table.column_names]
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)]


def _column(table: pa.Table, name: str) -> list[Any]:
    import pyarrow as pa

    column = table.column(name)
    if not pa.types.is_list(column.type):
        return column.to_pylist(maps_as_pydicts="strict")
    return [one.values.to_numpy(zero_copy_only=False) if one.is_valid else None for one in column]


def _schema() -> pa.Schema:
    import pyarrow as pa

    fields = {
        "step": pa.int32(),
        "ticket": pa.int64(),
        "prompt_id": pa.int64(),
        "epoch": pa.int32(),
        "trajectory": pa.int32(),
        "branch": pa.int32(),
        "status": pa.string(),
        "reward": pa.float64(),
        "reward_parts": pa.map_(pa.string(), pa.float64()),
        "label": pa.string(),
        "text": pa.string(),
        "tokens": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "versions": pa.list_(pa.int32()),
        "authors": pa.list_(pa.int8()),
        "advantages": pa.list_(pa.float32()),
    }
    legend = ", ".join(f"{code} {author}" for author, code in AUTHORS.items())
    return pa.schema(list(fields.items()), metadata={"miles.rollouts": "1", "authors": legend})


def _rows(taken: BatchTaken) -> Iterator[dict[str, Any]]:
    credited: dict[tuple[int, int], list[Sample]] = defaultdict(list)
    for sample in taken.batch.samples:
        credited[sample.prompt_id, sample.trajectory].append(sample)
    for ticket, group in zip(taken.tickets, taken.groups, strict=True):
        for trajectory in group.trajectories:
            waiting = credited[group.prompt.id, trajectory.index]
            for number, branch in enumerate(trajectory.branches):
                tokens = _per_token(branch, np.int32, lambda span: span.tokens)
                yield {
                    "step": taken.step,
                    "ticket": ticket,
                    "branch": number,
                    "tokens": tokens,
                    "logprobs": _per_token(branch, np.float32, _logprobs),
                    "versions": _per_token(branch, np.int32, _version),
                    "authors": _per_token(branch, np.int8, lambda span: AUTHORS[span.author]),
                    "advantages": _advantages(waiting, tokens),
                } | _about(group, trajectory)


def _about(group: Group, trajectory: Trajectory) -> dict[str, Any]:
    text = trajectory.metadata.get("text")
    reward = trajectory.reward
    return {
        "prompt_id": group.prompt.id,
        "epoch": group.prompt.epoch,
        "trajectory": trajectory.index,
        "status": str(trajectory.status),
        "reward": None if reward is None else float(reward.value),
        "reward_parts": [] if reward is None else [(name, float(part)) for name, part in reward.parts.items()],
        "label": group.prompt.label,
        "text": text if isinstance(text, str) else None,
    }


def _advantages(waiting: list[Sample], tokens: Tokens) -> Floats | None:
    """Those of the first sample not yet spoken for that has these tokens; none if credit made no such sample."""
    for place, sample in enumerate(waiting):
        if np.array_equal(sample.tokens, tokens):
            return waiting.pop(place).advantages
    return None


def _per_token(branch: tuple[Span, ...], dtype: type[np.generic], value: Callable[[Span], Any]) -> Array:
    """One value a token; ``value`` gives a span's, as a scalar or an array."""
    pieces = [np.broadcast_to(np.asarray(value(span), dtype), len(span)) for span in branch]
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype)


def _logprobs(span: Span) -> Floats | float:
    return 0.0 if span.logprobs is None else span.logprobs


def _version(span: Span) -> int:
    return -1 if span.version is None else span.version.number
