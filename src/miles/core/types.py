"""Shared data types; everything that crosses a package boundary is one of these frozen dataclasses.

Prompt -> Trajectory (branches of spans) -> Group -> Sample -> Batch -> StepReport
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from miles.core.media import PlacedImage, check_placement

Tokens = NDArray[np.int32]
Floats = NDArray[np.float32]
Array = NDArray[Any]

EMPTY: Mapping[str, Any] = MappingProxyType({})


def _empty() -> Mapping[str, Any]:
    return EMPTY


class Version(NamedTuple):
    """A policy name and the number of weight updates published so far; 0 is the loaded checkpoint.

    >>> Version(number=3) > Version(number=2)
    True
    """

    policy: str = "actor"
    number: int = 0

    def next(self) -> Version:
        return Version(self.policy, self.number + 1)


DEMONSTRATION = Version(number=-1)
"""Version of demonstrations, which no policy sampled. Their log-probs are 0."""


class Author(StrEnum):
    """Who produced a token (in demonstrations: in whose role). Only POLICY tokens are trained on."""

    PROMPT = "prompt"
    POLICY = "policy"
    ENV = "env"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A run of tokens by one author under one policy version.

    The loss mask is not stored: it *is* ``author is POLICY``. Anything per-token (routed experts,
    teacher logprobs) is in ``extras``, first axis ``len(tokens)``. Arrays are made read-only. ``images`` are placed
    within the span; the policy samples none.

    >>> Span(author=Author.PROMPT, tokens=np.array([1, 2], np.int32)).mask.tolist()
    [False, False]
    """

    author: Author
    tokens: Tokens
    logprobs: Floats | None = None
    version: Version | None = None
    extras: Mapping[str, Array] = field(default_factory=_empty)
    images: tuple[PlacedImage, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if self.images:
            if self.author is Author.POLICY:
                raise ValueError("a POLICY span has no images")
            check_placement(self.images, n)
        if not (self.author is Author.POLICY) == (self.logprobs is not None) == (self.version is not None):
            raise ValueError("logprobs and version must be set on POLICY spans and only there")
        if self.tokens.dtype != np.int32:
            raise ValueError(f"tokens must be int32, not {self.tokens.dtype}")
        self.tokens.setflags(write=False)
        if self.logprobs is not None:
            _check_length("logprobs", self.logprobs, n)
            self.logprobs.setflags(write=False)
        for name, values in self.extras.items():
            _check_length(name, values, n)
            values.setflags(write=False)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def mask(self) -> NDArray[np.bool_]:
        """True where a token is trained on."""
        return np.full(len(self.tokens), self.author is Author.POLICY)

    def truncate(self, length: int) -> Span:
        """Return the first ``length`` tokens with their per-token data; they must not end within an image."""
        images = tuple(placed for placed in self.images if placed.start < length)
        if images and images[-1].end > length:
            raise ValueError(f"a span cannot end at token {length}, within an image of {images[-1].length} tokens")
        return Span(
            author=self.author,
            tokens=self.tokens[:length],
            logprobs=None if self.logprobs is None else self.logprobs[:length],
            version=self.version,
            extras={name: values[:length] for name, values in self.extras.items()},
            images=images,
        )


def _check_length(name: str, values: Array, num_tokens: int) -> None:
    if len(values) != num_tokens:
        raise ValueError(f"{name} has {len(values)} entries for {num_tokens} tokens")


class Status(StrEnum):
    """Why a trajectory ended."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of the data source: chat messages, or plain text as a single message.

    ``id`` is the row number in the dataset plus 10^12 for each dataset part before its own; ``epoch`` counts the
    completed passes over the data. The pair is unique in a run.
    """

    id: int
    messages: Sequence[Mapping[str, Any]]
    label: str | None = None
    epoch: int = 0
    metadata: Mapping[str, Any] = field(default_factory=_empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A scalar reward and, for logging, its named components."""

    value: float
    parts: Mapping[str, float] = field(default_factory=_empty)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One response to a prompt: status, reward, and one or more branches of spans.

    A plain conversation has one branch. Sub-agents and context compaction add more; all branches
    share the reward and one loss denominator, and train together or not at all. ``times`` are wall-clock times, which
    no two runs share: ``started`` since the epoch, and the seconds of ``generate`` and ``grade``.
    """

    branches: tuple[tuple[Span, ...], ...]
    status: Status
    reward: Reward | None = None
    index: int = 0
    metadata: Mapping[str, Any] = field(default_factory=_empty)
    times: Mapping[str, float] = field(default_factory=_empty)

    @property
    def spans(self) -> Iterator[Span]:
        """All spans of all branches, in order."""
        return (span for branch in self.branches for span in branch)

    @property
    def response_length(self) -> int:
        """Number of tokens the policy sampled."""
        policy = Author.POLICY
        return sum([len(span.tokens) for branch in self.branches for span in branch if span.author is policy])

    @property
    def oldest_version(self) -> Version | None:
        """The oldest policy version that sampled any token; None if the policy sampled none."""
        return min((s.version for s in self.spans if s.version is not None), default=None)


UNSCORED = "unscored"
"""Metadata key of a trajectory without a reward of its own: why it has none. Its reward is 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All trajectories of one prompt: the unit of reward scoring, filtering and advantage estimation."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]

    @property
    def rewards(self) -> list[float]:
        """Rewards of the trajectories, in order; all trajectories of a finished group have one."""
        return [t.reward.value for t in self.trajectories if t.reward is not None]

    @property
    def scored_trajectories(self) -> tuple[Trajectory, ...]:
        """The trajectories with a reward of their own, in order."""
        return tuple(t for t in self.trajectories if UNSCORED not in t.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One training sequence: per-token arrays of equal length, and its origin.

    ``logprobs`` are the engine's, zero where nothing was sampled; ``versions`` the policy version number
    of each token, -1 for tokens not sampled by the policy; ``samples_per_trajectory`` the number of samples its
    trajectory yields (they share one loss denominator); ``images`` are placed among its tokens.
    """

    prompt_id: int
    trajectory: int
    tokens: Tokens
    mask: NDArray[np.bool_]
    logprobs: Floats
    advantages: Floats
    versions: NDArray[np.int32]
    policy: str = "actor"
    samples_per_trajectory: int = 1
    reward: float = 0.0
    extras: Mapping[str, Array] = field(default_factory=_empty)
    images: tuple[PlacedImage, ...] = ()

    def __post_init__(self) -> None:
        n = len(self.tokens)
        if self.images:
            check_placement(self.images, n)
        if not n == len(self.mask) == len(self.logprobs) == len(self.advantages) == len(self.versions):
            for name in ("mask", "logprobs", "advantages", "versions"):
                _check_length(name, getattr(self, name), n)
        for name, values in self.extras.items():
            _check_length(name, values, n)
        if n and self.mask[0]:
            raise ValueError(
                "the first token of a sample has no context and cannot be trained on; set mask[0] to False"
            )

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def oldest_version(self) -> int | None:
        """The oldest version number among trained tokens; None if no policy sampled any."""
        versions = self.versions[self.mask & (self.versions >= 0)]
        return int(versions.min()) if len(versions) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The input of one training step.

    ``probe`` holds a few samples of later steps, used to compare engine and trainer log-probs but not trained on.
    """

    step: int
    samples: tuple[Sample, ...]
    num_groups: int
    probe: tuple[Sample, ...] = ()

    def staleness(self, now: Version) -> int:
        """Return how many versions the oldest token of ``now.policy`` is behind ``now``."""
        samples = [s for s in self.samples if s.policy == now.policy]
        if not samples:
            return 0
        versions = np.concatenate([s.versions for s in samples])
        trained = versions[np.concatenate([s.mask for s in samples]) & (versions >= 0)]
        return now.number - int(trained.min()) if len(trained) else 0

    @property
    def tokens(self) -> int:
        """Total number of tokens, prompts included."""
        return sum(len(s) for s in self.samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """The trainer's log-prob and entropy of each trained token, by sample.

    ``sample_indices`` are places in the batch and ``counts`` the trained tokens of each of these samples; ``logprobs``
    and ``entropies`` are those of all samples, concatenated.
    """

    sample_indices: NDArray[np.int32]
    counts: NDArray[np.int32]
    logprobs: Floats
    entropies: Floats

    def split(self) -> dict[int, tuple[Floats, Floats]]:
        """Return the log-probs and entropies of each sample by its place in the batch."""
        bounds = pairwise([0, *np.cumsum(self.counts).tolist()])
        parts = [(self.logprobs[start:end], self.entropies[start:end]) for start, end in bounds]
        return dict(zip(self.sample_indices.tolist(), parts, strict=True))

    @staticmethod
    def merge(parts: Sequence[TokenStats]) -> TokenStats:
        """Return the samples of all parts; of one that several parts have, the first part's."""
        found: dict[int, tuple[Floats, Floats]] = {}
        for part in parts:
            found = part.split() | found
        empty = [np.zeros(0, np.float32)]
        return TokenStats(
            sample_indices=np.array(list(found), np.int32),
            counts=np.array([len(logprobs) for logprobs, _ in found.values()], np.int32),
            logprobs=np.concatenate([logprobs for logprobs, _ in found.values()] or empty),
            entropies=np.concatenate([entropies for _, entropies in found.values()] or empty),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpan:
    """What a process did from ``start``, in seconds since the epoch, for ``seconds``; ``lane`` names the process."""

    name: str
    start: float
    seconds: float
    lane: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of one training step.

    ``seconds`` and ``spans`` are wall-clock times, excluded from reproducibility checks. ``token_stats`` is None where
    the trainer was not asked for it.
    """

    version: Version
    metrics: Mapping[str, float] = field(default_factory=_empty)
    seconds: Mapping[str, float] = field(default_factory=_empty)
    spans: tuple[TimeSpan, ...] = ()
    token_stats: TokenStats | None = None
