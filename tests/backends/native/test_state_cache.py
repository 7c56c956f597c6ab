"""Prefix cache of recurrent models: states of prompts and turns are found again, and change no token."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.backends.native.conftest import Tiny
from tests.models.oracle import hf_model, twin

from miles.backends.native.engine.prefix_cache import PageAllocator
from miles.backends.native.engine.state_cache import StateCache
from miles.core.protocols import SamplingParams
from miles.kernels.numerics import BATCH_INVARIANT
from miles.models.decoder import Decoder

SHORT = SamplingParams(max_new_tokens=6, ignore_eos=True)
MODELS = ("hybrid qwen3 next", "hybrid kimi linear", "hybrid nemotron h", "lfm2")
"""Gated DeltaNet, Kimi Delta Attention, Mamba-2, short convolutions."""


@pytest.fixture
def decoder(tiny):
    return tiny.decoder(spec=tiny.hybrid_spec, scale=8.0)


def one_by_one(tiny, engine, requests):
    return [tiny.generate_all(engine, [request])[0] for request in requests]


def bits(completion):
    return [(s.tokens.tolist(), s.logprobs.tobytes()) for s in completion.spans]


def group_of_eight(tiny):
    prompt = tiny.prompts(1, low=39, high=40)[0]
    return prompt, [(prompt, replace(SHORT, seed=i)) for i in range(8)]


def test_a_group_whose_members_come_one_by_one_prefills_its_prompt_once(tiny, decoder):
    prompt, asked = group_of_eight(tiny)
    cached, plain = tiny.engine(decoder, page_size=4), tiny.engine(decoder, page_size=4, state_cache_mib=0)
    found, expected = one_by_one(tiny, cached, asked), one_by_one(tiny, plain, asked)
    for one, other in zip(found, expected, strict=True):
        tiny.same(one, other)
    # Each later one computes the last token of the prompt, from the state before it.
    assert [c.cached_tokens for c in found] == [0, *[len(prompt) - 1] * 7]
    computed, without = (engine.stats()["prefilled_tokens"] for engine in (cached, plain))
    assert (computed, without) == (len(prompt) + 7, 8 * len(prompt)) and without / computed > 6
    assert cached.stats()["state_hits"] == 7 and plain.stats()["state_hits"] == 0


def converse(tiny, engine, turns=4):
    """A session: each turn's prompt is all that was said, and a question."""
    rng, said, completions = np.random.default_rng(1), np.zeros(0, np.int32), []
    for turn in range(turns):
        said = np.concatenate((said, rng.integers(2, 61, 11).astype(np.int32)))
        (completion,) = tiny.generate_all(engine, [(said, replace(SHORT, seed=turn))])
        completions.append(completion)
        said = np.concatenate((said, *(span.tokens for span in completion.spans)))
    return completions


def test_a_session_goes_on_where_its_last_turn_ended(tiny, decoder):
    cached, plain = tiny.engine(decoder, page_size=4), tiny.engine(decoder, page_size=4, state_cache_mib=0)
    found, expected = converse(tiny, cached), converse(tiny, plain)
    for one, other in zip(found, expected, strict=True):
        tiny.same(one, other)
    # A turn computes its 11 new tokens, and the last one of the turn before at most.
    total = sum(11 + turn * 17 for turn in range(4))
    assert plain.stats()["prefilled_tokens"] == total
    assert cached.stats()["prefilled_tokens"] <= 4 * 11 + 3
    assert [c.cached_tokens >= turn * 17 - 1 for turn, c in enumerate(found)] == [True] * 4


def test_prompts_that_begin_alike_share_the_chunks_they_have_in_common(tiny, decoder):
    rng = np.random.default_rng(2)
    system = rng.integers(2, 61, 24).astype(np.int32)
    asked = [(np.concatenate((system, rng.integers(2, 61, 9).astype(np.int32))), SHORT) for _ in range(3)]
    engine = tiny.engine(decoder, page_size=4, prefill_chunk=10)
    plain = tiny.engine(decoder, page_size=4, prefill_chunk=10, state_cache_mib=0)
    found = one_by_one(tiny, engine, asked)
    for one, other in zip(found, one_by_one(tiny, plain, asked), strict=True):
        tiny.same(one, other)
    assert [c.cached_tokens for c in found] == [0, 24, 24]  # chunks end at 8, 16, 24 and 32


@pytest.mark.parametrize("kind", MODELS)
def test_log_probs_are_equal_to_the_bit_with_batch_invariant_numerics(kind):
    tiny = Tiny(1)
    like = twin(hf_model(kind, max_position_embeddings=256))
    decoder = Decoder(like.spec, device="cpu", dtype=torch.float32, numerics=BATCH_INVARIANT)
    decoder.load_state_dict(like.state_dict())
    prompt = np.random.default_rng(0).integers(2, like.spec.vocab_size - 1, 21).astype(np.int32)
    how = replace(SHORT, max_new_tokens=4)
    outputs = []
    for mib in (64, 0):
        engine = tiny.engine(decoder, page_size=4, max_running=4, state_cache_mib=mib)
        first, again = one_by_one(tiny, engine, [(prompt, how)] * 2)
        longer = np.concatenate((prompt, *(s.tokens for s in first.spans), prompt[:5]))
        (last,) = one_by_one(tiny, engine, [(longer, how)])
        outputs.append([bits(each) for each in (first, again, last)])
        assert engine.stats()["state_hits"] == (2 if mib else 0)
        assert (again.cached_tokens, last.cached_tokens >= len(prompt) + 3) == ((20, True) if mib else (0, False))
    assert outputs[0] == outputs[1] and outputs[0][0] == outputs[0][1]


