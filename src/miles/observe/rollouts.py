"""Rollout dumps: every step's trajectories as ``rollouts/step-*.parquet``, one row per branch, per-token data in lists.

Nothing is lost: besides the human-readable columns there are those from which ``observe.rollout_reader`` reconstructs
the exact groups. Group data is in the group's first row, trajectory data in the row of its first branch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from miles.core.agents import ROLES
from miles.core.errors import DataError
from miles.core.events import BatchTaken, Event, Saved, StepFinished
from miles.core.serialization import CORE_TYPES, Codec, SerializationError
from miles.core.types import (
    EMPTY,
    Author,
    Floats,
    Group,
    Prompt,
    Reward,
    Sample,
    Span,
    TokenStats,
    Trajectory,
)

if TYPE_CHECKING:
    import pyarrow as pa

# integer codes of the ``authors`` column
AUTHORS: Mapping[Author, int] = {Author.PROMPT: 0, Author.POLICY: 1, Author.ENV: 2}
FORMAT_VERSION = "2"
"""Current file format; files of format 1 lack parts of a group."""
CODEC = Codec(CORE_TYPES)
_PLAIN_TYPES = frozenset((str, int, float, bool, type(None)))
"""Types that can always be serialized."""


WALL_CLOCK_COLUMNS = ("started", "generate_seconds", "grade_seconds")
"""Columns that differ when a run is repeated; all others of a deterministic run are equal to the bit."""
TRAINER = "trainer"
"""Folder beside the rollout files, with the trainer's log-prob and entropy of each token in files of the same names."""


def step_path(folder: Path, step: int) -> Path:
    """Return the file of ``step`` in a run's rollouts folder.

    >>> step_path(Path("rollouts"), 12).name
    'step-000012.parquet'
    """
    return folder / f"step-{step:06d}.parquet"


class RolloutDump:
    """Writes one file per batch in a background thread, at most one at a time; ``commit`` waits for it.

    ``destination`` is a folder, or a function that returns the path of a step's file. ``file_metadata`` is written
    into every file. Extras named in ``excluded_extras`` are left out. When a checkpoint was saved, the files of all but
    the ``keep`` newest steps up to it are deleted; those after it are needed to resume from it. Where a trainer reports
    log-probs and entropies of tokens, a folder gets a second file of the step with these.
    """

    def __init__(
        self,
        destination: Path | Callable[[int], Path],
        *,
        file_metadata: Mapping[str, str] = EMPTY,
        excluded_extras: Collection[str] = (),
        keep: int | None = None,
    ) -> None:
        if isinstance(destination, Path):
            destination.mkdir(parents=True, exist_ok=True)
        self._destination = destination
        self._file_metadata = dict(file_metadata)
        self._keep = keep
        self._excluded_extras = frozenset(excluded_extras)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="rollouts")
        self._writing: Future[Sequence[_Row]] | Future[None] | None = None
        self._taken: tuple[BatchTaken, Future[Sequence[_Row]]] | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, BatchTaken):
            self.commit()
            if isinstance(self._destination, Path):
                path = step_path(self._destination, event.step)
            else:
                path = self._destination(event.step)
                path.parent.mkdir(parents=True, exist_ok=True)
            writing = self._thread.submit(
                write_step,
                path,
                event,
                file_metadata=self._file_metadata,
                excluded_extras=self._excluded_extras,
            )
            self._writing, self._taken = writing, (event, writing)

        elif isinstance(event, StepFinished):
            written, self._taken = self._taken, None
            if event.token_stats is not None and written is not None and isinstance(self._destination, Path):
                self.commit()
                folder, (taken, rows) = self._destination / TRAINER, written
                self._writing = self._thread.submit(write_token_stats, folder, taken, event.token_stats, rows.result())

        elif isinstance(event, Saved) and self._keep is not None and isinstance(self._destination, Path):
            _delete_steps(self._destination, through=event.step - self._keep)

    def commit(self) -> None:
        """Return when all batches so far are on disk; raises errors of the background thread."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def close(self) -> None:
        try:
            self.commit()
        finally:
            self._thread.shutdown()


def _delete_steps(folder: Path, *, through: int) -> None:
    for path in (*folder.glob("step-*.parquet"), *(folder / TRAINER).glob("step-*.parquet")):
        number = path.stem.removeprefix("step-")
        if number.isdecimal() and int(number) <= through:
            path.unlink(missing_ok=True)


def write_step(
    path: Path,
    taken: BatchTaken,
    *,
    file_metadata: Mapping[str, str] = EMPTY,
    excluded_extras: Collection[str] = (),
) -> Sequence[_Row]:
    """Write a batch's trajectories atomically; return the rows."""
    import pyarrow as pa

    probe = [[sample.prompt_id, sample.trajectory, compute_sample_digest(sample)] for sample in taken.batch.probe]
    metadata = {
        "miles.rollouts": FORMAT_VERSION,
        "authors": _AUTHOR_LEGEND,
        "step": str(taken.step),
        "probe": json.dumps(probe),
        "without": json.dumps(sorted(excluded_extras)),
        **file_metadata,
    }
    rows = _list_rows(taken)
    columns = _build_columns(taken.step, rows, frozenset(excluded_extras))
    schema = _build_schema(metadata)
    arrays = [_to_arrow(columns[field.name], field.type) for field in schema]
    _write_table(path, pa.Table.from_arrays(arrays, schema=schema))
    return rows


