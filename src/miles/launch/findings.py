"""What a run wrote down, held against what is made of the same again: to the bit, or within a tolerance."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from miles.core.types import Array, Group, Span, Trajectory

Decode = Callable[[Sequence[int]], str]
_BEYOND = ("cursor.json", "manifest.json")
"""Files of a checkpoint that say where the run stood and not what it had learned."""


@dataclass(slots=True, kw_only=True)
class Count:
    """How many of something were compared and are equal, the largest gap, and the first difference in a sentence."""

    what: str
    compared: int = 0
    equal: int = 0
    largest: float = 0.0
    first: str | None = None

    def put(self, difference: str | None, gap: float = 0.0) -> None:
        self.compared += 1
        self.equal += difference is None
        self.largest = max(self.largest, gap)
        self.first = self.first or difference


@dataclass(slots=True)
class Findings:
    """All that was compared, in the order in which it happens in a step."""

    counts: dict[str, Count] = field(default_factory=lambda: dict[str, Count]())

    def of(self, what: str) -> Count:
        return self.counts.setdefault(what, Count(what=what))

    @property
    def equal(self) -> bool:
        return all(count.equal == count.compared for count in self.counts.values())

    @property
    def first(self) -> str | None:
        return next((count.first for count in self.counts.values() if count.first is not None), None)


# -- what was sampled -----------------------------------------------------------------------


def compare_group(was: Group, now: Group, found: Findings, *, first: int, tolerance: float, decode: Decode) -> None:
    """Every attempt of a group; ``first`` is the number of its first one among the step's trajectories."""
    for number, (before, after) in enumerate(zip(was.trajectories, now.trajectories, strict=True), first):
        name = f"trajectory {number} (prompt {was.prompt.id}, attempt {before.index})"
        compare_trajectory(before, after, found, name=name, tolerance=tolerance, decode=decode)


def compare_trajectory(
    was: Trajectory, now: Trajectory, found: Findings, *, name: str, tolerance: float, decode: Decode
) -> None:
    """Its tokens, their log-probs, how it ended and what it earned."""
    tokens, logprobs, gap = _first_differences(was, now, tolerance, decode)
    found.of("log-probs").put(logprobs and f"{name}: {logprobs}", gap)
    found.of("tokens").put(tokens and f"{name}: {tokens}")
    ended = None if was.status is now.status else f"{name} ended as {was.status} and ends as {now.status}"
    found.of("endings").put(ended)
    before, after = (None if t.reward is None else t.reward.value for t in (was, now))
    same = before == after or (before is not None and after is not None and abs(before - after) <= tolerance)
    found.of("rewards").put(None if same else f"{name} earned {before} and earns {after}")


def _first_differences(
    was: Trajectory, now: Trajectory, tolerance: float, decode: Decode
) -> tuple[str | None, str | None, float]:
    """The first token that differs, the first log-prob that does, and the largest gap between two log-probs.

    Log-probs are compared as far as they are of the same tokens.
    """
    token = logprob = None
    largest = 0.0
    if len(was.branches) != len(now.branches):
        token = f"it had {len(was.branches)} branches and has {len(now.branches)}"
    for number, (one, other) in enumerate(zip(was.branches, now.branches, strict=False)):
        where = f" of branch {number}" if len(was.branches) > 1 else ""
        (ids, logp), (new_ids, new_logp) = _joined(one), _joined(other)
        length = min(len(ids), len(new_ids))
        at = int(next(iter(np.flatnonzero(ids[:length] != new_ids[:length])), length))
        if token is None and (at < length or len(ids) != len(new_ids)):
            words = [_word(side, at, decode) for side in (ids, new_ids)]
            token = f"token {at} of {len(ids)}{where} was {words[0]} and is {words[1]}"
        gaps = np.abs(logp[:at].astype(np.float64) - new_logp[:at])
        largest = max(largest, float(gaps.max(initial=0.0)))
        for place in np.flatnonzero(~(gaps <= tolerance))[:1]:
            logprob = logprob or (
                f"the log-prob of token {place} of {len(ids)}{where} was {logp[place]:.9g} and is "
                f"{new_logp[place]:.9g} ({gaps[place]:.3g} apart)"
            )
    return token, logprob, largest


def _joined(branch: Sequence[Span]) -> tuple[Array, Array]:
    """All tokens, and their log-probs where the policy wrote them."""
    tokens = [span.tokens for span in branch]
    logprobs = [np.zeros(len(s), np.float32) if s.logprobs is None else s.logprobs for s in branch]
    return np.concatenate([*tokens, np.zeros(0, np.int32)]), np.concatenate([*logprobs, np.zeros(0, np.float32)])


def _word(ids: Array, at: int, decode: Decode) -> str:
    return f"{decode([int(ids[at])])!r} ({ids[at]})" if at < len(ids) else "none, for it had ended"


# -- what was trained -----------------------------------------------------------------------


def compare_metrics(was: Mapping[str, float], now: Mapping[str, float], found: Findings, tolerance: float) -> None:
    """Every number of a step, by its name."""
    for name in sorted({*was, *now}):
        before, after = was.get(name), now.get(name)
        if before is None or after is None:
            told = ["not written" if value is None else repr(value) for value in (before, after)]
            found.of("metrics").put(f"{name} was {told[0]} and is {told[1]}")
            continue
        same = before == after or (before != before and after != after)
        gap = 0.0 if same else abs(before - after)
        found.of("metrics").put(None if gap <= tolerance else f"{name} was {before!r} and is {after!r}", gap)


def compare_checkpoints(was: Path, now: Path, found: Findings, tolerance: float) -> None:
    """Every tensor of every file, and all other files byte by byte."""
    for path in sorted(p for p in was.rglob("*") if p.is_file() and p.name not in _BEYOND):
        name = path.relative_to(was)
        other = now / name
        if not other.is_file():
            found.of("files").put(f"{name} was saved and is not now")
        elif path.suffix == ".safetensors":
            count = found.of("optimizer" if path.name.startswith("optimizer") else "weights")
            for difference, gap in _tensors(path, other, tolerance):
                count.put(difference, gap)
        else:
            found.of("files").put(None if path.read_bytes() == other.read_bytes() else f"{name} has other content")


def _tensors(was: Path, now: Path, tolerance: float) -> Iterator[tuple[str | None, float]]:
    import torch
    from safetensors import safe_open

    with safe_open(was, "pt") as before, safe_open(now, "pt") as after:
        held = set(before.keys()) & set(after.keys())
        for name in sorted({*before.keys(), *after.keys()}):
            if name not in held:
                yield f"{was.name} has {name} in one of the two only", 0.0
                continue
            one, other = before.get_tensor(name), after.get_tensor(name)
            if one.shape != other.shape or one.dtype != other.dtype:
                yield f"{name} was {one.dtype} {list(one.shape)} and is {other.dtype} {list(other.shape)}", 0.0
                continue
            gaps = (one.to(torch.float64) - other.to(torch.float64)).abs()
            gap = float(gaps.max()) if gaps.numel() else 0.0
            same = torch.equal(one, other) or gap <= tolerance
            yield None if same else f"{name} in {was.name} differs by up to {gap:.3g}", gap
