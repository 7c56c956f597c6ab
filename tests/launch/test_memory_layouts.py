"""What the plan says a rank of a layout holds, against the tensors that ranks really hold after a training step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from benchmarks.lora_grpo_step import build_case, estimate_phases
from tests.launch.memory_ranks import HeldCase, held
from tests.launch.small_config import furnish
from tests.parity.planes import config_of_kind
from tests.pool import ranks
from tests.train.small_trainer import DENSE as DENSE_CONFIG
from tests.train.small_trainer import MOE as MOE_CONFIG
from tests.train.small_trainer import ragged, step, worker

from miles.backends.fsdp.local_model import LocalModel
from miles.cluster.parallel_dims import ParallelDims
from miles.launch.plan.layout_memory import (
    RankMemory,
    estimate_rank_activations,
    estimate_rank_critic_memory,
    estimate_rank_frozen_bytes,
    estimate_rank_lora_memory,
    estimate_rank_memory,
    estimate_single_peak,
)
from miles.launch.plan.memory import estimate_memory
from miles.launch.read_config import read
from miles.models.accounting import params
from miles.models.accounting.known_models import load_known_models
from miles.models.accounting.params import gradient_bytes, optimizer_bytes, parameter_count, weight_bytes
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config
from miles.models.lora.targets import LoraSpec, select_targets
from miles.models.spec import AttentionSpec, DecoderSpec, MlpSpec, MoeSpec
from miles.precision.formats import FORMATS, QuantizationSpec
from miles.train.config import TrainConfig
from miles.train.optim import quantized_state


def small(name: str) -> DecoderSpec:
    """A published model's shape in little, with sizes that no number of ranks divides."""
    spec = spec_from_config(load_known_models()[name])
    layer = spec.layers[-1]
    assert isinstance(layer.mixer, AttentionSpec)
    mixer = replace(layer.mixer, num_heads=4, num_kv_heads=2, head_dim=24)
    if isinstance(layer.ffn, MoeSpec):
        ffn = replace(layer.ffn, num_experts=8, experts_per_token=2, size=40)
    else:
        assert isinstance(layer.ffn, MlpSpec)
        ffn = replace(layer.ffn, size=150)
    layers = (replace(layer, mixer=mixer, ffn=ffn),) * 2
    return replace(spec, layers=layers, hidden_size=72, vocab_size=211, max_positions=64)


DENSE, MIXED = "Qwen3-0.6B", "Qwen3-30B-A3B"
LAYOUTS = {
    (DENSE, "float32", "float32"): [
        ParallelDims(world=4, shard=4),
        ParallelDims(world=4, replicate=2, shard=2),
        ParallelDims(world=4, shard=2, tensor=2),
        ParallelDims(world=4, shard=2, context=2),
        ParallelDims(world=4, tensor=4, sequence=True),
    ],
    (DENSE, "float32", "int8"): [ParallelDims(world=4, shard=2, tensor=2)],
    (DENSE, "bfloat16", "bfloat16"): [ParallelDims(world=4, tensor=4)],
    (MIXED, "float32", "float32"): [
        ParallelDims(world=4, shard=4, expert=4),
        ParallelDims(world=4, shard=2, context=2, expert=2),
        ParallelDims(world=4, shard=2, tensor=2, expert=2),
    ],
}


KINDS = ("deepseek v3", "deepseek v3.2", "deepseek v4", "hybrid qwen3 next", "gemma4", "qwen2 moe")
"""Shared experts, latent attention, indexers, tables of experts, recurrent layers and fixed scales."""


def of_kind(kind: str) -> DecoderSpec:
    return spec_from_config(config_of_kind(kind))


