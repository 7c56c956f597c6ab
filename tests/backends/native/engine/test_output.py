"""Answers as they come: pieces, why they end, who may end them, in which order they are served."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.models.oracle import our_logits

from miles.backends.native.engine.request import GenerateRequest
from miles.cluster.executor import ThreadExecutor
from miles.core.errors import EngineError
from miles.core.protocols import SamplingParams
from miles.core.types import Status
from miles.models.decoder import Routing

LONG = SamplingParams(max_new_tokens=30, ignore_eos=True)


def words(tokens):
    return "".join(f"<{token:02d}>" for token in tokens)


# -- pieces ---------------------------------------------------------------------------------


async def read(answer, *, slowly=0):
    """All pieces of an answer, with so many turns of the loop between them."""
    pieces = []
    async for piece in answer:
        pieces.append(piece)
        for _ in range(slowly):
            await asyncio.sleep(0)
    return pieces


def joined(pieces, name):
    return [one for piece in pieces for one in getattr(piece, name)]


def test_pieces_add_up_to_the_answer_and_a_slow_reader_holds_nobody_up(tiny):
    engine = tiny.engine(page_size=4)
    asked = tiny.mixed(5)

    async def story():
        answers = [
            engine.submit(GenerateRequest(tokens=p, sampling=how, top_logprobs_num=2, token_ids_logprob=(4,)))
            for p, how in asked
        ]
        reads = [read(answer, slowly=40 * (i == 0)) for i, answer in enumerate(answers)]
        return answers, await asyncio.gather(*reads)

    answers, pieces = asyncio.run(story())
    tiny.check(engine)
    assert len(pieces[0]) < len(answers[0].tokens)
    assert len(pieces[1]) == len(answers[1].tokens)
    for answer, came, request in zip(answers, pieces, asked, strict=True):
        assert joined(came, "tokens") == answer.tokens == tiny.tokens(tiny.alone(request))
        assert joined(came, "logprobs") == answer.logprobs
        assert joined(came, "top_logprobs") == answer.top_logprobs
        assert joined(came, "token_ids_logprobs") == answer.token_ids_logprobs
        assert [piece.first for piece in came] == np.cumsum([0, *(len(p.tokens) for p in came)]).tolist()[:-1]
        assert all(piece.tokens for piece in came)


def test_an_answer_can_be_read_after_its_end_and_awaited_by_several(tiny):
    engine = tiny.engine()

    async def story():
        answer = engine.submit(GenerateRequest(tokens=tiny.prompts(1)[0], sampling=LONG))
        assert answer.finish_reason is None
        first, second = await asyncio.gather(answer.completion(), answer.completion())
        assert first is second
        (piece,) = await read(answer)
        assert await read(answer) == []
        return answer, piece

    answer, piece = asyncio.run(story())
    assert piece.tokens == answer.tokens
    assert len(answer.tokens) == 30


def test_pieces_come_from_an_engine_on_a_thread_of_its_own(tiny):
    run = ThreadExecutor("engine")
    engine = tiny.engine(run=run)
    asked = tiny.mixed(6)

    async def story():
        return await asyncio.gather(
            *(read(engine.submit(GenerateRequest(tokens=p, sampling=how, top_logprobs_num=1))) for p, how in asked)
        )

    pieces = asyncio.run(story())
    run.close()
    tiny.check(engine)
    for came, request in zip(pieces, asked, strict=True):
        assert joined(came, "tokens") == tiny.tokens(tiny.alone(request))
        assert len(joined(came, "top_logprobs")) == len(joined(came, "tokens"))


def test_whoever_stops_reading_lets_go_of_the_request(tiny):
    engine = tiny.engine(page_size=4)
    prompt = tiny.prompts(1)[0]

    async def story():
        async with engine.submit(GenerateRequest(tokens=prompt, sampling=replace(LONG, max_new_tokens=200))) as answer:
            async for piece in answer:
                if piece.first > 5:
                    break
        whole = await engine.generate(prompt, LONG)
        with pytest.raises(EngineError, match="was cancelled"):
            await answer.completion()
        return answer, whole

    answer, whole = asyncio.run(story())
    tiny.check(engine)
    assert len(answer.tokens) < 30
    tiny.same(whole, tiny.alone((prompt, LONG)))


def test_a_reader_whose_wait_is_cut_short_may_go_on_reading(tiny):
    engine = tiny.engine()

    async def story():
        await engine.pause()
        answer = engine.submit(GenerateRequest(tokens=tiny.prompts(1)[0], sampling=LONG))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(answer), 0.01)
        await engine.resume()
        return await read(answer)

    assert len(joined(asyncio.run(story()), "tokens")) == 30
    tiny.check(engine)


def test_an_error_in_a_step_reaches_those_who_read(tiny):
    engine = tiny.engine()
    broken = tiny.decoder()
    with torch.no_grad():
        broken.norm.weight[0] = float("nan")

    async def story():
        answer = engine.submit(GenerateRequest(tokens=tiny.prompts(1)[0], sampling=LONG))
        first = await anext(answer)
        tiny.publish(engine, broken, number=1)
        with pytest.raises(EngineError, match="not finite"):
            await read(answer)
        return first

    assert asyncio.run(story()).first == 0
    tiny.check(engine)


# -- why it ended ---------------------------------------------------------------------------


def finish_of(engine, ask):
    async def story():
        answer = engine.submit(ask)
        await answer.completion()
        return answer

    answer = asyncio.run(story())
    return answer.tokens, answer.finish_reason


def test_an_answer_says_what_ended_it(tiny):
    prompt = tiny.prompts(1)[0]
    free = tiny.tokens(tiny.alone((prompt, LONG)))
    engine = tiny.engine(decode=words)
    tokens, finish = finish_of(engine, GenerateRequest(tokens=prompt, sampling=LONG))
    assert (tokens, finish.kind, finish.length, finish.matched) == (free, "length", 30, None)
    stop = free[7]
    tokens, finish = finish_of(
        engine, GenerateRequest(tokens=prompt, sampling=replace(LONG, stop_token_ids=(60, stop)))
    )
    assert (finish.kind, finish.matched, finish.length) == ("stop", stop, free.index(stop) + 1)
    text = words(free)[22:31]
    tokens, finish = finish_of(engine, GenerateRequest(tokens=prompt, sampling=replace(LONG, stop=("nothing", text))))
    assert (finish.kind, finish.matched) == ("stop", text)
    assert words(tokens)[: words(tokens).index(text)] + text in words(free)
    pattern = f"<{free[4]:02d}>.*<{free[9]:02d}>"
    tokens, finish = finish_of(engine, GenerateRequest(tokens=prompt, sampling=LONG, stop_regex=("x+", pattern)))
    assert (finish.kind, finish.matched) == ("stop", pattern)
    assert tokens == free[: free.index(free[9], free.index(free[4]) + 1) + 1]
    tiny.check(engine)


def test_a_stop_pattern_that_would_backtrack_for_ever_is_matched_in_linear_time(tiny):
    """Python's re needs about 2^100 steps for this pattern."""
    prompt = tiny.prompts(1)[0]
    ask = GenerateRequest(tokens=prompt, sampling=LONG, stop_regex=(r"^(([\s\S])+)+\x00$",))
    tokens, finish = finish_of(tiny.engine(decode=words), ask)
    assert (tokens, finish.kind) == (tiny.tokens(tiny.alone((prompt, LONG))), "length")


