"""Functions given to the library as objects: a hook address for each, and adapters of plain rewards and losses.

A config names hooks by their address, so a function gets one here: ``miles.api.functions:reward``. It is valid in this
process only.

A reward or loss of the library is called with what its parameters name, in any order; it may be plain or async::

    reward(response, label)            reward(record, response)            reward(prompt, trajectory)
    loss(logprobs, advantages)         loss(logprobs, old_logprobs, advantages, mean)
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from miles.core.errors import HookError
from miles.core.types import Prompt, Reward, Trajectory

if TYPE_CHECKING:
    from miles.algo.loss_aggregation import LossAggregator
    from miles.algo.policy_loss import LossFn, LossInputs, LossOutput

FindRecord = Callable[[Prompt], Mapping[str, Any]]
"""The row of the data that a prompt was made of."""

REWARD_PARAMETERS: Mapping[str, str] = {
    "response": "the text of the response",
    "label": "the reference answer, of the column label_key",
    "record": "the row of the data, with all its columns",
    "prompt": "the prompt, a miles.Prompt",
    "trajectory": "the trajectory: tokens, log-probs, versions, metadata",
}
LOSS_PARAMETERS: Mapping[str, str] = {
    "logprobs": "log-probs of the trained tokens, with gradients",
    "old_logprobs": "log-probs before the update, for the ratio",
    "sampled_logprobs": "log-probs that the engine reported when it sampled",
    "ref_logprobs": "log-probs of the reference model; None without one",
    "advantages": "the advantage of each token",
    "entropy": "the entropy of each token's distribution, with gradients",
    "mean": "a function: the mean of a value per token over the whole batch",
}

_functions: dict[str, Any] = {}


def register_function(function: Callable[..., Any], *, default_name: str) -> str:
    """The address of a function in this process; one of the same name is replaced."""
    name = getattr(function, "__name__", "")
    name = name if name.isidentifier() and not name.startswith("__") else default_name
    _functions[name] = function
    return f"{__name__}:{name}"


def __getattr__(name: str) -> Any:
    if name in _functions:
        return _functions[name]
    if name.startswith("__") or name == "add_arguments":
        raise AttributeError(name)
    raise HookError(
        f"{name} is a function of the Python program that started this run; run that program again, or put the "
        "function into a module and name it package.module:name."
    )


# -- rewards --------------------------------------------------------------------------------


def adapt_reward(function: Callable[..., Any], find_record: FindRecord) -> Callable[..., Awaitable[Reward]]:
    """A core.protocols.RewardFn that calls a reward of the library; HookError for parameters it cannot be given."""
    names = _list_parameters(function, REWARD_PARAMETERS, "reward")

    async def reward(prompt: Prompt, trajectory: Trajectory) -> Reward:
        values: dict[str, Callable[[], Any]] = {
            "response": lambda: trajectory.metadata.get("text", ""),
            "label": lambda: prompt.label,
            "record": lambda: find_record(prompt),
            "prompt": lambda: prompt,
            "trajectory": lambda: trajectory,
        }
        result = function(**{name: values[name]() for name in names})
        return to_reward(await result if inspect.isawaitable(result) else result)

    reward.__name__ = getattr(function, "__name__", "reward")
    return reward


def to_reward(value: Any) -> Reward:
    """A reward of what a function returned: a number, or a miles.Reward."""
    if isinstance(value, Reward):
        return value
    try:
        return Reward(value=float(value))
    except (TypeError, ValueError):
        raise HookError(f"the reward returned {value!r}; return a number or a miles.Reward.") from None


# -- losses ---------------------------------------------------------------------------------


def adapt_loss(function: Callable[..., Any]) -> LossFn:
    """A LossFn that calls a loss of the library, which returns a scalar, or a value per token, whose mean is taken."""
    names = _list_parameters(function, LOSS_PARAMETERS, "loss")

    def loss_fn(inputs: LossInputs, aggregator: LossAggregator) -> LossOutput:
        from miles.algo.policy_loss import LossOutput

        values = {
            "logprobs": inputs.logp_R,
            "old_logprobs": inputs.old_logp_R,
            "sampled_logprobs": inputs.engine_logp_R,
            "ref_logprobs": inputs.ref_logp_R,
            "advantages": inputs.advantage_R,
            "entropy": inputs.entropy_R,
            "mean": aggregator.reduce,
        }
        value = function(**{name: values[name] for name in names})
        shape = getattr(value, "shape", None)
        if shape not in ((), inputs.logp_R.shape):
            returned = type(value).__name__ if shape is None else f"a tensor of shape {tuple(shape)}"
            raise HookError(
                f"the loss returned {returned}; return a scalar tensor, or one value for each of the "
                f"{len(inputs.logp_R)} tokens."
            )
        loss = value if value.ndim == 0 else aggregator.reduce(value)
        entropy = aggregator.mean(inputs.entropy_R.detach())
        return LossOutput(loss=loss, metrics={"loss": loss.detach(), "entropy": entropy})

    return cast("LossFn", loss_fn)


def _list_parameters(function: Callable[..., Any], known: Mapping[str, str], what: str) -> tuple[str, ...]:
    """The parameters that a function names, each one of ``known`` or with a default."""
    if not callable(function):
        raise HookError(f"the {what} is a {type(function).__name__}; give a function.")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise HookError(f"the {what} has no signature that can be read; wrap it in a function.") from error
    required = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and p.default is p.empty]
    unknown = [p.name for p in required if p.name not in known or p.kind is p.POSITIONAL_ONLY]
    if unknown or not any(p.name in known for p in parameters):
        given = f"takes {unknown[0]}" if unknown else "takes nothing of its input"
        raise HookError(f"the {what} {given}; name its parameters by what they are: {', '.join(known)}.")
    return tuple(p.name for p in parameters if p.name in known)
