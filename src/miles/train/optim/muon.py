"""Muon: matrices are updated by their orthogonalized momentum (Newton-Schulz iteration).

A step needs full matrices. A rank that holds full ones (a whole model, or whole experts of a stack) orthogonalizes its
own. Sharded matrices are gathered in rounds of as many as there are ranks: each rank orthogonalizes one and broadcasts
it.

    all: momentum -> gather 1 .. n -> rank i orthogonalizes matrix i -> broadcast -> own shards of 1 .. n

Shapes: E matrices of a stack (1 if there is none), M rows, N columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor
from torch import distributed as dist

from miles.cluster.host_copies import HostCopies
from miles.models.optim_groups import MuonMatrices
from miles.train.config import TrainConfig
from miles.train.optim import offload_pipeline
from miles.train.optim.master_weights import StateDevice, TrainedParam, scale_grads, select_state_device
from miles.train.optim.quantized_state import make_random_fn, select_formats
from miles.train.optim.state import OptimizerMoments

MOMENTUM = "momentum_buffer"
# Coefficients of the quintic Newton-Schulz iteration, which drives singular values in (0, 1] to about 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPSILON = 1e-7
# Elements of a stack of matrices that are orthogonalized at once.
_MAX_ELEMENTS = 1 << 26


class MatrixModel(Protocol):
    """What Muon needs of a sharded model."""

    def gather(self, name: str, local: Tensor) -> Tensor: ...
    def shard(self, name: str, full: Tensor, /) -> Tensor: ...

    def muon_matrices(self) -> Mapping[str, MuonMatrices]:
        """Return the parameters that are matrices, with full shapes."""
        ...


class Muon:
    """Updates ``params``, all of which are matrices of ``model``.

    Matmuls are in ``precision``; by default bfloat16 on an accelerator, float32 on a CPU.
    """

    def __init__(
        self,
        params: Sequence[TrainedParam],
        config: TrainConfig,
        model: MatrixModel,
        *,
        precision: torch.dtype | None = None,
    ) -> None:
        self._params = list(params)
        self._config = config
        self._model = model
        self._matrices = model.muon_matrices()
        self._precision = precision
        self._offloaded = config.optimizer_cpu_offload
        self._momenta: dict[str, OptimizerMoments] = {}
        self._state_device: StateDevice | None = None
        self._unsharded: set[str] | None = None

    @torch.no_grad()
    def step(self, lr: float, update: int, scale: Tensor | None = None) -> None:
        """Apply the gradients, multiplied by ``scale``. A shard without a gradient counts as zeros."""
        scale_grads(self._params, scale)
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if self._unsharded is None:
            self._unsharded = self._find_unsharded()
        unsharded = self._unsharded
        for param in self._params:
            if param.name in unsharded and param.grad is not None and param.parameter.numel():
                self._update_group([param], lr, update, partial(self._orthogonalize_local, param))
        sharded = sorted((p for p in self._params if p.name not in unsharded), key=self._cost)
        for start in range(0, len(sharded), world):
            group = sharded[start : start + world]
            self._update_group(group, lr, update, partial(self._orthogonalize_sharded, group, rank))

    def state_factories(self) -> dict[str, Callable[[], Tensor]]:
        """Return a factory for each entry of the state."""
        return {
            name: factory for moments in self._momenta.values() for name, factory in moments.state_factories().items()
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Load its entries and remove them from ``state``."""
        self._momenta.clear()
        for weight in self._params:
            if f"{MOMENTUM}.{weight.name}" in state:
                self._momentum(weight).load(state)

    def move(self, device: torch.device, copies: HostCopies) -> None:
        """Move the state to ``device``, unless it is offloaded to the host."""
        if not self._offloaded:
            self._state_device = StateDevice(device)
            raws = [moments.list_raws() for moments in self._momenta.values()]
            copies.move({name: raw for found in raws for name, raw in found.items()}, device)

    @property
    def bytes(self) -> int:
        """Bytes of the momenta."""
        return sum(m.bytes for m in self._momenta.values())

    # -- orthogonalization over ranks ---------------------------------------------------------

    def _find_unsharded(self) -> set[str]:
        """Return the parameters of which every rank has only whole matrices (possibly none)."""
        shapes = [(self._matrices[w.name].shape, tuple(w.parameter.shape)) for w in self._params]
        flags = [local[1:] == shape[1:] if len(shape) == 3 else local == shape for shape, local in shapes]
        if flags and dist.is_initialized():
            reduced = torch.tensor(flags, dtype=torch.int32, device=_communication_device(self._params[0].device))
            dist.all_reduce(reduced, dist.ReduceOp.MIN)
            flags = reduced.tolist()
        return {p.name for p, flag in zip(self._params, flags, strict=True) if flag}

    def _cost(self, weight: TrainedParam) -> tuple[int, str]:
        """Sort by decreasing cost, so that matrices of a round have similar cost."""
        shape = self._matrices[weight.name].shape
        return -prod(shape) * min(shape[-2:]), weight.name

    def _orthogonalize_local(self, param: TrainedParam, momenta: Sequence[Tensor]) -> list[Tensor]:
        return [self._orthogonalize(param.name, momenta[0])]

    def _orthogonalize_sharded(
        self, group: Sequence[TrainedParam], rank: int, momenta: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return this rank's shards of the orthogonalized momenta, of which it orthogonalizes one itself."""
        results: list[Tensor | None] = [None] * len(group)
        for index, (param, shard) in enumerate(zip(group, momenta, strict=True)):
            full = self._model.gather(param.name, shard.to(self._dtype(shard)))
            if index == rank or not dist.is_initialized():
                results[index] = self._orthogonalize(param.name, full)
        out: list[Tensor] = []
        for index, param in enumerate(group):
            result = results[index]
            results[index] = None
            if result is None:
                like = momenta[index]
                result = like.new_empty(self._matrices[param.name].shape, dtype=self._dtype(like))
            out.append(self._model.shard(param.name, _broadcast(result, index)))
        return out

    # -- the update -----------------------------------------------------------------------------

    def _update_group(
        self,
        group: Sequence[TrainedParam],
        lr: float,
        update: int,
        orthogonalize_group: Callable[[Sequence[Tensor]], list[Tensor]],
    ) -> None:
        momenta: list[Tensor] = []
        device = group[0].device
        offload_pipeline.run([self._momentum_job(param, update, momenta) for param in group], device)
        shards = orthogonalize_group(momenta)
        jobs = (self._update_job(param, shard, lr) for param, shard in zip(group, shards, strict=True))
        offload_pipeline.run(jobs, device)

    def _momentum_job(self, weight: TrainedParam, update: int, momenta: list[Tensor]) -> offload_pipeline.OffloadJob:
        """Build the job that updates the momentum and appends the direction of the step to ``momenta``."""
        moments = self._momentum(weight)
        grad = torch.zeros_like(weight.master, device=weight.device) if weight.grad is None else weight.grad
        count, keep = weight.parameter.numel(), self._config.muon_momentum
        seed = crc32(f"{self._config.seed} {update} {weight.name}".encode())

        def work(tensors: tuple[Tensor, ...]) -> None:
            mean = moments.decode(tensors)[0]
            flat = grad.reshape(-1)
            mean.lerp_(flat, 1 - keep)
            direction = flat.lerp(mean, keep) if self._config.muon_use_nesterov else mean.clone()
            momenta.append(direction.view(weight.parameter.shape))
            moments.encode(tensors, [mean], make_random_fn(seed, mean.device))

        return offload_pipeline.OffloadJob(tensors=moments.slice(0, count), work=work)

    def _update_job(self, weight: TrainedParam, shard: Tensor, lr: float) -> offload_pipeline.OffloadJob:
        """Build the job that applies weight decay and the orthogonalized update."""
        decay, scale = self._config.weight_decay, self._scale(weight.name)

        def work(tensors: tuple[Tensor, ...]) -> None:
            master = tensors[0]
            master.mul_(1 - lr * decay)
            if isinstance(scale, Tensor):
                master.addcmul_(shard.to(master.dtype), scale.to(master), value=-lr)
            else:
                master.add_(shard, alpha=-lr * scale)
            if not weight.is_own_master:
                weight.parameter.copy_(master)

        return offload_pipeline.OffloadJob(tensors=(weight.master.detach(),), work=work)

    def _scale(self, name: str) -> float | Tensor:
        """Return the scale of the update: a number, or one per row of this rank's shard."""
        shape, rows = self._matrices[name].shape, self._matrices[name].rows
        sizes = [self._update_scale(len(range(*part)), shape[-1]) for part in rows]
        if len(set(sizes)) == 1:
            return sizes[0]
        scale_M = torch.empty(shape[-2])
        for part, size in zip(rows, sizes, strict=True):
            scale_M[slice(*part)] = size
        return self._model.shard(name, scale_M[:, None].expand(shape))

    def _update_scale(self, outputs: int, inputs: int) -> float:
        factor = self._config.muon_extra_scale_factor
        match self._config.muon_scale_mode:
            case "spectral":
                return factor * max(outputs, inputs) ** 0.5
            case "shape_scaling":
                return factor * max(1.0, outputs / inputs) ** 0.5
            case "unit_rms_norm":
                return factor * (outputs / inputs) ** 0.5

    def _orthogonalize(self, name: str, momentum: Tensor) -> Tensor:
        """Orthogonalize every matrix of a full momentum."""
        out = torch.empty_like(momentum, dtype=self._dtype(momentum))
        stack, outs = (momentum, out) if momentum.ndim == 3 else (momentum[None], out[None])
        count = max(1, _MAX_ELEMENTS // prod(stack.shape[1:]))
        for part in self._matrices[name].rows:
            for start in range(0, len(stack), count):
                block = slice(start, start + count), slice(*part)
                outs[block] = orthogonalize(
                    stack[block], steps=self._config.muon_num_ns_steps, precision=self._dtype(momentum)
                )
        return out

    def _dtype(self, like: Tensor) -> torch.dtype:
        if self._precision is not None:
            return self._precision
        return torch.float32 if like.device.type == "cpu" else torch.bfloat16

    def _momentum(self, weight: TrainedParam) -> OptimizerMoments:
        if weight.name not in self._momenta:
            device = self._state_device or select_state_device(weight.device, offloaded=self._offloaded)
            first, _ = select_formats(self._config.optimizer_state_dtype, weight.parameter.numel())
            self._momenta[weight.name] = OptimizerMoments(weight, {MOMENTUM: first}, device)
        return self._momenta[weight.name]


def _broadcast(tensor: Tensor, rank: int) -> Tensor:
    """Return the tensor of ``rank``."""
    if not dist.is_initialized():
        return tensor
    sent = tensor.contiguous().to(_communication_device(tensor.device))
    dist.broadcast(sent.view(torch.uint8), src=rank)  # as bytes, because not every backend supports every dtype
    return sent.to(tensor.device)


def _communication_device(device: torch.device) -> torch.device:
    """Return the device for communication: the host under gloo."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else device


def orthogonalize(x_EMN: Tensor, *, steps: int, precision: torch.dtype) -> Tensor:
    """Newton-Schulz iteration: same singular vectors, singular values near 1; zero matrices stay zero."""
    a, b, c = _COEFFICIENTS
    tall = x_EMN.shape[-2] > x_EMN.shape[-1]
    x_EMN = (x_EMN.mT if tall else x_EMN).to(precision)
    x_EMN = x_EMN / x_EMN.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPSILON)
    for _ in range(steps):
        gram_EMM = x_EMN @ x_EMN.mT
        gram_EMM = torch.baddbmm(gram_EMM, gram_EMM, gram_EMM, beta=b, alpha=c)
        x_EMN = torch.baddbmm(x_EMN, gram_EMM, x_EMN, beta=a)
    return x_EMN.mT if tall else x_EMN
