"""Megatron's modules with batch-invariant layers: bitwise the log-probs of the engine, in every parallel layout."""

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.backends.megatron import cases
from tests.backends.megatron.exact_ranks import exact_step, hand_over, step_of
from tests.backends.megatron.test_model import AGAIN, DISTRIBUTED_OPTIMIZER, INTERLEAVED, Case, layout
from tests.parity.planes import TEMPERATURE, ask, decoder_of, requests_of, samples_of
from tests.pool import ranks

from miles.backends.fsdp.local_model import LocalModel
from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.engine import NativeEngine
from miles.cluster.executor import InlineExecutor
from miles.core.errors import UsageError
from miles.core.types import Sample, Version
from miles.kernels.numerics import BATCH_INVARIANT, FAST, Numerics
from miles.models.checkpoint import hf
from miles.models.decoder import Decoder
from miles.models.families import spec_from_config
from miles.sync.manifest import build_manifest
from miles.train.dp_group import SINGLE_RANK

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

LARGER = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 80}
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "mlp")
CPU = torch.device("cpu")

CASES = [
    Case("qwen3", {}),
    Case("qwen3", {"tensor": 2}, SELECTIVE),
    Case("qwen3", {"tensor": 2, "sequence": True}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3", {"pipeline": 2}, ("--num-layers-in-first-pipeline-stage", "1")),
    Case("qwen3", {"pipeline": 2}, INTERLEAVED),
    Case("qwen3", {"context": 2}, AGAIN),
    Case("llama", {"tensor": 2}),
    Case("qwen2", {"tensor": 2, "sequence": True}),
    Case("qwen3_moe", {}),
    Case("qwen3_moe", {"shard": 2, "expert": 2}),
    Case("qwen3_moe", {"tensor": 2, "sequence": True}),
    Case("qwen2_moe", {"tensor": 2, "sequence": True}),
    Case("deepseek_v3", {"shard": 2, "expert": 2}),
    Case("deepseek_v3", {"tensor": 2, "sequence": True}),
    Case("qwen3_moe", {"tensor": 2, "sequence": True, "context": 2, "expert": 2}),
]
QUICK = [case for case in CASES if case.kind in ("qwen3_moe", "deepseek_v3") or case.sizes == {"tensor": 2}]


def write_model(folder: Path, kind: str, dtype: torch.dtype) -> Decoder:
    """A small model of random weights, in a Hugging Face folder."""
    config = cases.KINDS[kind] | LARGER
    decoder = decoder_of(spec_from_config(config), dtype)
    hf.export(decoder, folder, config=config)
    return decoder


def sample_from(decoder: Decoder, tensor_ranks: int = 1) -> list[Sample]:
    """What an engine of so many tensor-parallel ranks writes."""
    asked = requests_of(decoder.spec.vocab_size, groups=2, each=3, new=6)
    engine = NativeEngine(
        decoder.spec,
        device=CPU,
        dtype=decoder.embedding.weight.dtype,
        config=NativeConfig(engine_prefill_chunk=9, engine_kv_tokens=512),
        run=InlineExecutor(),
        decode=None,
        devices=[CPU] * tensor_ranks,
        numerics=BATCH_INVARIANT,
    )
    try:
        tensors = dict(decoder.named_parameters())
        engine.begin(build_manifest(Version(number=0), tensors))
        for name, tensor in tensors.items():
            engine.receive(name, tensor)
        engine.verify()
        engine.commit()
        return samples_of(asked, ask(engine, asked))
    finally:
        asyncio.run(engine.close())


def check_parity(metrics: dict[str, Any]) -> None:
    assert metrics["parity_max_abs"] == 0.0 and metrics["parity_tokens"] == 36


@pytest.mark.parametrize("case", CASES, ids=str)
def test_log_probs_are_the_engines_and_gradients_those_of_the_fsdp_trainer(tmp_path: Path, case: Case):
    decoder = write_model(tmp_path, case.kind, torch.float32)
    samples = sample_from(decoder, case.sizes.get("tensor", 1))
    # Another number of tensor-parallel ranks rounds differently: fast numerics do not check that.
    fast = decoder_of(decoder.spec, torch.float32, numerics=FAST)
    wanted = step_of(LocalModel(fast), samples, SINGLE_RANK, {}, TEMPERATURE)
    where = layout(case.sizes)
    for found in ranks(where.world, exact_step, tmp_path, where, case.flags, samples, {}, torch.float32, TEMPERATURE):
        check_parity(found["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], 1e-3)


@pytest.mark.parametrize(
    "case", [case if case in QUICK else pytest.param(case, marks=pytest.mark.extended) for case in CASES], ids=str
)
def test_log_probs_in_half_precision_are_the_engines_too(tmp_path: Path, case: Case):
    decoder = write_model(tmp_path, case.kind, torch.bfloat16)
    samples = sample_from(decoder, case.sizes.get("tensor", 1))
    where = layout(case.sizes)
    found = ranks(where.world, exact_step, tmp_path, where, case.flags, samples, {}, torch.bfloat16, TEMPERATURE)
    for each in found:
        check_parity(each["metrics"])
    if where.tensor == 1:  # then one process computes the same bits
        wanted = step_of(LocalModel(decoder), samples, SINGLE_RANK, {}, TEMPERATURE)
        assert not cases.apart(found[0]["grads"], wanted["grads"], 0.1)


def test_fast_layers_would_not_pass(tmp_path: Path):
    decoder = write_model(tmp_path, "qwen3_moe", torch.bfloat16)
    given = (layout({}), (), sample_from(decoder), {}, torch.bfloat16, TEMPERATURE, FAST)
    (found,) = ranks(1, exact_step, tmp_path, *given)
    assert found["metrics"]["parity_max_abs"] > 0.0


def test_a_weight_of_one_rank_that_is_off_stops_the_step(tmp_path: Path):
    samples = sample_from(write_model(tmp_path / "engine", "qwen3", torch.float32), 2)
    decoder = write_model(tmp_path / "trainer", "qwen3", torch.float32)
    with torch.no_grad():
        weight = decoder.get_parameter("layers.2.attention.output.weight")
        weight[3, -1] = torch.nextafter(weight[3, -1], weight.new_tensor(torch.inf))
    hf.export(decoder, tmp_path / "trainer", config=cases.KINDS["qwen3"] | LARGER)
    given = (layout({"tensor": 2}), (), samples, {}, torch.float32, TEMPERATURE)
    with pytest.raises(AssertionError, match="--parity exact requires equal log-probs"):
        ranks(2, exact_step, tmp_path / "trainer", *given)


@pytest.mark.parametrize(
    ("kind", "sizes", "flags", "wanted"),
    [
        ("qwen3 one key", {"tensor": 2}, {}, "a number of key-value heads that is a multiple"),
        ("qwen3_moe", {"tensor": 2, "sequence": True, "expert_tensor": 1}, {}, "remove --expert-tensor-parallel-size"),
        ("qwen3", {}, {"fp32_residual_connection": True}, "--megatron-fp32-residual-connection is about"),
        ("qwen3_moe", {}, {"recompute_modules": ["moe_act"]}, "--megatron-recompute-modules moe_act"),
    ],
)
def test_what_has_no_batch_invariant_layers_is_refused_in_a_sentence(
    kind: str, sizes: dict[str, Any], flags: dict[str, Any], wanted: str
):
    from miles.backends.megatron.transformer_config import build_transformer_config

    spec, how = spec_from_config(cases.KINDS[kind]), {"dtype": torch.float32, "device": CPU}
    build_transformer_config(spec, layout(sizes), flags if "recompute_modules" not in flags else {}, **how)
    with pytest.raises(UsageError, match=wanted) as refused:
        build_transformer_config(spec, layout(sizes), flags, **how, numerics=BATCH_INVARIANT)
    assert str(refused.value).count(". ") == 0


@pytest.mark.parametrize("numerics", [(BATCH_INVARIANT, FAST), (FAST, BATCH_INVARIANT)], ids=["written", "read"])
def test_megatrons_own_checkpoints_are_the_same_with_either_layers(tmp_path: Path, numerics: tuple[Numerics, Numerics]):
    one, other = (cases.written(tmp_path / str(seed), "deepseek_v3", seed) for seed in (0, 1))
    where = layout({"tensor": 2, "sequence": True})
    ranks(2, hand_over, one, other, where, numerics, tmp_path)
    found, wanted = (load_file(folder / "model.safetensors") for folder in (tmp_path / "exported", one))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
