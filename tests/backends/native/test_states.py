"""An engine over a model with recurrent layers: states follow their sequences wherever the scheduler takes them."""

import asyncio
from dataclasses import replace

import pytest
import torch
from tests.backends.native.conftest import Tiny
from tests.backends.native.test_draft_heads import make_head
from tests.backends.native.test_speculative import KnownDrafter
from tests.models.draft.mtp_checkpoints import make_reference, save_reference

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.memory_budget import compute_kv_tokens
from miles.core.errors import EngineError, UsageError
from miles.core.protocols import SamplingParams
from miles.kernels.numerics import FAST
from miles.models.accounting.params import kv_bytes_per_token, state_bytes_per_sequence
from miles.models.checkpoint import hf
from miles.models.draft.checkpoint import build_meta_draft, load_mtp
from miles.models.resolve import resolve_spec

LONG = SamplingParams(max_new_tokens=30, ignore_eos=True)


@pytest.fixture
def decoder(tiny):
    return tiny.decoder(spec=tiny.hybrid_spec, scale=8.0)


@pytest.mark.parametrize("chunk", [1, 5, 16])
def test_a_prompt_computed_in_chunks_changes_no_token(tiny, decoder, chunk):
    asked = tiny.mixed(8, new=12)
    at_once = tiny.generate_all(tiny.engine(decoder, page_size=4), asked)
    in_chunks = tiny.generate_all(tiny.engine(decoder, page_size=4, prefill_chunk=chunk), asked)
    for one, other in zip(in_chunks, at_once, strict=True):
        tiny.same(one, other)


@pytest.mark.parametrize("chunk", [7, 100])
def test_samples_of_one_prompt_compute_it_once_and_get_the_tokens_they_would_get_alone(tiny, decoder, chunk):
    prompts = tiny.prompts(3, low=9, high=30)
    asked = [(p, SamplingParams(max_new_tokens=10, seed=8 * i + j)) for i, p in enumerate(prompts) for j in range(6)]
    engine = tiny.engine(decoder, page_size=4, prefill_chunk=chunk)
    answers = tiny.generate_all(engine, asked)
    assert engine.stats()["prefilled_tokens"] == sum(map(len, prompts))
    assert [a.cached_tokens for a in answers] == [len(p) if j else 0 for p in prompts for j in range(6)]
    for one, other in zip(answers, tiny.generate_all(tiny.engine(decoder, prefix_cache=False), asked), strict=True):
        tiny.same(one, other)


def test_a_prefix_seen_before_is_not_found_where_no_states_are_kept(tiny, decoder):
    engine = tiny.engine(decoder, page_size=4, state_cache_mib=0)
    prompt = tiny.prompts(1, low=20, high=21)[0]
    first, second = (tiny.generate_all(engine, [(prompt, LONG)])[0] for _ in range(2))
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)
    tiny.same(first, second)


def test_few_slots_and_little_memory_preempt_and_change_no_token(tiny, decoder):
    prompts = tiny.prompts(3, low=9, high=30)
    asked = [(p, SamplingParams(max_new_tokens=20, seed=8 * i + j)) for i, p in enumerate(prompts) for j in range(5)]
    engine = tiny.engine(decoder, page_size=4, max_running=5, kv_tokens=100, prefill_chunk=11)
    for one, other in zip(
        tiny.generate_all(engine, asked), tiny.generate_all(tiny.engine(decoder), asked), strict=True
    ):
        tiny.same(one, other)
    assert engine.stats()["preemptions"] > 0


def test_an_engine_that_slept_holds_no_states_meanwhile_and_continues_exactly(tiny, decoder):
    engine = tiny.engine(decoder, page_size=4)
    prompts = tiny.prompts(2)
    asked = [(p, replace(LONG, seed=i)) for p in prompts for i in range(3)]

    async def story():
        tasks = [asyncio.create_task(engine.generate(*request)) for request in asked]
        # Right after a prompt was computed, when its samples have yet to take its state over.
        while engine.stats()["generated_tokens"] == 0:
            await asyncio.sleep(0)
        await engine.sleep()
        assert engine._runner._states is None
        await engine.wake()
        return await asyncio.gather(*tasks)

    answers = asyncio.run(story())
    tiny.check(engine)
    for one, other in zip(answers, tiny.generate_all(tiny.engine(decoder), asked), strict=True):
        tiny.same(one, other)


