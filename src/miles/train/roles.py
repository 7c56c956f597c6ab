"""The door to a model in training: actor and reference are both behind it, whichever backend holds them.

``_T`` packed input tokens, ``L`` layers with experts, ``k`` experts a token, ``D`` hidden, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What a model made of a packed batch. ``flips`` counts the replayed experts its own router would not
    have chosen, out of ``replayed``; both None where nothing was replayed."""

    hidden_TD: Tensor
    flips: Tensor | None = None
    replayed: Tensor | None = None


class TrainModel(Protocol):
    """A decoder that can be read through, differentiated and saved."""

    @property
    def device(self) -> torch.device: ...

    @property
    def softcap(self) -> float | None:
        """What bounds the logits, if anything does."""
        ...

    def parameters(self) -> Mapping[str, Tensor]:
        """The live parameters, by our names, a tied head once; updated in place, never exchanged.

        Those that do not require a gradient are part of the model but are not trained.
        """
        ...

    def read(self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int], replay_TLk: Tensor | None) -> Read:
        """The hidden states that ``head`` turns into logits, sequence after sequence without padding."""
        ...

    def head(self) -> Tensor:
        """The output weight [V, D]."""
        ...

    def save(self, folder: Path) -> None:
        """Write a Hugging Face model into an existing folder."""
        ...

    def load(self, folder: Path) -> None:
        """Fill the live parameters with the Hugging Face model in ``folder``."""
        ...
