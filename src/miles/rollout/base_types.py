"""Upstream's inputs and outputs of rollout and generate functions."""

from miles.hooks.compat.generation import call_rollout_fn
from miles.hooks.compat.types import (
    BaseRolloutFn,
    GenerateFnInput,
    GenerateFnOutput,
    RolloutFnBaseInput,
    RolloutFnConstructorInput,
    RolloutFnEvalInput,
    RolloutFnEvalOutput,
    RolloutFnInput,
    RolloutFnOutput,
    RolloutFnProtocol,
    RolloutFnTrainInput,
    RolloutFnTrainOutput,
)

__all__ = [
    "BaseRolloutFn",
    "GenerateFnInput",
    "GenerateFnOutput",
    "RolloutFnBaseInput",
    "RolloutFnConstructorInput",
    "RolloutFnEvalInput",
    "RolloutFnEvalOutput",
    "RolloutFnInput",
    "RolloutFnOutput",
    "RolloutFnProtocol",
    "RolloutFnTrainInput",
    "RolloutFnTrainOutput",
    "call_rollout_fn",
]
