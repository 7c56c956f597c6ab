"""MTP layers trained beside a policy of Megatron's, against the trainer of one process."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.backends.megatron.draft_cases import DraftRun, compare_first_depth, train_alone, train_on_ranks
from tests.backends.megatron.test_model import DISTRIBUTED_OPTIMIZER, layout
from tests.models.draft.mtp_checkpoints import make_reference, save_reference
from tests.pool import ranks
from tests.train.draft_ranks import TRAIN
from tests.train.small_trainer import ragged

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

SPARSE = ("deepseek v3.2", "glm 5")
BATCHES = [list(ragged(5, seed=number)) for number in range(2)]


@pytest.mark.parametrize(
    ("kind", "sizes", "flags"),
    [
        ("mimo", {"pipeline": 2}, ()),
        ("mimo", {"pipeline": 2, "shard": 2}, DISTRIBUTED_OPTIMIZER),
        ("mimo", {"tensor": 2, "sequence": True}, DISTRIBUTED_OPTIMIZER),
        ("mimo", {"context": 2}, ()),
        ("glm-4.5", {"shard": 2, "expert": 2}, ()),
        ("glm-4.5", {"pipeline": 2}, ()),
        ("deepseek v3.2", {"pipeline": 2}, ()),
        ("glm 4.7 flash", {"tensor": 2, "sequence": True}, ()),
        ("glm 5", {"shard": 2, "expert": 2}, ()),
        ("qwen3-next", {"tensor": 2, "sequence": True}, DISTRIBUTED_OPTIMIZER),
        ("qwen3.5", {"context": 2}, ()),
    ],
    ids=str,
)
def test_ranks_train_the_mtp_layers_of_one_process_and_leave_the_policy_as_it_is(
    tmp_path: Path, kind: str, sizes: dict[str, Any], flags: tuple[str, ...]
):
    save_reference(make_reference(kind), tmp_path / "model")
    where, settings = layout(sizes), TRAIN
    if kind in SPARSE:  # whose drafts are trained one step deep
        settings = replace(TRAIN, draft_train_steps=1)
    how, run = (tmp_path / "model", where, flags, BATCHES), DraftRun(kind="mtp", train=settings)
    found = ranks(where.world, train_on_ranks, *how, run)
    plain = ranks(where.world, train_on_ranks, *how, replace(run, kind=None))
    wanted, _, expected = train_alone(tmp_path / "model", BATCHES, run)
    for (metrics, policy, mtp), (_, plain_policy, _) in zip(found, plain, strict=True):
        assert all(np.array_equal(policy[name], plain_policy[name]) for name in plain_policy)
        assert all(np.array_equal(mtp[name], found[0][2][name]) for name in mtp)
        for mine, whole in zip(metrics, wanted, strict=True):
            assert mine["draft_loss"] == pytest.approx(whole["draft_loss"], rel=1e-5)
            assert mine["draft_grad_norm"] == pytest.approx(whole["draft_grad_norm"], rel=1e-4)
            last = f"draft_agreement_{settings.draft_train_steps}"
            assert mine[last] == pytest.approx(whole[last])
        for name, value in expected.items():
            np.testing.assert_allclose(mtp[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


def test_a_checkpoint_contains_the_trained_mtp_tensors_and_is_resumed_to_the_bit(tmp_path: Path):
    own = save_reference(make_reference("glm-4.5"), tmp_path / "model")
    where, more = layout({"pipeline": 2}), [list(ragged(5, seed=9))]
    for name in ("half", "whole", "resumed"):
        (tmp_path / name).mkdir()
    folder, run = tmp_path / "model", DraftRun(kind="mtp")
    half = ranks(2, train_on_ranks, folder, where, (), BATCHES, run, tmp_path / "half")
    whole = ranks(2, train_on_ranks, folder, where, (), [*BATCHES, *more], run, tmp_path / "whole")
    resumed = ranks(2, train_on_ranks, folder, where, (), more, run, tmp_path / "resumed", tmp_path / "half")
    for part in (1, 2):
        assert all(np.array_equal(whole[0][part][name], resumed[0][part][name]) for name in whole[0][part])
    stored = {n: t for f in sorted((tmp_path / "half").glob("model*.safetensors")) for n, t in load_file(f).items()}
    assert own.keys() <= stored.keys()
    name = "model.layers.2.eh_proj.weight"
    assert np.array_equal(stored[name].numpy(), half[0][2]["blocks.0.projection.weight"])
    assert not torch.equal(stored[name], own[name])


def test_the_first_depth_is_that_of_megatrons_own_block(tmp_path: Path):
    save_reference(make_reference("glm-4.5"), tmp_path / "model")
    (far,) = ranks(1, compare_first_depth, tmp_path / "model", BATCHES[0])
    assert all(value < 1e-4 for value in far.values()), far
