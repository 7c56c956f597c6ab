"""Generation of responses and rewards: single-turn, multi-turn with tools, agents, multi-agent, or a user function."""

from __future__ import annotations

import asyncio
import os
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from miles.cluster.workers.pool import WorkerPool
from miles.core.errors import UsageError, describe_error
from miles.core.media_store import MediaStore
from miles.core.protocols import (
    Engine,
    Generate,
    GroupRewardFn,
    ImageTokenizer,
    RewardFn,
    SamplingParams,
    Tokenizer,
)
from miles.core.types import Prompt
from miles.hooks import registry
from miles.hooks.compat.types import UpstreamServices
from miles.hooks.offload import offload_function, offload_generate
from miles.hooks.worker import PATIENCE, HookWorker
from miles.launch.build.hooks import load_hook
from miles.launch.build.models import PolicyCheckpoint
from miles.launch.build.policies import Policies
from miles.launch.build.rewards import build_pooled_rewards, build_rewards, name_reward
from miles.launch.config import Config
from miles.launch.policies.config import PolicyConfig, is_trained
from miles.launch.rules.paths import read_key_file
from miles.rollout.config import resolve_context_limit
from miles.rollout.eval_options import lists_tools
from miles.rollout.generate.agent import AgentGenerate, AgentSession, find_abort_hook
from miles.rollout.generate.dispatch import GenerateDispatch
from miles.rollout.generate.multi_turn import MultiTurn, turn_limits_from_config
from miles.rollout.generate.single_turn import SingleTurn
from miles.rollout.group_rollout import InterruptibleEngine
from miles.rollout.multi_agent.agents import AgentRole, MultiAgentFn, offload_multi_agent
from miles.rollout.multi_agent.generate import MultiAgentGenerate
from miles.rollout.prompt_renderer import PromptRenderer
from miles.rollout.sampling import build_eval_sampling, build_training_sampling
from miles.rollout.sandbox.build import build_sandbox, sandbox_limits_from_config
from miles.rollout.sandbox.run import CodeSandbox
from miles.rollout.serving.http import is_loopback
from miles.rollout.session.config import AgentConfig
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

    ``renders_prompts``: every prompt is continued as ``render`` gives it. ``role_engines`` are those that ``generate``
    has for itself where it runs several policies.
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
    role_engines: tuple[InterruptibleEngine, ...] = ()

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
    sandbox = cache(partial(build_sandbox, r))  # one for tools and rewards: --code-concurrency counts both
    render = PromptRenderer(
        policy.tokenizer, chat=r.apply_chat_template, template=r.apply_chat_template_kwargs, tools=lists_tools(r)
    )
    limit = resolve_context_limit(r, policy.spec.max_positions)
    functions: dict[str, Generate] = {
        SINGLE_TURN: SingleTurn(render, policy.tokenizer.text, max_context_len=limit, load_images=render.load_images)
    }
    agents = None
    environments = None
    default = SINGLE_TURN
    name = registry.GENERATE.resolve_name(r.custom_generate_function_path)
    if name == MULTI_TURN:
        environments = build_tool_environments(config, worker, sandbox, get_media(policy.tokenizer))
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
        services = UpstreamServices(rewards=cache(lambda: build_rewards(config)))
        generate = load_hook(config, registry.GENERATE, services=services)
        functions[CUSTOM] = offload_generate(worker, generate, "The generate function")
        default = CUSTOM
    if config.agents.custom_agent_function_path:
        agents, functions[AGENT] = _build_agent(config, policy, limit, worker)
        default = AGENT
    reward, group_reward, workers = build_pooled_rewards(config, logs, worker, sandbox)
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


def _build_agent(
    config: Config, policy: PolicyCheckpoint, limit: int | None, worker: HookWorker
) -> tuple[AgentSessions, AgentGenerate]:
    """The user's agent, and the sessions it uses."""
    key = read_session_key(config)
    sessions = build_agent_sessions(config, policy, limit, key, port=config.agents.session_server_port)
    agent = load_hook(config, registry.AGENT)
    abort = find_abort_hook(agent)
    generate = AgentGenerate(
        offload_function(worker, agent, "The agent"),
        sessions,
        abort=None if abort is None else offload_function(worker, abort, "The agent's abort"),
        wall_seconds=config.agents.agent_timeout,
        max_failures=config.rollout.max_reward_failures,
        api_key=key,
        postprocess=load_hook(config, registry.SAMPLE_POSTPROCESSOR),
        media=get_media(policy.tokenizer),
    )
    _check_agent_key(config, generate)
    return sessions, generate


def build_hook_worker(config: Config, report: Callable[[str], None]) -> HookWorker:
    """The worker of user functions; where planes take turns, in lockstep, so that the run stays reproducible."""
    patience = min(PATIENCE, config.rollout.reward_timeout / 2)
    return HookWorker(lockstep=config.schedule.max_weight_staleness == 0, patience=patience, report=report)


def get_media(tokenizer: Tokenizer) -> MediaStore | None:
    """The store of images of a checkpoint that reads images."""
    return tokenizer.media if isinstance(tokenizer, ImageTokenizer) else None


def build_tool_environments(
    config: Config,
    worker: HookWorker,
    sandbox: Callable[[], CodeSandbox] | None = None,
    media: MediaStore | None = None,
) -> EnvironmentFactory:
    """The environments of multi-turn rollouts; the programs of their tools have the limits of the code options."""
    # A program is stopped a little before its call times out, so that the sandbox can report why.
    limits = sandbox_limits_from_config(config.rollout)
    programs = limits._replace(wall=min(limits.wall, 0.9 * config.tools.tool_call_timeout))
    return build_environments(
        config.tools,
        sandbox=sandbox or partial(build_sandbox, config.rollout),
        code_limits=programs,
        environ=os.environ,
        worker=worker,
        media=media,
    )


