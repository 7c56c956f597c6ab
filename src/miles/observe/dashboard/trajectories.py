"""Trajectories of a run for reading: lists with filters, order and text search, one conversation, its tokens.

T is the number of tokens of a span.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from miles.core.agents import ROLES
from miles.core.errors import MilesError
from miles.core.routed_experts import unrecorded_id
from miles.core.token_fields import ROUTED_EXPERTS, TEACHER_LOGPROB
from miles.core.types import Array, Author, Group, Span, Trajectory
from miles.observe.dashboard.metric_store import to_json_numbers
from miles.observe.dashboard.run_index import clean
from miles.observe.rollout_reader import StepRollouts, read_step_rollouts
from miles.observe.rollouts import TRAINER, read_token_stats, step_path
from miles.observe.trajectory_view import TokenDecoder, list_calls, number_turns, split_into_pieces

_PREVIEW_CHARS = 240
_MAX_TEXT_CHARS = 400_000
_CONTEXT_TOKENS = 6
_SEARCH_SECONDS = 3.0
"""How long a search through all steps may take; it says how many steps it has seen."""
_METADATA = ("reason", "unscored", "failure", "turns", "tool_calls", "tool_failures", "session_mismatch")
SORT_KEYS = ("index", "reward", "length", "advantage", "logprob", "generate_seconds", "grade_seconds")
TrainerTokens = tuple[Array, Array]
"""The trainer's log-probs and entropies of a branch's tokens, NaN where a token was not trained on."""
LoadTokenizer = Callable[[Path], TokenDecoder]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryQuery:
    """Which trajectories are listed, and in which order."""

    text: str = ""
    status: str = ""
    min_reward: float | None = None
    max_reward: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    advantage: Literal["", "positive", "negative", "zero"] = ""
    with_tools: bool = False
    group: int | None = None
    sort: str = "index"
    descending: bool = False
    offset: int = 0
    limit: int = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """A trajectory of a step with what a list shows of it."""

    index: int
    group: Group
    ticket: int
    trajectory: Trajectory
    advantages: tuple[Array | None, ...]
    reward: float | None
    advantage: float | None
    logprob: float | None
    times: Mapping[str, float]
    trainer: tuple[TrainerTokens | None, ...]


class RolloutBrowser:
    """The rollout files of one run; the newest few that were opened are kept in memory."""

    def __init__(self, run: Path, load_tokenizer: LoadTokenizer) -> None:
        self._run = run
        self._load_tokenizer = load_tokenizer
        self._tokenizer: TokenDecoder | None = None
        self._tokenizer_error: str | None = None
        self._entries = lru_cache(maxsize=3)(self._read_entries)

    def list_trajectories(self, step: int, query: TrajectoryQuery) -> dict[str, Any]:
        """Return the trajectories of a step that match, one page of them, and the groups of the step."""
        entries = self._open(step)
        found = self._select(entries, query)
        return {
            "step": step,
            "total": len(entries),
            "matched": len(found),
            "rows": [self._build_row(step, entry) for entry in found[query.offset : query.offset + query.limit]],
            "groups": list(_list_groups(entries)),
        }

    def search_steps(self, steps: Sequence[int], query: TrajectoryQuery) -> dict[str, Any]:
        """Search the newest steps first until a page is full or the time is over."""
        deadline = time.monotonic() + _SEARCH_SECONDS
        rows: list[dict[str, Any]] = []
        seen = 0
        for step in reversed(steps):
            seen += 1
            if may_contain(step_path(self._run / "rollouts", step), query.text):
                rows += [self._build_row(step, entry) for entry in self._select(self._open(step), query)]
            if len(rows) >= query.limit or time.monotonic() > deadline:
                break
        return {"step": None, "searched": seen, "steps": len(steps), "matched": len(rows), "rows": rows[: query.limit]}

    def read_trajectory(self, step: int, index: int) -> dict[str, Any]:
        """Return one trajectory as a conversation; IndexError if the step has no such one."""
        entry = self._get(step, index)
        trajectory, prompt = entry.trajectory, entry.group.prompt
        tokenizer = self._open_tokenizer()
        roles = trajectory.metadata.get(ROLES, ())
        return self._build_row(step, entry) | {
            "label": prompt.label,
            "parts": {} if trajectory.reward is None else to_json_value(trajectory.reward.parts),
            "messages": to_json_value(prompt.messages),
            "metadata": {name: to_json_value(trajectory.metadata[name]) for name in _METADATA if _has(entry, name)},
            "branches": [
                {
                    "role": str(roles[number]) if roles else None,
                    "tokens": sum(len(span) for span in branch),
                    "spans": list(_build_spans(trajectory, branch, tokenizer)),
                }
                for number, branch in enumerate(trajectory.branches)
            ],
            "group_size": len(entry.group.trajectories),
            "tokenizer_error": self._tokenizer_error,
        }

    def read_tokens(self, step: int, index: int, branch: int, first: int, limit: int, layer: int = 0) -> dict[str, Any]:
        """Return ``limit`` tokens of a branch with their text and every per-token number of the file.

        Chosen experts are those of one MoE ``layer``.
        """
        entry = self._get(step, index)
        spans = entry.trajectory.branches[branch]
        total = sum(len(span) for span in spans)
        tokenizer = self._open_tokenizer()
        advantages_T, trainer = entry.advantages[branch], entry.trainer[branch]
        pieces: list[dict[str, Any]] = []
        start = 0
        before: list[int] = []
        for span in spans:
            low, high = max(first - start, 0), min(first + limit - start, len(span))
            if low < high:
                part = slice(start + low, start + high)
                context = [*before, *span.tokens[:low].tolist()][-_CONTEXT_TOKENS:]
                values = _list_token_values(span, low, high)
                if span.author is Author.POLICY:
                    values |= _list_trainer_values(span.logprobs, low, high, part, trainer)
                    if advantages_T is not None:
                        values["advantage"] = to_json_numbers(advantages_T[part].astype(np.float64), 5)
                piece = _build_tokens(span, low, high, context, tokenizer) | {"first": start + low, "values": values}
                pieces.append(piece | _list_experts(span, low, high, layer))
            before = [*before, *span.tokens.tolist()][-_CONTEXT_TOKENS:]
            start += len(span)
        fields = sorted({name for piece in pieces for name in piece["values"]})
        layers = max(
            (span.extras[ROUTED_EXPERTS].shape[1] for span in spans if ROUTED_EXPERTS in span.extras), default=0
        )
        return {"first": first, "total": total, "spans": pieces, "fields": fields, "expert_layers": layers}

    # -- reading ----------------------------------------------------------------------------

    def _open(self, step: int) -> tuple[_Entry, ...]:
        folder = self._run / "rollouts"
        paths = (step_path(folder, step), step_path(folder / TRAINER, step))
        return self._entries(step, *(path.stat().st_mtime_ns if path.is_file() else 0 for path in paths))

    def _read_entries(self, step: int, modified: int, trainer_modified: int) -> tuple[_Entry, ...]:
        folder = self._run / "rollouts"
        trainer = read_token_stats(step_path(folder / TRAINER, step))
        return tuple(_list_entries(read_step_rollouts(step_path(folder, step)), trainer))

    def _get(self, step: int, index: int) -> _Entry:
        return self._open(step)[index]

    def _open_tokenizer(self) -> TokenDecoder:
        if self._tokenizer is None:
            try:
                self._tokenizer = self._load_tokenizer(self._run)
            except (MilesError, OSError, ValueError) as error:
                self._tokenizer_error = f"The tokenizer cannot be loaded, so tokens are shown as numbers: {error}"
                self._tokenizer = NumberDecoder()
        return self._tokenizer

    # -- lists ------------------------------------------------------------------------------

    def _select(self, entries: Sequence[_Entry], query: TrajectoryQuery) -> list[_Entry]:
        found = [entry for entry in entries if _matches(entry, query)]
        if query.text:
            wanted = query.text.casefold()
            found = [entry for entry in found if wanted in self._searchable(entry)]
        if query.sort != "index" or query.descending:
            found.sort(key=lambda entry: _sort_key(entry, query.sort), reverse=query.descending)
        return found

    def _searchable(self, entry: _Entry) -> str:
        prompt = entry.group.prompt
        contents = [str(message.get("content", "")) for message in prompt.messages if isinstance(message, Mapping)]
        return "\n".join([self._get_text(entry), str(prompt.label or ""), *contents]).casefold()

    def _get_text(self, entry: _Entry) -> str:
        text = entry.trajectory.metadata.get("text")
        if isinstance(text, str):
            return text
        tokens = [span.tokens for span in entry.trajectory.spans if span.author is Author.POLICY]
        return self._open_tokenizer().decode(np.concatenate(tokens).tolist()) if tokens else ""

    def _build_row(self, step: int, entry: _Entry) -> dict[str, Any]:
        trajectory = entry.trajectory
        versions = {span.version.number for span in trajectory.spans if span.version is not None}
        text = self._get_text(entry)
        return {
            "step": step,
            "index": entry.index,
            "ticket": entry.ticket,
            "prompt_id": entry.group.prompt.id,
            "epoch": entry.group.prompt.epoch,
            "sample": trajectory.index,
            "status": str(trajectory.status),
            "reward": clean(entry.reward),
            "advantage": clean(entry.advantage),
            "logprob": clean(entry.logprob),
            "length": trajectory.response_length,
            "num_branches": len(trajectory.branches),
            "versions": [min(versions), max(versions)] if versions else [],
            "tools": _count_tools(trajectory),
            "generate_seconds": clean(entry.times.get("generate")),
            "grade_seconds": clean(entry.times.get("grade")),
            "text": text[:_PREVIEW_CHARS],
        }


class NumberDecoder:
    """A decoder for a run whose tokenizer is not there: every token is its number."""

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(f"[{token}]" for token in tokens)


def may_contain(path: Path, text: str) -> bool:
    """Return whether a text, in any case, may be in a response, a label or a prompt of a file; reads these alone."""
    import pyarrow.parquet as pq
    from pyarrow.compute import MatchSubstringOptions, call_function

    if not text or not text.isascii() or any(char in text for char in '"\\'):  # as JSON spells them otherwise
        return True
    table = pq.read_table(path, columns=["text", "label", "prompt"])
    if table.column("text").null_count:
        return True
    options = MatchSubstringOptions(text, ignore_case=True)
    hits = (call_function("match_substring", [table.column(name)], options) for name in ("text", "label"))
    if any(call_function("any", [hit]).as_py() for hit in hits):
        return True
    wanted = text.lower().encode()
    return any(wanted in packed.lower() for packed in table.column("prompt").drop_null().to_pylist())


def _list_entries(rollouts: StepRollouts, trainer: Mapping[tuple[int, int, int], TrainerTokens]) -> Iterator[_Entry]:
    index = 0
    for ticket, group, group_advantages, group_times in zip(
        rollouts.tickets, rollouts.groups, rollouts.advantages, rollouts.times, strict=True
    ):
        for trajectory, advantages, times in zip(group.trajectories, group_advantages, group_times, strict=True):
            logprobs = [span.logprobs for span in trajectory.spans if span.logprobs is not None and len(span)]
            yield _Entry(
                index=index,
                group=group,
                ticket=ticket,
                trajectory=trajectory,
                advantages=advantages,
                reward=None if trajectory.reward is None else float(trajectory.reward.value),
                advantage=_mean_advantage(trajectory, advantages),
                logprob=float(np.concatenate(logprobs).mean()) if logprobs else None,
                times=times,
                trainer=tuple(
                    trainer.get((ticket, trajectory.index, number)) for number in range(len(trajectory.branches))
                ),
            )
            index += 1


def _mean_advantage(trajectory: Trajectory, advantages: Sequence[Array | None]) -> float | None:
    """Return the mean advantage of the policy's tokens."""
    parts: list[Array] = []
    for branch, values in zip(trajectory.branches, advantages, strict=True):
        start = 0
        for span in branch:
            if values is not None and span.author is Author.POLICY:
                parts.append(values[start : start + len(span)])
            start += len(span)
    found = np.concatenate(parts) if parts else np.zeros(0)
    return float(found.mean()) if len(found) else None


