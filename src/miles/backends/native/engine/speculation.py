"""Speculative decoding: which requests verify how many drafted tokens in a step, and how many were accepted.

Verification is lossless by construction. The token after a position is a function of the request's seed, the position
and the policy's logits; a drafted token is accepted if it is that token. So the sampled tokens and their log-probs are
those of the policy, and with batch-invariant kernels they are bit for bit those of a run without drafts.

A drafted token gets a row of a step while the tokens expected of it are worth more than the row: by acceptance
measured so far, and the estimated cost of a step by its rows (``step_cost``). Nothing depends on a clock, so a run with
a fixed seed makes the same drafts again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Protocol

import torch

from miles.backends.native.config import RECURRENT_PROBLEM, NativeConfig
from miles.backends.native.engine.forward_batch import ForwardBatch
from miles.backends.native.engine.ngram_draft import DraftedTokens, NgramDrafter
from miles.backends.native.engine.req import Req
from miles.backends.native.engine.step_cost import StepCost, estimate_step_cost
from miles.cluster.platform import Platform
from miles.core.errors import UsageError
from miles.models.spec import DecoderSpec

# Acceptance before anything was measured, and the weight of that in drafted tokens.
_PRIOR_ACCEPTANCE, _PRIOR_WEIGHT = 0.6, 8.0
# Beyond this many drafted tokens, older measurements lose weight.
_MAX_WEIGHT = 512.0
# Steps without any draft after which one is tried again, to measure.
PROBE_STEPS = 64


@dataclass(slots=True)
class AcceptanceRate:
    """Share of drafted tokens that were accepted, given that those before them were."""

    accepted: float = _PRIOR_ACCEPTANCE * _PRIOR_WEIGHT
    verified: float = _PRIOR_WEIGHT

    @property
    def value(self) -> float:
        return self.accepted / self.verified

    def record(self, accepted: int, verified: int) -> None:
        self.accepted += accepted
        self.verified += verified
        if self.verified > _MAX_WEIGHT:
            self.accepted *= 0.5
            self.verified *= 0.5


@dataclass(slots=True)
class DraftCounters:
    """Totals since the engine was created. ``accepted_by_position[i]``: requests whose first i + 1 drafts were."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    chains: int = 0
    verified_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    def as_metrics(self) -> dict[str, float]:
        """Return the totals under the names of the engine's statistics."""
        return {
            "speculative_steps": float(self.steps),
            "draft_chains": float(self.chains),
            "drafted_tokens": float(self.drafted),
            "accepted_draft_tokens": float(self.accepted),
        }


@dataclass(frozen=True, slots=True)
class DraftChain:
    """Drafted tokens of one request, and the bucket their acceptance is counted in."""

    req: Req
    tokens: Sequence[int]
    bucket: int


class Drafter(Protocol):
    """Where drafts come from. Acceptance is measured by bucket, of which there are ``num_buckets``."""

    num_buckets: int

    def draft(self, reqs: Sequence[Req], lengths: Sequence[int]) -> list[DraftedTokens | None]:
        """Return a draft of at most so many tokens for each request; None where there is none."""
        ...

    def observe(self, req: Req) -> None:
        """Learn the tokens of a request that ends."""
        ...

    def prepare(self, batch: ForwardBatch, *, drafted: bool, needed: bool) -> None:
        """Compute what drafts behind the tokens of a step need, before it is launched.

        ``drafted``: the step verifies drafts. Drafts that follow are ``needed``, or would not pay.
        """
        ...

    def estimate_seconds(self, num_reqs: int, length: int) -> float:
        """Return what drafting ``length`` tokens for each of ``num_reqs`` requests takes."""
        ...


