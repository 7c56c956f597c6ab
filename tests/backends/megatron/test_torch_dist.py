"""Megatron's distributed checkpoints of a run: exact resumption, in the same layout and in others."""

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.backends.megatron import cases
from tests.backends.megatron.test_model import DISTRIBUTED_OPTIMIZER, INTERLEAVED, layout
from tests.backends.megatron.torch_dist_cases import (
    fail_to_write,
    load_and_export,
    load_and_train,
    load_elsewhere,
    save_weights,
    train_and_save,
)
from tests.pool import ranks

from miles.backends.fsdp.local_model import LocalModel
from miles.core.errors import CheckpointError
from miles.launch.main import main
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]


def batches_of(kind: str) -> tuple[Any, ...]:
    return cases.samples(kind), cases.samples(kind, 4)


@pytest.mark.parametrize(
    ("kind", "made", "flags", "dtype"),
    [
        ("qwen3", {"pipeline": 2}, DISTRIBUTED_OPTIMIZER, torch.float32),
        ("qwen3", {"pipeline": 2}, (*INTERLEAVED, *DISTRIBUTED_OPTIMIZER), torch.bfloat16),
        ("qwen3_moe", {"context": 2, "expert": 2}, DISTRIBUTED_OPTIMIZER, torch.bfloat16),
        ("qwen3_moe", {"shard": 2, "expert": 2}, (), torch.bfloat16),
        ("deepseek_v3", {"tensor": 2, "sequence": True}, (), torch.float32),
        ("qwen3_next", {"tensor": 2, "sequence": True}, DISTRIBUTED_OPTIMIZER, torch.bfloat16),
        ("kimi_linear", {"shard": 2, "expert": 2}, DISTRIBUTED_OPTIMIZER, torch.float32),
        ("nemotron_h", {"pipeline": 2}, (), torch.bfloat16),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    tmp_path: Path, kind: str, made: dict[str, Any], flags: tuple[str, ...], dtype: torch.dtype
):
    folder, batches, where = cases.written(tmp_path / "model", kind), batches_of(kind), layout(made)
    (out := tmp_path / "checkpoint").mkdir()
    wanted = ranks(where.world, train_and_save, folder, where, flags, batches, out, dtype)[0]
    files = {path.name for path in out.iterdir()}
    assert {".metadata", "metadata.json", "common.pt", "config.json", "trainer.json"} <= files
    assert not any(name.startswith("model") for name in files)
    assert any(name.startswith("optimizer") for name in files) is not bool(flags)
    found = ranks(where.world, load_and_train, folder, where, flags, batches, out, dtype)[0]
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("kind", "made", "flags", "dtype"),
    [
        ("qwen3", {"pipeline": 2}, DISTRIBUTED_OPTIMIZER, torch.bfloat16),
        ("qwen3_moe", {"shard": 2, "expert": 2}, DISTRIBUTED_OPTIMIZER, torch.float32),
        ("qwen3_next", {"tensor": 2, "sequence": True}, (), torch.bfloat16),
    ],
    ids=str,
)
def test_what_is_written_in_the_background_is_the_state_of_the_save(
    tmp_path: Path, kind: str, made: dict[str, Any], flags: tuple[str, ...], dtype: torch.dtype
):
    folder, batches, where = cases.written(tmp_path / "model", kind), batches_of(kind), layout(made)
    (out := tmp_path / "checkpoint").mkdir()
    wanted = ranks(where.world, train_and_save, folder, where, flags, batches, out, dtype, True)[0]
    found = ranks(where.world, load_and_train, folder, where, flags, batches, out, dtype)[0]
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_save_that_fails_in_the_background_says_so(tmp_path: Path):
    folder = cases.written(tmp_path / "model", "qwen3")
    (out := tmp_path / "checkpoint").mkdir()
    (said,) = ranks(1, fail_to_write, folder, layout({}), out)
    assert "Megatron could not write" in said and "Not a directory" in said