def _list_groups(entries: Sequence[_Entry]) -> Iterator[dict[str, Any]]:
    by_ticket: dict[int, list[_Entry]] = {}
    for entry in entries:
        by_ticket.setdefault(entry.ticket, []).append(entry)
    for ticket, members in by_ticket.items():
        yield {
            "ticket": ticket,
            "prompt_id": members[0].group.prompt.id,
            "rewards": [clean(entry.reward) for entry in members],
            "first": members[0].index,
        }


def _matches(entry: _Entry, query: TrajectoryQuery) -> bool:
    reward, length = entry.reward, entry.trajectory.response_length
    signs = {"positive": 1.0, "negative": -1.0, "zero": 0.0}
    return (
        (not query.status or str(entry.trajectory.status) == query.status)
        and (query.min_reward is None or (reward is not None and reward >= query.min_reward))
        and (query.max_reward is None or (reward is not None and reward <= query.max_reward))
        and (query.min_length is None or length >= query.min_length)
        and (query.max_length is None or length <= query.max_length)
        and (not query.advantage or np.sign(entry.advantage or 0.0) == signs[query.advantage])
        and (not query.with_tools or _count_tools(entry.trajectory) > 0)
        and (query.group is None or entry.ticket == query.group)
    )


def _sort_key(entry: _Entry, name: str) -> tuple[bool, float]:
    """Return a key that sorts missing values first."""
    values = {
        "index": float(entry.index),
        "reward": entry.reward,
        "length": float(entry.trajectory.response_length),
        "advantage": entry.advantage,
        "logprob": entry.logprob,
        "generate_seconds": entry.times.get("generate"),
        "grade_seconds": entry.times.get("grade"),
    }
    value = clean(values[name])
    return value is not None, 0.0 if value is None else value


