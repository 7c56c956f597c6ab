"""Drafts of a head on the policy's hidden states: MTP layers or an EAGLE-3 head (``models.draft``).

The head's KV cache has the pages of the policy's. At position p it reads what the policy computed there and the token
at p + 1, so it runs one step behind: once the tokens of a step are known, it runs on all positions that the step
computed, and its last row of each request gives the first drafted token; the others follow one by one from its own
hidden state. Branches are its other most likely first tokens. Where it has not run (while drafts did not pay, or at the
last position of a prompt that several requests share) drafts are worse, and no less lossless.

Of several MTP layers, layer m reads at position p the hidden state of layer m - 1 there, and the token at p + m + 1. So
it runs behind the first one on all positions whose tokens are known, m less than the first; in step m of a draft it
runs on the m positions left, with drafted tokens. Its keys are therefore those of all positions, as in training. Steps
beyond the last layer continue it at the positions that follow.

Shapes: as in ``forward_batch``; F features of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from miles.backends.native.engine.draft_tree import DraftBranch
from miles.backends.native.engine.forward_batch import (
    NO_COPIES,
    ForwardBatch,
    compute_positions,
    copies_as_arrays,
    gather_sampling_info,
)
from miles.backends.native.engine.ngram_draft import MIN_MATCH, DraftedTokens, find_branches
from miles.backends.native.engine.req import Req
from miles.backends.native.engine.req_slots import ReqSlots
from miles.backends.native.engine.request import Bools, Ints
from miles.backends.native.engine.step_cost import StepCost


class DraftHead(Protocol):
    """A head with its KV cache, and the policy's features of the step launched last."""

    @property
    def num_layers(self) -> int:
        """The number of its layers that run one behind the other, each on the hidden states of the one before."""
        ...

    def run_first(
        self, batch: ForwardBatch, feature_rows_T: Ints, next_tokens_T: Ints, last_rows_B: Ints, continues_B: Ints
    ) -> Tensor:
        """Run on the policy's features; return the drafted tokens behind ``last_rows_B``, one of each request.

        Tokens are those of the policy's vocabulary, sampled as the batch says. ``continues_B`` is 1 for requests whose
        rows follow those of the last call for them.
        """
        ...

    def run_next(self, batch: ForwardBatch, step: int) -> Tensor:
        """Run on the hidden states and tokens of the steps before, by request slot; return the next drafted tokens."""
        ...

    def find_top(self, slots_B: Ints, count: int) -> Tensor:
        """Return the most likely tokens [B, count] behind the last step of these request slots."""
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
    can_replay = False

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
        # The request of each slot, and the position behind the last one that the head ran on for it.
        self._ends: dict[int, tuple[Req | None, int]] = {}

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

    def observe(self, req: Req) -> bool:
        """Do nothing: the trainer trains the head."""
        return False

    def replay(self, req: Req, count: int) -> None:
        """Do nothing: drafts of earlier tokens would have to be computed again."""

    def estimate_replay_seconds(self, req: Req) -> float:
        """Return 0: there is no replay."""
        return 0.0

    def estimate_seconds(self, num_reqs: int, length: int) -> float:
        """Return the time of so many steps of the head."""
        return length * self._cost(num_reqs)

    def draft(self, reqs: Sequence[Req], lengths: Sequence[int]) -> list[DraftedTokens | None]:
        """Run the head on the last step's rows, then sample ``lengths`` tokens behind each request it ran for."""
        launched, self._launched = self._launched, None
        started = self._run_on_launched(launched)
        if started is None:
            return [None] * len(reqs)
        slots_B, ready_B, first_B = started
        lengths_by_slot = {req.slot: length for req, length in zip(reqs, lengths, strict=True)}
        lengths_B = np.array([lengths_by_slot.get(slot, 0) for slot in slots_B.tolist()], np.int64) * ready_B
        if not lengths_B.any():
            return [None] * len(reqs)
        tokens, rows = [first_B], [np.arange(len(slots_B))]
        top_Bk = self._head.find_top(slots_B, self._num_branches) if self._num_branches > 1 else None
        for step in range(1, int(lengths_B.max())):
            rows.append(self._order_rows(slots_B, (lengths_B > step).nonzero()[0], step))
            tokens.append(self._head.run_next(self._build_batch(slots_B[rows[-1]], step), step))
        drafts: dict[int, list[int]] = {}
        for step, (step_rows, step_tokens) in enumerate(zip(rows, self._head.fetch(tokens), strict=True)):
            for row, token in zip(step_rows.tolist(), step_tokens, strict=True):
                if step < lengths_B[row]:
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

    def _run_on_launched(self, launched: LaunchedRows | None) -> tuple[Ints, Bools, Tensor] | None:
        """Run the head on the rows of the last step whose tokens were accepted.

        Return the requests it ran for, whether that was up to their last computed position, and the tokens it drafted.
        """
        if launched is None:
            return None
        slots = self._slots
        same = np.array([slots.reqs[slot] is launched.reqs.get(slot) for slot in launched.slots.tolist()], np.bool_)
        valid = same & (launched.positions < slots.num_computed_S[launched.slots])
        # Rows of a branch that was not accepted are on pages that are no longer the request's.
        pages = slots.block_table_SP[launched.slots, launched.positions // self._page_size]
        valid &= (launched.pages < 0) | (launched.pages == pages)
        # A follower's copy of its leader's page is made once the head has run on the leader's prompt.
        parts = [part for part in (valid & (launched.pages >= 0), valid & (launched.pages < 0)) if part.any()]
        if not parts:
            return None
        copies = self._due_copies()
        self._copied = set(copies)
        ran = [
            self._run_rows(launched, part, copies_as_arrays(copies) if part is parts[-1] else NO_COPIES)
            for part in parts
        ]
        slots_B, ready_B = (np.concatenate(each) for each in (list(zip(*ran, strict=True))[:2]))
        return slots_B, ready_B, torch.cat([tokens_B for _, _, tokens_B in ran])

    def _run_rows(self, launched: LaunchedRows, valid: Bools, copies: tuple[Ints, Ints]) -> tuple[Ints, Bools, Tensor]:
        """Run the head on some rows of the last step, after these page copies."""
        slots = self._slots
        index = valid.nonzero()[0]
        index = index[np.lexsort((launched.positions[index], launched.slots[index]))]
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
        batch = self._make_batch(slots_B, starts_B, counts_B, copies)
        places = list(zip(slots_B.tolist(), starts_B.tolist(), strict=True))
        ends = [self._ends.get(slot, (None, -1)) for slot in slots_B.tolist()]
        continues_B = np.array(
            [req is slots.reqs[slot] and end == start for (slot, start), (req, end) in zip(places, ends, strict=True)],
            np.int64,
        )
        self._ends |= {
            slot: (slots.reqs[slot], start + count)
            for (slot, start), count in zip(places, counts_B.tolist(), strict=True)
        }
        tokens_B = self._head.run_first(batch, rows, next_tokens, last_rows_B, continues_B)
        return slots_B, positions[last_rows_B] + 1 == slots.num_computed_S[slots_B], tokens_B

    def _token_at(self, slot: int, position: int) -> int:
        req = self._slots.reqs[slot]
        assert req is not None
        return req.tokens[position]

    def _order_rows(self, slots_B: Ints, rows: Ints, step: int) -> Ints:
        """Return the requests that a step runs for; those with one position come first, as in every batch."""
        computed = self._slots.num_computed_S[slots_B[rows]]
        return rows[np.argsort((computed > 1) & (1 < step < self._head.num_layers), kind="stable")]

    def _build_batch(self, slots_B: Ints, step: int) -> ForwardBatch:
        """Return the rows of the head's ``step``-th own step.

        These are the last ``step`` computed positions of each request, on which a layer runs for the first time, or one
        token behind them, if the last layer continues.
        """
        last_B, num_layers = self._slots.num_computed_S[slots_B] - 1, self._head.num_layers
        if step >= num_layers:
            return self._make_batch(slots_B, last_B + step - num_layers + 1, np.ones_like(slots_B), NO_COPIES, step)
        starts_B = np.maximum(last_B - step + 1, 0)
        return self._make_batch(slots_B, starts_B, last_B - starts_B + 1, NO_COPIES, step)

    def _make_batch(
        self, slots_B: Ints, starts_B: Ints, counts_B: Ints, copies: tuple[Ints, Ints], step: int = 0
    ) -> ForwardBatch:
        slots = self._slots
        info = gather_sampling_info(slots_B, slots)
        max_pages = (int((starts_B + counts_B).max()) - 1) // self._page_size + 1
        return ForwardBatch(
            # The head knows the token it drafted last.
            tokens_T=np.full(int(counts_B.sum()), -1),
            starts_B=starts_B,
            counts_B=counts_B,
            req_slots_B=slots_B,
            num_decodes=int((counts_B == 1).sum()),
            block_table_BM=slots.block_table_SP[:, :max_pages][slots_B],
            # The position of a prompt's end depends on the token behind it, so a prefix is shared before that only.
            shared_B=np.zeros_like(slots_B),
            group_B=np.where(counts_B > 1, -1, np.arange(len(slots_B))),
            rows_D=np.cumsum(counts_B) - 1,
            req_slots_D=slots_B,
            sampling=info.build_sampling_batch(slots.length_S[slots_B] + step),
            page_copies=copies,
        )
