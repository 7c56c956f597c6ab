"""Drafts of a head on the policy's hidden states: MTP layers or an EAGLE-3 head (``models.draft``).

The head's KV cache has the pages of the policy's. At position p it reads what the policy computed there and the token
at p + 1, so it runs one step behind: once the tokens of a step are known, it runs on all positions that the step
computed, and its last row of each request gives the first drafted token; the others follow one by one from its own
hidden state. Branches are its other most likely first tokens. Where it has not run (while drafts did not pay, or at the
last position of a prompt that several requests share) drafts are worse, and no less lossless.

Shapes: as in ``forward_batch``; F features of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from torch import Tensor

from miles.backends.native.engine.draft_tree import DraftBranch
from miles.backends.native.engine.forward_batch import (
    NO_COPIES,
    ForwardBatch,
    SamplingBatch,
    compute_positions,
    copies_as_arrays,
    gather_sampling_info,
    group_by_prefix,
)
from miles.backends.native.engine.ngram_draft import MIN_MATCH, DraftedTokens, find_branches
from miles.backends.native.engine.req import Req
from miles.backends.native.engine.req_slots import ReqSlots
from miles.backends.native.engine.request import Ints
from miles.backends.native.engine.step_cost import StepCost


class DraftHead(Protocol):
    """A head with its KV cache, and the policy's features of the step launched last."""

    def run_first(self, batch: ForwardBatch, feature_rows_T: Ints, next_tokens_T: Ints, last_rows_B: Ints) -> Tensor:
        """Run on the policy's features; return the hidden states of ``last_rows_B``."""
        ...

    def run_next(self, batch: ForwardBatch, hidden_BD: Tensor, next_tokens_B: Tensor, step: int) -> Tensor:
        """Run on the head's own hidden states and drafted tokens; return the new hidden states."""
        ...

    def sample(self, hidden_BD: Tensor, sampling: SamplingBatch, step: int) -> Tensor:
        """Return one drafted token of the policy's vocabulary per row."""
        ...

    def find_top(self, hidden_BD: Tensor, count: int) -> Tensor:
        """Return the most likely first drafted tokens [B, count] of the policy's vocabulary."""
        ...

    def copy_pages(self, sources: Ints, targets: Ints) -> None:
        """Copy whole pages of the head's KV cache."""
        ...

    def fetch(self, tokens: Sequence[Tensor]) -> list[list[int]]:
        """Return the drafted tokens of each step."""
        ...


class LaunchedRows(NamedTuple):
    """The rows of a launched step: whose they are, at which positions and on which pages, and the requests then.

    The page is -1 for the first token of a follower, which comes from a row of its leader.
    """

    rows: Ints
    slots: Ints
    positions: Ints
    pages: Ints
    reqs: Mapping[int, Req]


