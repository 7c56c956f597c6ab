"""Adapters in training, in one process or over ranks: the same loss, gradients and weights.

Imported by the ranks: no transformers here, which would cost each of them seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tests.backends.fsdp.load import load_fsdp_model
from tests.backends.fsdp.sharded_runs import CPU, LENGTHS, Found, judged, part_of, rows_of, trained

from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.backends.fsdp.head_models import FsdpCritic
from miles.backends.fsdp.local_critic import LocalCritic
from miles.backends.fsdp.local_model import LocalModel
from miles.backends.fsdp.lora_critic import HeadCritic, LoraCritic
from miles.backends.fsdp.lora_model import LoraBaseModel, LoraModel
from miles.cluster.parallel_dims import ParallelDims
from miles.models.activation_checkpointing import RecomputeMode
from miles.models.checkpoint import hf
from miles.models.families import spec_from_config
from miles.models.lora.targets import LoraSpec, select_targets
from miles.models.spec import DecoderSpec
from miles.train.batch_tensors import MicroBatch
from miles.train.dp_group import SINGLE_RANK


def lora_of(spec: DecoderSpec, form: str) -> LoraSpec:
    words = {"dora": "all-linear", "output layer": "*, lm_head"}.get(form, "*")
    targets = select_targets(spec, words, None)
    is_shared, is_dora = form in ("shared", "dora of shared experts"), form.startswith("dora")
    more = {"shared_outer": is_shared, "use_dora": is_dora, "dropout": 0.3 if form == "dropout" else 0.0}
    return LoraSpec(rank=4, alpha=6.0, targets=targets, **more)


def adapted(base: LoraBaseModel, lora: LoraSpec, folder: str) -> LoraModel:
    """The model under adapters none of which is zero."""
    model = LoraModel(base, lora, base=Path(folder), seed=1)
    fill_factors(model)
    return model


def fill_factors(model: LoraModel) -> None:
    """None of them is zero."""
    random = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.adapters().parameters.items():
            noise = 0.1 * torch.randn(parameter.shape, generator=random)
            parameter.copy_(parameter * (1 + noise) if "magnitude" in name else noise)
    model.after_update()


def one_process(folder: str, *, form: str = "plain") -> Found:
    """The oracle."""
    decoder = hf.load(Path(folder), device="cpu", dtype=torch.float32)
    plan = [rows_of(decoder.spec, number) for number in range(len(LENGTHS))]
    model = adapted(LocalModel(decoder, frozen=True), lora_of(decoder.spec, form), folder)
    return trained(model, plan, SINGLE_RANK, True)


def judge_critic(actor: LoraModel, head: HeadCritic, plan: Sequence[MicroBatch]) -> dict[str, np.ndarray]:
    """The gradients of a critic over the actor's base, none of whose factors is zero."""
    critic = LoraCritic(actor, head, seed=4)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in critic.adapters().parameters.items():
            noise = 0.1 * torch.randn(parameter.shape, generator=random)
            parameter.copy_(parameter * (1 + noise) if "magnitude" in name else noise)
    with critic.in_use():
        return judged(critic, plan)


def one_critic(folder: str, *, form: str = "plain") -> dict[str, np.ndarray]:
    """The oracle."""
    decoder = hf.load(Path(folder), device="cpu", dtype=torch.float32)
    actor = adapted(LocalModel(decoder, frozen=True), lora_of(decoder.spec, form), folder)
    plan = [rows_of(decoder.spec, number) for number in range(len(LENGTHS))]
    return judge_critic(actor, LocalCritic(decoder), plan)


def critics(
    rank: int, world: int, folder: str, layouts: Sequence[ParallelDims], form: str = "plain"
) -> list[dict[str, np.ndarray]]:
    """The same over ranks, for each layout."""
    spec = spec_from_config(hf.read_config(folder))
    found: list[dict[str, np.ndarray]] = []
    for layout in layouts:
        mesh = FsdpMesh(layout, CPU)
        base = load_fsdp_model(Path(folder), spec, mesh, dtype=torch.float32, frozen=True)
        actor = adapted(base, lora_of(spec, form), folder)
        found.append(judge_critic(actor, FsdpCritic(base), part_of(mesh, spec)))
    return found


def ranked(
    rank: int,
    world: int,
    folder: str,
    layouts: Sequence[ParallelDims],
    form: str = "plain",
    recompute: RecomputeMode = "none",
) -> list[Found | None]:
    """The same over ranks, for each layout; ``exact`` says whether the weights are one process's to the last bit."""
    spec = spec_from_config(hf.read_config(folder))
    whole = hf.load(Path(folder), device="cpu", dtype=torch.float32)
    alone = adapted(LocalModel(whole, frozen=True), lora_of(spec, form), folder).parameters()
    found: list[Found | None] = []
    for layout in layouts:
        mesh = FsdpMesh(layout, CPU)
        base = load_fsdp_model(Path(folder), spec, mesh, dtype=torch.float32, frozen=True, recompute=recompute)
        model = adapted(base, lora_of(spec, form), folder)
        exact = all(torch.equal(model.gather(name, p.detach()), alone[name]) for name, p in model.parameters().items())
        reported = trained(model, part_of(mesh, spec), mesh.dp_group, exact)
        found.append(reported if rank == 0 else None)
    return found
