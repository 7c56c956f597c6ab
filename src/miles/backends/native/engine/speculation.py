"""Speculative decoding: which requests verify how many drafted tokens in a step, and how many were accepted.

Verification is lossless by construction. The token after a position is a function of the request's seed, the position
and the policy's logits; a drafted token is accepted if it is that token. So the sampled tokens and their log-probs are
those of the policy, and with batch-invariant kernels they are bit for bit those of a run without drafts.

A drafted token gets a row of a step while the tokens expected of it are worth more than the row: by acceptance
measured so far, and the estimated cost of a step by its rows (``step_cost``). So does a branch, which also costs the
rows that are repeated for it. Nothing depends on a clock, so a run with a fixed seed makes the same drafts again.

While no draft would pay, a step is the one of an engine without speculation. Drafts without a model are measured by
replay then: what would have been drafted for a request a few tokens ago is compared with what was sampled since. That
needs no row and no wait for the device. Others are measured by a probe, one drafted token of one request. Both become
rare while they are in vain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

import torch

from miles.backends.native.config import NativeConfig
from miles.backends.native.engine.draft_tree import NO_DRAFTS, DraftBranch, DraftTree, count_repeated_rows
from miles.backends.native.engine.forward_batch import ForwardBatch
from miles.backends.native.engine.ngram_draft import NOT_INDEXED, DraftedTokens, NgramDrafter
from miles.backends.native.engine.req import Req
from miles.backends.native.engine.step_cost import StepCost, estimate_step_cost
from miles.cluster.platform import Platform
from miles.core.errors import UsageError
from miles.models.spec import DecoderSpec

# Acceptance before anything was measured, and the weight of that in drafted tokens; and that of a branch's first token
# where the chain's was rejected.
_PRIOR_ACCEPTANCE, _PRIOR_WEIGHT = 0.6, 8.0
_PRIOR_BRANCH_ACCEPTANCE = 0.3
# Beyond this many drafted tokens, older measurements lose weight.
_MAX_WEIGHT = 512.0
# Drafts must gain this much by the estimate, which is not exact.
MIN_GAIN = 1.1
# Steps without any draft after which one is tried again, to measure, of drafts that cannot be replayed; and the most.
PROBE_STEPS, MAX_PROBE_STEPS = 64, 1024
# Share of requests that have a draft, before anything was measured, its weight, and the most weight, in lookups.
_PRIOR_SHARE = 0.5
_PRIOR_LOOKUPS, _MAX_LOOKUPS = 4.0, 128.0
# Steps without drafts from one replay to the next, at first and at most, and the tokens of a replay.
REPLAY_STEPS, MAX_REPLAY_STEPS = 4, 128
_REPLAY_TOKENS = 4
# The most time of replays, by the time of the steps between them, both by estimates; and the most replays of a step.
_MAX_REPLAY_SHARE, _MAX_REPLAYS = 0.01, 8
# Weight in lookups that is left to earlier measurements when a prompt is sampled again.
_NEW_EPOCH_LOOKUPS = 16.0
# Above this batch size the length of drafts is chosen for batches of about the same size at once.
_EXACT_BATCH_SIZE, _BATCH_SIZE_STEP = 16, 8


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
    """Totals since the engine was created. ``accepted_by_position[i]``: requests whose first i + 1 drafts were.

    ``chains`` counts requests with drafts in a step, ``branches`` those they had besides a chain.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    chains: int = 0
    branches: int = 0
    accepted_branches: int = 0
    verified_by_position: list[int] = field(default_factory=list)
    accepted_by_position: list[int] = field(default_factory=list)

    def as_metrics(self) -> dict[str, float]:
        """Return the totals under the names of the engine's statistics."""
        return {
            "speculative_steps": float(self.steps),
            "draft_chains": float(self.chains),
            "drafted_tokens": float(self.drafted),
            "accepted_draft_tokens": float(self.accepted),
            "draft_branches": float(self.branches),
            "accepted_draft_branches": float(self.accepted_branches),
        }


