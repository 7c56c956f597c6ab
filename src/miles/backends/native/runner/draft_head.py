"""The draft head of an engine: MTP layers or an EAGLE-3 head with a paged KV cache of its own.

Shapes: as in ``forward_batch``; D hidden, F features of the policy, S request slots and one for padding rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from miles.backends.native.engine.forward_batch import ForwardBatch, SamplingBatch, compute_positions
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
        self.head_graphs = DraftHeadGraphs(
            self.head,
            cache=self._cache,
            inputs=self._gpu.build_step_inputs(self.last_tokens_S, self._num_pages),
            hidden_SD=self.hidden_SD,
            last_tokens_S=self.last_tokens_S,
            max_batch_size=self._num_slots,
            warmed_up=self._warmed_up,
        )


class DraftHeadRunner:
    """Runs the steps of a draft head on ``layers``, as CUDA graphs where there are any.

    ``features`` returns what the policy computed in the step launched last [T, F].
    """

    def __init__(self, layers: HeadLayersRunner, features: Callable[[], Tensor]) -> None:
        self._draft = layers.head
        self._layers = layers
        self._features = features

    @torch.inference_mode()
    def run_first(self, batch: ForwardBatch, feature_rows_T: Ints, next_tokens_T: Ints, last_rows_B: Ints) -> Tensor:
        layers, graphs = self._layers, self._layers.head_graphs
        rows_T, tokens_T, last_B, slots_B = layers.send(feature_rows_T, next_tokens_T, last_rows_B, batch.req_slots_B)
        features_TF = self._features().index_select(0, rows_T)
        if graphs is not None and len(next_tokens_T) <= graphs.max_batch_size:
            layers.copy_pages(*batch.page_copies)
            rows = split_into_rows(batch, next_tokens_T, len(layers.last_tokens_S) - 1)
            return graphs.replay(rows, 0, features_TF).index_select(0, last_B)
        hidden_TD = self._forward(batch, features_TF, tokens_T, 0)
        return self._sample(hidden_TD.index_select(0, last_B), slots_B, batch.sampling, 0)

    @torch.inference_mode()
    def run_next(self, batch: ForwardBatch, step: int) -> Tensor:
        layers = self._layers
        if layers.head_graphs is not None:
            return layers.head_graphs.replay(batch, step)
        (slots_B,) = layers.send(batch.req_slots_B)
        hidden_BD, tokens_B = layers.hidden_SD.index_select(0, slots_B), layers.last_tokens_S.index_select(0, slots_B)
        return self._sample(self._forward(batch, hidden_BD, tokens_B, step), slots_B, batch.sampling, step)

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
