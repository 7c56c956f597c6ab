"""The engine's output does not depend on how it was scheduled, and ends at its stop conditions."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from miles.cluster.executor import ThreadExecutor
from miles.core.protocols import SamplingParams
from miles.core.types import Status

LONG = SamplingParams(max_new_tokens=30, ignore_eos=True)


# -- scheduling changes no token ------------------------------------------------------------


def test_a_request_gets_the_same_tokens_alone_and_among_sixty_four_others(tiny):
    asked = tiny.mixed(65)
    together = tiny.generate_all(tiny.engine(), asked)
    for i in range(0, 65, 6):
        tiny.same(together[i], tiny.alone(asked[i]))


def test_a_tiny_cache_preempts_and_recomputes_and_changes_no_token(tiny):
    asked = tiny.mixed(12)
    roomy = tiny.generate_all(tiny.engine(page_size=4), asked)
    engine = tiny.engine(page_size=4, kv_tokens=120)
    for one, other in zip(tiny.generate_all(engine, asked), roomy, strict=True):
        tiny.same(one, other)
    assert engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_a_prompt_computed_in_chunks_changes_no_token(tiny, chunk):
    asked = tiny.mixed(10, new=12)
    at_once = tiny.generate_all(tiny.engine(page_size=4), asked)
    for one, other in zip(
        tiny.generate_all(tiny.engine(page_size=4, prefill_chunk=chunk), asked), at_once, strict=True
    ):
        tiny.same(one, other)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_samples_of_one_prompt_compute_it_once_and_get_the_tokens_they_would_get_alone(tiny, page_size):
    prompts = tiny.prompts(4, low=9, high=30)
    asked = [(p, SamplingParams(max_new_tokens=10, seed=8 * i + j)) for i, p in enumerate(prompts) for j in range(8)]
    engine = tiny.engine(page_size=page_size)
    answers = tiny.generate_all(engine, asked)
    assert engine.stats()["prefilled_tokens"] == sum(map(len, prompts))
    assert engine.stats()["cached_tokens"] == 7 * sum(map(len, prompts))
    assert [a.cached_tokens for a in answers] == [len(p) if j else 0 for p in prompts for j in range(8)]
    for one, other in zip(answers, tiny.generate_all(tiny.engine(prefix_cache=False), asked), strict=True):
        tiny.same(one, other)


def test_samples_of_a_long_prompt_get_the_tokens_they_would_get_without_sharing(tiny):
    prompts = tiny.prompts(3, low=150, high=170)
    asked = [(p, SamplingParams(max_new_tokens=12, seed=8 * i + j)) for i, p in enumerate(prompts) for j in range(6)]
    engine = tiny.engine(page_size=4)
    answers = tiny.generate_all(engine, asked)
    for one, other in zip(answers, tiny.generate_all(tiny.engine(prefix_cache=False), asked), strict=True):
        tiny.same(one, other)


def test_few_slots_and_little_memory_still_serve_everyone(tiny):
    prompts = tiny.prompts(3, low=9, high=30)
    asked = [(p, SamplingParams(max_new_tokens=20, seed=8 * i + j)) for i, p in enumerate(prompts) for j in range(8)]
    engine = tiny.engine(page_size=4, max_running=5, kv_tokens=100, prefill_chunk=11)
    for one, other in zip(tiny.generate_all(engine, asked), tiny.generate_all(tiny.engine(), asked), strict=True):
        tiny.same(one, other)


def test_a_conversation_that_goes_on_finds_its_earlier_turns_computed(tiny):
    engine = tiny.engine(page_size=4)
    prompt = tiny.prompts(1, low=20, high=21)[0]
    (first,) = tiny.generate_all(engine, [(prompt, LONG)])
    longer = np.concatenate([prompt, first.spans[0].tokens, prompt[:5]])
    (second,) = tiny.generate_all(engine, [(longer, LONG)])
    assert second.cached_tokens == 48  # all full pages of the 49 tokens that were computed
    tiny.same(second, tiny.alone((longer, LONG)))


def test_old_prefixes_make_way_for_new_ones(tiny):
    engine = tiny.engine(page_size=4, kv_tokens=80)
    for seed in range(6):
        prompt = tiny.prompts(1, seed=seed, low=30, high=31)[0]
        request = (prompt, replace(LONG, max_new_tokens=9))
        (first,) = tiny.generate_all(engine, [request])
        (again,) = tiny.generate_all(engine, [request])
        assert (first.cached_tokens, again.cached_tokens) == (0, 29)
        tiny.same(first, again)


def test_the_same_program_makes_the_same_steps(tiny):
    asked = tiny.mixed(20)
    runs = []
    for _ in range(2):
        engine = tiny.engine(page_size=4, kv_tokens=160, max_running=7)
        answers = tiny.generate_all(engine, asked)
        stats = {name: value for name, value in engine.stats().items() if name != "seconds"}
        runs.append((stats, [tiny.logprobs(answer).tolist() for answer in answers]))
    assert runs[0] == runs[1]


def test_a_thread_of_its_own_writes_the_same(tiny):
    asked = tiny.mixed(9)
    run = ThreadExecutor("engine")
    for one, other in zip(
        tiny.generate_all(tiny.engine(run=run), asked), tiny.generate_all(tiny.engine(), asked), strict=True
    ):
        tiny.same(one, other)
    run.close()


# -- endings --------------------------------------------------------------------------------


def test_a_stop_token_or_the_end_of_sequence_ends_a_response_and_is_part_of_it(tiny):
    prompt = tiny.prompts(1)[0]
    free = tiny.tokens(tiny.alone((prompt, LONG)))
    stop = free[7]
    cut = free[: free.index(stop) + 1]
    answer = tiny.alone((prompt, replace(LONG, stop_token_ids=(stop,))))
    assert (tiny.tokens(answer), answer.finish_reason, answer.status) == (cut, "stop", Status.COMPLETED)
    decoder = tiny.decoder(spec=replace(tiny.spec, eos_token_ids=(3, stop)))
    (answer,) = tiny.generate_all(tiny.engine(decoder), [(prompt, replace(LONG, ignore_eos=False))])
    assert (tiny.tokens(answer), answer.finish_reason) == (cut, "stop")
    (answer,) = tiny.generate_all(tiny.engine(decoder), [(prompt, LONG)])
    assert (tiny.tokens(answer), answer.finish_reason, answer.status) == (free, "length", Status.TRUNCATED)


def test_a_stop_string_ends_with_the_token_that_completes_it_also_across_tokens(tiny):
    def decode(tokens):
        return "".join(f"<{token:02d}>" for token in tokens)

    prompt = tiny.prompts(1)[0]
    free = tiny.tokens(tiny.alone((prompt, LONG)))
    text = decode(free)
    for stop in (text[22:31], text[4:7], text[78:82]):
        engine = tiny.engine(decode=decode)
        (answer,) = tiny.generate_all(engine, [(prompt, replace(LONG, stop=("nothing", stop)))])
        length = next(n for n in range(31) if stop in decode(free[:n]))
        assert (tiny.tokens(answer), answer.finish_reason) == (free[:length], "stop")
    in_the_prompt = decode(prompt)[4:12]
    if in_the_prompt not in text:
        (answer,) = tiny.generate_all(tiny.engine(decode=decode), [(prompt, replace(LONG, stop=(in_the_prompt,)))])
        assert answer.finish_reason == "length"


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
    assert {(a.status, a.finish_reason) for a in answers} == {(Status.ABORTED, "abort")}
    assert [len(tiny.tokens(a)) > 0 for a in answers] == [True, True, True, False, False]
    for one, request in zip(answers[:3], asked, strict=False):
        written = tiny.tokens(one)
        assert written == tiny.tokens(tiny.alone(request))[: len(written)]


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
        tiny.same(one, tiny.alone(request))
