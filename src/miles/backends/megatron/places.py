"""Where this rank's parameters live: the tensors an optimizer updates, and Megatron's modules that compute with them.

A parameter of ours may be several of Megatron's (an expert each) or be held in a wider type than these compute in. Its
gradients are then added up beside it as they come, and ``publish`` brings it back to the modules. Everything else is
one tensor in two places.

Where Megatron's distributed optimizer has masters and gradients in ``buffers`` of its own, parameters are what the
modules compute with, and stacks of experts are copies of it.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from miles.backends.megatron.layout import Rings
from miles.backends.megatron.modules import Trunk
from miles.backends.megatron.names import TIED, homes, layer_of, theirs
from miles.backends.megatron.shape import Shape

_WIDE = (torch.float32, torch.float64)
# Moves with the load of experts and not with a gradient; float32 whatever the weights are.
_UNTRAINED = ".moe.correction"


class Places:
    """The parameters of one rank's ``chunks``. Where ``trained`` they are float32 at least."""

    def __init__(self, chunks: Sequence[Trunk], shape: Shape, rings: Rings, *, trained: bool, buffers: bool) -> None:
        self.trained = trained
        self._rings, self._buffers, self._homes = rings, buffers, homes(shape.decoder, engine=shape.engine)
        found = {name: tensors for name in self._homes if (tensors := _found(chunks, shape, name))}
        self.held = frozenset(found)
        self._modules: dict[str, list[Tensor]] = found
        self._stages = _stages(found, list(self._homes), rings, shape.home)
        # Parameters whose memory is not the modules', and gradients that come to others than the parameter itself.
        self._apart: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor | None] = {}
        self.parameters: Mapping[str, Tensor] = {name: self._parameter(name, shape) for name in self._homes}

    def stage(self, name: str) -> int:
        """The pipeline rank that speaks for a parameter."""
        return self._stages[name]

    def owns(self, name: str) -> bool:
        """Is this rank's stage the one that speaks for it?"""
        return self._stages[name] == self._rings.pipeline.rank

    def modules(self, name: str) -> list[Tensor]:
        """The modules' own tensors of a parameter: several for experts, none where another stage has it."""
        return self._modules.get(name, [])

    def _size(self, name: str) -> int:
        tensors = self._modules[name]
        return len(tensors) if self._homes[name].expert else len(tensors[0])

    # -- gradients and weights --------------------------------------------------------------

    def grads(self) -> dict[str, Tensor]:
        """The gradient of each parameter the modules have, zero where none came; ``give`` is to follow."""
        out: dict[str, Tensor] = {}
        for name in self._modules:
            parameter = self.parameters[name]
            if not parameter.requires_grad:
                continue
            grad = self._sums.get(name, parameter.grad)
            out[name] = self._zeros(name) if grad is None else grad
        return out

    def give(self, grads: Mapping[str, Tensor]) -> None:
        """Let every parameter have its gradient; those of other stages have an empty one."""
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                parameter.grad = grads[name] if name in grads else torch.zeros_like(parameter)
        self._sums = dict.fromkeys(self._sums)

    @torch.no_grad()
    def publish(self) -> None:
        """Let the modules compute with what the parameters are now."""
        for name, parameter in self._apart.items():
            tensors = self._modules[name]
            for tensor, part in zip(tensors, self._parts(name, parameter), strict=True):
                tensor.copy_(part)

    @torch.no_grad()
    def adopt(self) -> None:
        """The other way round: let the parameters be what the modules compute with."""
        for name, parameter in self._apart.items():
            tensors = self._modules[name]
            parameter.copy_(torch.stack(tensors) if self._homes[name].expert else tensors[0])

    def move(self, device: torch.device) -> None:
        """Everything to a device but what lies in buffers; what was one tensor in two places stays so."""
        for name, parameter in self.parameters.items():
            if self._buffers and name in self._modules and parameter.requires_grad:
                if name in self._apart:
                    parameter.data = parameter.data.to(device)
                continue
            parameter.data = parameter.data.to(device)
            tensors = self._modules.get(name, [])
            if name in self._apart:
                for tensor in tensors:
                    tensor.data = tensor.data.to(device)
            else:
                for tensor, part in zip(tensors, self._parts(name, parameter), strict=True):
                    tensor.data = part.detach()

    def _zeros(self, name: str) -> Tensor:
        tensor = self._modules[name][0]
        shape = (self._size(name), *tensor.shape) if self._homes[name].expert else tensor.shape
        return torch.zeros(shape, dtype=self.parameters[name].dtype, device=tensor.device)

    def _parts(self, name: str, whole: Tensor) -> list[Tensor]:
        """What of a parameter each of the modules' tensors is."""
        if name not in self._modules:
            return []
        return list(whole.unbind()) if self._homes[name].expert else [whole]

    def _parameter(self, name: str, shape: Shape) -> Tensor:
        tensors, home = self._modules.get(name), self._homes[name]
        wide = torch.promote_types(shape.params_dtype, torch.float32)
        if tensors is None:
            kept = self.trained and not self._buffers
            dtype = wide if kept or name.endswith(_UNTRAINED) else shape.params_dtype
            empty = torch.empty((0, *home.shape[1:]), device=shape.home, dtype=dtype)
            return empty.requires_grad_(self.trained and not name.endswith(_UNTRAINED))
        learns = self.trained and isinstance(tensors[0], nn.Parameter)
        for tensor in tensors:
            tensor.requires_grad_(learns)
        same = not learns or tensors[0].dtype in _WIDE or self._buffers
        if not home.expert and same:
            return tensors[0]
        whole = torch.stack([t.detach() for t in tensors]) if home.expert else tensors[0].detach()
        if learns and self._buffers:
            self._apart[name] = whole.requires_grad_()
            return whole
        if same:  # experts, whose tensors become views of a stack
            for tensor, part in zip(tensors, self._parts(name, whole), strict=True):
                tensor.data = part
            parameter = whole
        else:
            parameter = self._apart[name] = whole.to(wide, copy=True)
        if learns:
            parameter.requires_grad_()
            self._sums[name] = None
            for number, tensor in enumerate(tensors):
                tensor.register_post_accumulate_grad_hook(partial(self._hand_over, name, number))
        return parameter

    def _hand_over(self, name: str, number: int, tensor: Tensor) -> None:
        """A module's gradient is added to the parameter's."""
        assert tensor.grad is not None
        total = self._sums[name]
        if total is None:
            total = self._sums[name] = self._zeros(name)
        (total[number] if self._homes[name].expert else total).add_(tensor.grad)
        tensor.grad = None


