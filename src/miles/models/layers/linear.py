"""Linear and embedding layers without initialization: weights always come from a checkpoint or a seed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from miles.kernels.fused.gemv import linear
from miles.kernels.numerics import Numerics
from miles.kernels.quantized.linear import quantized_linear
from miles.models.layers.lora import add_lora, merge_lora
from miles.models.lora.layout import LORA_A, LORA_B, LoraLayout
from miles.models.quantization import QuantizedParam
from miles.models.spec import Activation
from miles.precision.quantize import packed_layout, row_block
from miles.precision.quantized_tensor import QuantizedActivation, QuantizedTensor, StraightThroughWeight, Weight

__all__ = ["Embedding", "Linear", "pack_parameter", "read_weight"]


class Linear(nn.Linear):
    """A linear layer with uninitialized parameters.

    An ``adapter`` (LoRA merged into the weight) receives the layer's output and input, and returns the output with
    gradients to its factors; ``gated_adapter`` also applies the gated activation behind the layer. With ``lora`` the
    factors are applied beside the weight: the parameters ``lora_a`` and ``lora_b``, or what ``read_factors`` returns
    for a dtype. ``quantized`` says how the weight is quantized; where it is ``packed``, ``weight`` and the parameters
    beside it are the packed tensors.
    """

    adapter: Callable[[Tensor, Tensor], Tensor] | None = None
    gated_adapter: Callable[[Tensor, Tensor, Activation], Tensor] | None = None
    lora: LoraLayout | None = None
    read_factors: Callable[[torch.dtype], tuple[Tensor, Tensor]] | None = None
    quantized: QuantizedParam | None = None

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
        self.dtype = dtype

    def reset_parameters(self) -> None: ...

    def forward(self, input: Tensor | QuantizedActivation) -> Tensor:
        out = self._project(input)
        if not self.has_adapter:
            return out
        wide = _read_wide(input)
        if self.lora is not None:
            return add_lora(out, wide, *self.lora_factors(wide.dtype), self.lora, numerics=self.numerics)
        assert self.adapter is not None
        return self.adapter(out, wide)

    def forward_gated(self, input: Tensor | QuantizedActivation, activation: Activation) -> Tensor:
        """The layer with its adapter, followed by the gated activation, by ``gated_adapter``."""
        assert self.gated_adapter is not None
        return self.gated_adapter(self._project(input), _read_wide(input), activation)

    def _project(self, input: Tensor | QuantizedActivation) -> Tensor:
        weight = self.operand()
        if isinstance(weight, Tensor):
            assert isinstance(input, Tensor)
            return linear(input, weight, self.bias, numerics=self.numerics)
        return quantized_linear(input, weight, self.bias, numerics=self.numerics)

    @property
    def has_adapter(self) -> bool:
        """Whether LoRA factors read its input."""
        return self.adapter is not None or self.lora is not None

    def add_factors(self, lora: LoraLayout) -> None:
        """Add LoRA factors, without content, as parameters beside the weight."""
        assert not self.has_adapter, "the layer has an adapter already"
        self.lora = lora
        outputs = sum(stop - start for start, stop in lora.rows)
        shapes = {LORA_A: (len(lora.rows) * lora.rank, self.in_features), LORA_B: (outputs, lora.rank)}
        for name, shape in shapes.items():
            factor = torch.empty(shape, dtype=self.dtype, device=self.weight.device)
            self.register_parameter(name, nn.Parameter(factor, requires_grad=False))

    def merged_weight(self) -> Tensor:
        """Return the weight with the products of LoRA factors that are beside it; it must not be packed."""
        if self.lora is None:
            return self.weight
        return merge_lora(self.weight, *self.lora_factors(self.weight.dtype), self.lora)

    def lora_factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the factors that are beside the weight."""
        if self.read_factors is not None:
            return self.read_factors(dtype)
        return self.get_parameter(LORA_A), self.get_parameter(LORA_B)

    def operand(self) -> Weight:
        """Return the weight that the forward multiplies with."""
        return read_weight(self, "weight", self.quantized)

    def quantize(self, quantized: QuantizedParam) -> None:
        """Quantize the weight from now on."""
        self.quantized = quantized
        pack_parameter(self, "weight", quantized)


def _read_wide(input: Tensor | QuantizedActivation) -> Tensor:
    wide = input.wide if isinstance(input, QuantizedActivation) else input
    assert wide is not None, "adapters read the input before it is quantized"
    return wide


def read_weight(module: nn.Module, name: str, quantized: QuantizedParam | None) -> Weight:
    """Return the parameter ``name`` of a module as its forward uses it."""
    weight: Tensor = getattr(module, name)
    if quantized is None:
        return weight
    if not quantized.packed:
        return StraightThroughWeight(quantized.format, weight, quantized.segments, quantized.backward)
    block = row_block(quantized.format, weight.shape[-2], quantized.segments, quantized.tensor_parallel_size)
    parts: dict[str, Tensor] = {f"{name}{suffix}": getattr(module, f"{name}{suffix}") for suffix in quantized.suffixes}
    return QuantizedTensor.from_tensors(quantized.format, name, parts, block)


def pack_parameter(module: nn.Module, name: str, quantized: QuantizedParam) -> None:
    """Replace the parameter ``name`` by its packed tensors, without content, if they are to be packed."""
    if not quantized.packed:
        return
    weight: Tensor = getattr(module, name)
    layout = packed_layout(quantized.format, weight.shape, quantized.segments, quantized.tensor_parallel_size)
    for suffix, (shape, dtype) in layout.items():
        packed = nn.Parameter(torch.empty(shape, dtype=dtype, device=weight.device), requires_grad=False)
        setattr(module, f"{name}{suffix}", packed)


class Embedding(nn.Embedding):
    """An embedding with uninitialized rows."""

    def reset_parameters(self) -> None: ...