class HeadDrafter:
    """Drafts of ``head``. ``due_copies`` returns the page copies (target -> source) of the step being scheduled.

    A draft has at most ``num_branches``, one of which is its chain.
    """

    num_buckets = 1

    def __init__(
        self,
        head: DraftHead,
        slots: ReqSlots,
        *,
        due_copies: Callable[[], Mapping[int, int]],
        cost: StepCost,
        page_size: int,
        num_branches: int = 1,
    ) -> None:
        self._head = head
        self._slots = slots
        self._due_copies = due_copies
        self._cost = cost
        self._page_size = page_size
        self._num_branches = num_branches
        self._launched: LaunchedRows | None = None
        self._copied: set[int] = set()

    def prepare(self, batch: ForwardBatch, *, drafted: bool, needed: bool) -> None:
        """Remember the rows of a step: the head runs on them once their tokens are known."""
        self._launched = None
        # Drafting has copied some of the pages that this step copies, and written behind what was copied.
        sources, targets = batch.page_copies
        left = ~np.isin(targets, list(self._copied))
        self._copied = set()
        self._head.copy_pages(sources[left], targets[left])
        if not needed:
            return
        positions_T = compute_positions(batch)
        slots_T = batch.req_slots_B.repeat(batch.counts_B)
        rows_T = np.arange(len(slots_T))
        owner_T = np.arange(len(batch.counts_B)).repeat(batch.counts_B)
        pages_T = batch.block_table_BM[owner_T, positions_T // self._page_size]
        # A follower's first token comes from the last row of its leader's prompt.
        forked_D = (batch.req_slots_D != slots_T[batch.rows_D]).nonzero()[0]
        rows = np.concatenate((rows_T, batch.rows_D[forked_D]))
        slots = np.concatenate((slots_T, batch.req_slots_D[forked_D]))
        reqs = {slot: req for slot in set(slots.tolist()) if (req := self._slots.reqs[slot]) is not None}
        pages = np.concatenate((pages_T, np.full(len(forked_D), -1)))
        self._launched = LaunchedRows(rows, slots, positions_T[rows], pages, reqs)

    def observe(self, req: Req) -> None:
        """Do nothing: the trainer trains the head."""

    def estimate_seconds(self, num_reqs: int, length: int) -> float:
        """Return the time of so many steps of the head."""
        return length * self._cost(num_reqs)

    def draft(self, reqs: Sequence[Req], lengths: Sequence[int]) -> list[DraftedTokens | None]:
        """Run the head on the last step's rows, then sample ``lengths`` tokens behind each request it ran for."""
        launched, self._launched = self._launched, None
        order = self._run_on_launched(launched)
        if order is None:
            return [None] * len(reqs)
        slots_B, hidden_BD = order
        lengths_by_slot = {req.slot: length for req, length in zip(reqs, lengths, strict=True)}
        lengths_B = np.array([lengths_by_slot.get(slot, 0) for slot in slots_B.tolist()], np.int64)
        tokens: list[Tensor] = []
        rows: list[list[int]] = []
        next_B: Tensor | None = None
        top_Bk = self._head.find_top(hidden_BD, self._num_branches) if self._num_branches > 1 else None
        current = np.arange(len(slots_B))
        for step in range(int(lengths_B.max(initial=0))):
            kept = (lengths_B[current] > step).nonzero()[0]
            if len(kept) < len(current):
                hidden_BD = hidden_BD[kept.tolist()]
                next_B = None if next_B is None else next_B[kept.tolist()]
                current = current[kept]
            if next_B is not None:
                hidden_BD = self._head.run_next(self._build_batch(slots_B[current], step), hidden_BD, next_B, step)
            info = gather_sampling_info(slots_B[current], self._slots)
            sampling = info.build_sampling_batch(self._slots.length_S[slots_B[current]] + step)
            next_B = self._head.sample(hidden_BD, sampling, step)
            tokens.append(next_B)
            rows.append(current.tolist())
        drafts: dict[int, list[int]] = {}
        for step_rows, step_tokens in zip(rows, self._head.fetch(tokens), strict=True):
            for row, token in zip(step_rows, step_tokens, strict=True):
                drafts.setdefault(int(slots_B[row]), []).append(token)
        branches: dict[int, list[DraftBranch]] = {}
        if top_Bk is not None:
            for slot, top in zip(slots_B.tolist(), top_Bk.tolist(), strict=True):
                others = ([token] for token in top)
                branches[slot] = find_branches(drafts.get(slot, [])[:1], others, self._num_branches - 1)
        return [
            DraftedTokens(drafts[req.slot], MIN_MATCH, branches.get(req.slot, ())) if req.slot in drafts else None
            for req in reqs
        ]

    def _run_on_launched(self, launched: LaunchedRows | None) -> tuple[Ints, Tensor] | None:
        """Run the head on the rows of the last step whose tokens were accepted.

        Return the requests it ran for up to their last computed position, and the hidden states there.
        """
        if launched is None:
            return None
        slots = self._slots
        same = np.array([slots.reqs[slot] is launched.reqs.get(slot) for slot in launched.slots.tolist()], np.bool_)
        valid = same & (launched.positions < slots.num_computed_S[launched.slots])
        # Rows of a branch that was not accepted are on pages that are no longer the request's.
        pages = slots.block_table_SP[launched.slots, launched.positions // self._page_size]
        valid &= (launched.pages < 0) | (launched.pages == pages)
        index = valid.nonzero()[0]
        index = index[np.lexsort((launched.positions[index], launched.slots[index]))]
        if not len(index):
            return None
        rows, owners, positions = launched.rows[index], launched.slots[index], launched.positions[index]
        firsts = np.append(0, (np.diff(owners) != 0).nonzero()[0] + 1)
        counts_B = np.diff(np.append(firsts, len(owners)))
        # Rows of one token come first, as in every batch.
        by_count = np.argsort(counts_B > 1, kind="stable")
        spans = list(zip(firsts.tolist(), counts_B.tolist(), strict=True))
        take = np.concatenate([np.arange(spans[b][0], sum(spans[b])) for b in by_count.tolist()])
        rows, owners, positions = rows[take], owners[take], positions[take]
        counts_B = counts_B[by_count]
        last_rows_B = np.cumsum(counts_B) - 1
        slots_B, starts_B = owners[last_rows_B], positions[last_rows_B] - counts_B + 1
        next_tokens = np.array(
            [
                self._token_at(slot, position + 1)
                for slot, position in zip(owners.tolist(), positions.tolist(), strict=True)
            ]
        )
        copies = self._due_copies()
        self._copied = set(copies)
        batch = self._make_batch(slots_B, starts_B, counts_B, copies_as_arrays(copies))
        hidden_BD = self._head.run_first(batch, rows, next_tokens, last_rows_B)
        ready = (positions[last_rows_B] + 1 == slots.num_computed_S[slots_B]).nonzero()[0]
        if len(ready) < len(slots_B):
            slots_B, hidden_BD = slots_B[ready], hidden_BD[ready.tolist()]
        return slots_B, hidden_BD

    def _token_at(self, slot: int, position: int) -> int:
        req = self._slots.reqs[slot]
        assert req is not None
        return req.tokens[position]

    def _build_batch(self, slots_B: Ints, step: int) -> ForwardBatch:
        """Return the rows of the head's ``step``-th own step: one token behind each request's computed ones."""
        starts_B = self._slots.num_computed_S[slots_B] - 1 + step
        return self._make_batch(slots_B, starts_B, np.ones_like(slots_B), NO_COPIES)

    def _make_batch(self, slots_B: Ints, starts_B: Ints, counts_B: Ints, copies: tuple[Ints, Ints]) -> ForwardBatch:
        slots = self._slots
        info = gather_sampling_info(slots_B, slots)
        group_B, shared_B = group_by_prefix(slots_B, slots)
        alone = counts_B > 1
        max_pages = (int((starts_B + counts_B).max()) - 1) // self._page_size + 1
        return ForwardBatch(
            tokens_T=np.zeros(int(counts_B.sum()), np.int64),
            starts_B=starts_B,
            counts_B=counts_B,
            req_slots_B=slots_B,
            num_decodes=int((counts_B == 1).sum()),
            block_table_BM=slots.block_table_SP[:, :max_pages][slots_B],
            # The position of a prompt's end depends on the token behind it, so a prefix is shared before that only.
            shared_B=np.zeros_like(shared_B),
            group_B=np.where(alone, -1, np.arange(len(group_B))),
            rows_D=np.cumsum(counts_B) - 1,
            req_slots_D=slots_B,
            sampling=info.build_sampling_batch(slots.length_S[slots_B]),
            page_copies=copies,
        )
