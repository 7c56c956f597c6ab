"""The door to a model, whoever computes it: our decoder, or transformers' own module behind the same face.

Shapes: T all tokens of a packed batch, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from torch import Tensor, nn

from miles.models.memory import Attend
from miles.models.moe import Routing
from miles.models.recompute import Again
from miles.models.spec import DecoderSpec


class Model(Protocol):
    """A decoder that keeps no memory of its own. ``checkpoint_layers`` trades time for memory: layers, or the first
    ``again_layers`` of them, keep what ``again`` keeps and run again in backward.
    """

    checkpoint_layers: bool
    again: Again
    again_layers: int | None

    @property
    def spec(self) -> DecoderSpec:
        """What it is, and what its layers ask to be remembered."""
        ...

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, routing: Routing | None = None) -> Tensor:
        """Hidden states [T, D] after the final norm."""
        ...

    def head(self) -> Tensor:
        """The output weight [V, D]."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Everything a checkpoint holds of it, a tied head once."""
        ...

    def get_submodule(self, target: str) -> nn.Module:
        """The module whose attribute a parameter is, by all of the parameter's name but its last part."""
        ...

    def requires_grad_(self, requires_grad: bool = True) -> object: ...