def list_held_cases() -> list[HeldCase]:
    cases = [
        HeldCase(spec=small(name), layout=layout, dtype=dtype, moments=moments)
        for (name, dtype, moments), layouts in LAYOUTS.items()
        for layout in layouts
    ]
    tensor, shards = ParallelDims(world=4, shard=2, tensor=2), ParallelDims(world=4, shard=4)
    experts = ParallelDims(world=4, replicate=2, shard=2, expert=2)
    for kind in KINDS:
        spec = of_kind(kind)
        layouts = (tensor, experts if spec.moe is not None else shards)
        cases += [HeldCase(spec=spec, layout=layout, dtype="bfloat16") for layout in layouts]
    for spec in (small(DENSE), of_kind("deepseek v3")):
        lora = LoraSpec(rank=4, alpha=8.0, targets=select_targets(spec, None, None))
        for role in ("frozen", "critic", "adapters"):
            own = lora if role == "adapters" else None
            cases.append(HeldCase(spec=spec, layout=tensor, dtype="bfloat16", role=role, lora=own))
    cases.append(HeldCase(spec=of_kind("deepseek v3"), layout=ParallelDims(world=4, replicate=4), optimizer="muon"))
    cases.append(HeldCase(spec=replace(small(DENSE), tie_embeddings=False), layout=shards, role="critic"))
    return cases


def plan_held(case: HeldCase) -> tuple[int, int, int]:
    spec, layout, dtype, moments = case.spec, case.layout, case.dtype, case.moments
    if case.role == "frozen":
        return estimate_rank_frozen_bytes(spec, layout, dtype), 0, 0
    if case.lora is not None:
        held = estimate_rank_lora_memory(spec, layout, dtype, case.lora, moments=moments)
        return held.weights + held.base + held.adapters, held.gradients, held.optimizer
    estimate = estimate_rank_critic_memory if case.role == "critic" else estimate_rank_memory
    plan = estimate(spec, layout, dtype, moments=moments, optimizer=case.optimizer)
    return plan.weights, plan.gradients, plan.optimizer


def test_ranks_hold_what_the_plan_says_to_the_byte():
    cases = list_held_cases()
    reported = ranks(4, held, cases)
    wrong: list[tuple[object, ...]] = []
    for number, case in enumerate(cases):
        found = tuple(max(of[number][i] for of in reported) for i in range(3))
        if plan_held(case) != found:
            wrong.append((case.spec.family, case.layout, case.dtype, case.role, plan_held(case), found))
    assert not wrong


def test_codes_are_counted_as_they_are_made():
    assert params._QUANTIZED_BLOCK == quantized_state.BLOCK
    assert params._QUANTIZED_SMALLEST == quantized_state.MIN_QUANTIZED_NUMEL


@pytest.mark.parametrize("config", [DENSE_CONFIG, MOE_CONFIG], ids=["dense", "moe"])
@pytest.mark.parametrize(("dtype", "moments"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "int8")])
@pytest.mark.parametrize("name", ["fp8", "int4_g32"])
def test_a_trainer_in_low_precision_holds_what_the_plan_says(config, dtype, moments, name):
    config = config | {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32}
    quantization = QuantizationSpec(format=FORMATS[name], packed=False)
    spec = replace(spec_from_config(config), quantization=quantization)
    decoder = hf.init_random(spec, seed=0, device="cpu", dtype=getattr(torch, dtype))
    trainer = worker(LocalModel(decoder, config=config), train={"optimizer_state_dtype": moments})
    step(trainer, ragged())
    plan = estimate_rank_memory(spec, ParallelDims(), dtype, moments=moments)
    assert sum(parameter.nbytes for parameter in decoder.parameters()) == plan.weights
    assert trainer._optimizer.bytes == plan.optimizer


# Peaks of a trainer on an H200 in GiB (docs/performance.md): model, layers recomputed, optimizer state, format.
MEASURED = {
    ("Qwen3-4B", False, "float32", None): 101.3,
    ("Qwen3-4B", False, "float32", "fp8"): 99.0,
    ("Qwen3-8B", True, "int8", "fp8"): 98.6,
}


@pytest.mark.parametrize(("case", "gib"), MEASURED.items(), ids=str)
def test_the_plan_is_within_three_percent_of_a_measured_peak(case, gib):
    model, recomputed, moments, name = case
    spec = spec_from_config(load_known_models()[model])
    if name is not None:
        spec = replace(spec, quantization=QuantizationSpec(format=FORMATS[name], packed=False, backward="e4m3"))
    train = TrainConfig(gradient_checkpointing=recomputed)
    plan = estimate_rank_memory(spec, ParallelDims(), "bfloat16", moments=moments)
    activations = estimate_rank_activations(spec, ParallelDims(), "bfloat16", 8192, train, fused=True)
    assert (plan.total + activations) / 2**30 == pytest.approx(gib, rel=0.03)


