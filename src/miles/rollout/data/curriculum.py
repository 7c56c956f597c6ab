"""Curriculum learning: a prompt source that asks a curriculum what to read next, and reports earlier rewards to it.

Rewards take effect at the end of their step, so that what a curriculum sees does not depend on which trajectory
happened to finish first::

    next, next, next ...   group, group, group ...   step done | next, next ...
                           recorded, not visible               | visible
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from statistics import fmean
from types import MappingProxyType
from typing import Any, cast

import numpy as np

from miles.core.errors import HookError, ResumeError
from miles.core.events import Event, GroupFinished, StepFinished
from miles.core.protocols import Curriculum, CurriculumState, DataPart, Journal, PromptStats
from miles.core.types import Prompt
from miles.rollout.data.mixture import MixturePart, PartSources, WeightedRoundRobin
from miles.rollout.seeds import SeedStream, mix, mix_each

_MIN_SHARE = 0.05
"""What is left of a part's share when nothing can be learned from it, so that a change is noticed."""
_UNIT = 1 << 32
"""What the integer weights of a curriculum add up to."""


class CurriculumSource:
    """Reads what ``curriculum`` returns: the listed prompt ids one by one, or the next prompt of a part, by weight.

    A list is requested when the last one is used up, and its prompts' epoch is the number of the list; weights are
    requested again after every step, and parts then keep their own epochs and order. A curriculum returns the same kind
    throughout a run. Pass events to the source itself.
    """

    def __init__(
        self, parts: Sequence[MixturePart], curriculum: Curriculum, *, shuffle: bool = False, seed: int = 0
    ) -> None:
        self._curriculum = curriculum
        self._seed = seed
        self._parts = PartSources(parts, shuffle=shuffle, seed=seed)
        self._data_parts = _data_parts(parts)
        self._stats = PromptStatsTracker()
        self._num_choices = 0
        self._chosen_at_step = -1
        self._prompt_ids: tuple[int, ...] = ()
        self._position = 0
        self._weights: tuple[int, ...] = ()
        self._round_robin = WeightedRoundRobin([0] * len(parts))

    def __len__(self) -> int:
        """Number of prompts per epoch, over all parts."""
        return len(self._parts)

    def next(self) -> Prompt:
        if self._position == len(self._prompt_ids) and not (self._weights and self._chosen_at_step == self._stats.step):
            self._request_choice()
        if self._weights:
            return self._parts.next(self._round_robin.next(self._weights))
        self._position += 1
        return self._parts.get_prompt(self._prompt_ids[self._position - 1], epoch=self._num_choices - 1)

    def __call__(self, event: Event) -> None:
        """Record a finished group, or the end of a step."""
        match event:
            case GroupFinished():
                self._stats.record(event.group.prompt.id, event.group.rewards)
            case StepFinished():
                self._stats.finish_step(event.step)
            case _:
                pass

    def state(self) -> dict[str, Any]:
        """The cursor as JSON-compatible data.

        The prompt statistics are shared, not copied at every prompt, and go on growing: a state written later has the
        later statistics.
        """
        return {
            "asked": self._num_choices,
            "asked_at": self._chosen_at_step,
            "list": self._prompt_ids,
            "position": self._position,
            "weights": self._weights,
            "owed": list(self._round_robin.deficits),
            "parts": self._parts.state(),
            "known": self._stats.rows,
            "data": self._fingerprint,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        if state["data"] != self._fingerprint:
            raise ResumeError(
                "This run was not started with --curriculum-path over these parts; restore --prompt-data and the flag, "
                "or start a new run from its last checkpoint with --hf-checkpoint."
            )
        self._parts.load(state["parts"])
        self._stats = PromptStatsTracker(state["known"])
        self._num_choices, self._chosen_at_step = int(state["asked"]), int(state["asked_at"])
        self._prompt_ids, self._position = tuple(state["list"]), int(state["position"])
        self._weights = tuple(state["weights"])
        self._round_robin = WeightedRoundRobin([int(deficit) for deficit in state["owed"]])

    def _request_choice(self) -> None:
        state = CurriculumState(
            step=self._stats.step,
            number=self._num_choices,
            seed=mix(SeedStream.CURRICULUM, self._seed, self._num_choices),
            parts=self._data_parts,
            stats=self._stats.stats,
        )
        answer: Any = self._curriculum(state)
        previous_kind = "weights" if self._weights else "ids" if self._prompt_ids else None
        self._prompt_ids = ()
        self._weights = ()
        self._position = 0
        if isinstance(answer, Mapping):
            self._weights = self._check_weights(cast("Mapping[Any, Any]", answer))
        elif isinstance(answer, Sequence) and not isinstance(answer, str | bytes):
            self._prompt_ids = self._check_ids(cast("Sequence[Any]", answer))
        else:
            raise _invalid(
                f"answered with a {type(answer).__name__}", "a list of prompt ids, or a weight for each part"
            )
        if previous_kind not in (None, "weights" if self._weights else "ids"):
            raise _invalid("answered with ids and with weights in one run", "one of them throughout")
        self._num_choices, self._chosen_at_step = self._num_choices + 1, self._stats.step

    def _check_ids(self, answer: Sequence[Any]) -> tuple[int, ...]:
        ids = [int(index) for index in answer if isinstance(index, Integral)]
        if not ids or len(ids) < len(answer):
            raise _invalid(
                f"listed {'nothing' if not answer else 'what are no whole numbers'}", "at least one prompt id"
            )
        if len(set(ids)) < len(ids):
            raise _invalid("listed a prompt twice", "each at most once in a list, and again in the next")
        for index in ids:
            if not self._parts.has_prompt(index):
                raise _invalid(f"listed {index}, which no prompt has", "the ids of state.parts")
        return tuple(ids)

    def _check_weights(self, answer: Mapping[Any, Any]) -> tuple[int, ...]:
        names = [part.name for part in self._data_parts]
        if unknown := [str(name) for name in answer if name not in names]:
            raise _invalid(f"weighed {', '.join(unknown)}", f"weights for {', '.join(names)}")
        raw_weights = [answer.get(name, 0.0) for name in names]
        weights = [float(weight) if isinstance(weight, Real) else math.nan for weight in raw_weights]
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
            raise _invalid(f"weighed the parts {raw_weights}", "numbers from 0 on, not all of them 0")
        return quantize_weights(weights)

    @property
    def _fingerprint(self) -> str:
        """A digest of the kind of source alone: the parts check their own data."""
        return hashlib.sha256(f"curriculum {len(self._data_parts)} {self._seed}".encode()).hexdigest()[:16]


class PromptStatsTracker:
    """Rewards of prompts so far. ``rows`` is the same as JSON-compatible data, kept up to date."""

    def __init__(self, rows: Mapping[str, Any] | None = None) -> None:
        self.rows: dict[str, Any] = _copy_rows({"step": 0, "prompts": {}, "heard": []} if rows is None else rows)
        self._by_id = {int(index): _to_prompt_stats(row) for index, row in self.rows["prompts"].items()}

    @property
    def step(self) -> int:
        """The last finished step."""
        return self.rows["step"]

    @property
    def stats(self) -> Mapping[int, PromptStats]:
        """Statistics of each prompt by id."""
        return MappingProxyType(self._by_id)

    def record(self, prompt_id: int, rewards: Sequence[float]) -> None:
        """Record a group's rewards; they count once the step is finished."""
        if rewards:
            self.rows["heard"].append([prompt_id, fmean(rewards)])

    def finish_step(self, step: int) -> None:
        """Finish a step: recorded rewards become visible."""
        for prompt_id, reward in self.rows["heard"]:
            groups, total, *_ = self.rows["prompts"].get(str(prompt_id), (0, 0.0))
            row = [groups + 1, total + reward, reward, step]
            self.rows["prompts"][str(prompt_id)] = row
            self._by_id[prompt_id] = _to_prompt_stats(row)
        self.rows["heard"].clear()
        self.rows["step"] = step


class CurriculumJournal:
    """A journal that also passes every event to ``source``."""

    def __init__(self, journal: Journal, source: CurriculumSource) -> None:
        self._journal = journal
        self._source = source

    def __call__(self, event: Event) -> None:
        self._journal(event)
        self._source(event)

    def commit(self) -> None:
        self._journal.commit()

    def offsets(self) -> Mapping[str, int]:
        return self._journal.offsets()


def quantize_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Convert weights to integers that add up to 2^32, each rounded to within one; none above 0 becomes 0.

    >>> [share >> 30 for share in quantize_weights([1.0, 3.0])]
    [1, 3]
    """
    total = math.fsum(weights)
    shares = [max(int(weight / total * _UNIT), 1) if weight > 0 else 0 for weight in weights]
    shares[shares.index(max(shares))] += _UNIT - sum(shares)
    return tuple(shares)


def _data_parts(parts: Sequence[MixturePart]) -> tuple[DataPart, ...]:
    """Parts with their default shares: by weight, or by size where there are no weights."""
    weights = [float(part.weight) if part.weight is not None else float(len(part.dataset)) for part in parts]
    whole = math.fsum(weights)
    return tuple(
        DataPart(name=part.name, weight=weight / whole, prompts=part.dataset.prompts)
        for part, weight in zip(parts, weights, strict=True)
    )


def _to_prompt_stats(row: Sequence[Any]) -> PromptStats:
    groups, total, last, step = row
    return PromptStats(groups=int(groups), mean=total / groups, last=float(last), step=int(step))


def _copy_rows(rows: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": int(rows["step"]),
        "prompts": {index: list(row) for index, row in rows["prompts"].items()},
        "heard": [list(row) for row in rows["heard"]],
    }


def _invalid(what: str, wanted: str) -> HookError:
    return HookError(f"--curriculum-path {what}; it must give {wanted}.")


# -- built-in curricula ---------------------------------------------------------------------


def learnable_parts(state: CurriculumState) -> dict[str, float]:
    """Weight each part by its own weight and by how far its prompts are from always and never solved.

    A prompt whose last group had a mean reward of r counts 4r(1 - r), one without a group counts 1.
    """
    return {part.name: part.weight * (_MIN_SHARE + (1 - _MIN_SHARE) * _learnable(part, state)) for part in state.parts}


def unsolved_first(state: CurriculumState) -> list[int]:
    """The prompts whose last group did not earn 1 on average, shuffled; all prompts once none is left."""
    ids = np.array([prompt.id for part in state.parts for prompt in part.prompts], np.int64)
    shuffled: list[int] = ids[np.argsort(mix_each((state.seed,), ids), kind="stable")].tolist()
    left = [index for index in shuffled if index not in state.stats or state.stats[index].last < 1]
    return left or shuffled


def _learnable(part: DataPart, state: CurriculumState) -> float:
    rewards = [min(max(state.stats[p.id].last, 0.0), 1.0) for p in part.prompts if p.id in state.stats]
    unseen = len(part.prompts) - len(rewards)
    return fmean([*(4 * reward * (1 - reward) for reward in rewards), *[1.0] * unseen])
