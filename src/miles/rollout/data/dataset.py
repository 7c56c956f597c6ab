"""Datasets of prompts, and a resumable source that reads one over and over."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Number
from typing import Any, cast

import numpy as np

from miles.core.errors import DataError, ResumeError
from miles.core.types import EMPTY, Prompt
from miles.rollout.data.media import MediaReader, attach_media
from miles.rollout.data.paths import read_rows, split_slice
from miles.rollout.data.schema import TOOLS, Columns, DataRow, OnBadRow, PreferenceColumns, raise_bad_row
from miles.rollout.data.task_suites import is_suite, read_suite_rows
from miles.rollout.offline.preference import PREFERENCE, build_preference_pair
from miles.rollout.seeds import SeedStream, mix_each


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    """The prompts of one data entry, in its order.

    ``dropped`` prompts were longer than ``limit`` tokens; ``skipped`` rows could not be read, ``first_error``
    is the error of the first. ``checked`` prompts were rendered before training; those with ``bad_ids`` cannot be
    used, ``first_bad`` says why for the first.
    """

    path: str
    prompts: tuple[Prompt, ...]
    dropped: int = 0
    limit: int | None = None
    skipped: int = 0
    first_error: str = ""
    checked: int | None = None
    bad_ids: frozenset[int] = frozenset()
    first_bad: str = ""

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def note(self) -> str | None:
        """A note for the user on dropped and skipped rows, if any."""
        notes: list[str] = []
        if self.skipped:
            rows = f"{self.skipped} of {self.skipped + self.dropped + len(self)} rows of {self.path}"
            notes.append(f"{rows} cannot be read and were skipped; the first: {self.first_error}")
        if self.dropped:
            prompts = f"{self.dropped} of {self.dropped + len(self)} prompts of {self.path}"
            notes.append(f"{prompts} are longer than {self.limit} tokens and were dropped.")
        if self.bad_ids:
            prompts = f"{len(self.bad_ids)} of {len(self)} prompts of {self.path}"
            notes.append(f"{prompts} cannot be used and are dropped in their turn; the first: {self.first_bad}")
        if self.checked is not None:
            notes.append(f"{self.checked} of {self.dropped + len(self)} prompts of {self.path} were rendered to check.")
        return " ".join(notes) or None


def read_dataset(
    path: str,
    *,
    input_key: str,
    label_key: str | None = None,
    metadata_key: str = "metadata",
    tool_key: str | None = None,
    skip_bad_rows: bool = False,
    first_id: int = 0,
    pair: PreferenceColumns | None = None,
    media_keys: Mapping[str, str] = EMPTY,
    media: MediaReader | None = None,
) -> Dataset:
    """Read the prompts of an entry: files, a folder, a glob, a task of a suite, or a slice of one (``path@[a:b]``).

    A prompt's id is ``first_id`` plus its row number in the entry. A bad row raises, or is counted. With
    ``pair`` every row has two replies, which go into the prompt's metadata (see offline.preference). ``media`` reads
    images and videos, also those of the columns ``media_keys``; without it, a row with images is bad.
    """
    name, rows = split_slice(path)
    skipped = _Skipped()
    if is_suite(name):
        if pair is not None:
            raise DataError(f"{name} has questions, not pairs of replies; name files that have both.")
        prompts = tuple(_suite_prompts(name, rows, first_id))
    else:
        on_bad_row = skipped if skip_bad_rows else raise_bad_row
        columns = Columns(
            input=input_key, label=label_key, metadata=metadata_key, tool=tool_key, pair=pair, media=media_keys
        )
        build = _PromptBuilder(columns, first_id, media)
        prompts = tuple(_build_prompts(read_rows(path, columns, on_bad_row), build, on_bad_row))
        for kind, key in media_keys.items() if prompts else ():
            if kind not in build.found_media:
                raise DataError(f"{path} has no column {key}, which --multimodal-keys names for {kind}s.")
    if not prompts and skipped.count:
        raise DataError(f"None of the {skipped.count} rows of {path} can be read; the first: {skipped.first}")
    if not prompts:
        raise DataError(f"{path} holds no rows; check the file and its slice.")
    return Dataset(path=path, prompts=prompts, skipped=skipped.count, first_error=skipped.first)


class _Skipped:
    """Counts bad rows instead of raising, and keeps the first error."""

    def __init__(self) -> None:
        self.count = 0
        self.first = ""

    def __call__(self, error: DataError) -> None:
        self.first = self.first or str(error)
        self.count += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptCheck:
    """How prompts are checked before training: ``max_rows`` of each dataset, or all if bad ones are skipped.

    A prompt must leave room for a reply within ``context`` tokens, unless that is None.
    """

    context: int | None
    max_rows: int
    skip_bad: bool


def check_prompts(
    dataset: Dataset, render: Callable[[Prompt], Sized], *, limit: int | None, check: PromptCheck
) -> Dataset:
    """Render prompts, drop those of more than ``limit`` tokens, and find those that cannot be used.

    A prompt that cannot be rendered raises. If bad ones are skipped, it is counted and keeps its place, so that the
    order and the ids of prompts do not depend on the option: the rollout drops it in its turn.
    """
    is_full = limit is not None or (check.skip_bad and check.max_rows > 0)
    count = len(dataset) if is_full else min(check.max_rows, len(dataset))
    if not count:
        return dataset
    kept, bad = list[Prompt](), dict[int, str]()
    for prompt in dataset.prompts[:count]:
        try:
            length = len(render(prompt))
            if limit is not None and length > limit:
                continue
            if check.context is not None and length >= check.context:
                raise DataError(
                    f"prompt {prompt.id} has {length} tokens, which leaves no room for a reply in a context of "
                    f"{check.context}"
                )
        except DataError as error:
            if not check.skip_bad:
                raise DataError(f"{dataset.path}: {advise_skipping(error)}") from error
            bad[prompt.id] = str(error)
        kept.append(prompt)
    first = next(iter(bad.values()), "")
    if bad and len(bad) == len(kept):
        raise DataError(f"None of the {len(bad)} prompts of {dataset.path} can be used; the first: {first}")
    fitting = dataset if limit is None else _keep_fitting(dataset, tuple(kept), limit)
    checked = count if check.max_rows else None
    return replace(fitting, checked=checked, bad_ids=frozenset(bad), first_bad=first)


def advise_skipping(error: DataError) -> str:
    """The error of a prompt, with how to go on without it."""
    return f"{str(error).rstrip('.')}; go on without such prompts with --skip-bad-rows."


def _keep_fitting(dataset: Dataset, prompts_kept: tuple[Prompt, ...], limit: int) -> Dataset:
    if not prompts_kept:
        raise DataError(
            f"All {len(dataset)} prompts of {dataset.path} are longer than {limit} tokens; "
            "raise --rollout-max-prompt-len (or --rollout-max-context-len)."
        )
    return replace(
        dataset, prompts=prompts_kept, dropped=dataset.dropped + len(dataset) - len(prompts_kept), limit=limit
    )


class DatasetSource:
    """Reads a dataset over and over, each epoch in an order determined by (seed, epoch) alone.

    Loading the ``state`` of another source of the same data continues exactly where that one was.
    """

    def __init__(self, dataset: Dataset, *, shuffle: bool = False, seed: int = 0) -> None:
        self._dataset = dataset
        self._shuffle = shuffle
        self._seed = seed
        self._by_id = {prompt.id: prompt for prompt in dataset.prompts}
        self._epoch = 0
        self._position = 0
        self._order = self._row_order(0)
        self._cached_state: dict[str, Any] | None = None

    def __len__(self) -> int:
        """Number of prompts per epoch."""
        return len(self._dataset)

    def next(self) -> Prompt:
        self._cached_state = None
        if self._position == len(self._dataset):
            self._epoch, self._position = self._epoch + 1, 0
            self._order = self._row_order(self._epoch)
        prompt = self._dataset.prompts[self._order[self._position]]
        self._position += 1
        return replace(prompt, epoch=self._epoch)

    def has_prompt(self, prompt_id: int) -> bool:
        """Whether there is a prompt with this id."""
        return prompt_id in self._by_id

    def get_prompt(self, prompt_id: int, epoch: int) -> Prompt:
        """The prompt that ``next`` returned as (id, epoch)."""
        if prompt_id not in self._by_id:
            raise ResumeError(f"{self._dataset.path} has no prompt {prompt_id}; the file or its slice has changed.")
        return replace(self._by_id[prompt_id], epoch=epoch)

    def state(self) -> dict[str, Any]:
        """The cursor as JSON-compatible data; cached until it moves, since a mixture asks all parts at every prompt."""
        if self._cached_state is None:
            self._cached_state = {
                "epoch": self._epoch,
                "position": self._position,
                "data": self._fingerprint,
            }
        return self._cached_state

    def load(self, state: Mapping[str, Any]) -> None:
        if state["data"] != self._fingerprint:
            raise ResumeError(
                f"{self._dataset.path} does not have the prompts this run was started with; restore the file and "
                "the flags that read it, or start a new run from its last checkpoint with --hf-checkpoint."
            )
        self._cached_state = None
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._row_order(self._epoch)

    def _row_order(self, epoch: int) -> Sequence[int]:
        """Row order of an epoch: sorting by a hash of each row is a permutation, and dropping a row moves no other."""
        if not self._shuffle:
            return range(len(self._dataset))
        ids = np.array([prompt.id for prompt in self._dataset.prompts], np.int64)
        keys = mix_each((SeedStream.ORDER, self._seed, epoch), ids)
        return cast("list[int]", np.argsort(keys, kind="stable").tolist())

    @cached_property
    def _fingerprint(self) -> str:
        """A digest of everything that determines the order and content of prompts."""
        digest = hashlib.sha256(f"{self._shuffle} {self._seed if self._shuffle else 0}".encode())
        for prompt in self._dataset.prompts:
            row = [prompt.id, list(prompt.messages), prompt.label, _jsonable(prompt.metadata)]
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
        return digest.hexdigest()[:16]


def _build_prompts(rows: Iterator[DataRow], build: _PromptBuilder, on_bad_row: OnBadRow) -> Iterator[Prompt]:
    for row in rows:
        try:
            prompt = build(row)
        except DataError as error:
            on_bad_row(error)
        else:
            yield prompt


class _PromptBuilder:
    """Builds the prompt of a row; ``found_media`` are the kinds of media whose column any row has had."""

    def __init__(self, columns: Columns, first_id: int, media: MediaReader | None) -> None:
        self._columns = columns
        self._first_id = first_id
        self._media = media
        self.found_media: set[str] = set()

    def __call__(self, row: DataRow) -> Prompt:
        columns = self._columns
        for key, flag in columns.required_columns:
            if key not in row.columns:
                raise columns.missing_column(row.where, key, flag, row.found)
        content = row.columns[columns.input]
        messages = _user_message(content) if isinstance(content, str) else _check_messages(row, columns.input, content)
        messages = self._attach_media(row, messages)
        label = None if columns.label is None else _label(row.columns[columns.label])
        metadata = row.columns.get(columns.metadata)
        if metadata is not None and not isinstance(metadata, dict):
            raise DataError(f"{row.where}: {columns.metadata} must be an object, and is a {type(metadata).__name__}.")
        if columns.tool is not None and row.columns.get(columns.tool):
            metadata = {**(metadata or {}), TOOLS: _parse_tools(row, columns.tool)}
        if columns.pair is not None:
            if PREFERENCE in (metadata or {}):
                raise DataError(
                    f"{row.where}: {columns.metadata} has its own {PREFERENCE}, which is reserved; rename it."
                )
            metadata = {**(metadata or {}), PREFERENCE: _build_preference(row, columns.pair, messages)}
        return Prompt(id=self._first_id + row.index, messages=messages, label=label, metadata=metadata or EMPTY)

    def _attach_media(self, row: DataRow, messages: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
        keys = self._columns.media
        self.found_media |= {kind for kind, key in keys.items() if key in row.found}
        return attach_media(
            messages,
            {kind: (key, row.columns.get(key)) for kind, key in keys.items()},
            reader=self._media,
            folder=row.folder,
            where=row.where,
        )


def _parse_tools(row: DataRow, key: str) -> list[Any]:
    tools = row.columns[key]
    with contextlib.suppress(ValueError):
        tools = json.loads(tools) if isinstance(tools, str) else tools
    if not isinstance(tools, list):
        raise DataError(f"{row.where}: {key} must be a list of tools or its JSON, and is {_preview(tools)}.")
    return tools


def _build_preference(
    row: DataRow, pair: PreferenceColumns, content: Sequence[Mapping[str, Any]]
) -> dict[str, Mapping[str, Any]]:
    replies = {key: row.columns[key] for key in (pair.chosen, pair.rejected)}
    parsed_replies = {
        key: reply if isinstance(reply, str) else _check_messages(row, key, reply) for key, reply in replies.items()
    }
    return build_preference_pair(
        row.where,
        content,
        chosen=(pair.chosen, parsed_replies[pair.chosen]),
        rejected=(pair.rejected, parsed_replies[pair.rejected]),
    )


def _suite_prompts(path: str, rows: slice, first_id: int) -> Iterator[Prompt]:
    """The prompts of a task suite; the metadata holds what the suite's own reward needs."""
    for row in read_suite_rows(path, rows):
        messages, label = _user_message(row.text), _label(row.answer)
        yield Prompt(id=first_id + row.index, messages=messages, label=label, metadata=row.metadata)


def _user_message(text: str) -> tuple[dict[str, Any], ...]:
    return ({"role": "user", "content": text},)


def _check_messages(row: DataRow, key: str, content: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(content, list) or not content:
        raise DataError(f"{row.where}: {key} must be text or a list of messages, and is {_preview(content)}.")
    messages: list[dict[str, Any]] = []
    for message in cast("list[Any]", content):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not _has_content(message):
            raise DataError(
                f"{row.where}: each message of {key} needs a role and a content, unlike {_preview(message)}."
            )
        # Parquet gives every message all the fields any message has; unused ones are null
        messages.append({name: value for name, value in message.items() if name == "content" or value is not None})
    return tuple(messages)


def _has_content(message: Mapping[str, Any]) -> bool:
    """Text or a list of parts; a message that only calls tools may have none."""
    return isinstance(message.get("content"), str | list) or bool(message.get("tool_calls"))


def _label(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return str(value) if isinstance(value, Number) else json.dumps(value, default=str)


def _preview(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _jsonable(value: Any) -> Any:
    """Metadata as JSON-compatible data, the same in every process."""
    if isinstance(value, Mapping):
        return {str(key): _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else value
