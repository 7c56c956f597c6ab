"""Master parameters: float32 tensors that the optimizer updates, for a sharded or low-precision decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from miles.cluster.host_copies import HostCopies

_WIDE = (torch.float32, torch.float64)


class MasterParams:
    """This rank's shard of every parameter of ``module``, which must have storage.

    The master of an FSDP-sharded parameter shares its memory, that of a low-precision parameter is its float32 copy,
    and any other parameter is its own master. Parameters without gradient have no float32 copy.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._module_params: dict[str, nn.Parameter] = dict(module.named_parameters())
        self._low_precision: list[str] = []
        self._host_copies = HostCopies()
        self.tensors: Mapping[str, Tensor] = {
            name: self._build_master(name, param) for name, param in self._module_params.items()
        }

    def _build_master(self, name: str, param: nn.Parameter) -> Tensor:
        if isinstance(param, DTensor):
            return nn.Parameter(_local(param), requires_grad=param.requires_grad)
        if param.dtype in _WIDE or not param.requires_grad:
            return param
        self._low_precision.append(name)
        master = param.detach().float().requires_grad_()
        param.register_post_accumulate_grad_hook(_accumulate_into(master))
        return master

    def collect_grads(self) -> dict[str, Tensor]:
        """Move the accumulated gradients to the masters' ``grad`` and return them."""
        grads: dict[str, Tensor] = {}
        for name, master in self.tensors.items():
            param = self._module_params[name]
            if isinstance(param, DTensor) and param.grad is not None:
                master.grad = _local(param.grad)
                param.grad = None
            if master.grad is not None:
                grads[name] = master.grad
        return grads

    @torch.no_grad()
    def sync_to_module(self) -> None:
        """Update the module's parameters after the masters were written."""
        self.reshard()
        for name in self._low_precision:
            self._module_params[name].copy_(self.tensors[name])

    def reshard(self) -> None:
        """Free the parameters that FSDP has all-gathered."""
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def move(self, device: torch.device) -> None:
        """Move everything to ``device``; the masters stay the same objects."""
        self.reshard()
        self._module.to(device)
        for name, master in self.tensors.items():
            param = self._module_params[name]
            if isinstance(param, DTensor):
                master.data = _local(param)
        self._host_copies.move({name: self.tensors[name] for name in self._low_precision}, device)


def _local(tensor: Tensor) -> Tensor:
    sharded = tensor.detach()
    assert isinstance(sharded, DTensor)
    return sharded.to_local()


def _accumulate_into(master: Tensor) -> Callable[[Tensor], None]:
    def accumulate(param: Tensor) -> None:
        assert param.grad is not None
        master.grad = param.grad.float() if master.grad is None else master.grad.add_(param.grad)
        param.grad = None

    return accumulate
