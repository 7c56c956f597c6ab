"""The doors to models in training, whichever backend holds them: one for actor and reference, one for the critic.

``_T`` packed input tokens, ``_R`` some of them, ``L`` layers with experts, ``k`` experts a token, ``D`` hidden,
``V`` vocabulary.
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


class Stored(Protocol):
    """Live parameters that a checkpoint holds."""

    @property
    def device(self) -> torch.device: ...

    def parameters(self) -> Mapping[str, Tensor]:
        """The live parameters, by our names, a tied head once; updated in place, never exchanged.

        Those that do not require a gradient are part of the model but are not trained.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write a Hugging Face model into an existing folder."""
        ...

    def load(self, folder: Path) -> None:
        """Fill the live parameters with what ``save`` wrote into ``folder``."""
        ...


class TrainModel(Stored, Protocol):
    """A decoder that can be read through, differentiated and saved."""

    @property
    def softcap(self) -> float | None:
        """What bounds the logits, if anything does."""
        ...

    def read(self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int], replay_TLk: Tensor | None) -> Read:
        """The hidden states that ``head`` turns into logits, sequence after sequence without padding."""
        ...

    def head(self) -> Tensor:
        """The output weight [V, D]."""
        ...


class ScoreModel(Stored, Protocol):
    """A decoder with one number a sequence in place of logits."""

    def scores(self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int]) -> Tensor:
        """What each sequence is worth, read at its last token, in float32; sequences as in ``TrainModel.read``."""
        ...


class ValueModel(Stored, Protocol):
    """A decoder with one number a token in place of logits."""

    def values(self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int], at_R: Tensor) -> Tensor:
        """What is expected after the input tokens ``at_R``, in float32; sequences as in ``TrainModel.read``."""
        ...

    def move(self, device: torch.device) -> None:
        """Put the parameters on ``device``; they stay the same objects."""
        ...
