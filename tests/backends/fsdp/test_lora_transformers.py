"""Adapters on the linear layers of transformers' own modules, against the PEFT library over the same models."""

import asyncio
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel
from tests.models.hf_adapter_kinds import KINDS, made
from tests.train.small_trainer import distance, ragged, step, weights, worker
from transformers import AutoModelForCausalLM

from miles.backends.fsdp.local_model import LocalModel
from miles.backends.fsdp.lora_model import LoraModel, LoraReference
from miles.core.errors import UsageError
from miles.models.hf_adapter import checkpoint as hf_adapter
from miles.models.lora.targets import LoraSpec, select_targets
from miles.models.resolve import resolve_spec

SEQUENCES = [torch.arange(3, 3 + n) % 31 for n in (5, 1, 9)]
MODELS = {
    "granite": KINDS["factors everywhere"],
    "olmoe": KINDS["experts"],
    "stablelm": KINDS["part of a head turns"],
    "starcoder2": KINDS["biases and means in norms"],
    "minicpm3": KINDS["values shorter than keys"],
}


def adapted(folder: Path, kind="granite", *, wanted=None, recompute=False, noise=0.0, **lora) -> LoraModel:
    if not (folder / "base").exists():
        name, own = MODELS[kind]
        made(name, **own).save_pretrained(folder / "base")
    spec = resolve_spec(folder / "base", "transformers")
    decoder = hf_adapter.load(folder / "base", device="cpu", dtype=torch.float32)
    base = LocalModel(decoder, like=folder / "base", frozen=True, gradient_checkpointing=recompute)
    targets = select_targets(spec, wanted, None)
    model = LoraModel(base, LoraSpec(rank=2, alpha=4.0, targets=targets, **lora), base=folder / "base", seed=1)
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.adapters().parameters.items():
            change = noise * torch.randn(parameter.shape, generator=random)
            parameter.copy_(parameter * (1 + change) if "magnitude" in name else parameter + change)
    model.after_update()
    return model


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("lora", [{}, {"use_dora": True, "use_rslora": True}], ids=["lora", "dora"])
def test_logits_and_gradients_are_those_of_the_peft_library(tmp_path, kind, lora):
    mine = adapted(tmp_path, kind, noise=0.1, **lora)
    kept = tmp_path / "kept"
    kept.mkdir()
    mine.save(kept)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32, attn_implementation="eager")
    theirs = PeftModel.from_pretrained(base, kept / "adapter", is_trainable=True)
    trained = {n.replace(".default", ""): p for n, p in theirs.named_parameters() if p.requires_grad}
    own = {f"base_model.model.{n}": p for n, p in mine.adapters().parameters.items()}
    assert {n.removesuffix(".weight") for n in trained} == {n.removesuffix(".weight") for n in own}
    lengths = [len(s) for s in SEQUENCES]
    positions = torch.cat([torch.arange(n) for n in lengths])
    hidden = mine._base_model.read(torch.cat(SEQUENCES), positions, lengths, None).hidden_TD
    expected = torch.cat([theirs.get_base_model().model(s[None]).last_hidden_state[0] for s in SEQUENCES])
    assert (hidden - expected * hidden.norm() / expected.norm()).abs().max() < 1e-4 * hidden.abs().max()
    scale = hidden.detach().norm() / expected.detach().norm()  # the factor on logits of some models
    pull = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
    (hidden * pull).sum().backward()
    (expected * scale * pull).sum().backward()
    for name, parameter in own.items():
        wanted = trained[name if name in trained else f"{name}.weight"].grad
        assert (parameter.grad - wanted).abs().max() < 2e-4 * wanted.abs().max() + 1e-6, name
    whole = AutoModelForCausalLM.from_pretrained(kept, dtype=torch.float32, attn_implementation="eager").eval()
    merged = torch.cat([whole.model(s[None]).last_hidden_state[0] for s in SEQUENCES])
    assert (merged - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("lora", [{}, {"dropout": 0.2}, {"use_dora": True}], ids=["lora", "dropout", "dora"])
@pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])
def test_a_run_that_is_taken_up_again_goes_on_to_the_bit(tmp_path, lora, recompute):
    def build():
        actor = adapted(tmp_path, recompute=recompute, **lora)
        return worker(
            actor,
            algo={"use_kl_loss": True, "kl_loss_coef": 0.5},
            reference=LoraReference(actor),
            train={"optimizer": "muon"},
        )

    one, two = build(), build()
    for number in range(2):
        step(one, ragged(seed=number), number)
    (tmp_path / "kept").mkdir()
    asyncio.run(one.save(tmp_path / "kept"))
    asyncio.run(two.load(tmp_path / "kept"))
    found = [step(trainer, ragged(seed=5), 2).metrics for trainer in (one, two)]
    assert found[0] == found[1] and found[0]["kl"] != 0
    assert distance(weights(one), weights(two)) == 0.0


def test_the_words_of_target_modules_name_layers_of_transformers(tmp_path):
    made(*[MODELS["olmoe"][0]], **MODELS["olmoe"][1]).save_pretrained(tmp_path)
    spec = resolve_spec(tmp_path, "transformers")

    def names(word):
        return {target.short_name for target in select_targets(spec, word, None)}

    assert names("attn") == names("all-linear") == names("*") == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert names(r".*\.(q|v)_proj") == {"q_proj", "v_proj"}
    assert {t.module for t in select_targets(spec, "layers.1.*.k_proj", None)} == {"model.layers.1.self_attn.k_proj"}
    with pytest.raises(UsageError, match="names no projection"):
        names("experts")
    made(*[MODELS["granite"][0]], **MODELS["granite"][1]).save_pretrained(tmp_path / "dense")
    found = select_targets(resolve_spec(tmp_path / "dense", "transformers"), "mlp", "up_proj")
    assert {t.short_name for t in found} == {"gate_proj", "down_proj"}


def test_an_engine_s_copy_of_the_module_has_no_adapter(tmp_path):
    mine = adapted(tmp_path, noise=0.1)
    copy = mine._base_model._decoder.empty_copy()
    hooks = [hook for module in copy.module.modules() for hook in module._forward_hooks.values()]
    assert hooks and all(hook.adapter is None for hook in hooks)


def test_a_module_that_is_no_linear_layer_is_refused(tmp_path):
    config = transformers.GPT2Config(vocab_size=31, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "base")
    with pytest.raises(UsageError, match="is a Conv1D in transformers, and no linear layer"):
        adapted(tmp_path)
