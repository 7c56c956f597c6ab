"""A sharded model trains like one in a single process: every gradient, in every parallel layout."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.backends.fsdp.sharded_runs import Found, critics, decoder_of, moved, one_critic, one_process, ranked
from tests.models.oracle import KINDS
from tests.models.small_families.small import SMALL
from tests.pool import ranks

from miles.cluster.parallel_dims import ParallelDims
from miles.models.checkpoint import hf

TWO = {
    "dp": ParallelDims(world=2, replicate=2),
    "fsdp": ParallelDims(world=2, shard=2),
    "tp": ParallelDims(world=2, tensor=2),
    "tp+sp": ParallelDims(world=2, tensor=2, sequence=True),
}
FOUR = {
    "hsdp": ParallelDims(world=4, replicate=2, shard=2),
    "tp x fsdp": ParallelDims(world=4, tensor=2, shard=2),
    "tp+sp x fsdp": ParallelDims(world=4, tensor=2, shard=2, sequence=True),
    "tp of more ranks than key heads": ParallelDims(world=4, tensor=4),
}

# Every layout meets a mixture, and every mixture layouts that cut it in different ways.
SOME = {
    "deepseek v3": ("tp x fsdp", "tp of more ranks than key heads"),
    "gpt-oss": ("hsdp", "tp+sp x fsdp"),
    "minimax-m2": ("tp+sp x fsdp", "tp of more ranks than key heads"),
}


@cache
def config_of(kind: str) -> dict:
    config = KINDS[kind].config(**(SMALL | KINDS[kind].own)).to_dict()
    return config | {"architectures": [KINDS[kind].model.__name__]}


@cache
def expected(kind: str, replay: bool) -> Found:
    return one_process(decoder_of(config_of(kind)), replay=replay)


def folder_of(kind: str, root: Path) -> str:
    folder = root / "model"
    if not folder.exists():
        hf.export(decoder_of(config_of(kind)), folder, config=config_of(kind))
    return str(folder)


def relative(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-12))


def same(found: Found, wanted: Found, name: str, bound: float = 1e-5) -> None:
    assert found.exact, name
    assert found.loss == pytest.approx(wanted.loss, rel=bound), name
    assert found.norm == pytest.approx(wanted.norm, rel=max(bound, 1e-6)), name
    parts = len(wanted.logps) // len(found.logps)
    for mine, whole in zip(found.logps, wanted.logps[::parts], strict=True):
        assert relative(mine, whole) < bound, name
    assert found.flips == wanted.flips[::parts], name
    assert found.grads.keys() == wanted.grads.keys(), name
    apart = {n: relative(found.grads[n], wanted.grads[n]) for n in wanted.grads}
    assert max(apart.values()) < bound, (name, max(apart, key=lambda n: apart[n]), max(apart.values()))
    after = {n: relative(found.after[n], wanted.after[n]) for n in wanted.after}
    assert max(after.values()) < bound, (name, max(after, key=lambda n: after[n]), max(after.values()))
    # A loss whose terms cancel is as near as the terms are.
    assert found.again == pytest.approx(wanted.again, abs=bound * max(abs(wanted.again), abs(wanted.loss), 1)), name


def check(kind: str, layouts: dict[str, ParallelDims], tmp_path: Path, bound: float = 1e-5, **options) -> None:
    world = next(iter(layouts.values())).world
    reported = ranks(world, ranked, folder_of(kind, tmp_path), list(layouts.values()), *options.values())[0]
    for name, found in zip(layouts, reported, strict=True):
        same(found, expected(kind, bool(options.get("replay"))), f"{kind}, {name}", bound)


def test_every_layout_of_a_dense_model_gives_the_gradient_of_one_process(tmp_path):
    check("qwen3", TWO, tmp_path)
    check("qwen3", FOUR, tmp_path)


def test_a_head_that_is_the_embedding_is_cut_as_one(tmp_path):
    check("qwen2 tied", {name: TWO[name] for name in ("fsdp", "tp+sp")}, tmp_path)
    check("qwen2 tied", {"tp of more ranks than key heads": FOUR["tp of more ranks than key heads"]}, tmp_path)


@pytest.mark.parametrize("kind", SOME)
def test_mixtures_and_odd_attention_do_too_replaying_experts_and_computing_layers_again(kind, tmp_path):
    some = {name: FOUR[name] for name in SOME[kind]}
    check(kind, some, tmp_path, dtype="float32", recompute="selective", replay=True)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2 tied", *SOME])
def test_every_layout_does_so_with_every_kind(kind, tmp_path):
    if kind in SOME:
        check(kind, FOUR, tmp_path, dtype="float32", recompute="selective", replay=True)
    else:
        check(kind, TWO, tmp_path)
        check(kind, FOUR, tmp_path)


@pytest.mark.parametrize(
    "kind", ["hybrid qwen3 next", "hybrid nemotron 3", "hybrid kimi linear", "hybrid glm 5.3 flash"]
)
def test_recurrent_layers_do_as_near_as_their_sums_are_long(kind, tmp_path):
    """In float64 they agree to 1e-9; in float32 their states add up more roundings than attention does."""
    check(kind, {name: FOUR[name] for name in ("tp x fsdp", "tp+sp x fsdp")}, tmp_path, bound=5e-5)


@pytest.mark.parametrize(
    ("kind", "layouts", "recompute"),
    [
        ("inkling", ("hsdp", "tp x fsdp", "tp+sp x fsdp"), "selective"),
        ("inkling whole", ("tp of more ranks than key heads", "ep x fsdp", "tp+sp x fsdp"), "full"),
    ],
)
def test_relative_attention_and_weighed_shared_experts_do_too(kind, layouts, recompute, tmp_path):
    """Short convolutions behind a layer's parts are on all ranks, those of keys and values by head."""
    some = FOUR | {"ep x fsdp": ParallelDims(world=4, shard=4, expert=2)}
    some = {name: some[name] for name in layouts}
    check(kind, some, tmp_path, bound=5e-5, dtype="float32", recompute=recompute, replay=kind == "inkling")


