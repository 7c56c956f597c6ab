"""Grader context: the seed, the worker pool and the HTTP endpoints graders use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.core.protocols import RewardFn
from miles.rollout.reward.grader_pool import GraderPool

RenderTokens = Callable[[Sequence[Mapping[str, Any]]], list[int]]
"""Renders a finished conversation to the tokens a reward model reads."""

DEFAULT_RUBRIC = (
    "Judge how correct, helpful and well put each attempt is; a correct one is always above an incorrect one."
)
"""The rubric of a judge that was given none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HTTPEndpoint:
    """An HTTP endpoint and its request policy.

    ``token`` is sent as a bearer token. A failed request is repeated ``retries`` times, after ``pause`` seconds and
    then twice as long each time; at most ``concurrency`` are in flight, each for at most ``seconds``, with at most
    ``batch`` trajectories where the endpoint accepts several.
    """

    url: str
    token: str | None = None
    retries: int = 3
    pause: float = 0.5
    concurrency: int = 32
    seconds: float = 60.0
    batch: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelEndpoint:
    """A served reward model: ``api`` names its wire format, ``render_tokens`` applies its own chat template."""

    server: HTTPEndpoint
    model: str | None = None
    api: str = "sglang"
    render_tokens: RenderTokens | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeEndpoint:
    """A language model that compares trajectories; ``rubric`` is what it looks for."""

    server: HTTPEndpoint
    model: str
    rubric: str = DEFAULT_RUBRIC
    temperature: float = 0.0
    max_tokens: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class GraderContext:
    """Everything graders of a run may use. What was not configured is None; using it is a user error."""

    seed: int = 0
    pool: GraderPool = field(default_factory=GraderPool)
    remote: HTTPEndpoint | None = None
    model: RewardModelEndpoint | None = None
    judge: JudgeEndpoint | None = None
    code: Callable[[], RewardFn] | None = None
    reward_key: str | None = None
