"""Adapters on Megatron's parallel linear layers against those of the embedded trainer in one process."""

import asyncio
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.megatron import cases
from tests.backends.megatron.test_model import AGAIN, DISTRIBUTED_OPTIMIZER, INTERLEAVED, Case, algo_of, layout
from tests.pool import ranks

from miles.backends.fsdp.local_model import LocalModel
from miles.core.types import Batch
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.families import spec_from_config
from miles.models.lora.targets import LoraSpec

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

CASES = [
    Case("qwen3", {}),
    Case("qwen3", {"tensor": 2}),
    Case("qwen3", {"tensor": 2, "sequence": True}),
    Case("qwen3", {"tensor": 2, "sequence": True}, AGAIN),
    Case("qwen3", {"pipeline": 2}),
    Case("qwen3", {"pipeline": 2}, INTERLEAVED),
    Case("qwen3", {"context": 2}),
    Case("qwen3", {"shard": 2}),
    Case("qwen3 one key", {"tensor": 2}),
    Case("llama", {"tensor": 2, "sequence": True}),
    Case("qwen3_moe", {"shard": 2, "expert": 2}),
    Case("qwen3_moe", {"tensor": 2, "sequence": True}),
    Case("qwen3", {"tensor": 2, "pipeline": 2, "sequence": True}),
    Case("qwen3", {}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3", {"shard": 2}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3", {"tensor": 2, "pipeline": 2, "sequence": True}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3_moe", {"shard": 2, "expert": 2}, DISTRIBUTED_OPTIMIZER),
]


def wanted_modules(kind: str) -> str | None:
    return "attn" if kind in cases.ROUTED else None


def lora_of(kind: str, modules: str | None = None, **form: Any) -> LoraSpec:
    return cases.lora_of(spec_from_config(cases.KINDS[kind]), modules, **form)


PARTS, HEAD = "all-linear,experts", "all-linear,lm_head"
ANY_MODULE: dict[str, tuple[Case, str | None, dict[str, Any]]] = {
    "MLA and experts": (Case("deepseek_v3", {}), PARTS, {}),
    "MLA and experts, tensor": (Case("deepseek_v3", {"tensor": 2, "sequence": True}), PARTS, {}),
    "MLA and experts, expert": (Case("deepseek_v3", {"shard": 2, "expert": 2}), PARTS, {}),
    "MLA and experts, pipeline": (Case("deepseek_v3", {"pipeline": 2}), PARTS, {}),
    "shared experts, context": (Case("qwen2_moe", {"context": 2}), None, {}),
    "experts that share factors": (Case("qwen3_moe", {"shard": 2, "expert": 2}), "experts", {"shared_outer": True}),
    "DoRA": (Case("qwen3", {"tensor": 2, "sequence": True}), None, {"use_dora": True}),
    "DoRA, no sequence": (Case("qwen3", {"tensor": 2}), None, {"use_dora": True}),
    "DoRA, one rank": (Case("qwen3", {}), None, {"use_dora": True}),
    "DoRA, biases": (Case("llama", {"tensor": 2}), None, {"use_dora": True}),
    "DoRA of experts": (Case("qwen3_moe", {"tensor": 2, "sequence": True}), PARTS, {"use_dora": True}),
    "DoRA, tensor and pipeline": (
        Case("qwen3", {"tensor": 2, "pipeline": 2, "sequence": True}),
        None,
        {"use_dora": True},
    ),
    "dropout": (Case("qwen3", {}), None, {"dropout": 0.3}),
    "dropout, tensor": (Case("qwen3", {"tensor": 2, "sequence": True}), None, {"dropout": 0.3}),
    "dropout, pipeline": (Case("qwen3", {"pipeline": 2}), None, {"dropout": 0.3}),
    "unmerged": (Case("qwen3", {"tensor": 2, "sequence": True}), None, {"unmerged": True}),
    "unmerged experts": (Case("deepseek_v3", {"shard": 2, "expert": 2}), PARTS, {"unmerged": True}),
    "unmerged, pipeline": (Case("qwen3", {"pipeline": 2}), None, {"unmerged": True}),
    "DoRA, shared moments": (Case("qwen3", {"shard": 2}, DISTRIBUTED_OPTIMIZER), None, {"use_dora": True}),
    "output layer": (Case("qwen3 untied", {}), HEAD, {}),
    "output layer, tensor": (Case("qwen3 untied", {"tensor": 2}), HEAD, {}),
    "output layer, sequence": (Case("llama", {"tensor": 2, "sequence": True}), HEAD, {}),
    "output layer, pipeline": (Case("qwen3 untied", {"pipeline": 2}), HEAD, {}),
    "output layer, interleaved": (Case("qwen3 untied", {"pipeline": 2}, INTERLEAVED), HEAD, {}),
    "output layer, context": (Case("qwen3 untied", {"context": 2}), HEAD, {}),
    "output layer, data and experts": (Case("qwen3_moe", {"shard": 2, "expert": 2}), HEAD, {}),
    "output layer alone": (Case("qwen3 untied", {"tensor": 2, "pipeline": 2}), "lm_head", {}),
    "output layer, unmerged": (
        Case("qwen3 untied", {"tensor": 2, "pipeline": 2, "sequence": True}),
        HEAD,
        {"unmerged": True},
    ),
}
"""Adapters that Megatron's modules cannot have, whose parts are the decoder's modules, and of the output layer."""


@pytest.mark.parametrize("name", ANY_MODULE)
def test_a_step_of_adapters_of_any_module_and_form_is_the_step_of_one_process(tmp_path: Path, name: str):
    case, modules, form = ANY_MODULE[name]
    folder, batch, algo = cases.written(tmp_path / "model", case.kind), cases.samples(case.kind), algo_of(case.kind)
    lora, where = lora_of(case.kind, modules, **form), layout(case.sizes)
    wanted = cases.alone_adapted(folder, batch, algo, lora)
    for found in ranks(where.world, cases.shared_adapted, folder, where, case.flags, batch, algo, lora, None):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)
        assert not cases.apart(found["after"], wanted["after"], 1e-4)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_of_adapters_in_any_layout_is_the_step_of_one_process(tmp_path: Path, case: Case):
    folder, batch, algo = cases.written(tmp_path / "model", case.kind), cases.samples(case.kind), algo_of(case.kind)
    lora, where = lora_of(case.kind, wanted_modules(case.kind)), layout(case.sizes)
    wanted = cases.alone_adapted(folder, batch, algo, lora)
    for found in ranks(where.world, cases.shared_adapted, folder, where, case.flags, batch, algo, lora, None):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert found["grads"].keys() == {n for n in wanted["after"] if ".lora_" in n}
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)
        assert not cases.apart(found["after"], wanted["after"], 1e-4)


