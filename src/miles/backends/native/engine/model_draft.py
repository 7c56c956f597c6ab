"""Drafts of a smaller model with the same tokenizer, run by a model runner of its own.

The draft model's KV cache has the pages of the policy's: the same block table, prefix sharing and preemption serve
both. What the policy computes, the draft model computes too (``prepare``), as long as drafts may follow; where it has
not, drafts are worse, and no less lossless. A draft samples with the request's own seed and parameters, so that it is
the policy's sample wherever both models agree. Branches are its other most likely first tokens; the keys of one that
was accepted are computed with the next draft. The draft model sees no images, and no tokens beyond its vocabulary.

Shapes: as in ``forward_batch``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from miles.backends.native.engine.draft_tree import DraftBranch
from miles.backends.native.engine.forward_batch import (
    ForwardBatch,
    InflightStep,
    LogprobQueries,
    SamplingBatch,
    build_decode_rows,
    copies_as_arrays,
)
from miles.backends.native.engine.ngram_draft import MIN_MATCH, DraftedTokens, find_branches
from miles.backends.native.engine.req import Req
from miles.backends.native.engine.req_slots import ReqSlots
from miles.backends.native.engine.request import Ints
from miles.backends.native.engine.step_cost import StepCost


class DraftRunner(Protocol):
    """The model runner of a draft model."""

    last_tokens_S: Tensor

    def launch(self, batch: ForwardBatch) -> InflightStep: ...
    def copy_pages(self, sources: Ints, targets: Ints) -> None: ...


class LastDraft(NamedTuple):
    """Tokens that were drafted for a request behind its first ``start`` ones, whose keys are stored."""

    req: Req
    start: int
    tokens: Sequence[int]


class ModelDrafter:
    """Drafts of a model that ``runner`` runs; ``last_tokens_S`` are the tokens the policy sampled last.

    ``vocab_size`` is the number of tokens that both models have. ``due_copies`` returns the page copies (target ->
    source) of the step that is being scheduled. A draft has at most ``num_branches``, one of which is its chain.
    """

    num_buckets = 1
    can_replay = False

    def __init__(
        self,
        runner: DraftRunner,
        slots: ReqSlots,
        last_tokens_S: Tensor,
        *,
        due_copies: Callable[[], Mapping[int, int]],
        cost: StepCost,
        page_size: int,
        vocab_size: int,
        num_branches: int = 1,
    ) -> None:
        self._runner = runner
        self._slots = slots
        self._last_tokens_S = last_tokens_S
        self._due_copies = due_copies
        self._cost = cost
        self._page_size = page_size
        self._vocab_size = vocab_size
        self._num_branches = num_branches
        self._last_drafts: dict[int, LastDraft] = {}
        self._copied: set[int] = set()

    def draft(self, reqs: Sequence[Req], lengths: Sequence[int]) -> list[DraftedTokens | None]:
        """Sample ``lengths`` tokens behind each request, one step for each token, and wait for the last."""
        drafts: list[list[int]] = [[] for _ in reqs]
        branches: list[list[DraftBranch]] = [[] for _ in reqs]
        launched: list[tuple[list[int], InflightStep]] = []
        slots_B = np.array([req.slot for req in reqs], np.int64)
        lengths_B = np.array(lengths, np.int64)
        # The last step of a request only stores the keys of its last draft, which may be accepted.
        for step in range(int(lengths_B.max(initial=0)) + 1):
            rows = ((lengths_B > 0) & (lengths_B >= step)).nonzero()[0]
            if len(rows):
                batch, order = self._build_batch(slots_B[rows], step)
                launched.append((rows[order].tolist(), self._runner.launch(batch)))
        for rows, inflight in launched:
            output = inflight.result()
            for row, token in zip(rows, output.tokens_D.tolist(), strict=False):  # missing tokens come last
                if len(drafts[row]) < lengths[row]:
                    drafts[row].append(token)
            if output.logprob_results is not None:
                for row, tokens in zip(rows, output.logprob_results.tokens_Rk.tolist(), strict=True):
                    others = [[token] for token in tokens if token < self._vocab_size]
                    branches[row] = find_branches(drafts[row][:1], others, self._num_branches - 1)
        drafts = [self._cut(tokens) for tokens in drafts]
        self._last_drafts = {
            req.slot: LastDraft(req, len(req.tokens), tokens) for req, tokens in zip(reqs, drafts, strict=True)
        }
        return [DraftedTokens(*draft) for draft in zip(drafts, [MIN_MATCH] * len(reqs), branches, strict=True)]

    def prepare(self, batch: ForwardBatch, *, drafted: bool, needed: bool) -> None:
        """Store the keys of a step's tokens; drafting has stored those of a step that is only drafts."""
        # Drafting has copied some of the pages that this step copies, and written behind what was copied.
        sources, targets = batch.page_copies
        left = ~np.isin(targets, list(self._copied)) if drafted else np.ones(len(targets), np.bool_)
        self._copied = set()
        if not needed or (drafted and len(batch.counts_B) == batch.num_decodes):
            if left.any():
                self._runner.copy_pages(sources[left], targets[left])
            return
        self._runner.last_tokens_S.copy_(self._last_tokens_S.clamp(max=self._vocab_size - 1))
        self._runner.launch(
            replace(
                batch,
                tokens_T=np.minimum(batch.tokens_T, self._vocab_size - 1),
                logit_edits=None,
                logprob_queries=None,
                prompt_scoring=None,
                vision=None,
                visible_ends_T=None,
                rope_offsets_B=None,
                rope_positions_3T=None,
                page_copies=(sources[left], targets[left]),
            )
        )

    def observe(self, req: Req) -> bool:
        """Do nothing: the model does not learn."""
        return False

    def replay(self, req: Req, count: int) -> None:
        """Do nothing: drafts of earlier tokens would have to be computed again."""

    def estimate_replay_seconds(self, req: Req) -> float:
        """Return 0: there is no replay."""
        return 0.0

    def estimate_seconds(self, num_reqs: int, length: int) -> float:
        """Return the time of so many steps of the draft model, and of one that stores keys."""
        return (length + 1) * self._cost(num_reqs)

    def _cut(self, tokens: list[int]) -> list[int]:
        """Return the tokens before the first that the policy does not have."""
        return tokens[: next((i for i, token in enumerate(tokens) if token >= self._vocab_size), len(tokens))]

    def _build_batch(self, slots_B: Ints, step: int) -> tuple[ForwardBatch, Ints]:
        """Return the draft model's ``step``-th step for these requests, and the order of its rows."""
        slots = self._slots
        rows = build_decode_rows(slots_B, -1, lambda _: [], slots)
        order = np.argsort(slots.prefix_page_S[slots_B], kind="stable")
        slots_B = rows.sampling_info.req_slots_D
        starts_B = slots.num_computed_S[slots_B] + step
        first_B = np.minimum(slots.token_S[slots_B], self._vocab_size - 1)
        copies = self._due_copies() if step == 0 else {}
        self._copied |= set(copies)
        with_branches = step == 0 and self._num_branches > 1
        batch = ForwardBatch(
            tokens_T=first_B if step == 0 else np.full_like(first_B, -1),
            starts_B=starts_B,
            counts_B=rows.ones_B,
            req_slots_B=slots_B,
            num_decodes=len(slots_B),
            block_table_BM=slots.block_table_SP[:, : int(starts_B.max()) // self._page_size + 1][slots_B],
            shared_B=rows.shared_B,
            group_B=rows.group_B,
            rows_D=rows.rows_B,
            req_slots_D=slots_B,
            sampling=rows.sampling_info.build_sampling_batch(slots.length_S[slots_B] + step),
            page_copies=copies_as_arrays(copies),
            logprob_queries=self._query_branches(len(slots_B)) if with_branches else None,
            decode_only=not with_branches,
        )
        return (self._add_missing(batch) if with_branches else batch), order

    def _query_branches(self, count: int) -> LogprobQueries:
        none = np.zeros(0, np.int64)
        top_k = min(self._num_branches, self._vocab_size)
        return LogprobQueries(top_k=top_k, rows_R=np.arange(count), token_rows_W=none, tokens_W=none)

    def _add_missing(self, batch: ForwardBatch) -> ForwardBatch:
        """Add rows for tokens of accepted branches, in whose place the keys of the chain are stored."""
        missing = [
            (row, position, token)
            for row, slot in enumerate(batch.req_slots_B.tolist())
            for position, token in self._find_missing(slot)
        ][: self._slots.count - len(batch.req_slots_B)]
        if not missing:
            return batch
        rows, positions, tokens = np.array(missing, np.int64).T
        sampling, count = batch.sampling, len(rows)
        # What they sample goes to the slot that no request has.
        padding = np.full(count, self._slots.count)
        return replace(
            batch,
            tokens_T=np.concatenate((batch.tokens_T, np.minimum(tokens, self._vocab_size - 1))),
            starts_B=np.concatenate((batch.starts_B, positions)),
            counts_B=np.ones(len(batch.counts_B) + count, np.int64),
            req_slots_B=np.concatenate((batch.req_slots_B, padding)),
            num_decodes=batch.num_decodes + count,
            block_table_BM=np.concatenate((batch.block_table_BM, batch.block_table_BM[rows])),
            shared_B=np.concatenate((batch.shared_B, np.zeros(count, np.int64))),
            group_B=np.concatenate((batch.group_B, np.full(count, -1))),
            rows_D=np.arange(len(batch.rows_D) + count),
            req_slots_D=np.concatenate((batch.req_slots_D, padding)),
            sampling=SamplingBatch(
                **{
                    field.name: np.concatenate((values, values[rows]))
                    for field in fields(sampling)
                    for values in (getattr(sampling, field.name),)
                }
            ),
        )

    def _find_missing(self, slot: int) -> Iterator[tuple[int, int]]:
        """Yield the computed positions, and their tokens, from the first that is not what was drafted there."""
        last = self._last_drafts.get(slot)
        if last is None or self._slots.reqs[slot] is not last.req:
            return
        req = last.req
        end = min(last.start + len(last.tokens), int(self._slots.num_computed_S[slot]))
        known = zip(range(last.start, end), last.tokens, strict=False)
        first = next((position for position, token in known if req.tokens[position] != token), end)
        yield from ((position, req.tokens[position]) for position in range(first, end))