class RowCandidate(NamedTuple):
    """One more drafted token of a draft: the ``length``-th of its chain (branch 0) or of a branch.

    ``gain`` are the tokens expected of it, ``rows`` the rows that it costs. Candidates are ordered by gain per row.
    """

    order: float
    draft: int
    branch: int
    length: int
    gain: float
    rows: int


class Drafter(Protocol):
    """Where drafts come from. Acceptance is measured by bucket, of which there are ``num_buckets``.

    Drafts that ``can_replay`` are measured without verification and follow from tokens alone. Others have a draft for
    every request, and prepare for it in every step.
    """

    num_buckets: int
    can_replay: bool

    def draft(self, reqs: Sequence[Req], lengths: Sequence[int]) -> list[DraftedTokens | None]:
        """Return a draft of at most so many tokens for each request; None where there is none."""
        ...

    def observe(self, req: Req) -> bool:
        """Learn of a request that starts or ends; return whether it repeats a prompt that has ended samples."""
        ...

    def prepare(self, batch: ForwardBatch, *, drafted: bool, needed: bool) -> None:
        """Compute what drafts behind the tokens of a step need, before it is launched.

        ``drafted``: the step verifies drafts. Drafts that follow are ``needed``, or would not pay.
        """
        ...

    def replay(self, req: Req, count: int) -> DraftedTokens | None:
        """Return what would have been drafted before the last ``count`` tokens of a request."""
        ...

    def estimate_replay_seconds(self, req: Req) -> float:
        """Return what a replay of a request takes."""
        ...

    def estimate_seconds(self, num_reqs: int, length: int) -> float:
        """Return what drafting ``length`` tokens for each of ``num_reqs`` requests takes."""
        ...


