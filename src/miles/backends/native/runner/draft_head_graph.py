"""CUDA graphs over the steps of a draft head, captured per padded batch size: a step is one replay.

What a step leaves for the next one lies by request slot at fixed addresses: the head's hidden state and the token it
drafted. So steps of fewer and fewer requests need no copies between them.

Shapes: R rows of the largest graph, n of one, S request slots and one for padding rows, D hidden, F features.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from miles.backends.native.engine.forward_batch import ForwardBatch, SamplingBatch, compute_positions
from miles.backends.native.engine.request import Ints
from miles.backends.native.runner.cuda_graph import CapturedGraph, capture_batch_sizes, capture_graph
from miles.backends.native.runner.step_inputs import StepInputs
from miles.kernels.attention.gpu_backend import TritonAttentionBackend
from miles.kernels.batch_invariant import sampling as batch_invariant_sampling
from miles.kernels.batch_invariant.paged_attention import BatchInvariantTritonBackend
from miles.kernels.runtime.kv_cache import PagedKVCache
from miles.kernels.sampling.sample import sample_tokens
from miles.models.draft.base import Draft


class HeadGraphKey(NamedTuple):
    """What a graph is captured for: rows, the head's step (0 reads features), whether rows have a top-k/top-p/min-p."""

    batch_size: int
    step: int
    has_filter: bool


class DraftHeadGraphs:
    """The CUDA graphs of one draft head. ``hidden_SD`` and ``last_tokens_S`` are shared with eager steps.

    ``warmed_up`` holds the keys that ran eagerly once; it outlives the graphs.
    """

    def __init__(
        self,
        draft: Draft,
        *,
        cache: PagedKVCache,
        inputs: StepInputs,
        hidden_SD: Tensor,
        last_tokens_S: Tensor,
        max_batch_size: int,
        warmed_up: set[HeadGraphKey],
    ) -> None:
        self.max_batch_size = max_batch_size
        self._draft = draft
        self._cache = cache
        self._inputs = inputs
        self._hidden_SD = hidden_SD
        self._last_tokens_S = last_tokens_S
        self._warmed_up = warmed_up
        self._batch_sizes = capture_batch_sizes(max_batch_size)
        device = hidden_SD.device
        self._features_RF = torch.zeros(max_batch_size, draft.spec.feature_size, dtype=hidden_SD.dtype, device=device)
        self._tokens_R = torch.zeros(max_batch_size, dtype=torch.int64, device=device)
        self._logprobs_R = torch.zeros(max_batch_size, dtype=torch.float32, device=device)
        self._graphs: dict[HeadGraphKey, CapturedGraph] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def replay(self, batch: ForwardBatch, step: int, features_nF: Tensor | None = None) -> Tensor:
        """Launch a step of one-token rows, capturing its graph on first use; return the drafted tokens.

        Step 0 reads ``features_nF``, later ones what the step before left for the rows' request slots.
        """
        count = len(batch.req_slots_B)
        batch_size = self._batch_sizes[bisect_left(self._batch_sizes, count)]
        key = HeadGraphKey(batch_size, self._get_kind(step), bool(batch.sampling.has_filter_D.any()))
        captured = self._graphs.get(key)
        if captured is None:
            captured = self._capture(key)
        self._inputs.send(batch, batch_size, reads_plans=captured.reads_plans)
        if features_nF is not None:
            self._features_RF[:count] = features_nF
        captured.graph.replay()
        return self._tokens_R[:count].clone()

    def capture_all(self) -> Iterator[tuple[int, int]]:
        """Capture every batch size and step, the largest first; yield the number done and the total."""
        num_layers = self._draft.spec.num_layers
        # Step 0 of several layers, and steps of layers on several positions, are not graphs (``draft_head``).
        steps = [
            step for step in range(self._get_kind(num_layers) + 1) if num_layers == 1 or step in (1, num_layers - 1)
        ]
        keys = [HeadGraphKey(size, step, False) for size in reversed(self._batch_sizes) for step in steps]
        for done, key in enumerate(keys):
            if key not in self._graphs:
                self._capture(key)
            yield done + 1, len(keys)

    def invalidate(self) -> None:
        """Drop all graphs, because the weights move to other addresses."""
        self._graphs.clear()
        self._pool = torch.cuda.graph_pool_handle()

    def _get_kind(self, step: int) -> int:
        """The first step that computes as ``step`` does."""
        return min(step, max(1, self._draft.spec.num_layers - 1))

    @torch.inference_mode()
    def _capture(self, key: HeadGraphKey) -> CapturedGraph:
        warm_up = key not in self._warmed_up
        captured = capture_graph(lambda: self._forward(key), self._inputs, key.batch_size, self._pool, warm_up=warm_up)
        self._warmed_up.add(key)
        self._graphs[key] = captured
        return captured

    def _forward(self, key: HeadGraphKey) -> None:
        """The computation of one graph: unpack inputs, run the head, sample, store what the next step reads."""
        n, columns = key.batch_size, self._inputs.columns
        draft = self._draft
        inputs, metadata = self._inputs.unpack(n, self._last_tokens_S, has_prefixes=False)
        invariant = draft.numerics.batch_invariant
        attention = (BatchInvariantTritonBackend if invariant else TritonAttentionBackend)(self._cache, metadata)
        features_nF = self._features_RF[:n] if key.step == 0 else self._hidden_SD.index_select(0, inputs.req_slots_n)
        hidden_nD = draft(features_nF, inputs.tokens_n, inputs.positions_n, attention, step=key.step)
        self._hidden_SD.index_copy_(0, inputs.req_slots_n, hidden_nD)
        sample_fn = batch_invariant_sampling.sample_tokens if invariant else sample_tokens
        tokens_n = self._tokens_R[:n]
        sample_fn(
            draft.logits(hidden_nD, step=key.step),
            columns["temperature"][:n],
            columns["uniform"][:n],
            top_k_B=columns["top_k"][:n],
            top_p_B=columns["top_p"][:n],
            min_p_B=columns["min_p"][:n],
            filters=key.has_filter,
            tokens_out_B=tokens_n,
            logprobs_out_B=self._logprobs_R[:n],
        )
        tokens_n.copy_(draft.token_ids(tokens_n))
        self._last_tokens_S.index_copy_(0, inputs.req_slots_n, tokens_n)


