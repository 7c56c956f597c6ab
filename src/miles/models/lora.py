"""Low-rank adapters: two small factors of every targeted matrix are trained, and the matrix is base plus product.

    W' = round(W + scale * B A)        by ``merge``, in both planes, so that they compute with the same bits

The decoder's own parameters are W'. The base is kept beside them and never written. A forward pass is that of W';
backward gives its gradient to the factors without ever making that of W':  dB = s dY^T (X A^T),  dA = s (dY B)^T X.

Shapes: T tokens, I inputs, O outputs of a projection, N outputs of the joined one, r rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from miles.kernels.exact.product import product
from miles.models.linear import Linear
from miles.models.lora_targets import Lora, Target
from miles.models.peft import a_of, b_of

# Numbers of a product that exist at one time.
_AT_ONCE = 1 << 24


@torch.no_grad()
def merge(out_OI: Tensor, base_OI: Tensor, b_Or: Tensor, a_rI: Tensor, scale: float) -> None:
    """Write base plus scaled product into ``out``; where nothing is added, the base's very bits.

    Rows are computed each for itself: any of them alone come out as they do among all.
    """
    step = max(1, _AT_ONCE // a_rI.shape[1])
    factor_Ir = a_rI.T.contiguous()
    for start in range(0, len(base_OI), step):
        rows = slice(start, start + step)
        more_OI = product(b_Or[rows].contiguous(), factor_Ir, None, torch.float32).mul_(scale)
        base = base_OI[rows]
        out_OI[rows].copy_(torch.where(more_OI == 0, base, (base.float() + more_OI).to(base.dtype)))


class _Through(torch.autograd.Function):
    """What a projection gave, as it is; its gradient goes on, and to the factors."""

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


class Adapter:
    """The factors of what one of our matrices is made of, behind that matrix's product."""

    def __init__(self, rows: Sequence[tuple[int, int]], factors: Sequence[tuple[Tensor, Tensor]], scale: float) -> None:
        self._rows, self._scale = tuple(rows), scale
        self._factors = tuple(factor for pair in factors for factor in pair)

    def __call__(self, y_TN: Tensor, x_TI: Tensor) -> Tensor:
        """``y``, through which gradients reach the factors too."""
        if not torch.is_grad_enabled():
            return y_TN
        return _Through.apply(y_TN, x_TI, self._scale, self._rows, *self._factors)  # pyright: ignore[reportReturnType]


class Adapters:
    """All factors of a model, float32 and whole, by the names PEFT has for them; new ones add nothing at first.

    ``seed`` says what new ones start from, whatever the device and the number of ranks.
    """

    def __init__(self, lora: Lora, *, device: torch.device, seed: int) -> None:
        self.lora = lora
        self.parameters: dict[str, Tensor] = {}
        for number, target in enumerate(lora.targets):
            random = torch.Generator().manual_seed((seed << 20) + number)
            bound = 1 / math.sqrt(target.inputs)  # PEFT's own start
            a_rI = torch.empty(lora.rank, target.inputs).uniform_(-bound, bound, generator=random)
            self.parameters[a_of(target)] = nn.Parameter(a_rI.to(device))
            self.parameters[b_of(target)] = nn.Parameter(torch.zeros(target.outputs, lora.rank, device=device))
        self.places: dict[str, list[Target]] = {}
        for target in lora.targets:
            self.places.setdefault(target.ours, []).append(target)

    def attach(self, model: nn.Module) -> None:
        """Have a decoder's projections give gradients to the factors."""
        for ours, targets in self.places.items():
            module = model.get_submodule(ours.removesuffix(".weight"))
            assert isinstance(module, Linear), f"{ours} is no projection"
            rows = [(t.piece.start, t.piece.stop) for t in targets]
            module.adapter = Adapter(rows, [self.factors(t) for t in targets], self.lora.scale)

    def factors(self, target: Target) -> tuple[Tensor, Tensor]:
        """The pair of a target: [r, I] and [O, r]."""
        return self.parameters[a_of(target)], self.parameters[b_of(target)]

    def merge(self, ours: str, out_NI: Tensor, base_NI: Tensor, first: int = 0) -> None:
        """Write base plus products into ``out``, which are rows ``first`` and on of a matrix; no other rows of it."""
        last = first + len(base_NI)
        for target in self.places[ours]:
            start, stop = max(first, target.piece.start), min(last, target.piece.stop)
            if start >= stop:
                continue
            a_rI, b_Or = (factor.detach() for factor in self.factors(target))
            here, own = slice(start - first, stop - first), slice(start - target.piece.start, stop - target.piece.start)
            merge(out_NI[here], base_NI[here], b_Or[own], a_rI, self.lora.scale)

    def move(self, device: torch.device) -> None:
        """Put the factors on ``device``; they stay the same objects."""
        for parameter in self.parameters.values():
            parameter.data = parameter.data.to(device)

    @torch.no_grad()
    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take these values, one for each factor."""
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[name])
