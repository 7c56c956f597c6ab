"""Batch-invariant numerics on a GPU: the same guarantee, with CUDA graphs, Triton kernels and half precision."""

import pytest
import torch
from tests.models.oracle import KINDS
from tests.parity.planes import (
    ask,
    decoder_of,
    engine_of,
    gap_of,
    plan_of,
    read,
    requests_of,
    samples_of,
    spec_of_kind,
    trained,
)

from miles.backends.fsdp.local_model import LocalModel
from miles.kernels.numerics import Numerics
from miles.models.activation_checkpointing import set_recompute
from miles.models.capabilities import check_batch_invariance

if not torch.cuda.is_available():  # without hundreds of tests that are collected to be skipped
    pytest.skip("needs a CUDA device", allow_module_level=True)

EXACT = [kind for kind in KINDS if check_batch_invariance(spec_of_kind(kind)) is None]
LARGE = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64, "max_position_embeddings": 2048}
ENGINES = {
    "recorded steps": {},
    "steps one by one": {"cuda_graph": False},
    "chunks of a prompt": {"prefill_chunk": 37},
    "small pages": {"page_size": 4},
    "no prefix cache": {"prefix_cache": False},
    "preempted": {"page_size": 8, "kv_tokens": 1200, "max_running": 5},
}
TRAINERS = {
    "all at once": {"max_tokens_per_gpu": 1 << 16},
    "a sample at a time": {"micro_batch_size": 1},
    "odd micro-batches": {"max_tokens_per_gpu": 700},
    "shared prefixes": {"max_tokens_per_gpu": 1 << 16, "share_prefix": True},
}


def bits(answers):
    return [(span.tokens.tolist(), span.logprobs.tobytes()) for answer in answers for span in answer.spans]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", EXACT)
def test_every_family_is_read_back_to_the_last_bit(kind, dtype):
    spec = spec_of_kind(kind)
    decoder = decoder_of(spec, dtype, "cuda")
    asked = requests_of(spec.vocab_size, high=60)
    engine = engine_of(decoder, page_size=4, prefill_chunk=13, kv_tokens=400, max_running=6)
    plan = plan_of(samples_of(asked, ask(engine, asked)), "cuda", max_tokens_per_gpu=90)
    assert gap_of(plan, trained(LocalModel(decoder), plan)) == 0.0


@pytest.mark.parametrize("graphs", [False, True], ids=["steps one by one", "recorded steps"])
@pytest.mark.parametrize("kind", ["qwen3", "qwen3 moe normalised", "gpt-oss", "deepseek v3"])
def test_an_fp8_kv_cache_is_read_back_to_the_last_bit(kind, graphs):
    spec = spec_of_kind(kind)
    numerics = Numerics(batch_invariant=True, kv_cache_dtype="fp8_e4m3")
    decoder = decoder_of(spec, torch.bfloat16, "cuda", numerics=numerics)
    asked = requests_of(spec.vocab_size, high=60)
    engine = engine_of(decoder, page_size=4, prefill_chunk=13, kv_tokens=400, max_running=6, cuda_graph=graphs)
    plan = plan_of(samples_of(asked, ask(engine, asked)), "cuda", max_tokens_per_gpu=90)
    assert gap_of(plan, trained(LocalModel(decoder), plan)) == 0.0


@pytest.mark.parametrize("running", [1, 6], ids=["one request at a time", "several"])
@pytest.mark.parametrize("kind", ["qwen3", "gpt-oss", "deepseek v3"])
def test_an_fp8_kv_cache_is_read_back_to_rounding_with_fast_kernels(kind, running):
    spec = spec_of_kind(kind)
    numerics = Numerics(batch_invariant=False, kv_cache_dtype="fp8_e4m3")
    decoder = decoder_of(spec, torch.float32, "cuda", numerics=numerics)
    asked = requests_of(spec.vocab_size, high=60)
    engine = engine_of(decoder, page_size=4, prefill_chunk=13, kv_tokens=400, max_running=running)
    plan = plan_of(samples_of(asked, ask(engine, asked)), "cuda", max_tokens_per_gpu=90)
    # A key between two FP8 numbers may be rounded to the other one by a kernel that adds in another order.
    assert gap_of(plan, trained(LocalModel(decoder), plan)) < 0.05


@pytest.fixture(scope="module", params=["qwen3", "qwen3 moe normalised"])
def written(request):
    spec = spec_of_kind(request.param, **LARGE)
    decoder = decoder_of(spec, torch.bfloat16, "cuda")
    with torch.no_grad():
        for parameter in decoder.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.4)
    asked = requests_of(spec.vocab_size, low=5, high=700, new=20)
    return decoder, asked, ask(engine_of(decoder, kv_tokens=1 << 14), asked)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_writes_the_same_bits_however_it_works(written, name):
    decoder, asked, answers = written
    assert bits(ask(engine_of(decoder, **({"kv_tokens": 1 << 14} | ENGINES[name])), asked)) == bits(answers)


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_reads_the_same_bits_however_it_packs(written, name):
    decoder, asked, answers = written
    plan = plan_of(samples_of(asked, answers), "cuda", **TRAINERS[name])
    assert gap_of(plan, read(LocalModel(decoder), plan)) == 0.0


@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_gradients_repeat_to_the_bit_and_recomputed_layers_change_no_log_prob(written, how):
    decoder, asked, answers = written
    plan = plan_of(samples_of(asked, answers), "cuda", max_tokens_per_gpu=1500)
    found = []
    for _ in range(2):
        decoder.zero_grad(set_to_none=True)
        model = LocalModel(decoder)
        set_recompute(decoder, how)
        assert gap_of(plan, trained(model, plan)) == 0.0
        found.append({name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None})
    set_recompute(decoder, "none")
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())
