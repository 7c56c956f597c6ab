"""Findings of a replay: recorded trajectories, metrics and weights compared with new ones, within a tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from miles.core.types import Array, Group, Span, Trajectory

Decode = Callable[[Sequence[int]], str]
_IGNORED_FILES = ("cursor.json", "manifest.json")
"""Files of a checkpoint with the position of the run, not with what it learned."""


@dataclass(slots=True, kw_only=True)
class ComparisonCount:
    """How many items of a kind were compared and are equal, the largest gap, and the first difference."""

    what: str
    compared: int = 0
    equal: int = 0
    largest: float = 0.0
    first: str | None = None

    def add(self, difference: str | None, gap: float = 0.0) -> None:
        self.compared += 1
        self.equal += difference is None
        self.largest = max(self.largest, gap)
        self.first = self.first or difference


@dataclass(slots=True)
class Findings:
    """All that was compared, in the order in which it happens in a step."""

    counts: dict[str, ComparisonCount] = field(default_factory=lambda: dict[str, ComparisonCount]())

    def get(self, what: str) -> ComparisonCount:
        return self.counts.setdefault(what, ComparisonCount(what=what))

    @property
    def equal(self) -> bool:
        return all(count.equal == count.compared for count in self.counts.values())

    @property
    def first(self) -> str | None:
        return next((count.first for count in self.counts.values() if count.first is not None), None)


# -- trajectories ---------------------------------------------------------------------------


def compare_group(was: Group, now: Group, findings: Findings, *, first: int, tolerance: float, decode: Decode) -> None:
    """Compare every trajectory of a group; ``first`` is the index of its first one in the step."""
    for number, (before, after) in enumerate(zip(was.trajectories, now.trajectories, strict=True), first):
        name = f"trajectory {number} (prompt {was.prompt.id}, sample {before.index})"
        compare_trajectory(before, after, findings, name=name, tolerance=tolerance, decode=decode)


def compare_trajectory(
    was: Trajectory, now: Trajectory, findings: Findings, *, name: str, tolerance: float, decode: Decode
) -> None:
    """Compare tokens, log-probs, status and reward."""
    tokens, logprobs, gap = _first_differences(was, now, tolerance, decode)
    findings.get("log-probs").add(logprobs and f"{name}: {logprobs}", gap)
    findings.get("tokens").add(tokens and f"{name}: {tokens}")
    difference = None if was.status is now.status else f"{name} ended as {was.status} and ends as {now.status}"
    findings.get("endings").add(difference)
    before, after = (None if t.reward is None else t.reward.value for t in (was, now))
    same = before == after or (before is not None and after is not None and abs(before - after) <= tolerance)
    findings.get("rewards").add(None if same else f"{name} had reward {before} and has {after}")


def _first_differences(
    was: Trajectory, now: Trajectory, tolerance: float, decode: Decode
) -> tuple[str | None, str | None, float]:
    """The first token that differs, the first log-prob that does, and the largest gap between two log-probs.

    Log-probs are compared up to the first token that differs.
    """
    token = logprob = None
    largest = 0.0
    if len(was.branches) != len(now.branches):
        token = f"it had {len(was.branches)} branches and has {len(now.branches)}"
    for number, (one, other) in enumerate(zip(was.branches, now.branches, strict=False)):
        where = f" of branch {number}" if len(was.branches) > 1 else ""
        (ids, logp), (new_ids, new_logp) = _concatenate(one), _concatenate(other)
        length = min(len(ids), len(new_ids))
        at = int(next(iter(np.flatnonzero(ids[:length] != new_ids[:length])), length))
        if token is None and (at < length or len(ids) != len(new_ids)):
            words = [_format_token(side, at, decode) for side in (ids, new_ids)]
            token = f"token {at} of {len(ids)}{where} was {words[0]} and is {words[1]}"
        gaps = np.abs(logp[:at].astype(np.float64) - new_logp[:at])
        largest = max(largest, float(gaps.max(initial=0.0)))
        for place in np.flatnonzero(~(gaps <= tolerance))[:1]:
            logprob = logprob or (
                f"the log-prob of token {place} of {len(ids)}{where} was {logp[place]:.9g} and is "
                f"{new_logp[place]:.9g} ({gaps[place]:.3g} apart)"
            )
    return token, logprob, largest


def _concatenate(branch: Sequence[Span]) -> tuple[Array, Array]:
    """All tokens, and their log-probs where the policy sampled them."""
    tokens = [span.tokens for span in branch]
    logprobs = [np.zeros(len(s), np.float32) if s.logprobs is None else s.logprobs for s in branch]
    return np.concatenate([*tokens, np.zeros(0, np.int32)]), np.concatenate([*logprobs, np.zeros(0, np.float32)])


def _format_token(ids: Array, at: int, decode: Decode) -> str:
    return f"{decode([int(ids[at])])!r} ({ids[at]})" if at < len(ids) else "none: it had ended"


# -- metrics and weights --------------------------------------------------------------------


def compare_metrics(was: Mapping[str, float], now: Mapping[str, float], findings: Findings, tolerance: float) -> None:
    """Compare every metric of a step."""
    for name in sorted({*was, *now}):
        before, after = was.get(name), now.get(name)
        if before is None or after is None:
            texts = ["missing" if value is None else repr(value) for value in (before, after)]
            findings.get("metrics").add(f"{name} was {texts[0]} and is {texts[1]}")
            continue
        same = before == after or (before != before and after != after)
        gap = 0.0 if same else abs(before - after)
        findings.get("metrics").add(None if gap <= tolerance else f"{name} was {before!r} and is {after!r}", gap)


def compare_checkpoints(was: Path, now: Path, findings: Findings, tolerance: float) -> None:
    """Compare every tensor of every file, and all other files byte by byte."""
    from safetensors import SafetensorError

    for path in sorted(p for p in was.rglob("*") if p.is_file() and p.name not in _IGNORED_FILES):
        name = path.relative_to(was)
        other = now / name
        if not other.is_file():
            findings.get("files").add(f"{name} was saved, but not now")
        elif path.suffix == ".safetensors":
            count = findings.get("optimizer" if path.name.startswith("optimizer") else "weights")
            try:
                for difference, gap in _compare_tensors(path, other, tolerance):
                    count.add(difference, gap)
            except SafetensorError as error:
                count.add(f"{name} is damaged ({error})", 0.0)
        else:
            findings.get("files").add(None if path.read_bytes() == other.read_bytes() else f"{name} has other content")


def _compare_tensors(was: Path, now: Path, tolerance: float) -> Iterator[tuple[str | None, float]]:
    import torch
    from safetensors import safe_open

    with safe_open(was, "pt") as before, safe_open(now, "pt") as after:
        common = set(before.keys()) & set(after.keys())
        for name in sorted({*before.keys(), *after.keys()}):
            if name not in common:
                yield f"{was.name} has {name} in only one of the two", 0.0
                continue
            one, other = before.get_tensor(name), after.get_tensor(name)
            if one.shape != other.shape or one.dtype != other.dtype:
                yield f"{name} was {one.dtype} {list(one.shape)} and is {other.dtype} {list(other.shape)}", 0.0
                continue
            gaps = (one.to(torch.float64) - other.to(torch.float64)).abs()
            gap = float(gaps.max()) if gaps.numel() else 0.0
            same = torch.equal(one, other) or gap <= tolerance
            yield None if same else f"{name} in {was.name} differs by up to {gap:.3g}", gap
