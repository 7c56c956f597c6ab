"""Master weights: a parameter, the float32 copy that the optimizer updates, and its gradient.

A low-precision parameter has a float32 master: gradients are accumulated in float32, the update happens in the master,
and the parameter is its rounding. A float32 parameter is its own master. Masters, like the rest of the optimizer
state, may be offloaded to the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from miles.core.errors import CheckpointError
from miles.kernels.fused.grad_sum import add_grad

_WIDE = (torch.float32, torch.float64)
_HOST = torch.device("cpu")


class TrainedParam:
    """One trained parameter. With ``offloaded`` its separate master, if any, is on the host."""

    def __init__(self, name: str, parameter: Tensor, *, offloaded: bool) -> None:
        self.name = name
        self.parameter = parameter
        self.master = parameter
        self._grad_sum: Tensor | None = None
        if parameter.dtype not in _WIDE:
            self.master = copy_to_state_device(
                parameter.detach().float(), select_state_device(parameter.device, offloaded=offloaded)
            )
            parameter.register_post_accumulate_grad_hook(partial(_accumulate_grad, weakref.ref(self)))

    @property
    def is_own_master(self) -> bool:
        """Whether the parameter is its own master."""
        return self.master is self.parameter

    @property
    def device(self) -> torch.device:
        """The device of the parameter."""
        return self.parameter.device

    @property
    def grad(self) -> Tensor | None:
        """The accumulated gradient."""
        return self.parameter.grad if self.is_own_master else self._grad_sum

    @grad.setter
    def grad(self, grad: Tensor) -> None:
        if self.is_own_master:
            self.parameter.grad = grad.to(self.parameter.dtype)
        else:
            self._grad_sum = grad.float()

    def zero_grad(self) -> None:
        """Drop the gradient."""
        self._grad_sum = self.parameter.grad = None

    @property
    def is_decayed(self) -> bool:
        return is_decayed(self.name, self.parameter.ndim)

    def accumulate(self, grad: Tensor) -> None:
        """Add the gradient of a micro-batch."""
        self._grad_sum = add_grad(self._grad_sum, grad)


def _accumulate_grad(trained: weakref.ref[TrainedParam], parameter: Tensor) -> None:
    """Hook of a parameter: it does not own its TrainedParam, as a cycle through a tensor's hooks is never freed."""
    owner = trained()
    assert owner is not None, "gradients are computed for a parameter that nothing trains any more"
    assert parameter.grad is not None
    owner.accumulate(parameter.grad)
    parameter.grad = None


def is_decayed(name: str, axes: int) -> bool:
    """Return whether weight decay applies: to matrices, but not to norms (fewer than two axes) and biases."""
    return axes >= 2 and not name.endswith("bias")


@torch.no_grad()
def copy_masters_to_params(params: Sequence[TrainedParam]) -> None:
    """Round the masters into their parameters."""
    pairs = [(p.parameter, p.master) for p in params if not p.is_own_master]
    if pairs:
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            [p for p, _ in pairs], [m for _, m in pairs]
        )


@torch.no_grad()
def scale_grads(params: Sequence[TrainedParam], factor: Tensor | None) -> None:
    """Multiply the gradients by ``factor``, a scalar on their device; None leaves them."""
    grads = [p.grad for p in params if p.grad is not None]
    if grads and factor is not None:
        torch._foreach_mul_(grads, factor)  # pyright: ignore[reportPrivateImportUsage]


# -- device of the optimizer state ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StateDevice:
    """Device of the state between updates; ``pinned`` host memory allows asynchronous copies."""

    device: torch.device
    pinned: bool = False


def select_state_device(device: torch.device, *, offloaded: bool) -> StateDevice:
    """Return the state device of parameters on ``device``."""
    if not offloaded or device.type == "cpu":
        return StateDevice(device)
    return StateDevice(_HOST, pinned=True)


def copy_to_state_device(tensor: Tensor, target: StateDevice) -> Tensor:
    """Return the tensor on the state device."""
    if target.pinned:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.to(target.device)


# -- states by name -------------------------------------------------------------------------


class LazyStates(Mapping[str, Tensor]):
    """Tensors by name, each created on access."""

    def __init__(self, factories: Mapping[str, Callable[[], Tensor]]) -> None:
        self._factories = factories

    def __getitem__(self, name: str) -> Tensor:
        return self._factories[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._factories)

    def __len__(self) -> int:
        return len(self._factories)


def pop_state(state: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Remove and return the entry ``name`` of a state; it must have the shape of ``like``."""
    if name not in state:
        raise CheckpointError(f"the optimizer state lacks {name}; the checkpoint is incomplete or of another model.")
    value = state.pop(name)
    if value.shape != like.shape:
        raise CheckpointError(f"{name} has shape {tuple(value.shape)} in the optimizer state, not {tuple(like.shape)}.")
    return value