def test_many_stop_tokens_are_all_heeded_and_foreign_ones_do_no_harm(tiny):
    prompt = tiny.prompts(1)[0]
    free = tiny.tokens(tiny.alone((prompt, LONG)))
    others = tuple(token for token in range(61) if token not in free[:12])
    how = replace(LONG, stop_token_ids=(*others, 61, 10_000, -3))
    tokens, finish = finish_of(tiny.engine(), GenerateRequest(tokens=prompt, sampling=how))
    end = next(i for i, token in enumerate(free) if token in others)
    assert (tokens, finish.matched) == (free[: end + 1], free[end])


# -- one request among others ---------------------------------------------------------------


def test_one_request_is_aborted_by_its_name_with_what_it_has_and_the_others_go_on(tiny):
    engine = tiny.engine(page_size=4, max_running=4)
    asked = [(p, replace(LONG, max_new_tokens=60, seed=i)) for i, p in enumerate(tiny.prompts(6))]

    async def story():
        answers = [
            engine.submit(GenerateRequest(tokens=p, sampling=how, rid=f"r{i}")) for i, (p, how) in enumerate(asked)
        ]
        tasks = [asyncio.create_task(answer.completion()) for answer in answers]
        while engine.stats()["generated_tokens"] < 20:
            await asyncio.sleep(0)
        assert await engine.abort("nobody") == 0
        assert await engine.abort("r1", "enough") == 1
        assert await engine.abort("r5") == 1
        engine.check()
        return answers, await asyncio.gather(*tasks)

    answers, completions = asyncio.run(story())
    tiny.check(engine)
    for i, (answer, completion, request) in enumerate(zip(answers, completions, asked, strict=True)):
        whole = tiny.alone(request)
        if i not in (1, 5):
            tiny.same(completion, whole)
            continue
        assert (completion.status, completion.finish_reason) == (Status.ABORTED, "abort")
        assert answer.finish_reason.kind == "abort"
        assert answer.finish_reason.length == len(answer.tokens) == (0 if i == 5 else len(answer.tokens))
        assert answer.tokens == tiny.tokens(whole)[: len(answer.tokens)]
    assert answers[1].finish_reason.message == "enough"
    assert 0 < len(answers[1].tokens) < 60


