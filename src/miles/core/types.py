"""The nouns. Whatever crosses a room boundary is one of these, and all are frozen.

Prompt -> Trajectory (branches of spans) -> Group -> Sample -> Batch -> StepReport
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]
Array = NDArray[Any]

EMPTY: Mapping[str, Any] = MappingProxyType({})


def _nothing() -> Mapping[str, Any]:
    return EMPTY


class Version(NamedTuple):
    """Which policy, and how many publications its weights have seen; 0 is the loaded checkpoint.

    >>> Version(number=3) > Version(number=2)
    True
    """

    policy: str = "actor"
    number: int = 0

    def next(self) -> Version:
        return Version(self.policy, self.number + 1)


GIVEN = Version(number=-1)
"""Of demonstrations: no weights wrote them. Their log-probs are 0, as the data leaves no choice."""


class Author(StrEnum):
    """Who wrote a token, or in whose place the data wrote it. Only POLICY tokens are trained on."""

    PROMPT = "prompt"
    POLICY = "policy"
    ENV = "env"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of tokens by one author under one policy version.

    The loss mask is not stored: it *is* ``author is POLICY``. Anything per-token (routed experts,
    teacher logprobs) rides in ``extras``, first axis ``len(tokens)``. Arrays are made read-only.

    >>> Span(author=Author.PROMPT, tokens=np.array([1, 2], np.int32)).mask.tolist()
    [False, False]
    """

    author: Author
    tokens: Tokens
    logprobs: Floats | None = None
    version: Version | None = None
    extras: Mapping[str, Array] = field(default_factory=_nothing)

    def __post_init__(self) -> None:
        n = len(self.tokens)
        sampled = self.author is Author.POLICY
        if (self.logprobs is not None, self.version is not None) != (sampled, sampled):
            raise ValueError("exactly the policy's spans carry logprobs and a version")
        if self.tokens.dtype != np.int32:
            raise ValueError(f"tokens are int32, not {self.tokens.dtype}")
        named = {"tokens": self.tokens, "logprobs": self.logprobs, **self.extras}
        for name, values in named.items():
            if values is None:
                continue
            if len(values) != n:
                raise ValueError(f"{name} has {len(values)} entries for {n} tokens")
            values.flags.writeable = False

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def mask(self) -> NDArray[np.bool_]:
        """True where a token is trained on."""
        return np.full(len(self.tokens), self.author is Author.POLICY)

    def cut(self, length: int) -> Span:
        """The first ``length`` tokens, with everything that belongs to them."""
        return Span(
            author=self.author,
            tokens=self.tokens[:length],
            logprobs=None if self.logprobs is None else self.logprobs[:length],
            version=self.version,
            extras={name: values[:length] for name, values in self.extras.items()},
        )


class Status(StrEnum):
    """Why a trajectory ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question, as the data source gives it: chat messages, or plain text as a single message.

    ``id`` is the row in the data set, moved on by 10^12 for each part before its own; ``epoch`` how often the set
    had been read through before. The two together are unique in a run.
    """

    id: int
    messages: Sequence[Mapping[str, Any]]
    label: str | None = None
    epoch: int = 0
    metadata: Mapping[str, Any] = field(default_factory=_nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A score and, for the logs, what it was made of."""

    value: float
    parts: Mapping[str, float] = field(default_factory=_nothing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One attempt at a prompt: how it ended, what it earned, and one or more branches of spans.

    A plain conversation has one branch. Sub-agents and context compaction add more; all branches
    share the reward and one loss denominator, and train together or not at all.
    """

    branches: tuple[tuple[Span, ...], ...]
    status: Status
    reward: Reward | None = None
    index: int = 0
    metadata: Mapping[str, Any] = field(default_factory=_nothing)

    @property
    def spans(self) -> Iterator[Span]:
        """Every span of every branch, in order."""
        return (span for branch in self.branches for span in branch)

    @property
    def response_length(self) -> int:
        """Tokens the policy wrote."""
        return sum(len(s) for s in self.spans if s.author is Author.POLICY)

    @property
    def oldest(self) -> Version | None:
        """The stalest weights that wrote any of it; None where the policy wrote nothing."""
        return min((s.version for s in self.spans if s.version is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All attempts at one prompt; the unit that is scored, filtered and credited."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> list[float]:
        """The attempts' rewards, in order; every attempt of a finished group has one."""
        return [t.reward.value for t in self.trajectories if t.reward is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training row: arrays of one length, and where it came from.

    ``logprobs`` are the engine's, zero where nothing was sampled; ``versions`` the version number
    that wrote each token, -1 where it was not the policy; ``share`` how many samples its trajectory
    gave (they divide one loss denominator).
    """

    prompt_id: int
    trajectory: int
    tokens: Tokens
    mask: NDArray[np.bool_]
    logprobs: Floats
    advantages: Floats
    versions: NDArray[np.int32]
    policy: str = "actor"
    share: int = 1
    reward: float = 0.0
    extras: Mapping[str, Array] = field(default_factory=_nothing)

    def __post_init__(self) -> None:
        n = len(self.tokens)
        named = {"mask": self.mask, "logprobs": self.logprobs, "advantages": self.advantages}
        for name, values in (named | {"versions": self.versions} | dict(self.extras)).items():
            if len(values) != n:
                raise ValueError(f"{name} has {len(values)} entries for {n} tokens")
        if n and self.mask[0]:
            raise ValueError("the first token of a sample has no context, so it cannot be trained on")

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def oldest(self) -> int | None:
        """The number of the stalest version that wrote a trained token; None when no policy wrote any."""
        written = self.versions[self.mask & (self.versions >= 0)]
        return int(written.min()) if len(written) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one training step eats.

    ``probe`` are a few rows that wait for a later step: looked at to compare engine and trainer, not trained on.
    """

    step: int
    samples: tuple[Sample, ...]
    num_groups: int
    probe: tuple[Sample, ...] = ()

    def staleness(self, now: Version) -> int:
        """How many versions behind ``now`` its oldest token of that policy is."""
        own = (s.oldest for s in self.samples if s.policy == now.policy)
        return max((now.number - oldest for oldest in own if oldest is not None), default=0)

    @property
    def tokens(self) -> int:
        """All tokens, prompts included."""
        return sum(len(s) for s in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one training step gives back. ``seconds`` are wall-clock and never part of what must be equal."""

    version: Version
    metrics: Mapping[str, float] = field(default_factory=_nothing)
    seconds: Mapping[str, float] = field(default_factory=_nothing)
