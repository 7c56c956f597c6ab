"""Types that upstream-signature functions see: the run's arguments, a sample, a filter's output."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn, Protocol

from miles.core.types import Array, Author, Prompt, Sample, Span, Tokens, Trajectory


class BuildRows(Protocol):
    """Builds a trajectory's training samples, one per branch, with the same advantage for each trained token."""

    def __call__(
        self, prompt_id: int, trajectory: Trajectory, *, advantage: float, trained_author: Author
    ) -> list[Sample]: ...


class UpstreamArgs:
    """The run's flags by name, read-only.

    >>> UpstreamArgs({"lr": 1e-6}).lr
    1e-06
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_values", dict(values))

    def __getattr__(self, name: str) -> Any:
        values: dict[str, Any] = object.__getattribute__(self, "_values")
        if name not in values:
            raise AttributeError(
                f"args has no {name}: this run has no such flag; read what the function needs from sample.metadata, "
                "or from the environment."
            )
        return values[name]

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise AttributeError(f"args.{name} cannot be set: a run's flags are never written to.")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"args.{name} cannot be removed: a run's flags are never written to.")

    def __contains__(self, name: str) -> bool:
        return name in vars(self)

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    @property
    def __dict__(self) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return dict(object.__getattribute__(self, "_values"))

    def __repr__(self) -> str:
        return f"Arguments({vars(self)!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamContext:
    """The run's flags as ``args``, and functions to show prompts and trajectories as upstream did.

    ``tokenizer`` returns the checkpoint's transformers tokenizer. ``render`` returns a prompt's tokens and
    ``prompt_text`` what a sample calls its prompt: their text, or messages. ``fill_extras`` writes data the engine
    returned for prompt tokens into their spans; ``build_samples`` builds training samples.
    """

    args: UpstreamArgs
    tokenizer: Callable[[], Any]
    render: Callable[[Prompt], Tokens]
    prompt_text: Callable[[Prompt], str | Sequence[Mapping[str, Any]]]
    fill_extras: Callable[[Sequence[Span], Mapping[str, Array]], list[Span]]
    build_samples: BuildRows


class UpstreamStatus(Enum):
    """Progress of a trajectory, in upstream's words."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(kw_only=True)
class UpstreamSample:
    """One trajectory, as upstream's functions read and write it.

    ``tokens`` are the prompt's and the response's, of which the last ``response_length`` are the response;
    ``loss_mask`` and ``rollout_log_probs`` have an entry for each of these. Without a mask all of the response is the
    policy's. ``remove_sample`` excludes the trajectory from the loss.
    """

    group_index: int | None = None
    index: int | None = None
    prompt: str | Sequence[Mapping[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: UpstreamStatus = UpstreamStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)

    Status = UpstreamStatus

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: UpstreamArgs) -> Any:
        """The reward that is trained on."""
        return self.reward[args.reward_key] if isinstance(self.reward, dict) else self.reward


@dataclass(kw_only=True)
class DynamicFilterOutput:
    """Upstream's filter result."""

    keep: bool
    reason: str | None = None
