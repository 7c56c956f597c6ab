"""Protocols between packages, one method wide where possible.

Protocols that a user may implement (hooks) are plain callables; protocols between the planes and the scheduler are
objects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from miles.core.events import Event
from miles.core.media import ImageInput, Images
from miles.core.media_store import MediaStore
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
class SamplingParams:
    """Sampling parameters. The random number of a token depends only on ``seed`` and its position, not on the batch.

    ``temperature`` 0 is greedy; ``top_k`` -1 and ``top_p`` 1 are off. Log-probs are those of the
    temperature-scaled distribution before top-k, top-p and min-p filtering (what a trainer recomputes). When an
    interrupted trajectory resumes, ``num_prior_tokens`` of the input tokens were sampled with this seed before.
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
    num_prior_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationCounts:
    """Speculative decoding of one request: steps that verified drafts of it, and its drafted and accepted tokens.

    ``histogram[i]`` is the number of verifications that accepted exactly ``i`` drafted tokens; it is empty if the
    engine does not report it. A verification samples one token more than it accepts, except that nothing follows a
    drafted token that ended the response (``drafted_ends``).

    >>> counts = SpeculationCounts(verifications=2, drafted=8, accepted=5, histogram=(0, 1, 0, 0, 1), drafted_ends=1)
    >>> counts.accept_length, counts.accept_rate
    (3.0, 0.625)
    """

    verifications: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: tuple[int, ...] = ()
    drafted_ends: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that verifications sampled."""
        return self.verifications + self.accepted - self.drafted_ends

    @property
    def accept_length(self) -> float:
        """Tokens per verification; 0 without any."""
        return self.tokens / self.verifications if self.verifications else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of the drafted tokens that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def __add__(self, other: SpeculationCounts) -> SpeculationCounts:
        pairs = zip_longest(self.histogram, other.histogram, fillvalue=0)
        return SpeculationCounts(
            verifications=self.verifications + other.verifications,
            drafted=self.drafted + other.drafted,
            accepted=self.accepted + other.accepted,
            histogram=tuple(one + two for one, two in pairs),
            drafted_ends=self.drafted_ends + other.drafted_ends,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """The engine's response: one span per policy version it was sampled under.

    ``finish_reason`` is ``stop`` (a stop token or string), ``length`` (the limit) or ``abort``. ``prompt_extras`` are
    per-token arrays of the input tokens, by names of ``core.token_fields``. ``speculation`` is None if the engine does
    not decode speculatively.
    """

    spans: tuple[Span, ...]
    status: Status
    finish_reason: str
    cached_tokens: int = 0
    prompt_extras: Mapping[str, Array] = field(default_factory=lambda: EMPTY)
    speculation: SpeculationCounts | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterResult:
    """A filter's decision. ``reason`` names the metric a drop is counted under."""

    keep: bool
    reason: str = "kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptStats:
    """Statistics of one prompt: number of finished groups, their mean reward, the last mean reward, and its step."""

    groups: int
    mean: float
    last: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPart:
    """One dataset of the mixture; ``weight`` is its default share."""

    name: str
    weight: float
    prompts: Sequence[Prompt]


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumState:
    """All inputs of a curriculum, so that a resumed run gets the same choices.

    ``step`` training steps are done and ``number`` choices were made before; ``seed`` is for random choices.
    ``stats`` is by prompt id, without an entry for prompts that have no finished group.
    """

    step: int
    number: int
    seed: int
    parts: Sequence[DataPart]
    stats: Mapping[int, PromptStats]


CurriculumChoice = Sequence[int] | Mapping[str, float]
"""The ids of the prompts to sample next, in order; or a weight for each data part by name."""


# -- hooks: functions a user may provide -----------------------------------------------------


class Curriculum(Protocol):
    """Choose the next prompts from ``state`` alone: a resumed run restores no other memory."""

    def __call__(self, state: CurriculumState) -> CurriculumChoice: ...


class Generate(Protocol):
    """Generate one trajectory of a prompt: single turn, multi turn or agentic."""

    async def __call__(self, prompt: Prompt, engine: Engine, sampling: SamplingParams) -> Trajectory: ...


@runtime_checkable
class ResumableGenerate(Protocol):
    """A Generate that can resume an interrupted trajectory; all tokens of ``partial`` are kept."""

    async def resume(
        self, prompt: Prompt, partial: Trajectory, engine: Engine, sampling: SamplingParams
    ) -> Trajectory: ...


class RewardFn(Protocol):
    """Score one trajectory."""

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Reward: ...


class GroupRewardFn(Protocol):
    """Score all trajectories of one prompt together; rewards in order of the trajectories."""

    async def __call__(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Reward]: ...


class Filter(Protocol):
    """Decide whether a group is trained on."""

    def __call__(self, group: Group) -> FilterResult: ...


class AdvantageFn(Protocol):
    """Compute the advantage of each trajectory of a scored group, in order."""

    def __call__(self, group: Group) -> Sequence[float]: ...


class AdvantageEstimator(Protocol):
    """Turn a scored group into training samples with advantages."""

    def __call__(self, group: Group) -> Sequence[Sample]: ...


# -- protocols between the planes and the scheduler -------------------------------------------


