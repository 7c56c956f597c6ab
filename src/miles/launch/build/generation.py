"""Generation of responses and rewards: single-turn, multi-turn with tools, agents, multi-agent, or a user function."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from miles.cluster.workers.pool import WorkerPool
from miles.core.protocols import Engine, Generate, GroupRewardFn, RewardFn, SamplingParams
from miles.core.types import Prompt
from miles.hooks import registry
from miles.hooks.offload import offload_function, offload_generate
from miles.hooks.worker import PATIENCE, HookWorker
from miles.launch.build.hooks import load_hook
from miles.launch.build.models import PolicyCheckpoint
from miles.launch.build.policies import Policies
from miles.launch.build.rewards import build_pooled_rewards, name_reward
from miles.launch.config import Config
from miles.launch.policies.config import PolicyConfig, is_trained
from miles.launch.rules.paths import read_key_file
from miles.rollout.eval_options import lists_tools
from miles.rollout.generate.agent import AgentGenerate, AgentSession
from miles.rollout.generate.dispatch import GenerateDispatch
from miles.rollout.generate.multi_turn import MultiTurn, turn_limits_from_config
from miles.rollout.generate.single_turn import SingleTurn
from miles.rollout.multi_agent.agents import AgentRole, MultiAgentFn, offload_multi_agent
from miles.rollout.multi_agent.generate import MultiAgentGenerate
from miles.rollout.prompt_renderer import PromptRenderer
from miles.rollout.sampling import build_eval_sampling, build_training_sampling, resolve_context_limit
from miles.rollout.sandbox.build import build_sandbox, sandbox_limits_from_config
from miles.rollout.session.match import MATCHERS
from miles.rollout.session.render import ChatRenderer
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.tools.build import build_environments
from miles.rollout.tools.env_registry import EnvironmentFactory

if TYPE_CHECKING:
    from miles.rollout.session.server.app import SessionServer
    from miles.rollout.session.server.local_client import LocalSessions

SINGLE_TURN = "single_turn"
MULTI_TURN = "multi_turn"
AGENT = "agent"
CUSTOM = "custom"


def _ignore(text: str) -> None:
    """A report that nobody reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What training and evaluation need to generate and score responses.

    ``renders_prompts``: every prompt is continued as ``render`` gives it.
    """

    generate: Generate
    reward: RewardFn | None
    group_reward: GroupRewardFn | None
    reward_key: str | None
    reward_name: str
    render: PromptRenderer
    max_context_len: int | None = None
    renders_prompts: bool = False
    agents: AgentSessions | None = None
    environments: EnvironmentFactory | None = None
    workers: WorkerPool | None = None
    hook_worker: HookWorker = field(default_factory=HookWorker)

    async def close(self) -> None:
        """Stop what was started for it."""
        if self.agents is not None:
            await self.agents.close()
        if self.environments is not None:
            await self.environments.close()
        if self.workers is not None:
            await self.workers.close()
        self.hook_worker.close()


def build_generation(
    config: Config, policy: PolicyCheckpoint, *, logs: Path | None = None, report: Callable[[str], None] = _ignore
) -> Generation:
    """The generate and reward functions that the config names; user functions are checked here.

    Reward workers log to ``logs``, where there is such a folder; ``report`` is called with notes for the user.
    """
    r = config.rollout
    worker = build_hook_worker(config, report)
    render = PromptRenderer(
        policy.tokenizer, chat=r.apply_chat_template, template=r.apply_chat_template_kwargs, tools=lists_tools(r)
    )
    limit = resolve_context_limit(r, policy.spec.max_positions)
    functions: dict[str, Generate] = {SINGLE_TURN: SingleTurn(render, policy.tokenizer.text, max_context_len=limit)}
    agents = None
    environments = None
    default = SINGLE_TURN
    name = registry.GENERATE.resolve_name(r.custom_generate_function_path)
    if name == MULTI_TURN:
        environments = build_tool_environments(config, worker)
        functions[MULTI_TURN] = MultiTurn(
            build_renderer(policy.tokenizer, template=r.apply_chat_template_kwargs),
            environments,
            limits=turn_limits_from_config(config.tools),
            max_context_len=limit,
            max_failures=r.max_reward_failures,
            audit=config.agents.session_audit,
        )
        default = MULTI_TURN
    elif name not in (None, SINGLE_TURN, AGENT):
        functions[CUSTOM] = offload_generate(worker, load_hook(config, registry.GENERATE), "The generate function")
        default = CUSTOM
    if config.agents.custom_agent_function_path:
        agents = build_agent_sessions(config, policy, limit, port=config.agents.session_server_port)
        agent = offload_function(worker, load_hook(config, registry.AGENT, upstream=False), "The agent")
        functions[AGENT] = AgentGenerate(
            agent,
            agents,
            wall_seconds=config.agents.agent_timeout,
            max_failures=r.max_reward_failures,
            api_key=read_session_key(config),
        )
        default = AGENT
    reward, group_reward, workers = build_pooled_rewards(config, logs, worker)
    single = len(functions) == 1 or default == CUSTOM
    return Generation(
        generate=functions[default] if single else GenerateDispatch(functions, default),
        reward=reward,
        group_reward=group_reward,
        reward_key=r.reward_key,
        reward_name=name_reward(config),
        render=render,
        max_context_len=limit,
        renders_prompts=default == SINGLE_TURN,
        agents=agents,
        environments=environments,
        workers=workers,
        hook_worker=worker,
    )


def build_hook_worker(config: Config, report: Callable[[str], None]) -> HookWorker:
    """The worker of user functions; where planes take turns, in lockstep, so that the run stays reproducible."""
    patience = min(PATIENCE, config.rollout.reward_timeout / 2)
    return HookWorker(lockstep=config.schedule.max_weight_staleness == 0, patience=patience, report=report)


def build_tool_environments(config: Config, worker: HookWorker) -> EnvironmentFactory:
    """The environments of multi-turn rollouts; the programs of their tools have the limits of the code options."""
    # A program is stopped a little before its call times out, so that the sandbox can report why.
    limits = sandbox_limits_from_config(config.rollout)
    programs = limits._replace(wall=min(limits.wall, 0.9 * config.tools.tool_call_timeout))
    return build_environments(
        config.tools,
        sandbox=lambda: build_sandbox(config.rollout),
        code_limits=programs,
        environ=os.environ,
        worker=worker,
    )


# -- agent sessions -------------------------------------------------------------------------


class AgentSessions:
    """A rollout.generate.agent.SessionFactory on a local HTTP server, which the first session starts."""

    def __init__(self, server: SessionServer, sessions: LocalSessions, host: str, port: int) -> None:
        self._server = server
        self._sessions = sessions
        self._host = host
        self._port = port
        self._started = False
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def open(self, prompt: Prompt, engine: Engine, sampling: SamplingParams) -> AsyncIterator[AgentSession]:
        """A session for one trajectory."""
        async with self._lock:
            if not self._started:
                await self._server.start(self._host, self._port)
                self._started = True
        async with self._sessions.open(prompt, engine, sampling) as session:
            yield session

    async def close(self) -> None:
        """Wait for turns in progress, then stop the server."""
        if self._started:
            await self._server.drain()
            await self._server.stop()


def build_agent_sessions(config: Config, policy: PolicyCheckpoint, limit: int | None, *, port: int) -> AgentSessions:
    """Sessions for a policy on a server of its own, with contexts of at most ``limit`` tokens."""
    # The server's packages are an optional extra.
    from miles.rollout.session.server.app import SessionServer
    from miles.rollout.session.server.local_client import LocalSessions

    a = config.agents
    name = a.session_message_matcher_path
    match = name if name in MATCHERS else load_hook(config, registry.MESSAGE_MATCHER, upstream=False)
    pick = load_hook(config, registry.SAMPLE_PICKER, upstream=False)
    renderer = build_renderer(policy.tokenizer, template=config.rollout.apply_chat_template_kwargs)
    key = read_session_key(config)
    server = SessionServer(renderer, policy.tokenizer.decode, max_context_len=limit, api_key=key)
    sessions = LocalSessions(server, match=match, max_turns=a.agent_max_turns, pick=pick, audits=a.session_audit)
    return AgentSessions(server, sessions, a.session_server_host, port)


def read_session_key(config: Config) -> str | None:
    """The API key of the session server; None where agents send none."""
    file = config.agents.session_server_api_key_file
    return None if file is None else read_key_file("--session-server-api-key-file", file)


class LazyAgentSessions:
    """A SessionFactory of one policy whose server is built for the first session."""

    def __init__(self, config: Config, policy: PolicyCheckpoint, limit: int, port: int) -> None:
        self._config = config
        self._policy = policy
        self._limit = limit
        self._port = port
        self._agents: AgentSessions | None = None

    @asynccontextmanager
    async def open(self, prompt: Prompt, engine: Engine, sampling: SamplingParams) -> AsyncIterator[AgentSession]:
        """A session for one role of one trajectory."""
        if self._agents is None:
            self._agents = build_agent_sessions(self._config, self._policy, self._limit, port=self._port)
        async with self._agents.open(prompt, engine, sampling) as session:
            yield session

    async def close(self) -> None:
        if self._agents is not None:
            await self._agents.close()


# -- multi-agent ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _RoleSetup:
    """A role before there is an engine."""

    policy: PolicyConfig
    trained: bool
    renderer: ChatRenderer
    limit: int
    sessions: LazyAgentSessions


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiAgentGeneration:
    """The user's multi-agent function and the setup of each role, checked before anything is loaded."""

    function: MultiAgentFn
    roles: tuple[_RoleSetup, ...]
    config: Config = field(repr=False)

    def with_engines(
        self, generation: Generation, engines: Mapping[str, Engine], *, evaluates: bool = False
    ) -> Generation:
        """Multi-agent generation with these engines, scored by the rewards of ``generation``."""
        generate = MultiAgentGenerate(
            offload_multi_agent(generation.hook_worker, self.function),
            [self._build_role(role, engines, evaluates) for role in self.roles],
            reward=generation.reward,
            scored=generation.reward is not None or generation.group_reward is not None,
            wall_seconds=self.config.multi_agent.multi_agent_timeout,
            max_failures=self.config.rollout.max_reward_failures,
        )
        return replace(generation, generate=generate)

    async def close(self) -> None:
        """Stop the servers that were started."""
        for role in self.roles:
            await role.sessions.close()

    def _build_role(self, role: _RoleSetup, engines: Mapping[str, Engine], evaluates: bool) -> AgentRole:
        rollout = role.policy.config.rollout
        return AgentRole(
            name=role.policy.name,
            policy=role.policy.weights,
            trained=role.trained,
            engine=engines[role.policy.weights],
            renderer=role.renderer,
            sampling=build_eval_sampling(rollout) if evaluates else build_training_sampling(rollout),
            sessions=role.sessions,
            max_context_len=role.limit,
        )


def build_multi_agent(config: Config, policies: Policies) -> MultiAgentGeneration | None:
    """The multi-agent setup of a run; None where one policy generates by itself."""
    if config.multi_agent.custom_cast_function_path is None:
        return None
    first_port = config.agents.session_server_port
    roles: list[_RoleSetup] = []
    for index, policy in enumerate(policies.all):
        checkpoint, rollout = policies.get_owner(policy).checkpoint, policy.config.rollout
        limit = resolve_context_limit(rollout, checkpoint.spec.max_positions)
        port = first_port + index if first_port else 0
        roles.append(
            _RoleSetup(
                policy=policy,
                trained=is_trained(policy, policies.all),
                renderer=build_renderer(checkpoint.tokenizer, template=rollout.apply_chat_template_kwargs),
                limit=limit,
                sessions=LazyAgentSessions(policy.config, checkpoint, limit, port),
            )
        )
    function = load_hook(config, registry.MULTI_AGENT, upstream=False)
    return MultiAgentGeneration(function=function, roles=tuple(roles), config=config)
