"""CUDA graphs on a GPU: they sample what the same steps sample eagerly."""

import asyncio

import numpy as np
import pytest
import torch
from tests.models.oracle import SMALL, hf_model, twin

from miles.backends.native.runner.cuda_graph import capture_batch_sizes
from miles.core.protocols import SamplingParams
from miles.models.decoder import Decoder


def test_every_number_of_rows_has_a_rung_and_few_are_wasted():
    for most in (1, 3, 7, 64, 200, 256, 1000):
        rungs = capture_batch_sizes(most)
        assert rungs == sorted(set(rungs)) and rungs[-1] == most
        wasted = [next(rung for rung in rungs if rung >= n) - n for n in range(1, most + 1)]
        assert all(spare <= max(3, n // 4, 15) for n, spare in enumerate(wasted, 1))


card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def there(kind, dtype=torch.float32):
    decoder = twin(hf_model(kind))
    moved = Decoder(decoder.spec, device="cuda", dtype=dtype)
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
    assert made and engine._runner._graphs._graphs == made
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
    assert reported == [(i + 1, 2 * len(capture_batch_sizes(9))) for i in range(2 * len(capture_batch_sizes(9)))]
