"""A user's agent function: how it is called, how it may fail, and what becomes of its attempt."""

import asyncio
import sys
from contextlib import asynccontextmanager
from dataclasses import replace
from types import ModuleType

import pytest
from tests.rollout.generate.scripted_engine import Scripted, chat_tokenizer

from miles.core.errors import DataError, HookError
from miles.core.protocols import SamplingParams
from miles.core.types import Author, Prompt, Status
from miles.rollout.generate.agent import AgentGenerate, build_request_kwargs, find_abort_hook
from miles.rollout.session.renderer_detect import build_renderer
from miles.rollout.session.session import Session

PROMPT = Prompt(id=2, messages=({"role": "user", "content": "Hello?"},), label="hi", metadata={"task": "greet"})
SAMPLING = SamplingParams(max_new_tokens=50, temperature=0.5)


class Slots:
    """Sessions without HTTP: an agent asks by the address it was given, through ``ask``."""

    def __init__(self, renderer):
        self._renderer = renderer
        self._open = {}
        self.closed = []

    @asynccontextmanager
    async def open(self, prompt, engine, sampling):
        number = len(self._open) + 1
        session = Session(str(number), self._renderer, prompt=prompt)
        session.base_url = f"http://here/sessions/{number}"
        self._open[session.base_url] = session, engine, sampling
        try:
            yield session
        finally:
            self.closed.append(session.base_url)

    async def ask(self, base_url, messages):
        session, engine, sampling = self._open[base_url]
        turn = session.begin(messages)
        return session.end(turn, await engine.generate(turn.tokens, sampling)).message


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def slots(tokenizer):
    return Slots(build_renderer(tokenizer))


def run(agent, slots, engine, **more):
    return asyncio.run(AgentGenerate(agent, slots, **more)(PROMPT, engine, SAMPLING))


def test_an_agent_is_called_by_name_and_its_tokens_are_what_was_sampled(tokenizer, slots):
    seen = {}

    async def agent(base_url, prompt, request_kwargs=None, metadata=None, **more):
        seen.update(prompt=prompt, request_kwargs=request_kwargs, metadata=metadata, **more)
        said = await slots.ask(base_url, prompt)
        await slots.ask(base_url, [*prompt, said, {"role": "user", "content": "And?"}])
        return {"reward": 0.5, "note": "fine"}

    engine = Scripted(tokenizer, ["Hi.", "Bye."])
    trajectory = run(agent, slots, engine, config={"steps": 3}, api_key="secret")
    assert trajectory.status is Status.COMPLETED and trajectory.reward is not None and trajectory.reward.value == 0.5
    assert trajectory.metadata["note"] == "fine" and trajectory.metadata["text"] == "Bye."
    sampled = [token for span in trajectory.spans if span.author is Author.POLICY for token in span.tokens.tolist()]
    assert sampled == [*engine.gave[0], *engine.gave[1]]
    assert seen["prompt"] == [{"role": "user", "content": "Hello?"}] and seen["metadata"] == {"task": "greet"}
    assert seen["request_kwargs"] == {"temperature": 0.5, "top_p": 1.0, "max_tokens": 50}
    assert (seen["label"], seen["agent_config"], seen["session_id"]) == ("hi", {"steps": 3}, "1")
    assert seen["api_key"] == "secret"
    assert slots.closed == ["http://here/sessions/1"]


def test_an_agent_is_given_only_what_it_takes(tokenizer, slots):
    async def agent(base_url, prompt, request_kwargs, metadata):
        await slots.ask(base_url, prompt)

    trajectory = run(agent, slots, Scripted(tokenizer, ["Hi."]))
    assert trajectory.status is Status.COMPLETED and trajectory.reward is None


