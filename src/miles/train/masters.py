"""Weights as an optimizer sees them: a parameter, the float32 master that is updated, and its gradient.

A parameter of a low precision has a master: gradients are added up in float32, the update happens in the master, and
the parameter is its rounding. A float32 parameter is its own master. Between updates the masters, like the rest of an
optimizer's state, may live on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.core.errors import CheckpointError

_WIDE = (torch.float32, torch.float64)
_HOST = torch.device("cpu")


class Weight:
    """One parameter in training. With ``hosted`` its master, where it has one, lives on the host."""

    def __init__(self, name: str, parameter: Tensor, *, hosted: bool) -> None:
        self.name, self.parameter = name, parameter
        self.master = parameter
        self._sum: Tensor | None = None
        if parameter.dtype not in _WIDE:
            self.master = kept(parameter.detach().float(), home_of(parameter.device, hosted=hosted))
            parameter.register_post_accumulate_grad_hook(self._hand_over)

    @property
    def own(self) -> bool:
        """Whether the parameter is its own master."""
        return self.master is self.parameter

    @property
    def device(self) -> torch.device:
        """Where it is computed with."""
        return self.parameter.device

    @property
    def grad(self) -> Tensor | None:
        """What the backward passes have come to."""
        return self.parameter.grad if self.own else self._sum

    def forget(self) -> None:
        """Let the gradient go."""
        self._sum = self.parameter.grad = None

    @property
    def decayed(self) -> bool:
        return decayed(self.name, self.parameter.ndim)

    def _hand_over(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self._sum = parameter.grad.float() if self._sum is None else self._sum.add_(parameter.grad)
        parameter.grad = None


def decayed(name: str, axes: int) -> bool:
    """Matrices are decayed; norms (fewer than two axes) and biases, also those of experts in a stack, are not."""
    return axes >= 2 and not name.endswith("bias")


@torch.no_grad()
def rounded(weights: Sequence[Weight]) -> None:
    """Let the parameters be the roundings of their masters."""
    pairs = [(w.parameter, w.master) for w in weights if not w.own]
    if pairs:
        torch._foreach_copy_(  # pyright: ignore[reportPrivateImportUsage]
            [p for p, _ in pairs], [m for _, m in pairs]
        )


# -- where state lives ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Home:
    """Where state lives between updates; ``pinned`` on the host, where a device copies from it by itself."""

    device: torch.device
    pinned: bool = False


def home_of(device: torch.device, *, hosted: bool) -> Home:
    """The home of the state of parameters on ``device``."""
    if not hosted or device.type == "cpu":
        return Home(device)
    return Home(_HOST, pinned=True)


def kept(tensor: Tensor, home: Home) -> Tensor:
    """The same numbers at home."""
    if home.pinned:
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    return tensor.to(home.device)


# -- states by name -------------------------------------------------------------------------


class States(Mapping[str, Tensor]):
    """Tensors by name, each made when it is asked for: take one at a time."""

    def __init__(self, makers: Mapping[str, Callable[[], Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> Tensor:
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


def taken(state: dict[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Take the entry ``name`` out of a state; it must have the shape of ``like``."""
    if name not in state:
        raise CheckpointError(f"the optimizer state lacks {name}; the checkpoint is of another model or incomplete.")
    found = state.pop(name)
    if found.shape != like.shape:
        raise CheckpointError(f"{name} has shape {tuple(found.shape)} in the optimizer state, not {tuple(like.shape)}.")
    return found
