"""Reward models over ranks and in one process: a step of each, and what a resumed one does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tests.backends.fsdp.load import load_fsdp_model
from tests.backends.fsdp.lora_ranks import lora_of

from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.backends.fsdp.head_models import FsdpRewardModel
from miles.backends.fsdp.lora_reward_model import HeadRewardModel, LoraRewardModel
from miles.backends.fsdp.reward_model import RewardModel
from miles.cluster.executor import InlineExecutor
from miles.cluster.parallel_dims import ParallelDims
from miles.core.types import Batch, Sample
from miles.models.checkpoint import hf
from miles.models.checkpoint.sequence_classifier import SCORE
from miles.models.families import spec_from_config
from miles.train.config import TrainConfig
from miles.train.dp_group import SINGLE_RANK
from miles.train.reward_model_trainer import RewardModelTrainer


def build_trainer(model: Any, dp_group: Any) -> RewardModelTrainer:
    train = TrainConfig(max_tokens_per_gpu=32, adam_eps=1e-2, lr=1e-2, weight_decay=0.5, clip_grad=0.1)
    return RewardModelTrainer(model, train=train, steps=1, updates=10, run=InlineExecutor(), dp_group=dp_group)


def fill(model: HeadRewardModel, folder: str, form: str) -> Any:
    """The reward model with a score that is not zero, under adapters of a ``form`` that are not either."""
    with torch.no_grad():
        score = model.head_parameters[SCORE]
        score.copy_(torch.linspace(-1, 1, score.numel()).view(score.shape))
    if form == "weights":
        return model
    made = LoraRewardModel(model, lora_of(spec_from_config(hf.read_config(folder)), form), base=Path(folder), seed=1)
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in made.adapters().parameters.items():
            noise = 0.1 * torch.randn(parameter.shape, generator=random)
            parameter.copy_(parameter * (1 + noise) if "magnitude" in name else noise)
    made.after_update()
    return made


def step(model: Any, trainer: RewardModelTrainer, batch: tuple[Sample, ...], number: int = 0) -> dict[str, Any]:
    """Metrics of a step, and every whole weight after it."""
    metrics = dict(asyncio.run(trainer.step(Batch(step=number, samples=batch, num_groups=1))).metrics)
    after = {name: model.gather(name, p.detach()).numpy().copy() for name, p in model.parameters().items()}
    return {"metrics": metrics, "after": after}


def one_reward_model(folder: str, batch: tuple[Sample, ...], form: str) -> dict[str, Any]:
    """The oracle, itself held against transformers' classifier and PEFT."""
    decoder = hf.load(Path(folder), device="cpu", dtype=torch.float32)
    model = fill(RewardModel(decoder, config=hf.read_config(folder), like=Path(folder)), folder, form)
    return step(model, build_trainer(model, SINGLE_RANK), batch)


def reward_models(
    rank: int,
    world: int,
    folder: str,
    layouts: Sequence[ParallelDims],
    batch: tuple[Sample, ...],
    form: str,
    out: str,
) -> list[dict[str, Any]]:
    """The same over ranks, for each layout; a second step is that of a resumed trainer."""
    config, found = hf.read_config(folder), list[dict[str, Any]]()
    for number, layout in enumerate(layouts):
        mesh = FsdpMesh(layout, torch.device("cpu"))
        spec, frozen = spec_from_config(config), form != "weights"
        how: dict[str, Any] = {"dtype": torch.float32, "frozen": frozen, "like": Path(folder)}
        base = load_fsdp_model(Path(folder), spec, mesh, **how)
        model = fill(FsdpRewardModel(base, config=config), folder, form)
        trainer = build_trainer(model, mesh.dp_group)
        report = step(model, trainer, batch)
        kept = Path(out) / str(number)
        asyncio.run(trainer.save(kept))
        base.barrier()
        wanted = step(model, trainer, batch, 1)
        heir = build_trainer(model, mesh.dp_group)
        asyncio.run(heir.load(kept))
        again = step(model, heir, batch, 1)
        same = all((again["after"][name] == each).all() for name, each in wanted["after"].items())
        found.append(report | {"resumed": same and again["metrics"] == wanted["metrics"]})
    return found
