"""Every step's trajectories as ``rollouts/step-*.parquet``: one row a branch, everything per-token in lists.

Nothing is lost: beside the columns people read there are those from which ``observe.reread`` makes the very groups
again. What belongs to a group is in its first row, what belongs to a trajectory in the row of its first branch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from miles.core.errors import DataError
from miles.core.events import BatchTaken, Event
from miles.core.roles import ROLES
from miles.core.types import EMPTY, Array, Author, Floats, Group, Prompt, Sample, Span, Tokens, Trajectory
from miles.core.wire import NOUNS, Codec, WireError

if TYPE_CHECKING:
    import pyarrow as pa

# how ``authors`` spells who wrote a token
AUTHORS: Mapping[Author, int] = {Author.PROMPT: 0, Author.POLICY: 1, Author.ENV: 2}
FORM = "2"
"""Of the files that are written now; those of form 1 do not hold all of a group."""
CODEC = Codec(NOUNS)


def step_path(folder: Path, step: int) -> Path:
    """Where the trajectories of ``step`` lie in a run's rollouts folder.

    >>> step_path(Path("rollouts"), 12).name
    'step-000012.parquet'
    """
    return folder / f"step-{step:06d}.parquet"


class RolloutDump:
    """Writes a file a batch on a thread of its own, at most one behind; ``commit`` waits for it.

    ``place`` is a folder for files of our own names, or says where a step's file goes. ``about`` is written into
    every file: what a reader should know of the run. Extras that are called as one of ``without`` are left out.
    """

    def __init__(
        self, place: Path | Callable[[int], Path], *, about: Mapping[str, str] = EMPTY, without: Collection[str] = ()
    ) -> None:
        if isinstance(place, Path):
            place.mkdir(parents=True, exist_ok=True)
        self._place = place
        self._about = dict(about)
        self._without = frozenset(without)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts")
        self._writing: Future[None] | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, BatchTaken):
            self.commit()
            place, step = self._place, event.step
            path = step_path(place, step) if isinstance(place, Path) else _made(place(step))
            self._writing = self._thread.submit(write_step, path, event, about=self._about, without=self._without)

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


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def write_step(
    path: Path, taken: BatchTaken, *, about: Mapping[str, str] = EMPTY, without: Collection[str] = ()
) -> None:
    """Write a batch's trajectories, complete or not at all."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = list(_rows(taken, frozenset(without)))
    probe = json.dumps([[row.prompt_id, row.trajectory, digest_of(row)] for row in taken.batch.probe])
    told = {"miles.rollouts": FORM, "authors": _LEGEND, "step": str(taken.step), "probe": probe}
    told |= {"without": json.dumps(sorted(without)), **about}
    table = pa.Table.from_pylist(rows, schema=_schema(told))
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        pq.write_table(table, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def read_step(path: Path) -> list[dict[str, Any]]:
    """The rows of one file, in order; per-token columns come as numpy arrays."""
    return read_file(path)[0]


def read_file(path: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows of one file, and what it says about itself."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read as a file of rollouts: {str(error).splitlines()[0]}") from error
    columns = [_column(table, name) for name in table.column_names]
    about = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)], about


def policy_of(trajectory: Trajectory, branch: int) -> str | None:
    """Which of a run's policies wrote in a branch: its role where several play, None where no policy wrote."""
    if ROLES in trajectory.metadata:
        return str(trajectory.metadata[ROLES][branch])
    wrote = (span.version.policy for span in trajectory.branches[branch] if span.version is not None)
    return next(wrote, None)


def digest_of(row: Sample) -> str:
    """By which a training row is told from others of its attempt."""
    return hashlib.sha256(row.tokens.tobytes() + row.logprobs.tobytes()).hexdigest()[:16]


def _column(table: pa.Table, name: str) -> list[Any]:
    import pyarrow as pa

    column = table.column(name)
    if not pa.types.is_list(column.type):
        return column.to_pylist(maps_as_pydicts="strict")
    return [one.values.to_numpy(zero_copy_only=False) if one.is_valid else None for one in column]


_LEGEND = ", ".join(f"{code} {author}" for author, code in AUTHORS.items())


def _schema(about: Mapping[str, str]) -> pa.Schema:
    import pyarrow as pa

    fields = {
        "step": pa.int32(),
        "ticket": pa.int64(),
        "prompt_id": pa.int64(),
        "epoch": pa.int32(),
        "trajectory": pa.int32(),
        "branch": pa.int32(),
        "policy": pa.string(),
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
        "span_lengths": pa.list_(pa.int32()),
        "span_authors": pa.list_(pa.int8()),
        "span_versions": pa.list_(pa.int32()),
        "span_policies": pa.list_(pa.string()),
        "extras": pa.large_binary(),
        "metadata": pa.binary(),
        "prompt": pa.binary(),
    }
    return pa.schema(list(fields.items()), metadata=dict(about))


def _rows(taken: BatchTaken, without: frozenset[str]) -> Iterator[dict[str, Any]]:
    credited: dict[tuple[int, int], list[Sample]] = defaultdict(list)
    for sample in taken.batch.samples:
        credited[sample.prompt_id, sample.trajectory].append(sample)
    for ticket, group in zip(taken.tickets, taken.groups, strict=True):
        for place, trajectory in enumerate(group.trajectories):
            waiting = credited[group.prompt.id, trajectory.index]
            for number, branch in enumerate(trajectory.branches):
                tokens = _per_token(branch, np.int32, lambda span: span.tokens)
                yield {
                    "step": taken.step,
                    "ticket": ticket,
                    "branch": number,
                    "policy": policy_of(trajectory, number),
                    "tokens": tokens,
                    "logprobs": _per_token(branch, np.float32, _logprobs),
                    "versions": _per_token(branch, np.int32, _version),
                    "authors": _per_token(branch, np.int8, lambda span: AUTHORS[span.author]),
                    "advantages": _advantages(waiting, tokens),
                    **_spans(branch, without),
                    "metadata": None if number else _metadata(trajectory.metadata),
                    "prompt": None if number or place else _prompt(group.prompt),
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


def _spans(branch: tuple[Span, ...], without: frozenset[str]) -> dict[str, Any]:
    """Where spans begin and end, whose they are, and what else they carry a token."""
    extras = tuple({name: each for name, each in span.extras.items() if name not in without} for span in branch)
    return {
        "span_lengths": [len(span) for span in branch],
        "span_authors": [AUTHORS[span.author] for span in branch],
        "span_versions": [_version(span) for span in branch],
        "span_policies": [None if span.version is None else span.version.policy for span in branch],
        "extras": CODEC.pack("extras", extras) if any(extras) else None,
    }


def _prompt(prompt: Prompt) -> bytes:
    """The messages and all else but what has a column; a value that is no number, word or array is only named."""
    messages: list[dict[str, Any]] = []
    gone: dict[str, str] = {}
    for message in prompt.messages:
        kept, lost = _packable(message)
        messages.append(kept)
        gone |= lost
    metadata, lost = _packable(prompt.metadata)
    return CODEC.pack("prompt", {"messages": messages, "metadata": metadata, "lost": gone | lost})


def _metadata(metadata: Mapping[str, Any]) -> bytes:
    kept, lost = _packable(metadata)
    return CODEC.pack("metadata", {"metadata": kept, "lost": lost})


def _packable(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """What of these can be written down, and of what type the rest is."""
    kept: dict[str, Any] = {}
    lost: dict[str, str] = {}
    for name, value in values.items():
        try:
            CODEC.pack("value", value)
        except WireError:
            lost[name] = type(value).__name__
        else:
            kept[name] = value
    return kept, lost


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
