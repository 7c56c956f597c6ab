"""CUDA graphs on a GPU: they sample what the same steps sample eagerly."""

import asyncio
from collections import Counter

import numpy as np
import pytest
import torch
from tests.backends.native.lora_adapters import random_factors
from tests.models.oracle import SMALL, hf_model, twin

from miles.backends.native.engine.lora import LoraShape
from miles.backends.native.engine.request import GenerateRequest
from miles.backends.native.runner import cuda_graph
from miles.backends.native.runner.cuda_graph import capture_batch_sizes
from miles.backends.native.runner.lora import list_served_modules
from miles.backends.native.runner.step_inputs import PrefillInputs, capture_token_sizes
from miles.core.protocols import SamplingParams
from miles.kernels.numerics import FAST, numerics_from_parity
from miles.models.decoder import Decoder


def test_every_number_of_rows_has_a_rung_and_few_are_wasted():
    for most in (1, 3, 7, 64, 200, 256, 1000):
        rungs = capture_batch_sizes(most)
        assert rungs == sorted(set(rungs)) and rungs[-1] == most
        wasted = [next(rung for rung in rungs if rung >= n) - n for n in range(1, most + 1)]
        assert all(spare <= max(3, n // 4, 15) for n, spare in enumerate(wasted, 1))


def test_a_step_with_prefill_is_padded_by_at_most_a_quarter_where_tokens_cost_most():
    sizes = capture_token_sizes(4096)
    assert sizes == sorted(set(sizes)) and sizes[-1] == 4096
    assert capture_token_sizes(100) == [32, 64, 128]
    for count in range(17, 4097):
        padded = next(size for size in sizes if size >= count)
        assert padded < 2 * count
        assert 4 * padded <= 5 * count or not 256 <= count <= 2048


card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def there(kind, dtype=torch.float32, numerics=FAST):
    decoder = twin(hf_model(kind))
    moved = Decoder(decoder.spec, device="cuda", dtype=dtype, numerics=numerics)
    with torch.no_grad():
        for name, parameter in moved.named_parameters():
            parameter.copy_(decoder.get_parameter(name))
    return moved


def asked(samples=4, **how):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, SMALL["vocab_size"], n).astype(np.int32) for n in (3, 21, 40, 62)]
    return [
        (prompt, SamplingParams(**({"max_new_tokens": 5 + 3 * i, "ignore_eos": True, "seed": i} | how)))
        for prompt in prompts
        for i in range(samples)
    ]


@card
@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe", "gemma2", "gpt-oss", "deepseek v3"])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.8, "min_p": 0.01}])
def test_recorded_steps_draw_what_others_draw(tiny, kind, how):
    model = there(kind)
    answers = {}
    for graphs in (True, False):
        engine = tiny.engine(model, page_size=4, prefill_chunk=64, max_running=11, kv_tokens=2400, cuda_graph=graphs)
        answers[graphs] = tiny.generate_all(engine, asked(**how))
    for one, other in zip(answers[True], answers[False], strict=True):
        assert tiny.tokens(one) == tiny.tokens(other)
        np.testing.assert_allclose(tiny.logprobs(one), tiny.logprobs(other), atol=2e-4)
        for a, b in zip(one.spans, other.spans, strict=True):
            assert {k: v.tolist() for k, v in a.extras.items()} == {k: v.tolist() for k, v in b.extras.items()}


@card
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe", "gemma2", "gpt-oss", "deepseek v3"])
def test_a_row_that_is_alone_is_recorded_with_the_same_draws(tiny, kind, dtype):
    model, answers = there(kind, dtype), {}
    request = asked(max_new_tokens=40)[5]
    for graphs in (True, False):
        engine = tiny.engine(model, page_size=4, prefill_chunk=64, max_running=4, kv_tokens=2400, cuda_graph=graphs)
        (answers[graphs],) = tiny.generate_all(engine, [request])
    assert tiny.tokens(answers[True]) == tiny.tokens(answers[False])
    np.testing.assert_allclose(tiny.logprobs(answers[True]), tiny.logprobs(answers[False]), atol=2e-4)


