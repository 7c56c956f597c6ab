"""Multi-turn rollouts: the policy replies, the environment responds, until one of them ends the conversation.

::

    environment.open -> session.begin -> engine.generate -> session.end -> environment.step -> session.begin ...
                        (new tokens only)                   (exact spans)                    |
                                                                        done, or a limit  ---+--> trajectory

The status of the trajectory and ``metadata["reason"]`` say how it ended:

    completed   stop (the environment, or a reply without calls, ended it)
    truncated   length, context, turns, tool_time, wall_time, or the limit the environment names
    aborted     abort (the engine was interrupted)
    failed      environment or session (``metadata["failure"]`` says how), or wall_time before the first reply
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from miles.core.errors import DataError, MilesError, describe_error
from miles.core.protocols import Completion, Engine, SamplingParams
from miles.core.types import EMPTY, Prompt, Reward, Status, Trajectory
from miles.rollout.generate.dispatch import CircuitBreaker
from miles.rollout.seeds import mix
from miles.rollout.serving.errors import SessionError
from miles.rollout.session.audit import summarize_mismatches
from miles.rollout.session.render import ChatRenderer
from miles.rollout.session.session import Session, SessionReply
from miles.rollout.tools.config import ToolsConfig
from miles.rollout.tools.environment import (
    NOTES,
    Environment,
    OpenResult,
    StepResult,
    ToolAugmentedEnvironment,
    ToolEnvironment,
)
from miles.rollout.tools.tool import EnvironmentFailed, Message

T = TypeVar("T")
_CLOSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Limits of a trajectory: replies, tokens per reply (None: as many as are left), and total seconds.

    All replies together have ``sampling.max_new_tokens``.
    """

    turns: int = 16
    turn_tokens: int | None = None
    wall_seconds: float = 1800.0


