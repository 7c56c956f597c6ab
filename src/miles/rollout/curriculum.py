"""A source that asks a curriculum what to read next, and hears how earlier prompts fared.

What was heard counts from the end of its step on, so that what a curriculum is told does not depend
on which attempt happened to finish first::

    draw, draw, draw ...   group, group, group ...   step done | draw, draw ...
                           heard, not yet told                 | told
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from statistics import fmean
from types import MappingProxyType
from typing import Any, cast

from miles.core.errors import PlugError, ResumeError
from miles.core.events import Event, GroupFinished, StepFinished
from miles.core.protocols import Curriculum, Journal, Lesson, Past, Portion
from miles.core.types import Prompt
from miles.rollout.mixture import Cursors, Part, Turns
from miles.rollout.seeds import Stream, mix

_UNIT = 1 << 32
"""What the weights of a curriculum add up to, once they are whole numbers."""


class CurriculumSource:
    """Draws what ``curriculum`` says: the ids it listed, one by one, or the next prompt of a part, by weight.

    A list is asked for when the last one is used up, and its prompts' epoch is the number of the list;
    weights are asked for again after every step, and parts then keep their own epochs and order. A
    curriculum answers in the same way throughout a run. Pass events to the source itself.
    """

    def __init__(self, parts: Sequence[Part], curriculum: Curriculum, *, shuffle: bool = False, seed: int = 0) -> None:
        self._curriculum = curriculum
        self._seed = seed
        self._parts = Cursors(parts, shuffle=shuffle, seed=seed)
        self._portions = _portions(parts)
        self._known = Known()
        self._asked = 0
        self._asked_at = -1
        self._list: tuple[int, ...] = ()
        self._position = 0
        self._weights: tuple[int, ...] = ()
        self._turns = Turns([0] * len(parts))

    def __len__(self) -> int:
        """Prompts an epoch has: as many as all parts together."""
        return len(self._parts)

    def next(self) -> Prompt:
        if self._position == len(self._list) and not (self._weights and self._asked_at == self._known.step):
            self._ask()
        if self._weights:
            return self._parts.next(self._turns.next(self._weights))
        self._position += 1
        return self._parts.prompt_at(self._list[self._position - 1], epoch=self._asked - 1)

    def __call__(self, event: Event) -> None:
        """Hear of a group, or that a step is done."""
        match event:
            case GroupFinished():
                self._known.hear(event.group.prompt.id, event.group.rewards)
            case StepFinished():
                self._known.settle(event.step)
            case _:
                pass

    def state(self) -> dict[str, Any]:
        """The cursor, as JSON can hold it.

        What is known of the prompts is handed out as it stands and goes on growing, instead of being
        copied at every draw: written later, it tells what is known by then.
        """
        return {
            "asked": self._asked,
            "asked_at": self._asked_at,
            "list": self._list,
            "position": self._position,
            "weights": self._weights,
            "owed": list(self._turns.owed),
            "parts": self._parts.state(),
            "known": self._known.rows,
            "data": self._fingerprint,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        if state["data"] != self._fingerprint:
            raise ResumeError(
                "This run was not started with --curriculum-path over these parts; restore --prompt-data and the flag, "
                "or start a new run from its last checkpoint with --hf-checkpoint."
            )
        self._parts.load(state["parts"])
        self._known = Known(state["known"])
        self._asked, self._asked_at = int(state["asked"]), int(state["asked_at"])
        self._list, self._position = tuple(state["list"]), int(state["position"])
        self._weights = tuple(state["weights"])
        self._turns = Turns([int(owed) for owed in state["owed"]])

    def _ask(self) -> None:
        lesson = Lesson(
            step=self._known.step,
            number=self._asked,
            seed=mix(Stream.LESSON, self._seed, self._asked),
            portions=self._portions,
            past=self._known.past,
        )
        answer: Any = self._curriculum(lesson)
        before = "weights" if self._weights else "ids" if self._list else None
        self._list, self._weights, self._position = (), (), 0
        if isinstance(answer, Mapping):
            self._weights = self._shares(cast("Mapping[Any, Any]", answer))
        elif isinstance(answer, Sequence) and not isinstance(answer, str | bytes):
            self._list = self._ids(cast("Sequence[Any]", answer))
        else:
            raise _refused(
                f"answered with a {type(answer).__name__}", "a list of prompt ids, or a weight for each part"
            )
        if before not in (None, "weights" if self._weights else "ids"):
            raise _refused("answered with ids and with weights in one run", "one of them throughout")
        self._asked, self._asked_at = self._asked + 1, self._known.step

    def _ids(self, answer: Sequence[Any]) -> tuple[int, ...]:
        ids = [int(index) for index in answer if isinstance(index, Integral)]
        if not ids or len(ids) < len(answer):
            raise _refused(
                f"listed {'nothing' if not answer else 'what are no whole numbers'}", "at least one prompt id"
            )
        if len(set(ids)) < len(ids):
            raise _refused("listed a prompt twice", "each at most once in a list, and again in the next")
        for index in ids:
            if not self._parts.has(index):
                raise _refused(f"listed {index}, which no prompt has", "the ids of lesson.portions")
        return tuple(ids)

    def _shares(self, answer: Mapping[Any, Any]) -> tuple[int, ...]:
        names = [portion.name for portion in self._portions]
        if strange := [str(name) for name in answer if name not in names]:
            raise _refused(f"weighed {', '.join(strange)}", f"weights for {', '.join(names)}")
        given = [answer.get(name, 0.0) for name in names]
        weights = [float(weight) if isinstance(weight, Real) else math.nan for weight in given]
        if not all(math.isfinite(weight) and weight >= 0 for weight in weights) or not any(weights):
            raise _refused(f"weighed the parts {given}", "numbers from 0 on, not all of them 0")
        return whole_shares(weights)

    @property
    def _fingerprint(self) -> str:
        """Of the kind of source alone: the parts look after their own."""
        return hashlib.sha256(f"curriculum {len(self._portions)} {self._seed}".encode()).hexdigest()[:16]


class Known:
    """The rewards of prompts so far. ``rows`` is the same as JSON can hold it, kept up beside it."""

    def __init__(self, rows: Mapping[str, Any] | None = None) -> None:
        self.rows: dict[str, Any] = _copied({"step": 0, "prompts": {}, "heard": []} if rows is None else rows)
        self._past = {int(index): _past(row) for index, row in self.rows["prompts"].items()}

    @property
    def step(self) -> int:
        """The last step that is done."""
        return self.rows["step"]

    @property
    def past(self) -> Mapping[int, Past]:
        """What is known of each prompt, by its id."""
        return MappingProxyType(self._past)

    def hear(self, prompt_id: int, rewards: Sequence[float]) -> None:
        """Take note of a group; it counts once its step is done."""
        if rewards:
            self.rows["heard"].append([prompt_id, fmean(rewards)])

    def settle(self, step: int) -> None:
        """The step is done: what was heard is known."""
        for prompt_id, reward in self.rows["heard"]:
            groups, total, *_ = self.rows["prompts"].get(str(prompt_id), (0, 0.0))
            row = [groups + 1, total + reward, reward, step]
            self.rows["prompts"][str(prompt_id)] = row
            self._past[prompt_id] = _past(row)
        self.rows["heard"].clear()
        self.rows["step"] = step


class Overheard:
    """A journal that also tells ``source`` of everything."""

    def __init__(self, journal: Journal, source: CurriculumSource) -> None:
        self._journal, self._source = journal, source

    def __call__(self, event: Event) -> None:
        self._journal(event)
        self._source(event)

    def commit(self) -> None:
        self._journal.commit()

    def marks(self) -> Mapping[str, int]:
        return self._journal.marks()


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Weights as whole numbers that add up to 2^32, each rounded to within one; none above 0 becomes 0.

    >>> [share >> 30 for share in whole_shares([1.0, 3.0])]
    [1, 3]
    """
    total = math.fsum(weights)
    shares = [max(int(weight / total * _UNIT), 1) if weight > 0 else 0 for weight in weights]
    shares[shares.index(max(shares))] += _UNIT - sum(shares)
    return tuple(shares)


def _portions(parts: Sequence[Part]) -> tuple[Portion, ...]:
    """Parts with the shares they would have: their weights, or where there are none their sizes."""
    weights = [float(part.weight) if part.weight is not None else float(len(part.dataset)) for part in parts]
    whole = math.fsum(weights)
    return tuple(
        Portion(name=part.name, weight=weight / whole, prompts=part.dataset.prompts)
        for part, weight in zip(parts, weights, strict=True)
    )


def _past(row: Sequence[Any]) -> Past:
    groups, total, last, step = row
    return Past(groups=int(groups), mean=total / groups, last=float(last), step=int(step))


def _copied(rows: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "step": int(rows["step"]),
        "prompts": {index: list(row) for index, row in rows["prompts"].items()},
        "heard": [list(row) for row in rows["heard"]],
    }


def _refused(what: str, wanted: str) -> PlugError:
    return PlugError(f"--curriculum-path {what}; it must give {wanted}.")