def single_peak(model: str, tokens: int, *, checkpointing: bool) -> tuple[int, int, RankMemory]:
    """Activations and gradients of a step of one micro-batch, and what is held."""
    spec = spec_from_config(load_known_models()[model])
    held, train = (
        estimate_rank_memory(spec, ParallelDims(), "bfloat16"),
        TrainConfig(gradient_checkpointing=checkpointing),
    )
    peak = estimate_single_peak(spec, held.gradients, "bfloat16", tokens, train, fused=True)
    return peak.activations, peak.gradients, held


def test_a_step_of_one_long_sequence_is_within_three_percent_of_the_measured_peak():
    activations, gradients, held = single_peak("Qwen3-4B", 131072, checkpointing=True)
    assert (held.weights + held.optimizer + activations + gradients) / 2**30 == pytest.approx(94.4, rel=0.03)
    # By hand, in values of a token: the inputs of 36 layers; what the last one saves (its input, which is one of these,
    # three other tensors of that width, the projection and attention's inputs, attention's output, MLP); at the MLP's
    # activation the gradients of its input and output, without the output itself, and that of the residual stream.
    width, queries, keys, inner = 2560, 4096, 1024, 9728
    values = 36 * width + 3 * width + 2 * (queries + 2 * keys) + queries + 3 * inner + 2 * inner + width
    statistics = 2 * 4 + 32 * 4
    tied_head = 2 * 151936 * width
    rope_table = 40960 * 2 * 128 * 2  # sines and cosines of all positions
    assert (activations, gradients) == (131072 * (2 * values + statistics) + tied_head + rope_table, 0)


def test_gradients_of_one_micro_batch_come_as_activations_go():
    activations, gradients, held = single_peak("Qwen3-30B-A3B", 1024, checkpointing=True)
    several = estimate_rank_activations(
        spec_from_config(load_known_models()["Qwen3-30B-A3B"]),
        ParallelDims(),
        "bfloat16",
        1024,
        TrainConfig(gradient_checkpointing=True),
        fused=True,
    )
    # Of few tokens the peak is at the end, with nearly all gradients and nearly no activations.
    assert 0.99 * held.gradients < gradients <= held.gradients and activations < several
    activations, gradients, held = single_peak("Qwen3-4B", 8192, checkpointing=False)
    spec = spec_from_config(load_known_models()["Qwen3-4B"])
    assert gradients == 0 and activations == estimate_rank_activations(
        spec, ParallelDims(), "bfloat16", 8192, TrainConfig(), fused=True
    )


@pytest.mark.parametrize(
    ("flags", "is_single"),
    [
        ("", True),
        ("--global-batch-size 4", False),
        ("--max-tokens-per-gpu 1023", False),
        ("--micro-batch-size 1 --no-use-dynamic-batch-size", False),
        ("--lora-rank 4", False),
        ("--actor-num-gpus-per-node 2", False),
        ("--custom-generate-function-path multi_turn --apply-chat-template", False),
    ],
)
def test_gradients_and_activations_add_up_unless_a_step_is_one_micro_batch_for_certain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, is_single: bool
):
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line = "good.toml --global-batch-size 2 --rollout-max-context-len 512 --max-tokens-per-gpu 1024 " + flags
    config, plan, _ = read("plan", line.split())
    spec = spec_from_config(read_config("model"))
    shares = {share.name: share for share in estimate_memory(config, plan, spec)}
    assert ("widest" in shares["gradients"].note) == is_single
    assert ("all of a step" in shares["activations"].note) == is_single


def test_the_plan_of_adapters_of_experts_is_within_three_percent_of_a_measured_peak():
    plan = estimate_phases(build_case("Qwen3-30B-A3B", "experts", tiny=False))
    assert plan["plan_train_gib"] == pytest.approx(78.9, rel=0.03)
    assert plan["plan_rollout_gib"] == pytest.approx(97.4, rel=0.03)