@pytest.mark.parametrize(
    ("kind", "made", "read", "flags"),
    [
        ("qwen3", {"pipeline": 2}, {"tensor": 2, "sequence": True}, DISTRIBUTED_OPTIMIZER),
        ("qwen3_moe", {"shard": 2, "expert": 2}, {"pipeline": 2}, DISTRIBUTED_OPTIMIZER),
        ("qwen3_moe", {"pipeline": 2}, {"shard": 2, "expert": 2}, ()),
        ("nemotron_3", {"shard": 2, "expert": 2}, {"tensor": 2, "sequence": True}, DISTRIBUTED_OPTIMIZER),
        ("deepseek_v32", {"tensor": 2, "sequence": True}, {"pipeline": 2}, DISTRIBUTED_OPTIMIZER),
    ],
    ids=str,
)
def test_another_layout_goes_on(
    tmp_path: Path, kind: str, made: dict[str, Any], read: dict[str, Any], flags: tuple[str, ...]
):
    folder, batches = cases.written(tmp_path / "model", kind), batches_of(kind)
    (out := tmp_path / "checkpoint").mkdir()
    wanted = ranks(2, train_and_save, folder, layout(made), flags, batches, out)[0]
    found = ranks(2, load_and_train, folder, layout(read), flags, batches, out)[0]
    assert not cases.apart(found, wanted, 1e-4)


def test_what_cannot_be_resumed_is_refused_by_name(tmp_path: Path):
    folder, other = cases.written(tmp_path / "model", "qwen3"), cases.written(tmp_path / "other", "llama")
    (out := tmp_path / "checkpoint").mkdir()
    ranks(1, train_and_save, folder, layout({}), DISTRIBUTED_OPTIMIZER, batches_of("qwen3"), out)
    # An optimizer of ours cannot take over Megatron's state.
    (said,) = ranks(1, load_elsewhere, folder, layout({}), out)
    assert "--megatron-use-distributed-optimizer" in said
    (said,) = ranks(1, load_elsewhere, folder, layout({}), out, True)
    assert "has no adapter because its weights were trained" in said
    with pytest.raises(CheckpointError, match=r"torch_dist format; resume with --train-backend megatron"):
        model = LocalModel(hf.load(folder, device="cpu", dtype=torch.float32), config=read_config(folder))
        asyncio.run(cases.trainer_of(model, {}, cases.SINGLE_RANK).load(out))
    # Only the weights, of another family.
    state = json.loads((out / "trainer.json").read_text())
    (out / "trainer.json").write_text(json.dumps(state | {"optimizer": "safetensors"}))
    (out / "optimizer.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    (said,) = ranks(1, load_elsewhere, other, layout({}), out)
    assert "cannot be loaded into a llama model of this size" in said and "linear_" in said
    (out / ".metadata").unlink()
    (said,) = ranks(1, load_elsewhere, folder, layout({}), out)
    assert "is incomplete: .metadata is missing" in said


CONVERTED = [
    ("qwen3", {"tensor": 2, "pipeline": 2, "sequence": True}),
    ("llama", {"pipeline": 2}),
    ("qwen2", {"tensor": 2}),
    ("qwen3_moe", {"shard": 2, "expert": 2}),
    ("qwen2_moe", {"tensor": 2, "sequence": True}),
    ("deepseek_v3", {"tensor": 2, "pipeline": 2, "sequence": True}),
    ("qwen3_next", {"tensor": 2, "pipeline": 2, "sequence": True}),
    ("deepseek_v32", {"shard": 2, "expert": 2}),
    ("kimi_linear", {"tensor": 2, "sequence": True}),
    ("nemotron_3_super", {"tensor": 2, "shard": 2, "expert": 2, "sequence": True}),
    ("lfm2", {"tensor": 2}),
]


@pytest.mark.parametrize(("kind", "sizes"), CONVERTED, ids=str)
def test_megatron_reads_a_converted_checkpoint_in_any_layout(tmp_path: Path, kind: str, sizes: dict[str, Any]):
    folder = cases.written(tmp_path / "model", kind)
    other = cases.written(tmp_path / "other", kind, seed=1)
    assert main(["convert", str(folder), str(tmp_path / "dist"), "--format", "torch_dist"]) == 0
    where = layout(sizes)
    ranks(where.world, load_and_export, other, where, tmp_path / "dist" / "release", tmp_path / "exported")
    wanted, found = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "exported"))
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[name], found[name]) for name in wanted)


@pytest.mark.parametrize(("kind", "sizes"), CONVERTED, ids=str)
def test_what_megatron_wrote_in_any_layout_is_converted(tmp_path: Path, kind: str, sizes: dict[str, Any]):
    folder, where = cases.written(tmp_path / "model", kind), layout(sizes)
    ranks(where.world, save_weights, folder, where, tmp_path / "dist" / "iter_0000007")
    (tmp_path / "dist" / "latest_checkpointed_iteration.txt").write_text("7")
    words = ("--format", "float32", "--origin-hf-dir", str(folder))
    assert main(["convert", str(tmp_path / "dist"), str(tmp_path / "out"), *words]) == 0
    wanted, found = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "out"))
    assert wanted.keys() == found.keys() and all(torch.equal(wanted[name], found[name]) for name in wanted)