def write_token_stats(folder: Path, taken: BatchTaken, stats: TokenStats, rows: Sequence[_Row] | None = None) -> None:
    """Write the trainer's log-prob and entropy of each token, in the ``rows`` of the step's rollout file; NaN where a
    token was not trained on."""
    import pyarrow as pa

    samples = taken.batch.samples
    by_sample = {id(samples[index]): (samples[index], *values) for index, values in stats.split().items()}
    rows = _list_rows(taken) if rows is None else rows
    found = [by_sample.get(id(row.sample)) for row in rows]
    trained = [each for each in found if each is not None]
    masks = [sample.mask for sample, _, _ in trained]
    ends = list(accumulate(0 if each is None else len(each[0].tokens) for each in found))
    is_missing = [each is None for each in found]
    columns: dict[str, Any] = {
        "ticket": [row.ticket for row in rows],
        "trajectory": [row.trajectory.index for row in rows],
        "branch": [row.number for row in rows],
        "logprobs": _Lists(_spread(masks, [each for _, each, _ in trained]), ends, is_missing),
        "entropies": _Lists(_spread(masks, [each for _, _, each in trained]), ends, is_missing),
    }
    fields = [("ticket", pa.int64()), ("trajectory", pa.int32()), ("branch", pa.int32())]
    fields += [("logprobs", pa.list_(pa.float32())), ("entropies", pa.list_(pa.float32()))]
    folder.mkdir(parents=True, exist_ok=True)
    arrays = [_to_arrow(columns[name], kind) for name, kind in fields]
    _write_table(step_path(folder, taken.step), pa.Table.from_arrays(arrays, schema=pa.schema(fields)))


def read_token_stats(path: Path) -> dict[tuple[int, int, int], tuple[Floats, Floats]]:
    """Return the log-probs and entropies of a file of ``write_token_stats`` by ticket, trajectory and branch; none if
    there is no such file."""
    rows = read_step(path) if path.is_file() else []
    return {
        (row["ticket"], row["trajectory"], row["branch"]): (row["logprobs"], row["entropies"])
        for row in rows
        if row["logprobs"] is not None
    }


def _spread(masks: Sequence[NDArray[np.bool_]], values: Sequence[Floats]) -> Floats:
    """Return the values of the trained tokens among all tokens of the samples, NaN elsewhere."""
    mask = np.concatenate(masks or [np.zeros(0, np.bool_)])
    spread = np.full(len(mask), np.nan, np.float32)
    spread[mask] = np.concatenate(values or [np.zeros(0, np.float32)])
    return spread


def _write_table(path: Path, table: pa.Table) -> None:
    """Write a file, complete or not at all."""
    import pyarrow.parquet as pq

    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        pq.write_table(table, file, compression="zstd", use_dictionary=False)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def read_step(path: Path) -> list[dict[str, Any]]:
    """Return the rows of one file, in order; per-token columns are numpy arrays."""
    return read_file(path)[0]


def read_file(path: Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the rows of one file, and its metadata."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read as a rollout dump: {str(error).splitlines()[0]}") from error
    columns = [_read_column(table, name) for name in table.column_names]
    metadata = {key.decode(): value.decode() for key, value in (table.schema.metadata or {}).items()}
    return [dict(zip(table.column_names, row, strict=True)) for row in zip(*columns, strict=True)], metadata


def get_branch_policy(trajectory: Trajectory, branch: int) -> str | None:
    """Return the policy that sampled a branch: its role in multi-agent runs, None if no policy sampled any token."""
    if ROLES in trajectory.metadata:
        return str(trajectory.metadata[ROLES][branch])
    policies = [span.version.policy for span in trajectory.branches[branch] if span.version is not None]
    return policies[0] if policies else None


