"""What graders are handed to work with: a seed, worker processes, and the servers they may ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from miles.core.protocols import RewardFn
from miles.rollout.reward.workers import Workers

TokensOf = Callable[[Sequence[Mapping[str, Any]]], list[int]]
"""A finished conversation as the tokens a reward model reads."""

RUBRIC = "Judge how correct, helpful and well put each attempt is; a correct one is always above an incorrect one."
"""What a judge looks for, unless told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """An HTTP endpoint and how it is asked.

    ``token`` is sent as a bearer token. A request that fails is repeated ``retries`` times, after
    ``pause`` seconds and then twice as long each time; at most ``concurrency`` are under way at once,
    each for at most ``seconds``, and each of at most ``batch`` attempts where the endpoint takes several.
    """

    url: str
    token: str | None = None
    retries: int = 3
    pause: float = 0.5
    concurrency: int = 32
    seconds: float = 60.0
    batch: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelServer:
    """A served reward model: ``api`` says whose wire it speaks, ``tokens_of`` renders with its own chat template."""

    server: Server
    model: str | None = None
    api: str = "sglang"
    tokens_of: TokensOf | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeServer:
    """A language model that compares attempts; ``rubric`` is what it is told to look for."""

    server: Server
    model: str
    rubric: str = RUBRIC
    temperature: float = 0.0
    max_tokens: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """The means of all graders of a run. What was not given is None, and using it is the user's error."""

    seed: int = 0
    workers: Workers = field(default_factory=Workers)
    remote: Server | None = None
    model: ModelServer | None = None
    judge: JudgeServer | None = None
    code: Callable[[], RewardFn] | None = None
    reward_key: str | None = None
