"""LoRA adapters on Megatron's column- and row-parallel linear layers, into whose weights they are merged.

A rank has all factors and uses the part that belongs to its part of a weight (``models.lora``). Under sequence
parallelism a column-parallel layer has a part of the tokens at its input, a row-parallel one at its output: backward
gathers the rest.

Shapes: t slots of this rank, I inputs, N outputs of the layer's part.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from miles.backends.megatron.layer_spec import GPTBackbone
from miles.backends.megatron.parallel_state import MegatronGroup, ParallelState
from miles.backends.megatron.param_mapping import ParamMapping, parse_layer_index, possible_names
from miles.models.layers.linear import Linear
from miles.models.lora.adapters import (
    WHOLE,
    LoraAdapter,
    LoraAdapters,
    ParamPart,
    Rows,
    TargetPart,
    compute_factor_grads,
)


def find_part(mapping: ParamMapping, group: MegatronGroup) -> ParamPart:
    """Return which rows or columns of the decoder's weight a tensor-parallel rank has, in Megatron's order."""
    shard = mapping.tp_shard
    if not shard.segments or (group.world == 1 and mapping.heads is None):
        return WHOLE
    numbers = torch.arange(mapping.shape[shard.dim])
    if shard.dim == 0:
        return ParamPart(rows=shard.shard(mapping.to_megatron(numbers), group.rank, group.world))
    return ParamPart(columns=replace(shard, dim=0).shard(numbers, group.rank, group.world))


def attach_adapters(
    chunks: Sequence[GPTBackbone],
    adapters: LoraAdapters,
    mappings: Mapping[str, ParamMapping],
    state: ParallelState,
    *,
    sequence: bool,
) -> None:
    """Attach the adapters to the linear layers of this rank; call once, before the first forward."""
    layers: dict[int, Any] = {layer.layer_number - 1: layer for chunk in chunks for layer in chunk.decoder.layers}
    group = state.tp_group
    for name in adapters.targets_by_param:
        index, mapping = parse_layer_index(name), mappings[name]
        if index not in layers:  # another stage has it
            continue
        module = _find_module(layers[index], name)
        parts = adapters.list_parts(name, find_part(mapping, group))
        # A module of the decoder has all slots at its input and at its output.
        sequence_group = group if sequence and not isinstance(module, Linear) else None
        adapter = ParallelLoraAdapter(
            parts, adapters.lora.scale, sequence_group, is_row_parallel=mapping.tp_shard.dim == 1
        )
        if isinstance(module, Linear):
            module.adapter = adapter
        else:
            module.register_forward_hook(adapter.hook)
    for chunk in chunks:
        if chunk.pre_process:
            # Layers that are recomputed have gradients only if their input has.
            chunk.embedding.register_forward_hook(_require_grad)


def _find_module(layer: nn.Module, name: str) -> nn.Module:
    """Return the linear layer of a weight: Megatron's or the decoder's."""
    modules = dict(layer.named_modules())
    names = [each.removesuffix(".weight") for each in possible_names(name)]
    return next(modules[each] for each in names if each in modules)


def _require_grad(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
    return out.requires_grad_() if torch.is_grad_enabled() else out


class ParallelLoraAdapter(LoraAdapter):
    """The factors in one rank's part of a linear layer; with ``sequence_group`` its ranks share the tokens."""

    def __init__(
        self,
        parts: Sequence[TargetPart],
        scale: float,
        sequence_group: MegatronGroup | None,
        *,
        is_row_parallel: bool,
    ) -> None:
        super().__init__(parts, scale)
        self._sequence_group = sequence_group
        self._is_row_parallel = is_row_parallel

    def hook(self, module: nn.Module, args: tuple[Tensor, ...], out: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        """Megatron's linear layers return the output and a bias."""
        return self(out[0], args[0]), out[1]

    def __call__(self, y_TN: Tensor, x_TI: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return y_TN
        return _ParallelLoraGradient.apply(  # pyright: ignore[reportReturnType]
            y_TN, x_TI, self._scale, self._rows, self._sequence_group, self._is_row_parallel, *self._factors()
        )


class _ParallelLoraGradient(torch.autograd.Function):
    """Identity of a layer's output; its gradient also goes to the factors."""

    @staticmethod
    def forward(
        ctx: Any,
        y_tN: Tensor,
        x_tI: Tensor,
        scale: float,
        rows: tuple[Rows, ...],
        sequence_group: MegatronGroup | None,
        is_row_parallel: bool,
        *factors: Tensor,
    ) -> Tensor:
        ctx.scale, ctx.rows = scale, rows
        ctx.sequence_group, ctx.is_row_parallel = sequence_group, is_row_parallel
        ctx.save_for_backward(x_tI, *factors)
        return y_tN.view_as(y_tN)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tN: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *factors = ctx.saved_tensors
        dy = grad_tN
        if ctx.sequence_group is not None:
            if ctx.is_row_parallel:
                dy = torch.cat(ctx.sequence_group.gather(dy))
            else:
                x = torch.cat(ctx.sequence_group.gather(x))
        x_tI, dy_tN = (each.reshape(-1, each.shape[-1]) for each in (x, dy))
        grads = compute_factor_grads(x_tI, dy_tN, ctx.rows, ctx.scale, factors)
        return (grad_tN, None, None, None, None, None, *grads)
