"""The doors. Each is one verb wide where it can be; rooms meet only here.

Doors a user may replace (plug points) are plain callables; doors between planes are objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from miles.core.events import Event
from miles.core.types import (
    EMPTY,
    Array,
    Batch,
    Group,
    Prompt,
    Reward,
    Sample,
    Span,
    Status,
    StepReport,
    Tokens,
    Trajectory,
    Version,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to draw tokens. ``seed`` and a token's position decide its randomness, whoever its batch mates are.

    ``temperature`` 0 is greedy; ``top_k`` -1 and ``top_p`` 1 are off. Log-probs are those of the
    temperature-scaled distribution before top-k, top-p and min-p cut it (what a trainer recomputes). ``drawn`` of the
    tokens given were drawn with this seed before, when an attempt that was cut goes on.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int = 1024
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int = 0
    drawn: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What the engine wrote: one span per policy version it was written under.

    ``reason`` is ``stop`` (a stop token or string), ``length`` (the limit) or ``abort``. ``given`` is what the engine
    found out of the tokens it was given, by names of ``core.extras``, first axis their number.
    """

    spans: tuple[Span, ...]
    status: Status
    reason: str
    cached_tokens: int = 0
    given: Mapping[str, Array] = field(default_factory=lambda: EMPTY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A filter's answer. ``reason`` names the metric a drop is counted under."""

    keep: bool
    reason: str = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What is known of one prompt: the groups that attempted it, their mean reward, the last one's, and its step."""

    groups: int
    mean: float
    last: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Portion:
    """One entry of the data, as a curriculum sees it; ``weight`` is its share when nobody says otherwise."""

    name: str
    weight: float
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """All a curriculum may go by, so that a continued run is told the same.

    ``step`` training steps are done and ``number`` lessons were asked for before; ``seed`` is this
    lesson's own, for chance. ``past`` goes by prompt id, and has no entry where no group has come back.
    """

    step: int
    number: int
    seed: int
    portions: Sequence[Portion]
    past: Mapping[int, Past]


Syllabus = Sequence[int] | Mapping[str, float]
"""The ids of the prompts to read next, in order; or a weight for each portion by its name."""


# -- plug points: functions a user may bring ------------------------------------------------


class Curriculum(Protocol):
    """Say what is read next. It must go by the lesson alone: what else it remembers, a continued run has forgotten."""

    def __call__(self, lesson: Lesson) -> Syllabus: ...


class Generate(Protocol):
    """Prompt in, attempt out. Single turn, multi turn, agents: all are this."""

    async def __call__(self, prompt: Prompt, engine: Engine, sampling: Sampling) -> Trajectory: ...


@runtime_checkable
class Resumes(Protocol):
    """A Generate that can take up an attempt that was cut: what ``past`` has is kept, token for token."""

    async def resume(self, prompt: Prompt, past: Trajectory, engine: Engine, sampling: Sampling) -> Trajectory: ...


class RewardFn(Protocol):
    """Score one attempt."""

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward: ...


class GroupRewardFn(Protocol):
    """Score all attempts at one prompt together, in their order."""

    async def __call__(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Reward]: ...


class Filter(Protocol):
    """May this group be trained on?"""

    def __call__(self, group: Group) -> Verdict: ...


class Worth(Protocol):
    """What each attempt of a scored group is worth: one number an attempt, in their order."""

    def __call__(self, group: Group) -> Sequence[float]: ...


class Credit(Protocol):
    """Turn a scored group into training rows."""

    def __call__(self, group: Group) -> Sequence[Sample]: ...


# -- doors between the planes and the scheduler ---------------------------------------------


class Tokenizer(Protocol):
    """Text to tokens and back, and a conversation to the tokens a model expects.

    ``render`` encodes what the chat template has ``written``. ``marked`` also says which of the tokens the template
    marks as the assistant's own, and is None where it marks none.
    """

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def render(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]: ...
    def written(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> str: ...
    def marked(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> tuple[list[int], list[bool]] | None: ...


class Source(Protocol):
    """Where prompts come from. ``state`` makes a run resumable: numbers and strings only."""

    def next(self) -> Prompt: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: Mapping[str, Any]) -> None: ...


class Engine(Protocol):
    """The policy, as the rollout plane sees it: something that writes tokens."""

    async def generate(self, tokens: Tokens, sampling: Sampling) -> Completion: ...


Hear = Callable[[Sequence[int]], None]
"""Told tokens as they are drawn, each once and in order, on the event loop; it must not wait."""


@runtime_checkable
class Aloud(Engine, Protocol):
    """An Engine that can be listened to while it writes. The completion is what counts: where an engine cuts behind a
    stop text that it sees late, ``hear`` was told more."""

    async def generate_aloud(self, tokens: Tokens, sampling: Sampling, hear: Hear) -> Completion: ...


class EngineControl(Protocol):
    """The engine, as the scheduler sees it."""

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def abort(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def health(self) -> Mapping[str, float]: ...


class Rollout(Protocol):
    """The rollout plane, as the scheduler sees it."""

    async def produce(self, prompt: Prompt) -> Group: ...


class Cuttable(Rollout, Protocol):
    """A rollout plane that can be told that there is enough.

    After ``cut`` every ``produce`` returns soon; attempts that had not ended are ABORTED, with what they have.
    ``go_on`` takes a group up whose attempts were cut, and ends them.
    """

    async def cut(self) -> None: ...
    async def go_on(self, begun: Group) -> Group: ...


class Evaluate(Protocol):
    """Held-out scores of the policy as it is now, by metric name."""

    async def __call__(self) -> Mapping[str, float]: ...


class Trainer(Protocol):
    """The training plane, as the scheduler sees it.

    ``save`` writes weights and optimizer into an existing folder; ``load`` takes them back. What ``save`` has not
    written when it returns, of the state at that moment, it goes on writing, and tells of in the folder (``notes``).
    """

    async def step(self, batch: Batch) -> StepReport: ...
    async def save(self, folder: Path) -> None: ...
    async def load(self, folder: Path) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...


class WeightSync(Protocol):
    """The one way back: the trainer's weights, given to the engines as ``version``, all or none."""

    async def publish(self, version: Version) -> Mapping[str, float]: ...


class Lease(Protocol):
    """Who holds the accelerator. Disjoint planes never wait; colocated planes take turns."""

    async def to_train(self) -> None: ...
    async def to_rollout(self) -> None: ...


class Observer(Protocol):
    """Told of everything that happens; must not wait."""

    def __call__(self, event: Event) -> None: ...


class Journal(Protocol):
    """The observer that remembers: what it has been told can be found again from its marks (log name -> offset)."""

    def __call__(self, event: Event) -> None: ...
    def commit(self) -> None: ...
    def marks(self) -> Mapping[str, int]: ...
