"""The engine under control: paused, put to sleep, given new weights in flight, asked the impossible, broken, closed."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from miles.backends.native.engine.request import GenerateRequest
from miles.cluster.executor import ThreadExecutor
from miles.core.errors import EngineError
from miles.core.protocols import SamplingParams
from miles.core.types import Status

LONG = SamplingParams(max_new_tokens=30, ignore_eos=True)


def test_no_step_is_made_while_paused_and_requests_go_on_after(tiny):
    engine = tiny.engine()
    asked = tiny.mixed(5)

    async def story():
        tasks = [asyncio.create_task(engine.generate(*request)) for request in asked]
        while engine.stats()["steps"] < 3:
            await asyncio.sleep(0)
        await engine.pause()
        before = engine.stats()["steps"]
        late = asyncio.create_task(engine.generate(*asked[0]))
        for _ in range(20):
            await asyncio.sleep(0)
        assert engine.stats()["steps"] == before
        assert (await engine.health())["waiting"] == 1
        await engine.resume()
        return await asyncio.gather(*tasks, late)

    answers = asyncio.run(story())
    tiny.check(engine)
    for one, request in zip(answers, [*asked, asked[0]], strict=True):
        tiny.same(one, tiny.alone(request))


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_keeps_requests_with_their_pages_or_without_or_ends_them(tiny, mode):
    engine = tiny.engine(page_size=4)
    asked = [(prompt, replace(how, ignore_eos=True)) for prompt, how in tiny.mixed(5)]

    async def story():
        tasks = [asyncio.create_task(engine.generate(*request)) for request in asked]
        while engine.stats()["steps"] < 6:
            await asyncio.sleep(0)
        await engine.pause(mode)
        engine.check()
        health = await engine.health()
        used = health["pages"] - health["free_pages"]
        held = {"in_place": (5, 0), "retract": (0, 5), "abort": (0, 0)}[mode]
        assert (health["running"], health["waiting"]) == held
        assert (used > 0) == (mode == "in_place")
        assert await engine.flush_cache() == (mode != "in_place")
        late = asyncio.create_task(engine.generate(*asked[1]))
        for _ in range(10):
            await asyncio.sleep(0)
        assert (await engine.health())["waiting"] == held[1] + 1
        await engine.resume()
        return await asyncio.gather(*tasks, late)

    *answers, late = asyncio.run(story())
    tiny.check(engine)
    tiny.same(late, tiny.alone(asked[1]))
    for one, request in zip(answers, asked, strict=True):
        if mode == "abort":
            assert one.status is Status.ABORTED
            assert 0 < len(tiny.tokens(one)) < 30
        else:
            tiny.same(one, tiny.alone(request))
    assert engine.stats()["preemptions"] == (5 if mode == "retract" else 0)


def test_flushing_forgets_every_prefix_and_waits_for_nobody(tiny):
    engine = tiny.engine(page_size=4)
    request = (tiny.prompts(1, low=20, high=21)[0], LONG)

    async def story():
        first, again = await engine.generate(*request), await engine.generate(*request)
        assert await engine.flush_cache()
        task = asyncio.create_task(engine.generate(*request))
        while engine.stats()["steps"] < 65:
            await asyncio.sleep(0)
        assert not await engine.flush_cache()
        return first, again, await task

    answers = asyncio.run(story())
    assert [answer.cached_tokens for answer in answers] == [0, 19, 0]
    tiny.check(engine)


def test_an_engine_that_slept_holds_no_cache_meanwhile_and_continues_exactly(tiny):
    engine = tiny.engine(page_size=4)
    asked = tiny.mixed(5)

    async def story():
        tasks = [asyncio.create_task(engine.generate(*request)) for request in asked]
        while engine.stats()["steps"] < 6:
            await asyncio.sleep(0)
        await engine.pause()
        await engine.sleep()
        assert engine._runner._cache is None
        assert (await engine.health())["running"] == 0
        await engine.wake()
        for _ in range(5):
            await asyncio.sleep(0)
        await engine.resume()
        return await asyncio.gather(*tasks)

    for one, request in zip(asyncio.run(story()), asked, strict=True):
        tiny.same(one, tiny.alone(request))
    tiny.check(engine)


def test_every_token_carries_the_version_that_wrote_it_through_a_swap_in_flight(tiny):
    first, second = tiny.decoder(seed=0), tiny.decoder(seed=1)
    engine = tiny.engine(first, page_size=4)
    asked = [(p, replace(LONG, seed=i)) for i, p in enumerate(tiny.prompts(4))]

    async def story():
        tasks = [asyncio.create_task(engine.generate(*request)) for request in asked]
        while engine.stats()["steps"] < 11:
            await asyncio.sleep(0)
        tiny.publish(engine, second, number=1)
        late = asyncio.create_task(engine.generate(*asked[0]))
        return await asyncio.gather(*tasks, late)

    *answers, late = asyncio.run(story())
    tiny.check(engine)
    for one, request in zip(answers, asked, strict=True):
        assert [(span.version.number, len(span)) for span in one.spans] == [(0, 11), (1, 19)]
        before = tiny.generate_all(tiny.engine(first), [request])[0]
        assert tiny.tokens(one)[:11] == tiny.tokens(before)[:11]
        assert tiny.tokens(one) != tiny.tokens(before)
    assert [span.version.number for span in late.spans] == [1]
    assert late.cached_tokens == 0
    tiny.same(late, tiny.generate_all(tiny.engine(second), [asked[0]])[0])


def test_a_version_published_twice_is_one_version_to_those_under_way(tiny):
    engine = tiny.engine(page_size=4)

    async def story():
        task = asyncio.create_task(engine.generate(tiny.prompts(1)[0], LONG))
        while engine.stats()["steps"] < 5:
            await asyncio.sleep(0)
        tiny.publish(engine, tiny.decoder(), number=0)
        return await task

    answer = asyncio.run(story())
    assert [(span.version.number, len(span)) for span in answer.spans] == [(0, 30)]


def test_weights_may_come_from_another_thread_while_the_engine_steps_on_its_own(tiny):
    run = ThreadExecutor("engine")
    engine = tiny.engine(run=run, page_size=4)
    decoders = [tiny.decoder(seed=seed) for seed in range(3)]

    async def story():
        tasks = [asyncio.create_task(engine.generate(p, replace(LONG, max_new_tokens=80))) for p in tiny.prompts(6)]
        for number, decoder in enumerate(decoders, start=1):
            while engine.stats()["steps"] < 10 * number:
                await asyncio.sleep(0)
            await asyncio.to_thread(tiny.publish, engine, decoder, number)
        return await asyncio.gather(*tasks)

    answers = asyncio.run(story())
    run.close()
    tiny.check(engine)
    for answer in answers:
        assert [span.version.number for span in answer.spans] == [0, 1, 2, 3]
        assert sum(map(len, answer.spans)) == 80


def test_routing_is_split_with_the_spans_and_survives_preemption(tiny):
    decoder = tiny.decoder(spec=tiny.moe_spec)
    asked = [(p, replace(LONG, seed=i)) for i, p in enumerate(tiny.prompts(6))]
    roomy = tiny.generate_all(tiny.engine(decoder, page_size=4), asked)
    engine = tiny.engine(decoder, page_size=4, kv_tokens=100)
    tight = tiny.generate_all(engine, asked)
    assert engine.stats()["preemptions"] > 0
    for one, other in zip(tight, roomy, strict=True):
        routed = one.spans[0].extras["routed_experts"]
        assert np.array_equal(routed, other.spans[0].extras["routed_experts"])
        assert (routed[:-1] < 6).all()
        assert (routed[-1] == 255).all()
    (plain,) = tiny.generate_all(tiny.engine(decoder, return_routed_experts=False), asked[:1])
    assert plain.spans[0].extras == {}


# -- what goes wrong ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "how", "message"),
    [
        ([], {}, "non-empty list of tokens"),
        ([[1, 2]], {}, r"int32 of shape \(1, 2\)"),
        ([2.5], {}, "not float64"),
        ([2, 61], {}, "token 61 is outside the vocabulary of 61"),
        ([-1, 2], {}, "token -1 is outside"),
        ([2, 3], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([2] * 200, {"max_new_tokens": 57}, "200 prompt tokens and max_new_tokens 57 exceed the model's 256 positions"),
        ([2] * 100, {"max_new_tokens": 29}, "exceed the key-value cache of 128 tokens; raise --engine-kv-tokens"),
        ([2], {"temperature": -1.0}, "temperature is -1.0"),
        ([2], {"temperature": float("nan")}, "temperature is nan"),
        ([2], {"top_p": 0.0}, "top_p is 0.0"),
        ([2], {"top_k": 0}, "top_k is 0"),
        ([2], {"min_p": 1.5}, "min_p is 1.5"),
        ([2], {"stop": ("",)}, "a stop string is empty"),
        ([2], {"stop": ("x",)}, "stop strings need a tokenizer"),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_in_one_sentence(tiny, tokens, how, message):
    engine = tiny.engine(kv_tokens=128)
    array = np.array(tokens) if tokens and isinstance(tokens[0], float) else np.array(tokens, np.int32)
    with pytest.raises(EngineError, match=message):
        tiny.generate_all(engine, [(array, SamplingParams(**{"max_new_tokens": 4, **how}))])
    tiny.check(engine)


def test_a_request_that_fills_the_whole_cache_is_served(tiny):
    engine = tiny.engine(kv_tokens=128)
    prompt = tiny.prompts(1, low=100, high=101)[0]
    (answer,) = tiny.generate_all(engine, [(prompt, replace(LONG, max_new_tokens=28))])
    assert len(tiny.tokens(answer)) == 28


def test_an_error_in_a_step_reaches_every_caller_and_the_engine_serves_on(tiny):
    engine = tiny.engine(page_size=4)
    good, broken = tiny.decoder(), tiny.decoder()
    with torch.no_grad():
        broken.norm.weight[0] = float("nan")

    async def story():
        tasks = [asyncio.create_task(engine.generate(p, LONG)) for p in tiny.prompts(3)]
        while engine.stats()["steps"] < 3:
            await asyncio.sleep(0)
        tiny.publish(engine, broken, number=1)
        return await asyncio.gather(*tasks, return_exceptions=True)

    errors = asyncio.run(story())
    assert [type(error) for error in errors] == [EngineError] * 3
    assert "not finite" in str(errors[0])
    tiny.check(engine)
    tiny.publish(engine, good, number=2)
    request = (tiny.prompts(1)[0], LONG)
    tiny.same(tiny.generate_all(engine, [request])[0], tiny.alone(request))


GREEDY = SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=0.0)


def test_a_request_whose_logits_are_not_finite_fails_alone_and_spoils_no_page(tiny):
    poison = 17
    decoder = tiny.decoder(spec=replace(tiny.spec, tie_embeddings=False))
    with torch.no_grad():
        decoder.embedding.weight[poison] = float("nan")
        decoder.head()[poison] = 0.0  # so greedy decoding never samples it
    good = [prompt[prompt != poison] for prompt in tiny.prompts(4)]
    expected = tiny.generate_all(tiny.engine(decoder, page_size=4), [(prompt, GREEDY) for prompt in good])
    engine = tiny.engine(decoder, page_size=4, kv_tokens=400)

    async def story():
        tasks = [asyncio.create_task(engine.generate(prompt, GREEDY)) for prompt in good]
        while engine.stats()["steps"] < 3:
            await asyncio.sleep(0)
        with pytest.raises(EngineError, match="not finite"):
            await engine.generate(np.array([5, poison, 9] * 4), GREEDY)
        scored = GenerateRequest(tokens=np.array([5, poison, 9]), sampling=GREEDY, logprob_start_len=0)
        with pytest.raises(EngineError, match="not finite"):
            await engine.submit(scored).completion()
        return await asyncio.gather(*tasks)

    for one, other in zip(asyncio.run(story()), expected, strict=True):
        tiny.same(one, other)
    tiny.check(engine)
    for one, other in zip(tiny.generate_all(engine, [(prompt, GREEDY) for prompt in good]), expected, strict=True):
        tiny.same(one, other)


def test_a_request_that_masks_every_token_fails_alone_and_its_neighbours_are_not_recomputed(tiny):
    class OnlyEos:
        def get_allowed_tokens(self):
            return np.arange(61) == 1

        def advance(self, token): ...

        def is_finished(self):
            return False

    engine, prompt = tiny.engine(), tiny.prompts(1)[0]
    masked = GenerateRequest(tokens=prompt, sampling=replace(LONG, ignore_eos=False), min_new_tokens=5)
    everything = replace(masked.sampling, stop_token_ids=tuple(range(61)))

    async def story():
        task = asyncio.create_task(engine.generate(prompt, LONG))
        while engine.stats()["steps"] < 3:
            await asyncio.sleep(0)
        with pytest.raises(EngineError, match="no logits that are finite"):
            await engine.submit(replace(masked, constraint=OnlyEos())).completion()
        with pytest.raises(EngineError, match="every token is a stop token"):
            engine.submit(replace(masked, sampling=everything))
        return await task

    tiny.same(asyncio.run(story()), tiny.alone((prompt, LONG)))
    assert engine.stats()["preemptions"] == 0
    tiny.check(engine)


def test_a_stop_string_decoder_that_fails_is_the_callers_error_and_no_hang(tiny):
    def decode(tokens):
        raise RuntimeError("no such token")

    engine = tiny.engine(decode=decode)
    with pytest.raises(RuntimeError, match="no such token"):
        tiny.generate_all(engine, [(tiny.prompts(1)[0], replace(LONG, stop=("x",)))])
    tiny.check(engine)


def test_a_closed_engine_fails_those_who_wait_and_refuses_new_ones(tiny):
    engine = tiny.engine()

    async def story():
        task = asyncio.create_task(engine.generate(tiny.prompts(1)[0], LONG))
        while engine.stats()["steps"] < 3:
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="was closed"):
            await task
        with pytest.raises(EngineError, match="takes no more requests"):
            await engine.generate(tiny.prompts(1)[0], LONG)

    asyncio.run(story())
    tiny.check(engine)


def test_an_idle_engine_has_no_task(tiny):
    engine = tiny.engine()

    async def story():
        await engine.generate(tiny.prompts(1)[0], LONG)
        for _ in range(3):
            await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(story())


@pytest.mark.parametrize("kind", ["spec", "moe_spec", "hybrid_spec"])
def test_a_prompt_that_is_half_computed_when_weights_come_is_computed_by_the_new_ones_alone(tiny, kind):
    spec = getattr(tiny, kind)
    old, new = tiny.decoder(1, spec), tiny.decoder(2, spec)
    engine = tiny.engine(old, prefill_chunk=4, page_size=4)
    prompt = tiny.prompts(1, low=30, high=31)[0]
    how = SamplingParams(max_new_tokens=8, seed=5, ignore_eos=True)

    async def swapped():
        twice = [asyncio.create_task(engine.generate(prompt, how)) for _ in range(2)]
        while engine.stats()["prefilled_tokens"] < 9:
            await asyncio.sleep(0)
        assert engine.stats()["generated_tokens"] == 0
        tiny.publish(engine, new, number=1)
        return await asyncio.gather(*twice)

    for answer in asyncio.run(swapped()):
        assert {span.version.number for span in answer.spans} == {1}
        tiny.same(answer, tiny.generate_all(tiny.engine(new), [(prompt, how)])[0])
    tiny.check(engine)
