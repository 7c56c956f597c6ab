"""The policies of a run as a user's function meets them: by name, each to be spoken to directly or over HTTP."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Protocol

from miles.core.errors import PlugError
from miles.core.protocols import Engine, RewardFn, Sampling
from miles.core.types import Prompt, Reward, Status, Trajectory
from miles.rollout.generate.agent import Seat, Sessions
from miles.rollout.seeds import mix, text_number
from miles.rollout.session.message import Message, SessionError, Tool
from miles.rollout.session.render import Renderer
from miles.rollout.session.server.drawing import context_of, seed_of
from miles.rollout.session.session import Reply, Session, Turn


class Aborted(SessionError):
    """An engine was told to stop, and with it the attempt; nothing for a function to catch."""


class Play(Protocol):
    """Has the policies meet over a prompt, and gives what each role earned; None leaves that to the run's reward.

    Every role that spoke and is trained needs a reward. What it raises costs the attempt, not the run.
    """

    async def __call__(self, prompt: Prompt, cast: Cast) -> Mapping[str, float | Reward] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Role:
    """What a role is played with. ``policy`` names whose weights answer; ``trained`` whether they learn from it."""

    name: str
    policy: str
    trained: bool
    engine: Engine
    renderer: Renderer
    sampling: Sampling
    sessions: Sessions
    max_context_len: int | None = None


class Player:
    """One role in one attempt. It owns the tokens of its conversations; what others said is context to it."""

    def __init__(self, role: Role, prompt: Prompt, seed: int, until: AsyncExitStack) -> None:
        self.name = role.name
        self._role, self._prompt, self._until = role, prompt, until
        self._sampling = replace(role.sampling, seed=mix(seed, text_number(role.name)) >> 1)
        self._session = Session(
            f"{prompt.id}-{prompt.epoch}-{self._sampling.seed:x}",
            role.renderer,
            prompt=prompt,
            max_context_len=role.max_context_len,
        )
        self._asked: Counter[int] = Counter()
        self._seat: Seat | None = None

    async def say(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        **template: Any,
    ) -> Reply:
        """What the role answers. Messages it was sent before, and its replies, keep their tokens (see session.Session).

        A reply has at most ``max_tokens``, and never more than the run allows. ContextFull is raised where no token
        would fit, SessionError where a reply that was cut off is to be gone on behind.
        """
        turn = self._session.begin(messages, tools, **template)
        try:
            completion = await self._role.engine.generate(turn.tokens, self._drawn(turn, max_tokens, stop))
        except BaseException:
            self._session.abandon(turn)
            raise
        reply = self._session.end(turn, completion, stop=(*self._sampling.stop, *stop))
        if completion.reason == "abort":
            raise Aborted(f"Session {self._session.id}: the engine was told to stop, and the attempt ends with it.")
        return reply

    async def base_url(self) -> str:
        """The role's address for programs that speak HTTP, as an agent is given it (see generate.agent)."""
        if self._seat is None:
            opened = self._role.sessions.open(self._prompt, self._role.engine, self._sampling)
            self._seat = await self._until.enter_async_context(opened)
        return self._seat.base_url

    def parts(self) -> list[Trajectory]:
        """Its conversations so far, as trajectories of their own; none where it has said nothing."""
        seats = () if self._seat is None else (self._seat.trajectory(status=Status.COMPLETED),)
        said = [t for t in seats if t.metadata["turns"]]
        if self._session.tree.leaves():
            said.insert(0, self._session.trajectory(status=Status.COMPLETED))
        return said

    def _drawn(self, turn: Turn, max_tokens: int | None, stop: Sequence[str]) -> Sampling:
        context = context_of(turn.tokens)
        before, self._asked[context] = self._asked[context], self._asked[context] + 1
        most = (n for n in (self._sampling.max_new_tokens, max_tokens, turn.room) if n is not None)
        return replace(
            self._sampling,
            max_new_tokens=min(most),
            stop=(*self._sampling.stop, *stop),
            seed=seed_of(self._sampling.seed, context, before),
        )


class Cast(Mapping[str, Player]):
    """The players of one attempt by the names of their roles. ``seed`` is the attempt's, for chance that repeats."""

    def __init__(self, players: Mapping[str, Player], prompt: Prompt, seed: int, reward: RewardFn | None) -> None:
        self._players, self._prompt, self._reward = players, prompt, reward
        self.seed = seed

    async def score(self, role: str) -> Reward:
        """What the run's own reward says of the role's last conversation, as if it had answered the prompt alone."""
        if self._reward is None:
            raise PlugError("The cast function asks for the run's reward and there is none; choose one with --rm-type.")
        if not (said := self[role].parts()):
            raise PlugError(
                f"The cast function asks what {role} earned before it said anything; have it say something."
            )
        return await self._reward(self._prompt, said[-1])

    def __getitem__(self, role: str) -> Player:
        return self._players[role]

    def __iter__(self) -> Iterator[str]:
        return iter(self._players)

    def __len__(self) -> int:
        return len(self._players)


def cast_of(
    roles: Sequence[Role], prompt: Prompt, seed: int, until: AsyncExitStack, reward: RewardFn | None = None
) -> Cast:
    """Everyone for one attempt; what they open is closed with ``until``."""
    players = {role.name: Player(role, prompt, seed, until) for role in roles}
    return Cast(players, prompt, mix(seed, len(roles)) >> 1, reward)
