"""A checkpoint is whole tensors: whoever wrote it, however many they were, whoever reads it has the same bits."""

import asyncio
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.pool import ranks
from tests.train.checkpoint_ranks import (
    VERSION,
    alone,
    empty_handed,
    limited,
    on_disk,
    optimizer_for,
    passed_on,
    same,
    save_alone,
    stepped,
)
from tests.train.small_trainer import DENSE, MOE
from transformers import AutoModelForCausalLM

from miles.cluster.parallel_dims import ParallelDims
from miles.core import markers
from miles.core.errors import CheckpointError
from miles.models.checkpoint.safetensors_io import TensorHeader
from miles.schedule.checkpoints import CheckpointDirectory, Cursor
from miles.train.checkpoint import checkpoint
from miles.train.checkpoint.shards import TensorGroup, assign_owners, plan_files

FSDP, TENSOR = ParallelDims(world=2, shard=2), ParallelDims(world=2, tensor=2)


@pytest.mark.parametrize(
    ("config", "dtype", "layouts"),
    [
        (DENSE, torch.bfloat16, [FSDP, TENSOR]),
        (DENSE | {"tie_word_embeddings": False}, torch.float32, [TENSOR, FSDP]),
        (MOE, torch.bfloat16, [TENSOR, ParallelDims(world=2, shard=2, expert=2)]),
    ],
    ids=["dense bf16", "untied", "moe bf16"],
)
def test_one_process_two_ranks_tensor_ranks_and_one_process_again_hand_on_every_bit(tmp_path, config, dtype, layouts):
    first = alone(config, dtype)
    optimizer = optimizer_for(first)
    for seed in (0, 1):
        stepped(first, optimizer, seed)
    folders = [tmp_path / str(number) for number in range(len(layouts) + 2)]
    save_alone(folders[0], first, optimizer)
    reported = ranks(2, passed_on, layouts, [str(folder) for folder in folders[:-1]], config, dtype)
    assert reported == [[(VERSION, 2)] * len(layouts)] * 2
    last = alone(config, dtype, seed=9)
    again = optimizer_for(last)
    assert checkpoint.load(folders[-2], last, again) == VERSION
    save_alone(folders[-1], last, again)
    for folder in folders[1:]:
        for stem in ("model", "optimizer"):
            same(on_disk(folders[0], stem), on_disk(folder, stem))
    narrow = dtype != torch.float32
    assert any(name.startswith("master.") for name in on_disk(folders[0], "optimizer")) == narrow
    sharded = {p.name for p in folders[1].iterdir()}
    assert {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"} <= sharded
    assert {"optimizer-00002-of-00002.safetensors", "optimizer.safetensors.index.json"} <= sharded
    assert json.loads((folders[1] / "trainer.json").read_text())["format"] == 2
    assert json.loads((folders[-1] / "trainer.json").read_text())["format"] == 1
    theirs = [AutoModelForCausalLM.from_pretrained(folder).state_dict() for folder in (folders[0], folders[1])]
    same(*theirs)
    assert {value.dtype for value in theirs[1].values()} == {dtype}


def test_ranks_export_in_the_dtype_asked_for_and_hand_on_the_float32_weights(tmp_path):
    layouts, narrow = [FSDP, TENSOR], torch.bfloat16
    first = alone(DENSE, torch.float32, save_dtype=narrow)
    optimizer = optimizer_for(first)
    stepped(first, optimizer)
    folders = [tmp_path / str(number) for number in range(3)]
    save_alone(folders[0], first, optimizer)
    ranks(2, passed_on, layouts, [str(folder) for folder in folders], DENSE, torch.float32, narrow)
    for folder in folders[1:]:
        for stem in ("model", "optimizer"):
            same(on_disk(folders[0], stem), on_disk(folder, stem))
        assert {tensor.dtype for tensor in on_disk(folder, "model").values()} == {narrow}
        assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    last = alone(DENSE, torch.float32, seed=9, save_dtype=narrow)
    assert checkpoint.load(folders[-1], last, optimizer_for(last)) == VERSION
    same({n: p.detach() for n, p in first.parameters().items()}, {n: p.detach() for n, p in last.parameters().items()})


def test_a_rank_without_a_row_of_a_parameter_saves_with_the_others(tmp_path):
    """Fifteen rows over four ranks of a matrix that has three: one rank has none, and no moments either."""
    config = DENSE | {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 3 * 2, "hidden_size": 6}
    one = alone(config, torch.float32)
    start, folder = tmp_path / "start", tmp_path / "ranks"
    one.save(start)
    folder.mkdir()
    none = ranks(4, empty_handed, ParallelDims(world=4, shard=4), str(start), str(folder), config)
    assert max(none) > 0 and min(none) == 0, none
    optimizer = optimizer_for(one)
    stepped(one, optimizer)
    save_alone(tmp_path / "one", one, optimizer)
    for stem in ("model", "optimizer"):
        found, wanted = on_disk(folder, stem), on_disk(tmp_path / "one", stem)
        assert found.keys() == wanted.keys()
        assert all(torch.allclose(found[n], wanted[n], rtol=1e-5, atol=1e-7) for n in found)


def test_a_rank_that_cannot_write_is_named_and_the_others_can_save_again(tmp_path):
    start = tmp_path / "start"
    alone(DENSE, torch.float32).save(start)
    folders = [tmp_path / name for name in ("full", "behind", "waited for")]
    for folder in folders:
        folder.mkdir()
    lead, other = ranks(2, limited, FSDP, str(start), [str(folder) for folder in folders], DENSE)
    assert lead[0] == "rank 1 could not write model-00002-of-00002.safetensors: File too large"
    assert lead[1:] == ["saved", "saved"] and other == ["saved"] * 3, "only the lead speaks"
    assert not (folders[0] / "model-00002-of-00002.safetensors").exists()
    for stem in ("model", "optimizer"):
        same(on_disk(folders[1], stem), on_disk(folders[2], stem))
    checkpoints = CheckpointDirectory(tmp_path / "checkpoints")

    async def write(folder):
        for path in folders[0].iterdir():
            path.rename(folder / path.name)

    with pytest.raises(CheckpointError, match=r"step-000003: rank 1 could not write model-00002.*latest: none"):
        asyncio.run(checkpoints.save(Cursor(step=3, version=3), write))
    assert list((tmp_path / "checkpoints").iterdir()) == []
    assert set(markers.collect_files(folders[1])) == {path.name for path in folders[1].glob("*.safetensors")}


@given(sizes=st.lists(st.integers(0, 50), max_size=12), count=st.integers(1, 5), limit=st.none() | st.integers(1, 60))
def test_every_tensor_is_distributed_to_one_rank_and_none_has_much_more_than_another(sizes, count, limit):
    owners = assign_owners(sizes, count)
    held = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(count)]
    assert max(held) - min(held) <= max(sizes, default=0)
    groups = [TensorGroup(tensors=(TensorHeader(str(n), "U8", (size,), size),)) for n, size in enumerate(sizes)]
    files = plan_files("model.safetensors", groups, count, limit)
    assert sorted(n for file in files for n in file.groups) == list(range(len(sizes)))
    assert all(owners[n] == file.rank for file in files for n in file.groups)
    assert len({file.name for file in files}) == len(files)
    for file in files:
        assert limit is None or len(file.groups) <= 1 or sum(sizes[n] for n in file.groups) <= limit
