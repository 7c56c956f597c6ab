"""A prompt, a world and a policy in turns: the policy replies, the world answers, until one of them has had enough.

::

    environment.open -> session.begin -> engine.generate -> session.end -> environment.step -> session.begin ...
                        (tokens of what is new alone)       (the spans, exactly)             |
                                                                        done, or a limit  ---+--> trajectory

How it ends is the trajectory's status, and ``metadata["reason"]`` says it in a word:

    completed   stop (the world, or a reply without calls, ended it)
    truncated   length, context, turns, tool_time, wall_time, or what bound the world names
    aborted     abort (the engine was told to stop)
    failed      environment (``metadata["failure"]`` says how), or wall_time before anything was said
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from miles.core.errors import DataError, MilesError
from miles.core.protocols import Completion, Engine, Sampling
from miles.core.types import EMPTY, Prompt, Reward, Status, Trajectory
from miles.rollout.generate.failures import Failures
from miles.rollout.seeds import mix
from miles.rollout.session.audit import mismatch_of
from miles.rollout.session.render import Renderer
from miles.rollout.session.session import Reply, Session
from miles.rollout.tools.config import ToolsConfig
from miles.rollout.tools.environment import NOTES, Environment, Equipped, Opening, Step, ToolUse
from miles.rollout.tools.tool import EnvironmentFailed, Message

T = TypeVar("T")
_CLOSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Bounds of an attempt: replies, tokens of one reply (None: as many as are left), and seconds from first to last.

    All replies together have ``sampling.max_new_tokens``.
    """

    turns: int = 16
    turn_tokens: int | None = None
    wall_seconds: float = 1800.0


def limits_of(config: ToolsConfig) -> TurnLimits:
    """The limits the knobs set."""
    return TurnLimits(
        turns=config.generate_max_turns,
        turn_tokens=config.generate_max_turn_len,
        wall_seconds=config.generate_timeout,
    )


@dataclass(frozen=True, slots=True)
class _End:
    status: Status
    reason: str


class MultiTurn:
    """A core.protocols.Generate. ``world_of`` gives every attempt its environment (see tools.worlds.Worlds).

    A world that fails costs its attempt, not the run; when ``most_failures`` attempts in a row were lost to it, it is
    raised. The trajectory's metadata: ``text`` of the last reply, ``messages``, ``turns``, ``reason``, ``tool_calls``
    and ``tool_failures`` where there were tools, ``notes`` on what could not be read in replies, ``failure``, and, with
    ``audits``, where its tokens are not those of the chat template (``audit.MISMATCH``).
    """

    def __init__(
        self,
        renderer: Renderer,
        world_of: Callable[[Prompt], Environment],
        *,
        limits: TurnLimits | None = None,
        max_context_len: int | None = None,
        template: Mapping[str, Any] = EMPTY,
        most_failures: int = 128,
        audits: bool = False,
    ) -> None:
        self._renderer = renderer
        self._world_of = world_of
        self._limits = limits or TurnLimits()
        self._max_context_len = max_context_len
        self._template = template
        self._failures = Failures("The environment", most_failures)
        self._audits = audits

    async def __call__(self, prompt: Prompt, engine: Engine, sampling: Sampling) -> Trajectory:
        session = Session(f"{prompt.id}-{prompt.epoch}-{sampling.seed:x}", self._renderer, prompt=prompt)
        environment = self._world_of(prompt)
        attempt = _Attempt(session, environment, engine, sampling, self._limits, self._max_context_len, self._template)
        told: dict[str, Any] = {}
        limit = asyncio.timeout(self._limits.wall_seconds)
        try:
            async with limit:
                end = await attempt.play(prompt)
        except EnvironmentFailed as error:
            end, told["failure"] = _End(Status.FAILED, "environment"), str(error)
        except TimeoutError:
            if not limit.expired():
                raise
            end = _End(Status.TRUNCATED if attempt.turns else Status.FAILED, "wall_time")
        finally:
            complaint = await _closed(environment)
        if complaint is not None:
            told["close_failure"] = complaint
        self._failures.count(prompt, told.get("failure"))
        if self._audits:
            told |= mismatch_of(session)
        return attempt.trajectory(end, told)


