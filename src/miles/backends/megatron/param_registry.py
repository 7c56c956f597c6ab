"""Parameter registry: the tensors an optimizer updates, and the tensors of Megatron's modules.

A decoder parameter may be several of Megatron's (one per expert) or have a wider dtype than these. Its gradients are
then accumulated separately, and ``publish`` copies it to the modules. Everything else is one shared tensor.

With Megatron's distributed optimizer, which has master weights and gradients in its own ``buffers``, parameters are the
modules' tensors, and stacked experts are copies.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from miles.backends.megatron.layer_spec import GPTBackbone
from miles.backends.megatron.parallel_state import ParallelState
from miles.backends.megatron.param_mapping import (
    LM_HEAD,
    TIED,
    ParamMapping,
    megatron_names,
    parse_layer_index,
    possible_names,
)
from miles.backends.megatron.transformer_config import DecoderTransformerConfig
from miles.cluster.host_copies import HostCopies
from miles.models.layers.ngram_embedding import NGRAM_CONSTANTS
from miles.models.optim_groups import TRAINED_VISION, FrozenVision, is_untrained_param, is_vision_param

_WIDE = (torch.float32, torch.float64)
# Follows the load of experts, not a gradient; always float32.
_CORRECTION = ".moe.correction"
_ROUTER = (".moe.router.weight", ".moe.router.bias")
# Experts by token, and the constants of hashes.
_INTEGERS = (".moe.expert_table", *(f".ngram.{name}" for name in NGRAM_CONSTANTS))


class ParamRegistry:
    """The parameters of one rank's ``chunks``; if ``trained`` they are at least float32, but ``frozen_vision`` parts.

    Those of ``scalar_head`` are trained in float32 also if the others are not; the decoder's own head is then frozen.
    """

    def __init__(
        self,
        chunks: Sequence[GPTBackbone],
        tf_config: DecoderTransformerConfig,
        state: ParallelState,
        mappings: Mapping[str, ParamMapping],
        *,
        trained: bool,
        buffers: bool,
        scalar_head: Collection[str] = (),
        frozen_vision: FrozenVision = TRAINED_VISION,
    ) -> None:
        self.trained = trained
        self._frozen_vision = frozen_vision.select(mappings)
        self._scalar_head = frozenset(scalar_head)
        self._frozen = _ROUTER if tf_config.balance.frozen else ()
        self._state = state
        self._buffers = buffers
        self._mappings = mappings
        found = {name: tensors for name in self._mappings if (tensors := _find_tensors(chunks, tf_config, name))}
        self.local_names = frozenset(found)
        self._modules: dict[str, list[Tensor]] = found
        self._stages = _stages(found, list(self._mappings), state, tf_config.param_device)
        # Parameters with storage of their own, and gradients that accumulate outside the parameter.
        self._copies: dict[str, Tensor] = {}
        self._host_copies = HostCopies()
        self._grad_sums: dict[str, Tensor | None] = {}
        self.parameters: Mapping[str, Tensor] = {
            name: self._build_parameter(name, tf_config) for name in self._mappings
        }

    def stage(self, name: str) -> int:
        """Return the pipeline rank that owns a parameter."""
        return self._stages[name]

    def owns(self, name: str) -> bool:
        """Return whether this rank's stage owns it."""
        return self._stages[name] == self._state.pp_group.rank

    def modules(self, name: str) -> list[Tensor]:
        """Return the modules' tensors of a parameter: several for experts, none if another stage has it."""
        return self._modules.get(name, [])

    def _size(self, name: str) -> int:
        tensors = self._modules[name]
        return len(tensors) if self._mappings[name].by_expert else len(tensors[0])

    # -- gradients and weights --------------------------------------------------------------

    def grads(self) -> dict[str, Tensor]:
        """Return the gradient of each local parameter, zero if there is none; ``set_grads`` must follow."""
        out: dict[str, Tensor] = {}
        for name in self._modules:
            parameter = self.parameters[name]
            if not parameter.requires_grad:
                continue
            grad = self._grad_sums.get(name, parameter.grad)
            out[name] = self._zeros(name) if grad is None else grad
        return out

    def set_grads(self, grads: Mapping[str, Tensor], *, images: bool = True) -> None:
        """Set the gradient of every parameter; those of other stages get an empty one.

        Those of the vision tower get none after a batch without ``images``.
        """
        for name, parameter in self.parameters.items():
            if not images and is_vision_param(name):
                parameter.grad = None
            elif parameter.requires_grad:
                parameter.grad = grads[name] if name in grads else torch.zeros_like(parameter)
        self._grad_sums = dict.fromkeys(self._grad_sums)

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the parameters to the modules."""
        for name, parameter in self._copies.items():
            tensors = self._modules[name]
            for tensor, part in zip(tensors, self._parts(name, parameter), strict=True):
                tensor.copy_(part)

    @torch.no_grad()
    def adopt(self) -> None:
        """Copy the modules' tensors to the parameters."""
        for name, parameter in self._copies.items():
            tensors = self._modules[name]
            parameter.copy_(torch.stack(tensors) if self._mappings[name].by_expert else tensors[0])

    def move(self, device: torch.device) -> None:
        """Move everything to a device except what is in buffers; shared tensors stay shared."""
        in_buffers = {
            name for name, p in self.parameters.items() if self._buffers and name in self._modules and p.requires_grad
        }
        moved = {name: p for name, p in self.parameters.items() if name not in in_buffers or name in self._copies}
        own = {name: tensors for name, tensors in self._modules.items() if name not in in_buffers}
        for name in own.keys() & self._copies.keys():
            moved |= {f"{name}, module {number}": tensor for number, tensor in enumerate(own[name])}
        self._host_copies.move(moved, device)
        for name in own.keys() - self._copies.keys():
            for tensor, part in zip(own[name], self._parts(name, self.parameters[name]), strict=True):
                tensor.data = part.detach()

    def _zeros(self, name: str) -> Tensor:
        tensor = self._modules[name][0]
        shape = (self._size(name), *tensor.shape) if self._mappings[name].by_expert else tensor.shape
        return torch.zeros(shape, dtype=self.parameters[name].dtype, device=tensor.device)

    def _parts(self, name: str, stacked: Tensor) -> list[Tensor]:
        """Return the part of a parameter that each of the modules' tensors is."""
        if name not in self._modules:
            return []
        return list(stacked.unbind()) if self._mappings[name].by_expert else [stacked]

    def _build_parameter(self, name: str, tf_config: DecoderTransformerConfig) -> Tensor:
        tensors, mapping = self._modules.get(name), self._mappings[name]
        fp32 = torch.promote_types(tf_config.params_dtype, torch.float32)
        if tensors is None:
            trained = self._is_trained(name)
            wide = name in self._scalar_head or name.endswith(_CORRECTION) or (trained and not self._buffers)
            dtype = torch.int64 if name.endswith(_INTEGERS) else fp32 if wide else tf_config.params_dtype
            dtype = mapping.dtype or dtype
            empty = torch.empty((0, *mapping.shape[1:]), device=tf_config.param_device, dtype=dtype)
            return empty.requires_grad_(trained)
        requires_grad = self._is_trained(name) and isinstance(tensors[0], nn.Parameter)
        for tensor in tensors:
            tensor.requires_grad_(requires_grad)
        same = not requires_grad or tensors[0].dtype in _WIDE or self._buffers
        if not mapping.by_expert and same:
            return tensors[0]
        stacked = torch.stack([t.detach() for t in tensors]) if mapping.by_expert else tensors[0].detach()
        if requires_grad and self._buffers:
            self._copies[name] = stacked.requires_grad_()
            return stacked
        if same:  # experts: their tensors become views of the stack
            for tensor, part in zip(tensors, self._parts(name, stacked), strict=True):
                tensor.data = part
            parameter = stacked
        else:
            parameter = self._copies[name] = stacked.to(fp32, copy=True)
        if requires_grad:
            parameter.requires_grad_()
            self._grad_sums[name] = None
            for number, tensor in enumerate(tensors):
                tensor.register_post_accumulate_grad_hook(partial(self._accumulate, name, number))
        return parameter

    def _is_trained(self, name: str) -> bool:
        if self._scalar_head and (name in self._scalar_head or name == LM_HEAD):
            return name != LM_HEAD
        if name in self._frozen_vision:
            return False
        is_fixed = name.endswith((*self._frozen, *_INTEGERS)) or is_untrained_param(name)
        return self.trained and not is_fixed

    def _accumulate(self, name: str, number: int, tensor: Tensor) -> None:
        """Add a module's gradient to the parameter's."""
        assert tensor.grad is not None
        total = self._grad_sums[name]
        if total is None:
            total = self._grad_sums[name] = self._zeros(name)
        (total[number] if self._mappings[name].by_expert else total).add_(tensor.grad)
        tensor.grad = None


