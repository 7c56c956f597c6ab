"""The doors to models in training, whichever backend holds them and however many ranks share one.

``_T`` packed input tokens, ``_R`` some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from miles.models.lora import Adapters
from miles.models.matrices import Matrices
from miles.models.outline import Outline
from miles.train.logits import Output
from miles.train.rows import Rows

Kept = Mapping[str, Tensor]
Judge = Callable[[int, Output], tuple[Tensor | None, Kept]]
"""A micro-batch by its number, and what a model made of it: to the loss to differentiate, if any, and what to keep."""


class Stored(Protocol):
    """Live parameters that a checkpoint holds, of which each rank has a part.

    Where ranks share a model all of them make the same calls in the same order. A rank alone has all of everything:
    ``gather`` and ``cut`` give back what they are given.
    """

    @property
    def device(self) -> torch.device: ...

    def parameters(self) -> Mapping[str, Tensor]:
        """This rank's part of each parameter, by our names, a tied head once; updated in place, never exchanged.

        Those that do not require a gradient are part of the model but are not trained.
        """
        ...

    def settle(self) -> None:
        """After the last backward of an optimizer step: let every part have its whole gradient."""
        ...

    def norm(self, grads: Mapping[str, Tensor]) -> Tensor:
        """The norm of a gradient given by its parts, the same bits on every rank."""
        ...

    def updated(self) -> None:
        """The parameters were written to."""
        ...

    def gather(self, name: str, local: Tensor) -> Tensor:
        """The whole of what the ranks hold of parameter ``name``, or of something shaped like it."""
        ...

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of it: the inverse of ``gather``."""
        ...

    def matrices(self) -> Mapping[str, Matrices]:
        """Which parameters are matrices between hidden channels, in the shape of the whole model; none if unknown."""
        ...

    def move(self, device: torch.device) -> None:
        """Put the parameters on ``device``; they stay the same objects."""
        ...

    def save(self, folder: Path) -> None:
        """Write a Hugging Face model into an existing folder."""
        ...

    def outline(self) -> Outline | None:
        """What ``save`` would write, for others to write; None where ``save`` alone knows how."""
        ...

    def load(self, folder: Path) -> None:
        """Fill the live parameters with what ``save`` wrote into ``folder``."""
        ...


class TrainModel(Stored, Protocol):
    """A decoder that can be read through, differentiated and saved."""

    def each(self, plan: Sequence[Rows], judge: Judge) -> list[Kept]:
        """Read micro-batch after micro-batch, have each judged, and differentiate what the judge calls a loss.

        What it keeps comes back in order, on every rank that shares the rows.
        """
        ...


@runtime_checkable
class Adapted(Protocol):
    """A model of which factors are trained that are added to its weights (``models.lora``)."""

    def adapters(self) -> Adapters:
        """Those of its parameters that are trained, and that no engine knows; every rank has all of them whole."""
        ...


def weights_of(model: Stored) -> dict[str, Tensor]:
    """This rank's part of what an engine computes with."""
    apart = model.adapters().parameters if isinstance(model, Adapted) else {}
    return {name: parameter.detach() for name, parameter in model.parameters().items() if name not in apart}


@runtime_checkable
class Paced(Protocol):
    """A model of which it is known what its reading costs this rank itself."""

    def pace(self) -> float | None:
        """Seconds of its own, without waits for others, that a token took since this was last asked; None of none."""
        ...


class ScoreModel(Stored, Protocol):
    """A decoder with one number a sequence in place of logits."""

    def scores(self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int]) -> Tensor:
        """What each sequence is worth, read at its last token, in float32; sequences one after the other."""
        ...


class ValueModel(Stored, Protocol):
    """A decoder with one number a token in place of logits."""

    def values(self, tokens_T: Tensor, positions_T: Tensor, lengths: Sequence[int], at_R: Tensor) -> Tensor:
        """What is expected after the input tokens ``at_R``, in float32; sequences one after the other."""
        ...
