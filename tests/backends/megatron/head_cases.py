"""Critics and reward models on Megatron's ranks and in one process, and the steps that tests compare."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.backends.megatron import cases
from tests.backends.megatron.vision_cases import TOKENS, image_samples
from tests.train.small_trainer import EPS, worker

from miles.algo.config import AlgoConfig
from miles.backends.fsdp.local_critic import LocalCritic
from miles.backends.fsdp.local_model import LocalModel
from miles.backends.fsdp.lora_critic import HeadCritic, LoraCritic
from miles.backends.fsdp.lora_model import LoraModel
from miles.backends.fsdp.lora_reward_model import HeadRewardModel, LoraRewardModel
from miles.backends.fsdp.reward_model import RewardModel
from miles.cluster.executor import InlineExecutor
from miles.cluster.parallel_dims import ParallelDims
from miles.core.errors import CheckpointError
from miles.core.types import Batch, Sample
from miles.models.checkpoint import hf
from miles.models.checkpoint.safetensors_io import read_config
from miles.models.checkpoint.sequence_classifier import SCORE
from miles.models.checkpoint.value_head import value_head_shapes
from miles.models.families import spec_from_config
from miles.models.lora.targets import LoraSpec
from miles.train.config import TrainConfig
from miles.train.critic import Critic
from miles.train.dp_group import SINGLE_RANK
from miles.train.policy_trainer import PolicyTrainer
from miles.train.reward_model_trainer import RewardModelTrainer

PPO = {"advantage_estimator": "ppo", "gamma": 0.97, "lambd": 0.9, "value_clip": 0.05}
TRAIN = {
    **{"max_tokens_per_gpu": 16, "adam_eps": EPS, "lr": 1e-2, "critic_lr": 2e-2, "weight_decay": 0.5},
    "clip_grad": 0.1,
}


def watch_optimizer(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Where every whole gradient of the next step will be, as the optimizer was given it."""
    holder = type("Holder", (), {"_optimizer": optimizer})()
    return cases.watch(model, holder)


def fill_head(model: Any) -> None:
    """A head of zeros would give the decoder no gradient."""
    with torch.no_grad():
        for name, parameter in model.parameters().items():
            if name.startswith(("value_head.", "score.")) and parameter.numel():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))


def ppo_trainer(
    actor: Any, value: Any, dp_group: Any, algo: dict[str, Any], **changes: Any
) -> tuple[PolicyTrainer, Critic]:
    settings, train = AlgoConfig(**PPO, **algo), TrainConfig(**(TRAIN | changes))
    critic = Critic(value, algo=settings, train=train, updates=10, dp_group=dp_group)
    how = {"algo": PPO | algo, "train": TRAIN | changes, "temperature": 0.9, "critic": critic, "dp_group": dp_group}
    return worker(actor, **how), critic


def ppo_step(
    actor: Any, value: Any, dp_group: Any, batch: tuple[Sample, ...], algo: dict[str, Any], **changes: Any
) -> dict[str, Any]:
    """A PPO step: its metrics, the critic's gradients and what both models are after it."""
    fill_head(value)
    trainer, critic = ppo_trainer(actor, value, dp_group, algo, **changes)
    grads = watch_optimizer(value, critic._optimizer)
    report = asyncio.run(trainer.step(Batch(step=0, samples=batch, num_groups=1)))
    after = {name: value.gather(name, p.detach()).clone() for name, p in value.parameters().items()}
    actor_after = {name: actor.gather(name, p.detach()).clone() for name, p in actor.parameters().items()}
    return {"metrics": dict(report.metrics), "grads": grads, "after": after, "actor": actor_after, "trainer": trainer}


def local_pair(folder: Path) -> tuple[LocalModel, LocalCritic]:
    config = read_config(folder)
    actor, value = (hf.load(folder, device="cpu", dtype=torch.float32) for _ in range(2))
    return LocalModel(actor, config=config), LocalCritic(value, config=config)


