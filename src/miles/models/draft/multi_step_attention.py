"""Multi-step attention in draft training ("training-time test" of EAGLE-3): every position drafts several tokens.

When a draft runs, step j of the token at position p attends to the keys of step 0 up to p, which come from the policy's
features, and to its own keys of steps 1 to j. Here all positions of packed sequences do that at once: a causal part
over the keys of step 0, and one key of its own for each later step.

Shapes: T tokens, B sequences, C queries of a piece and K keys of each, H query heads, G key-value heads, q = H / G,
d channels of a key, e of a value, J later steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from miles.core.errors import UsageError
from miles.models.layers.attention_backend import AttentionBackend, AttentionInputs, AttentionParams, RecurrentState

# Scores of all heads at a time; backward computes them again.
_CHUNK_SCORES = 1 << 26


class _Piece(NamedTuple):
    """Packed rows of queries and keys of some sequences; queries start at row ``first`` of theirs.

    Shorter sequences repeat their last row, which no query before it sees.
    """

    query_BC: Tensor
    key_BK: Tensor
    first: int


class MultiStepAttention:
    """An AttentionBackend for the steps of a draft on packed sequences of ``lengths``.

    The first call of a layer is ordinary causal attention by ``backend``; further calls are further steps.
    """

    latent = False

    def __init__(self, backend: AttentionBackend, lengths: Sequence[int]) -> None:
        self._backend = backend
        self._lengths = np.asarray(lengths, np.int64)
        self._steps: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._pieces: dict[int, tuple[list[_Piece], Tensor]] = {}

    def __call__(self, layer: int, inputs: AttentionInputs, /) -> Tensor:
        steps = self._steps.setdefault(layer, [])
        steps.append((inputs.k_TGd, inputs.v_TGe))
        if len(steps) == 1:
            return self._backend(layer, inputs)
        if inputs.indexer is not None or inputs.params.chunk is not None:
            raise UsageError(
                "a draft with sparse or chunked attention is trained one step deep: --draft-train-steps 1."
            )
        (past_k_TGd, past_v_TGe), q_THd = steps[0], inputs.q_THd
        own_k_TJGd = torch.stack([k for k, _ in steps[1:]], 1)
        own_v_TJGe = torch.stack([v for _, v in steps[1:]], 1)
        if not len(q_THd):
            return q_THd.new_empty((0, q_THd.shape[1], own_v_TJGe.shape[-1]))
        pieces, place_T = self._find_pieces(q_THd.shape[1], q_THd.device)
        args = (q_THd, past_k_TGd, past_v_TGe, own_k_TJGd, own_v_TJGe, inputs.sinks_H, inputs.params)
        out = [checkpoint(self._attend_rows, piece, *args, use_reentrant=False).flatten(0, 1) for piece in pieces]
        return torch.cat(out).index_select(0, place_T)

    @classmethod
    def _attend_rows(
        cls,
        piece: _Piece,
        q_THd: Tensor,
        k_TGd: Tensor,
        v_TGe: Tensor,
        own_k_TJGd: Tensor,
        own_v_TJGe: Tensor,
        sinks_H: Tensor | None,
        params: AttentionParams,
    ) -> Tensor:
        query_BC, key_BK, first = piece
        past, own = (k_TGd[key_BK], v_TGe[key_BK]), (own_k_TJGd[query_BC], own_v_TJGe[query_BC])
        return cls._attend(q_THd[query_BC], *past, *own, sinks_H, first, params)

    def _find_pieces(self, heads: int, device: torch.device) -> tuple[list[_Piece], Tensor]:
        """Return what is computed at once, and the row of each token in all results one after the other."""
        if heads not in self._pieces:
            rows = list(self._iter_rows(heads))
            pieces = [
                _Piece(torch.from_numpy(query).to(device), torch.from_numpy(key).to(device), first)
                for query, key, first in rows
            ]
            computed = np.concatenate([query.ravel() for query, _, _ in rows])
            place = np.empty(self._lengths.sum(), np.int64)
            place[computed[::-1]] = np.arange(len(computed))[::-1]  # of a repeated row, the first
            self._pieces[heads] = pieces, torch.from_numpy(place).to(device)
        return self._pieces[heads]

    def _iter_rows(self, heads: int) -> Iterator[tuple[np.ndarray, np.ndarray, int]]:
        """Yield rows of queries and keys: sequences of like length together, the longest in parts."""
        starts = self._lengths.cumsum() - self._lengths
        waiting = [int(i) for i in np.argsort(-self._lengths, kind="stable") if self._lengths[i]]
        while waiting:
            longest = int(self._lengths[waiting[0]])
            room = max(1, _CHUNK_SCORES // (longest * longest * heads))
            like = [i for i in waiting[:room] if 2 * self._lengths[i] >= longest]
            waiting = waiting[len(like) :]
            within = np.minimum(np.arange(longest), self._lengths[like, None] - 1)
            rows_BK = starts[like, None] + within
            size = longest if len(like) > 1 else max(1, _CHUNK_SCORES // (longest * heads))
            for first in range(0, longest, size):
                last = min(first + size, longest)
                yield rows_BK[:, first:last].copy(), rows_BK[:, :last].copy(), first

    def recurrent_state(self, layer: int) -> RecurrentState:
        raise AssertionError("a draft has no recurrent layers")

    @staticmethod
    def _attend(
        q_BCHd: Tensor,
        k_BKGd: Tensor,
        v_BKGe: Tensor,
        own_k_BCJGd: Tensor,
        own_v_BCJGe: Tensor,
        sinks_H: Tensor | None,
        first: int,
        params: AttentionParams,
    ) -> Tensor:
        """Attend from the queries at rows ``first`` on, with statistics in float32."""
        wide = torch.promote_types(q_BCHd.dtype, torch.float32)
        queries, keys = q_BCHd.shape[1], k_BKGd.shape[1]
        steps, groups = own_k_BCJGd.shape[2:4]
        q_BCGqd = q_BCHd.to(wide).unflatten(2, (groups, -1)) * params.scale
        past_BCGqK = torch.einsum("bcgqd,bkgd->bcgqk", q_BCGqd, k_BKGd.to(wide))
        own_BCGqJ = torch.einsum("bcgqd,bcjgd->bcgqj", q_BCGqd, own_k_BCJGd.to(wide))
        scores = torch.cat((past_BCGqK, own_BCGqJ), -1)
        if params.softcap is not None:
            scores = (scores / params.softcap).tanh() * params.softcap
        row_C1 = torch.arange(first, first + queries, device=q_BCHd.device).unsqueeze(1)
        key_K = torch.arange(keys, device=q_BCHd.device)
        hidden_CK = key_K > row_C1
        if params.window is not None:
            hidden_CK = hidden_CK | (row_C1 + steps - key_K >= params.window)
        mask = torch.cat((hidden_CK, hidden_CK.new_zeros(queries, steps)), 1)
        scores = scores.masked_fill(mask[:, None, None], float("-inf"))
        if sinks_H is not None:
            sinks = sinks_H.to(wide).view(groups, -1, 1).expand(*scores.shape[:2], -1, -1, 1)
            scores = torch.cat((scores, sinks), -1)
        weights = scores.softmax(-1)
        past_BCGqe = torch.einsum("bcgqk,bkge->bcgqe", weights[..., :keys], v_BKGe.to(wide))
        own = weights[..., keys : keys + steps]
        out_BCGqe = past_BCGqe + torch.einsum("bcgqj,bcjge->bcgqe", own, own_v_BCJGe.to(wide))
        return out_BCGqe.flatten(2, 3).to(q_BCHd.dtype)
