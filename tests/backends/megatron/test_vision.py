"""Vision-language models under Megatron: the tower on the first stage, against one process of the FSDP trainer."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.backends.megatron import cases, head_cases
from tests.backends.megatron.test_model import AGAIN, DISTRIBUTED_OPTIMIZER, Case, layout
from tests.backends.megatron.vision_cases import (
    TOKENS,
    adapt_alone,
    adapt_on_ranks,
    load_and_save,
    resume_on_ranks,
    step_alone,
    step_on_ranks,
)
from tests.models.vision.small_vision import VISION_KINDS, vision_model, vision_twin
from tests.pool import ranks

from miles.backends.megatron.supported_models import check_megatron_support
from miles.cluster.parallel_dims import ParallelDims
from miles.launch.main import main
from miles.models.checkpoint import hf
from miles.models.optim_groups import TRAINED_VISION, FrozenVision

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

SPLIT = {"tensor": 2, "sequence": True}
FIRST = ("--num-layers-in-first-pipeline-stage", "2")
ONE = ("--num-layers-in-first-pipeline-stage", "1")
TOWER = FrozenVision(tower=True)
ACCEPTED = [
    kind for kind in VISION_KINDS if not check_megatron_support(vision_twin(vision_model(kind)).spec, ParallelDims())
]


def write_model(folder: Path, kind: str, seed: int = 0) -> None:
    model = vision_model(kind, seed)
    hf.export(vision_twin(model), folder, config=model.config.to_dict() | {"architectures": [type(model).__name__]})


def compare_step(
    tmp_path: Path, case: Case, *, samples: str = "turns", frozen: FrozenVision = TRAINED_VISION, **train: Any
) -> dict[str, Any]:
    """Hold a step on ranks against one process: metrics, gradients, weights, and what is exported before it."""
    write_model(folder := tmp_path / "model", case.kind)
    (tmp_path / "checkpoint").mkdir()
    wanted = step_alone(folder, (case.kind, samples), frozen, **train)
    where = layout(case.sizes)
    how = (folder, where, case.flags, (case.kind, samples), frozen, tmp_path, train)
    for found in ranks(where.world, step_on_ranks, *how):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], 2e-4)
        assert not cases.apart(found["after"], wanted["after"], 2e-4)
    read, made = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "exported"))
    assert read.keys() == made.keys() and all(torch.equal(read[name], made[name]) for name in read)
    return wanted


CASES = [
    Case("qwen2_5_vl", {"tensor": 2}),
    Case("qwen2_5_vl", SPLIT, DISTRIBUTED_OPTIMIZER),
    Case("qwen2_5_vl", {"pipeline": 2}, (*FIRST, *DISTRIBUTED_OPTIMIZER)),
    Case("qwen2_5_vl", {"context": 2}, AGAIN),
    Case("qwen3_vl", SPLIT, AGAIN),
    Case("qwen3_vl", {"context": 2}),
    Case("qwen3_vl", {"shard": 2}, DISTRIBUTED_OPTIMIZER),
    Case("gemma3", SPLIT),
    Case("qwen3_vl", {"pipeline": 2}, (*FIRST, *AGAIN)),
    Case("qwen3_vl", {"pipeline": 2}, (*ONE, *AGAIN)),
    Case("qwen3_vl", SPLIT | {"pipeline": 2}, ONE),
    Case("gemma3", {"pipeline": 2}, (*FIRST, *AGAIN)),
    Case("qwen3_vl_moe", {"shard": 2, "expert": 2}),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_with_images_is_that_of_one_process(tmp_path: Path, case: Case):
    wanted = compare_step(tmp_path, case)
    assert any(name.startswith("vision.blocks.") for name in wanted["grads"])


@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3"])
def test_a_frozen_tower_has_no_gradient_and_its_projector_one(tmp_path: Path, kind: str):
    wanted = compare_step(tmp_path, Case(kind, {"tensor": 2}), frozen=TOWER)
    parts = {name.split(".")[1] for name in wanted["grads"] if name.startswith("vision.")}
    assert parts == ({"merger", "deepstack"} if kind == "qwen3_vl" else {"merger"})


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen2_5_vl", {}),
        Case("qwen2_5_vl", {"shard": 2}, DISTRIBUTED_OPTIMIZER),
        Case("qwen3_vl", {"pipeline": 2}, (*FIRST, *DISTRIBUTED_OPTIMIZER)),
        Case("qwen3_vl_moe", {"shard": 2, "expert": 2}, DISTRIBUTED_OPTIMIZER),
        Case("gemma3", SPLIT, DISTRIBUTED_OPTIMIZER),
    ],
    ids=str,
)
def test_the_tower_has_a_rate_of_its_own(tmp_path: Path, case: Case):
    compare_step(tmp_path, case, vision_lr=1e-4)


@pytest.mark.parametrize("form", ["hf", "torch_dist"])
@pytest.mark.parametrize("sizes", [{"shard": 2}, {"pipeline": 2}], ids=str)
def test_a_tower_with_a_rate_of_its_own_is_resumed_to_the_bit(tmp_path: Path, sizes: dict[str, Any], form: str):
    write_model(folder := tmp_path / "model", kind := "qwen2_5_vl")
    (out := tmp_path / "checkpoint").mkdir()
    flags, train = (*(FIRST if "pipeline" in sizes else ()), *DISTRIBUTED_OPTIMIZER), {"ckpt_format": form}
    same = train | {"vision_lr": 1e-3}
    for wanted, found in ranks(2, resume_on_ranks, folder, layout(sizes), flags, kind, out, same, same):
        assert wanted.keys() == found.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("form", ["hf", "torch_dist"])
@pytest.mark.parametrize("rates", [(None, 0.0), (0.0, None)], ids=str)
def test_a_run_with_another_rate_of_the_tower_goes_on_from_a_checkpoint(tmp_path: Path, form: str, rates: Any):
    write_model(folder := tmp_path / "model", kind := "qwen2_5_vl")
    (out := tmp_path / "checkpoint").mkdir()
    options = [{"ckpt_format": form, "vision_lr": rate} for rate in rates]
    where, flags = layout({"shard": 2}), DISTRIBUTED_OPTIMIZER
    for wanted, found in ranks(2, resume_on_ranks, folder, where, flags, kind, out, *options):
        apart = cases.apart(found, wanted, 1e-6)
        assert apart and all(name.startswith("vision.") for name in apart), apart


@pytest.mark.parametrize("sizes", [{}, {"pipeline": 2}], ids=str)
def test_a_batch_without_images_leaves_the_tower_as_it_is(tmp_path: Path, sizes: dict[str, Any]):
    flags = FIRST if sizes else ()
    wanted = compare_step(tmp_path, Case("qwen2_5_vl", sizes, flags), samples="text")
    assert not any(name.startswith("vision.") for name in wanted["grads"])


def test_a_ppo_step_with_images_is_that_of_one_process(tmp_path: Path):
    write_model(folder := tmp_path / "model", kind := "qwen2_5_vl")
    batch = head_cases.rewarded(kind, images=True)
    wanted = head_cases.ppo_alone(folder, batch, {}, max_tokens_per_gpu=TOKENS)
    assert all(grad.any() for name, grad in wanted["grads"].items() if name.startswith("vision.blocks."))
    for found in ranks(2, head_cases.ppo_with_images, folder, layout({"pipeline": 2}), FIRST, kind):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert not cases.apart(found["grads"], wanted["grads"], 2e-4)
        assert not cases.apart(found["actor"], wanted["actor"], 2e-4)


ADAPTERS: dict[str, tuple[Case, str, dict[str, Any]]] = {
    "decoder": (Case("qwen3_vl", {"tensor": 2, "pipeline": 2}, FIRST), "q_proj,o_proj", {}),
    "tower": (Case("qwen3_vl", {}), "vision", {}),
    "both, sequence": (Case("qwen2_5_vl", SPLIT), "all-linear,vision", {}),
    "both, tensor": (Case("qwen3_vl", {"tensor": 2}), "all-linear,vision", {}),
    "tower, tensor and pipeline": (Case("qwen2_5_vl", {"tensor": 2, "pipeline": 2}, (*FIRST, *AGAIN)), "vision", {}),
    "DoRA, tensor": (Case("gemma3", {"tensor": 2}), "vision", {"use_dora": True}),
    "unmerged, tensor": (Case("qwen2_5_vl", {"tensor": 2}), "vision.attn,vision.mlp", {"unmerged": True}),
    "deepstack, sequence, recomputed": (Case("qwen3_vl", SPLIT, AGAIN), "vision", {}),
    "both, pipeline": (Case("qwen3_vl", {"pipeline": 2}, FIRST), "all-linear,vision", {}),
    "tower, context": (Case("qwen2_5_vl", {"context": 2}), "vision", {}),
    "both, data": (Case("gemma3", {"shard": 2}), "all-linear,vision", {}),
    "tower, unmerged": (Case("qwen2_5_vl", {"pipeline": 2}, FIRST), "vision.attn,vision.mlp", {"unmerged": True}),
    "projector, DoRA": (Case("qwen3_vl", SPLIT), "vision.projector", {"use_dora": True}),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_step_of_adapters_with_images_is_that_of_one_process(tmp_path: Path, name: str):
    case, modules, form = ADAPTERS[name]
    write_model(folder := tmp_path / "model", case.kind)
    batch, where = (case.kind, "turns"), layout(case.sizes)
    wanted = adapt_alone(folder, batch, modules, form)
    assert any("visual" in n or "vision" in n for n in wanted["grads"]) == ("vision" in modules)
    for found in ranks(where.world, adapt_on_ranks, folder, where, case.flags, batch, modules, form):
        assert not cases.unlike(found["metrics"], wanted["metrics"])
        assert found["grads"].keys() == wanted["grads"].keys()
        assert not cases.apart(found["grads"], wanted["grads"], 2e-4)
        assert not cases.apart(found["after"], wanted["after"], 2e-4)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        (Case("gemma3", {"context": 2}), "--context-parallel-size does not support images of a gemma3 model"),
    ],
    ids=str,
)
def test_layouts_that_cannot_have_the_images_are_refused(tmp_path: Path, case: Case, said: str):
    write_model(folder := tmp_path / "model", case.kind)
    how = (folder, layout(case.sizes), case.flags, (case.kind, "turns"), TRAINED_VISION, None, {})
    with pytest.raises(AssertionError, match=said):
        ranks(2, step_on_ranks, *how)


@pytest.mark.parametrize("case", [Case("qwen3_vl", SPLIT), Case("qwen2_5_vl", {"pipeline": 2}, FIRST)], ids=str)
def test_megatrons_own_checkpoint_has_the_tower(tmp_path: Path, case: Case):
    write_model(folder := tmp_path / "model", case.kind)
    write_model(other := tmp_path / "other", case.kind, seed=1)
    where = layout(case.sizes)
    assert main(["convert", str(folder), str(tmp_path / "dist"), "--format", "torch_dist"]) == 0
    saved = tmp_path / "dist" / "release"
    ranks(where.world, load_and_save, other, where, case.flags, saved, tmp_path / "exported", tmp_path / "written")
    words = ["--format", "float32", "--origin-hf-dir", str(folder)]
    assert main(["convert", str(tmp_path / "written"), str(tmp_path / "out"), *words]) == 0
    wanted = load_file(folder / "model.safetensors")
    for made in (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "out")):
        assert wanted.keys() == made.keys() and all(torch.equal(wanted[name], made[name]) for name in wanted)


@pytest.mark.extended
@pytest.mark.parametrize("kind", ACCEPTED)
def test_every_family_that_rules_accept_trains_on_images_as_in_one_process(tmp_path: Path, kind: str):
    wanted = compare_step(tmp_path, Case(kind, {}), samples="prompts")
    assert any(name.startswith("vision.blocks.") for name in wanted["grads"])