def ppo_alone(folder: Path, batch: tuple[Sample, ...], algo: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The step in one process, itself held against transformers."""
    return ppo_step(*local_pair(folder), SINGLE_RANK, batch, algo, **changes)


def ppo_shared(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    flags: tuple[str, ...],
    batch: tuple[Sample, ...],
    algo: dict[str, Any],
    out: Path | None,
    **changes: Any,
) -> dict[str, Any]:
    """The step on one of Megatron's ranks; a checkpoint after it is written, read and written by ``save``."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.head_models import MegatronCritic
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        spec, config = spec_from_config(read_config(folder)), read_config(folder)
        how: dict[str, Any] = {"dtype": torch.float32, "flags": flags, "config": config}
        head = value_head_shapes(spec.hidden_size)
        try:
            actor = load_megatron_model(folder, spec, layout, **how)
            value = MegatronCritic(load_megatron_model(folder, spec, layout, **how, scalar_head=head))
            found = ppo_step(actor, value, actor.dp_group, batch, algo, **changes)
            trainer = found.pop("trainer")
            if out is not None:
                asyncio.run(trainer.save(out / "checkpoint"))
                actor.barrier()
                asyncio.run(trainer.load(out / "checkpoint"))
                value.save(out / "critic")
                found["read"] = {n: value.gather(n, p.detach()).clone() for n, p in value.parameters().items()}
            return found
        finally:
            destroy_parallel_state()


def adapter_critic(actor: LoraModel, head: HeadCritic) -> LoraCritic:
    """A critic over the base of ``actor``, none of whose factors is zero."""
    critic = LoraCritic(actor, head, seed=4)
    cases.fill_factors(critic.adapters(), seed=5)
    return critic


def local_adapter_pair(folder: Path, lora: LoraSpec) -> tuple[LoraModel, LoraCritic]:
    decoder = hf.load(folder, device="cpu", dtype=torch.float32)
    actor = cases.adapted(LocalModel(decoder, config=read_config(folder), frozen=True), folder, lora)
    return actor, adapter_critic(actor, LocalCritic(decoder))


def adapter_ppo_alone(folder: Path, batch: tuple[Sample, ...], algo: dict[str, Any], lora: LoraSpec) -> dict[str, Any]:
    """The step of an adapter critic and its policy in one process, itself held against PEFT."""
    return ppo_step(*local_adapter_pair(folder, lora), SINGLE_RANK, batch, algo)


def adapter_ppo_shared(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    flags: tuple[str, ...],
    batch: tuple[Sample, ...],
    algo: dict[str, Any],
    lora: LoraSpec,
    out: Path | None,
) -> dict[str, Any]:
    """The step on one of Megatron's ranks; after it a checkpoint is written, and a resumed step is compared."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.head_models import MegatronValueHead
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        try:
            base = cases.load_frozen(folder, layout, flags, lora)
            actor = cases.adapted(base, folder, lora)
            found = ppo_step(actor, adapter_critic(actor, MegatronValueHead(base)), base.dp_group, batch, algo)
            trainer = found.pop("trainer")
            if out is not None:
                asyncio.run(trainer.save(out))
                base.barrier()
                value = LoraCritic(actor, MegatronValueHead(base), seed=4)
                resumed, _ = ppo_trainer(actor, value, base.dp_group, algo)
                next_steps = [Batch(step=1, samples=batch, num_groups=1)] * 2
                wanted, live = asyncio.run(trainer.step(next_steps[0])), trainer._critic._model.parameters()
                asyncio.run(resumed.load(out))
                found["resumed"] = dict(asyncio.run(resumed.step(next_steps[1])).metrics), dict(wanted.metrics)
                found["equal"] = all(torch.equal(live[name], p) for name, p in value.parameters().items())
            return found
        finally:
            destroy_parallel_state()


def rewarded(kind: str, images: bool = False) -> tuple[Sample, ...]:
    """Ragged samples, with images or without, with a reward each, which PPO's estimator spreads over their tokens."""
    found = image_samples(kind, "turns") if images else cases.samples(kind)
    for number, s in enumerate(found):
        s.advantages[s.mask] = np.float32(number % 3)
    return found


def ppo_with_images(
    rank: int, world: int, folder: Path, layout: ParallelDims, flags: tuple[str, ...], kind: str
) -> dict[str, Any]:
    """The step on one of Megatron's ranks, on samples with images, which no process can send to another."""
    batch = rewarded(kind, images=True)
    return ppo_shared(rank, world, folder, layout, flags, batch, {}, None, max_tokens_per_gpu=TOKENS)


# -- reward models --------------------------------------------------------------------------


def reward_trainer(model: Any, dp_group: Any, **train: Any) -> RewardModelTrainer:
    config = TrainConfig(**(TRAIN | {"max_tokens_per_gpu": 32} | train))
    return RewardModelTrainer(model, train=config, steps=1, updates=10, run=InlineExecutor(), dp_group=dp_group)


def reward_step(model: Any, dp_group: Any, batch: tuple[Sample, ...]) -> dict[str, Any]:
    """A step of a reward model: its metrics, gradients and what it is after it."""
    fill_head(model)
    trainer = reward_trainer(model, dp_group)
    grads = watch_optimizer(model, trainer._optimizer)
    report = asyncio.run(trainer.step(Batch(step=0, samples=batch, num_groups=1)))
    after = {name: model.gather(name, p.detach()).clone() for name, p in model.parameters().items()}
    return {"metrics": dict(report.metrics), "grads": grads, "after": after, "trainer": trainer}


def local_reward_model(folder: Path) -> RewardModel:
    return RewardModel(hf.load(folder, device="cpu", dtype=torch.float32), config=read_config(folder), like=folder)


def adapted_reward_model(model: HeadRewardModel, folder: Path, lora: LoraSpec) -> LoraRewardModel:
    """The reward model under adapters none of which is zero."""
    made = LoraRewardModel(model, lora, base=folder, seed=1)
    cases.fill_factors(made.adapters(), seed=2)
    made.after_update()
    return made


def adapted_reward_shared(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    flags: tuple[str, ...],
    batch: tuple[Sample, ...],
    lora: LoraSpec,
    out: Path | None,
) -> dict[str, Any]:
    """The step on one of Megatron's ranks; after it a checkpoint is written, and a resumed step is compared."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.head_models import MegatronScoreHead
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        try:
            base = cases.load_frozen(folder, layout, flags, lora)
            head = MegatronScoreHead(base, config=read_config(folder))
            model = adapted_reward_model(head, folder, lora)
            found = reward_step(model, base.dp_group, batch)
            trainer = found.pop("trainer")
            if out is not None:
                asyncio.run(trainer.save(out))
                base.barrier()
                step = Batch(step=1, samples=batch, num_groups=1)
                wanted = dict(asyncio.run(trainer.step(step)).metrics)
                after = {name: p.detach().clone() for name, p in model.parameters().items()}
                resumed = reward_trainer(model, base.dp_group)
                asyncio.run(resumed.load(out))
                found["resumed"] = dict(asyncio.run(resumed.step(step)).metrics), wanted
                found["equal"] = all(torch.equal(after[name], p) for name, p in model.parameters().items())
            return found
        finally:
            destroy_parallel_state()


def reward_shared(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    flags: tuple[str, ...],
    batch: tuple[Sample, ...],
    out: Path | None,
) -> dict[str, Any]:
    """The step on one of Megatron's ranks; a checkpoint after it is written, read and written by ``save``."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.head_models import MegatronRewardModel
        from miles.backends.megatron.model import load_megatron_model
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        spec, config = spec_from_config(read_config(folder)), read_config(folder)
        head = {SCORE: (1, spec.hidden_size)}
        try:
            backbone = load_megatron_model(
                folder, spec, layout, dtype=torch.float32, flags=flags, config=config, scalar_head=head
            )
            model = MegatronRewardModel(backbone, config=config)
            found = reward_step(model, backbone.dp_group, batch)
            trainer = found.pop("trainer")
            if out is not None:
                asyncio.run(trainer.save(out / "checkpoint"))
                backbone.barrier()
                asyncio.run(trainer.load(out / "checkpoint"))
                model.save(out / "saved")
                found["read"] = {n: model.gather(n, p.detach()).clone() for n, p in model.parameters().items()}
            return found
        finally:
            destroy_parallel_state()


def reward_torch_dist(
    rank: int,
    world: int,
    folder: Path,
    layout: ParallelDims,
    flags: tuple[str, ...],
    batch: tuple[Sample, ...],
    lora: LoraSpec | None,
    saved: Path,
    *,
    resume: bool,
    background: bool = False,
) -> dict[str, torch.Tensor]:
    """Make a step and save it in Megatron's format, or resume from that; make another; returns whole parameters."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        try:
            backbone, model = build_reward_model(folder, layout, flags, lora)
            options: dict[str, Any] = {"ckpt_format": "torch_dist", "async_save": background}
            trainer = reward_trainer(model, backbone.dp_group, **options)
            if resume:
                asyncio.run(trainer.load(saved))
            else:
                asyncio.run(trainer.step(Batch(step=0, samples=batch, num_groups=1)))
                asyncio.run(trainer.save(saved))
                trainer._saver.wait()
                backbone.barrier()
            assert trainer.version.number == 1
            asyncio.run(trainer.step(Batch(step=1, samples=batch, num_groups=1)))
            return {name: model.gather(name, p.detach()).clone() for name, p in model.parameters().items()}
        finally:
            destroy_parallel_state()


def load_reward_model(
    rank: int, world: int, folder: Path, layout: ParallelDims, lora: LoraSpec | None, saved: Path
) -> str:
    """The error of loading ``saved`` into the reward model of ``folder``."""
    from tests.backends.megatron.shim import on_cpu

    with on_cpu():
        from miles.backends.megatron.parallel_state import destroy_parallel_state

        try:
            backbone, model = build_reward_model(folder, layout, (), lora)
            asyncio.run(reward_trainer(model, backbone.dp_group).load(saved))
        except CheckpointError as error:
            return str(error)
        finally:
            destroy_parallel_state()
    return ""


def build_reward_model(
    folder: Path, layout: ParallelDims, flags: tuple[str, ...], lora: LoraSpec | None
) -> tuple[Any, Any]:
    """A reward model of Megatron on this rank, or adapters and a score over a frozen decoder, and that decoder."""
    from miles.backends.megatron.head_models import MegatronRewardModel, MegatronScoreHead
    from miles.backends.megatron.model import load_megatron_model

    spec, config = spec_from_config(read_config(folder)), read_config(folder)
    if lora is not None:
        base = cases.load_frozen(folder, layout, flags, lora)
        model = adapted_reward_model(MegatronScoreHead(base, config=config), folder, lora)
        fill_head(model)
        return base, model
    how: dict[str, Any] = {"dtype": torch.float32, "flags": flags, "config": config}
    backbone = load_megatron_model(folder, spec, layout, scalar_head={SCORE: (1, spec.hidden_size)}, **how)
    model = MegatronRewardModel(backbone, config=config)
    fill_head(model)
    return backbone, model
