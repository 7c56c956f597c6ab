"""Model provider: a user function that replaces or modifies the model in both trainer and engine."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from miles.core.errors import HookError
from miles.models.base import CausalLM


class ModelProvider(Protocol):
    """Returns the model to use in place of the given one. It must keep every parameter's name and shape
    and the numerics, and may freeze some parameters.

    It is called for each model of the policy's architecture: the trainer's and the reference's with their weights, and
    the engine's without weights.
    """

    def __call__(self, model: CausalLM) -> CausalLM: ...


def apply_model_provider(model: CausalLM, provide: ModelProvider | None) -> CausalLM:
    """Apply the provider and check that the parameters still match checkpoints and weight updates."""
    if provide is None:
        return model
    before = {name: _shape(p) for name, p in model.named_parameters()}
    provided = provide(model)
    if provided is None:
        raise HookError("The model provider returned None; it must return the model.")
    after: dict[str, tuple[int, ...]] = {name: _shape(p) for name, p in provided.named_parameters()}
    if changed := sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name)):
        raise HookError(
            f"The model provider changed the parameter {changed[0]} from {before.get(changed[0], 'none')} to "
            f"{after.get(changed[0], 'none')}; checkpoints and engines match by name and shape, so keep both."
        )
    if provided.numerics != model.numerics:
        raise HookError(
            f"The model provider was given a model with {model.numerics} and returned one with {provided.numerics}; "
            "build it with numerics=model.numerics."
        )
    return provided


def _shape(parameter: Tensor) -> tuple[int, ...]:
    return tuple(parameter.shape)
