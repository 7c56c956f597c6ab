"""The draft head of an engine: MTP layers or an EAGLE-3 head with a paged KV cache of its own.

Shapes: as in ``forward_batch``; D hidden, F features of the policy, S request slots and one for padding rows, L layers
that run one behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from miles.backends.native.engine.forward_batch import NO_COPIES, ForwardBatch, SamplingBatch, compute_positions
from miles.backends.native.engine.request import Ints
from miles.backends.native.runner.draft_head_graph import DraftHeadGraphs, HeadGraphKey, split_into_rows
from miles.backends.native.runner.model_runner import ModelRunner
from miles.models.draft.base import Draft


class HeadLayersRunner(ModelRunner):
    """The KV cache and kernels of a draft head's layers, and on a GPU the CUDA graphs over its steps.

    ``hidden_SD`` is the head's last hidden state, and ``last_tokens_S`` the token it drafted, of each request slot.
    The weights of the head come with those of the policy.
    """

    def __init__(
        self, head: Draft, *, num_slots: int, device: torch.device, dtype: torch.dtype, **options: Any
    ) -> None:
        self.head = head
        self.head_graphs: DraftHeadGraphs | None = None
        self.hidden_SD = torch.zeros(num_slots + 1, head.spec.decoder.hidden_size, dtype=dtype, device=device)
        self._warmed_up: set[HeadGraphKey] = set()
        super().__init__(
            head.spec.decoder,
            num_slots=num_slots,
            device=device,
            dtype=dtype,
            return_routed_experts=False,
            numerics=head.numerics,
            **options,
        )

    def invalidate_graphs(self) -> None:
        """Drop the CUDA graphs, because the head's weights moved."""
        if self.head_graphs is not None:
            self.head_graphs.invalidate()

    def free(self) -> None:
        """Release the memory of the KV cache; its content is lost."""
        super().free()
        if self._vmm is None:
            self.head_graphs = None

    def warm_up(self, on_progress: Callable[[int, int], None]) -> None:
        """Capture all CUDA graphs; ``on_progress`` gets the number done and the total."""
        for done, total in () if self.head_graphs is None or self._cache is None else self.head_graphs.capture_all():
            on_progress(done, total)

    def _build_graphs(self) -> None:
        assert self._gpu is not None and self._cache is not None
        if not self._gpu.has_attention_kernels:
            return
        self.head_graphs = DraftHeadGraphs(
            self.head,
            cache=self._cache,
            inputs=self._gpu.build_step_inputs(self.last_tokens_S, self._num_pages),
            hidden_SD=self.hidden_SD,
            last_tokens_S=self.last_tokens_S,
            max_batch_size=self._num_slots,
            warmed_up=self._warmed_up,
        )


class LayerRows(NamedTuple):
    """The rows of one layer: a batch of the requests that have any, and of each row its request and position.

    ``first_B`` is the first row of each request of the whole batch.
    """

    batch: ForwardBatch
    owners_T: Ints
    positions_T: Ints
    first_B: Ints


def select_layer_rows(batch: ForwardBatch, starts_B: Ints, counts_B: Ints) -> LayerRows:
    """Return the rows at ``counts_B`` positions from ``starts_B`` on, those of requests with one row first."""
    order = np.argsort(counts_B > 1, kind="stable")
    order = order[counts_B[order] > 0]
    counts = counts_B[order]
    first_B = np.zeros_like(counts_B)
    first_B[order] = np.cumsum(counts) - counts
    owners_T = order.repeat(counts)
    rows = replace(
        batch,
        tokens_T=np.full(len(owners_T), -1),
        starts_B=starts_B[order],
        counts_B=counts,
        req_slots_B=batch.req_slots_B[order],
        num_decodes=int((counts == 1).sum()),
        block_table_BM=batch.block_table_BM[order],
        shared_B=np.zeros_like(order),
        group_B=np.where(counts > 1, -1, np.arange(len(order))),
        page_copies=NO_COPIES,
    )
    return LayerRows(rows, owners_T, starts_B[owners_T] + np.arange(len(owners_T)) - first_B[owners_T], first_B)