def _count_tools(trajectory: Trajectory) -> int:
    count = trajectory.metadata.get("tool_calls", 0)
    return count if isinstance(count, int) else len(count) if isinstance(count, Sequence) else 0


def _has(entry: _Entry, name: str) -> bool:
    return bool(entry.trajectory.metadata.get(name))


# -- one trajectory -------------------------------------------------------------------------


def _build_spans(trajectory: Trajectory, branch: tuple[Span, ...], tokenizer: TokenDecoder) -> Iterator[dict[str, Any]]:
    turns = number_turns(branch)
    calls = list_calls(trajectory, max(turns, default=0))
    for place, (span, turn) in enumerate(zip(branch, turns, strict=True)):
        is_last_of_turn = bool(turn) and turn not in turns[place + 1 :]
        text = tokenizer.decode(span.tokens.tolist())
        yield {
            "author": str(span.author),
            "turn": turn,
            "tokens": len(span),
            "version": None if span.version is None else span.version.number,
            "policy": None if span.version is None else span.version.policy,
            "text": text[:_MAX_TEXT_CHARS],
            "cut": max(0, len(text) - _MAX_TEXT_CHARS),
            "calls": calls.get(turn, []) if is_last_of_turn else [],
            "images": [
                {"source": placed.image.source, "kind": placed.image.kind, "tokens": placed.length}
                for placed in span.images
            ],
        }


