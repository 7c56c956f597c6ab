"""Several residual streams, inputs of each layer, shared keys and sparse attention in Megatron's layers, against one
process of the FSDP backend and against transformers.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.megatron import cases
from tests.backends.megatron.family_cases import BLOCKS, block_samples, family_samples, spec_of, write_family
from tests.backends.megatron.memory_cases import MemoryCase, hold_all
from tests.backends.megatron.test_decoder_modules import SELECTIVE, SPLIT, SPREAD, compare_step, compare_torch_dist
from tests.backends.megatron.test_model import AGAIN, DISTRIBUTED_OPTIMIZER, INTERLEAVED, Case, layout
from tests.backends.megatron.test_router import SEQ_AUX, Z, compare_grads
from tests.pool import ranks

from miles.backends.megatron.rank_memory import HeldModel, compute_rank_bytes, parse_memory_flags

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

BLOCK = ("--recompute-granularity", "full", "--recompute-method", "block", "--recompute-num-layers", "3")
FIRST = ("--num-layers-in-first-pipeline-stage", "1")
CASES = [
    Case("gemma3n", SPLIT, DISTRIBUTED_OPTIMIZER),
    Case("gemma3n", {"tensor": 2}, SELECTIVE),
    Case("gemma3n", {"context": 2}, AGAIN),
    Case("gemma3n", {}, BLOCK),
    Case("gemma3n untied, another stream active", {"pipeline": 2}, AGAIN),
    Case("gemma3n", {"pipeline": 2}, AGAIN),
    Case("gemma3n", SPLIT | {"pipeline": 2}, DISTRIBUTED_OPTIMIZER),
    Case("gemma3n", {"pipeline": 2}, INTERLEAVED),
    Case("gemma4 with per-layer inputs and shared keys", {"pipeline": 2}, FIRST),
    Case("gemma4 with per-layer inputs and shared keys", {"pipeline": 2, "context": 2}, (*FIRST, *AGAIN)),
    Case("gemma4 with per-layer inputs", {"pipeline": 2}, FIRST),
    Case("gemma4 with per-layer inputs", {"pipeline": 2}, (*FIRST, *DISTRIBUTED_OPTIMIZER, *AGAIN)),
    Case("gemma4 with per-layer inputs and shared keys", SPLIT),
    Case("gemma4 with per-layer inputs and shared keys", {"context": 2}, AGAIN),
    Case("hybrid glm 5.3 flash", SPLIT),
    Case("hybrid glm 5.3 flash", {"pipeline": 2}, AGAIN),
    Case("hybrid glm 5.3 flash", {"context": 2, "expert": 2}, SELECTIVE),
    Case("hybrid glm 5.3 flash shared choices, unbounded decay", SPREAD, DISTRIBUTED_OPTIMIZER),
    Case("hybrid glm 5.3 flash shared choices, unbounded decay", {"pipeline": 2}, FIRST),
    Case("deepseek v4", SPLIT),
    Case("deepseek v4", {"context": 2, "expert": 2}, SELECTIVE),
    Case("deepseek v4", {"pipeline": 2}, (*INTERLEAVED, *AGAIN)),
    Case("deepseek v4 tied, YaRN", SPREAD, DISTRIBUTED_OPTIMIZER),
    Case("minimax-m3", SPLIT, AGAIN),
    Case("minimax-m3", {"context": 2, "expert": 2}, SELECTIVE),
    Case("minimax-m3 tied, two local blocks", {"pipeline": 2}, FIRST),
    Case("hybrid qwen4", {"pipeline": 2}, (*FIRST, *AGAIN)),
    Case("hybrid qwen4", SPREAD, DISTRIBUTED_OPTIMIZER),
    Case("hybrid qwen4", {"context": 2, "expert": 2}, SELECTIVE),
    Case("hybrid qwen4", SPLIT, AGAIN),
    Case("hybrid qwen4", SPLIT | {"context": 2}, DISTRIBUTED_OPTIMIZER),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_that_of_one_process_and_weights_are_written_as_read(tmp_path: Path, case: Case):
    compare_step(tmp_path, case)


@pytest.mark.parametrize(
    ("kind", "sizes", "flags"),
    [
        ("gemma3n untied, another stream active", {"pipeline": 2}, ()),
        ("gemma4 with per-layer inputs", {"pipeline": 2}, FIRST),
        ("deepseek v4", {"pipeline": 2}, ()),
    ],
)
def test_log_probs_are_those_of_transformers(tmp_path: Path, kind: str, sizes: dict[str, Any], flags: tuple[str, ...]):
    write_family(folder := tmp_path / "model", kind)
    batch = family_samples(kind)
    for found in ranks(2, cases.logprobs_of, folder, layout(sizes), batch, torch.float32, False, flags):
        assert torch.allclose(found, cases.oracle_of(folder, batch), atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [Case("gemma3n", SPLIT, AGAIN), Case("gemma4 with per-layer inputs", {"pipeline": 2}, FIRST)],
    ids=str,
)
def test_a_step_of_adapters_is_that_of_one_process(tmp_path: Path, case: Case):
    write_family(folder := tmp_path / "model", case.kind)
    batch, modules = family_samples(case.kind), "attn,mlp"
    lora = cases.read_lora(folder, modules)
    wanted = cases.alone_adapted(folder, batch, {}, lora)
    where = layout(case.sizes)
    for found in ranks(where.world, cases.shared_adapted, folder, where, case.flags, batch, {}, lora, None):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)
        assert not cases.apart(found["after"], wanted["after"], 1e-4)


@pytest.mark.parametrize(
    "sizes", [{"pipeline": 2}, {"context": 2, "expert": 2}, SPLIT, SPLIT | {"context": 2}], ids=str
)
def test_blocks_that_the_engine_selected_are_replayed(tmp_path: Path, sizes: dict[str, Any]):
    write_family(folder := tmp_path / "model", BLOCKS)
    batch = block_samples()
    algo = {"use_rollout_routing_replay": True, "use_rollout_indexer_replay": True}
    wanted, where = cases.alone(folder, batch, algo), layout(sizes)
    assert wanted["metrics"]["indexer_mismatch_ratio"] > 0.01
    flags = FIRST if "pipeline" in sizes else ()
    for found in ranks(where.world, cases.shared, folder, where, flags, batch, algo, None):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)


def test_experts_that_are_looked_up_have_no_losses_and_the_others_those_of_their_scores(tmp_path: Path):
    write_family(folder := tmp_path / "model", kind := "deepseek v4")
    case = Case(kind, SPLIT, (*SEQ_AUX, *Z))
    compare_grads(folder, case, {"seq_aux": 0.5, "z": 0.3}, family_samples(kind))


@pytest.mark.parametrize(
    "case",
    [
        Case("gemma3n", SPLIT),
        Case("gemma4 with per-layer inputs and shared keys", {"tensor": 2}),
        Case("hybrid glm 5.3 flash", SPREAD),
        Case("deepseek v4", {"pipeline": 2}),
        Case("hybrid qwen4", SPREAD),
        Case("hybrid qwen4", SPLIT),
    ],
    ids=str,
)
def test_megatrons_own_checkpoint_is_converted_there_and_back(tmp_path: Path, case: Case):
    compare_torch_dist(tmp_path, case)


@pytest.mark.parametrize(
    "case",
    [
        MemoryCase(kind="gemma3n", layout=SPLIT, role="frozen"),
        MemoryCase(kind="gemma3n untied, another stream active", layout={"pipeline": 2}, role="frozen"),
        MemoryCase(kind="deepseek v4", layout={"pipeline": 2}, role="frozen"),
    ],
    ids=lambda case: case.kind,
)
def test_every_rank_holds_the_weights_that_the_plan_says(tmp_path: Path, case: MemoryCase):
    write_family(tmp_path / case.kind.replace(" ", "_"), case.kind)
    spec, held, flags = spec_of(case.kind), HeldModel(dtype=case.dtype, trained=False), parse_memory_flags(())
    found = [of_rank[0][0] for of_rank in ranks(2, hold_all, tmp_path, [case])]
    assert found == [compute_rank_bytes(spec, case.dims(2), flags, held, rank).weights for rank in range(2)]
