"""Overlap scheduling: steps launched before the previous output is processed never change any tokens."""

import asyncio
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.backends.native.conftest import Tiny
from tests.tiers import examples

from miles.backends.native.engine.request import GenerateRequest
from miles.core.errors import EngineError
from miles.core.protocols import SamplingParams
from miles.core.types import Status

LONG = SamplingParams(max_new_tokens=30, ignore_eos=True)


@pytest.fixture
def over():
    """Engines with overlap scheduling."""
    return Tiny(1)


class LaunchLog:
    """Logs the launches and results between an engine and its runner."""

    def __init__(self, engine):
        self.events, self._engine, self._launch = [], engine, engine._runner.launch
        self.error_at_launch = self.error_at_result = -1
        self.batches = []
        engine._runner.launch = self.launch

    def launch(self, batch):
        number = len(self.batches)
        if number == self.error_at_launch:
            raise RuntimeError("no launch")
        self.batches.append(batch)
        self.events.append(("launch", number))
        return LoggedStep(self, number, self._launch(batch))


class LoggedStep:
    def __init__(self, log, number, step):
        self.log, self.number, self.step = log, number, step

    def result(self):
        self.log.events.append(("result", self.number))
        if self.number == self.log.error_at_result:
            raise RuntimeError("no landing")
        return self.step.result()


async def until(engine, name, count):
    while engine.stats()[name] < count:
        await asyncio.sleep(0)


# -- the order of things --------------------------------------------------------------------


def test_a_step_is_launched_before_the_one_before_it_lands(over):
    engine = over.engine()
    log = LaunchLog(engine)
    request = (over.prompts(1)[0], replace(LONG, max_new_tokens=5))
    over.generate_all(engine, [request])
    launched = [("launch", 0)] + [event for i in range(4) for event in (("launch", i + 1), ("result", i))]
    assert log.events == [*launched, ("result", 4)]
    # What the host does not know yet, the device takes from where it drew it.
    assert [batch.tokens_T.tolist() for batch in log.batches[1:]] == [[-1]] * 4
    assert [batch.decode_only for batch in log.batches] == [False, True, True, True, True]


def test_without_overlap_a_step_lands_before_the_next_is_planned(tiny):
    engine = Tiny(0).engine()
    log = LaunchLog(engine)
    tiny.generate_all(engine, [(tiny.prompts(1)[0], replace(LONG, max_new_tokens=3))])
    assert [name for name, _ in log.events] == ["launch", "result"] * 3


def test_one_whose_draw_depends_on_the_last_makes_all_land_first(over):
    engine = over.engine()
    log = LaunchLog(engine)

    async def story():
        plain = asyncio.create_task(engine.generate(over.prompts(1)[0], LONG))
        request = GenerateRequest(
            tokens=over.prompts(2)[1], sampling=replace(LONG, max_new_tokens=4), presence_penalty=1.0
        )
        await engine.submit(request).completion()
        return await plain

    over.same(asyncio.run(story()), over.alone((over.prompts(1)[0], LONG)))
    assert log.events[:8] == [(name, i) for i in range(4) for name in ("launch", "result")]
    assert log.events[8:12] == [("launch", 4), ("launch", 5), ("result", 4), ("launch", 6)]
    assert Counter(name for name, _ in log.events) == {"launch": len(log.batches), "result": len(log.batches)}


def test_one_found_ended_may_already_be_in_the_next_step_whose_draw_is_ignored(over):
    prompt = over.prompts(1)[0]
    free = over.tokens(over.alone((prompt, LONG)))
    stop = free[7]
    end = free.index(stop) + 1
    engine = over.engine(page_size=4)
    log = LaunchLog(engine)
    beside = (over.prompts(2)[1], LONG)

    async def story():
        request = GenerateRequest(
            tokens=prompt, sampling=replace(LONG, stop_token_ids=(stop,)), top_logprobs_num=2, token_ids_logprob=(3,)
        )
        answer, task = engine.submit(request), asyncio.create_task(engine.generate(*beside))
        await answer.completion()
        return answer, await task

    cut, whole = asyncio.run(story())
    over.check(engine)
    assert cut.tokens == free[:end]
    assert len(cut.logprobs) == len(cut.top_logprobs) == len(cut.token_ids_logprobs) == end
    assert len(log.batches[end].req_slots_B) == 2  # one more than it had tokens to draw
    assert len(log.batches[end + 1].req_slots_B) == 1
    over.same(whole, over.alone(beside))
    assert engine.stats()["generated_tokens"] == end + 30


# -- faults ---------------------------------------------------------------------------------


