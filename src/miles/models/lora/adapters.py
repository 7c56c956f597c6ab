"""LoRA adapters: two low-rank factors of every target matrix are trained, over a frozen base.

Over a base in the model's dtype the weight is base plus their product:

    W' = round(W + scale * B A)        by ``merge``, in engine and trainer, so that both compute with the same bits

The decoder's own parameters are W'. The base is kept separately and never written. A forward pass uses W'; backward
gives the factors their gradient without computing that of W':  dB = s dY^T (X A^T),  dA = s (dY B)^T X.

Over a packed base the decoder's parameters are the base, and the factors, rounded to the model's dtype, are applied
beside it (``layers.lora``); an engine's decoder has them as parameters of its own (``lora.layout``).

Shapes: T tokens, I inputs, O outputs of a projection, N outputs of the fused projection, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from miles.kernels.batch_invariant.linear import linear_forward
from miles.models.checkpoint.peft import WEIGHTS, lora_a_name, lora_b_name, peft_tensor_name
from miles.models.layers.linear import Linear
from miles.models.lora.layout import LORA_A, LORA_B, LoraLayout, factor_name
from miles.models.lora.targets import LoraSpec, LoraTarget

# Values of the product that are computed at a time.
_CHUNK_VALUES = 1 << 24


@torch.no_grad()
def merge(out_OI: Tensor, base_OI: Tensor, b_Or: Tensor, a_rI: Tensor, scale: float) -> None:
    """Write base plus scaled product into ``out``; where the product is zero, the base's exact bits.

    Rows are computed independently: any subset gives the same bits as all rows.
    """
    step = max(1, _CHUNK_VALUES // a_rI.shape[1])
    factor_Ir = a_rI.T.contiguous()
    for start in range(0, len(base_OI), step):
        rows = slice(start, start + step)
        delta_OI = linear_forward(b_Or[rows].contiguous(), factor_Ir, None, torch.float32).mul_(scale)
        base = base_OI[rows]
        out_OI[rows].copy_(torch.where(delta_OI == 0, base, (base.float() + delta_OI).to(base.dtype)))


class _LoraGradient(torch.autograd.Function):
    """Identity of a projection's output; its gradient also goes to the factors."""

    @staticmethod
    def forward(
        ctx: Any, y_TN: Tensor, x_TI: Tensor, scale: float, rows: tuple[tuple[int, int], ...], *factors: Tensor
    ) -> Tensor:
        ctx.scale, ctx.rows = scale, rows
        ctx.save_for_backward(x_TI, *factors)
        return y_TN.view_as(y_TN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *factors = ctx.saved_tensors
        x_TI, rows_TN = x.reshape(-1, x.shape[-1]), grad_TN.reshape(-1, grad_TN.shape[-1])
        grads: list[Tensor] = []
        for (start, stop), a_rI, b_Or in zip(ctx.rows, factors[::2], factors[1::2], strict=True):
            dy_TO = rows_TN[:, start:stop]
            xa_Tr = x_TI @ a_rI.to(x_TI.dtype).T
            dyb_Tr = dy_TO @ b_Or.to(dy_TO.dtype)
            grads.append((dyb_Tr.T @ x_TI).to(a_rI.dtype).mul_(ctx.scale))
            grads.append((dy_TO.T @ xa_Tr).to(b_Or.dtype).mul_(ctx.scale))
        return (grad_TN, None, None, None, *grads)


class LoraAdapter:
    """The factors of the targets inside one decoder matrix, applied to that matrix's output."""

    def __init__(self, rows: Sequence[tuple[int, int]], factors: Sequence[tuple[Tensor, Tensor]], scale: float) -> None:
        self._rows, self._scale = tuple(rows), scale
        self._factors = tuple(factor for pair in factors for factor in pair)

    def __call__(self, y_TN: Tensor, x_TI: Tensor) -> Tensor:
        """Return ``y``, through which gradients also reach the factors."""
        if not torch.is_grad_enabled():
            return y_TN
        return _LoraGradient.apply(y_TN, x_TI, self._scale, self._rows, *self._factors)  # pyright: ignore[reportReturnType]


def load_engine_factors(
    folder: Path, lora: LoraSpec, *, device: torch.device | str, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Load the factors of a PEFT folder by the names of an engine's parameters."""
    adapters = LoraAdapters(lora, device=torch.device(device), seed=0)
    adapters.load(read_adapter(folder))
    return adapters.build_engine_factors(dtype)


def read_adapter(folder: Path) -> dict[str, Tensor]:
    """Read the factors of a PEFT folder by their parameter names."""
    found = load_file(folder / WEIGHTS)
    return {name.removeprefix(peft_tensor_name("")): tensor for name, tensor in found.items()}


class LoraAdapters:
    """All factors of a model, float32 and unsharded, by PEFT's names; new ones add nothing at first.

    ``seed`` determines the initial values, whatever the device and the number of ranks.
    """

    def __init__(self, lora: LoraSpec, *, device: torch.device, seed: int) -> None:
        self.lora = lora
        self.parameters: dict[str, Tensor] = {}
        for number, target in enumerate(lora.targets):
            random = torch.Generator().manual_seed((seed << 20) + number)
            bound = 1 / math.sqrt(target.inputs)  # PEFT's initialization
            a_rI = torch.empty(lora.rank, target.inputs).uniform_(-bound, bound, generator=random)
            self.parameters[lora_a_name(target)] = nn.Parameter(a_rI.to(device))
            self.parameters[lora_b_name(target)] = nn.Parameter(torch.zeros(target.outputs, lora.rank, device=device))
        self.targets_by_param: dict[str, list[LoraTarget]] = {}
        for target in lora.targets:
            self.targets_by_param.setdefault(target.param_name, []).append(target)

    def attach_beside(self, model: nn.Module) -> None:
        """Attach the factors to a decoder's projections, beside their weights."""
        for name, targets in self.targets_by_param.items():
            module = model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(module, Linear), f"{name} is not a projection"
            rows = tuple((t.piece.start, t.piece.stop) for t in targets)
            module.lora = LoraLayout(rows=rows, rank=self.lora.rank, scale=self.lora.scale)
            module.read_factors = partial(self.fuse_factors, name)

    def fuse_factors(self, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the A and B factors of all targets in a decoder's weight, as its decoder would hold them."""
        factors = [self.factors(target) for target in self.targets_by_param[name]]
        a_XI, b_Or = torch.cat([a_rI for a_rI, _ in factors]), torch.cat([b for _, b in factors])
        return a_XI.to(dtype), b_Or.to(dtype)

    @torch.no_grad()
    def build_engine_factors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return new tensors of all factors in ``dtype``, by the names of an engine's parameters."""
        factors: dict[str, Tensor] = {}
        for name in self.targets_by_param:
            for factor, tensor in zip((LORA_A, LORA_B), self.fuse_factors(name, dtype), strict=True):
                factors[factor_name(name, factor)] = tensor
        return factors

    def attach(self, model: nn.Module) -> None:
        """Attach the adapters to a decoder's projections, into whose weights they are merged."""
        for name, targets in self.targets_by_param.items():
            module = model.get_submodule(name.removesuffix(".weight"))
            assert isinstance(module, Linear), f"{name} is not a projection"
            rows = [(t.piece.start, t.piece.stop) for t in targets]
            module.adapter = LoraAdapter(rows, [self.factors(t) for t in targets], self.lora.scale)

    def factors(self, target: LoraTarget) -> tuple[Tensor, Tensor]:
        """Return the factors of a target: [r, I] and [O, r]."""
        return self.parameters[lora_a_name(target)], self.parameters[lora_b_name(target)]

    def merge(self, name: str, out_NI: Tensor, base_NI: Tensor, first: int = 0) -> None:
        """Write base plus products into ``out``, which are rows ``first`` and on of a matrix; other rows are not
        written.
        """
        last = first + len(base_NI)
        for target in self.targets_by_param[name]:
            start, stop = max(first, target.piece.start), min(last, target.piece.stop)
            if start >= stop:
                continue
            a_rI, b_Or = (factor.detach() for factor in self.factors(target))
            rows, target_rows = (
                slice(start - first, stop - first),
                slice(start - target.piece.start, stop - target.piece.start),
            )
            merge(out_NI[rows], base_NI[rows], b_Or[target_rows], a_rI, self.lora.scale)

    def to(self, device: torch.device) -> None:
        """Move the factors to ``device``; they stay the same objects."""
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(device)

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy these values into the factors."""
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])