class DraftHeadRunner:
    """Runs the steps of a draft head on ``layers``, as CUDA graphs where there are any.

    ``features`` returns what the policy computed in the step launched last [T, F].
    """

    def __init__(self, layers: HeadLayersRunner, features: Callable[[], Tensor]) -> None:
        self._draft = layers.head
        self._layers = layers
        self._features = features
        slots, width = layers.hidden_SD.shape
        # Of every layer, the hidden state at the last position whose tokens are known.
        self._carried_SLD = layers.hidden_SD.new_zeros(slots, self.num_layers, width)
        # Within a draft: hidden states of the step before at the last L positions, and the tokens drafted so far.
        self._drafted_SLD = torch.zeros_like(self._carried_SLD)
        self._tokens_SL = layers.last_tokens_S.new_zeros(slots, self.num_layers)

    @property
    def num_layers(self) -> int:
        return self._draft.spec.num_layers

    @torch.inference_mode()
    def run_first(
        self, batch: ForwardBatch, feature_rows_T: Ints, next_tokens_T: Ints, last_rows_B: Ints, continues_B: Ints
    ) -> Tensor:
        layers, graphs = self._layers, self._layers.head_graphs
        rows_T, tokens_T, last_B, slots_B = layers.send(feature_rows_T, next_tokens_T, last_rows_B, batch.req_slots_B)
        features_TF = self._features().index_select(0, rows_T)
        # Graphs keep the hidden state of each request's last row alone, but other layers read all of them.
        if graphs is not None and self.num_layers == 1 and len(next_tokens_T) <= graphs.max_batch_size:
            layers.copy_pages(*batch.page_copies)
            rows = split_into_rows(batch, next_tokens_T, len(layers.last_tokens_S) - 1)
            return graphs.replay(rows, 0, features_TF).index_select(0, last_B)
        hidden_TD = self._forward(batch, features_TF, tokens_T, 0)
        if self.num_layers > 1:
            self._run_later_layers(batch, hidden_TD, tokens_T, continues_B)
        drafted_B = self._sample(hidden_TD.index_select(0, last_B), slots_B, batch.sampling, 0)
        self._keep_step(slots_B, 0)
        return drafted_B

    def _run_later_layers(self, batch: ForwardBatch, hidden_TD: Tensor, tokens_T: Tensor, continues_B: Ints) -> None:
        """Run the layers behind the first one on all positions whose tokens are known, for their keys.

        ``hidden_TD`` are the hidden states of the first layer. That in front of a request's rows is from the last call.
        """
        row_B = first_B = np.cumsum(batch.counts_B) - batch.counts_B
        starts_B, ends_B = batch.starts_B, batch.starts_B + batch.counts_B
        for layer in range(1, self.num_layers):
            own_B = np.where(continues_B > 0, np.maximum(batch.starts_B - layer, 0), batch.starts_B)
            rows = select_layer_rows(batch, own_B, np.maximum(ends_B - layer - own_B, 0))
            counts_B = np.maximum(ends_B - layer + 1 - starts_B, 0)  # of the layer before
            carried_BD = self._swap_carried(layer - 1, batch.req_slots_B, hidden_TD, row_B, counts_B)
            owners_T, positions_T = rows.owners_T, rows.positions_T
            if not len(owners_T):
                return
            source_T = len(carried_BD) + (row_B - starts_B)[owners_T] + positions_T
            source_T = np.where(positions_T < starts_B[owners_T], owners_T, source_T)
            token_T = (first_B - batch.starts_B + layer)[owners_T] + positions_T
            device_source_T, device_token_T = self._layers.send(source_T, token_T)
            features_TD = torch.cat((carried_BD, hidden_TD)).index_select(0, device_source_T)
            hidden_TD = self._forward(rows.batch, features_TD, tokens_T.index_select(0, device_token_T), layer)
            row_B, starts_B = rows.first_B, own_B

    def _swap_carried(self, layer: int, slots_B: Ints, hidden_TD: Tensor, row_B: Ints, counts_B: Ints) -> Tensor:
        """Return a layer's last hidden states of the call before, and keep those of this call, whose rows are given."""
        ran = (counts_B > 0).nonzero()[0]
        all_B, ran_B, last_B = self._layers.send(slots_B, slots_B[ran], (row_B + counts_B - 1)[ran])
        carried_BD = self._carried_SLD[:, layer].index_select(0, all_B)
        self._carried_SLD[:, layer].index_copy_(0, ran_B, hidden_TD.index_select(0, last_B))
        return carried_BD

    @torch.inference_mode()
    def run_next(self, batch: ForwardBatch, step: int) -> Tensor:
        layers = self._layers
        if 1 < step < self.num_layers:
            return self._run_last_positions(batch, step)
        (slots_B,) = layers.send(batch.req_slots_B)
        if layers.head_graphs is not None:
            drafted_B = layers.head_graphs.replay(batch, step)
        else:
            hidden_BD = layers.hidden_SD.index_select(0, slots_B)
            tokens_B = layers.last_tokens_S.index_select(0, slots_B)
            hidden_BD = self._forward(batch, hidden_BD, tokens_B, step)
            drafted_B = self._sample(hidden_BD, slots_B, batch.sampling, step)
        self._keep_step(slots_B, step)
        return drafted_B

    def _run_last_positions(self, batch: ForwardBatch, step: int) -> Tensor:
        """Run layer ``step`` for the first time on the last ``step`` positions of each request, with drafted tokens."""
        layers, num_layers = self._layers, self.num_layers
        owner_T = np.arange(len(batch.counts_B)).repeat(batch.counts_B)
        ends_B = np.cumsum(batch.counts_B)
        column_T = step + np.arange(len(owner_T)) - ends_B[owner_T]  # of the drafted tokens
        base_T = batch.req_slots_B[owner_T] * num_layers
        place_T, token_T, last_B, slots_B = layers.send(
            base_T + num_layers - step + column_T, base_T + column_T, ends_B - 1, batch.req_slots_B
        )
        carried_BD = self._carried_SLD[:, step - 1].index_select(0, slots_B)
        self._drafted_SLD[:, num_layers - step].index_copy_(0, slots_B, carried_BD)
        rows_XD = self._drafted_SLD.flatten(0, 1)
        tokens_T = self._tokens_SL.flatten().index_select(0, token_T)
        hidden_TD = self._forward(batch, rows_XD.index_select(0, place_T), tokens_T, step)
        rows_XD.index_copy_(0, place_T, hidden_TD)
        drafted_B = self._sample(hidden_TD.index_select(0, last_B), slots_B, batch.sampling, step)
        self._keep_step(slots_B, step)
        return drafted_B

    def _keep_step(self, slots_B: Tensor, step: int) -> None:
        """Keep what later layers read of a step: its last hidden state, and the token it drafted."""
        if step + 1 < self.num_layers:
            self._drafted_SLD[:, -1].index_copy_(0, slots_B, self._layers.hidden_SD.index_select(0, slots_B))
            self._tokens_SL[:, step].index_copy_(0, slots_B, self._layers.last_tokens_S.index_select(0, slots_B))

    @torch.inference_mode()
    def find_top(self, slots_B: Ints, count: int) -> Tensor:
        (device_slots_B,) = self._layers.send(slots_B)
        logits_BV = self._compute_logits(self._layers.hidden_SD.index_select(0, device_slots_B))
        top_Bk = logits_BV.topk(min(count, logits_BV.shape[1]), dim=-1).indices
        return self._draft.token_ids(top_Bk.flatten()).view(top_Bk.shape)

    def copy_pages(self, sources: Ints, targets: Ints) -> None:
        self._layers.copy_pages(sources, targets)

    def fetch(self, tokens: Sequence[Tensor]) -> list[list[int]]:
        # One copy, and one wait, for all steps.
        flat = iter(torch.cat(list(tokens)).tolist())
        return [[next(flat) for _ in range(len(step_B))] for step_B in tokens]

    def _forward(self, batch: ForwardBatch, features_TF: Tensor, next_tokens_T: Tensor, step: int) -> Tensor:
        positions_T = compute_positions(batch)
        (device_positions_T,) = self._layers.send(positions_T)
        attention = self._layers.build_attention(batch, positions_T)
        return self._draft(features_TF, next_tokens_T, device_positions_T, attention, step=step)

    def _sample(self, hidden_BD: Tensor, slots_B: Tensor, sampling: SamplingBatch, step: int) -> Tensor:
        """Sample a token of each row, and keep what the next step reads."""
        self._layers.hidden_SD.index_copy_(0, slots_B, hidden_BD)
        tokens_B = self._sample_tokens(self._compute_logits(hidden_BD, step), sampling)
        self._layers.last_tokens_S.index_copy_(0, slots_B, tokens_B)
        return tokens_B

    def _sample_tokens(self, logits_BV: Tensor, sampling: SamplingBatch) -> Tensor:
        """Sample tokens of the policy's vocabulary."""
        tokens_B, _ = self._layers.sample(logits_BV, sampling)
        return self._draft.token_ids(tokens_B)

    def _compute_logits(self, hidden_BD: Tensor, step: int = 0) -> Tensor:
        return self._draft.logits(hidden_BD, step=step)
