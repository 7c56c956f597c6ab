"""Compressed attention: a token attends to a sliding window, and to one key for each complete window of a compressor.

Keys are values too, and all query heads share them. A token sees the keys of the windows that are complete at its
position, or those of them that an indexer selects.

Shapes: S tokens of a sequence, W windows of r tokens in it, H query heads (h of an indexer), d channels of a key, i of
an indexer's key, k windows selected for each query; in a slice Q queries with K tokens they may see, M = K + W, R = H *
Q. For windows of several sequences: T tokens, M windows, L tokens that one reads (r, or 2r with those of the window
before), x channels of a token's state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.attention.eager import as_operand, matmul_wide, max_scores_at_once
from miles.kernels.attention.params import AttentionInputs
from miles.kernels.attention.topk_positions import select_topk
from miles.kernels.batch_invariant.elementwise import softmax as invariant_softmax
from miles.kernels.batch_invariant.elementwise import tree_sum
from miles.kernels.numerics import FAST, Numerics

_MIN_QUERIES = 128

Compress = Callable[[Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""Computes keys [M, d] and an indexer's keys [M, i] of windows from states [M, L, x] and the windows' numbers [M]."""


class WindowIndexerInputs(NamedTuple):
    """An indexer of windows: a token attends to the ``topk`` windows with the largest sum of ``weights * relu(q . k)``.

    No gradient flows through the selection. ``weights_Th`` include the scales.
    """

    q_Thi: Tensor
    weights_Th: Tensor
    topk: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorInputs:
    """What tokens add to the keys of windows of ``rate`` tokens (``states_Tx``), and how those are computed.

    With ``overlap`` a window reads the tokens of the window before it too. A state is needed until its window is
    complete, except by a window that overlaps it. A paged cache then writes the keys of a window into the state of its
    last token, at channels ``key_start`` and ``index_start``, which no other window reads.
    """

    states_Tx: Tensor
    rate: int
    overlap: bool
    compress: Compress
    key_start: int
    index_start: int = 0
    indexer: WindowIndexerInputs | None = None

    @property
    def reach(self) -> int:
        """How many tokens a window reads."""
        return 2 * self.rate if self.overlap else self.rate


@runtime_checkable
class CompressedAttentionBackend(Protocol):
    """An attention backend that supports compressed attention."""

    def attend_compressed(self, layer: int, inputs: AttentionInputs, compressor: CompressorInputs) -> Tensor:
        """Attend to a window and to compressed keys, [T, H, d]."""
        ...


# -- windows and their keys -----------------------------------------------------------------


class WindowTokens(NamedTuple):
    """Windows of several sequences: the tokens that each reads [M, L] (before a sequence's first token: that one), its
    number in the sequence, and how many there are of each sequence.
    """

    tokens_ML: Tensor
    numbers_M: Tensor
    counts: list[int]


