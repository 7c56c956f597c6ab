"""EAGLE-3 heads trained beside a policy of Megatron's, against the trainer of one process."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.backends.megatron import cases
from tests.backends.megatron.draft_cases import Batches, DraftRun, train_alone, train_on_ranks
from tests.backends.megatron.family_cases import family_samples, write_family
from tests.backends.megatron.test_exact import sample_from
from tests.backends.megatron.test_exact import write_model as write_exact_model
from tests.backends.megatron.test_model import AGAIN, DISTRIBUTED_OPTIMIZER, INTERLEAVED, Case, layout
from tests.backends.megatron.test_vision import write_model
from tests.parity.planes import TEMPERATURE
from tests.pool import ranks
from tests.train.draft_ranks import TRAIN
from tests.train.small_trainer import ragged

from miles.kernels.numerics import BATCH_INVARIANT, FAST

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed: miles-rl[megatron]"),
]

SEQUENCE = {"tensor": 2, "sequence": True}
FIRST = ("--num-layers-in-first-pipeline-stage", "1")
EAGLE = DraftRun(kind="eagle3")
BATCHES = [list(ragged(5, seed=number)) for number in range(2)]
CASES = [
    Case("qwen3", {}),
    Case("qwen3", {"pipeline": 2}, AGAIN),
    Case("qwen3", {"pipeline": 2}, INTERLEAVED),
    Case("qwen3 untied", {"pipeline": 2}, (*FIRST, *DISTRIBUTED_OPTIMIZER)),
    Case("qwen3", {"tensor": 2}),
    Case("qwen3", SEQUENCE, AGAIN),
    Case("qwen3", {"context": 2}),
    Case("qwen3", {"shard": 2}, DISTRIBUTED_OPTIMIZER),
    Case("qwen3", SEQUENCE | {"pipeline": 2}, INTERLEAVED),
    Case("qwen3_moe", {"shard": 2, "expert": 2}),
    Case("qwen3_moe", {"pipeline": 2, "context": 2}, INTERLEAVED),
    Case("deepseek_v3", SEQUENCE, DISTRIBUTED_OPTIMIZER),
    Case("nemotron_h", {"pipeline": 2}),
]
FAMILIES = [
    Case("gemma3n", {"pipeline": 2}, AGAIN),
    Case("gemma3n", SEQUENCE | {"pipeline": 2}),
    Case("gemma4 with per-layer inputs and shared keys", {"pipeline": 2}, FIRST),
    Case("hybrid glm 5.3 flash", {"pipeline": 2}, AGAIN),
    Case("deepseek v4", {"pipeline": 2}, INTERLEAVED),
    Case("hybrid qwen4", {"context": 2, "expert": 2}),
]


def compare_training(folder: Path, batches: Batches, case: Case, run: DraftRun = EAGLE) -> None:
    """Hold the head against that of one process, and the policy against the same ranks without a head."""
    where, flags = layout(case.sizes), case.flags
    found = ranks(where.world, train_on_ranks, folder, where, flags, batches, run)
    plain = ranks(where.world, train_on_ranks, folder, where, flags, batches, replace(run, kind=None))
    # Another number of tensor-parallel ranks rounds differently: fast numerics do not check that.
    wanted, _, expected = train_alone(folder, batches, replace(run, numerics=FAST))
    for (metrics, policy, head), (_, plain_policy, _) in zip(found, plain, strict=True):
        assert all(np.array_equal(policy[name], plain_policy[name]) for name in plain_policy)
        assert all(np.array_equal(head[name], found[0][2][name]) for name in head)
        for mine, whole in zip(metrics, wanted, strict=True):
            assert mine["draft_loss"] == pytest.approx(whole["draft_loss"], rel=1e-5)
            assert mine["draft_grad_norm"] == pytest.approx(whole["draft_grad_norm"], rel=1e-4)
            assert mine["draft_agreement_2"] == pytest.approx(whole["draft_agreement_2"])
        for name, value in expected.items():
            np.testing.assert_allclose(head[name], value, rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_ranks_train_the_head_of_one_process_and_leave_the_policy_as_it_is(tmp_path: Path, case: Case):
    compare_training(cases.written(tmp_path / "model", case.kind), BATCHES, case)


@pytest.mark.parametrize("case", FAMILIES, ids=str)
def test_layers_with_other_residual_streams_are_read_too(tmp_path: Path, case: Case):
    write_family(folder := tmp_path / "model", case.kind)
    compare_training(folder, [family_samples(case.kind)] * 2, case)


@pytest.mark.parametrize("sizes", [SEQUENCE, {"pipeline": 2}, {"context": 2}], ids=str)
def test_the_head_of_a_batch_invariant_policy_is_that_of_one_process(tmp_path: Path, sizes: dict[str, Any]):
    samples = sample_from(write_exact_model(tmp_path, "qwen3_moe", torch.float32), sizes.get("tensor", 1))
    settings = replace(TRAIN, max_tokens_per_gpu=70)
    run = DraftRun(kind="eagle3", train=settings, numerics=BATCH_INVARIANT, temperature=TEMPERATURE)
    compare_training(tmp_path, [samples], Case("qwen3_moe", sizes), run)


@pytest.mark.parametrize("sizes", [SEQUENCE, {"pipeline": 2}], ids=str)
def test_the_head_reads_the_policy_with_its_adapters(tmp_path: Path, sizes: dict[str, Any]):
    run = DraftRun(kind="eagle3", modules="all-linear")
    compare_training(cases.written(tmp_path / "model", "qwen3"), BATCHES, Case("qwen3", sizes), run)


@pytest.mark.parametrize("sizes", [SEQUENCE, {"pipeline": 2}], ids=str)
def test_the_head_reads_the_policy_with_its_images(tmp_path: Path, sizes: dict[str, Any]):
    write_model(folder := tmp_path / "model", "qwen3_vl")
    compare_training(folder, "qwen3_vl", Case("qwen3_vl", sizes, FIRST if "pipeline" in sizes else ()))


@pytest.mark.parametrize("torch_dist", [False, True])
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(tmp_path: Path, torch_dist: bool):
    folder, where = cases.written(tmp_path / "model", "qwen3"), layout({"pipeline": 2})
    flags = DISTRIBUTED_OPTIMIZER if torch_dist else ()
    settings = replace(TRAIN, ckpt_format="torch_dist") if torch_dist else TRAIN
    run, more = DraftRun(kind="eagle3", train=settings), [list(ragged(5, seed=9))]
    for name in ("half", "whole", "resumed"):
        (tmp_path / name).mkdir()
    half = ranks(2, train_on_ranks, folder, where, flags, BATCHES, run, tmp_path / "half")
    whole = ranks(2, train_on_ranks, folder, where, flags, [*BATCHES, *more], run, tmp_path / "whole")
    resumed = ranks(2, train_on_ranks, folder, where, flags, more, run, tmp_path / "resumed", tmp_path / "half")
    assert (tmp_path / "half" / ".metadata").exists() is torch_dist
    for part in (1, 2):
        assert all(np.array_equal(whole[0][part][name], resumed[0][part][name]) for name in whole[0][part])
    stored = load_file(tmp_path / "half" / "draft" / "model.safetensors")
    assert any(np.array_equal(value.numpy(), half[0][2]["projection.weight"]) for value in stored.values())
    assert not np.array_equal(half[0][2]["projection.weight"], whole[0][2]["projection.weight"])
