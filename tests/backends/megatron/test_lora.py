"""Adapters on Megatron's parallel linear layers against those of the embedded trainer in one process."""

import asyncio
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.backends.megatron import cases
from tests.backends.megatron.test_model import AGAIN, INTERLEAVED, Case, algo_of, layout
from tests.pool import ranks

from miles.backends.fsdp.local_model import LocalModel
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config

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
]


def wanted_modules(kind: str) -> str | None:
    return "attn" if kind in cases.ROUTED else None


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_of_adapters_in_any_layout_is_the_step_of_one_process(tmp_path: Path, case: Case):
    folder, batch, algo = cases.written(tmp_path / "model", case.kind), cases.samples(case.kind), algo_of(case.kind)
    modules, where = wanted_modules(case.kind), layout(case.sizes)
    wanted = cases.alone_adapted(folder, batch, algo, modules)
    for found in ranks(where.world, cases.shared_adapted, folder, where, case.flags, batch, algo, modules, None):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert found["grads"].keys() == {n for n in wanted["after"] if ".lora_" in n}
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)
        assert not cases.apart(found["after"], wanted["after"], 1e-4)


def test_the_reference_is_the_base_with_the_adapters_off(tmp_path: Path):
    folder, batch = cases.written(tmp_path / "model", "qwen3"), cases.samples("qwen3")
    algo = {"use_kl_loss": True, "kl_loss_coef": 0.5}
    wanted = cases.alone_adapted(folder, batch, algo, None, True)
    assert abs(wanted["metrics"]["kl"]) > 1e-3
    where = layout({"tensor": 2, "sequence": True})
    for found in ranks(2, cases.shared_adapted, folder, where, (), batch, algo, None, None, True):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)


@pytest.mark.parametrize("sizes", [{"tensor": 2, "sequence": True}, {"pipeline": 2}], ids=str)
def test_a_checkpoint_is_continued_by_one_process_of_the_embedded_trainer(tmp_path: Path, sizes: dict[str, int]):
    folder, batch = cases.written(tmp_path / "model", "qwen3"), cases.samples("qwen3")
    kept = tmp_path / "kept"
    kept.mkdir()
    ranks(2, cases.shared_adapted, folder, layout(sizes), (), batch, {}, None, kept)
    own = cases.alone_adapted(folder, batch, {}, None)["trainer"]
    decoder = hf.load(folder, device="cpu", dtype=torch.float32)
    base = LocalModel(decoder, config=read_config(folder), frozen=True)
    heir = cases.trainer_of(cases.adapted(base, folder), {}, cases.SINGLE_RANK)
    asyncio.run(heir.load(kept))
    assert heir.version == own.version
    assert not cases.apart(dict(heir.weights()), dict(own.weights()), 1e-4)
    assert not cases.apart(heir.adapters().parameters, own.adapters().parameters, 1e-4)
    assert (kept / "adapter" / "adapter_config.json").exists()