def test_one_rank_alone_holds_what_it_always_did():
    for name in (DENSE, MIXED, "DeepSeek-V3", "Gemma-2-2B"):
        spec = spec_from_config(load_known_models()[name])
        for dtype in ("bfloat16", "float32"):
            plan = estimate_rank_memory(spec, ParallelDims(), dtype)
            assert plan.weights == weight_bytes(spec, dtype) and plan.gathered == 0
            assert plan.gradients == gradient_bytes(spec, dtype)
            assert plan.optimizer == optimizer_bytes(spec, dtype)


@pytest.mark.parametrize("name", [DENSE, MIXED, "GLM-4.5-Air", "Llama-3.3-70B"])
def test_all_ranks_together_hold_little_more_than_one_alone(name):
    spec = spec_from_config(load_known_models()[name])
    moe = spec.moe is not None
    for layout in (
        ParallelDims(world=8, shard=8, expert=8 if moe else 1),
        ParallelDims(world=16, shard=4, tensor=4),
        ParallelDims(world=16, replicate=2, shard=8, expert=2 if moe else 1),
    ):
        plan = estimate_rank_memory(spec, layout, "bfloat16")
        once = 4 * parameter_count(spec) * layout.replicate
        assert once <= plan.weights * layout.world < 1.03 * once
        # Correction biases are weights that have no gradient.
        assert plan.optimizer == 2 * plan.gradients and 0.999 * plan.weights < plan.gradients <= plan.weights
        assert estimate_rank_frozen_bytes(spec, layout, "bfloat16") * 2 == pytest.approx(plan.weights, rel=1e-5)
        assert 0 < plan.gathered < weight_bytes(spec, "float32")


def test_moments_of_fewer_bits_take_less():
    spec, layout = spec_from_config(load_known_models()[DENSE]), ParallelDims(world=2, shard=2)
    forms = [
        estimate_rank_memory(spec, layout, "bfloat16", moments=form).optimizer
        for form in ("float32", "bfloat16", "int8")
    ]
    assert forms[0] > 1.99 * forms[1] > 3.9 * forms[2]
    muon = estimate_rank_memory(spec, layout, "bfloat16", optimizer="muon").optimizer
    assert forms[0] / 2 < muon < forms[0]


def test_what_is_shared_or_computed_again_is_not_kept():
    spec = spec_from_config(load_known_models()["Qwen3-4B"])

    def kept(layout: ParallelDims, **knobs) -> int:
        return estimate_rank_activations(spec, layout, "bfloat16", 16384, TrainConfig(**knobs), fused=True)

    alone = kept(ParallelDims())
    assert kept(ParallelDims(world=2, shard=2)) == alone
    halves = (
        kept(ParallelDims(world=2, context=2)),
        kept(ParallelDims(world=2, tensor=2)),
        kept(ParallelDims(world=2, tensor=2, sequence=True)),
    )
    assert all(alone / 2.05 < half < alone for half in halves) and halves[2] < halves[1]
    full = kept(ParallelDims(), gradient_checkpointing=True)
    selective = kept(ParallelDims(), recompute_granularity="selective")
    some = kept(ParallelDims(), recompute_granularity="full", recompute_method="block", recompute_num_layers=18)
    assert full == kept(ParallelDims(), recompute_granularity="full") < selective < 0.8 * alone
    assert full < some < alone


def test_a_plan_shows_one_ranks_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    line = "good.toml --actor-num-gpus-per-node 4 --tensor-model-parallel-size 2 --optimizer-state-dtype int8"
    config, plan, _ = read("plan", line.split())
    spec = spec_from_config(read_config("model"))
    shares = {share.name: share for share in estimate_memory(config, plan, spec)}
    held = estimate_rank_memory(spec, plan.layout, plan.dtype, moments="int8")
    assert plan.layout == ParallelDims(world=4, shard=2, tensor=2)
    assert shares["weights"].bytes == held.weights and "sharded 4 ways" in shares["weights"].note
    assert shares["optimizer"].bytes == held.optimizer and shares["optimizer"].note.endswith("two moments in int8")
    assert shares["gathered"].bytes == held.gathered
