"""A critic of adapters over the policy's base: against autograd over a merged copy, and what is kept of it."""

import asyncio
import json

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.backends.fsdp.test_local_critic import AT, packed
from tests.backends.fsdp.test_lora_model import FORMS, adapted
from tests.train.small_trainer import DENSE, distance, ragged, step, weights, worker
from tests.train.test_critic import PPO
from transformers import AutoModelForCausalLM

from miles.algo.config import AlgoConfig
from miles.backends.fsdp.local_critic import LocalCritic
from miles.backends.fsdp.lora_critic import LoraCritic
from miles.core.errors import CheckpointError
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config
from miles.train.config import TrainConfig
from miles.train.critic import Critic


def critic_over(actor, *, seed=3, recompute=False) -> LoraCritic:
    """A critic over the base of ``actor``, with something in its factors and its head."""
    head = LocalCritic(actor._base_model._decoder, gradient_checkpointing=recompute)
    made = LoraCritic(actor, head, seed=seed)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.parameters().items():
            noise = 0.2 * torch.randn(parameter.shape, generator=random)
            parameter.copy_(parameter * (1 + noise) if "magnitude" in name else noise)
    return made


def ppo(folder, form="plain", *, optimizer="adam", checkpointing=False, **more):
    given = FORMS[form] | ({"gradient_checkpointing": True} if checkpointing else {})
    actor = adapted(folder, **given)
    value = critic_over(actor, recompute=checkpointing)
    train = {"lr": 1e-2, "adam_eps": 1e-2, "critic_lr": 2e-2, "optimizer": optimizer}
    critic = Critic(value, algo=AlgoConfig(**PPO), train=TrainConfig(**train), updates=10)
    return worker(actor, algo=PPO, train=train, critic=critic, **more), value


@pytest.mark.parametrize("form", ["plain", "dora"])
def test_values_and_gradients_are_those_of_the_peft_library_with_a_linear_on_top(tmp_path, form):
    actor = adapted(tmp_path, config=DENSE, **FORMS[form])
    actor._base_model.save(tmp_path / "base")
    value = critic_over(actor)
    (tmp_path / "kept").mkdir()
    value.save(tmp_path / "kept")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, tmp_path / "kept" / "adapter", is_trainable=True)
    sequences, tokens, positions, lengths = packed()
    hidden = torch.cat(
        [theirs.get_base_model().model(torch.from_numpy(s)[None]).last_hidden_state[0] for s in sequences]
    )
    head = load_file(tmp_path / "kept" / "value_head.safetensors")
    weight, bias = (head[f"value_head.{n}"].requires_grad_() for n in ("weight", "bias"))
    expected = (hidden[AT] @ weight.T + bias)[:, 0]
    pull = torch.arange(1.0, 6.0)
    (expected * pull).sum().backward()
    with value.in_use():
        found = value._critic.values(tokens, positions, lengths, AT)
        (found * pull).sum().backward()
    value.finalize_grads()
    assert torch.allclose(found, expected, atol=1e-5)
    live = value.parameters()
    assert torch.allclose(live["value_head.weight"].grad, weight.grad, atol=1e-4)
    named = dict(theirs.named_parameters())
    for name, factor in value.adapters().parameters.items():
        stem = name.removesuffix(".weight")
        wanted = named[f"base_model.model.{stem}.default.weight"].grad
        assert (factor.grad - wanted).abs().max() < 1e-4 * wanted.abs().max() + 1e-6, name
    assert all(p.grad is None for p in actor.adapters().parameters.values())


