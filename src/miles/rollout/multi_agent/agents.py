"""Agents of a multi-agent rollout: the run's policies by role, each to chat with directly or over HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from miles.core.errors import HookError
from miles.core.protocols import Engine, RewardFn, SamplingParams
from miles.core.types import Prompt, Reward, Status, Trajectory
from miles.hooks.worker import HookWorker
from miles.rollout.generate.agent import AgentSession, SessionFactory, redact_key
from miles.rollout.seeds import derive_turn_seed, hash_context, hash_text, mix
from miles.rollout.serving.errors import SessionError
from miles.rollout.serving.messages import Message, Tool
from miles.rollout.session.render import ChatRenderer
from miles.rollout.session.session import Session, SessionReply, SessionTurn


class EngineAborted(SessionError):
    """An engine was interrupted, and with it the trajectory; user functions should not catch this."""


class MultiAgentFn(Protocol):
    """Runs the agents over a prompt, and returns each role's reward; None leaves rewards to the run's reward function.

    Every trained role that took part needs a reward. An exception fails the trajectory, not the run.
    """

    async def __call__(self, prompt: Prompt, cast: Agents) -> Mapping[str, float | Reward] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentRole:
    """Configuration of a role. ``policy`` names whose weights generate; ``trained`` whether they are trained on it."""

    name: str
    policy: str
    trained: bool
    engine: Engine
    renderer: ChatRenderer
    sampling: SamplingParams
    sessions: SessionFactory
    max_context_len: int | None = None


class Agent:
    """One role in one trajectory. It owns the tokens of its conversations; other roles' replies are context."""

    def __init__(self, role: AgentRole, prompt: Prompt, seed: int, exit_stack: AsyncExitStack) -> None:
        self.name = role.name
        self._role = role
        self._prompt = prompt
        self._exit_stack = exit_stack
        self._sampling = replace(role.sampling, seed=mix(seed, hash_text(role.name)) >> 1)
        self._session = Session(
            f"{prompt.id}-{prompt.epoch}-{self._sampling.seed:x}",
            role.renderer,
            prompt=prompt,
            max_context_len=role.max_context_len,
        )
        self._context_counts: Counter[int] = Counter()
        self._http_session: AgentSession | None = None

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        **template: Any,
    ) -> SessionReply:
        """Generate the role's reply. Messages it was sent before, and its replies, keep their tokens (see
        session.Session).

        A reply has at most ``max_tokens``, and never more than the run allows. ContextLengthError is raised where no
        token would fit, SessionError where the history continues after a truncated reply.
        """
        turn = self._session.begin(await self._session.prepare(messages), tools, **template)
        try:
            sampling = self._reply_sampling(turn, max_tokens, stop)
            completion = await self._role.engine.generate(turn.tokens, sampling, turn.images)
        except BaseException:
            self._session.abandon(turn)
            raise
        reply = self._session.end(turn, completion, stop=(*self._sampling.stop, *stop))
        if completion.finish_reason == "abort":
            raise EngineAborted(f"Session {self._session.id}: the engine was interrupted, which ends the trajectory.")
        return reply

    async def base_url(self) -> str:
        """The role's base URL for programs that use HTTP, as agents get it (see generate.agent)."""
        if self._http_session is None:
            session = self._role.sessions.open(self._prompt, self._role.engine, self._sampling)
            self._http_session = await self._exit_stack.enter_async_context(session)
        return self._http_session.base_url

    def redact(self, text: str) -> str:
        """``text`` without the secret of the role's base URL."""
        return text if self._http_session is None else redact_key(text, self._http_session)

    def trajectories(self) -> list[Trajectory]:
        """Its conversations so far, one trajectory each; none where it has generated nothing."""
        http_sessions = () if self._http_session is None else (self._http_session.trajectory(status=Status.COMPLETED),)
        conversations = [t for t in http_sessions if t.metadata["turns"]]
        if self._session.tree.leaves():
            conversations.insert(0, self._session.trajectory(status=Status.COMPLETED))
        return conversations

    def _reply_sampling(self, turn: SessionTurn, max_tokens: int | None, stop: Sequence[str]) -> SamplingParams:
        context = hash_context(turn.tokens)
        previous, self._context_counts[context] = self._context_counts[context], self._context_counts[context] + 1
        budgets = (n for n in (self._sampling.max_new_tokens, max_tokens, turn.max_new_tokens) if n is not None)
        return replace(
            self._sampling,
            max_new_tokens=min(budgets),
            stop=(*self._sampling.stop, *stop),
            seed=derive_turn_seed(self._sampling.seed, context, previous),
        )


class MainLoopAgent(Agent):
    """An agent for a function in a worker's thread: it replies on the run's loop."""

    def __init__(self, worker: HookWorker, inner: Agent) -> None:
        self.name = inner.name
        self._worker = worker
        self._inner = inner

    async def chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        **template: Any,
    ) -> SessionReply:
        reply = partial(self._inner.chat, messages, tools, max_tokens=max_tokens, stop=stop, **template)
        return await self._worker.run_on_main_loop(reply)

    async def base_url(self) -> str:
        return await self._worker.run_on_main_loop(self._inner.base_url)

    def trajectories(self) -> list[Trajectory]:
        return self._inner.trajectories()


class Agents(Mapping[str, Agent]):
    """The agents of one trajectory by role name. ``seed`` is the trajectory's, for reproducible randomness."""

    def __init__(self, agents: Mapping[str, Agent], prompt: Prompt, seed: int, reward: RewardFn | None) -> None:
        self._agents = agents
        self._prompt = prompt
        self._reward = reward
        self.seed = seed

    async def score(self, role: str) -> Reward:
        """Score the role's last conversation with the run's reward, as if it had answered the prompt alone."""
        if self._reward is None:
            raise HookError("The multi-agent function asks for the run's reward and there is none; set --rm-type.")
        if not (conversations := self[role].trajectories()):
            raise HookError(
                f"The multi-agent function asks for the reward of {role} before it generated anything; call chat first."
            )
        return await self._reward(self._prompt, conversations[-1])

    def over(self, worker: HookWorker) -> Agents:
        """The same agents for a function in the ``worker``'s thread: their work is done on the run's loop."""
        reward = self._reward

        async def score(prompt: Prompt, trajectory: Trajectory) -> Reward:
            assert reward is not None
            return await worker.run_on_main_loop(partial(reward, prompt, trajectory))

        agents = {name: MainLoopAgent(worker, agent) for name, agent in self._agents.items()}
        return Agents(agents, self._prompt, self.seed, None if reward is None else score)

    def __getitem__(self, role: str) -> Agent:
        return self._agents[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._agents)

    def __len__(self) -> int:
        return len(self._agents)


def offload_multi_agent(worker: HookWorker, function: MultiAgentFn) -> MultiAgentFn:
    """The function in the ``worker``'s thread."""

    async def call(prompt: Prompt, cast: Agents) -> Mapping[str, float | Reward] | None:
        return await worker.run(partial(function, prompt, cast.over(worker)), "The multi-agent function")

    return call


def build_agents(
    roles: Sequence[AgentRole], prompt: Prompt, seed: int, exit_stack: AsyncExitStack, reward: RewardFn | None = None
) -> Agents:
    """Create the agents of one trajectory; ``exit_stack`` closes what they open."""
    agents = {role.name: Agent(role, prompt, seed, exit_stack) for role in roles}
    return Agents(agents, prompt, mix(seed, len(roles)) >> 1, reward)
