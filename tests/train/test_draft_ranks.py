"""Draft training over FSDP2 ranks: the draft of one process, and a policy that is the same to the bit without it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.models.draft.mtp_checkpoints import make_reference, save_reference
from tests.pool import ranks
from tests.train.draft_ranks import sharded, train, trainer_of
from tests.train.small_trainer import DENSE, MOE, ragged

from miles.models.checkpoint import hf
from miles.models.families import spec_from_config

# Five samples for two ranks: some micro-batches are of one rank alone.
BATCHES = [list(ragged(5, seed=number)) for number in range(2)]


LAYOUTS: dict[str, dict[str, object]] = {
    "data": {"shard": 2},
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence": True},
    "context": {"context": 2},
    "expert": {"shard": 2, "expert": 2},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_train_the_draft_of_one_process_and_leave_the_policy_as_it_is(name: str, tmp_path: Path):
    config, layout = MOE if name == "expert" else DENSE, LAYOUTS[name]
    decoder = hf.init_random(spec_from_config(config), seed=0, device="cpu", dtype=torch.float32)
    hf.export(decoder, tmp_path / "model", config=config)
    folder = str(tmp_path / "model")
    (metrics, policy, draft), (_, _, other) = ranks(2, sharded, folder, "eagle3", BATCHES, None, layout)
    _, plain_policy, _ = ranks(2, sharded, folder, None, BATCHES, None, layout)[0]
    assert all(np.array_equal(policy[name], plain_policy[name]) for name in plain_policy)
    assert all(np.array_equal(draft[name], other[name]) for name in draft)

    trainer, expected = trainer_of(tmp_path / "model", "eagle3", None)
    for mine, whole in zip(metrics, train(trainer, BATCHES), strict=True):
        assert mine["draft_loss"] == pytest.approx(whole["draft_loss"], rel=1e-5)
        assert mine["draft_agreement_2"] == pytest.approx(whole["draft_agreement_2"])
    for name, value in expected.named_parameters():
        np.testing.assert_allclose(draft[name], value.detach().numpy(), rtol=1e-3, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("name", ["data", "tensor"])
def test_a_checkpoint_of_ranks_contains_the_trained_mtp_layers(name: str, tmp_path: Path):
    own = save_reference(make_reference("mimo"), tmp_path / "model")
    reported = ranks(2, sharded, str(tmp_path / "model"), "mtp", BATCHES, str(tmp_path / "run"), LAYOUTS[name])
    draft = reported[0][2]
    parts = sorted((tmp_path / "run").glob("model*.safetensors"))
    stored = {name: tensor for file in parts for name, tensor in load_file(file).items()}
    assert own.keys() <= stored.keys()
    name = "model.mtp_layers.0.input_proj.weight"
    assert np.array_equal(stored[name].numpy(), draft["blocks.0.projection.weight"])
    assert not torch.equal(stored[name], own[name])


@pytest.mark.parametrize("name", ["data", "tensor"])
def test_ranks_that_resume_equal_those_that_were_not_interrupted_to_the_bit(name: str, tmp_path: Path):
    decoder = hf.init_random(spec_from_config(DENSE), seed=0, device="cpu", dtype=torch.float32)
    hf.export(decoder, tmp_path / "model", config=DENSE)
    folder, half, layout = str(tmp_path / "model"), str(tmp_path / "half"), LAYOUTS[name]
    more = [list(ragged(5, seed=9))]
    ranks(2, sharded, folder, "eagle3", BATCHES, half, layout)
    whole = ranks(2, sharded, folder, "eagle3", [*BATCHES, *more], str(tmp_path / "whole"), layout)
    resumed = ranks(2, sharded, folder, "eagle3", more, str(tmp_path / "resumed"), layout, half)
    for (_, policy, draft), (_, own_policy, own_draft) in zip(whole, resumed, strict=True):
        assert all(np.array_equal(draft[name], own_draft[name]) for name in draft)
        assert all(np.array_equal(policy[name], own_policy[name]) for name in policy)
    for file in ("draft/model.safetensors", "draft/optimizer.safetensors"):
        assert (tmp_path / "resumed" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes(), file