def test_the_critic_has_no_copy_of_the_base_and_leaves_the_policy_as_it_was(tmp_path):
    actor = adapted(tmp_path)
    before = {name: (p.data_ptr(), p.detach().clone()) for name, p in actor.parameters().items()}
    value = critic_over(actor)
    _, tokens, positions, lengths = packed()
    with value.in_use(), torch.no_grad():
        found = value._critic.values(tokens, positions, lengths, AT)
        merged = {name: p.detach().clone() for name, p in actor._base_model.parameters().items()}
    for name, parameter in actor.parameters().items():
        assert parameter.data_ptr() == before[name][0] and torch.equal(parameter, before[name][1]), name
    decoder = hf.init_random(spec_from_config(DENSE), seed=9, device="cpu", dtype=torch.float32)
    alone = LocalCritic(decoder)
    with torch.no_grad():
        for name, parameter in alone.parameters().items():
            parameter.copy_(value.parameters()[name] if name in value.parameters() else merged[name])
        assert torch.equal(alone.values(tokens, positions, lengths, AT), found)
    assert sum(p.numel() for p in value.parameters().values()) == actor.adapters().lora.num_parameters + 17


def test_the_critic_learns_and_the_policy_is_that_of_a_critic_apart(tmp_path):
    """A critic that is a merged copy gives the same values, so the first update of the policy is the same."""
    trainer, value = ppo(tmp_path)
    other, _ = ppo(tmp_path)
    copy = LocalCritic(hf.init_random(spec_from_config(DENSE), seed=9, device="cpu", dtype=torch.float32))
    with torch.no_grad(), value.in_use():
        live = trainer._actor._base_model.parameters()
        for name, parameter in copy.parameters().items():
            parameter.copy_(value.parameters()[name] if name in value.parameters() else live[name])
    other._critic = Critic(copy, algo=AlgoConfig(**PPO), train=TrainConfig(lr=1e-2), updates=10)
    for each in (trainer, other):
        step(each, ragged())
    assert distance(weights(trainer), weights(other)) == 0.0
    losses = [step(trainer, ragged(seed=5), number).metrics["value_loss"] for number in range(1, 6)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_a_run_with_an_adapter_critic_that_is_resumed_goes_on_to_the_bit(tmp_path, form, optimizer):
    (one, first), (two, second) = (ppo(tmp_path, form, optimizer=optimizer) for _ in range(2))
    for number in range(2):
        step(one, ragged(seed=number), number)
    kept = tmp_path / "kept"
    kept.mkdir()
    asyncio.run(one.save(kept))
    assert sorted(str(p.relative_to(kept / "critic")) for p in (kept / "critic").rglob("[!.]*") if p.is_file()) == [
        "adapter/adapter_config.json",
        "adapter/adapter_model.safetensors",
        "optimizer.safetensors",
        "trainer.json",
        "value_head.safetensors",
    ]
    asyncio.run(two.load(kept))
    for number in (2, 3):
        assert step(one, ragged(seed=number), number).metrics == step(two, ragged(seed=number), number).metrics
    assert distance(weights(one), weights(two)) == 0.0
    for name, parameter in first.parameters().items():
        assert torch.equal(parameter, second.parameters()[name]), name


def test_recomputed_layers_give_the_critic_the_same_gradients(tmp_path):
    (one, first), (two, second) = (ppo(tmp_path, "dropout", checkpointing=c) for c in (False, True))
    for number in range(2):
        mine, theirs = (step(t, ragged(seed=number), number).metrics for t in (one, two))
        assert mine["critic_grad_norm"] == pytest.approx(theirs["critic_grad_norm"], rel=1e-5)
    assert distance(first.parameters(), second.parameters()) < 1e-5


def test_a_critic_of_other_adapters_or_with_weights_of_its_own_is_refused(tmp_path):
    trainer, _ = ppo(tmp_path)
    (tmp_path / "kept").mkdir()
    asyncio.run(trainer.save(tmp_path / "kept"))
    value = critic_over(adapted(tmp_path, rank=3))
    with pytest.raises(CheckpointError, match="holds other adapters than --lora-rank"):
        value.load(tmp_path / "kept" / "critic")
    decoder = hf.init_random(spec_from_config(DENSE), seed=9, device="cpu", dtype=torch.float32)
    (tmp_path / "own").mkdir()
    LocalCritic(decoder, config=DENSE).save(tmp_path / "own")
    with pytest.raises(CheckpointError, match=r"add --critic-load .*own to continue"):
        value.load(tmp_path / "own")
    config = json.loads((tmp_path / "kept" / "critic" / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 2 and config["base_model_name_or_path"] == str(tmp_path)
