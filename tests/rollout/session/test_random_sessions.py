"""Random agents on an engine that samples at random under changing weights: what trains is what was sampled, once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.rollout.session.cases import CASES
from tests.rollout.session.test_families import WEATHER, user
from tests.tiers import examples

from miles.algo.advantages import build_samples
from miles.core.protocols import Completion
from miles.core.types import Author, Span, Status, Version
from miles.models.tokenizer import HfTokenizer
from miles.rollout.serving.errors import SessionError
from miles.rollout.session.audit import audit_session
from miles.rollout.session.match import MATCHERS
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.session.session import Session, SessionTurn

Of = Callable[[str], HfTokenizer]
pytestmark = pytest.mark.filterwarnings("ignore:The chat template does not tell")
Sampled = tuple[int, float, int]
"""A token, its log-prob (a number of its own, so that it tells which one it is) and its version."""


class Dice:
    """An engine that writes whatever falls, and publishes new weights in the middle of it."""

    def __init__(self, random: Random, tokenizer: HfTokenizer, call: str, end: str) -> None:
        self._random, self._tokenizer = random, tokenizer
        self._call, self._end = call, tokenizer.encode(end)
        self.version = 0
        self.drawn = 0
        self.sampled: list[Sampled] = []

    def write(self) -> Completion:
        reason = self._random.choice(("stop", "stop", "stop", "stop", "length", "abort"))
        ids = [self._random.randrange(len(self._tokenizer)) for _ in range(self._random.randrange(6))]
        if self._random.random() < 0.4:
            ids += self._tokenizer.encode(self._call)
        if reason == "stop" and self._random.random() < 0.7:
            ids += self._end
        spans: list[Span] = []
        while ids:
            size = self._random.randrange(1, len(ids) + 1)
            spans.append(self._span(ids[:size]))
            ids = ids[size:]
            self.version += self._random.random() < 0.5
        status = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}[reason]
        return Completion(spans=tuple(spans), status=status, finish_reason=reason)

    def _span(self, ids: list[int]) -> Span:
        logprobs = -np.arange(self.drawn, self.drawn + len(ids), dtype=np.float32)
        self.drawn += len(ids)
        version = Version(number=self.version)
        self.sampled += zip(ids, logprobs.tolist(), [self.version] * len(ids), strict=True)
        routed = np.array(ids, np.int32)[:, None]
        return Span(
            author=Author.POLICY,
            tokens=np.array(ids, np.int32),
            logprobs=logprobs,
            version=version,
            extras={"routed_experts": routed},
        )


@dataclass
class Agent:
    """Plays a script: remembers every conversation it has had, and goes on with any of them in any way."""

    session: Session
    engine: Dice
    random: Random
    tools: bool
    talks: list[list[Any]] = field(default_factory=list)
    asked: list[tuple[SessionTurn, list[Any]]] = field(default_factory=list)
    refused: int = 0

    def step(self, act: str) -> None:
        {
            "open": self.open,
            "append": self.append,
            "retry": self.retry,
            "edit": self.edit,
            "answer": self.answer,
            "abandon": self.abandon,
        }[act]()

    def ask(self, messages: list[Any]) -> None:
        try:
            self.asked.append((self.session.begin(messages, [WEATHER] if self.tools else ()), messages))
        except SessionError as error:
            assert "cannot be extended" in str(error)
            self.refused += 1

    def open(self) -> None:
        self.ask([user(f"{self.random.randrange(3)}?")])

    def append(self) -> None:
        if self.talks:
            talk = self.random.choice(self.talks)
            self.ask([*talk, *self._behind(talk[-1])])

    def retry(self) -> None:
        if self.talks:
            self.ask(self.random.choice(self.talks)[:-1])

    def edit(self) -> None:
        if self.talks:
            talk = list(self.random.choice(self.talks))
            at = self.random.randrange(len(talk))
            talk[at] = dict(talk[at]) | {"content": "edited"}
            self.ask(talk if talk[-1]["role"] != "assistant" else [*talk, *self._behind(talk[-1])])

    def answer(self) -> None:
        if self.asked:
            turn, messages = self.asked.pop(self.random.randrange(len(self.asked)))
            reply = self.session.end(turn, self.engine.write())
            echo = json.loads(json.dumps(reply.message))
            self.talks.append([*messages, echo])

    def abandon(self) -> None:
        if self.asked:
            self.session.abandon(self.asked.pop(self.random.randrange(len(self.asked)))[0])

    def _behind(self, message: dict[str, Any]) -> list[Any]:
        calls = message.get("tool_calls") or ()
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "fine"} for call in calls]
        return results or [user(f"and {self.random.randrange(3)}?")]


ACTS = st.sampled_from(["open", "append", "append", "append", "retry", "edit", "answer", "answer", "answer", "abandon"])


@pytest.mark.parametrize("name", sorted(CASES))
@settings(
    max_examples=examples(25),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    acts=st.lists(ACTS, min_size=8, max_size=40),
    seed=st.integers(0, 2**32),
    match=st.sampled_from(sorted(MATCHERS)),
)
def test_what_trains_is_exactly_what_was_sampled_once_each(
    name: str, acts: list[str], seed: int, match: str, tokenizer_of: Of
) -> None:
    tokenizer, case, random = tokenizer_of(name), CASES[name], Random(seed)
    call = case.said("", "", [case.call("weather", {"city": "Bonn"}, 0)])
    engine = Dice(random, tokenizer, call, case.end)
    session = Session("s", build_renderer(tokenizer), match=MATCHERS[match])
    agent = Agent(session=session, engine=engine, random=random, tools=case.tools)
    for act in ["open", *acts]:
        agent.step(act)
    trajectory = session.trajectory(status=Status.COMPLETED)

    spans = [span for span in trajectory.spans if span.author is Author.POLICY]
    trained: list[Sampled] = [
        (int(token), float(logprob), span.version.number)
        for span in spans
        if span.version is not None and span.logprobs is not None
        for token, logprob in zip(span.tokens, span.logprobs, strict=True)
    ]
    assert sorted(trained) == sorted(engine.sampled)
    assert all(span.extras["routed_experts"][:, 0].tolist() == span.tokens.tolist() for span in spans)
    rows = build_samples(0, trajectory, advantage=1.0, trained_author=Author.POLICY)
    assert sum(int(row.mask.sum()) for row in rows) == len(engine.sampled)
    assert {row.samples_per_trajectory for row in rows} == {len(rows)}
    check_contexts(session, tokenizer)
    audit_session(session)


def check_contexts(session: Session, tokenizer: HfTokenizer) -> None:
    """Every reply was drawn behind exactly the tokens its branch has before it, which begin as those before did."""
    for path in session.tree.leaves():
        tokens = path.tokens.tolist()
        for node in path.nodes:
            upto = session.tree.get_conversation(node.number).tokens.tolist()
            assert tokens[: len(upto)] == upto
    assert session.num_pending >= 0
