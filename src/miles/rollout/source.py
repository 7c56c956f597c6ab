"""Where prompts come from: data read into a data set, and a cursor over it that resumes exactly."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Number
from typing import Any, cast

import numpy as np

from miles.core.errors import DataError, ResumeError
from miles.core.types import EMPTY, Prompt
from miles.rollout.files import read_rows, split_slice
from miles.rollout.generated import generate, is_generated, task_of
from miles.rollout.preference import PREFERENCE, pair_of
from miles.rollout.rows import Bad, Columns, Pair, Row, refuse
from miles.rollout.seeds import Stream, mix_each


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The prompts of one entry of data, in its order.

    ``dropped`` were longer than ``limit`` tokens; ``skipped`` rows could not be read, ``complaint`` says why of the
    first.
    """

    path: str
    prompts: tuple[Prompt, ...]
    dropped: int = 0
    limit: int | None = None
    skipped: int = 0
    complaint: str = ""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def note(self) -> str | None:
        """What a user should know about how the data was read, if anything."""
        notes: list[str] = []
        if self.skipped:
            rows = f"{self.skipped} of {self.skipped + self.dropped + len(self)} rows of {self.path}"
            notes.append(f"{rows} cannot be read and were skipped; the first: {self.complaint}")
        if self.dropped:
            prompts = f"{self.dropped} of {self.dropped + len(self)} prompts of {self.path}"
            notes.append(f"{prompts} are longer than {self.limit} tokens and were dropped.")
        return " ".join(notes) or None


def read_dataset(
    path: str,
    *,
    input_key: str,
    label_key: str | None = None,
    metadata_key: str = "metadata",
    skip_bad_rows: bool = False,
    first_id: int = 0,
    pair: Pair | None = None,
) -> Dataset:
    """Read the prompts of an entry: files, a folder, a glob, a generated task, or a slice of one (``path@[a:b]``).

    A prompt's id is ``first_id`` and its row, counted in all of the entry. A bad row raises, or is counted. With
    ``pair`` every row has two replies, which ride in the prompt's metadata (see rollout.preference).
    """
    name, rows = split_slice(path)
    skipped = _Skipped()
    if is_generated(name):
        if pair is not None:
            raise DataError(f"{name} makes questions, not pairs of replies; name files that have both.")
        prompts = tuple(_generated(name, range(task_of(name).size)[rows], first_id))
    else:
        bad = skipped if skip_bad_rows else refuse
        columns = Columns(input=input_key, label=label_key, metadata=metadata_key, pair=pair)
        prompts = tuple(_prompts(read_rows(path, columns, bad), columns, first_id, bad))
    if not prompts and skipped.count:
        raise DataError(f"None of the {skipped.count} rows of {path} can be read; the first: {skipped.first}")
    if not prompts:
        raise DataError(f"{path} holds no rows; check the file and its slice.")
    return Dataset(path=path, prompts=prompts, skipped=skipped.count, complaint=skipped.first)


