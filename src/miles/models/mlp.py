"""The MLP of a layer, and the shared one beside experts.

Shapes: T tokens, D hidden, I intermediate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from miles.kernels.arithmetic import exact
from miles.kernels.exact.gate import activated
from miles.kernels.exact.gate import gate as exact_gate
from miles.kernels.gated import activate
from miles.kernels.slim import gated_linear
from miles.kernels.train_gated import gate
from miles.models.linear import Linear
from miles.models.spec import Activation, MlpSpec


class Mlp(nn.Module):
    """Up, activate, down; with a gate, gate and up are one projection."""

    def __init__(self, width: int, spec: MlpSpec, *, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__()
        self.activation: Activation = spec.activation
        made = {"bias": spec.bias, "device": device, "dtype": dtype}
        self.gate_up: Linear | None = None
        self.up: Linear | None = None
        if spec.gated:
            self.gate_up = Linear(width, 2 * spec.size, **made)
        else:
            self.up = Linear(width, spec.size, **made)
        self.down = Linear(spec.size, width, **made)

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.gate_up is not None and self.gate_up.adapter is not None:
            inner_T2I = self.gate_up(x_TD)
            return self.down(exact_gate(inner_T2I, self.activation) if exact() else gate(inner_T2I, self.activation))
        if self.gate_up is not None:
            return self.down(gated_linear(x_TD, self.gate_up.weight, self.gate_up.bias, self.activation))
        assert self.up is not None
        up_TI = self.up(x_TD)
        if exact():
            return self.down(activated(up_TI, self.activation))
        return self.down(activate(up_TI, None, self.activation))