def test_an_agent_that_raises_or_asks_nothing_fails_its_attempt_and_then_the_run(tokenizer, slots):
    async def silent(base_url, prompt, request_kwargs, metadata):
        return {"reward": 1.0}

    async def raising(base_url, prompt, request_kwargs, metadata):
        await slots.ask(base_url, prompt)
        raise KeyError("tool")

    trajectory = run(silent, slots, Scripted(tokenizer, ["Hi."]))
    assert (trajectory.status, trajectory.reward) == (Status.FAILED, None)
    assert "sent no request" in trajectory.metadata["failure"]
    trajectory = run(raising, slots, Scripted(tokenizer, ["Hi."]))
    assert trajectory.status is Status.FAILED and trajectory.metadata["failure"] == "KeyError: 'tool'"
    generate = AgentGenerate(raising, slots, max_failures=2)

    async def both():
        await generate(PROMPT, Scripted(tokenizer, ["Hi."]), SAMPLING)
        await generate(PROMPT, Scripted(tokenizer, ["Hi."]), SAMPLING)

    with pytest.raises(HookError, match="The agent failed in 2 trajectories in a row"):
        asyncio.run(both())


def test_errors_meant_for_the_user_and_answers_of_the_wrong_kind_stop_the_run(tokenizer, slots):
    async def complaining(base_url, prompt, request_kwargs, metadata):
        raise DataError("no such task")

    async def wrong(base_url, prompt, request_kwargs, metadata):
        await slots.ask(base_url, prompt)
        return 1.0

    async def worded(base_url, prompt, request_kwargs, metadata):
        await slots.ask(base_url, prompt)
        return {"reward": "good"}

    for agent, error in ((complaining, DataError), (wrong, HookError), (worded, HookError)):
        with pytest.raises(error):
            run(agent, slots, Scripted(tokenizer, ["Hi."]))
    assert len(slots.closed) == 3


def test_an_agent_that_takes_too_long_is_cut_short_and_told_to_stop(tokenizer, slots):
    reported = []

    async def slow(base_url, prompt, request_kwargs, metadata):
        await slots.ask(base_url, prompt)
        await asyncio.Event().wait()

    async def abort(base_url, metadata):
        reported.append((base_url, metadata))
        raise OSError("nobody there")

    trajectory = run(slow, slots, Scripted(tokenizer, ["Hi."]), abort=abort, wall_seconds=0.05)
    assert (trajectory.status, trajectory.metadata["reason"]) == (Status.TRUNCATED, "wall_time")
    assert reported == [("http://here/sessions/1", {"task": "greet"})]

    async def cancelled():
        engine = Scripted(tokenizer, ["Hi."])
        task = asyncio.create_task(AgentGenerate(slow, slots, abort=abort)(PROMPT, engine, SAMPLING))
        while not engine.gave:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    assert asyncio.run(cancelled()) and len(reported) == 2 and len(slots.closed) == 2


@pytest.mark.parametrize(("how", "status"), [("length", Status.TRUNCATED), ("abort", Status.ABORTED)])
def test_how_the_last_reply_ended_is_how_the_attempt_did(tokenizer, slots, how, status):
    async def agent(base_url, prompt, request_kwargs, metadata):
        await slots.ask(base_url, prompt)
        if how == "abort":
            raise ConnectionError("the server said 503")
        return {"reward": 1.0}

    engine = Scripted(tokenizer, ["x" * 100])
    engine.aborts = how == "abort"
    trajectory = run(agent, slots, engine)
    assert (trajectory.status, trajectory.metadata["reason"]) == (status, how)
    assert (trajectory.reward is None) == (how == "abort")


def test_the_abort_beside_an_agent_is_found(monkeypatch):
    module = ModuleType("some_agent")
    exec("async def agent(base_url, prompt, request_kwargs, metadata): ...", module.__dict__)
    monkeypatch.setitem(sys.modules, "some_agent", module)
    assert find_abort_hook(module.agent) is None
    exec("async def abort(base_url, metadata): ...", module.__dict__)
    assert find_abort_hook(module.agent) is module.abort


def test_stops_are_told_to_agents_where_there_are_any():
    assert build_request_kwargs(replace(SAMPLING, stop=("END",)))["stop"] == ["END"]