def test_states_live_on_through_a_swap_of_weights_in_flight(tiny, decoder):
    other = tiny.decoder(seed=1, spec=tiny.hybrid_spec, scale=8.0)
    engine = tiny.engine(decoder, page_size=4)
    asked = [(p, replace(LONG, seed=i)) for i, p in enumerate(tiny.prompts(3))]

    async def story():
        tasks = [asyncio.create_task(engine.generate(*request)) for request in asked]
        while engine.stats()["steps"] < 12:  # prompts take two, the second for their last token
            await asyncio.sleep(0)
        tiny.publish(engine, other, number=1)
        late = asyncio.create_task(engine.generate(*asked[0]))
        return await asyncio.gather(*tasks, late)

    *answers, late = asyncio.run(story())
    tiny.check(engine)
    for one, request in zip(answers, asked, strict=True):
        assert [(span.version.number, len(span)) for span in one.spans] == [(0, 11), (1, 19)]
        before = tiny.generate_all(tiny.engine(decoder), [request])[0]
        assert tiny.tokens(one)[:11] == tiny.tokens(before)[:11]
        assert tiny.tokens(one) != tiny.tokens(before)
    tiny.same(late, tiny.generate_all(tiny.engine(other), [asked[0]])[0])


def test_a_state_that_is_not_finite_spoils_no_later_request(tiny, decoder):
    engine = tiny.engine(decoder, page_size=4)
    broken = tiny.decoder(spec=tiny.hybrid_spec)
    with torch.no_grad():
        broken.embedding.weight.fill_(float("nan"))
    request = (tiny.prompts(1)[0], LONG)
    (good,) = tiny.generate_all(engine, [request])
    tiny.publish(engine, broken, number=1)
    with pytest.raises(EngineError, match="not finite"):
        tiny.generate_all(engine, [request])
    tiny.publish(engine, decoder, number=2)
    tiny.same(tiny.generate_all(engine, [request])[0], good)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_half_precision_keeps_states_in_float32_and_the_inputs_of_filters_in_its_own(tiny, decoder):
    engine = tiny.engine(decoder.to(torch.bfloat16), kv_tokens=200)
    assert engine._runner._states is not None
    for filtered, state in engine._runner._states.layers.values():
        assert (filtered.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    (answer,) = tiny.generate_all(engine, [(tiny.prompts(1)[0], LONG)])
    assert len(tiny.tokens(answer)) == 30


def test_the_cache_takes_what_the_states_of_all_slots_leave(tiny, decoder):
    class Box:
        def __init__(self, free: int) -> None:
            self.free = free

        def free_bytes(self) -> int:
            return self.free

    spec, config = decoder.spec, NativeConfig(engine_max_running=3)
    assert config.count_cached_states(state_bytes_per_sequence(spec, "float32")) == 3
    assert NativeConfig(engine_state_cache_mib=1).count_cached_states(400_000) == 2
    states, token = 2 * 3 * state_bytes_per_sequence(spec, "float32"), kv_bytes_per_token(spec, "float32", FAST)
    assert states > 0
    assert compute_kv_tokens(spec, config, Box(2 * (states + 100 * token)), torch.float32, FAST) == 100
    assert (
        compute_kv_tokens(
            tiny.spec, config, Box(2 * 100 * kv_bytes_per_token(tiny.spec, "float32", FAST)), torch.float32, FAST
        )
        == 100
    )
    with pytest.raises(UsageError, match="lower --engine-max-running"):
        compute_kv_tokens(spec, config, Box(2 * states - 2), torch.float32, FAST)


# -- drafts: a state goes back to the last accepted token --------------------------------------

NGRAM = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 4}


