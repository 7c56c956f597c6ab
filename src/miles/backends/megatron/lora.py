"""LoRA adapters on Megatron's column- and row-parallel linear layers, and on the decoder's modules in its layers.

A rank has all factors and uses the part that belongs to its part of a weight (``models.lora``). Under sequence
parallelism a column-parallel layer has a part of the tokens at its input, a row-parallel one at its output: backward
gathers the rest.

Shapes: t slots of this rank, I inputs, N outputs of the layer's part.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.hooks import RemovableHandle

from miles.backends.megatron.decoder_modules import DecoderModule
from miles.backends.megatron.layer_spec import GPTBackbone
from miles.backends.megatron.module_choice import MIXER_NAMES
from miles.backends.megatron.parallel_state import MegatronGroup, ParallelState
from miles.backends.megatron.param_mapping import ParamMapping, megatron_names, parse_layer_index
from miles.models.lora.adapters import (
    LoraAdapter,
    LoraAdapters,
    ParamPart,
    Rows,
    TargetPart,
    compute_factor_grads,
)
from miles.models.optim_groups import is_vision_param


def find_part(mapping: ParamMapping, state: ParallelState) -> ParamPart:
    """Return which experts, and which rows or columns, of the decoder's weight this rank has, in Megatron's order."""
    shard, group = mapping.tp_shard, state.tp_group
    experts: tuple[int, int] | None = None
    if mapping.expert:
        group, count = state.etp_group, mapping.shape[0] // state.ep_group.world
        experts = (state.ep_group.rank * count, (state.ep_group.rank + 1) * count)
    if not shard.segments or (group.world == 1 and mapping.heads is None):
        return ParamPart(experts)
    # Numbers from 1 on are sharded like the rows or columns themselves; where a rank is padded there are zeros.
    numbers = torch.arange(1, mapping.shape[shard.dim] + 1)
    index = replace(shard, dim=0).shard(mapping.to_megatron(numbers), group.rank, group.world) - 1
    if shard.dim == len(mapping.shape) - 2:
        return ParamPart(experts, index)
    columns = index if mapping.pack == 1 else (index.unsqueeze(1) * mapping.pack + torch.arange(mapping.pack)).flatten()
    return ParamPart(experts, None, columns)


def attach_adapters(
    chunks: Sequence[GPTBackbone],
    adapters: LoraAdapters,
    mappings: Mapping[str, ParamMapping],
    state: ParallelState,
    *,
    sequence: bool,
    beside: bool = False,
) -> list[RemovableHandle]:
    """Attach the adapters to the linear layers of this rank, by hooks that are returned.

    They are merged into the weights or applied ``beside`` them, which only modules of the decoder support. The hooks
    of other adapters must be removed before; modules of the decoder have the last ones that were attached.
    """
    hooks: list[RemovableHandle] = []
    layers = dict(_number_layers(chunks))
    decoder: dict[str, dict[str, nn.Module]] = {}
    decoder_names: list[str] = []
    tower = next((chunk for chunk in chunks if chunk.vision is not None), None)
    tower_names = [name for name in adapters.targets_by_param if is_vision_param(name) and tower is not None]
    for name in adapters.targets_by_param:
        index, mapping = parse_layer_index(name), mappings[name]
        if index is None or index not in layers:  # another stage has it
            continue
        part_name = name.split(".")[2]
        home = layers[index].self_attention if part_name in MIXER_NAMES else layers[index].mlp
        if isinstance(home, DecoderModule):
            decoder.setdefault(str(index), {})[part_name] = home.get_submodule(part_name)
            decoder_names.append(name)
            continue
        assert not beside, "parts with adapters beside their weights are the decoder's"
        adapter = ParallelLoraAdapter(
            adapters.list_parts(name, find_part(mapping, state)),
            adapters.lora.scale,
            state.tp_group if sequence else None,
            is_row_parallel=mapping.tp_shard.dim == 1,
        )
        hooks.append(_find_module(layers[index], name).register_forward_hook(adapter.hook))
    attach = adapters.attach_beside if beside else adapters.attach
    # A module of the decoder has all slots at its input and at its output.
    modules = nn.ModuleDict({index: nn.ModuleDict(parts) for index, parts in decoder.items()})
    attach(nn.ModuleDict({"layers": modules}), lambda name: find_part(mappings[name], state), decoder_names)
    if tower is not None:  # every rank that has it has it in full
        attach(tower, names=tower_names)
    for chunk in chunks:
        if chunk.pre_process:
            # Layers that are recomputed have gradients only if their input has.
            hooks.append(chunk.embedding.register_forward_hook(_require_grad))
    return hooks


def _number_layers(chunks: Sequence[GPTBackbone]) -> Iterator[tuple[int, TransformerLayer]]:
    """Yield the layers of this rank, numbered as in the model."""
    for chunk in chunks:
        for layer in chunk.decoder.layers:
            assert isinstance(layer, TransformerLayer)
            yield layer.layer_number - 1, layer


def _find_module(layer: nn.Module, name: str) -> nn.Module:
    """Return Megatron's linear layer of a weight."""
    modules = dict(layer.named_modules())
    names = [each.removesuffix(".weight") for each in megatron_names(name)]
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
