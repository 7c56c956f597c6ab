"""Muon: matrices move along the orthogonal part of their momentum, every direction by the same length.

A step needs whole matrices. Where a rank holds whole ones (all of a model, or whole experts of a stack) it turns its
own. Others are gathered and dealt out: of a round of as many as there are ranks each rank turns one, and gives it to
all.

    all: momentum -> gather 1 .. n -> rank i turns matrix i -> each gives its own to all -> own part of 1 .. n

Shapes: E matrices of a stack (1 where there is none), M rows, N columns.
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

from miles.models.matrices import Matrices
from miles.train import lane
from miles.train.config import TrainConfig
from miles.train.low_bit import chance_of, forms
from miles.train.masters import Home, Weight, home_of
from miles.train.moments import Moments

MOMENTUM = "momentum_buffer"
# The quintic whose repetition drives singular values from anywhere in (0, 1] near 1 in the fewest steps.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_TINY = 1e-7
# Numbers of a stack of matrices that are turned at once.
_AT_ONCE = 1 << 26


class Sharded(Protocol):
    """What the update of whole matrices asks of a model that ranks share."""

    def gather(self, name: str, local: Tensor) -> Tensor: ...
    def cut(self, name: str, whole: Tensor) -> Tensor: ...

    def matrices(self) -> Mapping[str, Matrices]:
        """Which parameters are matrices, in the shape of the whole model."""
        ...


class Muon:
    """Updates ``weights``, all of which are among the matrices of ``model``.

    Products are in ``precision``: bfloat16 on an accelerator, float32 on a CPU when not given.
    """

    def __init__(
        self, weights: Sequence[Weight], config: TrainConfig, model: Sharded, *, precision: torch.dtype | None = None
    ) -> None:
        self._weights, self._config, self._model = list(weights), config, model
        self._known = model.matrices()
        self._precision = precision
        self._hosted = config.optimizer_cpu_offload
        self._momenta: dict[str, Moments] = {}
        self._home: Home | None = None
        self._complete: set[str] | None = None

    @torch.no_grad()
    def step(self, lr: float, update: int) -> None:
        """Take in the gradients. Where ranks share matrices, a part without one counts as zeros."""
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        if self._complete is None:
            self._complete = self._agreed()
        complete = self._complete
        for weight in self._weights:
            if weight.name in complete and weight.grad is not None and weight.parameter.numel():
                self._round([weight], lr, update, partial(self._alone, weight))
        shared = sorted((w for w in self._weights if w.name not in complete), key=self._cost)
        for start in range(0, len(shared), world):
            group = shared[start : start + world]
            self._round(group, lr, update, partial(self._together, group, rank))

    def makers(self) -> dict[str, Callable[[], Tensor]]:
        """What makes each entry of the state."""
        return {name: make for moments in self._momenta.values() for name, make in moments.makers().items()}

    def load(self, state: dict[str, Tensor]) -> None:
        """Take its entries out of ``state``."""
        self._momenta.clear()
        for weight in self._weights:
            if f"{MOMENTUM}.{weight.name}" in state:
                self._momentum(weight).load(state)

    def move(self, device: torch.device) -> None:
        """Hold the state on ``device``, unless it lives on the host anyway."""
        if not self._hosted:
            self._home = Home(device)
            for moments in self._momenta.values():
                moments.move(device)

    @property
    def bytes(self) -> int:
        """What the momenta take."""
        return sum(m.bytes for m in self._momenta.values())

    # -- who turns what -------------------------------------------------------------------------

    def _agreed(self) -> set[str]:
        """The weights of which every rank has whole matrices: what one has all of, others may have nothing of."""
        held = [(self._known[w.name].shape, tuple(w.parameter.shape)) for w in self._weights]
        whole = [local[1:] == shape[1:] if len(shape) == 3 else local == shape for shape, local in held]
        if whole and dist.is_initialized():
            flags = torch.tensor(whole, dtype=torch.int32, device=_speaking(self._weights[0].device))
            dist.all_reduce(flags, dist.ReduceOp.MIN)
            whole = flags.tolist()
        return {w.name for w, flag in zip(self._weights, whole, strict=True) if flag}

    def _cost(self, weight: Weight) -> tuple[int, str]:
        """The dearest first, so that those of a round are alike."""
        shape = self._known[weight.name].shape
        return -prod(shape) * min(shape[-2:]), weight.name

    def _alone(self, weight: Weight, moved: Sequence[Tensor]) -> list[Tensor]:
        return [self._turned(weight.name, moved[0])]

    def _together(self, group: Sequence[Weight], rank: int, moved: Sequence[Tensor]) -> list[Tensor]:
        """This rank's parts of the turned momenta, of which it turns one itself."""
        turned: list[Tensor | None] = [None] * len(group)
        for at, (weight, part) in enumerate(zip(group, moved, strict=True)):
            whole = self._model.gather(weight.name, part.to(self._dtype(part)))
            if at == rank or not dist.is_initialized():
                turned[at] = self._turned(weight.name, whole)
        out: list[Tensor] = []
        for at, weight in enumerate(group):
            result = turned[at]
            turned[at] = None
            if result is None:
                like = moved[at]
                result = like.new_empty(self._known[weight.name].shape, dtype=self._dtype(like))
            out.append(self._model.cut(weight.name, _given(result, at)))
        return out

    # -- the update -----------------------------------------------------------------------------

    def _round(
        self,
        group: Sequence[Weight],
        lr: float,
        update: int,
        turn: Callable[[Sequence[Tensor]], list[Tensor]],
    ) -> None:
        moved: list[Tensor] = []
        device = group[0].device
        lane.run([self._gathering(weight, update, moved) for weight in group], device)
        parts = turn(moved)
        jobs = (self._applying(weight, part, lr) for weight, part in zip(group, parts, strict=True))
        lane.run(jobs, device)

    def _gathering(self, weight: Weight, update: int, moved: list[Tensor]) -> lane.Job:
        """Take the gradient into the momentum."""
        moments = self._momentum(weight)
        grad = torch.zeros_like(weight.master, device=weight.device) if weight.grad is None else weight.grad
        count, keep = weight.parameter.numel(), self._config.muon_momentum
        seed = crc32(f"{self._config.seed} {update} {weight.name}".encode())

        def work(held: tuple[Tensor, ...]) -> None:
            mean = moments.decode(held)[0]
            flat = grad.reshape(-1)
            mean.lerp_(flat, 1 - keep)
            ahead = flat.lerp(mean, keep) if self._config.muon_use_nesterov else mean.clone()
            moved.append(ahead.view(weight.parameter.shape))
            moments.encode(held, [mean], chance_of(seed, mean.device))

        return lane.Job(held=moments.cut(0, count), work=work)

    def _applying(self, weight: Weight, part: Tensor, lr: float) -> lane.Job:
        """Let the matrix fade, and move it."""
        decay, scale = self._config.weight_decay, self._scale(weight.name)

        def work(held: tuple[Tensor, ...]) -> None:
            master = held[0]
            master.mul_(1 - lr * decay)
            if isinstance(scale, Tensor):
                master.addcmul_(part.to(master.dtype), scale.to(master), value=-lr)
            else:
                master.add_(part, alpha=-lr * scale)
            if not weight.own:
                weight.parameter.copy_(master)

        return lane.Job(held=(weight.master.detach(),), work=work)

    def _scale(self, name: str) -> float | Tensor:
        """How long a step is for a learning rate of 1: a number, or one for each row this rank has."""
        shape, rows = self._known[name].shape, self._known[name].rows
        sizes = [self._length(len(range(*part)), shape[-1]) for part in rows]
        if len(set(sizes)) == 1:
            return sizes[0]
        scale_M = torch.empty(shape[-2])
        for part, size in zip(rows, sizes, strict=True):
            scale_M[slice(*part)] = size
        return self._model.cut(name, scale_M[:, None].expand(shape))

    def _length(self, outputs: int, inputs: int) -> float:
        factor = self._config.muon_extra_scale_factor
        match self._config.muon_scale_mode:
            case "spectral":
                return factor * max(outputs, inputs) ** 0.5
            case "shape_scaling":
                return factor * max(1.0, outputs / inputs) ** 0.5
            case "unit_rms_norm":
                return factor * (outputs / inputs) ** 0.5

    def _turned(self, name: str, moved: Tensor) -> Tensor:
        """The orthogonal part of every matrix in a momentum that is whole."""
        out = torch.empty_like(moved, dtype=self._dtype(moved))
        stack, outs = (moved, out) if moved.ndim == 3 else (moved[None], out[None])
        many = max(1, _AT_ONCE // prod(stack.shape[1:]))
        for part in self._known[name].rows:
            for start in range(0, len(stack), many):
                some = slice(start, start + many), slice(*part)
                outs[some] = orthogonal(stack[some], steps=self._config.muon_num_ns_steps, precision=self._dtype(moved))
        return out

    def _dtype(self, like: Tensor) -> torch.dtype:
        if self._precision is not None:
            return self._precision
        return torch.float32 if like.device.type == "cpu" else torch.bfloat16

    def _momentum(self, weight: Weight) -> Moments:
        if weight.name not in self._momenta:
            home = self._home or home_of(weight.device, hosted=self._hosted)
            first, _ = forms(self._config.optimizer_state_dtype, weight.parameter.numel())
            self._momenta[weight.name] = Moments(weight, {MOMENTUM: first}, home)
        return self._momenta[weight.name]


def _given(tensor: Tensor, rank: int) -> Tensor:
    """What ``rank`` has in a tensor that all have of this shape."""
    if not dist.is_initialized():
        return tensor
    sent = tensor.contiguous().to(_speaking(tensor.device))
    dist.broadcast(sent.view(torch.uint8), src=rank)  # bytes: not every backend knows every precision
    return sent.to(tensor.device)


def _speaking(device: torch.device) -> torch.device:
    """Where tensors lie that ranks hand each other: ranks that share a device do it by way of the host."""
    return torch.device("cpu") if dist.get_backend() == "gloo" else device


def orthogonal(x_EMN: Tensor, *, steps: int, precision: torch.dtype) -> Tensor:
    """Matrices with the same singular vectors, whose singular values are all near 1; what is zero stays so."""
    a, b, c = _COEFFICIENTS
    tall = x_EMN.shape[-2] > x_EMN.shape[-1]
    x_EMN = (x_EMN.mT if tall else x_EMN).to(precision)
    x_EMN = x_EMN / x_EMN.norm(dim=(-2, -1), keepdim=True).clamp(min=_TINY)
    for _ in range(steps):
        gram_EMM = x_EMN @ x_EMN.mT
        gram_EMM = torch.baddbmm(gram_EMM, gram_EMM, gram_EMM, beta=b, alpha=c)
        x_EMN = torch.baddbmm(x_EMN, gram_EMM, x_EMN, beta=a)
    return x_EMN.mT if tall else x_EMN