# -- agent sessions -------------------------------------------------------------------------


class AgentSessions:
    """A rollout.generate.agent.SessionFactory on a local HTTP server, which the first session starts."""

    def __init__(self, server: SessionServer, sessions: LocalSessions, config: AgentConfig, port: int) -> None:
        self._server = server
        self._sessions = sessions
        self._config = config
        self._tls = load_session_tls(config)
        self._port = port
        self._started = False
        self._lock = asyncio.Lock()

    @asynccontextmanager
    async def open(self, prompt: Prompt, engine: Engine, sampling: SamplingParams) -> AsyncIterator[AgentSession]:
        """A session for one trajectory."""
        async with self._lock:
            if not self._started:
                a = self._config
                await self._server.start(
                    a.session_server_host,
                    self._port,
                    tls=self._tls,
                    advertised_host=a.session_server_advertise_host,
                )
                self._started = True
        async with self._sessions.open(prompt, engine, sampling) as session:
            yield session

    async def close(self) -> None:
        """Wait for turns in progress, then stop the server."""
        if self._started:
            await self._server.drain()
            await self._server.stop()


def build_agent_sessions(
    config: Config, policy: PolicyCheckpoint, limit: int | None, key: str | None, *, port: int
) -> AgentSessions:
    """Sessions for a policy on a server of its own, with contexts of at most ``limit`` tokens."""
    # The server's packages are an optional extra.
    from miles.rollout.session.server.app import SessionServer
    from miles.rollout.session.server.local_client import LocalSessions

    a = config.agents
    name = a.session_message_matcher_path
    match = name if name in MATCHERS else load_hook(config, registry.MESSAGE_MATCHER, upstream=False)
    pick = load_hook(config, registry.SAMPLE_PICKER)
    renderer = build_renderer(policy.tokenizer, template=config.rollout.apply_chat_template_kwargs)
    server = SessionServer(renderer, policy.tokenizer.decode, max_context_len=limit, api_key=key)
    sessions = LocalSessions(server, match=match, max_turns=a.agent_max_turns, pick=pick, audits=a.session_audit)
    return AgentSessions(server, sessions, a, port)


def read_session_key(config: Config) -> str | None:
    """The API key of the session server: that of a file, a new one where other machines reach the server, or None."""
    file, host = config.agents.session_server_api_key_file, config.agents.session_server_host
    if file is not None:
        return read_key_file("--session-server-api-key-file", file)
    return None if is_loopback(host) else secrets.token_urlsafe(32)


def load_session_tls(config: AgentConfig) -> ssl.SSLContext | None:
    """The TLS context of the session server; None without a certificate, UsageError for one that cannot be used."""
    certificate, key = config.session_server_ssl_certfile, config.session_server_ssl_keyfile
    if certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        flags = f"--session-server-ssl-certfile {certificate}" + (f" --session-server-ssl-keyfile {key}" if key else "")
        reason = error.strerror or describe_error(error)
        raise UsageError(f"{flags} cannot be used: {reason}; give PEM files of a certificate and its key.") from error
    return context


def _check_agent_key(config: Config, generate: AgentGenerate) -> None:
    """Refuse an agent that could not know the key that is made for this run."""
    a = config.agents
    if not is_loopback(a.session_server_host) and not a.session_server_api_key_file and not generate.takes_key:
        raise UsageError(
            f"--session-server-ip {a.session_server_host} is reachable from other machines, so the run makes an API "
            f"key, which {a.custom_agent_function_path} does not take: give it a parameter api_key, or give "
            "--session-server-api-key-file."
        )


class LazyAgentSessions:
    """A SessionFactory of one policy whose server is built for the first session."""

    def __init__(self, config: Config, policy: PolicyCheckpoint, limit: int, key: str | None, port: int) -> None:
        self._config = config
        self._key = key
        self._policy = policy
        self._limit = limit
        self._port = port
        self._agents: AgentSessions | None = None

    @asynccontextmanager
    async def open(self, prompt: Prompt, engine: Engine, sampling: SamplingParams) -> AsyncIterator[AgentSession]:
        """A session for one role of one trajectory."""
        if self._agents is None:
            self._agents = build_agent_sessions(self._config, self._policy, self._limit, self._key, port=self._port)
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
        """Multi-agent generation with these engines, scored by the rewards of ``generation``.

        Groups that are trained on can be interrupted.
        """
        interruptible = {} if evaluates else {name: InterruptibleEngine(engine) for name, engine in engines.items()}
        engines = {**engines, **interruptible}
        generate = MultiAgentGenerate(
            offload_multi_agent(generation.hook_worker, self.function),
            [self._build_role(role, engines, evaluates) for role in self.roles],
            reward=generation.reward,
            scored=generation.reward is not None or generation.group_reward is not None,
            wall_seconds=self.config.multi_agent.multi_agent_timeout,
            max_failures=self.config.rollout.max_reward_failures,
        )
        return replace(generation, generate=generate, role_engines=tuple(interruptible.values()))

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
    first_port, key = config.agents.session_server_port, read_session_key(config)
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
                sessions=LazyAgentSessions(policy.config, checkpoint, limit, key, port),
            )
        )
    function = load_hook(config, registry.MULTI_AGENT, upstream=False)
    return MultiAgentGeneration(function=function, roles=tuple(roles), config=config)
