"""What the plan says a Megatron rank holds, against the tensors that each rank really holds after a step."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.backends.megatron import cases, family_cases
from tests.backends.megatron.memory_cases import MemoryCase, hold_all
from tests.pool import ranks

from miles.backends.megatron.rank_memory import (
    HeldModel,
    compute_rank_bytes,
    parse_memory_flags,
)
from miles.launch.plan.layout_memory import (
    estimate_rank_critic_memory,
    estimate_rank_frozen_bytes,
    estimate_rank_lora_memory,
    estimate_rank_memory,
)
from miles.models.families import spec_from_config

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

OWN = ("--use-distributed-optimizer",)
INTERLEAVED = ("--virtual-pipeline-model-parallel-size", "2")
TENSOR, STAGES, PARTS = {"tensor": 2, "sequence": True}, {"pipeline": 2}, {"shard": 2}
TWO = [
    MemoryCase(kind="qwen3", layout=PARTS),
    MemoryCase(kind="qwen3", layout=PARTS, dtype="float32", train={"optimizer_state_dtype": "int8"}),
    MemoryCase(kind="qwen3", layout=PARTS, flags=OWN),
    MemoryCase(kind="qwen3", layout=STAGES),
    MemoryCase(kind="qwen3", layout=STAGES, flags=OWN),
    MemoryCase(kind="qwen3", layout=STAGES, flags=(*INTERLEAVED, *OWN), dtype="float32"),
    MemoryCase(kind="qwen3 untied", layout=STAGES, flags=("--num-layers-in-first-pipeline-stage", "1")),
    MemoryCase(kind="qwen3 one key", layout=TENSOR, train={"optimizer": "muon"}),
    MemoryCase(kind="llama", layout=TENSOR, flags=OWN),
    MemoryCase(kind="qwen2_moe", layout=PARTS | {"expert": 2}),
    MemoryCase(kind="qwen2_moe", layout=PARTS | {"expert": 2}, flags=OWN),
    MemoryCase(kind="qwen3_moe", layout=TENSOR | {"expert_tensor": 1}, flags=OWN),
    MemoryCase(kind="qwen3_moe", layout=TENSOR | {"expert_tensor": 1, "expert": 2}),
    MemoryCase(kind="deepseek_v3", layout=TENSOR),
    MemoryCase(kind="deepseek_v3", layout=TENSOR, flags=OWN, dtype="float32"),
    MemoryCase(kind="deepseek_v3", layout=STAGES, flags=OWN),
    MemoryCase(kind="deepseek_v3", layout=PARTS | {"expert": 2}, role="frozen"),
    MemoryCase(kind="qwen3_moe", layout=STAGES, role="frozen"),
    MemoryCase(kind="qwen2_5_vl", layout=STAGES, role="frozen"),
    MemoryCase(kind="qwen2_5_vl", layout=STAGES, flags=OWN),
    MemoryCase(kind="qwen2_5_vl", layout=TENSOR, flags=OWN),
    MemoryCase(kind="qwen3 untied", layout=STAGES, role="critic"),
    MemoryCase(kind="qwen3", layout=PARTS, role="critic", flags=OWN),
    MemoryCase(kind="qwen3 untied", layout=TENSOR, role="adapters"),
    MemoryCase(kind="deepseek_v3", layout=TENSOR, role="adapters", modules="all-linear,experts"),
    MemoryCase(kind="qwen3_moe", layout=PARTS | {"expert": 2}, role="adapters", modules="experts"),
    MemoryCase(kind="qwen3", layout=PARTS, role="adapters", flags=OWN),
    MemoryCase(kind="qwen3_moe", layout=TENSOR, role="adapters", modules="experts", flags=OWN),
    MemoryCase(kind="wide qwen3", layout=TENSOR, role="adapters", packed="int4_g32_asym"),
    MemoryCase(kind="wide qwen3", layout=STAGES, role="frozen", packed="nvfp4"),
    MemoryCase(kind="qwen3 of blocks", layout=TENSOR, role="adapters", packed="fp8"),
    MemoryCase(kind="qwen3 of blocks", layout=TENSOR, role="adapters", packed="fp8", scale_ranks=2),
    MemoryCase(kind="wide qwen3_moe", layout=PARTS | {"expert": 2}, role="adapters", modules="experts", packed="nvfp4"),
    MemoryCase(kind="wide deepseek_v3", layout=TENSOR, role="adapters", packed="mxfp4"),
]
FOUR = [
    MemoryCase(kind="qwen3", layout=TENSOR | STAGES, flags=OWN),
    MemoryCase(kind="deepseek_v3", layout=TENSOR | PARTS | {"expert": 2}, flags=OWN),
    MemoryCase(kind="qwen3_moe", layout=TENSOR | PARTS | {"expert": 2, "expert_tensor": 1}, flags=OWN),
    MemoryCase(kind="qwen2_moe", layout=STAGES | PARTS | {"expert": 2}, flags=OWN),
    MemoryCase(kind="qwen3_moe", layout=TENSOR | {"context": 2, "expert": 2}),
]


EXPERTS = PARTS | {"expert": 2}
FIRST = ("--num-layers-in-first-pipeline-stage", "1")
FAMILIES = [
    MemoryCase(kind="gemma2", layout=TENSOR, flags=OWN),
    MemoryCase(kind="gpt-oss", layout=EXPERTS, flags=OWN),
    MemoryCase(kind="gpt-oss", layout=TENSOR),
    MemoryCase(kind="glm-4.5 air, two shared", layout=TENSOR, flags=OWN),
    MemoryCase(kind="ernie 4.5 moe", layout=EXPERTS, flags=OWN),
    MemoryCase(kind="llama 4 with experts in some layers", layout=STAGES, flags=OWN),
    MemoryCase(kind="step 3.7", layout=TENSOR, flags=OWN, dtype="float32"),
    MemoryCase(kind="gemma4 with experts", layout=EXPERTS, flags=OWN),
    MemoryCase(kind="hybrid qwen3 next", layout=EXPERTS, flags=OWN),
    MemoryCase(kind="hybrid qwen3.5", layout=TENSOR, flags=OWN),
    MemoryCase(kind="hybrid kimi linear", layout=TENSOR, flags=OWN),
    MemoryCase(kind="hybrid nemotron 3 latent, in groups", layout=EXPERTS, flags=OWN),
    MemoryCase(kind="lfm2 untied with biases, longer convolution", layout=STAGES, flags=(*OWN, *FIRST)),
    MemoryCase(kind="deepseek v3.2 with biases", layout=EXPERTS, flags=OWN),
    MemoryCase(kind="minimax-m3", layout=TENSOR, flags=OWN),
    MemoryCase(kind="hybrid glm 5.3 flash", layout=STAGES, flags=OWN),
    MemoryCase(kind="deepseek v4", layout=EXPERTS, flags=OWN),
    MemoryCase(kind="deepseek v4", layout=STAGES),
    MemoryCase(kind="hybrid qwen4", layout=TENSOR, flags=OWN),
    MemoryCase(kind="hybrid qwen4", layout=EXPERTS),
    MemoryCase(kind="gemma3n", layout=TENSOR, flags=OWN),
    MemoryCase(kind="gemma3n untied, another stream active", layout=STAGES, flags=OWN),
    MemoryCase(kind="gemma4 with per-layer inputs and shared keys", layout=PARTS, flags=OWN),
    MemoryCase(kind="inkling", layout=TENSOR, flags=OWN),
    MemoryCase(kind="inkling whole", layout=EXPERTS, flags=OWN),
]


def spec_of(case: MemoryCase):
    return case.pack(family_cases.spec_of(case.kind) if case in FAMILIES else spec_from_config(cases.KINDS[case.kind]))


def held_model(case: MemoryCase) -> HeldModel:
    head = (spec_of(case).hidden_size, 1) if case.role == "critic" else ()
    return HeldModel(
        dtype=case.dtype,
        trained=case.role != "frozen",
        moments=case.train.get("optimizer_state_dtype", "float32"),
        optimizer=case.train.get("optimizer", "adam"),
        scalar_head=head,
    )


def plan_rank(case: MemoryCase, world: int, rank: int) -> tuple[int, int, int]:
    flags = parse_memory_flags(case.flags)
    plan = compute_rank_bytes(spec_of(case), case.dims(world), flags, held_model(case), rank)
    return plan.weights, plan.gradients, plan.optimizer


def plan_fullest(case: MemoryCase, world: int) -> tuple[int, int, int]:
    """The fullest rank, as the functions behind `miles plan` say it."""
    spec, layout, flags = spec_of(case), case.dims(world), parse_memory_flags(case.flags)
    held = held_model(case)
    if case.role == "frozen":
        return estimate_rank_frozen_bytes(spec, layout, case.dtype, megatron=flags), 0, 0
    if case.role == "adapters":
        lora = cases.lora_of(spec, case.modules)
        plan = estimate_rank_lora_memory(spec, layout, case.dtype, lora, megatron=flags)
        return plan.weights + plan.base + plan.adapters, plan.gradients, plan.optimizer
    estimate = estimate_rank_critic_memory if case.role == "critic" else estimate_rank_memory
    plan = estimate(spec, layout, case.dtype, moments=held.moments, optimizer=held.optimizer, megatron=flags)
    assert plan.gathered == 0
    return plan.weights, plan.gradients, plan.optimizer


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_holds_what_the_plan_says_to_the_byte(tmp_path: Path, world: int):
    held = {2: TWO, 4: FOUR}[world]
    for kind in {case.kind for case in held}:
        cases.written(tmp_path / kind.replace(" ", "_"), kind)
    reported = ranks(world, hold_all, tmp_path, held)
    found = {case: [of_rank[number] for of_rank in reported] for number, case in enumerate(held)}
    planned = {case: [plan_rank(case, world, rank) for rank in range(world)] for case in held}
    # Adapters and the base under them are whole on every rank, and counted by the plan alone.
    planned |= {case: found[case] for case in held if case.role == "adapters" or case.packed is not None}
    assert {case: found[case] for case in held if planned[case] != found[case]} == {}
    fullest = {case: plan_fullest(case, world) for case in held}
    assert {case: fullest[case] for case in held if fullest[case] != max(found[case], key=sum)} == {}


@pytest.mark.extended
def test_every_rank_holds_what_the_plan_says_of_the_decoders_modules(tmp_path: Path):
    for kind in {case.kind for case in FAMILIES}:
        family_cases.write_family(tmp_path / kind.replace(" ", "_"), kind)
    reported = ranks(2, hold_all, tmp_path, FAMILIES)
    found = {case: [of_rank[number] for of_rank in reported] for number, case in enumerate(FAMILIES)}
    planned = {case: [plan_rank(case, 2, rank) for rank in range(2)] for case in FAMILIES}
    assert {case: (found[case], planned[case]) for case in FAMILIES if planned[case] != found[case]} == {}
    fullest = {case: plan_fullest(case, 2) for case in FAMILIES}
    assert {case: fullest[case] for case in FAMILIES if fullest[case] != max(found[case], key=sum)} == {}
