"""A model as a user's own function makes it: for the trainer and for the engine alike."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from miles.core.errors import PlugError
from miles.models.door import Model


class Provide(Protocol):
    """The model to use in place of this one. It keeps every parameter's name and shape, and may freeze some.

    It is called for each model of the policy's architecture: the trainer's and the reference's with their weights, and
    the engine's, which has none yet.
    """

    def __call__(self, model: Model) -> Model: ...


def provided(model: Model, provide: Provide | None) -> Model:
    """What ``provide`` makes of the model, which must hold what a checkpoint and a publication hold."""
    if provide is None:
        return model
    before = {name: _shape(p) for name, p in model.named_parameters()}
    made = provide(model)
    if made is None:
        raise PlugError("The model provider gave nothing back; it must return the model.")
    now: dict[str, tuple[int, ...]] = {name: _shape(p) for name, p in made.named_parameters()}
    if odd := sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name)):
        raise PlugError(
            f"The model provider changed the parameter {odd[0]} from {before.get(odd[0], 'none')} to "
            f"{now.get(odd[0], 'none')}; checkpoints and engines go by names and shapes, so leave those as they are."
        )
    return made


def _shape(parameter: Tensor) -> tuple[int, ...]:
    return tuple(parameter.shape)