@card
def test_recordings_follow_new_weights_and_outlive_sleep(tiny):
    first, second = there("qwen3"), there("qwen3")
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(1.1)
    fresh = tiny.generate_all(tiny.engine(second, page_size=4, max_running=8, kv_tokens=2400), asked())
    engine = tiny.engine(first, page_size=4, max_running=8, kv_tokens=2400)
    tiny.generate_all(engine, asked())
    tiny.publish(engine, second)
    again = tiny.generate_all(engine, asked())
    made = dict(engine._runner._graphs._graphs)
    asyncio.run(engine.sleep())
    asyncio.run(engine.wake())
    woken = tiny.generate_all(engine, asked())
    assert made and made.items() <= engine._runner._graphs._graphs.items()
    for one, other, third in zip(fresh, again, woken, strict=True):
        assert tiny.tokens(one) == tiny.tokens(other) == tiny.tokens(third)


@card
def test_recordings_of_the_first_engine_are_made_again_for_weights_that_lie_elsewhere(tiny):
    # A library's own memory is taken while the first recording is made, and never given back.
    torch._C._cuda_clearCublasWorkspaces()
    engine, second = tiny.engine(there("qwen3"), page_size=4, max_running=8, kv_tokens=2400), there("qwen3")
    first = tiny.generate_all(engine, asked())
    tiny.publish(engine, second)
    for one, other in zip(first, tiny.generate_all(engine, asked()), strict=True):
        assert tiny.tokens(one) == tiny.tokens(other)


@card
def test_warming_up_records_every_rung_and_tells_how_far_it_is(tiny):
    engine = tiny.engine(there("qwen3"), page_size=4, max_running=9, kv_tokens=2400)
    reported = []
    asyncio.run(engine.warm_up(lambda done, of: reported.append((done, of))))
    count = 2 * len(capture_batch_sizes(9)) + len(capture_token_sizes(2400))
    assert reported == [(i + 1, count) for i in range(count)]


def record_prefills(monkeypatch):
    """Count the steps with prefill that are replayed, and those that run eagerly."""
    counts = Counter()
    graphs = cuda_graph.CudaGraphRunner
    launch, run_eager = graphs.launch, graphs._run_eager

    def counted_launch(self, batch):
        counts["launched"] += not batch.decode_only
        return launch(self, batch)

    def counted_eager(self, key):
        counts["eager"] += 1
        return run_eager(self, key)

    monkeypatch.setattr(graphs, "launch", counted_launch)
    monkeypatch.setattr(graphs, "_run_eager", counted_eager)
    return counts


def arrivals():
    """Prompts of all lengths, some of which begin alike, and samples of one prompt."""
    rng = np.random.default_rng(1)
    lengths = (3, 90, 21, 140, 64, 200, 33, 90, 21, 140, 64, 200, 33, 3, 131, 90, 21)
    prompts = [rng.integers(0, SMALL["vocab_size"], n).astype(np.int32) for n in lengths]
    prompts[9][:100] = prompts[3][:100]
    prompts += [prompts[5]] * 3
    variants = ({}, {"temperature": 0.0}, {"temperature": 0.7}, {"top_k": 5, "top_p": 0.8})
    return [
        (prompt, SamplingParams(max_new_tokens=6 + 5 * (i % 4), ignore_eos=True, seed=i, **variants[i % 7 % 4]))
        for i, prompt in enumerate(prompts)
    ]


