"""Adapters beside a packed base on Megatron's ranks against those of the embedded trainer in one process."""

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.megatron import cases, packed_cases
from tests.backends.megatron.test_model import AGAIN, INTERLEAVED, Case, algo_of, layout
from tests.pool import ranks

from miles.backends.megatron.module_choice import list_adapted_parts
from miles.core.errors import UsageError
from miles.models.checkpoint import hf

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

PARTS = "all-linear,experts"
TENSOR = {"tensor": 2, "sequence": True}
EXPERTS = {"shard": 2, "expert": 2}
DENSE, MOE, MLA, BLOCKS = "wide qwen3", "wide qwen3_moe", "wide deepseek_v3", "qwen3 of blocks"
ENDS: dict[str, Any] = {"layers_at_start": 1, "layers_at_end": 1}
CASES: list[tuple[str, Case, str | None, dict[str, Any]]] = [
    ("int4_g32", Case(DENSE, {}), None, {}),
    ("int4_g32", Case(DENSE, TENSOR), None, {}),
    ("int4_g32_asym", Case(DENSE, {"tensor": 2}), None, {}),
    ("int4_g32", Case(DENSE, TENSOR, AGAIN), None, {}),
    ("int4_g32", Case(DENSE, {"pipeline": 2}, INTERLEAVED), None, {}),
    ("int8_g32", Case(DENSE, {"tensor": 2, "pipeline": 2, "sequence": True}), None, {}),
    ("mxfp4", Case(DENSE, TENSOR), "q_proj,down_proj", {}),
    ("nvfp4", Case(DENSE, {"pipeline": 2}), None, {}),
    ("int8", Case(DENSE, {"context": 2}), None, {}),
    ("mxfp8", Case(DENSE, {"pipeline": 2}), None, {}),
    ("fp8_channel", Case(DENSE, {"pipeline": 2, "shard": 2}), None, {}),
    ("fp8_tensor", Case(DENSE, {"shard": 2}), None, {}),
    ("fp8_pow2", Case(DENSE, {"pipeline": 2}), None, ENDS),
    ("fp8", Case(BLOCKS, {"tensor": 2}), None, {}),
    ("fp8", Case(BLOCKS, TENSOR), None, {"tensor_parallel_size": 2}),
    ("int4_g32", Case(MOE, EXPERTS), PARTS, {}),
    ("int4_g32", Case(MOE, TENSOR), PARTS, {}),
    ("nvfp4", Case(MOE, EXPERTS), PARTS, {}),
    ("fp8", Case(MOE, EXPERTS), PARTS, {}),
    ("int4_g32", Case(MOE, TENSOR), "attn", {"experts_only": True}),
    ("mxfp4", Case(MOE, {"context": 2, "expert": 2}), PARTS, {}),
    ("int4_g32", Case(MLA, TENSOR), PARTS, {}),
    ("int4_g32_asym", Case(MLA, EXPERTS), PARTS, {}),
    ("fp8", Case("qwen3_next", {"pipeline": 2}), PARTS, {}),
    ("int4_g32", Case(BLOCKS, {"tensor": 2, "pipeline": 2}), "all-linear,lm_head", {}),
]


def prepare(folder: Path, precision: str, kind: str, modules: str | None, which: dict[str, Any]) -> tuple[Any, ...]:
    """The folder of a model, its packed spec, samples, and adapters."""
    cases.written(folder, kind)
    spec = packed_cases.pack_spec(folder, precision, **which)
    return folder, spec, cases.samples(kind), algo_of(kind), cases.lora_of(spec, modules)


