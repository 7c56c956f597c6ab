"""The engine as its callers meet it: what it writes does not depend on how it was scheduled."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from miles.cluster.local import Threaded
from miles.core.errors import EngineError
from miles.core.protocols import Sampling
from miles.core.types import Status

LONG = Sampling(max_new_tokens=30, ignore_eos=True)


def requests_of(tiny, count, *, new=30, seed=0):
    mixed = [
        {},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"top_k": 5},
        {"top_p": 0.8, "temperature": 1.3},
        {"min_p": 0.05},
    ]
    return [
        (prompt, Sampling(max_new_tokens=new, seed=100 + i, **mixed[i % len(mixed)]))
        for i, prompt in enumerate(tiny.prompts(count, seed=seed))
    ]


def same(tiny, one, other):
    assert tiny.tokens(one) == tiny.tokens(other)
    assert (one.status, one.reason) == (other.status, other.reason)
    np.testing.assert_allclose(tiny.logprobs(one), tiny.logprobs(other), atol=2e-5)


def alone(tiny, request, **knobs):
    return tiny.ask(tiny.engine(**knobs), [request])[0]


# -- scheduling changes no token ------------------------------------------------------------


def test_a_request_gets_the_same_tokens_alone_and_among_sixty_four_others(tiny):
    asked = requests_of(tiny, 65)
    together = tiny.ask(tiny.engine(), asked)
    for i in range(0, 65, 6):
        same(tiny, together[i], alone(tiny, asked[i]))


def test_a_tiny_cache_preempts_and_recomputes_and_changes_no_token(tiny):
    asked = requests_of(tiny, 12)
    roomy = tiny.ask(tiny.engine(page_size=4), asked)
    engine = tiny.engine(page_size=4, kv_tokens=120)
    for one, other in zip(tiny.ask(engine, asked), roomy, strict=True):
        same(tiny, one, other)
    assert engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_a_prompt_computed_in_chunks_changes_no_token(tiny, chunk):
    asked = requests_of(tiny, 10, new=12)
    at_once = tiny.ask(tiny.engine(page_size=4), asked)
    for one, other in zip(tiny.ask(tiny.engine(page_size=4, prefill_chunk=chunk), asked), at_once, strict=True):
        same(tiny, one, other)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_samples_of_one_prompt_compute_it_once_and_get_the_tokens_they_would_get_alone(tiny, page_size):
    prompts = tiny.prompts(4, low=9, high=30)
    asked = [(p, Sampling(max_new_tokens=10, seed=8 * i + j)) for i, p in enumerate(prompts) for j in range(8)]
    engine = tiny.engine(page_size=page_size)
    answers = tiny.ask(engine, asked)
    assert engine.stats()["prefilled_tokens"] == sum(map(len, prompts))
    assert engine.stats()["cached_tokens"] == 7 * sum(map(len, prompts))
    assert [a.cached_tokens for a in answers] == [len(p) if j else 0 for p in prompts for j in range(8)]
    for one, other in zip(answers, tiny.ask(tiny.engine(prefix_cache=False), asked), strict=True):
        same(tiny, one, other)


def test_samples_of_a_long_prompt_get_the_tokens_they_would_get_without_sharing(tiny):
    prompts = tiny.prompts(3, low=150, high=170)
    asked = [(p, Sampling(max_new_tokens=12, seed=8 * i + j)) for i, p in enumerate(prompts) for j in range(6)]
    engine = tiny.engine(page_size=4)
    answers = tiny.ask(engine, asked)
    for one, other in zip(answers, tiny.ask(tiny.engine(prefix_cache=False), asked), strict=True):
        same(tiny, one, other)


def test_few_seats_and_little_memory_still_serve_everyone(tiny):
    prompts = tiny.prompts(3, low=9, high=30)
    asked = [(p, Sampling(max_new_tokens=20, seed=8 * i + j)) for i, p in enumerate(prompts) for j in range(8)]
    engine = tiny.engine(page_size=4, max_running=5, kv_tokens=100, prefill_chunk=11)
    for one, other in zip(tiny.ask(engine, asked), tiny.ask(tiny.engine(), asked), strict=True):
        same(tiny, one, other)


def test_a_conversation_that_goes_on_finds_its_earlier_turns_computed(tiny):
    engine = tiny.engine(page_size=4)
    prompt = tiny.prompts(1, low=20, high=21)[0]
    (first,) = tiny.ask(engine, [(prompt, LONG)])
    longer = np.concatenate([prompt, first.spans[0].tokens, prompt[:5]])
    (second,) = tiny.ask(engine, [(longer, LONG)])
    assert second.cached_tokens == 48  # all full pages of the 49 tokens that were computed
    same(tiny, second, alone(tiny, (longer, LONG)))


def test_old_prefixes_make_way_for_new_ones(tiny):
    engine = tiny.engine(page_size=4, kv_tokens=80)
    for seed in range(6):
        prompt = tiny.prompts(1, seed=seed, low=30, high=31)[0]
        request = (prompt, replace(LONG, max_new_tokens=9))
        (first,) = tiny.ask(engine, [request])
        (again,) = tiny.ask(engine, [request])
        assert (first.cached_tokens, again.cached_tokens) == (0, 29)
        same(tiny, first, again)


def test_the_same_program_makes_the_same_steps(tiny):
    asked = requests_of(tiny, 20)
    runs = []
    for _ in range(2):
        engine = tiny.engine(page_size=4, kv_tokens=160, max_running=7)
        answers = tiny.ask(engine, asked)
        stats = {name: value for name, value in engine.stats().items() if name != "seconds"}
        runs.append((stats, [tiny.logprobs(answer).tolist() for answer in answers]))
    assert runs[0] == runs[1]


def test_a_thread_of_its_own_writes_the_same(tiny):
    asked = requests_of(tiny, 9)
    run = Threaded("engine")
    for one, other in zip(tiny.ask(tiny.engine(run=run), asked), tiny.ask(tiny.engine(), asked), strict=True):
        same(tiny, one, other)
    run.close()


# -- endings --------------------------------------------------------------------------------


def test_a_stop_token_or_the_end_of_sequence_ends_a_response_and_is_part_of_it(tiny):
    prompt = tiny.prompts(1)[0]
    free = tiny.tokens(alone(tiny, (prompt, LONG)))
    stop = free[7]
    cut = free[: free.index(stop) + 1]
    answer = alone(tiny, (prompt, replace(LONG, stop_token_ids=(stop,))))
    assert (tiny.tokens(answer), answer.reason, answer.status) == (cut, "stop", Status.COMPLETED)
    decoder = tiny.decoder(spec=replace(tiny.spec, eos_token_ids=(3, stop)))
    (answer,) = tiny.ask(tiny.engine(decoder), [(prompt, replace(LONG, ignore_eos=False))])
    assert (tiny.tokens(answer), answer.reason) == (cut, "stop")
    (answer,) = tiny.ask(tiny.engine(decoder), [(prompt, LONG)])
    assert (tiny.tokens(answer), answer.reason, answer.status) == (free, "length", Status.TRUNCATED)


def test_a_stop_string_ends_with_the_token_that_completes_it_also_across_tokens(tiny):
    def decode(tokens):
        return "".join(f"<{token:02d}>" for token in tokens)

    prompt = tiny.prompts(1)[0]
    free = tiny.tokens(alone(tiny, (prompt, LONG)))
    text = decode(free)
    for stop in (text[22:31], text[4:7], text[78:82]):
        engine = tiny.engine(decode=decode)
        (answer,) = tiny.ask(engine, [(prompt, replace(LONG, stop=("nothing", stop)))])
        length = next(n for n in range(31) if stop in decode(free[:n]))
        assert (tiny.tokens(answer), answer.reason) == (free[:length], "stop")
    in_the_prompt = decode(prompt)[4:12]
    if in_the_prompt not in text:
        (answer,) = tiny.ask(tiny.engine(decode=decode), [(prompt, replace(LONG, stop=(in_the_prompt,)))])
        assert answer.reason == "length"


def test_an_abort_gives_everyone_what_was_written_so_far(tiny):
    engine = tiny.engine(max_running=3, page_size=4)
    asked = [(p, replace(LONG, max_new_tokens=100)) for p in tiny.prompts(5)]

    async def story():
        tasks = [asyncio.create_task(engine.generate(*request)) for request in asked]
        while engine.stats()["steps"] < 8:
            await asyncio.sleep(0)
        await engine.abort()
        return await asyncio.gather(*tasks)

    answers = asyncio.run(story())
    tiny.check(engine)
    assert {(a.status, a.reason) for a in answers} == {(Status.ABORTED, "abort")}
    assert [len(tiny.tokens(a)) > 0 for a in answers] == [True, True, True, False, False]
    for one, request in zip(answers[:3], asked, strict=False):
        written = tiny.tokens(one)
        assert written == tiny.tokens(alone(tiny, request))[: len(written)]


def test_a_cancelled_caller_frees_what_its_request_held_and_disturbs_nobody(tiny):
    engine = tiny.engine(page_size=4)
    prompt = tiny.prompts(1)[0]
    asked = [(prompt, replace(LONG, max_new_tokens=50, seed=i)) for i in range(4)]

    async def story():
        tasks = [asyncio.create_task(engine.generate(*request)) for request in asked]
        while engine.stats()["steps"] < 5:
            await asyncio.sleep(0)
        tasks[0].cancel()
        late = asyncio.create_task(engine.generate(prompt, LONG))
        await asyncio.sleep(0)
        late.cancel()
        return await asyncio.gather(*tasks[1:])

    answers = asyncio.run(story())
    tiny.check(engine)
    for one, request in zip(answers, asked[1:], strict=True):
        same(tiny, one, alone(tiny, request))


# -- control --------------------------------------------------------------------------------


def test_no_step_is_made_while_paused_and_requests_go_on_after(tiny):
    engine = tiny.engine()
    asked = requests_of(tiny, 5)

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
        same(tiny, one, alone(tiny, request))


def test_an_engine_that_slept_holds_no_cache_meanwhile_and_continues_exactly(tiny):
    engine = tiny.engine(page_size=4)
    asked = requests_of(tiny, 5)

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
        same(tiny, one, alone(tiny, request))
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
        before = tiny.ask(tiny.engine(first), [request])[0]
        assert tiny.tokens(one)[:11] == tiny.tokens(before)[:11]
        assert tiny.tokens(one) != tiny.tokens(before)
    assert [span.version.number for span in late.spans] == [1]
    assert late.cached_tokens == 0
    same(tiny, late, tiny.ask(tiny.engine(second), [asked[0]])[0])


def test_weights_may_come_from_another_thread_while_the_engine_steps_on_its_own(tiny):
    run = Threaded("engine")
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
    roomy = tiny.ask(tiny.engine(decoder, page_size=4), asked)
    engine = tiny.engine(decoder, page_size=4, kv_tokens=100)
    tight = tiny.ask(engine, asked)
    assert engine.stats()["preemptions"] > 0
    for one, other in zip(tight, roomy, strict=True):
        routed = one.spans[0].extras["routed_experts"]
        assert np.array_equal(routed, other.spans[0].extras["routed_experts"])
        assert (routed[:-1] < 6).all()
        assert (routed[-1] == 255).all()
    (plain,) = tiny.ask(tiny.engine(decoder, record_routing=False), asked[:1])
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
        tiny.ask(engine, [(array, Sampling(**{"max_new_tokens": 4, **how}))])
    tiny.check(engine)


def test_a_request_that_fills_the_whole_cache_is_served(tiny):
    engine = tiny.engine(kv_tokens=128)
    prompt = tiny.prompts(1, low=100, high=101)[0]
    (answer,) = tiny.ask(engine, [(prompt, replace(LONG, max_new_tokens=28))])
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
    same(tiny, tiny.ask(engine, [request])[0], alone(tiny, request))


def test_a_stop_string_decoder_that_fails_is_the_callers_error_and_no_hang(tiny):
    def decode(tokens):
        raise RuntimeError("no such token")

    engine = tiny.engine(decode=decode)
    with pytest.raises(RuntimeError, match="no such token"):
        tiny.ask(engine, [(tiny.prompts(1)[0], replace(LONG, stop=("x",)))])
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
