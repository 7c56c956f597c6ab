"""Batch-invariant token selection of a DSA indexer: scores in tiles of one shape, ties to the lowest position.

Shapes: T queries, S rows of keys, K most keys of a span, P the same padded to whole blocks, Q some queries of a span, h
indexer heads, d their channels, D the same padded, t selected tokens.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.attention.indexer_replay import IndexerSelections
from miles.kernels.attention.params import IndexerInputs
from miles.kernels.attention.topk_positions import list_selected
from miles.kernels.batch_invariant.attention_metadata import AttentionSpans
from miles.kernels.batch_invariant.attention_reference import BLOCK, matmul_tiles, pad_channels, tile_rows
from miles.kernels.batch_invariant.elementwise import tree_sum

# Rows (queries times heads) whose scores are computed together.
_MAX_ROWS = 4096


@torch.no_grad()
def select_tokens(index: IndexerInputs, keys_Sd: Tensor, spans: AttentionSpans) -> Tensor | None:
    """Whether each query attends to each position of its sequence [T, P]; None where that is all that it sees.

    A query selects the ``topk`` positions up to its own with the highest scores; of equal scores the lowest position.
    """
    longest = int(spans.keys_N.max(initial=0))
    if index.topk >= longest:
        return None
    assert spans.ends_T is None, "sparse attention is causal"
    width = -(-longest // BLOCK) * BLOCK
    selected_TP = torch.zeros(spans.queries, width, dtype=torch.bool, device=keys_Sd.device)
    step = max(1, _MAX_ROWS // index.q_THd.shape[1])
    row_K = None if spans.row_K is None else torch.from_numpy(spans.row_K).to(keys_Sd.device)
    columns = (x.tolist() for x in (spans.first_N, spans.count_N, spans.start_N, spans.keys_N))
    for first, count, start, keys in zip(*columns, strict=True):
        span_Kd = keys_Sd[start : start + keys] if row_K is None else keys_Sd[row_K[start : start + keys]]
        for low in range(0, count, step):
            high = min(low + step, count)
            rows = slice(first + low, first + high)
            end = keys - count + high
            scores_QK = _score(index.q_THd[rows], index.weights_TH[rows], span_Kd[:end])
            position_Q1 = torch.arange(end - (high - low), end, device=keys_Sd.device)[:, None]
            later_QK = torch.arange(end, device=keys_Sd.device) > position_Q1
            best_Qt = select_positions(scores_QK.masked_fill_(later_QK, -math.inf), index.topk)
            selected_TP[rows, :end] = torch.zeros_like(later_QK).scatter_(1, best_Qt, True) & ~later_QK
    return selected_TP


@torch.no_grad()
def record_tokens(
    recorder: IndexerSelections, layer: int, selected_TP: Tensor | None, spans: AttentionSpans, index: IndexerInputs
) -> None:
    """Record what ``select_tokens`` selected."""
    if selected_TP is not None:
        rows_Tt = list_selected(selected_TP, index.topk)
        recorder.record(layer, rows_Tt, _count_visible(spans, selected_TP.device), index.max_selected)


@torch.no_grad()
def replay_tokens(
    selections: IndexerSelections, layer: int, selected_TP: Tensor | None, spans: AttentionSpans, index: IndexerInputs
) -> Tensor | None:
    """Return what is selected in place of ``selected_TP``, where a selection was recorded."""
    if selected_TP is None:
        return None
    visible_T = _count_visible(spans, selected_TP.device)
    own_T1t = list_selected(selected_TP, index.topk).unsqueeze(1)
    used_Tt = selections.choose(layer, 0, own_T1t, visible_T, unit=index.unit, limit=index.max_selected).squeeze(1)
    # A token that sees fewer has positions in its row that mean nothing.
    own_T1 = (visible_T <= index.topk)[:, None]
    return torch.where(own_T1, selected_TP, torch.zeros_like(selected_TP).scatter_(1, used_Tt, True))


def _count_visible(spans: AttentionSpans, device: torch.device) -> Tensor:
    """The number of tokens that each query sees."""
    before_N = spans.keys_N - spans.count_N - spans.first_N
    return torch.from_numpy(np.arange(1, spans.queries + 1) + before_N.repeat(spans.count_N)).to(device)


def select_positions(scores_QK: Tensor, topk: int) -> Tensor:
    """Positions of the ``topk`` highest scores of each row, or of all; of equal scores the lowest position first."""
    return scores_QK.sort(dim=-1, descending=True, stable=True).indices[:, :topk]


def _score(q_Qhd: Tensor, weights_Qh: Tensor, keys_Kd: Tensor) -> Tensor:
    """The sum over heads of weight * relu(q . k), [Q, K]; heads are added half to half."""
    wide = weights_Qh.dtype
    queries, heads, _ = q_Qhd.shape
    tiles_bmD = tile_rows(pad_channels(q_Qhd.flatten(0, 1), wide))
    keys_PD = F.pad(pad_channels(keys_Kd, wide), (0, 0, 0, -len(keys_Kd) % BLOCK))
    scores: list[Tensor] = []
    for block_nD in keys_PD.split(BLOCK):
        dot_bmn = matmul_tiles(tiles_bmD, block_nD.T.expand(len(tiles_bmD), -1, -1).contiguous())
        dot_Qhn = dot_bmn.flatten(0, 1)[: queries * heads].unflatten(0, (queries, heads)).relu_()
        scores.append(tree_sum((dot_Qhn * weights_Qh.unsqueeze(-1)).transpose(1, 2)).squeeze(-1))
    # Adding zero turns negative zeros into positive ones, which sort alike everywhere.
    return torch.cat(scores, 1)[:, : len(keys_Kd)] + 0.0
