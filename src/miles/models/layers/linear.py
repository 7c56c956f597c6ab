"""Linear and embedding layers without initialization: weights always come from a checkpoint or a seed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from miles.kernels.fused.gemv import linear
from miles.kernels.numerics import Numerics


class Linear(nn.Linear):
    """A linear layer with uninitialized parameters.

    An ``adapter`` (LoRA) receives the layer's output and input, and returns the output with gradients to its factors.
    """

    adapter: Callable[[Tensor, Tensor], Tensor] | None = None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        device: torch.device | str,
        dtype: torch.dtype,
        numerics: Numerics,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.numerics = numerics

    def reset_parameters(self) -> None: ...

    def forward(self, input: Tensor) -> Tensor:
        out = linear(input, self.weight, self.bias, numerics=self.numerics)
        return out if self.adapter is None else self.adapter(out, input)


class Embedding(nn.Embedding):
    """An embedding with uninitialized rows."""

    def reset_parameters(self) -> None: ...