class Tokenizer(Protocol):
    """Text to tokens and back, and chat messages to tokens by the model's chat template.

    ``apply_chat_template`` encodes the text of ``render_chat_text``. ``apply_chat_template_with_mask`` also returns
    the assistant mask of the template's ``{% generation %}`` blocks; None if the template has none.
    """

    def encode(self, text: str) -> list[int]: ...
    def decode(self, tokens: Sequence[int]) -> str: ...
    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> list[int]: ...
    def render_chat_text(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> str: ...
    def apply_chat_template_with_mask(
        self, messages: Sequence[Mapping[str, Any]], **template: Any
    ) -> tuple[list[int], list[bool]] | None: ...


@runtime_checkable
class ImageTokenizer(Tokenizer, Protocol):
    """A Tokenizer of a model that reads images: raw files are in ``media``, which messages refer to.

    ``encode_with_images`` encodes a text with one marker for each image or video, ``expand_tokens`` expands tokens with
    one marker for each, which ``count_markers`` counts; ``load_image`` gives the arrays of a file by its hash.
    ``prepare`` processes the images of messages off the event loop, so that encoding them afterwards is quick.
    """

    @property
    def media(self) -> MediaStore: ...
    @property
    def image_marker(self) -> str: ...
    def count_markers(self, tokens: Sequence[int]) -> int: ...
    def load_image(self, source: str) -> ImageInput: ...
    def encode_with_images(self, text: str, references: Sequence[str]) -> tuple[list[int], Images]: ...
    def expand_tokens(self, tokens: Sequence[int], references: Sequence[str]) -> tuple[list[int], Images]: ...
    async def prepare(self, messages: Sequence[Mapping[str, Any]]) -> None: ...


class Source(Protocol):
    """Prompt source. ``state`` (numbers and strings only) makes a run resumable."""

    def next(self) -> Prompt: ...
    def state(self) -> dict[str, Any]: ...
    def load(self, state: Mapping[str, Any]) -> None: ...


class Engine(Protocol):
    """Inference engine as the rollout plane sees it: generates tokens with the current policy.

    ``images`` are placed among ``tokens``, which have their placeholders.
    """

    async def generate(self, tokens: Tokens, sampling: SamplingParams, images: Images = ()) -> Completion: ...


OnTokens = Callable[[Sequence[int]], None]
"""Called with new tokens as they are sampled, each once and in order, on the event loop; must not block."""


@runtime_checkable
class StreamingEngine(Engine, Protocol):
    """An Engine that streams tokens. The returned completion is authoritative: if a stop string is detected late,
    ``on_tokens`` has received tokens beyond it."""

    async def generate_stream(
        self, tokens: Tokens, sampling: SamplingParams, on_tokens: OnTokens, images: Images = ()
    ) -> Completion: ...


async def stream_or_generate(
    engine: Engine, tokens: Tokens, sampling: SamplingParams, on_tokens: OnTokens, images: Images = ()
) -> Completion:
    """Stream tokens to ``on_tokens`` if the engine supports streaming, else generate without calling it."""
    if isinstance(engine, StreamingEngine):
        return await engine.generate_stream(tokens, sampling, on_tokens, images)
    return await engine.generate(tokens, sampling, images)


class EngineControl(Protocol):
    """Engine control as the scheduler sees it."""

    async def pause(self) -> None: ...
    async def resume(self) -> None: ...
    async def abort(self) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...
    async def health(self) -> Mapping[str, float]: ...


class Rollout(Protocol):
    """Rollout plane as the scheduler sees it."""

    async def produce(self, prompt: Prompt) -> Group: ...


class InterruptibleRollout(Rollout, Protocol):
    """A rollout plane whose in-flight groups can be interrupted.

    After ``interrupt`` every ``produce`` returns soon; unfinished trajectories are ABORTED and keep their tokens.
    ``resume_group`` continues the interrupted trajectories of a group to their end.
    """

    async def interrupt(self) -> None: ...
    async def resume_group(self, partial: Group) -> Group: ...


class Evaluate(Protocol):
    """Evaluate the current policy on the held-out sets; metrics by name."""

    async def __call__(self) -> Mapping[str, float]: ...


class Trainer(Protocol):
    """Training plane as the scheduler sees it.

    ``save`` writes weights and optimizer state into an existing folder; ``load`` restores them. ``save`` may return
    after a snapshot and write the rest in the background, reported by marker files in the folder (``core.markers``).
    """

    async def step(self, batch: Batch) -> StepReport: ...
    async def save(self, folder: Path) -> None: ...
    async def load(self, folder: Path) -> None: ...
    async def sleep(self) -> None: ...
    async def wake(self) -> None: ...


class WeightSync(Protocol):
    """Weight update: publishes the trainer's weights to all engines as ``version``, or to none."""

    async def publish(self, version: Version) -> Mapping[str, float]: ...


class Lease(Protocol):
    """Device lease: which plane holds the accelerator. Disjoint planes never wait; colocated planes take turns."""

    async def to_train(self) -> None: ...
    async def to_rollout(self) -> None: ...


class Observer(Protocol):
    """Receives every event; must not block."""

    def __call__(self, event: Event) -> None: ...


class Journal(Protocol):
    """The observer that persists events; ``offsets`` gives the current length of each log by name."""

    def __call__(self, event: Event) -> None: ...
    def commit(self) -> None: ...
    def offsets(self) -> Mapping[str, int]: ...
