"""Adapters in every training mode and form: adapters alone change, and a resumed run goes on to the bit."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.backends.fsdp.test_lora_model import adapted
from tests.backends.fsdp.test_lora_transformers import adapted as adapted_transformers
from tests.backends.fsdp.test_packed_lora_model import SIZES, packed_actor
from tests.train.small_trainer import DENSE, model, ragged, step, worker
from tests.train.test_critic import PPO
from tests.train.test_preference import pairs
from tests.train.test_reward_model_trainer import lora_scorer, trainer

from miles.algo.config import AlgoConfig
from miles.backends.fsdp.local_critic import LocalCritic
from miles.backends.fsdp.lora_critic import LoraCritic
from miles.backends.fsdp.lora_model import LoraReference
from miles.train.config import TrainConfig
from miles.train.critic import Critic

MODES: dict[str, dict[str, Any]] = {
    "SFT": {"loss_type": "sft_loss"},
    "GRPO": {"use_kl_loss": True, "kl_loss_coef": 0.1},
    "PPO": PPO,
    "DPO": {"loss_type": "dpo_loss"},
    "OPD": {"advantage_estimator": "grpo", "use_opd": True},
}
FORMS: dict[str, dict[str, Any]] = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "dropout": {"dropout": 0.2},
    "Muon": {},
    "transformers": {},
    "INT4 base": {},
    "FP8 base": {},
}


def build_actor(folder: Path, form: str) -> Any:
    match form:
        case "transformers":
            return adapted_transformers(folder)
        case "INT4 base":
            return packed_actor(folder)
        case "FP8 base":
            return packed_actor(folder, name="fp8")
        case _:
            return adapted(folder, lora=FORMS[form])


def build_trainer(folder: Path, mode: str, form: str) -> Any:
    train = {"lr": 1e-2, "adam_eps": 1e-2, "optimizer": "muon" if form == "Muon" else "adam"}
    if mode == "RM":
        return trainer(lora_scorer(folder / "base", **FORMS[form]), **train)
    actor, algo, more = build_actor(folder, form), MODES[mode], {}
    if mode in ("GRPO", "DPO"):
        more["reference"] = LoraReference(actor)
    if mode == "PPO":
        value = LoraCritic(actor, LocalCritic(actor._base_model._decoder), seed=2)
        more["critic"] = Critic(value, algo=AlgoConfig(**algo), train=TrainConfig(**train), updates=10)
    if mode == "OPD":
        more["teachers"] = [
            model(DENSE | SIZES | {"vocab_size": actor._base_model.spec.vocab_size}, seed=5, frozen=True)
        ]
    return worker(actor, algo=algo, train=train, **more)


def read_model(made: Any) -> Any:
    return made._model if hasattr(made, "_model") else made._actor


def read_state(made: Any) -> dict[str, torch.Tensor]:
    found = read_model(made)
    tensors = {**found.parameters(), **found.adapters().parameters}
    if getattr(made, "_critic", None) is not None:
        tensors |= {f"critic.{name}": tensor for name, tensor in made._critic._model.parameters().items()}
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mode", [*MODES, "RM"])
def test_adapters_alone_change_and_a_resumed_run_goes_on_to_the_bit(tmp_path: Path, mode: str, form: str):
    if mode == "RM" and form in ("transformers", "INT4 base", "FP8 base"):
        pytest.skip("it is refused")
    samples = pairs(4) if mode in ("DPO", "RM") else ragged()
    one, two = (build_trainer(tmp_path, mode, form) for _ in range(2))
    before = read_state(one)
    for number in range(2):
        step(one, samples, number)
    after, targets = read_state(one), read_model(one).adapters().targets_by_param
    trained = {name for name in before if ".lora_" in name or name.startswith(("critic.", "score."))}
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved <= trained | set(targets) and any(".lora_B." in name for name in moved)
    assert (mode == "PPO") == any(name.startswith("critic.") and ".lora_" in name for name in moved)
    (tmp_path / "kept").mkdir()
    asyncio.run(one.save(tmp_path / "kept"))
    asyncio.run(two.load(tmp_path / "kept"))
    first, second = (step(each, samples, 2).metrics for each in (one, two))
    assert first == second
    mine, theirs = read_state(one), read_state(two)
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
