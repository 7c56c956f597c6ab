"""A policy and its teacher held by ranks, and the gradient of a lesson. Imported by the ranks: nothing slow here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tests.backends.fsdp.sharded_runs import CPU, part_of, rows_of
from torch import Tensor

from miles.algo.distillation_loss import TOKEN_SETS, TopKTokens
from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.backends.fsdp.fsdp_model import FsdpModel
from miles.backends.fsdp.local_model import LocalModel
from miles.cluster.parallel_dims import ParallelDims
from miles.models.decoder import Decoder
from miles.models.spec import DecoderSpec
from miles.train.batch_tensors import MicroBatch
from miles.train.distillation import LocalTeachers
from miles.train.grad_accumulation import LogprobReader
from miles.train.logprobs import HeadOutput
from miles.train.model_protocols import KeptTensors, TrainModel

READER = LogprobReader(temperature=0.9, chunk=4)
BATCHES = 4


def weights_of(spec: DecoderSpec, seed: int) -> dict[str, Tensor]:
    """What both sides start from."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: p.shape for name, p in Decoder(spec, device="meta", dtype=torch.float32).named_parameters()}
    return {name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def numbered(rows: MicroBatch) -> MicroBatch:
    """Its samples have the two teachers in turns."""
    return replace(rows, teacher_indices=tuple(i % 2 for i in range(len(rows.lengths))))


def gradient(
    policy: TrainModel, teachers: Sequence[TrainModel], plan: list[MicroBatch], *, in_step: bool
) -> dict[str, Any]:
    """Of the divergence from the teachers, as whole tensors."""
    top = TopKTokens(k=4, tokens=TOKEN_SETS["union"])
    teaching = LocalTeachers(models=teachers, coef=1.0, temperature=0.9, chunk=4, exact=True, top=top, in_step=in_step)

    def judge(number: int, output: HeadOutput) -> tuple[Tensor, KeptTensors]:
        rows = plan[number]
        heard = teaching.forward([rows], READER.run_model)[0]
        logp_R, _ = READER.compute_logprobs(output, rows.target_R)
        kl_R = teaching.compute_terms(heard, output, rows).kl_R
        assert kl_R is not None
        return (rows.weight_R * (kl_R - 0.1 * logp_R)).sum(), {}

    policy.forward_backward(plan, judge)
    policy.finalize_grads()
    grads = {name: p.grad for name, p in policy.parameters().items() if p.grad is not None}
    return {name: policy.gather(name, grad).numpy().copy() for name, grad in grads.items()}


def alone(spec: DecoderSpec) -> dict[str, Any]:
    """All in one process."""
    models: list[LocalModel] = []
    for seed in range(3):
        decoder = Decoder(spec, device="cpu", dtype=torch.float32)
        decoder.load_state_dict(weights_of(spec, seed), strict=False)
        models.append(LocalModel(decoder, frozen=seed > 0))
    plan = [numbered(rows_of(spec, number)) for number in range(BATCHES)]
    return gradient(models[0], models[1:], plan, in_step=False)


def among(rank: int, world: int, spec: DecoderSpec, layouts: Sequence[ParallelDims]) -> list[dict[str, Any] | None]:
    """The same over ranks; the first one tells."""
    found: list[dict[str, Any] | None] = []
    for layout in layouts:
        mesh = FsdpMesh(layout, CPU)
        models = [FsdpModel(spec, mesh, dtype=torch.float32, frozen=seed > 0) for seed in range(3)]
        for seed, model in enumerate(models):
            with torch.no_grad():
                for name, whole in weights_of(spec, seed).items():
                    model.parameters()[name].copy_(model.shard(name, whole))
            model.after_update()
        plan = [numbered(rows) for rows in part_of(mesh, spec)]
        grads = gradient(models[0], models[1:], plan, in_step=layout.data_parallel_size > 1)
        found.append(grads if rank == 0 else None)
    return found
