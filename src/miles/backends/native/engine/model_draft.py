"""Drafts of a smaller model with the same tokenizer, run by a model runner of its own.

The draft model's KV cache has the pages of the policy's: the same block table, prefix sharing and preemption serve
both. What the policy computes, the draft model computes too (``prepare``), as long as drafts may follow; where it has
not, drafts are worse, and no less lossless. A draft samples with the request's own seed and parameters, so that it is
the policy's sample wherever both models agree. The draft model sees no images, and no tokens beyond its vocabulary.

Shapes: as in ``forward_batch``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from torch import Tensor

from miles.backends.native.engine.forward_batch import (
    NO_COPIES,
    ForwardBatch,
    InflightStep,
    build_decode_rows,
    copies_as_arrays,
)
from miles.backends.native.engine.ngram_draft import MIN_MATCH, DraftedTokens
from miles.backends.native.engine.req import Req
from miles.backends.native.engine.req_slots import ReqSlots
from miles.backends.native.engine.request import Ints
from miles.backends.native.engine.step_cost import StepCost


class DraftRunner(Protocol):
    """The model runner of a draft model."""

    last_tokens_S: Tensor

    def launch(self, batch: ForwardBatch) -> InflightStep: ...


class ModelDrafter:
    """Drafts of a model that ``runner`` runs; ``last_tokens_S`` are the tokens the policy sampled last.

    ``vocab_size`` is the number of tokens that both models have. ``due_copies`` returns the page copies (target ->
    source) of the step that is being scheduled.
    """

    num_buckets = 1

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
    ) -> None:
        self._runner = runner
        self._slots = slots
        self._last_tokens_S = last_tokens_S
        self._due_copies = due_copies
        self._cost = cost
        self._page_size = page_size
        self._vocab_size = vocab_size

    def draft(self, reqs: Sequence[Req], lengths: Sequence[int]) -> list[DraftedTokens | None]:
        """Sample ``lengths`` tokens behind each request, one step for each token, and wait for the last."""
        drafts: list[list[int]] = [[] for _ in reqs]
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
            for row, token in zip(rows, inflight.result().tokens_D.tolist(), strict=True):
                if len(drafts[row]) < lengths[row]:
                    drafts[row].append(token)
        return [DraftedTokens(self._cut(tokens), MIN_MATCH) for tokens in drafts]

    def prepare(self, batch: ForwardBatch, *, drafted: bool, needed: bool) -> None:
        """Store the keys of a step's tokens; drafting has stored those of a step that is only drafts."""
        if not needed or (drafted and len(batch.counts_B) == batch.num_decodes):
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
                # Drafting has copied the pages that this step copies, and written behind what was copied.
                page_copies=NO_COPIES if drafted else batch.page_copies,
            )
        )

    def observe(self, req: Req) -> None:
        """Do nothing: the model does not learn."""

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
            page_copies=copies_as_arrays(self._due_copies()) if step == 0 else NO_COPIES,
            decode_only=True,
        )
        return batch, order
