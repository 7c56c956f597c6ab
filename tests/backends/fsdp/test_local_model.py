import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.train.small_trainer import DENSE, MOE, model, twin
from transformers import Olmo2Config, Olmo2ForCausalLM

from miles.backends.fsdp.local_model import LocalModel
from miles.core.errors import CheckpointError, MilesError
from miles.models.hf_adapter import checkpoint as foreign


def read(actor, sequences, replay=None):
    tokens = torch.from_numpy(np.concatenate(sequences))
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    return actor.read(tokens, positions, [len(s) for s in sequences], replay)


def sequences():
    rng = np.random.default_rng(0)
    return [rng.integers(0, 31, n) for n in (5, 1, 9, 3)]


@pytest.mark.parametrize("config", [DENSE, MOE], ids=["dense", "moe"])
def test_a_packed_reading_gives_transformers_logits_sequence_by_sequence(tmp_path, config):
    actor = model(config)
    reference = twin(actor, tmp_path, config)
    with torch.no_grad():
        logits = read(actor, sequences()).hidden_TD @ actor.head().T
        expected = torch.cat([reference(torch.from_numpy(s)[None]).logits[0] for s in sequences()])
    assert torch.allclose(logits, expected, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_flips_count_the_replayed_experts_the_router_would_not_have_chosen(checkpointing):
    actor = model(MOE, gradient_checkpointing=checkpointing)
    total = sum(len(s) for s in sequences())
    nothing = torch.full((total, 2, 2), -1)
    found = read(actor, sequences(), nothing)
    assert found.replayed is not None and found.replayed == 0 and found.flips == 0
    assert torch.equal(found.hidden_TD, read(actor, sequences()).hidden_TD)
    reported = nothing.clone()
    reported[2:6, 0] = torch.tensor([5, 0])
    found = read(actor, sequences(), reported)
    found.hidden_TD.sum().backward()
    assert found.replayed == 8 and found.flips is not None and 0 <= int(found.flips) <= 8


def test_a_tied_head_is_one_parameter_and_a_frozen_model_wants_no_gradient():
    assert "lm_head.weight" not in model().parameters()
    assert "lm_head.weight" in model(DENSE | {"tie_word_embeddings": False}).parameters()
    frozen = model(frozen=True)
    assert not any(p.requires_grad for p in frozen.parameters().values())
    assert not read(frozen, sequences()).hidden_TD.requires_grad


def test_saved_weights_come_back_into_the_same_tensors(tmp_path):
    actor, other = model(), model(seed=3)
    actor.save(tmp_path)
    pointers = {n: p.data_ptr() for n, p in other.parameters().items()}
    other.load(tmp_path)
    assert all(torch.equal(other.parameters()[n], p) for n, p in actor.parameters().items())
    assert all(p.data_ptr() == pointers[n] for n, p in other.parameters().items())


def test_weights_of_another_model_are_refused(tmp_path):
    model().save(tmp_path)
    with pytest.raises(CheckpointError, match="does not match the model"):
        model(DENSE | {"intermediate_size": 48}).load(tmp_path)


def test_a_sequence_longer_than_the_model_can_place_is_refused():
    with pytest.raises(MilesError, match="65 tokens is longer than the 64 positions"):
        read(model(), [np.zeros(65, np.int64)])


def olmo(folder, seed=0, **changed):
    """An actor that transformers computes."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Olmo2Config(**(sizes | {"vocab_size": 31, "max_position_embeddings": 64, "pad_token_id": None} | changed))
    Olmo2ForCausalLM(config).save_pretrained(folder)
    return LocalModel(foreign.load(folder, device="cpu", dtype=torch.float32), like=folder)


def test_a_foreign_model_is_read_saved_and_loaded_like_any_other(tmp_path):
    actor, other = olmo(tmp_path / "one"), olmo(tmp_path / "other", seed=3)
    reference = Olmo2ForCausalLM.from_pretrained(tmp_path / "one")
    with torch.no_grad():
        logits = read(actor, sequences()).hidden_TD @ actor.head().T
        expected = torch.cat([reference(torch.from_numpy(s)[None]).logits[0] for s in sequences()])
    assert torch.allclose(logits, expected, atol=1e-5)
    actor.save(tmp_path / "saved")
    written, first = (load_file(tmp_path / name / "model.safetensors") for name in ("saved", "one"))
    assert written.keys() == first.keys() and all(torch.equal(written[name], first[name]) for name in first)
    pointers = {n: p.data_ptr() for n, p in other.parameters().items()}
    other.load(tmp_path / "saved")
    assert all(torch.equal(other.parameters()[n], p) for n, p in actor.parameters().items())
    assert all(p.data_ptr() == pointers[n] for n, p in other.parameters().items())
    with pytest.raises(CheckpointError, match="does not match the model"):
        olmo(tmp_path / "wider", intermediate_size=64).load(tmp_path / "saved")
