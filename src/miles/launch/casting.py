"""Who plays in a run with a cast: the user's function, and for each policy the engine, the words and the sampling."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from miles.core.protocols import Engine, Sampling
from miles.core.types import Prompt
from miles.launch.answering import Agents, Answering, agents_of
from miles.launch.company import Company
from miles.launch.config import Config
from miles.launch.members import Member, trained
from miles.launch.policy import Policy
from miles.plug import points
from miles.rollout.cast.cast import Play, Role
from miles.rollout.cast.generate import CastGenerate
from miles.rollout.generate.agent import Seat
from miles.rollout.sampling import context_limit, evaluation_sampling, training_sampling
from miles.rollout.session.choose import renderer_for
from miles.rollout.session.render import Renderer


class LateSessions:
    """Sessions (see generate.agent) of one policy on a server that is made for whoever first wants an address."""

    def __init__(self, config: Config, policy: Policy, limit: int, port: int) -> None:
        self._config, self._policy, self._limit, self._port = config, policy, limit, port
        self._agents: Agents | None = None

    @asynccontextmanager
    async def open(self, prompt: Prompt, engine: Engine, sampling: Sampling) -> AsyncIterator[Seat]:
        """A session for one role of one attempt."""
        if self._agents is None:
            self._agents = agents_of(self._config, self._policy, self._limit, port=self._port)
        async with self._agents.open(prompt, engine, sampling) as seat:
            yield seat

    async def close(self) -> None:
        if self._agents is not None:
            await self._agents.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """A policy's part before there is an engine."""

    member: Member
    trained: bool
    renderer: Renderer
    limit: int
    sessions: LateSessions


@dataclass(frozen=True, slots=True, kw_only=True)
class Casting:
    """The function that has the policies meet, and what each brings, found and checked before anything is loaded."""

    play: Play
    parts: tuple[_Part, ...]
    config: Config = field(repr=False)

    def answering(self, alone: Answering, engines: Mapping[str, Engine], *, evaluates: bool = False) -> Answering:
        """How prompts are answered by all policies with these ``engines``, scored as ``alone`` says."""
        generate = CastGenerate(
            self.play,
            [self._role(part, engines, evaluates) for part in self.parts],
            reward=alone.reward,
            scored=alone.reward is not None or alone.group_reward is not None,
            wall_seconds=self.config.cast.cast_timeout,
            most_failures=self.config.rollout.max_unscored_attempts,
        )
        return replace(alone, generate=generate)

    async def close(self) -> None:
        """End the servers that were started."""
        for part in self.parts:
            await part.sessions.close()

    def _role(self, part: _Part, engines: Mapping[str, Engine], evaluates: bool) -> Role:
        rollout = part.member.config.rollout
        return Role(
            name=part.member.name,
            policy=part.member.weights,
            trained=part.trained,
            engine=engines[part.member.weights],
            renderer=part.renderer,
            sampling=evaluation_sampling(rollout) if evaluates else training_sampling(rollout),
            sessions=part.sessions,
            max_context_len=part.limit,
        )


def casting_of(config: Config, company: Company) -> Casting | None:
    """The cast of a run; None where one policy answers prompts by itself."""
    path = config.cast.custom_cast_function_path
    if path is None:
        return None
    first = config.agents.session_server_port
    parts = []
    for at, member in enumerate(company.members):
        policy, rollout = company.behind(member).policy, member.config.rollout
        limit = context_limit(rollout, policy.spec.max_positions)
        parts.append(
            _Part(
                member=member,
                trained=trained(member, company.members),
                renderer=renderer_for(policy.tokenizer, template=rollout.apply_chat_template_kwargs),
                limit=limit,
                sessions=LateSessions(member.config, policy, limit, first + at if first else 0),
            )
        )
    return Casting(play=points.CAST_PLAY.load(path), parts=tuple(parts), config=config)