def test_a_caller_that_leaves_in_mid_flight_frees_what_it_held_and_disturbs_nobody(over):
    engine = over.engine(page_size=4)
    prompt = over.prompts(1)[0]
    asked = [(prompt, replace(LONG, max_new_tokens=50, seed=i)) for i in range(4)]

    async def story():
        tasks = [asyncio.create_task(engine.generate(*request)) for request in asked]
        await until(engine, "steps", 5)
        assert engine._inflight.steps
        tasks[0].cancel()
        await until(engine, "steps", 7)
        engine.check()
        assert engine._scheduler.running_batch.slots.free == 256 - 3
        return await asyncio.gather(*tasks[1:])

    for one, request in zip(asyncio.run(story()), asked[1:], strict=True):
        over.same(one, over.alone(request))
    over.check(engine)


def test_what_is_aborted_in_mid_flight_has_all_that_was_drawn_for_it(over):
    engine = over.engine(page_size=4)
    asked = [(p, replace(LONG, seed=i)) for i, p in enumerate(over.prompts(3))]

    async def story():
        tasks = [
            asyncio.create_task(engine.submit(GenerateRequest(tokens=p, sampling=how, rid=str(i))).completion())
            for i, (p, how) in enumerate(asked)
        ]
        await until(engine, "steps", 9)
        assert engine._inflight.steps
        assert await engine.abort("1") == 1
        assert not engine._inflight.steps
        return await asyncio.gather(*tasks)

    first, aborted, last = asyncio.run(story())
    over.check(engine)
    assert aborted.status is Status.ABORTED
    assert over.tokens(aborted) == over.tokens(over.alone(asked[1]))[:9]
    over.same(first, over.alone(asked[0]))
    over.same(last, over.alone(asked[2]))


def test_weights_that_come_while_a_step_is_in_flight_do_not_claim_what_it_drew(over):
    engine = over.engine(over.decoder(0), page_size=4)
    request = (over.prompts(1)[0], LONG)

    async def story():
        task = asyncio.create_task(engine.generate(*request))
        await until(engine, "steps", 12)
        assert len(engine._inflight.steps) == 1
        over.publish(engine, over.decoder(1), number=1)
        assert not engine._inflight.steps
        return await task

    answer = asyncio.run(story())
    assert [(span.version.number, len(span)) for span in answer.spans] == [(0, 12), (1, 18)]
    assert over.tokens(answer)[:12] == over.tokens(over.alone(request))[:12]
    over.check(engine)


def test_one_that_ends_in_a_step_that_lands_for_the_weights_is_told_so(over):
    engine = over.engine(page_size=4)
    request = (over.prompts(1)[0], replace(LONG, max_new_tokens=12))

    async def story():
        task = asyncio.create_task(engine.generate(*request))
        await until(engine, "steps", 12)
        over.publish(engine, over.decoder(1), number=1)
        answer = await task
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1
        return answer

    over.same(asyncio.run(story()), over.alone(request))
    over.check(engine)


@pytest.mark.parametrize("where", ["error_at_launch", "error_at_result"])
@pytest.mark.parametrize("number", [0, 1, 4])
def test_an_error_in_a_flight_reaches_all_and_the_engine_serves_on(tiny, where, number):
    engine = tiny.engine(page_size=4, max_running=2)
    log = LaunchLog(engine)
    setattr(log, where, number)
    asked = [(p, LONG) for p in tiny.prompts(3)]

    async def story():
        return await asyncio.gather(*(engine.generate(*request) for request in asked), return_exceptions=True)

    errors = asyncio.run(story())
    assert {str(error) for error in errors} <= {"no launch", "no landing"}
    assert len(errors) == 3
    tiny.check(engine)
    setattr(log, where, -1)
    tiny.same(tiny.generate_all(engine, [asked[0]])[0], tiny.alone(asked[0]))


@pytest.mark.parametrize("verb", ["pause", "abort", "sleep", "flush_cache", "publish"])
def test_an_error_found_while_landing_for_another_reason_is_the_requests_and_not_the_callers(over, verb):
    engine = over.engine(page_size=4)
    log = LaunchLog(engine)
    log.error_at_result = 5
    request = (over.prompts(1)[0], LONG)

    async def story():
        task = asyncio.create_task(engine.generate(*request))
        await until(engine, "steps", 6)
        if verb == "publish":
            over.publish(engine, over.decoder(), number=1)
        else:
            await getattr(engine, verb)()
        if verb in ("pause", "sleep"):
            assert task.done() or not await asyncio.wait([task], timeout=0.01) or task.done()
            await engine.resume()
            await engine.wake()
        with pytest.raises(RuntimeError, match="no landing"):
            await task

    asyncio.run(story())
    over.check(engine)
    over.same(over.generate_all(engine, [request])[0], over.alone(request))