def test_drafts_change_no_token_also_if_requests_give_way(tiny, decoder):
    """Delta rule and Mamba-2, with little memory: drafted states go back, and start again after preemption."""
    prompts = tiny.prompts(3, low=9, high=30)
    asked = [(p, SamplingParams(max_new_tokens=20, seed=8 * i + j)) for i, p in enumerate(prompts) for j in range(4)]
    asked += [(prompts[0], SamplingParams(max_new_tokens=20, temperature=0.0))]
    expected = tiny.generate_all(tiny.engine(decoder, page_size=4), asked)
    sizes = {"page_size": 4, "max_running": 16, "kv_tokens": 200, "prefill_chunk": 11}
    engine = tiny.engine(decoder, **sizes, **NGRAM, speculative_adaptive=False)
    for _ in range(2):
        for one, other in zip(tiny.generate_all(engine, asked), expected, strict=True):
            tiny.same(one, other)
    stats = engine.stats()
    assert stats["preemptions"] > 0
    assert stats["drafted_tokens"] > stats["accepted_draft_tokens"] > 20


def test_branches_change_no_token(tiny, decoder):
    asked = tiny.mixed(4, new=20)
    expected = tiny.generate_all(tiny.engine(decoder, page_size=4), asked)
    drafts = NGRAM | {"speculative_num_branches": 3, "speculative_num_draft_tokens": 8, "speculative_adaptive": False}
    engine = tiny.engine(decoder, page_size=4, max_running=60, **drafts)
    engine._speculation._drafter = KnownDrafter(asked, expected)
    for one, other in zip(expected, tiny.generate_all(engine, asked), strict=True):
        tiny.same(one, other)
    assert engine.stats()["draft_branches"] > engine.stats()["accepted_draft_branches"] > 2


def test_a_head_drafts_for_a_recurrent_model(tiny):
    spec = replace(tiny.hybrid_spec, vocab_size=6, eos_token_ids=())
    decoder, head = tiny.decoder(spec=spec, scale=6.0), make_head(spec)
    asked = [(p % 6, replace(how, ignore_eos=True)) for p, how in tiny.mixed(6, new=20)]
    expected = tiny.generate_all(tiny.engine(decoder, page_size=4), asked)
    empty = build_meta_draft(head.spec, dtype=torch.float32)
    drafts = {"speculative_algorithm": "eagle3", "speculative_num_draft_tokens": 3, "speculative_adaptive": False}
    engine = tiny.engine(decoder, draft=empty, head=head, page_size=4, max_running=60, **drafts)
    for one, other in zip(expected, tiny.generate_all(engine, asked), strict=True):
        tiny.same(one, other)
    assert engine.stats()["accepted_draft_tokens"] > 10


def test_the_mtp_layers_of_qwen3_next_draft_for_it(tmp_path):
    save_reference(make_reference("qwen3-next", vocab_size=8), tmp_path)
    tiny, spec = Tiny(), resolve_spec(tmp_path, "native")
    assert spec.recurrent
    decoder = hf.load_model(tmp_path, spec, device="cpu", dtype=torch.float32)
    head = load_mtp(tmp_path, spec, device="cpu", dtype=torch.float32)
    asked = [(p % 8, replace(how, ignore_eos=True)) for p, how in tiny.mixed(6, new=20)]
    expected = tiny.generate_all(tiny.engine(decoder, page_size=4), asked)
    drafts = {"speculative_algorithm": "mtp", "speculative_num_draft_tokens": 3, "speculative_adaptive": False}
    empty = build_meta_draft(head.spec, dtype=torch.float32)
    engine = tiny.engine(decoder, draft=empty, head=head, page_size=4, max_running=60, **drafts)
    for one, other in zip(expected, tiny.generate_all(engine, asked), strict=True):
        tiny.same(one, other)
    assert engine.stats()["accepted_draft_tokens"] > 10


def test_only_as_many_tokens_are_drafted_as_there_are_states(tiny, decoder):
    asked = [(p, replace(LONG, seed=i)) for i, p in enumerate(tiny.prompts(6))]
    engine = tiny.engine(decoder, page_size=4, max_running=8, **NGRAM, speculative_adaptive=False)
    expected = tiny.generate_all(tiny.engine(decoder, page_size=4), asked)
    for _ in range(2):
        for one, other in zip(expected, tiny.generate_all(engine, asked), strict=True):
            tiny.same(one, other)
    assert engine.stats()["accepted_draft_tokens"] > 0
    states = engine._runner._states
    assert {len(tensor) for layer in states.layers.values() for tensor in layer} == {8 + 8 + 8}
