"""Dataset mixtures: several data entries as one source, concatenated or interleaved by weight in exact proportions."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from miles.core.errors import ResumeError
from miles.core.types import EMPTY, Prompt
from miles.rollout.data.dataset import Dataset, DatasetSource, PromptCheck, check_prompts, read_dataset
from miles.rollout.data.media import MediaReader
from miles.rollout.data.paths import parse_entries
from miles.rollout.data.schema import PreferenceColumns

PART_ID_STRIDE = 10**12
"""Distance between the ids of two parts: prompt 2_000_000_000_017 is row 17 of the third part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePart:
    """One entry of ``--prompt-data``: its name, its weight if it has one, and its prompts."""

    name: str
    dataset: Dataset
    weight: Fraction | None = None


def read_parts(
    entries_text: Sequence[str],
    *,
    input_key: str,
    label_key: str | None = None,
    metadata_key: str = "metadata",
    tool_key: str | None = None,
    skip_bad_rows: bool = False,
    pair: PreferenceColumns | None = None,
    media_keys: Mapping[str, str] = EMPTY,
    media: MediaReader | None = None,
) -> tuple[MixturePart, ...]:
    """Read every entry of ``--prompt-data``; ids and names are unique over all of them."""
    entries = parse_entries(entries_text)
    seen = Counter[str]()
    parts = list[MixturePart]()
    for number, (entry_text, entry) in enumerate(zip(entries_text, entries, strict=True)):
        seen[entry.name] += 1
        dataset = read_dataset(
            entry_text if entry.weight is None else entry_text.rpartition("*")[0],
            input_key=input_key,
            label_key=label_key,
            metadata_key=metadata_key,
            tool_key=tool_key,
            skip_bad_rows=skip_bad_rows,
            first_id=number * PART_ID_STRIDE,
            pair=pair,
            media_keys=media_keys,
            media=media,
        )
        name = entry.name if seen[entry.name] == 1 else f"{entry.name}-{seen[entry.name]}"
        parts.append(MixturePart(name=name, dataset=dataset, weight=entry.weight))
    return tuple(parts)


def check_parts(
    parts: Sequence[MixturePart], render: Callable[[Prompt], Sized], *, limit: int | None, check: PromptCheck
) -> tuple[MixturePart, ...]:
    """Check the prompts of every part, and drop those that ``render`` to more than ``limit`` tokens."""
    return tuple(replace(part, dataset=check_prompts(part.dataset, render, limit=limit, check=check)) for part in parts)


def build_source(parts: Sequence[MixturePart], *, shuffle: bool, seed: int) -> DatasetSource | MixtureSource:
    """Build a mixture where the parts have weights; else one dataset with all prompts, part after part."""
    if len(parts) > 1 and parts[0].weight is not None:
        return MixtureSource(parts, shuffle=shuffle, seed=seed)
    return DatasetSource(_concatenate(parts), shuffle=shuffle, seed=seed)


def _concatenate(parts: Sequence[MixturePart]) -> Dataset:
    if len(parts) == 1:
        return parts[0].dataset
    path = " and ".join(part.dataset.path for part in parts)
    return Dataset(path=path, prompts=tuple(prompt for part in parts for prompt in part.dataset.prompts))


class WeightedRoundRobin:
    """Weighted round robin: each part comes as often as its weight says, never a whole turn early or late.

    ``deficits`` is how far each part is behind its share, in units of 1/total of the weights. The next part is the one
    whose deadline is nearest, of those whose deficit is large enough (R. Tijdeman, The chairman assignment problem,
    1980). After any number of turns under the same weights, a part of ``k`` has had its share to within
    ``1 - 1 / (2k - 2)`` turns.
    """

    def __init__(self, deficits: Sequence[int]) -> None:
        self.deficits = list(deficits)

    def next(self, weights: Sequence[int]) -> int:
        """The index of the next part; ``weights`` are integers, at least one of them above 0."""
        total, slack = sum(weights), max(2 * len(weights) - 2, 1)
        self.deficits = [deficit + weight for deficit, weight in zip(self.deficits, weights, strict=True)]
        candidates = [number for number, weight in enumerate(weights) if weight]
        due = [number for number in candidates if slack * self.deficits[number] >= total]
        if due:
            chosen = min(due, key=lambda n: Fraction((slack - 1) * total - slack * self.deficits[n], weights[n]))
        else:  # the weights have changed, and the parts with the largest deficits now have none
            chosen = max(candidates, key=lambda n: self.deficits[n])
        self.deficits[chosen] -= total
        return chosen


