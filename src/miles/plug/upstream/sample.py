"""An attempt as upstream's functions know it: one object that is read and written to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from miles.plug.upstream.run import Arguments


class Status(Enum):
    """How far an attempt has come."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass(kw_only=True)
class Sample:
    """One attempt at a prompt.

    ``tokens`` are the prompt's and the response's, of which the last ``response_length`` are the response;
    ``loss_mask`` and ``rollout_log_probs`` have an entry for each of these. Without a mask all of the response is the
    policy's. Whoever sets ``remove_sample`` takes the attempt out of the loss.
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
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)

    Status = Status

    @property
    def effective_response_length(self) -> int:
        """Tokens of the response that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Arguments) -> Any:
        """The number that is trained on."""
        return self.reward[args.reward_key] if isinstance(self.reward, dict) else self.reward


@dataclass(kw_only=True)
class DynamicFilterOutput:
    """A filter's answer, in upstream's words."""

    keep: bool
    reason: str | None = None