def _build_tokens(span: Span, low: int, high: int, before: Sequence[int], tokenizer: TokenDecoder) -> dict[str, Any]:
    tokens = span.tokens[low:high].tolist()
    texts, counts = [], []
    for text, count in split_into_pieces(tokens, before, tokenizer):
        texts.append(text)
        counts.append(count)
    return {
        "author": str(span.author),
        "version": None if span.version is None else span.version.number,
        "tokens": tokens,
        "texts": texts,
        "counts": counts,
    }


def _list_token_values(span: Span, low: int, high: int) -> dict[str, list[float | None]]:
    """Return the numbers of some tokens of a span that the rollout file has."""
    values: dict[str, list[float | None]] = {}
    if span.logprobs is not None:
        values["logprob"] = to_json_numbers(span.logprobs[low:high].astype(np.float64), 5)
    for name, extra in span.extras.items():
        if extra.ndim == 1 and len(extra) == len(span) and extra.dtype.kind in "fiu":
            values[name] = to_json_numbers(extra[low:high].astype(np.float64), 5)
    if TEACHER_LOGPROB in values and span.logprobs is not None:
        difference_T = span.logprobs[low:high].astype(np.float64) - span.extras[TEACHER_LOGPROB][low:high]
        values["teacher_difference"] = to_json_numbers(difference_T, 5)
    return values


def _list_trainer_values(
    logprobs: Array | None, low: int, high: int, part: slice, trainer: TrainerTokens | None
) -> dict[str, list[float | None]]:
    """Return the trainer's numbers of some tokens of the policy, at ``part`` of the branch."""
    if trainer is None or logprobs is None:
        return {}
    trainer_logprobs_T, entropies_T = (each[part].astype(np.float64) for each in trainer)
    return {
        "trainer_logprob": to_json_numbers(trainer_logprobs_T, 5),
        "engine_trainer_difference": to_json_numbers(logprobs[low:high].astype(np.float64) - trainer_logprobs_T, 5),
        "entropy": to_json_numbers(entropies_T, 5),
    }


def _list_experts(span: Span, low: int, high: int, layer: int) -> dict[str, Any]:
    """Return the experts of one MoE layer that each token was routed to, an empty list where none are recorded."""
    experts_TLk = span.extras.get(ROUTED_EXPERTS)
    if experts_TLk is None or layer >= experts_TLk.shape[1]:
        return {}
    unrecorded = unrecorded_id(experts_TLk.dtype)
    return {"experts": [[e for e in row if e != unrecorded] for row in experts_TLk[low:high, layer].tolist()]}


def to_json_value(value: Any, depth: int = 8) -> Any:
    """Return plain JSON of any value: what JSON lacks is its text, bytes are their length.

    >>> to_json_value({"a": (1, b"xy", float("nan"))})
    {'a': [1, '2 bytes', None]}
    """
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return clean(value)
        case bytes():
            return f"{len(value)} bytes"
        case np.ndarray() | np.generic():
            return to_json_value(value.tolist(), depth)
        case Mapping() if depth:
            return {str(key): to_json_value(inner, depth - 1) for key, inner in value.items()}
        case Sequence() if depth:
            return [to_json_value(inner, depth - 1) for inner in value]
        case _:
            return str(value)[:_PREVIEW_CHARS]
