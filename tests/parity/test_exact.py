"""Batch-invariant numerics: engine and trainer compute bitwise equal log-probs, whatever the batching."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.models.oracle import KINDS
from tests.parity import rank_planes
from tests.parity.planes import (
    TEMPERATURE,
    ask,
    config_of_kind,
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
from tests.pool import ranks

from miles.algo.config import AlgoConfig
from miles.backends.fsdp.local_model import LocalModel
from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.backends.native.engine.request import GenerateRequest
from miles.cluster.executor import InlineExecutor
from miles.core.errors import ParityError, UsageError
from miles.core.protocols import SamplingParams
from miles.core.types import Batch, Version
from miles.kernels.numerics import BATCH_INVARIANT, FAST
from miles.models.activation_checkpointing import set_recompute
from miles.models.capabilities import check_batch_invariance
from miles.models.checkpoint import hf
from miles.sync.manifest import build_manifest
from miles.train.config import TrainConfig
from miles.train.policy_trainer import PolicyTrainer

DTYPES = [torch.float32, torch.bfloat16]
FAMILIES = [
    "llama",
    "qwen2",
    "qwen3",
    "qwen3 moe normalised",
    "gemma3 with a cap on logits",
    "gpt-oss",
    "deepseek v3",
    "glm-4.5 in groups",
    "llama 4 with two experts a token",
    "minimax-m2",
    "step 3.7",
    "ernie 4.5 moe",
    "hunyuan moe",
    "mistral 4",
    "lfm2",
    "lfm2 untied with biases, longer convolution",
    "lfm2 moe",
    "hybrid qwen3 next",
    "hybrid qwen3.5",
    "hybrid nemotron h",
    "hybrid nemotron 3",
    "hybrid kimi linear",
    "deepseek v3.2",
    "glm 5",
    "gemma3n",
    "minimax-m3",
    "hybrid glm 5.3 flash",
    "deepseek v4",
    "inkling",
    "inkling whole",
    "hybrid qwen4",
    "hybrid qwen4 with a tower, longer n-grams, not normalised",
]
TIGHT = {"page_size": 4, "prefill_chunk": 11, "kv_tokens": 72, "max_running": 4}


def bits(answers):
    return [(span.tokens.tolist(), span.logprobs.tobytes()) for answer in answers for span in answer.spans]


# -- families, in both precisions -----------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", FAMILIES)
def test_what_an_engine_under_pressure_wrote_is_read_back_to_the_last_bit(kind, dtype):
    spec = spec_of_kind(kind)
    decoder = decoder_of(spec, dtype)
    asked = requests_of(spec.vocab_size, new=6)
    engine = engine_of(decoder, **TIGHT)
    plan = plan_of(samples_of(asked, ask(engine, asked)), max_tokens_per_gpu=60)
    assert len(plan) > 1
    assert gap_of(plan, trained(LocalModel(decoder), plan)) == 0.0


def test_all_families_can_be_exact_and_a_model_that_cannot_is_told_so():
    assert not [kind for kind in KINDS if check_batch_invariance(spec_of_kind(kind)) is not None]
    spec = spec_of_kind("qwen3", head_dim=512)
    with pytest.raises(UsageError, match="layer 0 has heads of 512 channels, more than the 256"):
        engine_of(decoder_of(spec, torch.float32))


def test_fast_arithmetic_would_not_pass():
    spec = spec_of_kind("qwen3")
    decoder = decoder_of(spec, torch.bfloat16, numerics=FAST)
    asked = requests_of(spec.vocab_size)
    plan = plan_of(samples_of(asked, ask(engine_of(decoder, **TIGHT), asked)), max_tokens_per_gpu=60)
    assert gap_of(plan, read(LocalModel(decoder), plan)) > 0


# -- what an engine may do otherwise --------------------------------------------------------

ENGINES = {
    "chunks of a prompt": {"prefill_chunk": 3},
    "pages of one token": {"page_size": 1},
    "large pages": {"page_size": 64},
    "no prefix cache": {"prefix_cache": False},
    "one at a time": {"max_running": 1},
    "preempted": {"page_size": 4, "kv_tokens": 60},
}


@pytest.fixture(scope="module", params=["qwen3", "qwen3 moe normalised"])
def written(request):
    """A model in bfloat16, what was asked, and what an engine that had all the room it wants wrote."""
    spec = spec_of_kind(request.param)
    decoder = decoder_of(spec, torch.bfloat16)
    asked = requests_of(spec.vocab_size, low=10)
    return decoder, asked, ask(engine_of(decoder), asked)


@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_writes_the_same_bits_however_it_works(written, name):
    decoder, asked, answers = written
    engine = engine_of(decoder, **ENGINES[name])
    assert bits(ask(engine, asked)) == bits(answers)
    assert name != "preempted" or engine.stats()["preemptions"] > 0


def test_a_request_alone_is_answered_as_among_others(written):
    decoder, asked, answers = written
    engine = engine_of(decoder)
    for at in (0, 4):
        assert bits(ask(engine, [asked[at]])) == bits([answers[at]])


def test_tokens_that_are_given_are_scored_as_those_that_were_drawn(written):
    decoder, asked, _ = written
    cold = [(prompt, replace(how, temperature=1.0)) for prompt, how in asked[:3]]
    engine = engine_of(decoder, prefill_chunk=7)
    for (prompt, _), answer in zip(cold, ask(engine, cold), strict=True):
        whole = np.concatenate([prompt, *(span.tokens for span in answer.spans)])
        reported = GenerateRequest(
            tokens=whole, sampling=SamplingParams(max_new_tokens=0), logprob_start_len=len(prompt)
        )

        async def scored(reported=reported):
            found = engine_of(decoder, prefix_cache=False).submit(reported)
            await found.completion()
            return found.prompt_logprobs.logprobs

        drawn = np.concatenate([span.logprobs for span in answer.spans])
        assert np.asarray(asyncio.run(scored()), np.float32).tobytes() == drawn.tobytes()


RECURRENT = ["hybrid qwen3.5", "hybrid kimi linear", "hybrid nemotron h", "lfm2", "inkling", "hybrid qwen4"]
DRAFTS = {"speculative_algorithm": "ngram", "speculative_num_draft_tokens": 3, "speculative_adaptive": False}


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_states_are_the_same_bits_in_chunks_preempted_or_forked(kind):
    spec = spec_of_kind(kind)
    decoder = decoder_of(spec, torch.bfloat16)
    asked = requests_of(spec.vocab_size, groups=2, low=10)
    answers = ask(engine_of(decoder, prefill_chunk=3), asked)
    engine = engine_of(decoder, **ENGINES["preempted"])
    assert bits(ask(engine, asked)) == bits(answers)
    assert engine.stats()["preemptions"] > 0
    plan = plan_of(samples_of(asked, answers), max_tokens_per_gpu=53)
    assert gap_of(plan, read(LocalModel(decoder), plan)) == 0.0


SPARSE = ["glm 5", "minimax-m3", "hybrid glm 5.3 flash", "deepseek v4", "hybrid qwen4"]


@pytest.mark.parametrize("kind", SPARSE)
def test_selections_and_compressed_keys_are_the_same_bits_in_chunks_preempted_or_alone(kind):
    spec = spec_of_kind(kind)
    decoder = decoder_of(spec, torch.bfloat16)
    asked = requests_of(spec.vocab_size, groups=2, low=20, new=5)
    answers = ask(engine_of(decoder, prefill_chunk=3, page_size=2), asked)
    engine = engine_of(decoder, **ENGINES["preempted"])
    assert bits(ask(engine, asked)) == bits(answers)
    assert engine.stats()["preemptions"] > 0
    assert bits(ask(engine_of(decoder), [asked[4]])) == bits([answers[4]])
    plan = plan_of(samples_of(asked, answers), max_tokens_per_gpu=53)
    assert gap_of(plan, read(LocalModel(decoder), plan)) == 0.0


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_states_of_drafted_tokens_are_the_same_bits(kind):
    spec = spec_of_kind(kind)
    decoder = decoder_of(spec, torch.bfloat16)
    asked = requests_of(spec.vocab_size, groups=1, new=12)
    engine = engine_of(decoder, **DRAFTS)
    answers = ask(engine, asked)  # the second time they are drafted from the first
    assert bits(ask(engine, asked)) == bits(answers) == bits(ask(engine_of(decoder), asked))
    assert engine.stats()["drafted_tokens"] > 0


# -- what a trainer may do otherwise --------------------------------------------------------

TRAINERS = {
    "all at once": {"max_tokens_per_gpu": 4096},
    "a sample at a time": {"micro_batch_size": 1},
    "odd micro-batches": {"max_tokens_per_gpu": 53},
    "shared prefixes": {"max_tokens_per_gpu": 4096, "share_prefix": True},
}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_trainer_reads_the_same_bits_however_it_packs(written, name):
    decoder, asked, answers = written
    plan = plan_of(samples_of(asked, answers), **TRAINERS[name])
    assert name != "shared prefixes" or plan[0].saved_tokens > 0
    assert gap_of(plan, read(LocalModel(decoder), plan, chunk=4 if name == "odd micro-batches" else None)) == 0.0


@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_gradients_repeat_to_the_bit_and_recomputed_layers_change_no_log_prob(written, how):
    decoder, asked, answers = written
    plan = plan_of(samples_of(asked[:5], answers[:5]), max_tokens_per_gpu=80)
    found = []
    for _ in range(2):
        decoder.zero_grad(set_to_none=True)
        model = LocalModel(decoder)
        set_recompute(decoder, how)
        assert gap_of(plan, trained(model, plan)) == 0.0
        found.append({name: p.grad.clone() for name, p in decoder.named_parameters() if p.grad is not None})
    set_recompute(decoder, "none")
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


@pytest.mark.parametrize(
    "kind",
    [
        "qwen3",
        "qwen3 moe normalised",
        "gpt-oss",
        "deepseek v3",
        "lfm2",
        "hybrid qwen3.5",
        "hybrid kimi linear",
        "hybrid nemotron h",
        "deepseek v3.2",
        "glm 5",
        "gemma3n",
        "minimax-m3",
        "hybrid glm 5.3 flash",
        "deepseek v4",
        "inkling",
        "hybrid qwen4",
    ],
)
def test_gradients_are_those_of_fast_arithmetic_up_to_rounding(kind):
    spec = spec_of_kind(kind)
    decoder = decoder_of(spec, torch.float32)
    asked = requests_of(spec.vocab_size, groups=2, each=2, new=4)
    plan = plan_of(samples_of(asked, ask(engine_of(decoder), asked)))
    found = []
    for model in (decoder, decoder_of(spec, torch.float32, numerics=FAST)):
        trained(LocalModel(model), plan)
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    for name, grad in found[1].items():
        scale = grad.norm().clamp(min=1e-3)
        assert float((found[0][name] - grad).norm() / scale) < 2e-3, name


# -- several ranks --------------------------------------------------------------------------

LAYOUTS = {
    "parts of a batch": {"shard": 2},
    "context": {"context": 2},
    "experts": {"shard": 2, "expert": 2},
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    decoder = decoder_of(spec_of_kind("qwen3 moe normalised"), torch.bfloat16)
    hf.export(decoder, folder)
    return folder, decoder


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_that_share_a_batch_or_experts_read_the_same_bits(saved, name):
    folder, decoder = saved
    asked = requests_of(decoder.spec.vocab_size, groups=2)
    samples = samples_of(asked, ask(engine_of(decoder), asked))
    given = (str(folder), samples, LAYOUTS[name], torch.bfloat16, TEMPERATURE)
    found = ranks(2, rank_planes.gap_on_a_rank, *given)
    assert [wrong for wrong, _ in found] == [0, 0] and sum(count for _, count in found) > 0


@pytest.mark.parametrize(
    "kind",
    [
        "lfm2",
        "hybrid qwen3.5",
        "deepseek v3.2",
        "minimax-m3",
        "hybrid glm 5.3 flash",
        "deepseek v4",
        "gemma3n",
        "inkling",
        "hybrid qwen4",
    ],
)
def test_context_ranks_read_the_same_bits_of_recurrent_and_sparse_models(kind, tmp_path):
    decoder = decoder_of(spec_of_kind(kind), torch.bfloat16)
    hf.export(decoder, tmp_path, config=config_of_kind(kind))
    asked = requests_of(decoder.spec.vocab_size, groups=2, each=2)
    samples = samples_of(asked, ask(engine_of(decoder), asked))
    found = ranks(2, rank_planes.gap_on_a_rank, str(tmp_path), samples, {"context": 2}, torch.bfloat16, TEMPERATURE)
    assert [wrong for wrong, _ in found] == [0, 0] and found[0][1] > 0


@pytest.mark.parametrize(
    ("kind", "world"),
    [
        ("lfm2", 2),
        ("hybrid qwen3.5", 2),
        ("hybrid qwen3.5", 4),
        ("hybrid kimi linear", 2),
        ("hybrid nemotron h", 2),
        ("hybrid nemotron h", 4),
        ("inkling", 2),
        ("hybrid qwen4", 2),
    ],
)
def test_context_ranks_that_carry_states_from_chunk_to_chunk_read_the_same_bits(kind, world, tmp_path):
    decoder = decoder_of(spec_of_kind(kind), torch.bfloat16)
    hf.export(decoder, tmp_path, config=config_of_kind(kind))
    asked = requests_of(decoder.spec.vocab_size, groups=2, each=2)
    samples = samples_of(asked, ask(engine_of(decoder), asked))
    given = (str(tmp_path), samples, {"context": world}, torch.bfloat16, TEMPERATURE)
    found = ranks(world, rank_planes.gap_of_split_scans, *given)
    assert [wrong for wrong, _ in found] == [0] * world and found[0][1] > 0


def count_differences_of_tensor_ranks(folder, decoder, sequence):
    """How many tokens of a trainer of two tensor ranks differ from those of an engine of two, and of how many."""
    asked = requests_of(decoder.spec.vocab_size, groups=2, each=2, new=4)
    cpu = torch.device("cpu")
    config = NativeConfig(engine_prefill_chunk=9, engine_kv_tokens=512)
    made = {"device": cpu, "dtype": torch.bfloat16, "config": config, "run": InlineExecutor(), "decode": None}
    engine = NativeEngine(decoder.spec, **made, devices=[cpu, cpu], numerics=BATCH_INVARIANT)
    try:
        tensors = dict(decoder.named_parameters())
        engine.begin(build_manifest(Version(number=0), tensors))
        for name, tensor in tensors.items():
            engine.receive(name, tensor)
        engine.verify()
        engine.commit()
        samples = samples_of(asked, ask(engine, asked))
    finally:
        asyncio.run(engine.close())
    layout = {"tensor": 2, "sequence": sequence}
    return ranks(2, rank_planes.gap_on_a_rank, str(folder), samples, layout, torch.bfloat16, TEMPERATURE)


@pytest.mark.parametrize("sequence", [False, True])
def test_an_engine_and_a_trainer_of_two_tensor_ranks_agree(saved, sequence):
    found = count_differences_of_tensor_ranks(*saved, sequence)
    assert [wrong for wrong, _ in found] == [0, 0] and found[0][1] > 0


@pytest.mark.parametrize(
    "kind", ["gemma3n", "minimax-m3", "hybrid glm 5.3 flash", "deepseek v4", "inkling", "hybrid qwen4"]
)
def test_tensor_ranks_read_the_same_bits_of_streams_and_sparse_models(kind, tmp_path):
    decoder = decoder_of(spec_of_kind(kind), torch.bfloat16)
    hf.export(decoder, tmp_path, config=config_of_kind(kind))
    found = count_differences_of_tensor_ranks(tmp_path, decoder, False)
    assert [wrong for wrong, _ in found] == [0, 0] and found[0][1] > 0


# -- the promise is held to -----------------------------------------------------------------


def worker_of(decoder):
    return PolicyTrainer(
        LocalModel(decoder),
        algo=AlgoConfig(),
        train=TrainConfig(max_tokens_per_gpu=70),
        steps=1,
        updates=3,
        temperature=TEMPERATURE,
        run=InlineExecutor(),
    )


def test_one_bit_of_one_token_stops_a_step_before_the_weights_change(written):
    decoder = decoder_of(written[0].spec, torch.bfloat16)
    samples = samples_of(written[1], written[2])
    odd = samples[4].logprobs.copy()
    at = len(odd) - 2
    odd[at] = np.nextafter(odd[at], np.float32(0))
    samples[4] = replace(samples[4], logprobs=odd)
    before = {name: p.clone() for name, p in decoder.named_parameters()}
    with pytest.raises(ParityError) as stopped:
        asyncio.run(worker_of(decoder).step(Batch(step=0, samples=tuple(samples), num_groups=3)))
    said = str(stopped.value)
    assert f"token {at} of trajectory 4 of prompt {samples[4].prompt_id}" in said
    assert f"engine {odd[at]:.9g}, trainer {samples_of(written[1], written[2])[4].logprobs[at]:.9g}" in said
    assert said.endswith("the weights were not changed")
    assert all(torch.equal(p, before[name]) for name, p in decoder.named_parameters())


def test_a_step_that_agrees_says_zero(written):
    decoder = decoder_of(written[0].spec, torch.bfloat16)
    batch = Batch(step=0, samples=tuple(samples_of(written[1], written[2])), num_groups=3)
    report = asyncio.run(worker_of(decoder).step(batch))
    assert report.metrics["parity_max_abs"] == 0.0 and report.metrics["parity_tokens"] == 63


# -- numerics are the model's own -----------------------------------------------------------


def test_models_of_different_numerics_share_a_process_and_keep_their_results():
    spec = spec_of_kind("qwen3")
    exact, fast = decoder_of(spec, torch.bfloat16), decoder_of(spec, torch.bfloat16, numerics=FAST)
    asked = requests_of(spec.vocab_size, groups=2, each=2, new=4)
    alone = bits(ask(engine_of(exact), asked))
    engines = engine_of(fast), engine_of(exact)
    quick, answers = (ask(engine, asked) for engine in engines)
    assert bits(answers) == alone != bits(quick)
    plan = plan_of(samples_of(asked, answers))
    gaps = [gap_of(plan, read(LocalModel(decoder), plan)) for decoder in (exact, fast, exact)]
    assert gaps[0] == gaps[2] == 0.0 < gaps[1]