def list_windows(
    firsts_B: NDArray[np.integer], stops_B: NDArray[np.integer], rate: int, reach: int
) -> tuple[NDArray[np.integer], NDArray[np.integer], NDArray[np.integer]]:
    """Return owner and number of the windows that sequences complete at positions ``firsts_B`` to ``stops_B``, and the
    positions that each reads, [M, L].
    """
    counts_B = stops_B // rate - firsts_B // rate
    owners_M = np.repeat(np.arange(len(counts_B)), counts_B)
    starts_B = np.cumsum(counts_B) - counts_B
    numbers_M = np.arange(len(owners_M)) - (starts_B - firsts_B // rate)[owners_M]
    positions_ML = numbers_M[:, None] * rate + np.arange(rate - reach, rate)
    return owners_M, numbers_M, np.maximum(positions_ML, 0)


def pack_windows(lengths: list[int], rate: int, reach: int, device: torch.device) -> WindowTokens:
    """Return the windows of packed sequences of these lengths."""
    stops = np.asarray(lengths)
    starts = np.cumsum(stops) - stops
    owners_M, numbers_M, positions_ML = list_windows(np.zeros_like(stops), stops, rate, reach)
    tokens_ML = torch.from_numpy(positions_ML + starts[owners_M][:, None]).to(device)
    return WindowTokens(tokens_ML, torch.from_numpy(numbers_M).to(device), (stops // rate).tolist())


def pool_windows(
    states_MLx: Tensor, numbers_M: Tensor, bias_rc: Tensor, overlap: bool, numerics: Numerics = FAST
) -> Tensor:
    """Return the weighted mean of each window's values, [M, d], by a softmax of their gates.

    States are c values and c gates. With ``overlap``, c = 2d: the first d of the values and gates are for the next
    window, the others for the token's own. The first window of a sequence has none before it.
    """
    rate, channels = bias_rc.shape
    values_MLc, gates_MLc = states_MLx.split(channels, -1)
    wide = torch.promote_types(gates_MLc.dtype, torch.float32)
    if overlap:
        width = channels // 2
        parts = ((slice(None, rate), slice(None, width)), (slice(rate, None), slice(width, None)))
        values = torch.cat([values_MLc[:, tokens, own] for tokens, own in parts], 1)
        gates = torch.cat([gates_MLc[:, tokens, own].to(wide) + bias_rc[:, own].to(wide) for tokens, own in parts], 1)
        before_L = torch.arange(2 * rate, device=gates.device) < rate
        gates = gates.masked_fill(((numbers_M == 0)[:, None] & before_L).unsqueeze(-1), -math.inf)
    else:
        values, gates = values_MLc, gates_MLc.to(wide) + bias_rc.to(wide)
    if numerics.batch_invariant:
        weights_MdL = invariant_softmax(gates.transpose(1, 2))
        return tree_sum(weights_MdL * values.transpose(1, 2).to(wide)).squeeze(-1).to(values.dtype)
    return (gates.softmax(1).to(values.dtype) * values).sum(1)


@torch.no_grad()
def score_windows(q_NQhi: Tensor, keys_NWi: Tensor, weights_NQh: Tensor, max_scores: int) -> Tensor:
    """Return the indexer's scores of all windows, [N, Q, W], some heads at a time."""
    wide = torch.promote_types(q_NQhi.dtype, torch.float32)
    keys_N1iW = keys_NWi.to(wide).transpose(1, 2).unsqueeze(1)
    scores_NQW = q_NQhi.new_zeros(*q_NQhi.shape[:2], keys_NWi.shape[1], dtype=wide)
    step = max(1, max_scores // max(1, scores_NQW.numel()))
    for q, weights in zip(q_NQhi.split(step, 2), weights_NQh.split(step, 2), strict=True):
        scores_NQW = scores_NQW + (weights.to(wide).unsqueeze(-2) @ (q.to(wide) @ keys_N1iW).relu_()).squeeze(-2)
    return scores_NQW


@torch.no_grad()
def select_windows(index: WindowIndexerInputs, keys_Wi: Tensor, rate: int, *, past: int = 0) -> Tensor:
    """Numbers of the windows that each token of a sequence attends to, [S, k]; some may not be complete yet.

    The first token has the position ``past``. Of equal scores the first window is selected.
    """
    length, windows = len(index.q_Thi), len(keys_Wi)
    most = max_scores_at_once(keys_Wi)
    numbers_W = torch.arange(windows, device=keys_Wi.device)
    parts: list[Tensor] = []
    step = max(1, most // (index.q_Thi.shape[1] * windows))
    for lo in range(0, length, step):
        q_1Qhi, weights_1Qh = index.q_Thi[None, lo : lo + step], index.weights_Th[None, lo : lo + step]
        scores_QW = score_windows(q_1Qhi, keys_Wi[None], weights_1Qh, most)[0]
        complete_Q = torch.arange(past + lo + 1, past + lo + len(scores_QW) + 1, device=keys_Wi.device) // rate
        scores_QW = scores_QW.masked_fill(numbers_W >= complete_Q[:, None], -math.inf)
        parts.append(select_topk(scores_QW, index.topk).to(torch.int32))
    return torch.cat(parts)


# -- attention of one sequence --------------------------------------------------------------


def compressed_attention(
    q_SHd: Tensor,
    k_Sd: Tensor,
    compressed_Wd: Tensor,
    *,
    scale: float,
    window: int,
    rate: int,
    sinks_H: Tensor | None = None,
    selected_Sk: Tensor | None = None,
) -> Tensor:
    """Attention of one sequence to its last ``window`` tokens and to compressed keys, [S, H, d].

    If there are more keys than queries, the queries are those of the last tokens. ``selected_Sk`` are the numbers of
    the windows that each token sees of those that are complete; None: all of them. Scores are computed slice by slice
    in float32 or wider, and recomputed in backward.
    """
    settings = _Settings(scale, window, rate, len(k_Sd) - len(q_SHd))
    return _CompressedAttention.apply(q_SHd, k_Sd, compressed_Wd, sinks_H, selected_Sk, settings)  # pyright: ignore[reportReturnType]


class _Settings(NamedTuple):
    scale: float
    window: int
    rate: int
    past: int


@dataclass(frozen=True, slots=True)
class _Slice:
    """Queries ``rows`` at positions ``lo`` to ``hi``, the keys of tokens from ``first`` on, and those of the first
    ``windows``.
    """

    rows: slice
    lo: int
    hi: int
    first: int
    windows: int

    def build_mask(self, settings: _Settings, selected_Sk: Tensor | None, device: torch.device) -> Tensor:
        """Which keys each query must not see, [Q, M]."""
        queries_Q1 = torch.arange(self.lo, self.hi, device=device)[:, None]
        tokens_K = torch.arange(self.first, self.hi, device=device)
        hidden_QK = (tokens_K > queries_Q1) | (tokens_K <= queries_Q1 - settings.window)
        complete_Q1 = (queries_Q1 + 1) // settings.rate
        numbers_W = torch.arange(self.windows, device=device)
        hidden_QW = numbers_W >= complete_Q1
        if selected_Sk is not None:
            # Those behind the slice's windows are complete for none of its queries.
            chosen_Qk = selected_Sk[self.rows].long().clamp(max=self.windows)
            unselected = torch.ones(self.hi - self.lo, self.windows + 1, device=device, dtype=torch.bool)
            hidden_QW = hidden_QW | unselected.scatter_(1, chosen_Qk, False)[:, : self.windows]
        return torch.cat((hidden_QK, hidden_QW), 1)

    def keys(self, k_Sd: Tensor, compressed_Wd: Tensor) -> Tensor:
        """[M, d]"""
        return torch.cat((k_Sd[self.first : self.hi], compressed_Wd[: self.windows]))


def _iter_slices(q_SHd: Tensor, settings: _Settings) -> Iterator[_Slice]:
    length, heads, _ = q_SHd.shape
    width = min(length, max(settings.window, _MIN_QUERIES))
    visible = width + settings.window + (settings.past + length) // settings.rate
    width = max(1, min(width, max_scores_at_once(q_SHd) // (heads * visible)))
    for start in range(0, length, width):
        rows = slice(start, min(start + width, length))
        lo, hi = settings.past + rows.start, settings.past + rows.stop
        yield _Slice(rows, lo, hi, max(0, lo - settings.window + 1), hi // settings.rate)


class _CompressedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_SHd: Tensor,
        k_Sd: Tensor,
        compressed_Wd: Tensor,
        sinks_H: Tensor | None,
        selected_Sk: Tensor | None,
        settings: _Settings,
    ) -> Tensor:
        wide = torch.promote_types(q_SHd.dtype, torch.float32)
        out_SHd = torch.empty_like(q_SHd, memory_format=torch.contiguous_format)
        lse_HS = q_SHd.new_empty(q_SHd.shape[1], len(q_SHd), dtype=wide)
        for part in _iter_slices(q_SHd, settings):
            keys_Md = as_operand(part.keys(k_Sd, compressed_Wd), wide)
            scores_HQM = _score(part, q_SHd, keys_Md, selected_Sk, settings, wide)
            lse_HQ = scores_HQM.logsumexp(-1)
            if sinks_H is not None:
                lse_HQ = torch.logaddexp(lse_HQ, sinks_H.to(wide)[:, None])
            lse_HS[:, part.rows] = lse_HQ
            probs_1RM = scores_HQM.sub_(lse_HQ.unsqueeze(-1)).exp_().flatten(0, 1)[None]
            out_RD = matmul_wide(probs_1RM.to(keys_Md.dtype), keys_Md[None], wide)[0]
            out_SHd[part.rows] = out_RD.unflatten(0, scores_HQM.shape[:2]).transpose(0, 1)
        ctx.save_for_backward(q_SHd, k_Sd, compressed_Wd, sinks_H, selected_Sk, out_SHd, lse_HS)
        ctx.settings, ctx.wide = settings, wide
        return out_SHd

    @staticmethod
    def backward(ctx: Any, grad_SHd: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q_SHd, k_Sd, compressed_Wd, sinks_H, selected_Sk, out_SHd, lse_HS = ctx.saved_tensors
        wide, settings = ctx.wide, ctx.settings
        # The sum of gradient times output of each query (delta).
        delta_HS = (grad_SHd.to(wide) * out_SHd).sum(-1).T
        dq_SHd = torch.empty_like(q_SHd, memory_format=torch.contiguous_format)
        dk_Sd, dcompressed_Wd = (torch.zeros_like(x, dtype=wide) for x in (k_Sd, compressed_Wd))
        for part in _iter_slices(q_SHd, settings):
            keys_Md = as_operand(part.keys(k_Sd, compressed_Wd), wide)
            scores_HQM = _score(part, q_SHd, keys_Md, selected_Sk, settings, wide)
            rows = part.rows
            probs_HQM = scores_HQM.sub_(lse_HS[:, rows, None]).exp_()
            q_1Rd, grad_1Rd = (as_operand(x[rows], wide).transpose(0, 1).flatten(0, 1)[None] for x in (q_SHd, grad_SHd))
            dkeys_Md = matmul_wide(probs_HQM.flatten(0, 1).to(grad_1Rd.dtype).T[None], grad_1Rd, wide)[0]
            d_HQM = matmul_wide(grad_1Rd, keys_Md.T[None], wide)[0].view_as(probs_HQM)
            d_HQM.sub_(delta_HS[:, rows, None]).mul_(probs_HQM).mul_(settings.scale)
            d_1RM = d_HQM.flatten(0, 1).to(q_1Rd.dtype)[None]
            dq_RD = matmul_wide(d_1RM, keys_Md[None], wide)[0]
            dq_SHd[rows] = dq_RD.unflatten(0, probs_HQM.shape[:2]).transpose(0, 1)
            dkeys_Md += matmul_wide(d_1RM.transpose(1, 2), q_1Rd, wide)[0]
            dk_Sd[part.first : part.hi] += dkeys_Md[: part.hi - part.first]
            dcompressed_Wd[: part.windows] += dkeys_Md[part.hi - part.first :]
        dsinks_H = None
        if sinks_H is not None:
            dsinks_H = (torch.exp(sinks_H.to(wide)[:, None] - lse_HS) * delta_HS).sum(1).neg_().to(sinks_H.dtype)
        return dq_SHd, dk_Sd.to(k_Sd.dtype), dcompressed_Wd.to(compressed_Wd.dtype), dsinks_H, None, None


def _score(
    part: _Slice, q_SHd: Tensor, keys_Md: Tensor, selected_Sk: Tensor | None, settings: _Settings, wide: torch.dtype
) -> Tensor:
    """Scores of a slice, [H, Q, M], with minus infinity where masked."""
    q_HQd = as_operand(q_SHd[part.rows], wide).transpose(0, 1)
    scores_HQM = matmul_wide(q_HQd.flatten(0, 1)[None], keys_Md.T[None], wide)[0].view(*q_HQd.shape[:2], -1)
    hidden_QM = part.build_mask(settings, selected_Sk, q_SHd.device)
    return scores_HQM.mul_(settings.scale).masked_fill_(hidden_QM, -math.inf)


def attend_with_lse(q_NHQd: Tensor, keys_NMd: Tensor, mask_NQM: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of rows to keys that are values too, in float32, and its log-sum-exps [N, H, Q]; zeros where a query
    sees nothing.
    """
    heads = q_NHQd.shape[1]
    scores_NHQM = (q_NHQd.flatten(1, 2) @ keys_NMd.transpose(1, 2)).unflatten(1, (heads, -1)).mul_(scale)
    scores_NHQM.add_(mask_NQM.unsqueeze(1))
    lse_NHQ = scores_NHQM.logsumexp(-1)
    finite_NHQ = lse_NHQ.masked_fill(lse_NHQ == -math.inf, 0.0)
    probs_NHQM = scores_NHQM.sub_(finite_NHQ.unsqueeze(-1)).exp_()
    return (probs_NHQM.flatten(1, 2) @ keys_NMd).unflatten(1, (heads, -1)), lse_NHQ


def merge_attention(parts: list[tuple[Tensor, Tensor]], sinks_H: Tensor | None) -> Tensor:
    """Merge attention to several sets of keys, each [T, H, d] with log-sum-exps [T, H]."""
    lses = [lse_TH for _, lse_TH in parts]
    if sinks_H is not None:
        lses.append(sinks_H.to(lses[0].dtype).expand_as(lses[0]))
    total_TH = torch.stack(lses).logsumexp(0)
    weighted = [out_THd * (lse_TH - total_TH).exp().unsqueeze(-1) for out_THd, lse_TH in parts]
    return sum(weighted[1:], start=weighted[0])


def mask_windows(complete_NQ: Tensor, windows: int, scores_NQW: Tensor | None, topk: int) -> Tensor:
    """Minus infinity for the windows that a query does not see, [N, Q, W]: those that are not complete, and with scores
    those that are not among the best ``topk``.
    """
    numbers_W = torch.arange(windows, device=complete_NQ.device)
    hidden_NQW = numbers_W >= complete_NQ.unsqueeze(-1)
    if scores_NQW is not None and windows > topk:
        best_NQk = select_topk(scores_NQW.masked_fill(hidden_NQW, -math.inf), topk)
        hidden_NQW |= torch.ones_like(hidden_NQW).scatter_(-1, best_NQk, False)
    return torch.zeros(hidden_NQW.shape, device=hidden_NQW.device).masked_fill_(hidden_NQW, -math.inf)
