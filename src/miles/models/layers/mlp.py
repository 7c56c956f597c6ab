"""MLP of a layer, also used as the shared expert of MoE layers.

Shapes: T tokens, D hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from miles.kernels.batch_invariant.activation import gated_activation as exact_gate
from miles.kernels.batch_invariant.activation import sparsify_gates as sparsify_invariant
from miles.kernels.batch_invariant.activation import ungated_activation
from miles.kernels.fused.activation import (
    apply_activation,
    gated_activation,
    sparsify_gates,
    sparsify_sharded_gates,
)
from miles.kernels.fused.gemv import gated_linear
from miles.kernels.numerics import Numerics
from miles.kernels.quantized.activation_quant import gated_activation_fp8, has_fp8, supports_fused_quantization
from miles.kernels.quantized.linear import gated_quantized_linear
from miles.kernels.runtime.triton_compat import use_triton_inference
from miles.models.layers.linear import Linear
from miles.models.spec import Activation, MlpSpec
from miles.precision.quantized_tensor import QuantizedActivation


class Mlp(nn.Module):
    """Up projection, activation, down projection; if gated, gate and up are one projection."""

    def __init__(
        self, width: int, spec: MlpSpec, *, device: torch.device | str, dtype: torch.dtype, numerics: Numerics
    ) -> None:
        super().__init__()
        self.activation: Activation = spec.activation
        self.sparsity = spec.sparsity
        # Tensor parallelism: how to sum over the ranks, and the channels of all of them, for activation sparsity.
        self.all_channels: tuple[int, Callable[[Tensor], Tensor]] | None = None
        self.numerics = numerics
        factory: dict[str, Any] = {"bias": spec.bias, "device": device, "dtype": dtype, "numerics": numerics}
        self.gate_up: Linear | None = None
        self.up: Linear | None = None
        if spec.gated:
            self.gate_up = Linear(width, 2 * spec.size, **factory)
        else:
            self.up = Linear(width, spec.size, **factory)
        self.down = Linear(spec.size, width, **factory)
        self.interleaved = spec.interleaved
        self.scale = nn.Parameter(torch.empty(1, device=device, dtype=dtype)) if spec.learned_scale else None

    def forward(self, x_TD: Tensor | QuantizedActivation) -> Tensor:
        out_TD = self._project(x_TD)
        return out_TD if self.scale is None else out_TD * self.scale

    def _project(self, x_TD: Tensor | QuantizedActivation) -> Tensor:
        if self.interleaved:
            assert self.gate_up is not None
            gate = exact_gate if self.numerics.batch_invariant else gated_activation
            return self.down(gate(self.gate_up(x_TD), self.activation, interleaved=True))
        if self.sparsity:
            assert self.gate_up is not None
            gate_TI, up_TI = self.gate_up(x_TD).chunk(2, -1)
            gate_TI = self._sparsify(gate_TI)
            if self.numerics.batch_invariant:
                return self.down(exact_gate(torch.cat((gate_TI, up_TI), -1), self.activation))
            return self.down(apply_activation(gate_TI, up_TI, self.activation))
        if self.gate_up is not None and self._fuses_quantization(x_TD):
            down = self.down.quantized
            assert down is not None
            return self.down(gated_activation_fp8(self.gate_up(x_TD), self.activation, down.format))
        if self.gate_up is not None and not self.gate_up.has_adapter and self._gates_quantized():
            weight = self.gate_up.operand()
            assert not isinstance(weight, Tensor)
            return self.down(
                gated_quantized_linear(x_TD, weight, self.gate_up.bias, self.activation, numerics=self.numerics)
            )
        if self.gate_up is not None and self.gate_up.gated_adapter is not None and not self.numerics.batch_invariant:
            return self.down(self.gate_up.forward_gated(x_TD, self.activation))
        if self.gate_up is not None and (self.gate_up.has_adapter or self.gate_up.quantized is not None):
            inner_T2I = self.gate_up(x_TD)
            return self.down(
                exact_gate(inner_T2I, self.activation)
                if self.numerics.batch_invariant
                else gated_activation(inner_T2I, self.activation)
            )
        if self.gate_up is not None:
            gate_up = self.gate_up
            assert isinstance(x_TD, Tensor)
            return self.down(gated_linear(x_TD, gate_up.weight, gate_up.bias, self.activation, numerics=self.numerics))
        assert self.up is not None
        up_TI = self.up(x_TD)
        if self.numerics.batch_invariant:
            return self.down(ungated_activation(up_TI, self.activation))
        return self.down(apply_activation(up_TI, None, self.activation))

    def _sparsify(self, gate_TI: Tensor) -> Tensor:
        if self.numerics.batch_invariant:
            channels, all_reduce = self.all_channels or (gate_TI.shape[-1], None)
            return sparsify_invariant(gate_TI, self.sparsity, channels, all_reduce)
        if self.all_channels is None:
            return sparsify_gates(gate_TI, self.sparsity)
        return sparsify_sharded_gates(gate_TI, self.sparsity, *self.all_channels)

    def _gates_quantized(self) -> bool:
        """Whether gate and up are quantized, and the activation follows in the same call."""
        return self.gate_up is not None and self.gate_up.quantized is not None and not self.numerics.batch_invariant

    def _fuses_quantization(self, x_TD: Tensor | QuantizedActivation) -> bool:
        """Whether the activation's kernel also quantizes the input of ``down``: in an engine, without adapters."""
        quantized = self.down.quantized
        if quantized is None or not quantized.packed or self.down.has_adapter or self.numerics.batch_invariant:
            return False
        rows = x_TD.data if isinstance(x_TD, QuantizedActivation) else x_TD
        supported = supports_fused_quantization(quantized.format, self.down.in_features)
        return supported and use_triton_inference(rows) and has_fp8(rows.device)
