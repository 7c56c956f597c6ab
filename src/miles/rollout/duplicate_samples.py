"""Duplicate samples in a group: copies that chance cannot explain, as when an engine uses one seed for all samples.

Two independent samples are equal with the probability of the sample itself, the exponential of its summed log-probs. A
group of copies whose probability is below e^-60 was not sampled independently: its advantages are zero, and a run on
such groups learns nothing without an error.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from miles.core.protocols import SamplingParams
from miles.core.types import Author, Trajectory

MIN_LOG_PROBABILITY = -60.0


def find_improbable_copies(trajectories: Sequence[Trajectory], sampling: SamplingParams) -> str | None:
    """A phrase that describes copies which independent sampling would not give; None when there are none.

    Log-probs are those before top-p, which makes a token at most 1/top_p times as likely. With top-k or min-p there is
    no such bound, and greedy sampling gives copies by itself: nothing is reported then.
    """
    if sampling.temperature == 0 or sampling.top_k > 0 or sampling.top_p <= 0:
        return None
    samples = [(tokens, trajectory) for trajectory in trajectories if (tokens := _read_sample(trajectory))]
    counts = Counter(tokens for tokens, _ in samples)
    for tokens, trajectory in samples:
        copies = counts[tokens]
        if copies == 1:
            continue
        length = len(tokens) // 4
        logprob = _sum_logprobs(trajectory)
        log_probability = (copies - 1) * min(0.0, logprob - length * math.log(sampling.top_p))
        if log_probability < MIN_LOG_PROBABILITY:
            return (
                f"{copies} of {len(trajectories)} samples have the same {length} tokens, which independent sampling "
                f"gives with probability e^{log_probability:.0f}"
            )
    return None


def _read_sample(trajectory: Trajectory) -> bytes:
    """The sampled tokens as bytes of int32."""
    policy = Author.POLICY
    spans = [span for branch in trajectory.branches for span in branch if span.author is policy]
    return b"".join([span.tokens.tobytes() for span in spans])


def _sum_logprobs(trajectory: Trajectory) -> float:
    return math.fsum([x for s in trajectory.spans if s.logprobs is not None for x in s.logprobs.tolist()])
