"""Several entries of data as one source: read one after another, or mixed by weight, part by part in exact shares."""

from __future__ import annotations

import hashlib
import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from miles.core.errors import ResumeError
from miles.core.types import Prompt
from miles.rollout.files import entries_of
from miles.rollout.rows import Pair
from miles.rollout.source import Dataset, FileSource, fit, read_dataset

APART = 10**12
"""Between the ids of two parts: prompt 2_000_000_000_017 is row 17 of the third, whatever the sizes of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One entry of ``--prompt-data``: what it is called, its weight if it was given one, and its prompts."""

    name: str
    dataset: Dataset
    weight: Fraction | None = None


def read_parts(
    words: Sequence[str],
    *,
    input_key: str,
    label_key: str | None = None,
    metadata_key: str = "metadata",
    skip_bad_rows: bool = False,
    pair: Pair | None = None,
) -> tuple[Part, ...]:
    """Read every entry of ``--prompt-data``; ids are unique over all of them, and names are too."""
    entries, seen, parts = entries_of(words), Counter[str](), list[Part]()
    for number, (word, entry) in enumerate(zip(words, entries, strict=True)):
        seen[entry.name] += 1
        dataset = read_dataset(
            word if entry.weight is None else word.rpartition("*")[0],
            input_key=input_key,
            label_key=label_key,
            metadata_key=metadata_key,
            skip_bad_rows=skip_bad_rows,
            first_id=number * APART,
            pair=pair,
        )
        name = entry.name if seen[entry.name] == 1 else f"{entry.name}-{seen[entry.name]}"
        parts.append(Part(name=name, dataset=dataset, weight=entry.weight))
    return tuple(parts)


def fit_parts(parts: Sequence[Part], render: Callable[[Prompt], Sized], limit: int | None) -> tuple[Part, ...]:
    """The parts without the prompts that ``render`` to more than ``limit`` tokens."""
    return tuple(replace(part, dataset=fit(part.dataset, render, limit)) for part in parts)


def source_of(parts: Sequence[Part], *, shuffle: bool, seed: int) -> FileSource | MixedSource:
    """A mixture where the parts have weights; else all their prompts as one data set, part after part."""
    if len(parts) > 1 and parts[0].weight is not None:
        return MixedSource(parts, shuffle=shuffle, seed=seed)
    return FileSource(_joined(parts), shuffle=shuffle, seed=seed)


def _joined(parts: Sequence[Part]) -> Dataset:
    if len(parts) == 1:
        return parts[0].dataset
    path = " and ".join(part.dataset.path for part in parts)
    return Dataset(path=path, prompts=tuple(prompt for part in parts for prompt in part.dataset.prompts))


class Turns:
    """Whose turn it is: parts drawn one at a time, each as often as its weight says, never a whole turn early or late.

    ``owed`` is what each part is behind its share, in units of 1/total of the weights. The next turn
    is the one whose deadline is nearest, of those that are owed enough (R. Tijdeman, The chairman
    assignment problem, 1980). After any number of turns under the same weights, a part of ``k`` has
    had its share to within ``1 - 1 / (2k - 2)`` turns.
    """

    def __init__(self, owed: Sequence[int]) -> None:
        self.owed = list(owed)

    def next(self, weights: Sequence[int]) -> int:
        """The number of the next part; ``weights`` are whole, and at least one is above 0."""
        total, slack = sum(weights), max(2 * len(weights) - 2, 1)
        self.owed = [owed + weight for owed, weight in zip(self.owed, weights, strict=True)]
        open_to = [number for number, weight in enumerate(weights) if weight]
        due = [number for number in open_to if slack * self.owed[number] >= total]
        if due:
            chosen = min(due, key=lambda n: Fraction((slack - 1) * total - slack * self.owed[n], weights[n]))
        else:  # weights have changed, and those who are owed most have none now
            chosen = max(open_to, key=lambda n: self.owed[n])
        self.owed[chosen] -= total
        return chosen


class MixedSource:
    """Draws from parts by weight; each part keeps its own epochs and order.

    Prompts given back are handed out again, before any new one.
    """

    def __init__(self, parts: Sequence[Part], *, shuffle: bool = False, seed: int = 0) -> None:
        self._weights = whole_weights([part.weight or Fraction(0) for part in parts])
        self._parts = Cursors(parts, shuffle=shuffle, seed=seed)
        self._turns = Turns([0] * len(parts))
        self._returned: deque[Prompt] = deque()

    def __len__(self) -> int:
        """Prompts an epoch has: as many as all parts together."""
        return len(self._parts)

    def next(self) -> Prompt:
        if self._returned:
            return self._returned.popleft()
        return self._parts.next(self._turns.next(self._weights))

    def give_back(self, prompt: Prompt) -> None:
        """Hand out ``prompt`` again, after those given back earlier and before any new one."""
        self._returned.append(prompt)

    def prompt_at(self, prompt_id: int, epoch: int) -> Prompt:
        """The very prompt that ``next`` gave as (id, epoch)."""
        return self._parts.prompt_at(prompt_id, epoch)

    def state(self) -> dict[str, Any]:
        """The cursor, as JSON can hold it."""
        return {
            "owed": list(self._turns.owed),
            "parts": self._parts.state(),
            "returned": [[prompt.id, prompt.epoch] for prompt in self._returned],
            "data": self._fingerprint,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        if state["data"] != self._fingerprint:
            raise ResumeError(
                "--prompt-data is not the mixture this run was started with; restore its parts and weights, or start a "
                "new run from its last checkpoint with --hf-checkpoint."
            )
        self._parts.load(state["parts"])
        self._turns = Turns([int(owed) for owed in state["owed"]])
        self._returned = deque(self.prompt_at(prompt_id, epoch) for prompt_id, epoch in state["returned"])

    @property
    def _fingerprint(self) -> str:
        """Of the mixture alone: the parts look after their own."""
        return hashlib.sha256(f"mixture {self._weights}".encode()).hexdigest()[:16]


class Cursors:
    """A cursor over each part, under their numbers."""

    def __init__(self, parts: Sequence[Part], *, shuffle: bool, seed: int) -> None:
        self._each = [FileSource(part.dataset, shuffle=shuffle, seed=seed) for part in parts]

    def __len__(self) -> int:
        return sum(len(source) for source in self._each)

    def next(self, number: int) -> Prompt:
        return self._each[number].next()

    def has(self, prompt_id: int) -> bool:
        number = prompt_id // APART
        return 0 <= number < len(self._each) and self._each[number].has(prompt_id)

    def prompt_at(self, prompt_id: int, epoch: int) -> Prompt:
        number = prompt_id // APART
        if not 0 <= number < len(self._each):
            raise ResumeError(f"--prompt-data has no prompt {prompt_id}; its parts have changed.")
        return self._each[number].prompt_at(prompt_id, epoch)

    def state(self) -> list[dict[str, Any]]:
        return [source.state() for source in self._each]

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        if len(states) != len(self._each):
            raise ResumeError(
                f"--prompt-data has {len(self._each)} parts and the run was started with {len(states)}; name the same."
            )
        for source, state in zip(self._each, states, strict=True):
            source.load(state)


def whole_weights(weights: Sequence[Fraction]) -> list[int]:
    """The same proportions in the smallest whole numbers.

    >>> whole_weights([Fraction("0.3"), Fraction("0.7"), Fraction(1)])
    [3, 7, 10]
    """
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    shared = math.gcd(*whole)
    return [weight // shared for weight in whole]
