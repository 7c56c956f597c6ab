"""Families whose layers are partly the decoder's own modules in Megatron's, against one process of the FSDP backend."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.backends.megatron import cases
from tests.backends.megatron.family_cases import config_of, family_samples, spec_of, write_family
from tests.backends.megatron.test_model import AGAIN, DISTRIBUTED_OPTIMIZER, Case, layout
from tests.backends.megatron.test_router import SEQ_AUX, Z, balance_grads, compare_grads
from tests.backends.megatron.torch_dist_cases import load_and_export, save_weights
from tests.models.oracle import KINDS
from tests.pool import ranks

from miles.backends.megatron.supported_models import check_megatron_support
from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import UsageError
from miles.launch.main import main
from miles.models.checkpoint import hf

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

SPLIT = {"tensor": 2, "sequence": True}
SPREAD = {"shard": 2, "expert": 2}
# The gradients of KDA's rates are differences of larger numbers: micro-batches of other sizes, in one process, already
# change them by 1e-4 of their size.
# Those of hyper-connections are differences too, in which the iterations of the mixing matrices are undone.
TOLERANCE = {"kimi_linear": 1e-3, "glm5_next": 3e-4, "deepseek_v4": 3e-4}
SELECTIVE = ("--recompute-granularity", "selective", "--recompute-modules", "core_attn", "mlp")
CASES = [
    Case("gpt-oss", SPLIT),
    Case("gpt-oss", SPREAD, (*DISTRIBUTED_OPTIMIZER, *AGAIN)),
    Case("gpt-oss", {"pipeline": 2}, SELECTIVE),
    Case("gpt-oss", {"tensor": 2, "shard": 2, "expert": 2, "sequence": True}, DISTRIBUTED_OPTIMIZER),
    Case("glm-4.5 air, two shared", SPLIT),
    Case("minimax-m2", SPLIT),
    Case("gemma3", {"context": 2}),
    Case("gemma2", {"tensor": 2, "pipeline": 2, "sequence": True}),
    Case("glm4", SPLIT),
    Case("ernie 4.5 moe", SPLIT),
    Case("hunyuan", {"tensor": 2}),
    Case("hunyuan moe", SPREAD),
    Case("glm 4.7 flash", SPLIT),
    Case("mistral 4", SPLIT),
    Case("deepseek v2 in groups", SPREAD),
    Case("step 3.7", SPLIT, SELECTIVE),
    Case("llama 4", SPLIT),
    Case("llama 4 with experts in some layers", {"context": 2, "expert": 2}),
    Case("gemma4", {"tensor": 2}),
    Case("gemma4 with experts", SPLIT),
    Case("inkling", {"pipeline": 2}, (*SELECTIVE, "--num-layers-in-first-pipeline-stage", "1")),
    Case("inkling", SPREAD, (*DISTRIBUTED_OPTIMIZER, *AGAIN)),
    Case("inkling whole", {"context": 2, "expert": 2}),
    Case("inkling", SPLIT, AGAIN),
    Case("inkling whole", SPLIT | {"context": 2}, (*DISTRIBUTED_OPTIMIZER, *SELECTIVE)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_is_that_of_one_process_and_weights_are_written_as_read(tmp_path: Path, case: Case):
    compare_step(tmp_path, case)


def compare_step(tmp_path: Path, case: Case) -> None:
    """Hold a step on ranks against one process: metrics, gradients, weights; and what they export against what they
    read.
    """
    write_family(folder := tmp_path / "model", case.kind)
    batch, algo = family_samples(case.kind), {}
    if spec_of(case.kind).moe is not None:
        algo = {"use_rollout_routing_replay": True}
    (tmp_path / "checkpoint").mkdir()
    wanted = cases.alone(folder, batch, algo)
    where, tolerance = layout(case.sizes), TOLERANCE.get(spec_of(case.kind).family, 1e-4)
    for found in ranks(where.world, cases.shared, folder, where, case.flags, batch, algo, tmp_path):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], tolerance)
        assert not cases.apart(found["after"], wanted["after"], tolerance)
    read, made = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "exported"))
    assert read.keys() == made.keys() and all(torch.equal(read[name], made[name]) for name in read)


@pytest.mark.parametrize(
    "case", [Case("gpt-oss", SPLIT), Case("step 3.7", {"pipeline": 2}, AGAIN), Case("gemma4", {"context": 2})], ids=str
)
def test_a_step_of_adapters_is_that_of_one_process(tmp_path: Path, case: Case):
    write_family(folder := tmp_path / "model", case.kind)
    batch, modules = family_samples(case.kind), "attn"
    lora = cases.read_lora(folder, modules)
    wanted = cases.alone_adapted(folder, batch, {}, lora)
    where = layout(case.sizes)
    for found in ranks(where.world, cases.shared_adapted, folder, where, case.flags, batch, {}, lora, None):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert any("o_proj.lora_" in name for name in found["grads"])
        assert not cases.apart(found["grads"], wanted["grads"], 1e-4)
        assert not cases.apart(found["after"], wanted["after"], 1e-4)


ACCEPTED = [kind for kind in KINDS if check_megatron_support(spec_of(kind), ParallelDims()) is None]


@pytest.mark.extended
@pytest.mark.parametrize("kind", ACCEPTED)
def test_every_model_that_rules_accept_trains_as_in_one_process(tmp_path: Path, kind: str):
    compare_step(tmp_path, Case(kind, {}))


@pytest.mark.parametrize(
    ("case", "losses"),
    [
        (Case("gpt-oss", SPLIT, (*SEQ_AUX, *Z)), {"seq_aux": 0.5, "z": 0.3}),
        (Case("ernie 4.5 moe", {"context": 2, "expert": 2}, SEQ_AUX), {"seq_aux": 0.5}),
    ],
    ids=str,
)
def test_losses_of_the_decoders_routers_add_their_gradient(tmp_path: Path, case: Case, losses: dict[str, float]):
    write_family(folder := tmp_path / "model", case.kind)
    compare_grads(folder, case, losses, family_samples(case.kind))


def test_a_bias_of_an_expert_follows_its_load_in_the_decoders_router(tmp_path: Path):
    write_family(folder := tmp_path / "model", kind := "ernie 4.5 moe")
    before = dict(hf.load(folder, device="cpu", dtype=torch.float32).named_parameters())
    batch, algo = family_samples(kind), {"use_rollout_routing_replay": True}
    _, counts = balance_grads(folder, batch)
    flags = ("--moe-router-bias-update-rate", "0.25")
    for found in ranks(2, cases.shared, folder, layout(SPLIT), flags, batch, algo, None):
        names = [name for name in before if name.endswith(".moe.correction")]
        for name, count in zip(names, counts.double(), strict=True):
            step = 0.25 * torch.sign(count.mean() - count).float()
            assert step.any() and torch.allclose(found["after"][name] - before[name], step, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "sizes", "flags", "said"),
    [
        ("inkling", SPLIT | {"tensor": 4}, {}, "layer 1 has 2 key-value heads"),
        ("qwen2 moe", SPLIT | {"expert_tensor": 1}, {}, None),
        ("gpt-oss", SPLIT | {"expert_tensor": 1}, {}, "experts of layer 0 are sharded like its other layers"),
        ("gpt-oss", {"tensor": 2}, {}, "add it"),
        ("hunyuan", {"tensor": 4}, {}, "layer 0 has 2 key-value heads"),
        ("gpt-oss", {}, {"moe_router_dtype": "fp32"}, "layers of gpt_oss do not use; remove it"),
        ("gpt-oss", {}, {"recompute_modules": ["moe"]}, "layers of gpt_oss do not work with"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(
    kind: str, sizes: dict[str, Any], flags: dict[str, Any], said: str | None
):
    from miles.backends.megatron.transformer_config import build_transformer_config

    how: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu")}
    if said is None:
        build_transformer_config(spec_of(kind), layout(sizes), flags, **how)
        return
    with pytest.raises(UsageError, match=said) as refused:
        build_transformer_config(spec_of(kind), layout(sizes), flags, **how)
    assert str(refused.value).count(". ") == 0


@pytest.mark.parametrize(
    "case",
    [
        Case("gemma3", {"tensor": 2}),
        Case("glm4", SPLIT),
        Case("gpt-oss", SPLIT),
        Case("gpt-oss", SPREAD),
        Case("minimax-m2", {"tensor": 2, "pipeline": 2, "sequence": True}),
        Case("gemma4 with experts", SPLIT),
        Case("inkling", SPLIT),
        Case("inkling whole", SPREAD),
    ],
    ids=str,
)
def test_megatrons_own_checkpoint_is_converted_there_and_back(tmp_path: Path, case: Case):
    compare_torch_dist(tmp_path, case)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ACCEPTED)
def test_every_model_that_rules_accept_has_a_torch_dist_form(tmp_path: Path, kind: str):
    compare_torch_dist(tmp_path, Case(kind, {}))


def compare_torch_dist(tmp_path: Path, case: Case) -> None:
    """Hold against a Hugging Face folder what Megatron reads of its torch_dist form, and what it writes, converted."""
    write_family(folder := tmp_path / "model", kind := case.kind)
    assert main(["convert", str(folder), str(tmp_path / "dist"), "--format", "torch_dist"]) == 0
    other, where = tmp_path / "other", layout(case.sizes)
    decoder = hf.init_random(spec_of(kind), seed=1, device="cpu", dtype=torch.float32)
    hf.export(decoder, other, config=config_of(kind))
    ranks(where.world, load_and_export, other, where, tmp_path / "dist" / "release", tmp_path / "exported")
    ranks(where.world, save_weights, folder, where, tmp_path / "written" / "iter_0000007")
    (tmp_path / "written" / "latest_checkpointed_iteration.txt").write_text("7")
    words = ["--format", "float32", "--origin-hf-dir", str(folder)]
    assert main(["convert", str(tmp_path / "written"), str(tmp_path / "out"), *words]) == 0
    wanted = load_file(folder / "model.safetensors")
    for made in (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "out")):
        assert wanted.keys() == made.keys() and all(torch.equal(wanted[name], made[name]) for name in wanted)
