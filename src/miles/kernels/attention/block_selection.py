"""Block selection of block-sparse attention: the blocks of keys with the best indexer scores, for each query.

Shapes: S tokens of a sequence, M its keys, G key-value heads, d channels of an indexer key, b blocks, t selected
blocks; of a paged batch, N rows of Q queries and C tokens of context.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.attention.params import BlockIndexerInputs
from miles.kernels.attention.topk_positions import select_topk

# The most scores that are materialized at once.
_MAX_SCORES = 1 << 26


@torch.no_grad()
def select_topk_blocks(q_SGd: Tensor, k_Md: Tensor, index: BlockIndexerInputs) -> Tensor:
    """Return the blocks each token of a sequence attends to, [G, S, t]; a token early in it also gets later blocks,
    which attention has to mask. If there are more keys than queries, the queries are those of the last tokens.
    """
    length, groups, _ = q_SGd.shape
    keys = len(k_Md)
    assert index.max_selected < keys, "the sequence must be longer than what is selected"
    wide = torch.promote_types(q_SGd.dtype, torch.float32)
    k_dM = k_Md.to(wide).T
    position_M = torch.arange(keys, device=q_SGd.device)
    num_blocks = -(-keys // index.block)
    dtype = torch.int16 if num_blocks <= torch.iinfo(torch.int16).max else torch.int32
    selected_GSt = torch.empty(groups, length, index.topk, device=q_SGd.device, dtype=dtype)
    step = max(1, _MAX_SCORES // (groups * keys))
    for lo in range(0, length, step):
        position_Q = position_M[keys - length :][lo : lo + step]
        # Batched: selective recomputation counts unbatched matmuls, and a recomputed layer selects nothing.
        scores_GQM = torch.bmm(q_SGd[lo : lo + step].to(wide).transpose(0, 1), k_dM.expand(groups, -1, -1))
        scores_GQM.masked_fill_(position_M > position_Q[:, None], -torch.inf)
        selected_GSt[:, lo : lo + step] = _rank_blocks(scores_GQM, position_Q, index)
    return selected_GSt


@torch.no_grad()
def select_visible_blocks(
    q_NQGd: Tensor, k_NCd: Tensor, visible_NQC: Tensor, positions_NQ: Tensor, index: BlockIndexerInputs
) -> Tensor:
    """Return the blocks of the context that each query selects, [N, G, Q, t]; early ones also get later blocks.

    ``visible_NQC`` are the tokens at or before a query, and ``positions_NQ`` the position of the query.
    """
    wide = torch.promote_types(q_NQGd.dtype, torch.float32)
    k_NdC = k_NCd.to(wide).transpose(1, 2)
    selected: list[Tensor] = []
    for q_NQd in q_NQGd.unbind(2):
        scores_NQC = (q_NQd.to(wide) @ k_NdC).masked_fill_(~visible_NQC, -torch.inf)
        selected.append(_rank_blocks(scores_NQC, positions_NQ, index))
    return torch.stack(selected, 1)


def unselected_tokens(selected_Qt: Tensor, block: int, length: int) -> Tensor:
    """Return which of ``length`` tokens are in none of the blocks selected for each query, [..., Q, length]."""
    unselected_Qb = torch.ones(
        *selected_Qt.shape[:-1], -(-length // block), device=selected_Qt.device, dtype=torch.bool
    ).scatter_(-1, selected_Qt.long(), False)
    return unselected_Qb if block == 1 else unselected_Qb.repeat_interleave(block, -1)[..., :length]


def _rank_blocks(scores_QC: Tensor, position_Q: Tensor, index: BlockIndexerInputs) -> Tensor:
    """Return the selected blocks of each query, [..., Q, t], given the scores of tokens."""
    num_blocks = -(-scores_QC.shape[-1] // index.block)
    padded = F.pad(scores_QC, (0, num_blocks * index.block - scores_QC.shape[-1]), value=-torch.inf)
    scores_Qb = padded.unflatten(-1, (num_blocks, index.block)).amax(-1)
    if index.local:
        recent_l = torch.arange(index.local, device=scores_QC.device)
        local_Ql = (position_Q // index.block).unsqueeze(-1) - recent_l
        scores_Qb.scatter_(-1, local_Ql.clamp_(0, num_blocks - 1).expand(*scores_Qb.shape[:-1], -1), torch.inf)
    return select_topk(scores_Qb, index.topk)