def have_equal_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Also of FP8, which torch does not compare."""
    one, two = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, two))
    return torch.equal(one, two)


@pytest.mark.parametrize(("precision", "case", "modules", "which"), CASES, ids=str)
def test_a_step_beside_a_packed_base_is_the_step_of_one_process(
    tmp_path: Path, precision: str, case: Case, modules: str | None, which: dict[str, Any]
):
    folder, spec, batch, algo, lora = prepare(tmp_path / "model", precision, case.kind, modules, which)
    wanted, where = packed_cases.step_alone(folder, spec, batch, algo, lora), layout(case.sizes)
    packed = {name for name, tensor in wanted["after"].items() if not tensor.is_floating_point() or "_scale" in name}
    assert packed
    for found in ranks(where.world, packed_cases.step_shared, folder, spec, where, case.flags, batch, algo, lora):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert found["grads"].keys() == {
            name for name in wanted["after"] if name.endswith(("lora_A.weight", "lora_B.weight"))
        }
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)
        base = wanted["after"].keys() - found["grads"].keys()
        assert all(have_equal_bits(found["after"][name], wanted["after"][name]) for name in base)
        factors = {name: found["after"][name] for name in found["grads"]}
        assert not cases.apart(factors, {name: wanted["after"][name] for name in factors}, 1e-4)


def test_the_reference_is_the_packed_base_with_the_adapters_off(tmp_path: Path):
    folder, spec, batch, algo, lora = prepare(tmp_path / "model", "int4_g32", DENSE, None, {})
    algo = algo | {"use_kl_loss": True, "kl_loss_coef": 0.5}
    wanted = packed_cases.step_alone(folder, spec, batch, algo, lora, True)
    assert abs(wanted["metrics"]["kl"]) > 1e-3
    for found in ranks(2, packed_cases.step_shared, folder, spec, layout(TENSOR), (), batch, algo, lora, None, True):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)


@pytest.mark.parametrize(("kind", "sizes"), [(DENSE, TENSOR), (DENSE, {"pipeline": 2}), (MOE, EXPERTS)], ids=str)
def test_a_checkpoint_is_continued_by_one_process_of_the_embedded_trainer(
    tmp_path: Path, kind: str, sizes: dict[str, Any]
):
    modules = PARTS if kind == MOE else None
    folder, spec, batch, algo, lora = prepare(tmp_path / "model", "int4_g32", kind, modules, {})
    kept = tmp_path / "kept"
    kept.mkdir()
    ranks(2, packed_cases.step_shared, folder, spec, layout(sizes), (), batch, algo, lora, kept)
    own = packed_cases.step_alone(folder, spec, batch, algo, lora)["trainer"]
    heir = cases.trainer_of(
        packed_cases.attach(packed_cases.load_alone(folder, spec), folder, lora), algo, cases.SINGLE_RANK
    )
    asyncio.run(heir.load(kept))
    assert heir.version == own.version
    mine, theirs = heir.adapters(), own.adapters()
    assert mine is not None and theirs is not None
    assert not cases.apart(mine.parameters, theirs.parameters, 1e-4)
    # The base, dequantized, plus the adapters.
    read = hf.load(kept, device="cpu", dtype=torch.float32).requires_grad_(False)
    (tmp_path / "own").mkdir()
    asyncio.run(own.save(tmp_path / "own"))
    merged = hf.load(tmp_path / "own", device="cpu", dtype=torch.float32).requires_grad_(False)
    assert not cases.apart(dict(read.named_parameters()), dict(merged.named_parameters()), 1e-4)


@pytest.mark.parametrize(
    ("precision", "case", "flags", "wanted"),
    [
        ("int8", Case(DENSE, TENSOR), {}, "blocks of all columns that 2 ranks would divide; lower --tensor-model"),
        ("fp8", Case("qwen3 one key", {"tensor": 2}), {}, "has 1 key-value heads, which cannot be divided evenly"),
        ("int4_g32", Case(DENSE, {}), {"bias_activation_fusion": True}, "--megatron-bias-activation-fusion is about"),
    ],
)
def test_what_ranks_cannot_share_is_refused_in_a_sentence(
    tmp_path: Path, precision: str, case: Case, flags: dict[str, Any], wanted: str
):
    from miles.backends.megatron.transformer_config import build_transformer_config

    _, spec, _, _, lora = prepare(tmp_path / "model", precision, case.kind, None, {})
    how: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    with pytest.raises(UsageError, match=wanted) as refused:
        build_transformer_config(spec, layout(case.sizes), flags, **how, adapted=list_adapted_parts(spec, lora))
    assert str(refused.value).count(". ") == 0