def turn_limits_from_config(config: ToolsConfig) -> TurnLimits:
    """Turn limits from the options."""
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
    """A core.protocols.Generate. ``make_environment`` creates every trajectory's environment (see tools.env_registry).

    An environment failure fails its trajectory, not the run; after ``max_failures`` consecutive ones it is raised. The
    trajectory's metadata: ``text`` of the last reply, ``messages``, ``turns``, ``reason``, ``tool_calls`` and
    ``tool_failures`` where there are tools, ``notes`` on malformed replies, ``failure``, and, with ``audit``, where its
    tokens differ from the chat template's (``audit.MISMATCH``).
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        make_environment: Callable[[Prompt], Environment],
        *,
        limits: TurnLimits | None = None,
        max_context_len: int | None = None,
        template: Mapping[str, Any] = EMPTY,
        max_failures: int = 128,
        audit: bool = False,
    ) -> None:
        self._renderer = renderer
        self._make_environment = make_environment
        self._limits = limits or TurnLimits()
        self._max_context_len = max_context_len
        self._template = template
        self._breaker = CircuitBreaker("The environment", max_failures)
        self._audit = audit

    async def __call__(self, prompt: Prompt, engine: Engine, sampling: SamplingParams) -> Trajectory:
        session = Session(f"{prompt.id}-{prompt.epoch}-{sampling.seed:x}", self._renderer, prompt=prompt)
        environment = self._make_environment(prompt)
        conversation = _Conversation(
            session, environment, engine, sampling, self._limits, self._max_context_len, self._template
        )
        metadata: dict[str, Any] = {}
        limit = asyncio.timeout(self._limits.wall_seconds)
        try:
            async with limit:
                end = await conversation.play(prompt)
        except EnvironmentFailed as error:
            end, metadata["failure"] = _End(Status.FAILED, "environment"), str(error)
        except SessionError as error:  # the conversation cannot go on after the tokens it has
            end, metadata["failure"] = _End(Status.FAILED, "session"), str(error)
        except TimeoutError:
            if not limit.expired():
                raise
            end = _End(Status.TRUNCATED if conversation.turns else Status.FAILED, "wall_time")
        finally:
            close_error = await _close(environment)
        if close_error is not None:
            metadata["close_failure"] = close_error
        self._breaker.record(prompt, metadata.get("failure"))
        if self._audit:
            metadata |= summarize_mismatches(session)
        return conversation.trajectory(end, metadata)


class _Conversation:
    """One running trajectory. All sampled tokens are in the session."""

    def __init__(
        self,
        session: Session,
        environment: Environment,
        engine: Engine,
        sampling: SamplingParams,
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
        self._tokens_left = sampling.max_new_tokens
        self._provides_reward = False
        self._total_reward: float | None = None
        self._parts: dict[str, float] = {}
        self._notes: list[str] = []
        self.turns = 0

    async def play(self, prompt: Prompt) -> _End:
        opened = await _await_environment(self._environment.open(prompt))
        self._provides_reward = opened.provides_reward
        messages = list(opened.messages)
        while True:
            messages = await self._session.prepare(messages)
            reply = await self._reply(prompt, messages, opened)
            if isinstance(reply, _End):
                return reply
            self.turns += 1
            self._notes += reply.notes
            if reply.finish_reason == "abort":
                return _End(Status.ABORTED, "abort")
            if reply.finish_reason == "length":
                return _End(Status.TRUNCATED, "length")
            step = await _await_environment(self._environment.step({**reply.message, NOTES: reply.notes}))
            self._add_reward(step)
            if step.limit is not None:
                return _End(Status.TRUNCATED, step.limit)
            if step.done:
                return _End(Status.COMPLETED, "stop")
            if self.turns >= self._limits.turns:
                return _End(Status.TRUNCATED, "turns")
            messages = self._next_messages(messages, reply, step)

    def trajectory(self, end: _End, metadata: Mapping[str, Any]) -> Trajectory:
        metadata = {**metadata, "reason": end.reason, **_tool_counts(self._environment)}
        if self._notes:
            metadata["notes"] = self._notes
        reward: Reward | None = None
        if end.status in (Status.COMPLETED, Status.TRUNCATED) and (
            self._provides_reward or self._total_reward is not None
        ):
            reward = Reward(value=self._total_reward or 0.0, parts=self._parts)
        return self._session.trajectory(status=end.status, reward=reward, metadata=metadata)

    async def _reply(self, prompt: Prompt, messages: list[Message], opened: OpenResult) -> SessionReply | _End:
        """Generate the next reply, or return the limit that prevents it."""
        if self._tokens_left < 1:
            return _End(Status.TRUNCATED, "length")
        turn = self._session.begin(messages, opened.tools, **self._template)
        try:
            context_left = None if self._max_context_len is None else self._max_context_len - len(turn.tokens)
            if context_left is not None and context_left < 1:
                if self.turns:
                    self._session.abandon(turn)
                    return _End(Status.TRUNCATED, "context")
                raise DataError(
                    f"Prompt {prompt.id} has {len(turn.tokens)} tokens with its tools, which leaves no room for a "
                    f"reply in a context of {self._max_context_len}."
                )
            completion = await self._engine.generate(turn.tokens, self._reply_sampling(context_left), turn.images)
        except BaseException:
            self._session.abandon(turn)
            raise
        self._tokens_left -= _length(completion)
        return self._session.end(turn, completion)

    def _reply_sampling(self, context_left: int | None) -> SamplingParams:
        """Sampling of this reply. Engines count a request's tokens from its first, so each reply has its own seed."""
        budgets = (n for n in (self._tokens_left, self._limits.turn_tokens, context_left) if n is not None)
        seed = mix(self._sampling.seed, self.turns) if self.turns else self._sampling.seed
        return replace(self._sampling, max_new_tokens=min(budgets), seed=seed)

    def _add_reward(self, step: StepResult) -> None:
        if step.reward is not None:
            self._total_reward = (self._total_reward or 0.0) + step.reward
        for name, value in step.parts.items():
            self._parts[name] = self._parts.get(name, 0.0) + value

    def _next_messages(self, messages: list[Message], reply: SessionReply, step: StepResult) -> list[Message]:
        if step.replaces_history:
            return list(step.messages)
        if not step.messages:
            raise EnvironmentFailed("it neither responded nor ended")
        return [*messages, reply.message, *step.messages]


async def _await_environment(answer: Awaitable[T]) -> T:
    """Await an environment; its errors become EnvironmentFailed, unless they are meant for the user."""
    try:
        return await answer
    except (EnvironmentFailed, MilesError):
        raise
    except Exception as error:
        raise EnvironmentFailed(describe_error(error)) from error


async def _close(environment: Environment) -> str | None:
    """Close the environment; returns the error if that fails, since its trajectory has ended anyway."""
    try:
        async with asyncio.timeout(_CLOSE_SECONDS):
            await environment.close()
    except Exception as error:
        return describe_error(error)
    return None


def _tool_counts(environment: Environment) -> dict[str, int]:
    if not isinstance(environment, ToolEnvironment | ToolAugmentedEnvironment):
        return {}
    return {"tool_calls": environment.stats.calls, "tool_failures": environment.stats.failures}


def _length(completion: Completion) -> int:
    return sum(len(span) for span in completion.spans)
