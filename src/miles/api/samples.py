"""Samples of the library: one response of a policy with its prompt, tokens, log-probs, text and reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from miles.core.types import EMPTY, Author, Floats, Group, Prompt, Reward, Tokens, Trajectory

RECORD = "record"
"""Metadata key of a prompt with the row it was made of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySample:
    """One response to a prompt, or a demonstration of one.

    ``trajectory`` has everything: spans of tokens with their author, log-probs and version, status and metadata. The
    other attributes are of its first branch, which is the only one but for agents that branch.
    """

    prompt: Prompt
    trajectory: Trajectory

    @property
    def text(self) -> str:
        """The text of the response, without special tokens."""
        return str(self.trajectory.metadata.get("text", ""))

    @property
    def tokens(self) -> Tokens:
        """All tokens: those of the prompt, then those of the response."""
        return np.concatenate([span.tokens for span in self.trajectory.branches[0]])

    @property
    def response_tokens(self) -> Tokens:
        """The tokens that the policy sampled, or that a demonstration has in its place; they are trained on."""
        return np.concatenate([np.empty(0, np.int32), *(s.tokens for s in self._policy_spans())])

    @property
    def logprobs(self) -> Floats:
        """The engine's log-prob of each of ``response_tokens``; 0 for demonstrations."""
        parts = (span.logprobs for span in self._policy_spans() if span.logprobs is not None)
        return np.concatenate([np.empty(0, np.float32), *parts])

    @property
    def version(self) -> int | None:
        """The number of the oldest weights that sampled a token, -1 for demonstrations; None without any token."""
        oldest = self.trajectory.oldest_version
        return None if oldest is None else oldest.number

    @property
    def reward(self) -> float | None:
        """The reward; None before it is scored."""
        return None if self.trajectory.reward is None else self.trajectory.reward.value

    @property
    def status(self) -> str:
        """Why it ended: completed, truncated, aborted or failed."""
        return str(self.trajectory.status)

    @property
    def record(self) -> Mapping[str, Any]:
        """The row of the data that the prompt was made of; empty if it was made of a text or messages."""
        return self.prompt.metadata.get(RECORD, EMPTY)

    def with_reward(self, reward: Reward) -> PolicySample:
        """The sample with another reward."""
        return replace(self, trajectory=replace(self.trajectory, reward=reward))

    def _policy_spans(self) -> Iterator[Any]:
        return (span for span in self.trajectory.branches[0] if span.author is Author.POLICY)


def list_samples(groups: Sequence[Group]) -> list[PolicySample]:
    """The samples of groups, in order."""
    return [PolicySample(prompt=g.prompt, trajectory=trajectory) for g in groups for trajectory in g.trajectories]


def group_samples(samples: Sequence[PolicySample]) -> list[Group]:
    """The groups of samples: consecutive ones of the same prompt."""
    return [
        Group(prompt=members[0].prompt, trajectories=tuple(sample.trajectory for sample in members))
        for _, part in groupby(samples, key=lambda sample: (sample.prompt.id, sample.prompt.epoch))
        if (members := list(part))
    ]