class MixtureSource:
    """Reads parts by weight; each part keeps its own epochs and order."""

    def __init__(self, parts: Sequence[MixturePart], *, shuffle: bool = False, seed: int = 0) -> None:
        self._weights = to_integer_weights([part.weight or Fraction(0) for part in parts])
        self._parts = PartSources(parts, shuffle=shuffle, seed=seed)
        self._round_robin = WeightedRoundRobin([0] * len(parts))

    def __len__(self) -> int:
        """Number of prompts per epoch, over all parts."""
        return len(self._parts)

    def next(self) -> Prompt:
        return self._parts.next(self._round_robin.next(self._weights))

    def get_prompt(self, prompt_id: int, epoch: int) -> Prompt:
        """The prompt that ``next`` returned as (id, epoch)."""
        return self._parts.get_prompt(prompt_id, epoch)

    def state(self) -> dict[str, Any]:
        """The cursor as JSON-compatible data."""
        return {
            "owed": list(self._round_robin.deficits),
            "parts": self._parts.state(),
            "data": self._fingerprint,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        if state["data"] != self._fingerprint:
            raise ResumeError(
                "--prompt-data is not the mixture this run was started with; restore its parts and weights, or start a "
                "new run from its last checkpoint with --hf-checkpoint."
            )
        self._parts.load(state["parts"])
        self._round_robin = WeightedRoundRobin([int(deficit) for deficit in state["owed"]])

    @property
    def _fingerprint(self) -> str:
        """A digest of the mixture alone: the parts check their own data."""
        return hashlib.sha256(f"mixture {self._weights}".encode()).hexdigest()[:16]


class PartSources:
    """One source per part, by part index."""

    def __init__(self, parts: Sequence[MixturePart], *, shuffle: bool, seed: int) -> None:
        self._sources = [DatasetSource(part.dataset, shuffle=shuffle, seed=seed) for part in parts]

    def __len__(self) -> int:
        return sum(len(source) for source in self._sources)

    def next(self, number: int) -> Prompt:
        return self._sources[number].next()

    def has_prompt(self, prompt_id: int) -> bool:
        number = prompt_id // PART_ID_STRIDE
        return 0 <= number < len(self._sources) and self._sources[number].has_prompt(prompt_id)

    def get_prompt(self, prompt_id: int, epoch: int) -> Prompt:
        number = prompt_id // PART_ID_STRIDE
        if not 0 <= number < len(self._sources):
            raise ResumeError(f"--prompt-data has no prompt {prompt_id}; its parts have changed.")
        return self._sources[number].get_prompt(prompt_id, epoch)

    def state(self) -> list[dict[str, Any]]:
        return [source.state() for source in self._sources]

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        if len(states) != len(self._sources):
            raise ResumeError(
                f"--prompt-data has {len(self._sources)} parts and the run was started with {len(states)}; name the "
                f"same."
            )
        for source, state in zip(self._sources, states, strict=True):
            source.load(state)


def to_integer_weights(weights: Sequence[Fraction]) -> list[int]:
    """Convert weights to the smallest integers with the same proportions.

    >>> to_integer_weights([Fraction("0.3"), Fraction("0.7"), Fraction(1)])
    [3, 7, 10]
    """
    scale = math.lcm(*(weight.denominator for weight in weights))
    whole = [int(weight * scale) for weight in weights]
    shared = math.gcd(*whole)
    return [weight // shared for weight in whole]