def test_higher_priorities_are_served_first_and_equals_in_order_of_arrival(tiny):
    engine = tiny.engine(max_running=1)
    order = []

    async def served(name, priority):
        await engine.submit(
            GenerateRequest(tokens=tiny.prompts(1)[0], sampling=replace(LONG, max_new_tokens=3), priority=priority)
        ).completion()
        order.append(name)

    async def story():
        names = {"a": 0, "b": 5, "c": 0, "d": -1, "e": 5}
        await asyncio.gather(*(served(name, priority) for name, priority in names.items()))

    asyncio.run(story())
    assert order == ["b", "e", "a", "c", "d"]
    tiny.check(engine)


def test_an_answer_tells_how_long_it_waited_and_what_it_had_to_give_up(tiny):
    ticks = iter(range(10**9))
    engine = tiny.engine(max_running=1, clock=lambda: float(next(ticks)))
    asks = [GenerateRequest(tokens=p, sampling=LONG) for p in tiny.prompts(2)]

    async def story():
        answers = [engine.submit(ask) for ask in asks]
        await asyncio.gather(*(answer.completion() for answer in answers))
        return answers

    first, second = asyncio.run(story())
    assert 0 < first.queue_seconds < second.queue_seconds
    assert (first.preemptions, second.preemptions) == (0, 0)
    engine = tiny.engine(page_size=4, kv_tokens=72)
    asks = [replace(ask, sampling=replace(LONG, max_new_tokens=36, seed=i)) for i, ask in enumerate(asks)]

    async def again():
        answers = [engine.submit(ask) for ask in asks]
        await asyncio.gather(*(answer.completion() for answer in answers))
        return sum(answer.preemptions for answer in answers)

    assert asyncio.run(again()) == engine.stats()["preemptions"] > 0


# -- experts --------------------------------------------------------------------------------


def experts_of(decoder, answer):
    """Those of a full forward."""
    routing = Routing(record=True)
    with torch.no_grad():
        our_logits(decoder, [torch.tensor([*answer.request.tokens, *answer.tokens])], routing)
    return torch.stack(routing.recorded, 1).numpy()