def test_little_memory_evicts_states_with_their_pages_and_changes_no_token(tiny, decoder):
    prompts = tiny.prompts(3, low=9, high=20)
    asked = [(p, replace(SHORT, max_new_tokens=16, seed=8 * i + j)) for i, p in enumerate(prompts) for j in range(2)]
    engine = tiny.engine(decoder, page_size=4, max_running=3, kv_tokens=52, prefill_chunk=11)
    expected = tiny.generate_all(tiny.engine(decoder, state_cache_mib=0), asked)
    for _ in range(2):
        for one, other in zip(tiny.generate_all(engine, asked), expected, strict=True):
            tiny.same(one, other)
    stats, states = engine.stats(), engine._pages.states
    assert stats["preemptions"] > 0 and stats["saved_states"] > states.count == 3 >= len(states)


def test_drafted_tokens_leave_the_state_of_what_was_accepted(tiny, decoder):
    ngram = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 4, "speculative_adaptive": False}
    cached = tiny.engine(decoder, page_size=4, **ngram)
    plain = tiny.engine(decoder, page_size=4, state_cache_mib=0)
    for _ in range(2):  # the second time the n-grams are known
        for one, other in zip(converse(tiny, cached), converse(tiny, plain), strict=True):
            tiny.same(one, other)
    assert cached.stats()["accepted_draft_tokens"] > 0 and cached.stats()["state_hits"] > 0


def test_new_weights_a_flush_and_sleep_forget_all_states(tiny, decoder):
    engine = tiny.engine(decoder, page_size=4)
    other = tiny.decoder(seed=1, spec=tiny.hybrid_spec, scale=8.0)
    request = (tiny.prompts(1, low=20, high=21)[0], SHORT)

    def hits():
        (completion,) = tiny.generate_all(engine, [request])
        return completion.cached_tokens, completion

    assert [hits()[0], hits()[0]] == [0, 19]
    tiny.publish(engine, other, number=1)
    cached, completion = hits()
    assert cached == 0 and hits()[0] == 19
    tiny.same(completion, tiny.generate_all(tiny.engine(other), [request])[0])
    asyncio.run(engine.flush_cache())
    assert hits()[0] == 0

    async def nap():
        await engine.sleep()
        await engine.wake()

    asyncio.run(nap())
    cached, awake = hits()
    assert cached == 0
    tiny.same(awake, completion)


def test_an_aborted_request_leaves_a_state_that_another_continues_from(tiny, decoder):
    engine = tiny.engine(decoder, page_size=4)
    prompt = tiny.prompts(1, low=20, high=21)[0]
    how = SamplingParams(max_new_tokens=40, ignore_eos=True)

    async def cut():
        task = asyncio.create_task(engine.generate(prompt, how))
        while not any(len(req.tokens) >= len(prompt) + 9 for req in engine._scheduler.iter_reqs()):
            await asyncio.sleep(0)
        await engine.abort()
        return await task

    first = asyncio.run(cut())
    said = np.concatenate((prompt, *(s.tokens for s in first.spans)))
    (rest,) = tiny.generate_all(
        engine, [(said, replace(how, max_new_tokens=5, num_prior_tokens=len(said) - len(prompt)))]
    )
    assert rest.cached_tokens == len(said) - 1
    (whole,) = tiny.generate_all(tiny.engine(decoder, state_cache_mib=0), [(prompt, how)])
    done = tiny.tokens(first) + tiny.tokens(rest)
    assert done == tiny.tokens(whole)[: len(done)]


def test_a_state_is_dropped_when_its_page_is_evicted():
    states = StateCache(first_row=10, count=2)
    pages = PageAllocator(3, 4, share=True, states=states)
    page = pages.allocate()
    node = pages.insert(0, [1, 2, 3, 4], page)
    assert states.save(node) == 10 and states.save(node) is None
    match, state = pages.match_state([1, 2, 3, 4, 5])
    assert (match.pages, match.tail, state.num_tokens, state.row) == ([page], None, 4, 10)
    assert pages.match_state([1, 2, 3, 4])[1] is None, "the last token must be computed"
    pages.release([page])
    pages.allocate(), pages.allocate(), pages.allocate()
    assert len(states) == 0 and pages.match_state([1, 2, 3, 4, 5])[1] is None


def test_the_state_used_least_recently_is_replaced_and_the_longest_part_of_a_page_is_found():
    states = StateCache(first_row=0, count=2)
    pages = PageAllocator(8, 4, share=True, states=states)
    page = pages.allocate()
    for length in (1, 2):
        node = pages.insert(0, [7, 8][:length], page)
        states.save(node)
        states.add_partial(0, [7, 8][:length], node, page)
    assert pages.match_state([7, 8, 9])[1].num_tokens == 2
    assert pages.match_state([7, 9])[1].num_tokens == 1, "now the shorter one was used last"
    other = pages.insert(0, [1, 2, 3, 4], pages.allocate())
    assert states.save(other) is not None
    assert pages.match_state([7, 8, 9])[1].num_tokens == 1
    pages.flush()
    assert len(states) == 0
    states.check()
