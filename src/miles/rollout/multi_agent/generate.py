"""Multi-agent generate: a user's function runs several policies over a prompt; all they generate is one trajectory.

The status of the trajectory and ``metadata["reason"]`` say how it ended:

    completed   stop
    truncated   length (a conversation ends in a truncated reply), context, or wall_time
    aborted     abort (an engine was interrupted)
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

from miles.core.agents import ROLES
from miles.core.errors import HookError, MilesError, describe_error
from miles.core.protocols import Engine, RewardFn, SamplingParams
from miles.core.types import Author, Prompt, Reward, Span, Status, Trajectory
from miles.rollout.generate.dispatch import CircuitBreaker
from miles.rollout.multi_agent.agents import AgentRole, Agents, MultiAgentFn, build_agents
from miles.rollout.serving.errors import ContextLengthError, SessionError

_STATUS_BY_REASON = {"length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """The function's rewards, or why there are none: ``reason`` in a word, ``failure`` in a sentence."""

    rewards: Mapping[str, float | Reward] | None = None
    reason: str | None = None
    failure: str | None = None


class MultiAgentGenerate:
    """A core.protocols.Generate. The first of the ``roles`` is the main one: the trajectory's reward is its reward.

    ``reward`` is the run's own, for the function to call; ``scored`` says that the run calls it, or a group reward,
    where the function returns no rewards or was truncated: otherwise a truncated trajectory earns 0.

    The trajectory's metadata: ``roles`` (see core.agents), ``cast`` (each participating role's last ``text``,
    ``messages``, ``turns`` and ``reason``), ``text`` and ``messages`` of the main one, ``turns`` of all together,
    ``reason`` and ``failure``.
    """

    def __init__(
        self,
        function: MultiAgentFn,
        roles: Sequence[AgentRole],
        *,
        reward: RewardFn | None,
        scored: bool,
        wall_seconds: float = 3600.0,
        max_failures: int = 128,
    ) -> None:
        self._function = function
        self._roles = tuple(roles)
        self._wall_seconds = wall_seconds
        self._reward = reward
        self._scored = scored
        self._breaker = CircuitBreaker("The multi-agent function", max_failures)

    async def __call__(self, prompt: Prompt, engine: Engine, sampling: SamplingParams) -> Trajectory:
        async with AsyncExitStack() as exit_stack:
            agents = build_agents(self._roles, prompt, sampling.seed, exit_stack, self._reward)
            outcome = await self._run(prompt, agents)
            parts = {name: agent.trajectories() for name, agent in agents.items()}
        trajectory = self._build_trajectory(
            prompt, {name: conversations for name, conversations in parts.items() if conversations}, outcome
        )
        self._breaker.record(prompt, trajectory.metadata.get("failure"))
        return trajectory

    async def _run(self, prompt: Prompt, agents: Agents) -> _Outcome:
        limit = asyncio.timeout(self._wall_seconds)
        try:
            async with limit:
                rewards = await self._function(prompt, agents)
        except ContextLengthError:
            return _Outcome(reason="context")
        except SessionError as error:
            return _Outcome(reason="cast", failure=str(error))
        except MilesError:
            raise
        except Exception as error:
            if isinstance(error, TimeoutError) and limit.expired():
                return _Outcome(reason="wall_time")
            failure = describe_error(error)
            for agent in agents.values():
                failure = agent.redact(failure)
            return _Outcome(reason="cast", failure=failure)
        if rewards is not None and not isinstance(rewards, Mapping):
            raise HookError(
                f"The multi-agent function gave a {type(rewards).__name__}; return the roles' rewards by their names, "
                f"or None."
            )
        return _Outcome(rewards=rewards)

    def _build_trajectory(
        self, prompt: Prompt, parts: Mapping[str, Sequence[Trajectory]], outcome: _Outcome
    ) -> Trajectory:
        generated = parts or outcome.reason is not None
        failure = outcome.failure or (None if generated else "no agent was asked to generate anything")
        summaries = {name: _summarize(conversations) for name, conversations in parts.items()}
        status, reason = _final_status(outcome, summaries, failure)
        metadata: dict[str, Any] = {
            "cast": summaries,
            "text": "",
            **{
                key: value
                for key, value in summaries.get(self._roles[0].name, {}).items()
                if key in ("text", "messages")
            },
            "turns": sum(each["turns"] for each in summaries.values()),
            "reason": reason,
        }
        if status is Status.FAILED:
            metadata["failure"] = failure
        branches = {
            name: [branch for t in conversations for branch in t.branches] for name, conversations in parts.items()
        }
        if not parts:
            branches = {self._roles[0].name: [self._prompt_branch(prompt)]}
        metadata[ROLES] = [name for name, role_branches in branches.items() for _ in role_branches]
        return Trajectory(
            branches=tuple(branch for role_branches in branches.values() for branch in role_branches),
            status=status,
            reward=None if status in (Status.FAILED, Status.ABORTED) else self._main_reward(prompt, outcome, parts),
            metadata=metadata,
        )

    def _prompt_branch(self, prompt: Prompt) -> tuple[Span, ...]:
        rendered = self._roles[0].renderer.render_prompt(prompt.messages, ())
        tokens = np.array(rendered.tokens, np.int32)
        return (Span(author=Author.PROMPT, tokens=tokens, images=rendered.images),)

    def _main_reward(self, prompt: Prompt, outcome: _Outcome, participants: Mapping[str, Any]) -> Reward | None:
        """The main role's reward, with every role's reward by name among the parts."""
        role_rewards = outcome.rewards
        if (
            role_rewards is None and outcome.reason is not None and not self._scored
        ):  # truncated, and nothing else scores it
            return Reward(value=0.0, parts=dict.fromkeys(participants, 0.0))
        if role_rewards is None:
            return None
        names = [role.name for role in self._roles]
        if unknown := [name for name in role_rewards if name not in names]:
            raise HookError(
                f"The multi-agent function rewards {unknown[0]!r} at prompt {prompt.id}, which is no role; there are "
                f"{', '.join(names)}."
            )
        if missing := [
            r.name for r in self._roles if r.trained and r.name in participants and r.name not in role_rewards
        ]:
            raise HookError(
                f"The multi-agent function gave no reward for {missing[0]}, which spoke at prompt {prompt.id}; give "
                f"every "
                "trained role one, or return None and leave it to the run's reward."
            )
        rewards = {name: _parse_reward(name, role_rewards[name]) for name in names if name in role_rewards}
        parts = {name: reward.value for name, reward in rewards.items()}
        inner = {f"{name}.{part}": v for name, reward in rewards.items() for part, v in reward.parts.items()}
        return Reward(value=parts.get(names[0], 0.0), parts={**parts, **inner})


def _summarize(conversations: Sequence[Trajectory]) -> dict[str, Any]:
    last = conversations[-1].metadata
    return {
        "text": last["text"],
        "messages": last["messages"],
        "turns": sum(t.metadata["turns"] for t in conversations),
        "reason": last["reason"],
    }


def _final_status(
    outcome: _Outcome, summaries: Mapping[str, Mapping[str, Any]], failure: str | None
) -> tuple[Status, str]:
    reasons = [each["reason"] for each in summaries.values()]
    if "abort" in reasons:
        return Status.ABORTED, "abort"
    if failure is not None:
        return Status.FAILED, "cast"
    if outcome.reason is not None:
        return Status.TRUNCATED, outcome.reason
    reason = "length" if "length" in reasons else "stop"
    return _STATUS_BY_REASON.get(reason, Status.COMPLETED), reason


def _parse_reward(role: str, role_rewards: Any) -> Reward:
    if isinstance(role_rewards, Reward):
        return role_rewards
    if isinstance(role_rewards, bool) or not isinstance(role_rewards, Real):
        raise HookError(
            f"The multi-agent function gave {role_rewards!r} as the reward of {role}; give a number or a Reward."
        )
    return Reward(value=float(role_rewards))