class Speculation:
    """Proposes drafts for a step, at most ``max_draft_tokens`` per request, and learns from their verification.

    Without ``adaptive`` all requests always verify as many as they can. Branches start on pages of ``page_size``. A
    step has at most ``max_rows`` rows (None: any number), of which ``max_draft_rows`` are drafts.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        max_draft_tokens: int,
        cost: StepCost,
        page_size: int = 1,
        adaptive: bool = True,
        max_rows: int | None = None,
        max_draft_rows: int | None = None,
    ) -> None:
        self.counters = DraftCounters()
        self._drafter = drafter
        self._max_draft_tokens = max_draft_tokens
        self._lengths = range(1, max_draft_tokens + 1)
        self._cost = cost
        self._page_size = page_size
        self._adaptive = adaptive
        self._max_rows = max_rows
        self._max_draft_rows = max_draft_rows
        self._rates = [AcceptanceRate() for _ in range(drafter.num_buckets)]
        # By rank among the branches of one fork: if the chain and the branches before it were rejected.
        self._branch_rates: list[AcceptanceRate] = []
        # How many lookups found a draft of each bucket, and how many there were.
        self._found = [0.0] * drafter.num_buckets
        self._found[-1] = _PRIOR_SHARE * _PRIOR_LOOKUPS
        self._num_lookups = _PRIOR_LOOKUPS
        self._idle_steps = 0
        self._probe_steps = PROBE_STEPS
        self._next_replayed = 0
        self._replay_steps = REPLAY_STEPS
        self._steps_since_replay = 0
        self._best_lengths: dict[int, int] = {}

    def choose_length(self, num_running: int) -> int:
        """Return how many tokens to draft for each of so many requests that have a draft.

        It is 0 where no length pays, but 1 after a number of steps without drafts that cannot be replayed, to measure
        again.
        """
        if not self._adaptive:
            return self._max_draft_tokens
        if num_running > _EXACT_BATCH_SIZE:
            num_running = -(-num_running // _BATCH_SIZE_STEP) * _BATCH_SIZE_STEP
        best = self._best_lengths.get(num_running)
        if best is None:
            best = self._best_lengths[num_running] = self._find_best_length(num_running)
        return best or int(self._is_probe())

    def _is_probe(self) -> bool:
        return self._idle_steps >= self._probe_steps and not self._drafter.can_replay

    def _find_best_length(self, num_running: int) -> int:
        """Return the length that samples most tokens a second, if drafts of the best buckets are verified."""
        shares = [1.0] * len(self._rates)
        if self._drafter.can_replay:
            shares = [found / self._num_lookups for found in self._found]
        buckets = sorted(((rate.value, share) for rate, share in zip(self._rates, shares, strict=True)), reverse=True)
        # Were rows and drafting free, so many tokens of a request would be accepted.
        most = sum(share * sum(rate**length for length in self._lengths) for rate, share in buckets if share)
        if 1 + most < MIN_GAIN or not num_running:
            return 0
        best, best_rate = 0, MIN_GAIN * num_running / self._cost(num_running)
        max_draft_rows = self._count_free_rows(num_running)
        drafting = 0.0
        gains = [0.0] * self._max_draft_tokens
        for rate, share in buckets:
            if not share:
                continue
            drafting += share * num_running
            accepted = 0.0
            for length in self._lengths:
                gains[length - 1] += share * num_running * rate**length
                accepted += gains[length - 1]
                # Where there are too few rows for all, some requests have none.
                rows = min(drafting * length, max_draft_rows)
                tokens = num_running + accepted * rows / (drafting * length)
                seconds = self._cost(num_running + rows) + self._cost.turn_seconds
                seconds += self._drafter.estimate_seconds(num_running, length)
                if tokens / seconds > best_rate:
                    best, best_rate = length, tokens / seconds
        return best

    def _count_free_rows(self, num_running: int) -> float:
        """Return how many rows of a step may be drafts."""
        free = float("inf") if self._max_rows is None else max(0, self._max_rows - num_running)
        return free if self._max_draft_rows is None else min(free, self._max_draft_rows)

    def measure(self, reqs: Sequence[Req]) -> None:
        """Replay drafts of some of the requests whose tokens a step without drafts sampled, every few steps.

        In vain it is done ever less often, and its time is a small share of that of the steps.
        """
        self._steps_since_replay += 1
        if self._steps_since_replay < self._replay_steps or not self._drafter.can_replay or not self._adaptive:
            return
        seconds = _MAX_REPLAY_SHARE * self._steps_since_replay * self._cost(len(reqs))
        num_replays, accepted = 0, 0
        for _ in range(min(_MAX_REPLAYS, len(reqs))):
            req = reqs[self._next_replayed % len(reqs)]
            seconds -= self._drafter.estimate_replay_seconds(req)
            if seconds < 0:
                break
            self._next_replayed += 1
            if not req.finish_kind and not req.has_no_output:
                num_replays += 1
                accepted += self._replay(req)
                if not accepted:
                    break
        if num_replays:
            self._steps_since_replay = 0
            self._replay_steps = 1 if accepted else min(MAX_REPLAY_STEPS, 2 * self._replay_steps)

    def _replay(self, req: Req) -> int:
        """Measure what would have been drafted for a request a few tokens ago; return how much would be accepted."""
        count = min(_REPLAY_TOKENS, len(req.tokens) - req.prompt_length)
        draft = self._drafter.replay(req, count)
        self._count_lookup(draft)
        if draft is None:
            return 0
        accepted = _count_common(draft.tokens, req.tokens[-count:])
        self._rates[draft.bucket].record(accepted, min(len(draft.tokens), accepted + 1))
        return accepted

    def _count_lookup(self, draft: DraftedTokens | None) -> None:
        self._best_lengths.clear()
        self._num_lookups += 1
        if draft is not None and draft.tokens:
            self._found[draft.bucket] += 1
        if self._num_lookups > _MAX_LOOKUPS:
            self._scale_lookups(0.5)

    def _scale_lookups(self, factor: float) -> None:
        """Change the weight of all lookups so far."""
        self._best_lengths.clear()
        self._num_lookups *= factor
        self._found = [found * factor for found in self._found]

    def prepare(self, batch: ForwardBatch, *, drafted: bool) -> None:
        """Prepare for drafts behind the tokens of a step, which may be ``drafted`` themselves."""
        if self._drafter.can_replay:
            return
        # A request has a row for each of its drafts.
        needed = self.choose_length(len(set(batch.req_slots_B.tolist()))) > 0
        self._drafter.prepare(batch, drafted=drafted, needed=needed)

    def propose(
        self, reqs: Sequence[Req], room: Sequence[int], *, num_rows: int, max_rows: int
    ) -> dict[int, DraftTree]:
        """Return drafts by request slot, for requests with ``room`` for that many behind each other.

        The step has ``num_rows`` rows without drafts, and at most ``max_rows`` with them.
        """
        length = self.choose_length(num_rows)
        if not length:
            self._idle_steps += 1
            return {}
        length = length if num_rows < max_rows else 0
        # Also without requests: a head runs on prompts that are not computed to their end yet.
        lengths = [min(most, length) for most in room]
        found = self._drafter.draft(reqs, lengths)
        if self._drafter.can_replay:
            for draft, most in zip(found, lengths, strict=True):
                if most and draft is not NOT_INDEXED:
                    self._count_lookup(draft)
        pairs = [(req, draft) for req, draft in zip(reqs, found, strict=True) if draft is not None and draft.tokens]
        trees = self._choose_trees(pairs, num_rows, max_rows)
        is_probe = self._is_probe()
        if is_probe and pairs and not any(tree.tokens for tree in trees):
            trees[0] = DraftTree(pairs[0][1].tokens[:1])
        drafts = {}
        for (req, draft), tree in zip(pairs, trees, strict=True):
            if tree.tokens:
                req.draft_bucket = draft.bucket
                drafts[req.slot] = tree
        self.counters.steps += bool(drafts)
        if drafts:
            self._probe_steps = min(MAX_PROBE_STEPS, 2 * self._probe_steps) if is_probe else PROBE_STEPS
        self._idle_steps = 0 if drafts else self._idle_steps + 1
        return drafts

    def record(self, req: Req, accepted: int, branch: int = 0, *, drafted_end: bool = False) -> None:
        """Learn that the first ``accepted`` tokens of the request's drafts were accepted, up to a ``branch``.

        The last of them may be the end of the response, ``drafted_end``: what was drafted behind it is not verified.
        """
        self._best_lengths.clear()
        tree, rate = req.draft, self._rates[req.draft_bucket]
        req.record_verification(tree.num_tokens, accepted, drafted_end=drafted_end)
        rejected = int(not drafted_end)
        counters = self.counters
        counters.chains += 1
        counters.branches += len(tree.branches)
        counters.accepted_branches += branch > 0
        counters.drafted += tree.num_tokens
        counters.accepted += accepted
        for position in range(min(tree.depth, accepted + rejected)):
            if position == len(counters.verified_by_position):
                counters.verified_by_position.append(0)
                counters.accepted_by_position.append(0)
            counters.verified_by_position[position] += 1
            counters.accepted_by_position[position] += position < accepted
        fork = tree.branches[branch - 1].fork if branch else accepted
        rate.record(fork, min(len(tree.tokens), fork + (1 if branch else rejected)))
        if branch:
            rest, followed = len(tree.branches[branch - 1].tokens) - 1, accepted - fork - 1
            rate.record(followed, min(rest, followed + rejected))
        if fork == len(tree.tokens) or req.finish_kind:
            return
        for rank, number in enumerate(i for i, each in enumerate(tree.branches, 1) if each.fork == fork):
            self._get_branch_rate(rank).record(int(number == branch), 1)
            if number == branch:
                break

    def observe(self, req: Req) -> None:
        """Note that a request starts or ends; its tokens are kept for other requests with its prompt."""
        if self._drafter.observe(req) and self._replay_steps > REPLAY_STEPS:
            # Until now nothing was repeated.
            self._replay_steps = 1
            self._scale_lookups(min(1.0, _NEW_EPOCH_LOOKUPS / self._num_lookups))

    def _get_branch_rate(self, rank: int) -> AcceptanceRate:
        while rank >= len(self._branch_rates):
            self._branch_rates.append(AcceptanceRate(_PRIOR_BRANCH_ACCEPTANCE * _PRIOR_WEIGHT))
        return self._branch_rates[rank]

    def _choose_trees(
        self, drafts: Sequence[tuple[Req, DraftedTokens]], num_rows: int, max_rows: int
    ) -> list[DraftTree]:
        """Return which tokens of each draft are verified: the largest gains for their rows, while they pay."""
        rates = [self._rates[draft.bucket].value for _, draft in drafts]
        queue = [RowCandidate(-rate, index, 0, 1, rate, 1) for index, rate in enumerate(rates)]
        heapify(queue)
        lengths = [[0] * (1 + len(draft.branches)) for _, draft in drafts]
        tokens, rows = float(num_rows), num_rows
        plain_seconds = self._cost(rows)
        seconds = plain_seconds + self._cost.turn_seconds
        while queue and rows < max_rows:
            _, index, branch, length, gain, needed = heappop(queue)
            if rows + needed > max_rows or sum(lengths[index]) == self._max_draft_tokens:
                continue
            more = self._cost(rows + needed) + self._cost.turn_seconds - seconds
            if self._adaptive and gain * seconds <= more * tokens:
                if not branch:
                    break
                continue
            lengths[index][branch] = length
            tokens += gain
            rows += needed
            seconds += more
            draft = drafts[index][1]
            if length < len(draft.branches[branch - 1].tokens if branch else draft.tokens):
                gain *= rates[index]
                heappush(queue, RowCandidate(-gain, index, branch, length + 1, gain, 1))
            if not branch and draft.branches:
                for candidate in self._iter_branches(*drafts[index], index, length - 1):
                    heappush(queue, candidate)
        if self._adaptive and tokens * plain_seconds <= num_rows * seconds:
            return [NO_DRAFTS] * len(drafts)
        return [_cut(draft, counts) for (_, draft), counts in zip(drafts, lengths, strict=True)]

    def _iter_branches(self, req: Req, draft: DraftedTokens, index: int, fork: int) -> Iterator[RowCandidate]:
        """Yield the first tokens of the branches that leave a chain behind ``fork`` tokens."""
        rate = self._rates[draft.bucket].value
        reached = rate**fork * (1 - rate)
        needed = 1 + count_repeated_rows(len(req.tokens) - 1, fork, self._page_size)
        for rank, number in enumerate(i for i, each in enumerate(draft.branches, 1) if each.fork == fork):
            accepted = self._get_branch_rate(rank).value
            gain = reached * accepted
            reached *= 1 - accepted
            yield RowCandidate(-gain / needed, index, number, 1, gain, needed)


def _count_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Return how many first tokens of two sequences are equal."""
    pairs = zip(left, right, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(left), len(right)))


