"""The critic's model against transformers and autograd, and its folder."""

import numpy as np
import pytest
import torch
from tests.train.small_trainer import DENSE, MOE, twin
from transformers import AutoModelForCausalLM

from miles.backends.fsdp.local_critic import HEAD, LocalCritic
from miles.backends.fsdp.local_model import LocalModel
from miles.core.errors import CheckpointError
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config

UNTIED = DENSE | {"tie_word_embeddings": False}


def critic(config=DENSE, *, seed=0, dtype=torch.float32, head=True, device="cpu"):
    """A critic with something in its head."""
    decoder = hf.init_random(spec_from_config(config), seed=seed, device="cpu", dtype=dtype).to(device)
    made = LocalCritic(decoder, config=config)
    if head:
        rng = np.random.default_rng(seed)
        with torch.no_grad():
            for name in ("value_head.weight", "value_head.bias"):
                live = made.parameters()[name]
                live.copy_(torch.from_numpy(rng.normal(scale=0.2, size=live.shape)))
    return made, decoder


def packed():
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 31, n) for n in (5, 1, 9, 3)]
    tokens = torch.from_numpy(np.concatenate(sequences))
    positions = torch.cat([torch.arange(len(s)) for s in sequences])
    return sequences, tokens, positions, [len(s) for s in sequences]


AT = torch.tensor([0, 3, 5, 9, 17])


@pytest.mark.parametrize("config", [DENSE, MOE, UNTIED], ids=["dense", "moe", "untied"])
def test_values_and_gradients_are_those_of_transformers_with_a_linear_on_top(tmp_path, config):
    mine, decoder = critic(config)
    theirs = twin(LocalModel(decoder, config=config), tmp_path, config)
    sequences, tokens, positions, lengths = packed()
    hidden = torch.cat([theirs.model(torch.from_numpy(s)[None]).last_hidden_state[0] for s in sequences])
    weight, bias = (mine.parameters()[f"value_head.{n}"].detach().clone().requires_grad_() for n in ("weight", "bias"))
    expected = (hidden[AT] @ weight.T + bias)[:, 0]
    found = mine.values(tokens, positions, lengths, AT)
    assert torch.allclose(found, expected, atol=1e-5)
    pull = torch.arange(1.0, 6.0)
    (found * pull).sum().backward()
    (expected * pull).sum().backward()
    live = mine.parameters()
    assert torch.allclose(live["value_head.weight"].grad, weight.grad, atol=1e-4)
    assert torch.allclose(live["value_head.bias"].grad, bias.grad)
    gap = live["embedding.weight"].grad - theirs.get_input_embeddings().weight.grad
    assert gap.abs().max() < 1e-4 * theirs.get_input_embeddings().weight.grad.abs().max()


def test_a_new_head_expects_nothing_and_an_unused_output_weight_is_not_trained():
    mine, _ = critic(UNTIED, head=False)
    _, tokens, positions, lengths = packed()
    assert mine.values(tokens, positions, lengths, AT).tolist() == [0.0] * 5
    still = [name for name, p in mine.parameters().items() if not p.requires_grad]
    assert still == ["lm_head.weight"]
    assert all(p.requires_grad for p in critic(DENSE)[0].parameters().values())


def test_the_head_is_in_float32_whatever_the_model_is():
    mine, _ = critic(dtype=torch.bfloat16)
    _, tokens, positions, lengths = packed()
    assert mine.parameters()["embedding.weight"].dtype == torch.bfloat16
    assert mine.values(tokens, positions, lengths, AT).dtype == torch.float32


def test_a_saved_critic_comes_back_into_the_same_tensors_and_its_folder_is_a_model(tmp_path):
    mine, _ = critic()
    other, _ = critic(seed=3)
    mine.save(tmp_path)
    AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    pointers = {n: p.data_ptr() for n, p in other.parameters().items()}
    other.load(tmp_path)
    assert all(torch.equal(other.parameters()[n], p) for n, p in mine.parameters().items())
    assert all(p.data_ptr() == pointers[n] for n, p in other.parameters().items())


def test_moving_keeps_the_parameters_themselves():
    mine, _ = critic()
    before = dict(mine.parameters())
    mine.move(torch.device("cpu"))
    assert all(before[name] is p for name, p in mine.parameters().items())


def test_a_missing_and_a_strange_head_are_refused(tmp_path):
    mine, _ = critic()
    mine.save(tmp_path)
    with pytest.raises(CheckpointError, match="does not match the critic"):
        critic(DENSE | {"hidden_size": 32})[0].load_head(tmp_path)
    (tmp_path / HEAD).unlink()
    with pytest.raises(CheckpointError, match=r"value_head.safetensors cannot be read"):
        mine.load(tmp_path)
