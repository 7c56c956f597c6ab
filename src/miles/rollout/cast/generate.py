"""An attempt at a prompt by several policies: a user's function has them meet, and all they said is one trajectory.

How it ends is the trajectory's status, and ``metadata["reason"]`` says it in a word:

    completed   stop
    truncated   length (a conversation ends in a reply that was cut off), context, or wall_time
    aborted     abort (an engine was told to stop)
    failed      cast (``metadata["failure"]`` says how)
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from miles.core.errors import MilesError, PlugError
from miles.core.protocols import Engine, RewardFn, Sampling
from miles.core.roles import ROLES
from miles.core.types import Author, Prompt, Reward, Span, Status, Trajectory
from miles.rollout.cast.cast import Cast, Play, Role, cast_of
from miles.rollout.generate.failures import Failures
from miles.rollout.session.message import ContextFull, SessionError

_ENDED = {"length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What the function gave, or why it gave nothing: ``reason`` in a word, ``failure`` in a sentence."""

    rewards: Mapping[str, float | Reward] | None = None
    reason: str | None = None
    failure: str | None = None


class CastGenerate:
    """A core.protocols.Generate. The first of the ``roles`` is the main one: the trajectory's reward is its reward.

    ``reward`` is the run's own, for the function to ask; ``scored`` says that the run asks it, or one of groups, where
    the function gives no rewards or was cut short: otherwise an attempt that was cut short earns nothing.

    The trajectory's metadata: ``roles`` (see core.roles), ``cast`` (of each role that spoke its last ``text``,
    ``messages``, ``turns`` and ``reason``), ``text`` and ``messages`` of the main one, ``turns`` of all together,
    ``reason`` and ``failure``.
    """

    def __init__(
        self,
        play: Play,
        roles: Sequence[Role],
        *,
        reward: RewardFn | None,
        scored: bool,
        wall_seconds: float = 3600.0,
        most_failures: int = 128,
    ) -> None:
        self._play, self._roles, self._wall_seconds = play, tuple(roles), wall_seconds
        self._reward, self._scored = reward, scored
        self._failures = Failures("The cast function", most_failures)

    async def __call__(self, prompt: Prompt, engine: Engine, sampling: Sampling) -> Trajectory:
        async with AsyncExitStack() as until:
            cast = cast_of(self._roles, prompt, sampling.seed, until, self._reward)
            outcome = await self._run(prompt, cast)
            parts = {name: player.parts() for name, player in cast.items()}
        trajectory = self._joined(prompt, {name: said for name, said in parts.items() if said}, outcome)
        self._failures.count(prompt, trajectory.metadata.get("failure"))
        return trajectory

    async def _run(self, prompt: Prompt, cast: Cast) -> _Outcome:
        limit = asyncio.timeout(self._wall_seconds)
        try:
            async with limit:
                rewards = await self._play(prompt, cast)
        except ContextFull:
            return _Outcome(reason="context")
        except SessionError as error:
            return _Outcome(reason="cast", failure=str(error))
        except MilesError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return _Outcome(reason="wall_time")
            return _Outcome(reason="cast", failure=f"{type(error).__name__}: {error}")
        if rewards is not None and not isinstance(rewards, Mapping):
            raise PlugError(
                f"The cast function gave a {type(rewards).__name__}; return the roles' rewards by their names, or None."
            )
        return _Outcome(rewards=rewards)

    def _joined(self, prompt: Prompt, parts: Mapping[str, Sequence[Trajectory]], outcome: _Outcome) -> Trajectory:
        heard = parts or outcome.reason is not None
        failure = outcome.failure or (None if heard else "nobody was asked to say anything")
        told = {name: _told(said) for name, said in parts.items()}
        status, reason = _ended(outcome, told, failure)
        metadata: dict[str, Any] = {
            "cast": told,
            "text": "",
            **{key: value for key, value in told.get(self._roles[0].name, {}).items() if key in ("text", "messages")},
            "turns": sum(each["turns"] for each in told.values()),
            "reason": reason,
        }
        if status is Status.FAILED:
            metadata["failure"] = failure
        branches = {name: [branch for t in said for branch in t.branches] for name, said in parts.items()}
        if not parts:
            branches = {self._roles[0].name: [self._unheard(prompt)]}
        metadata[ROLES] = [name for name, its in branches.items() for _ in its]
        return Trajectory(
            branches=tuple(branch for its in branches.values() for branch in its),
            status=status,
            reward=None if status in (Status.FAILED, Status.ABORTED) else self._earned(prompt, outcome, parts),
            metadata=metadata,
        )

    def _unheard(self, prompt: Prompt) -> tuple[Span, ...]:
        tokens = self._roles[0].renderer.opening(prompt.messages, ())
        return (Span(author=Author.PROMPT, tokens=np.array(tokens, np.int32)),)

    def _earned(self, prompt: Prompt, outcome: _Outcome, spoke: Mapping[str, Any]) -> Reward | None:
        """The main role's reward, with every role's under its name among the parts."""
        given = outcome.rewards
        if given is None and outcome.reason is not None and not self._scored:  # cut short, and nobody else to ask
            return Reward(value=0.0, parts=dict.fromkeys(spoke, 0.0))
        if given is None:
            return None
        names = [role.name for role in self._roles]
        if unknown := [name for name in given if name not in names]:
            raise PlugError(
                f"The cast function rewards {unknown[0]!r} at prompt {prompt.id}, which is no role; there are "
                f"{', '.join(names)}."
            )
        if missing := [r.name for r in self._roles if r.trained and r.name in spoke and r.name not in given]:
            raise PlugError(
                f"The cast function gave no reward for {missing[0]}, which spoke at prompt {prompt.id}; give every "
                "trained role one, or return None and leave it to the run's reward."
            )
        rewards = {name: _checked(name, given[name]) for name in names if name in given}
        parts = {name: reward.value for name, reward in rewards.items()}
        inner = {f"{name}.{part}": v for name, reward in rewards.items() for part, v in reward.parts.items()}
        return Reward(value=parts.get(names[0], 0.0), parts={**parts, **inner})


def _told(said: Sequence[Trajectory]) -> dict[str, Any]:
    last = said[-1].metadata
    return {
        "text": last["text"],
        "messages": last["messages"],
        "turns": sum(t.metadata["turns"] for t in said),
        "reason": last["reason"],
    }


def _ended(outcome: _Outcome, told: Mapping[str, Mapping[str, Any]], failure: str | None) -> tuple[Status, str]:
    reasons = [each["reason"] for each in told.values()]
    if "abort" in reasons:
        return Status.ABORTED, "abort"
    if failure is not None:
        return Status.FAILED, "cast"
    if outcome.reason is not None:
        return Status.TRUNCATED, outcome.reason
    reason = "length" if "length" in reasons else "stop"
    return _ENDED.get(reason, Status.COMPLETED), reason


def _checked(role: str, given: Any) -> Reward:
    if isinstance(given, Reward):
        return given
    if isinstance(given, bool) or not isinstance(given, Real):
        raise PlugError(f"The cast function gave {given!r} as the reward of {role}; give a number or a Reward.")
    return Reward(value=float(given))