def test_the_reference_is_the_base_with_the_adapters_off(tmp_path: Path):
    folder, batch = cases.written(tmp_path / "model", "qwen3"), cases.samples("qwen3")
    algo = {"use_kl_loss": True, "kl_loss_coef": 0.5}
    lora = lora_of("qwen3")
    wanted = cases.alone_adapted(folder, batch, algo, lora, True)
    assert abs(wanted["metrics"]["kl"]) > 1e-3
    where = layout({"tensor": 2, "sequence": True})
    for found in ranks(2, cases.shared_adapted, folder, where, (), batch, algo, lora, None, True):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)


@pytest.mark.parametrize(
    ("sizes", "flags"),
    [({"tensor": 2, "sequence": True}, ()), ({"pipeline": 2}, ()), ({"shard": 2}, DISTRIBUTED_OPTIMIZER)],
    ids=str,
)
def test_a_checkpoint_is_continued_by_one_process_of_the_embedded_trainer(
    tmp_path: Path, sizes: dict[str, int], flags: tuple[str, ...]
):
    folder, batch, lora = cases.written(tmp_path / "model", "qwen3"), cases.samples("qwen3"), lora_of("qwen3")
    kept = tmp_path / "kept"
    kept.mkdir()
    ranks(2, cases.shared_adapted, folder, layout(sizes), flags, batch, {}, lora, kept)
    own = cases.alone_adapted(folder, batch, {}, lora)["trainer"]
    decoder = hf.load(folder, device="cpu", dtype=torch.float32)
    base = LocalModel(decoder, config=read_config(folder), frozen=True)
    heir = cases.trainer_of(cases.adapted(base, folder, lora), {}, cases.SINGLE_RANK)
    asyncio.run(heir.load(kept))
    assert heir.version == own.version
    assert not cases.apart(dict(heir.weights()), dict(own.weights()), 1e-4)
    assert not cases.apart(heir.adapters().parameters, own.adapters().parameters, 1e-4)
    assert (kept / "adapter" / "adapter_config.json").exists()
    for trainer in (own, heir):
        asyncio.run(trainer.step(Batch(step=1, samples=cases.samples("qwen3", 4), num_groups=1)))
    assert not cases.apart(heir.adapters().parameters, own.adapters().parameters, 1e-4)
