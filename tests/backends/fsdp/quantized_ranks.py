"""A quantized model in training over ranks: what each computes, and the packed weights that would be published.

Imported by the ranks: no transformers here, which would cost each of them seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tests.backends.fsdp.sharded_runs import losses, part_of, rows_of

from miles.backends.fsdp.device_mesh import FsdpMesh
from miles.backends.fsdp.fsdp_model import FsdpModel
from miles.backends.fsdp.local_model import LocalModel
from miles.cluster.parallel_dims import ParallelDims
from miles.models.checkpoint import hf
from miles.models.packing import pack_params, packed_spec
from miles.models.spec import DecoderSpec
from miles.precision.formats import FORMATS, QuantizationSpec
from miles.sync.manifest import compute_digests
from miles.train.dp_group import SINGLE_RANK
from miles.train.model_protocols import TrainModel

CPU = torch.device("cpu")


@dataclass(frozen=True)
class QuantizedStep:
    """The loss, whole gradients, and the digests of the packed weights."""

    loss: float
    grads: Mapping[str, np.ndarray]
    digests: Mapping[str, int]


def quantized_spec(folder: str, name: str, dtype: torch.dtype) -> DecoderSpec:
    spec = hf.load(folder, device="meta", dtype=dtype).spec
    return replace(spec, quantization=QuantizationSpec(format=FORMATS[name], packed=False))


def step(model: TrainModel, spec: DecoderSpec, plan: Sequence, dp_group, dtype: torch.dtype) -> QuantizedStep:
    loss, _ = losses(model, plan)
    model.finalize_grads()
    grads = {name: p.grad for name, p in model.parameters().items() if p.grad is not None}
    whole = {name: model.gather(name, p.detach().to(dtype)) for name, p in model.parameters().items()}
    return QuantizedStep(
        loss=float(dp_group.sum(loss)),
        grads={name: model.gather(name, grad).float().numpy().copy() for name, grad in grads.items()},
        digests=compute_digests(pack_params(packed_spec(spec), whole, dtype)),
    )


def in_one_process(folder: str, name: str, dtype_name: str) -> QuantizedStep:
    """The oracle."""
    dtype = getattr(torch, dtype_name)
    spec = quantized_spec(folder, name, dtype)
    decoder = hf.load_model(folder, spec, device="cpu", dtype=dtype)
    plan = [rows_of(spec, number) for number in range(4)]
    return step(LocalModel(decoder), spec, plan, SINGLE_RANK, dtype)


def over_ranks(
    rank: int, world: int, folder: str, layouts: Sequence[ParallelDims], name: str, dtype_name: str
) -> list[QuantizedStep]:
    """The same over ranks, for each layout."""
    dtype = getattr(torch, dtype_name)
    steps: list[QuantizedStep] = []
    for layout in layouts:
        mesh = FsdpMesh(layout, CPU)
        spec = quantized_spec(folder, name, dtype)
        model = FsdpModel(spec, mesh, dtype=dtype)
        model.load(Path(folder))
        steps.append(step(model, spec, part_of(mesh, spec), mesh.dp_group, dtype))
    return steps