class _Attempt:
    """One attempt under way. What is sampled goes into the session, and nowhere else."""

    def __init__(
        self,
        session: Session,
        environment: Environment,
        engine: Engine,
        sampling: Sampling,
        limits: TurnLimits,
        max_context_len: int | None,
        template: Mapping[str, Any],
    ) -> None:
        self._session = session
        self._environment = environment
        self._engine = engine
        self._sampling = sampling
        self._limits = limits
        self._max_context_len = max_context_len
        self._template = template
        self._left = sampling.max_new_tokens
        self._scores = False
        self._earned: float | None = None
        self._parts: dict[str, float] = {}
        self._notes: list[str] = []
        self.turns = 0

    async def play(self, prompt: Prompt) -> _End:
        opening = await _asked(self._environment.open(prompt))
        self._scores = opening.scores
        messages = list(opening.messages)
        while True:
            said = await self._reply(prompt, messages, opening)
            if isinstance(said, _End):
                return said
            self.turns += 1
            self._notes += said.notes
            if said.finish_reason == "abort":
                return _End(Status.ABORTED, "abort")
            if said.finish_reason == "length":
                return _End(Status.TRUNCATED, "length")
            step = await _asked(self._environment.step({**said.message, NOTES: said.notes}))
            self._earn(step)
            if step.limit is not None:
                return _End(Status.TRUNCATED, step.limit)
            if step.done:
                return _End(Status.COMPLETED, "stop")
            if self.turns >= self._limits.turns:
                return _End(Status.TRUNCATED, "turns")
            messages = self._onward(messages, said, step)

    def trajectory(self, end: _End, told: Mapping[str, Any]) -> Trajectory:
        metadata = {**told, "reason": end.reason, **_tallied(self._environment)}
        if self._notes:
            metadata["notes"] = self._notes
        reward: Reward | None = None
        if end.status in (Status.COMPLETED, Status.TRUNCATED) and (self._scores or self._earned is not None):
            reward = Reward(value=self._earned or 0.0, parts=self._parts)
        return self._session.trajectory(status=end.status, reward=reward, metadata=metadata)

    async def _reply(self, prompt: Prompt, messages: list[Message], opening: Opening) -> Reply | _End:
        """What the policy says next, or the limit that keeps it from saying more."""
        if self._left < 1:
            return _End(Status.TRUNCATED, "length")
        turn = self._session.begin(messages, opening.tools, **self._template)
        try:
            room = None if self._max_context_len is None else self._max_context_len - len(turn.tokens)
            if room is not None and room < 1:
                if self.turns:
                    self._session.abandon(turn)
                    return _End(Status.TRUNCATED, "context")
                raise DataError(
                    f"Prompt {prompt.id} has {len(turn.tokens)} tokens with its tools, which leaves no room for a "
                    f"reply in a context of {self._max_context_len}; set --rollout-max-prompt-len to drop such prompts."
                )
            completion = await self._engine.generate(turn.tokens, self._drawn(room))
        except BaseException:
            self._session.abandon(turn)
            raise
        self._left -= _length(completion)
        return self._session.end(turn, completion)

    def _drawn(self, room: int | None) -> Sampling:
        """How this reply is drawn. Engines count a request's tokens from its first, so each reply has its own seed."""
        most = (n for n in (self._left, self._limits.turn_tokens, room) if n is not None)
        seed = mix(self._sampling.seed, self.turns) if self.turns else self._sampling.seed
        return replace(self._sampling, max_new_tokens=min(most), seed=seed)

    def _earn(self, step: Step) -> None:
        if step.reward is not None:
            self._earned = (self._earned or 0.0) + step.reward
        for name, value in step.parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + value

    def _onward(self, messages: list[Message], said: Reply, step: Step) -> list[Message]:
        if step.anew:
            return list(step.messages)
        if not step.messages:
            raise EnvironmentFailed("it neither answered nor ended")
        return [*messages, said.message, *step.messages]


async def _asked(answer: Awaitable[T]) -> T:
    """What an environment gives. What it raises is a failure of its own, unless it is meant for the user."""
    try:
        return await answer
    except (EnvironmentFailed, MilesError):
        raise
    except Exception as error:
        raise EnvironmentFailed(f"{type(error).__name__}: {error}") from error


async def _closed(environment: Environment) -> str | None:
    """Close it; why it could not be closed, if so. Its attempt has ended, and is worth what it is worth."""
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await environment.close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _tallied(environment: Environment) -> dict[str, int]:
    if not isinstance(environment, ToolUse | Equipped):
        return {}
    return {"tool_calls": environment.tally.calls, "tool_failures": environment.tally.failures}


def _length(completion: Completion) -> int:
    return sum(len(span) for span in completion.spans)