# -- lookup ---------------------------------------------------------------------------------


def _find_tensors(chunks: Sequence[GPTBackbone], tf_config: DecoderTransformerConfig, name: str) -> list[Tensor]:
    """Find the modules' tensors of a parameter; several for experts, none if another stage has it."""
    layer = parse_layer_index(name)
    if layer is None:
        return _find_outer_tensors(chunks, tf_config, name)
    modules: list[Any] = [module for chunk in chunks for module in chunk.decoder.layers]
    found = next((module for module in modules if module.layer_number - 1 == layer), None)
    return [] if found is None else _find_layer_tensors(found, name)


def _find_outer_tensors(chunks: Sequence[GPTBackbone], tf_config: DecoderTransformerConfig, name: str) -> list[Tensor]:
    for chunk in chunks:
        if name == TIED and tf_config.decoder_spec.tie_embeddings and chunk.post_process and not chunk.pre_process:
            return [chunk.head()]
        tensors = dict(chunk.named_parameters())
        if megatron_names(name)[0] in tensors:
            return [tensors[megatron_names(name)[0]]]
    return []


def _find_layer_tensors(layer: nn.Module, name: str) -> list[Tensor]:
    tensors: dict[str, Tensor] = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    for name_ in possible_names(name):
        if "{}" not in name_:
            if name_ in tensors:
                return [tensors[name_]]
            continue
        experts: list[Tensor] = []
        while name_.format(len(experts)) in tensors:
            experts.append(tensors[name_.format(len(experts))])
        if experts:
            return experts
    raise AssertionError(
        f"Megatron's layer has no tensor for {name}, expected one of {', '.join(possible_names(name))}"
    )


def _stages(
    found: Mapping[str, object], names: Sequence[str], state: ParallelState, device: torch.device
) -> dict[str, int]:
    """Return the first pipeline rank that has each parameter."""
    group = state.pp_group
    mine = torch.tensor([group.rank if name in found else group.world for name in names], device=device)
    return dict(zip(names, (-group.max(-mine)).tolist(), strict=True))
