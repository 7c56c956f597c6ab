"""The plain float32 tensors an optimizer writes to, under a decoder that FSDP has cut or that is of low precision."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

_WIDE = (torch.float32, torch.float64)


class Leaves:
    """This rank's part of every parameter of ``module``, which has its storage already.

    A parameter that FSDP has cut lends the leaf its memory, one of low precision is the leaf's rounding, and any other
    is its own leaf. What takes no gradient is never rounded from anything.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._under: dict[str, nn.Parameter] = dict(module.named_parameters())
        self._rounded: list[str] = []
        self.tensors: Mapping[str, Tensor] = {name: self._leaf(name, under) for name, under in self._under.items()}

    def _leaf(self, name: str, under: nn.Parameter) -> Tensor:
        if isinstance(under, DTensor):
            return nn.Parameter(_local(under), requires_grad=under.requires_grad)
        if under.dtype in _WIDE or not under.requires_grad:
            return under
        self._rounded.append(name)
        leaf = under.detach().float().requires_grad_()
        under.register_post_accumulate_grad_hook(_handing(leaf))
        return leaf

    def collect(self) -> dict[str, Tensor]:
        """What the backward passes have come to, now in the leaves' ``grad``."""
        found: dict[str, Tensor] = {}
        for name, leaf in self.tensors.items():
            under = self._under[name]
            if isinstance(under, DTensor) and under.grad is not None:
                leaf.grad = _local(under.grad)
                under.grad = None
            if leaf.grad is not None:
                found[name] = leaf.grad
        return found

    @torch.no_grad()
    def written(self) -> None:
        """The leaves were written to: what was made of them is made anew."""
        self.reshard()
        for name in self._rounded:
            self._under[name].copy_(self.tensors[name])

    def reshard(self) -> None:
        """Let go of parameters that FSDP has brought together."""
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def move(self, device: torch.device) -> None:
        """Put everything on ``device``; the leaves stay the same objects."""
        self.reshard()
        self._module.to(device)
        for name, leaf in self.tensors.items():
            under = self._under[name]
            if isinstance(under, DTensor):
                leaf.data = _local(under)
            elif leaf is not under:
                leaf.data = leaf.data.to(device)


def _local(of: Tensor) -> Tensor:
    cut = of.detach()
    assert isinstance(cut, DTensor)
    return cut.to_local()


def _handing(leaf: Tensor) -> Callable[[Tensor], None]:
    def hand_over(under: Tensor) -> None:
        assert under.grad is not None
        leaf.grad = under.grad.float() if leaf.grad is None else leaf.grad.add_(under.grad)
        under.grad = None

    return hand_over
