"""The draft head of an engine: MTP layers or an EAGLE-3 head with a paged KV cache of its own.

Shapes: as in ``forward_batch``; D hidden, F features of the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from miles.backends.native.engine.forward_batch import ForwardBatch, SamplingBatch, compute_positions
from miles.backends.native.engine.request import Ints
from miles.backends.native.runner.model_runner import ModelRunner
from miles.models.draft.base import Draft


class DraftHeadRunner:
    """Runs ``draft`` with the cache and kernels of ``layers``, a runner of the draft's own layers.

    ``features`` returns what the policy computed in the step launched last [T, F].
    """

    def __init__(self, draft: Draft, layers: ModelRunner, features: Callable[[], Tensor]) -> None:
        self._draft = draft
        self._layers = layers
        self._features = features

    @torch.inference_mode()
    def run_first(self, batch: ForwardBatch, feature_rows_T: Ints, next_tokens_T: Ints, last_rows_B: Ints) -> Tensor:
        rows_T, tokens_T, last_B = self._layers.send(feature_rows_T, next_tokens_T, last_rows_B)
        features_TF = self._features().index_select(0, rows_T)
        hidden_TD = self._forward(batch, features_TF, tokens_T, 0)
        return hidden_TD.index_select(0, last_B)

    @torch.inference_mode()
    def run_next(self, batch: ForwardBatch, hidden_BD: Tensor, next_tokens_B: Tensor, step: int) -> Tensor:
        return self._forward(batch, hidden_BD, next_tokens_B, step)

    @torch.inference_mode()
    def sample(self, hidden_BD: Tensor, sampling: SamplingBatch, step: int) -> Tensor:
        tokens_B, _ = self._layers.sample(self._draft.logits(hidden_BD, step=step), sampling)
        return self._draft.token_ids(tokens_B)

    @torch.inference_mode()
    def find_top(self, hidden_BD: Tensor, count: int) -> Tensor:
        logits_BV = self._draft.logits(hidden_BD)
        top_Bk = logits_BV.topk(min(count, logits_BV.shape[1]), dim=-1).indices
        return self._draft.token_ids(top_Bk.flatten()).view(top_Bk.shape)

    def copy_pages(self, sources: Ints, targets: Ints) -> None:
        self._layers.copy_pages(sources, targets)

    def fetch(self, tokens: Sequence[Tensor]) -> list[list[int]]:
        return [step_B.tolist() for step_B in tokens]

    def _forward(self, batch: ForwardBatch, features_TF: Tensor, next_tokens_T: Tensor, step: int) -> Tensor:
        positions_T = compute_positions(batch)
        (device_positions_T,) = self._layers.send(positions_T)
        attention = self._layers.build_attention(batch, positions_T)
        return self._draft(features_TF, next_tokens_T, device_positions_T, attention, step=step)