class _Skipped:
    """Counts bad rows instead of stopping at them, and remembers what was wrong with the first."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""

    def __call__(self, error: DataError) -> None:
        self.first = self.first or str(error)
        self.count += 1


def fit(dataset: Dataset, render: Callable[[Prompt], Sized], limit: int | None) -> Dataset:
    """The data set without the prompts that ``render`` to more than ``limit`` tokens."""
    if limit is None:
        return dataset
    kept = tuple(p for p in dataset.prompts if len(render(p)) <= limit)
    if not kept:
        raise DataError(
            f"All {len(dataset)} prompts of {dataset.path} are longer than {limit} tokens; "
            "raise --rollout-max-prompt-len (or --rollout-max-context-len)."
        )
    return replace(dataset, prompts=kept, dropped=dataset.dropped + len(dataset) - len(kept), limit=limit)


class FileSource:
    """Reads a data set over and over, each epoch in an order that (seed, epoch) alone decide.

    Prompts given back are handed out again, before any new one. Loading the ``state`` of another
    source of the same data continues exactly where that one was.
    """

    def __init__(self, dataset: Dataset, *, shuffle: bool = False, seed: int = 0) -> None:
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        self._by_id = {prompt.id: prompt for prompt in dataset.prompts}
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)
        self._returned: deque[Prompt] = deque()
        self._told: dict[str, Any] | None = None

    def __len__(self) -> int:
        """Prompts an epoch has."""
        return len(self._dataset)

    def next(self) -> Prompt:
        self._told = None
        if self._returned:
            return self._returned.popleft()
        if self._position == len(self._dataset):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._order_of(self._epoch)
        prompt = self._dataset.prompts[self._order[self._position]]
        self._position += 1
        return replace(prompt, epoch=self._epoch)

    def give_back(self, prompt: Prompt) -> None:
        """Hand out ``prompt`` again, after those given back earlier and before any new one."""
        self._told = None
        self._returned.append(prompt)

    def has(self, prompt_id: int) -> bool:
        """Whether a prompt goes by this id."""
        return prompt_id in self._by_id

    def prompt_at(self, prompt_id: int, epoch: int) -> Prompt:
        """The very prompt that ``next`` gave as (id, epoch)."""
        if prompt_id not in self._by_id:
            raise ResumeError(f"{self._dataset.path} has no prompt {prompt_id}; the file or its slice has changed.")
        return replace(self._by_id[prompt_id], epoch=epoch)

    def state(self) -> dict[str, Any]:
        """The cursor, as JSON can hold it; the very same until it moves, as a mixture asks all parts at every draw."""
        if self._told is None:
            self._told = {
                "epoch": self._epoch,
                "position": self._position,
                "returned": [[prompt.id, prompt.epoch] for prompt in self._returned],
                "data": self._fingerprint,
            }
        return self._told

    def load(self, state: Mapping[str, Any]) -> None:
        if state["data"] != self._fingerprint:
            raise ResumeError(
                f"{self._dataset.path} does not give the prompts this run was started with; restore the file and "
                "the flags that read it, or start a new run from its last checkpoint with --hf-checkpoint."
            )
        self._told = None
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._order_of(self._epoch)
        self._returned = deque(self.prompt_at(prompt_id, epoch) for prompt_id, epoch in state["returned"])

    def _order_of(self, epoch: int) -> Sequence[int]:
        """Sorting by a hash of each row is a permutation, and dropping a row moves no other."""
        if not self._shuffle:
            return range(len(self._dataset))
        ids = np.array([prompt.id for prompt in self._dataset.prompts], np.int64)
        keys = mix_each((Stream.ORDER, self._seed, epoch), ids)
        return cast("list[int]", np.argsort(keys, kind="stable").tolist())

    @cached_property
    def _fingerprint(self) -> str:
        """A digest of everything that decides which prompt comes when."""
        digest = hashlib.sha256(f"{self._shuffle} {self._seed if self._shuffle else 0}".encode())
        for prompt in self._dataset.prompts:
            row = [prompt.id, list(prompt.messages), prompt.label, _plain(prompt.metadata)]
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()[:16]


def _prompts(rows: Iterator[Row], columns: Columns, first_id: int, bad: Bad) -> Iterator[Prompt]:
    for row in rows:
        try:
            prompt = _prompt(row, columns, first_id)
        except DataError as error:
            bad(error)
        else:
            yield prompt


def _prompt(row: Row, columns: Columns, first_id: int) -> Prompt:
    for key, flag in columns.required:
        if key not in row.columns:
            raise columns.missing(row.where, key, flag, row.found)
    asked = row.columns[columns.input]
    messages = _one_message(asked) if isinstance(asked, str) else _messages(row, columns.input, asked)
    label = None if columns.label is None else _label(row.columns[columns.label])
    metadata = row.columns.get(columns.metadata)
    if metadata is not None and not isinstance(metadata, dict):
        raise DataError(f"{row.where}: {columns.metadata} must be an object, and is a {type(metadata).__name__}.")
    if columns.pair is not None:
        if PREFERENCE in (metadata or {}):
            raise DataError(f"{row.where}: {columns.metadata} has its own {PREFERENCE}, the pair's place; rename it.")
        metadata = {**(metadata or {}), PREFERENCE: _preference(row, columns.pair, messages)}
    return Prompt(id=first_id + row.index, messages=messages, label=label, metadata=metadata or EMPTY)


def _preference(row: Row, pair: Pair, asked: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    given = {key: row.columns[key] for key in (pair.chosen, pair.rejected)}
    read = {key: reply if isinstance(reply, str) else _messages(row, key, reply) for key, reply in given.items()}
    return pair_of(
        row.where, asked, chosen=(pair.chosen, read[pair.chosen]), rejected=(pair.rejected, read[pair.rejected])
    )


def _generated(path: str, chosen: range, first_id: int) -> Iterator[Prompt]:
    """The whole entry rides in the metadata, where the reward ``reasoning_gym`` looks for it."""
    task = task_of(path)
    asked = {"source_dataset": task.name} | ({} if task.rm_type is None else {"rm_type": task.rm_type})
    for index, entry in zip(chosen, generate(path, chosen), strict=True):
        messages, label = _one_message(entry["question"]), _label(entry["answer"])
        yield Prompt(id=first_id + index, messages=messages, label=label, metadata={**asked, "entry": entry})


def _one_message(text: str) -> tuple[dict[str, Any], ...]:
    return ({"role": "user", "content": text},)


def _messages(row: Row, key: str, asked: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(asked, list) or not asked:
        raise DataError(f"{row.where}: {key} must be text or a list of messages, and is {_shown(asked)}.")
    messages: list[dict[str, Any]] = []
    for message in cast("list[Any]", asked):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not _has_content(message):
            raise DataError(f"{row.where}: each message of {key} needs a role and a content, unlike {_shown(message)}.")
        # Parquet gives every message all the fields any message has; those left empty say nothing
        messages.append({name: value for name, value in message.items() if name == "content" or value is not None})
    return tuple(messages)


def _has_content(message: Mapping[str, Any]) -> bool:
    """Text or a list of parts; a message that only calls tools may have none."""
    return isinstance(message.get("content"), str | list) or bool(message.get("tool_calls"))


def _label(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return str(value) if isinstance(value, Number) else json.dumps(value, default=str)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _plain(value: Any) -> Any:
    """Metadata as JSON can hold it, and as every process would write it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else value