def test_compressed_attention_and_hash_routing_do_too(tmp_path):
    """Keys, compressors and tables of experts are on all ranks, of which each has some groups of heads."""
    some = {name: FOUR[name] for name in ("hsdp", "tp x fsdp", "tp+sp x fsdp")}
    check("deepseek v4", some, tmp_path, bound=5e-5, dtype="float32", recompute="selective", replay=True)
    experts = {"ep x fsdp": ParallelDims(world=4, shard=4, expert=2)}
    check("deepseek v4", experts, tmp_path, bound=5e-5, dtype="float32", recompute="selective", replay=False)


def test_ngram_embeddings_and_gated_hyper_connections_do_too(tmp_path):
    """The table of n-grams is sharded by its rows, and what is added to the streams is on all ranks."""
    some = {name: FOUR[name] for name in ("hsdp", "tp x fsdp", "tp+sp x fsdp")}
    check("hybrid qwen4", some, tmp_path, bound=5e-5, dtype="float32", recompute="selective", replay=True)
    experts = {"ep x fsdp": ParallelDims(world=4, shard=4, expert=2)}
    check("hybrid qwen4", experts, tmp_path, bound=5e-5, dtype="float32", recompute="full", replay=False)


def test_layers_computed_again_in_full_change_nothing(tmp_path):
    check("qwen3", {"tp+sp x fsdp": FOUR["tp+sp x fsdp"]}, tmp_path, dtype="float32", recompute="full")


def test_ranks_that_talk_by_way_of_the_host_say_the_same(tmp_path):
    options = {"dtype": "float32", "recompute": "none", "replay": False, "staged": True}
    check("qwen3", {"hsdp": FOUR["hsdp"], "tp x fsdp": FOUR["tp x fsdp"]}, tmp_path, **options)


def test_low_precision_stays_near(tmp_path):
    reported = ranks(4, ranked, folder_of("qwen3", tmp_path), list(FOUR.values()), "bfloat16")[0]
    wanted = expected("qwen3", False)
    for name, found in zip(FOUR, reported, strict=True):
        assert found.exact, name
        assert found.loss == pytest.approx(wanted.loss, rel=0.05), name
        assert found.norm == pytest.approx(wanted.norm, rel=0.02), name


@pytest.mark.parametrize("kind", ["qwen3", "qwen2 tied"])
def test_a_critic_s_gradient_is_that_of_one_process(kind, tmp_path):
    wanted = one_critic(decoder_of(config_of(kind)))
    layouts = {**FOUR, "cp x fsdp": ParallelDims(world=4, context=2, shard=2)}
    for reported in ranks(4, critics, folder_of(kind, tmp_path), list(layouts.values())):
        for name, found in zip(layouts, reported, strict=True):
            assert found.keys() == wanted.keys(), name
            apart = {n: relative(found[n], wanted[n]) for n in wanted}
            assert max(apart.values()) < 1e-5, (name, apart)


def test_parameters_sleep_wake_and_are_written_as_they_were_read(tmp_path):
    folder, out = folder_of("qwen3", tmp_path), tmp_path / "out"
    out.mkdir()
    for reported in ranks(4, moved, folder, str(out)):
        assert all(reported.values()), reported
    before, after = (hf.load(f, device="cpu", dtype=torch.float32) for f in (folder, out))
    for (name, a), (_, b) in zip(before.named_parameters(), after.named_parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b.bfloat16()), name