def test_closing_in_mid_flight_fails_those_who_wait(over):
    engine = over.engine()

    async def story():
        task = asyncio.create_task(engine.generate(over.prompts(1)[0], LONG))
        await until(engine, "steps", 4)
        await engine.close()
        with pytest.raises(EngineError, match="was closed"):
            await task

    asyncio.run(story())
    over.check(engine)


# -- whatever happens -----------------------------------------------------------------------


PROMPTS = Tiny().prompts(3, low=5, high=19)
REQUESTS = [
    *((prompt, SamplingParams(max_new_tokens=new, seed=seed)) for prompt in PROMPTS for seed, new in ((1, 9), (2, 17))),
    (PROMPTS[0][:3], SamplingParams(max_new_tokens=14, seed=3, temperature=0.0)),
    (np.concatenate(PROMPTS[:2]), SamplingParams(max_new_tokens=6, seed=4, top_k=5)),
]
EXTRAS = [{}, {}, {}, {"logprob_start_len": 1}, {"presence_penalty": 0.9}, {"top_logprobs_num": 2, "priority": 3}]
HAPPENINGS = st.one_of(
    st.tuples(st.just("arrive"), st.integers(0, len(REQUESTS) - 1), st.integers(0, len(EXTRAS) - 1)),
    st.tuples(st.just("arrive"), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 9)),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("abort"), st.integers(0, 20)),
    st.tuples(st.just("pause"), st.sampled_from(["in_place", "retract", "abort"])),
    st.tuples(st.just("sleep")),
    st.tuples(st.just("flush")),
)


@cache
def decoder():
    return Tiny().decoder()


@cache
def alone(which, extra):
    """Tokens, and scores if asked for, of an engine that does nothing else."""
    tiny = Tiny()
    engine = tiny.engine(decoder(), page_size=4)
    tokens, sampling = REQUESTS[which]

    async def story():
        answer = engine.submit(GenerateRequest(tokens=tokens, sampling=sampling, **EXTRAS[extra]))
        await answer.completion()
        return answer.tokens, answer.prompt_logprobs

    return asyncio.run(story())


class Story:
    """An engine to which things happen, and what became of everyone."""

    def __init__(self, depth, kv_tokens):
        self.engine = Tiny(depth).engine(decoder(), page_size=4, kv_tokens=kv_tokens, max_running=4, prefill_chunk=9)
        self.answers, self.tasks, self.leavers = [], [], set()

    def arrive(self, which, extra):
        tokens, sampling = REQUESTS[which]
        rid = f"r{len(self.answers)}"
        answer = self.engine.submit(GenerateRequest(tokens=tokens, sampling=sampling, rid=rid, **EXTRAS[extra]))
        self.answers.append((answer, which, extra))
        self.tasks.append(asyncio.create_task(answer.completion()))

    async def happen(self, verb, *how):
        engine, count = self.engine, len(self.answers)
        if verb == "arrive":
            self.arrive(*how)
        elif verb == "wait":
            for _ in range(how[0]):
                await asyncio.sleep(0)
        elif verb in ("cancel", "abort") and count:
            which = how[0] % count
            self.leavers.add(which)
            if verb == "cancel":
                self.answers[which][0].cancel()
            else:
                await engine.abort(f"r{which}")
        elif verb == "pause":
            if how[0] == "abort":
                self.leavers |= set(range(count))
            await engine.pause(*how)
            engine.check()
            await engine.resume()
        elif verb == "sleep":
            await engine.sleep()
            await engine.wake()
        elif verb == "flush":
            await engine.flush_cache()
        engine.check()

    async def run(self, happenings):
        for happening in happenings:
            await self.happen(*happening)
        outcomes = await asyncio.gather(*self.tasks, return_exceptions=True)
        for _ in range(3):
            await asyncio.sleep(0)
        return outcomes

    def compare(self, outcomes):
        for i, ((answer, which, extra), outcome) in enumerate(zip(self.answers, outcomes, strict=True)):
            tokens, scores = alone(which, extra)
            assert answer.tokens == tokens[: len(answer.tokens)]
            if i in self.leavers:
                continue
            assert not isinstance(outcome, BaseException), outcome
            assert answer.tokens == tokens
            assert len(answer.top_logprobs) == (len(tokens) if answer.request.top_logprobs_num else 0)
            if scores is not None:
                assert list(answer.prompt_logprobs.logprobs) == pytest.approx(list(scores.logprobs), abs=2e-5)


@pytest.mark.parametrize("depth", [0, 1])
@given(st.lists(HAPPENINGS, min_size=6, max_size=25), st.sampled_from([56, 400]))
@settings(max_examples=examples(20), deadline=None)
def test_whatever_happens_who_stays_gets_the_tokens_it_would_get_alone_and_the_books_balance(
    depth, happenings, kv_tokens
):
    story = Story(depth, kv_tokens)
    story.compare(asyncio.run(story.run(happenings)))
    Tiny().check(story.engine)