def _cut(draft: DraftedTokens, lengths: Sequence[int]) -> DraftTree:
    branches = zip(draft.branches, lengths[1:], strict=True)
    return DraftTree(
        draft.tokens[: lengths[0]],
        [DraftBranch(branch.fork, branch.tokens[:length]) for branch, length in branches if length],
    )


def build_speculation(
    spec: DecoderSpec,
    config: NativeConfig,
    platform: Platform,
    dtype: torch.dtype,
    draft_model: Drafter | None = None,
) -> Speculation | None:
    """Return what --speculative-algorithm asks for."""
    if not config.drafts:
        return None
    if (config.speculative_algorithm != "ngram") != (draft_model is not None):
        raise UsageError(f"--speculative-algorithm {config.speculative_algorithm} and its draft need each other.")
    drafter = draft_model or NgramDrafter(config.speculative_history_tokens, config.speculative_num_branches)
    cost = estimate_step_cost(spec, platform, str(dtype).removeprefix("torch."))
    return Speculation(
        drafter,
        max_draft_tokens=config.speculative_num_draft_tokens,
        cost=cost,
        page_size=config.engine_page_size,
        adaptive=config.speculative_adaptive,
        max_rows=config.max_running,
        max_draft_rows=config.count_draft_states(True) if spec.recurrent else None,
    )