class Speculation:
    """Proposes drafts for a step, at most ``max_draft_tokens`` per request, and learns from their verification.

    Without ``adaptive`` all requests always verify as many as they can.
    """

    def __init__(self, drafter: Drafter, *, max_draft_tokens: int, cost: StepCost, adaptive: bool = True) -> None:
        self.counters = DraftCounters()
        self._drafter = drafter
        self._max_draft_tokens = max_draft_tokens
        self._cost = cost
        self._adaptive = adaptive
        self._rates = [AcceptanceRate() for _ in range(drafter.num_buckets)]
        self._idle_steps = 0

    def choose_length(self, num_running: int) -> int:
        """Return how many tokens to draft for each of so many requests, if all drafts were as good as the best are.

        It is 0 where no length pays, but 1 after a number of steps without drafts, to measure again.
        """
        if not self._adaptive:
            return self._max_draft_tokens
        rate = max(rate.value for rate in self._rates)
        best, best_rate = 0, 1 / self._cost(num_running)
        tokens, gain = 1.0, 1.0
        for length in range(1, self._max_draft_tokens + 1):
            gain *= rate
            tokens += gain
            seconds = self._cost(num_running * (1 + length)) + self._cost.turn_seconds
            seconds += self._drafter.estimate_seconds(num_running, length)
            if tokens / seconds > best_rate:
                best, best_rate = length, tokens / seconds
        return max(best, int(self._idle_steps >= PROBE_STEPS))

    def prepare(self, batch: ForwardBatch, *, drafted: bool) -> None:
        """Prepare for drafts behind the tokens of a step, which may be ``drafted`` themselves."""
        # A request has a row for each of its drafts.
        needed = self.choose_length(len(set(batch.req_slots_B.tolist()))) > 0
        self._drafter.prepare(batch, drafted=drafted, needed=needed)

    def propose(
        self, reqs: Sequence[Req], room: Sequence[int], *, num_rows: int, max_rows: int
    ) -> dict[int, Sequence[int]]:
        """Return drafts by request slot, for requests with ``room`` for that many.

        The step has ``num_rows`` rows without drafts, and at most ``max_rows`` with them.
        """
        length = self.choose_length(num_rows)
        if not length:
            self._idle_steps += 1
            return {}
        length = length if num_rows < max_rows else 0
        # Also without requests: a head runs on prompts that are not computed to their end yet.
        chains = self._find_chains(reqs, [min(most, length) for most in room])
        counts = self._choose_lengths(chains, num_rows, max_rows)
        if self._idle_steps >= PROBE_STEPS and chains and not any(counts):
            counts[0] = 1
        drafts = {chain.req.slot: chain.tokens[:count] for chain, count in zip(chains, counts, strict=True) if count}
        self.counters.steps += bool(drafts)
        self._idle_steps = 0 if drafts else self._idle_steps + 1
        return drafts

    def record(self, req: Req, drafted: int, accepted: int) -> None:
        """Learn that ``accepted`` of the request's ``drafted`` tokens were accepted."""
        req.record_verification(drafted, accepted)
        counters = self.counters
        counters.chains += 1
        counters.drafted += drafted
        counters.accepted += accepted
        for position in range(min(drafted, accepted + 1)):
            if position == len(counters.verified_by_position):
                counters.verified_by_position.append(0)
                counters.accepted_by_position.append(0)
            counters.verified_by_position[position] += 1
            counters.accepted_by_position[position] += position < accepted
        self._rates[req.draft_bucket].record(accepted, min(drafted, accepted + 1))

    def forget(self, req: Req) -> None:
        """Keep the tokens of a request that ends, for later requests with its prompt."""
        self._drafter.observe(req)

    def _find_chains(self, reqs: Sequence[Req], lengths: Sequence[int]) -> list[DraftChain]:
        chains: list[DraftChain] = []
        for req, draft in zip(reqs, self._drafter.draft(reqs, lengths), strict=True):
            if draft is not None and draft.tokens:
                req.draft_bucket = draft.bucket
                chains.append(DraftChain(req, draft.tokens, draft.bucket))
        return chains

    def _choose_lengths(self, chains: Sequence[DraftChain], num_rows: int, max_rows: int) -> list[int]:
        """Return how many tokens of each chain are verified: the rows with the largest gain, while they pay."""
        rates = [self._rates[chain.bucket].value for chain in chains]
        queue = [(-rate, index, 1) for index, rate in enumerate(rates)]
        heapify(queue)
        counts = [0] * len(chains)
        tokens, rows = float(num_rows), num_rows
        seconds = self._cost(rows) + self._cost.turn_seconds
        while queue and rows < max_rows:
            gain, index, length = heappop(queue)
            more = self._cost(rows + 1) - self._cost(rows)
            if self._adaptive and -gain * seconds <= more * tokens:
                break
            counts[index] = length
            tokens -= gain
            rows += 1
            seconds += more
            if length < len(chains[index].tokens):
                heappush(queue, (gain * rates[index], index, length + 1))
        pays = tokens * self._cost(num_rows) > num_rows * seconds
        return counts if pays or not self._adaptive else [0] * len(chains)


def build_speculation(
    spec: DecoderSpec,
    config: NativeConfig,
    platform: Platform,
    dtype: torch.dtype,
    draft_model: Drafter | None = None,
) -> Speculation | None:
    """Return what --speculative-algorithm asks for; raise a ``UsageError`` for a model that cannot verify drafts."""
    if config.speculative_algorithm == "none":
        return None
    if spec.recurrent:
        raise UsageError(RECURRENT_PROBLEM)
    if (config.speculative_algorithm != "ngram") != (draft_model is not None):
        raise UsageError(f"--speculative-algorithm {config.speculative_algorithm} and its draft need each other.")
    drafter = draft_model or NgramDrafter(config.speculative_history_tokens)
    cost = estimate_step_cost(spec, platform, str(dtype).removeprefix("torch."))
    return Speculation(
        drafter,
        max_draft_tokens=config.speculative_num_draft_tokens,
        cost=cost,
        adaptive=config.speculative_adaptive,
    )