def split_into_rows(batch: ForwardBatch, tokens_T: Ints, padding_slot: int) -> ForwardBatch:
    """Return the tokens of a batch as one-token rows; all but the last of a sequence have the padding slot.

    Keys are written before attention reads them, so a row sees the tokens before it, as in a longer sequence.
    """
    counts_B, sampling = batch.counts_B, batch.sampling
    owner_T = np.arange(len(counts_B)).repeat(counts_B)
    slots_T = np.full(len(owner_T), padding_slot)
    slots_T[np.cumsum(counts_B) - 1] = batch.req_slots_B
    rows_T = np.arange(len(owner_T))
    return replace(
        batch,
        tokens_T=tokens_T,
        starts_B=compute_positions(batch),
        counts_B=np.ones_like(owner_T),
        req_slots_B=slots_T,
        num_decodes=len(owner_T),
        block_table_BM=batch.block_table_BM[owner_T],
        shared_B=np.zeros_like(owner_T),
        group_B=rows_T,
        rows_D=rows_T,
        req_slots_D=slots_T,
        sampling=SamplingBatch(
            temperature_D=sampling.temperature_D[owner_T],
            top_k_D=sampling.top_k_D[owner_T],
            top_p_D=sampling.top_p_D[owner_T],
            min_p_D=sampling.min_p_D[owner_T],
            has_filter_D=sampling.has_filter_D[owner_T],
            uniform_D=sampling.uniform_D[owner_T],
        ),
        decode_only=True,
    )