@card
@pytest.mark.parametrize("parity", ["fast", "exact"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe", "gemma2", "gpt-oss", "deepseek v3"])
def test_captured_steps_with_prefill_have_the_bits_of_padded_eager_ones(tiny, monkeypatch, kind, dtype, parity):
    model, answers, counts = there(kind, dtype, numerics_from_parity(parity)), {}, record_prefills(monkeypatch)
    sides = ("captured", "padded", "unpadded") if parity == "exact" else ("captured", "padded")
    for side in sides:
        counts.clear()
        with monkeypatch.context() as patch:
            if side == "padded":
                patch.setattr(cuda_graph, "_EAGER_PREFILLS", 10_000)
            elif side == "unpadded":
                patch.setattr(PrefillInputs, "choose_shape", lambda inputs, batch: None)
            engine = tiny.engine(model, page_size=4, prefill_chunk=160, max_running=11, kv_tokens=4800)
            answers[side] = tiny.generate_staggered(engine, arrivals(), first=3)
        if side == "captured":
            assert counts["launched"] > counts["eager"] > 0
        else:
            assert counts["launched"] == counts["eager"]
    for side in sides[1:]:
        for one, other in zip(answers["captured"], answers[side], strict=True):
            assert tiny.tokens(one) == tiny.tokens(other)
            np.testing.assert_array_equal(tiny.logprobs(one), tiny.logprobs(other))
            for a, b in zip(one.spans, other.spans, strict=True):
                assert {k: v.tolist() for k, v in a.extras.items()} == {k: v.tolist() for k, v in b.extras.items()}


@card
@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe"])
def test_captured_steps_with_prefill_follow_new_weights_and_outlive_sleep(tiny, kind):
    first, second = there(kind), there(kind)
    with torch.no_grad():
        for parameter in second.parameters():
            parameter.mul_(1.1)
    options = {"page_size": 4, "prefill_chunk": 160, "max_running": 11, "kv_tokens": 4800}
    fresh = tiny.generate_staggered(tiny.engine(second, **options, cuda_graph=False), arrivals())
    engine = tiny.engine(first, **options)
    tiny.generate_staggered(engine, arrivals())
    tiny.publish(engine, second)
    graphs = engine._runner._graphs
    assert not graphs.has_graphs
    again = [tiny.generate_staggered(engine, arrivals())]
    tiny.publish(engine, second, number=1)  # an empty prefix cache, so that the same steps come again
    again.append(tiny.generate_staggered(engine, arrivals()))
    made = {key: graph for key, graph in graphs._graphs.items() if key.num_tokens}
    asyncio.run(engine.sleep())
    asyncio.run(engine.wake())
    again.append(tiny.generate_staggered(engine, arrivals()))
    assert made and made.items() <= graphs._graphs.items()
    for answers in again:
        for one, other in zip(fresh, answers, strict=True):
            assert tiny.tokens(one) == tiny.tokens(other)
            np.testing.assert_allclose(tiny.logprobs(one), tiny.logprobs(other), atol=2e-4)


@card
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe"])
def test_captured_steps_with_prefill_and_adapters_have_the_bits_of_padded_eager_ones(tiny, monkeypatch, kind, dtype):
    model, answers, counts = there(kind, dtype), {}, record_prefills(monkeypatch)
    modules = list_served_modules(model.spec, ("all", "lm_head"), FAST)
    shape = LoraShape(num_slots=2, max_rank=8, modules=modules)
    names = {module.rpartition(".")[2] for module in modules}

    async def run(engine):
        outputs = [
            engine.submit(GenerateRequest(tokens=tokens, sampling=how, lora=(None, "a0", "a1")[i % 3]))
            for i, (tokens, how) in enumerate(arrivals())
        ]
        for output in outputs:
            await output.completion()
        return [(output.tokens, output.logprobs) for output in outputs]

    for side in ("captured", "padded", "unpadded"):
        counts.clear()
        with monkeypatch.context() as patch:
            if side == "padded":
                patch.setattr(cuda_graph, "_EAGER_PREFILLS", 10_000)
            elif side == "unpadded":
                patch.setattr(PrefillInputs, "choose_shape", lambda inputs, batch: None)
            engine = tiny.engine(model, page_size=4, prefill_chunk=160, max_running=11, kv_tokens=4800, lora=shape)
            for i in range(2):
                engine.load_lora(f"a{i}", random_factors(model.spec, i, rank=4 + i, scale=0.5, only=names))
            answers[side] = asyncio.run(run(engine))
        assert (counts["launched"] > counts["eager"]) == (side == "captured")
    assert answers["captured"] == answers["padded"]
    if dtype == torch.float32:
        for (tokens, logprobs), (other_tokens, other_logprobs) in zip(
            answers["captured"], answers["unpadded"], strict=True
        ):
            assert tokens == other_tokens
            np.testing.assert_allclose(logprobs, other_logprobs, atol=5e-4)