def compute_sample_digest(sample: Sample) -> str:
    """Return a digest that distinguishes a sample from others of its trajectory."""
    images = "".join(placed.image.digest for placed in sample.images).encode()
    return hashlib.sha256(sample.tokens.tobytes() + sample.logprobs.tobytes() + images).hexdigest()[:16]


def _read_column(table: pa.Table, name: str) -> list[Any]:
    import pyarrow as pa

    column = table.column(name)
    if not pa.types.is_list(column.type):
        return column.to_pylist(maps_as_pydicts="strict")
    return [cell.values.to_numpy(zero_copy_only=False) if cell.is_valid else None for cell in column]


_AUTHOR_LEGEND = ", ".join(f"{code} {author}" for author, code in AUTHORS.items())


def _build_schema(metadata: Mapping[str, str]) -> pa.Schema:
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
        "started": pa.float64(),
        "generate_seconds": pa.float64(),
        "grade_seconds": pa.float64(),
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
        "images": pa.string(),
        "metadata": pa.binary(),
        "prompt": pa.binary(),
    }
    return pa.schema(list(fields.items()), metadata=dict(metadata))


class _Row(NamedTuple):
    """One row of a file: a branch of a trajectory, and the sample it yielded, if any."""

    ticket: int
    group: Group
    trajectory: Trajectory
    number: int
    sample: Sample | None
    is_first: bool

    @property
    def branch(self) -> tuple[Span, ...]:
        return self.trajectory.branches[self.number]


class _Lists(NamedTuple):
    """A column of lists: all values together, where each list ends, and which lists are missing."""

    values: Any
    ends: Sequence[int]
    is_missing: Sequence[bool] | None = None

    @staticmethod
    def join(lists: Sequence[Floats | None]) -> _Lists:
        """Return the column of these lists; a missing one is None."""
        values = np.concatenate([each for each in lists if each is not None] or [np.zeros(0, np.float32)])
        lengths = [0 if each is None else len(each) for each in lists]
        return _Lists(values, list(accumulate(lengths)), [each is None for each in lists])


def _to_arrow(column: Any, kind: pa.DataType) -> pa.Array:
    """Convert a column, which is a sequence of cells or ``_Lists``."""
    import pyarrow as pa

    if not isinstance(column, _Lists):
        return pa.array(column, kind)
    offsets = pa.array(np.array([0, *column.ends], np.int32))
    missing = None if column.is_missing is None else pa.array(column.is_missing, pa.bool_())
    return pa.ListArray.from_arrays(offsets, pa.array(column.values, kind.value_type), type=kind, mask=missing)


def _list_rows(taken: BatchTaken) -> list[_Row]:
    """Return the rows of a step in the order of the file."""
    samples = _samples_by_trajectory(taken)
    rows: list[_Row] = []
    for ticket, group in zip(taken.tickets, taken.groups, strict=True):
        for position, trajectory in enumerate(group.trajectories):
            unmatched = samples[group.prompt.id, trajectory.index]
            for number, branch in enumerate(trajectory.branches):
                sample = _pop_sample(unmatched, branch)
                rows.append(_Row(ticket, group, trajectory, number, sample, not number and not position))
    return rows


def _build_columns(step: int, rows: Sequence[_Row], excluded_extras: frozenset[str]) -> dict[str, Any]:
    """Return the cells of each column."""
    return {
        "step": np.full(len(rows), step, np.int32),
        "ticket": [row.ticket for row in rows],
        "branch": [row.number for row in rows],
        "policy": [get_branch_policy(row.trajectory, row.number) for row in rows],
        **_build_summary_columns(rows),
        **_build_token_columns(rows),
        "extras": [_pack_extras(row.branch, excluded_extras) for row in rows],
        "images": [_format_images(row.branch) for row in rows],
        "metadata": [None if row.number else _pack_metadata(row.trajectory.metadata) for row in rows],
        "prompt": [_pack_prompt(row.group.prompt) if row.is_first else None for row in rows],
    }


def _build_token_columns(rows: Sequence[_Row]) -> dict[str, _Lists]:
    """Return the columns with a value for each token, and those with one for each span."""
    spans = [span for row in rows for span in row.branch]
    lengths = [len(span) for span in spans]
    versions = np.array([_version(span) for span in spans], np.int32)
    authors = np.array([AUTHORS[span.author] for span in spans], np.int8)
    policies = [None if span.version is None else span.version.policy for span in spans]
    logprobs = [np.zeros(len(span), np.float32) if span.logprobs is None else span.logprobs for span in spans]
    span_ends = list(accumulate(len(row.branch) for row in rows))
    token_ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))[span_ends].tolist()
    tokens = np.concatenate([span.tokens for span in spans] or [np.zeros(0, np.int32)])
    return {
        "tokens": _Lists(tokens, token_ends),
        "logprobs": _Lists(np.concatenate(logprobs or [np.zeros(0, np.float32)]).astype(np.float32), token_ends),
        "versions": _Lists(np.repeat(versions, lengths), token_ends),
        "authors": _Lists(np.repeat(authors, lengths), token_ends),
        "advantages": _Lists.join([None if row.sample is None else row.sample.advantages for row in rows]),
        "span_lengths": _Lists(np.array(lengths, np.int32), span_ends),
        "span_authors": _Lists(authors, span_ends),
        "span_versions": _Lists(versions, span_ends),
        "span_policies": _Lists(policies, span_ends),
    }


