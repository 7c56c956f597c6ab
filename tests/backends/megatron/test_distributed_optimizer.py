"""Megatron's distributed optimizer: what it leaves in a checkpoint, who goes on from it, and what it refuses."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tests.backends.megatron import cases, optimizer_ranks
from tests.backends.megatron.test_model import DISTRIBUTED_OPTIMIZER, INTERLEAVED, layout
from tests.pool import ranks

from miles.core.errors import UsageError
from miles.train.config import TrainConfig

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

PARTS, CONTEXT, EXPERTS = {"shard": 2}, {"context": 2}, {"context": 2, "expert": 2}
TENSOR, STAGES = {"tensor": 2, "sequence": True}, {"pipeline": 2}


@pytest.mark.parametrize(
    ("kind", "made", "read"),
    [
        ("qwen3", (PARTS, DISTRIBUTED_OPTIMIZER), (TENSOR, DISTRIBUTED_OPTIMIZER)),
        ("qwen3", (STAGES, DISTRIBUTED_OPTIMIZER), (PARTS, DISTRIBUTED_OPTIMIZER)),
        ("deepseek_v3", (STAGES, DISTRIBUTED_OPTIMIZER), (TENSOR, DISTRIBUTED_OPTIMIZER)),  # a stage without experts
        ("qwen3_moe", (EXPERTS, DISTRIBUTED_OPTIMIZER), (STAGES, (*INTERLEAVED, *DISTRIBUTED_OPTIMIZER))),
    ],
)
def test_megatrons_checkpoint_with_its_optimizer_is_read_by_another_layout(tmp_path: Path, kind, made, read):
    cases.written(tmp_path / "model", kind)
    (sizes, flags), (others, more) = made, read
    reported = (layout(sizes), flags), (layout(others), more), tmp_path, "megatron"
    for wanted, found in ranks(2, optimizer_ranks.carried, kind, *reported):
        assert not cases.apart(found, wanted, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_goes_on_to_the_bit_from_its_own_checkpoint(tmp_path: Path, dtype: torch.dtype):
    cases.written(tmp_path / "model", "qwen3_moe")
    (tmp_path / "checkpoint").mkdir()
    same = (layout(EXPERTS), DISTRIBUTED_OPTIMIZER)
    for wanted, found in ranks(2, optimizer_ranks.carried, "qwen3_moe", same, same, tmp_path, "own", dtype):
        assert wanted.keys() == found.keys() and all(torch.equal(wanted[n], found[n]) for n in wanted)


@pytest.mark.parametrize(
    ("made", "read"), [((), DISTRIBUTED_OPTIMIZER), (DISTRIBUTED_OPTIMIZER, ())], ids=["to it", "from it"]
)
def test_either_optimizer_goes_on_from_the_others_checkpoint(tmp_path: Path, made, read):
    cases.written(tmp_path / "model", "qwen3")
    (tmp_path / "checkpoint").mkdir()
    reported = (layout(CONTEXT), made), (layout(STAGES), read), tmp_path, "own"
    for wanted, found in ranks(2, optimizer_ranks.carried, "qwen3", *reported):
        assert not cases.apart(found, wanted, 1e-4)


@pytest.mark.parametrize(
    ("made", "read"),
    [
        ((PARTS, DISTRIBUTED_OPTIMIZER), (PARTS, DISTRIBUTED_OPTIMIZER)),
        ((PARTS, DISTRIBUTED_OPTIMIZER), (STAGES, ())),
        ((TENSOR, ()), (STAGES, DISTRIBUTED_OPTIMIZER)),
        ((CONTEXT, DISTRIBUTED_OPTIMIZER), (TENSOR, DISTRIBUTED_OPTIMIZER)),
    ],
    ids=str,
)
def test_adapters_whose_moments_are_shared_go_on_from_any_checkpoint(tmp_path: Path, made, read):
    folder = cases.written(tmp_path / "model", "qwen3")
    (tmp_path / "checkpoint").mkdir()
    (sizes, flags), (others, more) = made, read
    reported = ranks(
        2, optimizer_ranks.carry_adapters, folder, (layout(sizes), flags), (layout(others), more), tmp_path
    )
    for wanted, found, _ in reported:
        assert not cases.apart(found, wanted, 1e-5)
        if made == read:
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    total = sum(tensor.numel() for tensor in reported[0][0].values())
    shares = [total - total // 2, total // 2] if flags else [total, total]
    assert [size for *_, size in reported] == [2 * 4 * share for share in shares]


@pytest.mark.parametrize("sizes", [PARTS, STAGES], ids=str)
def test_a_gradient_that_is_no_number_is_named_and_changes_nothing(tmp_path: Path, sizes: dict):
    folder, name = cases.written(tmp_path / "model", "qwen3"), "layers.2.mlp.down.weight"
    for said, same in ranks(2, optimizer_ranks.spoiled, folder, layout(sizes), DISTRIBUTED_OPTIMIZER, name):
        assert same and f"first at {name}" in said and "nothing was updated" in said


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"optimizer": "muon"}, "--optimizer muon"),
        ({"optimizer_state_dtype": "int8"}, "--optimizer-state-dtype int8"),
        ({"optimizer_cpu_offload": True}, "--optimizer-cpu-offload"),
    ],
)
def test_what_megatrons_optimizer_cannot_do_is_refused(wrong: dict, said: str):
    from miles.backends.megatron.distributed_optimizer import check_optimizer_config

    with pytest.raises(UsageError, match=said):
        check_optimizer_config(TrainConfig(**wrong))
