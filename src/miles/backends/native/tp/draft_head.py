"""The draft head of a tensor-parallel engine: MTP layers or an EAGLE-3 head that every rank has all of.

All ranks have the policy's hidden states, so all run the same steps of the head over a KV cache of their own. What the
head shares with the policy is sharded: embeddings are summed over the ranks, and logits gathered to rank 0, which
samples; the drafted tokens are broadcast.

Shapes: as in ``forward_batch``; V vocabulary of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from miles.backends.native.engine.forward_batch import ForwardBatch, SamplingBatch
from miles.backends.native.engine.request import Ints
from miles.backends.native.runner.draft_head import DraftHeadRunner, HeadLayersRunner
from miles.backends.native.tp.communicator import TpCommunicator
from miles.cluster.spmd import SpmdGroup


class TpDraftHeadRunner(DraftHeadRunner):
    """The head on one rank. All ranks make the same calls in the same order; rank 0's tokens count."""

    def __init__(self, layers: HeadLayersRunner, features: Callable[[], Tensor], comm: TpCommunicator) -> None:
        super().__init__(layers, features)
        self._comm = comm

    def _compute_logits(self, hidden_BD: Tensor, step: int = 0) -> Tensor:
        logits_BV = super()._compute_logits(hidden_BD, step)
        if self._draft.spec.draft_vocab_size is not None:
            return logits_BV  # a reduced vocabulary has a head of its own, which is not sharded
        shards = self._comm.gather(logits_BV)
        vocab_size = self._draft.spec.decoder.vocab_size
        # Tokens sampled from the zeros of the other ranks are replaced by rank 0's.
        return torch.cat(shards, 1)[:, :vocab_size] if shards else logits_BV.new_zeros((len(logits_BV), vocab_size))

    def _sample_tokens(self, logits_BV: Tensor, sampling: SamplingBatch) -> Tensor:
        return self._comm.broadcast(super()._sample_tokens(logits_BV, sampling))


class TpDraftHead:
    """The head of all ranks, seen from rank 0: implements ``head_draft.DraftHead``.

    A failure inside ``failing_all_ranks`` ends all of them.
    """

    def __init__(
        self, head: TpDraftHeadRunner, ranks: SpmdGroup, failing_all_ranks: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._head = head
        self._ranks = ranks
        self._failing_all_ranks = failing_all_ranks

    @property
    def num_layers(self) -> int:
        return self._head.num_layers

    def run_first(
        self, batch: ForwardBatch, feature_rows_T: Ints, next_tokens_T: Ints, last_rows_B: Ints, continues_B: Ints
    ) -> Tensor:
        return self._call(self._head.run_first, batch, feature_rows_T, next_tokens_T, last_rows_B, continues_B)

    def run_next(self, batch: ForwardBatch, step: int) -> Tensor:
        return self._call(self._head.run_next, batch, step)

    def find_top(self, slots_B: Ints, count: int) -> Tensor:
        return self._call(self._head.find_top, slots_B, count)

    def copy_pages(self, sources: Ints, targets: Ints) -> None:
        if len(sources):
            self._call(self._head.copy_pages, sources, targets)

    def fetch(self, tokens: Sequence[Tensor]) -> list[list[int]]:
        return self._head.fetch(tokens)

    def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        with self._ranks.lock:
            self._ranks.broadcast(f"draft_{method.__name__}", args)
            with self._failing_all_ranks():
                return method(*args)