def _samples_by_trajectory(taken: BatchTaken) -> defaultdict[tuple[int, int], list[Sample]]:
    samples: defaultdict[tuple[int, int], list[Sample]] = defaultdict(list)
    for sample in taken.batch.samples:
        samples[sample.prompt_id, sample.trajectory].append(sample)
    return samples


def _build_summary_columns(rows: Sequence[_Row]) -> dict[str, Any]:
    texts = [row.trajectory.metadata.get("text") for row in rows]
    rewards = [row.trajectory.reward for row in rows]
    times = [row.trajectory.times for row in rows]
    return {
        "prompt_id": [row.group.prompt.id for row in rows],
        "epoch": [row.group.prompt.epoch for row in rows],
        "trajectory": [row.trajectory.index for row in rows],
        "status": [str(row.trajectory.status) for row in rows],
        "reward": [None if reward is None else float(reward.value) for reward in rewards],
        "reward_parts": [[] if reward is None else _list_parts(reward) for reward in rewards],
        "label": [row.group.prompt.label for row in rows],
        "text": [text if isinstance(text, str) else None for text in texts],
        "started": [each.get("started") for each in times],
        "generate_seconds": [each.get("generate") for each in times],
        "grade_seconds": [each.get("grade") for each in times],
    }


def _list_parts(reward: Reward) -> list[tuple[str, float]]:
    return [(name, float(part)) for name, part in reward.parts.items()]


def _pack_extras(branch: tuple[Span, ...], excluded_extras: frozenset[str]) -> bytes | None:
    """Pack the extras of a branch's spans; None if there are none."""
    if not [span for span in branch if span.extras]:
        return None
    extras = tuple({name: each for name, each in span.extras.items() if name not in excluded_extras} for span in branch)
    return CODEC.pack("extras", extras) if any(extras) else None


def _format_images(branch: tuple[Span, ...]) -> str | None:
    """Return the hashes of a branch's images and their places in their spans, as JSON; the files are in ``media/``."""
    if not [span for span in branch if span.images]:
        return None
    images = [
        {
            "span": number,
            "start": placed.start,
            "length": placed.length,
            "kind": placed.image.kind,
            "num_features": placed.image.num_features,
            "digest": placed.image.digest,
            "source": placed.image.source,
        }
        for number, span in enumerate(branch)
        for placed in span.images
    ]
    return json.dumps(images)


def _pack_prompt(prompt: Prompt) -> bytes:
    """Pack the messages and metadata; values that cannot be serialized are only named."""
    messages: list[dict[str, Any]] = []
    all_lost: dict[str, str] = {}
    for message in prompt.messages:
        packable, lost = _split_packable(message)
        messages.append(packable)
        all_lost |= lost
    metadata, lost = _split_packable(prompt.metadata)
    return CODEC.pack("prompt", {"messages": messages, "metadata": metadata, "lost": all_lost | lost})


def _pack_metadata(metadata: Mapping[str, Any]) -> bytes:
    packable, lost = _split_packable(metadata)
    return CODEC.pack("metadata", {"metadata": packable, "lost": lost})


def _split_packable(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values that can be serialized, and the types of the others."""
    if _PLAIN_TYPES.issuperset(map(type, values.values())):
        return dict(values), {}
    packable: dict[str, Any] = {}
    lost: dict[str, str] = {}
    for name, value in values.items():
        try:
            CODEC.pack("value", value)
        except SerializationError:
            lost[name] = type(value).__name__
        else:
            packable[name] = value
    return packable, lost


def _pop_sample(unmatched: list[Sample], branch: tuple[Span, ...]) -> Sample | None:
    """Return the first unmatched sample with the tokens of a branch, and remove it; None if there is none."""
    tokens = b"".join([span.tokens.tobytes() for span in branch])
    for index, sample in enumerate(unmatched):
        if sample.tokens.astype(np.int32, copy=False).tobytes() == tokens:
            return unmatched.pop(index)
    return None


def _version(span: Span) -> int:
    return -1 if span.version is None else span.version.number
