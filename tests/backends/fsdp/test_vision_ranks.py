"""A sharded model trains on images like one in a single process, and ranks without images wait for no one."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.backends.fsdp.sharded_runs import Found, trained
from tests.backends.fsdp.test_fsdp_model import same
from tests.backends.fsdp.vision_ranks import Case, adapt_alone, adapt_ranks, critic_values, plan_of, train_ranks
from tests.models.vision.small_vision import vision_model, vision_twin
from tests.pool import ranks

from miles.backends.fsdp.local_critic import LocalCritic
from miles.backends.fsdp.local_model import LocalModel
from miles.cluster.parallel_dims import ParallelDims
from miles.kernels.numerics import BATCH_INVARIANT, FAST
from miles.models.optim_groups import TRAINED_VISION, FrozenVision, is_vision_param
from miles.train.dp_group import SINGLE_RANK

TOWER = FrozenVision(tower=True)
TWO = {
    "dp": Case(layout=ParallelDims(world=2, replicate=2)),
    "fsdp, prefixes shared": Case(layout=ParallelDims(world=2, shard=2), share=True),
    "fsdp, blocks recomputed": Case(layout=ParallelDims(world=2, shard=2), recompute="full"),
    "fsdp, frozen tower": Case(layout=ParallelDims(world=2, shard=2), frozen=TOWER),
    "tp": Case(layout=ParallelDims(world=2, tensor=2)),
    "tp+sp": Case(layout=ParallelDims(world=2, tensor=2, sequence=True)),
    "cp": Case(layout=ParallelDims(world=2, context=2)),
    "cp, prefixes shared": Case(layout=ParallelDims(world=2, context=2), share=True),
}
FOUR = {
    "tp+sp x fsdp": Case(layout=ParallelDims(world=4, tensor=2, shard=2, sequence=True)),
    "tp+sp x cp": Case(layout=ParallelDims(world=4, tensor=2, context=2, sequence=True)),
    "hsdp": Case(layout=ParallelDims(world=4, replicate=2, shard=2), recompute="selective"),
}


@cache
def expected(kind: str, frozen: FrozenVision = TRAINED_VISION, batch_invariant: bool = False) -> Found:
    numerics = BATCH_INVARIANT if batch_invariant else FAST
    model = LocalModel(vision_twin(vision_model(kind), numerics=numerics), frozen_vision=frozen)
    return trained(model, plan_of(share=False, family=kind), SINGLE_RANK, True)


def folder_of(kind: str, root: Path) -> str:
    folder = root / "model"
    vision_model(kind).save_pretrained(folder)
    return str(folder)


def check(kind: str, cases: dict[str, Case], root: Path) -> None:
    world = next(iter(cases.values())).layout.world
    reported = ranks(world, train_ranks, folder_of(kind, root), list(cases.values()))[0]
    for (name, case), found in zip(cases.items(), reported, strict=True):
        same(found, expected(kind, case.frozen), f"{kind}, {name}", 2e-5)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_every_layout_gives_the_gradient_of_one_process(kind: str, tmp_path: Path) -> None:
    check(kind, TWO, tmp_path)


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_layouts_with_all_tokens_on_a_rank_do_too_where_images_attend_in_both_directions(
    kind: str, tmp_path: Path
) -> None:
    names = ("fsdp, prefixes shared", "fsdp, blocks recomputed", "tp+sp")
    check(kind, {name: TWO[name] for name in names}, tmp_path)


def test_context_parallelism_is_refused_where_images_attend_in_both_directions(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="--context-parallel-size does not support images of a gemma3 model"):
        ranks(2, train_ranks, folder_of("gemma3", tmp_path), [TWO["cp"]])


def test_expert_parallel_ranks_do_too(tmp_path: Path) -> None:
    check("qwen3_vl_moe", {"ep": Case(layout=ParallelDims(world=2, shard=2, expert=2), share=True)}, tmp_path)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_layouts_of_four_ranks_do_too(kind: str, tmp_path: Path) -> None:
    check(kind, FOUR, tmp_path)


ADAPTERS: dict[str, tuple[str, tuple[str, ...], str, dict[str, Any]]] = {
    "tower": ("qwen3_vl", ("fsdp, frozen tower", "tp", "tp+sp", "cp"), "vision", {}),
    "projector of the embeddings": (
        "qwen3_vl",
        ("fsdp, frozen tower", "tp"),
        "model.visual.merger.linear_fc1,model.visual.merger.linear_fc2",
        {},
    ),
    "decoder and tower": ("qwen2_5_vl", ("dp", "tp", "tp+sp"), "all-linear,vision", {}),
    "DoRA": ("qwen2_5_vl", ("tp", "tp+sp"), "vision", {"use_dora": True}),
    "unmerged": ("qwen2_5_vl", ("tp", "tp+sp"), "vision.attn,vision.mlp", {"unmerged": True}),
}


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_a_tower_over_ranks_train_like_those_of_one_process(name: str, tmp_path: Path) -> None:
    kind, layouts, modules, form = ADAPTERS[name]
    wanted = adapt_alone(folder := folder_of(kind, tmp_path), modules, form)
    assert any("visual" in each for each in wanted.grads) and all(".lora_" in each for each in wanted.grads)
    found = ranks(2, adapt_ranks, folder, [TWO[each].layout for each in layouts], modules, form)[0]
    for each, one in zip(layouts, found, strict=True):
        same(one, wanted, f"{name}, {each}", 2e-5)


def test_a_frozen_tower_has_no_gradient_and_its_projector_one() -> None:
    names = expected("qwen3_vl", TOWER).grads
    assert {name.split(".")[1] for name in names if is_vision_param(name)} == {"merger", "deepstack"}


def test_log_probs_of_exact_numerics_are_those_of_one_process_to_the_bit(tmp_path: Path) -> None:
    wanted = expected("qwen3_vl", batch_invariant=True)
    cases = [
        Case(layout=ParallelDims(world=2, shard=2), batch_invariant=True),
        Case(layout=ParallelDims(world=2, context=2), batch_invariant=True, share=True),
    ]
    for found in ranks(2, train_ranks, folder_of("qwen3_vl", tmp_path), cases)[0]:
        parts = len(wanted.logps) // len(found.logps)
        for mine, whole in zip(found.logps, wanted.logps[::parts], strict=True):
            assert np.array_equal(mine, whole)


def test_a_sharded_critic_sees_the_images(tmp_path: Path) -> None:
    critic = LocalCritic(vision_twin(vision_model("qwen3_vl")))
    with torch.no_grad():
        critic.parameters()["value_head.weight"].fill_(0.1)
        wanted = [
            critic.values(rows.tokens_T, rows.positions_T, rows.lengths, rows.before_R, rows.images).numpy()
            for rows in plan_of(share=False)
        ]
    layout = ParallelDims(world=2, context=2)
    for found in ranks(2, critic_values, folder_of("qwen3_vl", tmp_path), layout):
        for mine, whole in zip(found, wanted, strict=True):
            assert np.abs(mine - whole).max() < 1e-5 * np.abs(whole).max()
