"""How prompts are answered and scored: in one turn, with tools, by an agent, or by a function of the user's own."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from miles.cluster.crew.asked import Crew
from miles.core.protocols import Engine, Generate, GroupRewardFn, RewardFn, Sampling
from miles.core.types import Prompt
from miles.launch.config import Config
from miles.launch.policy import Policy
from miles.launch.reward_workers import asked_rewards
from miles.launch.rewards import rewards_of
from miles.launch.upstream import upstream_of
from miles.plug import points
from miles.rollout.generate.agent import AgentGenerate, Seat
from miles.rollout.generate.chosen import Chosen
from miles.rollout.generate.multi_turn import MultiTurn, limits_of
from miles.rollout.generate.single_turn import SingleTurn
from miles.rollout.render import Renderer
from miles.rollout.sampling import context_limit
from miles.rollout.sandbox.limits import Limits
from miles.rollout.sandbox.run import Sandbox, sandbox_here
from miles.rollout.session.choose import renderer_for
from miles.rollout.session.match import MATCHES
from miles.rollout.tools.knobs import worlds_of
from miles.rollout.tools.worlds import Worlds

if TYPE_CHECKING:
    from miles.rollout.session.server.app import SessionServer
    from miles.rollout.session.server.seat import Seats

ONE, SEVERAL, AGENT, OWN = "single_turn", "multi_turn", "agent", "custom"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """What both training and evaluation need to answer and score a prompt."""

    generate: Generate
    reward: RewardFn | None
    group_reward: GroupRewardFn | None
    reward_key: str | None
    render: Renderer
    agents: Agents | None = None
    worlds: Worlds | None = None
    crew: Crew | None = None

    async def close(self) -> None:
        """End what was started to answer."""
        if self.agents is not None:
            await self.agents.close()
        if self.worlds is not None:
            await self.worlds.close()
        if self.crew is not None:
            await self.crew.close()


class Agents:
    """Sessions (see generate.agent) on a server of this machine, which starts with the first of them."""

    def __init__(self, server: SessionServer, seats: Seats, port: int) -> None:
        self._server, self._seats, self._port = server, seats, port
        self._started = False
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def open(self, prompt: Prompt, engine: Engine, sampling: Sampling) -> AsyncIterator[Seat]:
        """A session for one attempt."""
        async with self._turn:
            if not self._started:
                await self._server.start(port=self._port)
                self._started = True
        async with self._seats.open(prompt, engine, sampling) as seat:
            yield seat

    async def close(self) -> None:
        """Let turns under way end, and the server with them."""
        if self._started:
            await self._server.drain()
            await self._server.stop()


def answering_of(config: Config, policy: Policy, *, logs: Path | None = None) -> Answering:
    """The generate and reward functions the user named, or ours; plugs are checked here, before anything starts.

    What becomes of workers is written down in ``logs``, where there is such a folder.
    """
    r = config.rollout
    render = Renderer(policy.tokenizer, chat=r.apply_chat_template, template=r.apply_chat_template_kwargs)
    limit = context_limit(r, policy.spec.max_positions)
    ways: dict[str, Generate] = {ONE: SingleTurn(render, policy.tokenizer.text, max_context_len=limit)}
    agents, worlds, default, path = None, None, ONE, points.GENERATE.now(r.custom_generate_function_path)
    if path == SEVERAL:
        worlds = _worlds(config)
        ways[SEVERAL], default = _several(config, policy, limit, worlds), SEVERAL
    elif path not in (None, ONE, AGENT):
        assert path is not None
        ways[OWN], default = points.GENERATE.load(path, upstream_of(config)), OWN
    if config.agents.custom_agent_function_path:
        agents = agents_of(config, policy, limit, port=config.agents.session_server_port)
        agent = points.AGENT.load(config.agents.custom_agent_function_path)
        ways[AGENT], default = AgentGenerate(agent, agents, wall_seconds=config.agents.agent_timeout), AGENT
    reward, group_reward, crew = asked_rewards(config, rewards_of(config), logs)
    return Answering(
        generate=ways[default] if len(ways) == 1 or default == OWN else Chosen(ways, default),
        reward=reward,
        group_reward=group_reward,
        reward_key=r.reward_key,
        render=render,
        agents=agents,
        worlds=worlds,
        crew=crew,
    )


def _worlds(config: Config) -> Worlds:
    # A program is ended a little before its call is given up, so that the sandbox can say why.
    programs = Limits(wall=0.9 * config.tools.tool_call_timeout)
    return worlds_of(config.tools, sandbox=_sandbox(), programs=programs, environ=os.environ)


def _several(config: Config, policy: Policy, limit: int | None, worlds: Worlds) -> MultiTurn:
    template = config.rollout.apply_chat_template_kwargs
    return MultiTurn(
        renderer_for(policy.tokenizer, template=template),
        worlds,
        limits=limits_of(config.tools),
        max_context_len=limit,
        audits=config.agents.session_audit,
    )


def _sandbox() -> Callable[[], Sandbox]:
    """Made when a prompt first runs a program, and then for all."""
    return lru_cache(maxsize=1)(lambda: sandbox_here(unsandboxed=False, concurrency=8))


def agents_of(config: Config, policy: Policy, limit: int | None, *, port: int) -> Agents:
    """Sessions for the policy on a server of its own, with contexts of at most ``limit`` tokens."""
    # The server's libraries are an extra that other runs do without.
    from miles.rollout.session.server.app import SessionServer
    from miles.rollout.session.server.seat import Seats

    a = config.agents
    name = a.session_message_matcher_path
    match = name if name in MATCHES else points.MATCH.load(name)
    pick = points.PICK.load(a.session_sample_picker_path) if a.session_sample_picker_path else None
    renderer = renderer_for(policy.tokenizer, template=config.rollout.apply_chat_template_kwargs)
    server = SessionServer(renderer, policy.tokenizer.decode, max_context_len=limit)
    seats = Seats(server, match=match, max_turns=a.agent_max_turns, pick=pick, audits=a.session_audit)
    return Agents(server, seats, port)
