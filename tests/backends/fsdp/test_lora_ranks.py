"""Adapters over ranks train like those of one process: every gradient and weight, in every parallel layout."""

from pathlib import Path

import pytest
from tests.backends.fsdp.lora_ranks import critics, one_critic, one_process, ranked
from tests.backends.fsdp.test_fsdp_model import config_of, decoder_of, relative
from tests.pool import ranks

from miles.cluster.parallel_dims import ParallelDims
from miles.models.checkpoint import hf

TWO = {
    "fsdp": ParallelDims(world=2, shard=2),
    "tp": ParallelDims(world=2, tensor=2),
    "tp+sp": ParallelDims(world=2, tensor=2, sequence=True),
    "cp": ParallelDims(world=2, context=2),
    "ep": ParallelDims(world=2, shard=2, expert=2),
}
FOUR = {
    "tp+sp x fsdp": ParallelDims(world=4, tensor=2, shard=2, sequence=True),
    "tp of more ranks than key heads": ParallelDims(world=4, tensor=4),
    "ep x tp": ParallelDims(world=4, tensor=2, shard=2, expert=2),
}
DENSE = ("fsdp", "tp", "tp+sp", "cp")
CASES = [
    ("qwen3", DENSE, "plain"),
    ("qwen3", DENSE, "output layer"),
    ("qwen3", ("fsdp", "tp", "tp+sp", "cp"), "dora"),
    ("qwen3 moe", tuple(TWO), "plain"),
    ("qwen3 moe", ("tp", "ep"), "shared"),
    ("deepseek v3", tuple(TWO), "plain"),
    ("gpt-oss", ("tp", "ep", "fsdp"), "shared"),
    ("deepseek v3", ("fsdp", "tp", "tp+sp"), "dora"),
    ("qwen3 moe", ("fsdp", "tp", "ep"), "dora of experts"),
    ("gpt-oss", ("tp", "ep"), "dora of shared experts"),
    ("qwen3", ("tp", "tp+sp"), "dropout"),
    ("qwen3 moe", ("tp",), "dropout"),  # padding of sequence parallelism has experts too, so that rows are others
]


def folder_of(kind: str, root: Path) -> str:
    hf.export(decoder_of(config_of(kind)), root / "model", config=config_of(kind))
    return str(root / "model")


def check(found, wanted, name):
    assert found.exact == wanted.exact, name  # forwards without gradients have no dropout
    assert found.loss == pytest.approx(wanted.loss, rel=1e-5), name
    assert found.norm == pytest.approx(wanted.norm, rel=1e-5), name
    assert found.again == pytest.approx(wanted.again, rel=1e-5), name
    for kind in ("grads", "after"):
        mine, theirs = getattr(found, kind), getattr(wanted, kind)
        assert mine.keys() == theirs.keys(), name
        apart = {n: relative(mine[n], theirs[n]) for n in theirs}
        assert max(apart.values()) < 2e-5, (name, kind, max(apart, key=lambda n: apart[n]), max(apart.values()))
    assert any(".lora_A." in n for n in wanted.grads) and all(".lora_" in n for n in wanted.grads)


@pytest.mark.parametrize(("kind", "layouts", "form"), CASES)
def test_adapters_over_two_ranks_train_like_those_of_one(tmp_path, kind, layouts, form):
    folder = folder_of(kind, tmp_path)
    wanted = one_process(folder, form=form)
    found = ranks(2, ranked, folder, [TWO[name] for name in layouts], form)[0]
    for name, each in zip(layouts, found, strict=True):
        check(each, wanted, name)


@pytest.mark.parametrize("kind", ["qwen3 moe", "deepseek v3"])
def test_adapters_over_four_ranks_train_like_those_of_one(tmp_path, kind):
    folder = folder_of(kind, tmp_path)
    wanted = one_process(folder)
    names = [n for n in FOUR if n != "tp of more ranks than key heads" or kind == "qwen3 moe"]
    for name, each in zip(names, ranks(4, ranked, folder, [FOUR[n] for n in names])[0], strict=True):
        check(each, wanted, name)


@pytest.mark.parametrize(
    ("kind", "layouts", "form"),
    [("qwen3", ("fsdp", "tp", "cp"), "dora"), ("qwen3 moe", ("fsdp", "tp+sp", "cp", "ep"), "plain")],
)
def test_an_adapter_critic_over_ranks_has_the_gradients_of_one_process(tmp_path, kind, layouts, form):
    folder = folder_of(kind, tmp_path)
    wanted = one_critic(folder, form=form)
    for reported in ranks(2, critics, folder, [TWO[name] for name in layouts], form):
        for name, found in zip(layouts, reported, strict=True):
            assert found.keys() == wanted.keys(), name
            apart = {n: relative(found[n], wanted[n]) for n in wanted}
            assert max(apart.values()) < 2e-5, (name, max(apart, key=lambda n: apart[n]), max(apart.values()))
    assert any(".lora_A." in n for n in wanted) and "value_head.weight" in wanted


def test_recomputed_layers_give_adapters_the_same_gradients(tmp_path):
    folder = folder_of("qwen3 moe", tmp_path)
    wanted = one_process(folder)
    (found,) = ranks(2, ranked, folder, [TWO["tp+sp"]], "plain", "full")[0]
    check(found, wanted, "recompute")