# -- finding them ---------------------------------------------------------------------------


def _found(chunks: Sequence[Trunk], shape: Shape, name: str) -> list[Tensor]:
    """The modules' tensors that are a parameter of ours; several for experts, none where another stage has it."""
    layer = layer_of(name)
    if layer is None:
        return _at_the_ends(chunks, shape, name)
    modules: list[Any] = [module for chunk in chunks for module in chunk.decoder.layers]
    found = next((module for module in modules if module.layer_number - 1 == layer), None)
    return [] if found is None else _inside(found, name)


def _at_the_ends(chunks: Sequence[Trunk], shape: Shape, name: str) -> list[Tensor]:
    for chunk in chunks:
        if name == TIED and shape.decoder.tie_embeddings and chunk.post_process and not chunk.pre_process:
            return [chunk.head()]
        tensors = dict(chunk.named_parameters())
        if theirs(name)[0] in tensors:
            return [tensors[theirs(name)[0]]]
    return []


def _inside(layer: nn.Module, name: str) -> list[Tensor]:
    tensors: dict[str, Tensor] = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
    for there in theirs(name):
        if "{}" not in there:
            if there in tensors:
                return [tensors[there]]
            continue
        experts: list[Tensor] = []
        while there.format(len(experts)) in tensors:
            experts.append(tensors[there.format(len(experts))])
        if experts:
            return experts
    raise AssertionError(f"Megatron's layer has no {name}, which is one of {', '.join(theirs(name))}")


def _stages(found: Mapping[str, object], names: Sequence[str], rings: Rings, device: torch.device) -> dict[str, int]:
    """The first pipeline rank that has each parameter."""
    ring = rings.pipeline
    mine = torch.tensor([ring.rank if name in found else ring.world for name in names], device=device)
    return dict(zip(names, (-ring.most(-mine)).tolist(), strict=True))
