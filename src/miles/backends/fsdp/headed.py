"""A decoder that several ranks hold together, under a small head of float32 numbers that each of them has whole."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from miles.backends.fsdp.sharded import ShardedModel
from miles.models.matrices import Matrices


class Headed:
    """All that a critic and a reward model have in common; a new head is zero.

    The decoder's own head, where it is not the embedding, is kept for the folder's sake and not trained.
    """

    def __init__(self, trunk: ShardedModel, head: Mapping[str, tuple[int, ...]]) -> None:
        self.mesh, self._trunk = trunk.mesh, trunk
        trunk.leave_head()
        self._head: dict[str, Tensor] = {
            name: nn.Parameter(torch.zeros(shape, dtype=torch.float32, device=trunk.device))
            for name, shape in head.items()
        }

    @property
    def device(self) -> torch.device:
        return self._trunk.device

    def parameters(self) -> Mapping[str, Tensor]:
        return {**self._trunk.parameters(), **self._head}

    def settle(self) -> None:
        self._trunk.settle()
        for parameter in self._head.values():
            if parameter.grad is not None:
                # Ranks with other rows or tokens have other summands; tensor ranks have the same.
                parameter.grad = self.mesh.rows.sum(parameter.grad)

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        squares = self._trunk.squares({name: grad for name, grad in grads.items() if name not in self._head})
        if self.mesh.rank == 0:
            for name in self._head:
                if name in grads:
                    squares = squares + grads[name].double().square().sum()
        return self.mesh.everyone.sum(squares).sqrt().float()

    def updated(self) -> None:
        self._trunk.updated()

    def gather(self, name: str, local: Tensor) -> Tensor:
        return local if name in self._head else self._trunk.gather(name, local)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        return whole if name in self._head else self._trunk.cut(name, whole)

    def matrices(self) -> Mapping[str, Matrices]:
        return self._trunk.matrices()

    def move(self, device: torch.device) -> None:
        self._trunk.move(device)
        for parameter in self._head.values():
            parameter.data = parameter.data.to(device)
