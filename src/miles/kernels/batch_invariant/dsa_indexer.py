"""Batch-invariant selection of sparse-attention indexers: tokens (DSA), pools or blocks of tokens.

Scores are computed in tiles of one shape; of equal scores the lowest position is selected.

Shapes: T queries, S rows of keys, K most keys of a span, Q some queries of a span, h indexer heads, d their channels, x
channels of a cached key (2d with the gates of pools), D channels padded to whole vectors, G key-value heads; X groups
that select (G of blocks, else 1) among U units of u tokens, of which t are selected; p pools.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.attention.index_pools import GatedPool
from miles.kernels.attention.indexer_replay import IndexerSelections
from miles.kernels.attention.params import BlockIndexerInputs, IndexerInputs, KeyPool
from miles.kernels.attention.topk_positions import list_selected
from miles.kernels.batch_invariant.attention_metadata import AttentionSpans, Selection
from miles.kernels.batch_invariant.attention_reference import BLOCK, matmul_tiles, pad_channels, tile_rows
from miles.kernels.batch_invariant.elementwise import softmax, sum_in_order, tree_sum
from miles.kernels.runtime.triton_compat import use_triton

# Rows (queries times heads) whose scores are computed together.
_MAX_ROWS = 4096

SparseIndexer = IndexerInputs | BlockIndexerInputs


@torch.no_grad()
def select_tokens(index: SparseIndexer, keys_Sx: Tensor, spans: AttentionSpans) -> Selection | None:
    """What each query attends to of its span; None where that is all that it sees.

    A query selects the tokens, pools or blocks up to its position with the highest scores; of equal scores the lowest.
    On a GPU it is never None: attention to a selection is not the kernel of dense attention there and rounds otherwise,
    and what one plane computes among short contexts another computes beside longer ones.
    """
    longest = int(spans.keys_N.max(initial=0))
    if index.max_selected >= longest and not use_triton(keys_Sx):
        return None
    assert spans.ends_T is None, "sparse attention is causal"
    is_blocks = isinstance(index, BlockIndexerInputs)
    queries = index.q_TGd if is_blocks else index.q_THd
    groups, size = queries.shape[1] if is_blocks else 1, index.unit
    units_TXU = torch.zeros(spans.queries, groups, -(-longest // size), dtype=torch.bool, device=keys_Sx.device)
    step = max(1, _MAX_ROWS // queries.shape[1])
    row_K = None if spans.row_K is None else torch.from_numpy(spans.row_K).to(keys_Sx.device)
    columns = (x.tolist() for x in (spans.first_N, spans.count_N, spans.start_N, spans.keys_N))
    for first, count, start, keys in zip(*columns, strict=True):
        span_Kx = keys_Sx[start : start + keys] if row_K is None else keys_Sx[row_K[start : start + keys]]
        if not is_blocks and index.pool is not None:
            span_Kx = _pool_keys(span_Kx, index.pool)
        for low in range(0, count, step):
            high = min(low + step, count)
            rows = slice(first + low, first + high)
            position_Q = torch.arange(keys - count + low, keys - count + high, device=keys_Sx.device)
            found_QXU = (
                _select_blocks(index, rows, span_Kx, position_Q)
                if is_blocks
                else _select_complete(index, rows, span_Kx, position_Q).unsqueeze(1)
            )
            units_TXU[rows, :, : found_QXU.shape[-1]] = found_QXU
    return Selection(units_TXU, size)


@torch.no_grad()
def record_tokens(
    recorder: IndexerSelections, layer: int, selection: Selection | None, spans: AttentionSpans, index: SparseIndexer
) -> None:
    """Record what ``select_tokens`` selected."""
    if selection is not None:
        visible_T = _count_visible(spans, selection.units_TXU.device)
        rows_TXt = _list_units(selection, visible_T, index)
        recorder.record(layer, rows_TXt, visible_T, index.max_selected)


@torch.no_grad()
def replay_tokens(
    selections: IndexerSelections, layer: int, selection: Selection | None, spans: AttentionSpans, index: SparseIndexer
) -> Selection | None:
    """Return what is selected in place of ``selection``, where one was recorded."""
    if selection is None:
        return None
    units_TXU, size = selection
    visible_T = _count_visible(spans, units_TXU.device)
    own_TXt = _list_units(selection, visible_T, index)
    used_TXt = selections.choose(layer, 0, own_TXt, visible_T, unit=size, limit=index.max_selected)
    used_TXU = torch.zeros_like(units_TXU).scatter_(2, used_TXt, True)
    if _selects_complete(index):
        used_TXU |= _last_unit(visible_T, units_TXU.shape[-1], size).unsqueeze(1)
    # A token that sees fewer has positions in its row that mean nothing.
    own_T11 = (visible_T <= index.max_selected)[:, None, None]
    return Selection(torch.where(own_T11, units_TXU, used_TXU), size)


def list_units(selection: Selection | None, queries: int, count: int, device: torch.device) -> Tensor:
    """Return the units that each query selects, ascending, [T, t] in int32; -1 behind them, and if all are visible."""
    if selection is None:
        return torch.full((queries, count), -1, dtype=torch.int32, device=device)
    units_TU = selection.units_TXU.squeeze(1)
    behind_Tt = torch.arange(count, device=device) >= units_TU.sum(-1, keepdim=True)
    return list_selected(units_TU, count).masked_fill(behind_Tt, -1).to(torch.int32)


def read_units(listed_Tt: Tensor, units: int, size: int) -> Selection:
    """Return the selection of which ``list_units`` made a list, of so many ``units`` of ``size`` tokens."""
    place_Tt = torch.where(listed_Tt < 0, units, listed_Tt).long()
    units_TU = torch.zeros(len(listed_Tt), units + 1, dtype=torch.bool, device=listed_Tt.device)
    units_TU = units_TU.scatter_(1, place_Tt, True)[:, :units]
    return Selection((units_TU | (listed_Tt[:, :1] < 0)).unsqueeze(1), size)


def _count_visible(spans: AttentionSpans, device: torch.device) -> Tensor:
    """The number of tokens that each query sees."""
    before_N = spans.keys_N - spans.count_N - spans.first_N
    return torch.from_numpy(np.arange(1, spans.queries + 1) + before_N.repeat(spans.count_N)).to(device)


def _selects_complete(index: SparseIndexer) -> bool:
    """Whether only complete units are selected, and the tokens behind them are always seen: pools of tokens."""
    return isinstance(index, IndexerInputs) and index.unit > 1


def _last_unit(visible_Q: Tensor, units: int, size: int) -> Tensor:
    """The unit behind the last complete one of each query, [Q, U]; causality hides its later tokens."""
    return torch.arange(units, device=visible_Q.device) == (visible_Q // size).unsqueeze(-1)


def _list_units(selection: Selection, visible_T: Tensor, index: SparseIndexer) -> Tensor:
    """The units that an indexer selected, ascending, [T, X, t]."""
    units_TXU, size = selection
    if _selects_complete(index):
        units_TXU = units_TXU & ~_last_unit(visible_T, units_TXU.shape[-1], size).unsqueeze(1)
    return list_selected(units_TXU, index.max_selected // size)


def _select_complete(index: IndexerInputs, rows: slice, keys_Kd: Tensor, position_Q: Tensor) -> Tensor:
    """Whether each query selects each token, or each complete pool and the tokens behind, [Q, U]."""
    size = index.unit
    visible_Q = position_Q + 1
    candidates = int(visible_Q[-1]) // size
    units = -(-int(visible_Q[-1]) // size)
    if candidates:
        scores_QK = score_heads(index.q_THd[rows], index.weights_TH[rows], keys_Kd[:candidates])
        hidden_QK = torch.arange(candidates, device=scores_QK.device) >= (visible_Q // size)[:, None]
        best_Qt = select_positions(scores_QK.masked_fill_(hidden_QK, -math.inf), index.max_selected // size)
        found_QK = torch.zeros_like(hidden_QK).scatter_(1, best_Qt, True) & ~hidden_QK
    else:
        found_QK = torch.zeros(len(visible_Q), 0, dtype=torch.bool, device=visible_Q.device)
    found_QU = F.pad(found_QK, (0, units - candidates))
    return found_QU | _last_unit(visible_Q, units, size) if size > 1 else found_QU


def _select_blocks(index: BlockIndexerInputs, rows: slice, keys_Kd: Tensor, position_Q: Tensor) -> Tensor:
    """Whether each query and key-value head selects each block, [Q, G, U]: by its best token, and the local ones."""
    end = int(position_Q[-1]) + 1
    size, blocks = index.block, -(-end // index.block)
    scores_QGK = _score_groups(index.q_TGd[rows], keys_Kd[:end])
    later_Q1K = (torch.arange(end, device=scores_QGK.device) > position_Q[:, None]).unsqueeze(1)
    scores_QGK = F.pad(scores_QGK.masked_fill(later_Q1K, -math.inf), (0, blocks * size - end), value=-math.inf)
    scores_QGU = scores_QGK.unflatten(-1, (blocks, size)).amax(-1)
    last_Q11 = (position_Q // size)[:, None, None]
    number_U = torch.arange(blocks, device=scores_QGU.device)
    if index.local:
        is_local_Q1U = (number_U <= last_Q11) & (number_U > last_Q11 - index.local)
        scores_QGU = scores_QGU.masked_fill(is_local_Q1U, math.inf)
    best_QGt = select_positions(scores_QGU, index.topk)
    return torch.zeros_like(scores_QGU, dtype=torch.bool).scatter_(-1, best_QGt, True) & (number_U <= last_Q11)


def select_positions(scores_QK: Tensor, topk: int) -> Tensor:
    """Positions of the ``topk`` highest scores of each row, or of all; of equal scores the lowest position first."""
    return scores_QK.sort(dim=-1, descending=True, stable=True).indices[..., :topk]


def _pool_keys(keys_Kx: Tensor, pool: KeyPool) -> Tensor:
    """The keys of complete pools, [p, d]; ``index_pools.pool_index_keys`` is rounded once."""
    if not isinstance(pool, GatedPool):
        return pool(keys_Kx)  # in the numerics of its norm
    bias_Pd, size = pool.bias_Pd, pool.size
    pools = len(keys_Kx) // size
    keys_pPd, gates_pPd = keys_Kx[: pools * size].unflatten(0, (pools, size)).chunk(2, -1)
    wide = torch.promote_types(keys_Kx.dtype, torch.float32)
    weights_pdP = softmax((gates_pPd.to(wide) + bias_Pd.to(wide)).transpose(1, 2))
    return sum_in_order((weights_pdP.transpose(1, 2) * keys_pPd.to(wide)).unbind(1))


def score_heads(q_Qhd: Tensor, weights_Qh: Tensor, keys_Kd: Tensor) -> Tensor:
    """The sum over heads of weight * relu(q . k), [Q, K]; heads are added half to half."""
    scores = [
        tree_sum((dot_Qhn.relu_() * weights_Qh.unsqueeze(-1)).transpose(1, 2)).squeeze(-1)
        for dot_Qhn in _dot_blocks(q_Qhd, keys_Kd, weights_Qh.dtype)
    ]
    # Adding zero turns negative zeros into positive ones, which sort alike everywhere.
    return torch.cat(scores, 1)[:, : len(keys_Kd)] + 0.0


def _score_groups(q_QGd: Tensor, keys_Kd: Tensor) -> Tensor:
    """q . k of each key-value head, [Q, G, K]."""
    wide = torch.promote_types(q_QGd.dtype, torch.float32)
    return torch.cat(_dot_blocks(q_QGd, keys_Kd, wide), -1)[..., : len(keys_Kd)] + 0.0


def _dot_blocks(q_Qhd: Tensor, keys_Kd: Tensor, wide: torch.dtype) -> list[Tensor]:
    """q . k of each head with each block of keys, [Q, h, n]; keys are padded to whole blocks."""
    queries, heads, _ = q_Qhd.shape
    tiles_bmD = tile_rows(pad_channels(q_Qhd.flatten(0, 1), wide))
    keys_PD = F.pad(pad_channels(keys_Kd, wide), (0, 0, 0, -len(keys_Kd) % BLOCK))
    return [
        matmul_tiles(tiles_bmD, block_nD.T.expand(len(tiles_bmD), -1, -1).contiguous())
        .flatten(0, 1)[: queries * heads]
        .unflatten(0, (queries, heads))
        for block_nD in keys_PD.split(BLOCK)
    ]
