"""Hidden-state capture: the residual stream of chosen decoder layers, as features of a draft model.

Shapes: T all tokens of a packed batch, D hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HiddenCapture:
    """Collects the output of some layers of one forward, detached: the residual stream after the layer, [T, D].

    A decoder fills it again in every forward that it is given to. In a CUDA graph the tensors stay the same ones.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._states: dict[int, Tensor] = {}

    def wants(self, layer: int) -> bool:
        return layer in self.layers

    def store(self, layer: int, x_TD: Tensor, deferred_TD: Tensor | None) -> None:
        """Store the residual stream after ``layer``, of which ``deferred_TD`` has not been added yet."""
        with torch.no_grad():
            self._states[layer] = x_TD.detach() if deferred_TD is None else x_TD.detach() + deferred_TD.detach()

    def state(self, layer: int) -> Tensor:
        """Return what ``store`` was given for ``layer``."""
        return self._states[layer]

    def concatenate(self) -> Tensor:
        """Return the states of the layers side by side, in the order of ``layers``: [T, len(layers) * D]."""
        return torch.cat([self._states[layer] for layer in self.layers], dim=-1)