def test_the_experts_of_prompt_and_answer_are_those_of_a_full_forward_found_or_computed(tiny):
    decoder = tiny.decoder(spec=tiny.moe_spec)
    engine = tiny.engine(decoder, page_size=4, prefill_chunk=11)
    prompt = tiny.prompts(1, low=22, high=23)[0]
    longer = np.concatenate((prompt, tiny.prompts(1, seed=5)[0]))

    async def asked(*asks):
        answers = [engine.submit(ask) for ask in asks]
        completions = await asyncio.gather(*(answer.completion() for answer in answers))
        return list(zip(answers, completions, strict=True))

    first = asyncio.run(asked(*(GenerateRequest(tokens=prompt, sampling=replace(LONG, seed=i)) for i in range(3))))
    second = asyncio.run(
        asked(
            GenerateRequest(tokens=longer, sampling=LONG),
            GenerateRequest(tokens=prompt, sampling=LONG, return_routed_experts=False),
        )
    )
    assert second[0][0].cached_tokens == 20
    for answer, completion in [*first, second[0]]:
        expected = experts_of(decoder, answer)
        assert answer.routed_experts().tolist() == expected[:-1].tolist()
        assert answer.routed_experts(5).tolist() == expected[5:-1].tolist()
        drawn = np.concatenate([span.extras["routed_experts"] for span in completion.spans])
        assert drawn[:-1].tolist() == expected[len(answer.request.tokens) : -1].tolist()
        assert (drawn[-1] == 255).all()
    without, completion = second[1]
    assert without.routed_experts() is None
    assert all(span.extras == {} for span in completion.spans)


def test_a_prompt_that_starts_over_with_new_weights_has_their_experts(tiny):
    old, new = tiny.decoder(1, tiny.moe_spec), tiny.decoder(2, tiny.moe_spec)
    engine = tiny.engine(old, page_size=4, prefill_chunk=5)

    async def story():
        answer = engine.submit(GenerateRequest(tokens=tiny.prompts(1, low=30, high=31)[0], sampling=LONG))
        while engine.stats()["prefilled_tokens"] < 11:
            await asyncio.sleep(0)
        tiny.publish(engine, new, number=1)
        await answer.completion()
        return answer

    answer = asyncio.run(story())
    expected = experts_of(new, answer)[:-1]
    assert answer.routed_experts().tolist() == expected.tolist()
    assert (expected[:10] != experts_of(old, answer)[:10]).any()


# -- prefixes -------------------------------------------------------------------------------


def test_every_turn_of_a_conversation_computes_only_what_is_new(tiny):
    engine = tiny.engine(page_size=4)
    rng = np.random.default_rng(3)
    history = tiny.prompts(1, low=20, high=21)[0]
    known = 0
    for turn in range(4):
        before = engine.stats()["prefilled_tokens"]
        (answer,) = tiny.generate_all(engine, [(history, replace(LONG, max_new_tokens=13, seed=turn))])
        assert answer.cached_tokens == known // 4 * 4
        assert engine.stats()["prefilled_tokens"] - before == len(history) - answer.cached_tokens
        known = len(history) + 12  # the last token was drawn and never computed
        reply = np.array(tiny.tokens(answer), np.int32)
        history = np.concatenate((history, reply, rng.integers(2, 61, 7).astype(np.int32)))
    assert engine.stats()["preemptions"] == 0


def test_groups_compute_each_prompt_once_however_few_run_at_a_time(tiny):
    prompts = tiny.prompts(6, low=17, high=40)
    asked = [(p, SamplingParams(max_new_tokens=9, seed=8 * i + j)) for i, p in enumerate(prompts) for j in range(8)]
    engine = tiny.engine(page_size=4, max_running=8, prefill_chunk=64)
    tiny.generate_all(engine, asked)
    stats = engine.stats()
    assert stats["preemptions"] == 0
    # All of a group wait for its first, or find its prompt and compute but the last token.
    late = stats["prefilled_tokens"] - sum(map(len, prompts))
    assert 0 <= late <= 7 * len(prompts)
    assert stats["prefilled_tokens"] + stats["cached_tokens"] == 8 * sum(map(len, prompts))
    roomy = tiny.engine(page_size=4)
    tiny.generate_all(roomy, asked)
    assert roomy.stats()["prefilled_tokens"] == sum(map(len, prompts))
