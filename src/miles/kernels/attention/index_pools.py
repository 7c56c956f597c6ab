"""Pooled keys of a DSA indexer: it scores pools of consecutive tokens, and selects all tokens of the best pools.

A pool's key is a weighted mean of its tokens' keys, by a softmax of gates that are cached beside the keys. The tokens
behind the last complete pool are always selected.

Shapes: S tokens of a sequence, N rows of Q queries with a context of C tokens, H indexer heads, d their channels, x =
2d channels of a key and its gate, P tokens of a pool, p pools, k pools selected for each query, t tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def pool_index_keys(keys_Sx: Tensor, bias_Pd: Tensor) -> Tensor:
    """Return the keys of complete pools, [..., p, d]; tokens behind the last one are left out."""
    size = len(bias_Pd)
    pools = keys_Sx.shape[-2] // size
    pooled = keys_Sx[..., : pools * size, :].unflatten(-2, (pools, size))
    keys_pPd, gates_pPd = pooled.chunk(2, -1)
    wide = torch.promote_types(gates_pPd.dtype, torch.float32)
    weights_pPd = (gates_pPd.to(wide) + bias_Pd.to(wide)).softmax(-2).to(keys_pPd.dtype)
    return (weights_pPd * keys_pPd).sum(-2)


@torch.no_grad()
def select_pooled_tokens(
    q_SHd: Tensor, keys_Sx: Tensor, weights_SH: Tensor, topk: int, bias_Pd: Tensor, *, max_scores: int
) -> Tensor:
    """Positions of the tokens that each token attends to, [S, topk + P - 1]; some may be there more than once."""
    length, heads, _ = q_SHd.shape
    size = len(bias_Pd)
    wide = torch.promote_types(q_SHd.dtype, torch.float32)
    pool_pd = pool_index_keys(keys_Sx, bias_Pd).to(wide)
    inside_P = torch.arange(size, device=q_SHd.device)
    parts: list[Tensor] = []
    for lo in range(0, length, max(1, max_scores // (heads * max(1, len(pool_pd))))):
        hi = min(lo + max(1, max_scores // (heads * max(1, len(pool_pd)))), length)
        visible_Q = torch.arange(lo + 1, hi + 1, device=q_SHd.device)
        complete_Q = visible_Q // size
        q_1Rd = q_SHd[lo:hi].to(wide).flatten(0, 1)[None]
        # A batch of one: selective recomputation counts unbatched matmuls, and a recomputed layer selects nothing.
        head_scores_QHp = torch.bmm(q_1Rd, pool_pd.T[None])[0].unflatten(0, (hi - lo, heads)).relu_()
        scores_Qp = torch.bmm(weights_SH[lo:hi, None].to(wide), head_scores_QHp)[:, 0]
        best_Qk = _select_pools(scores_Qp, complete_Q, topk // size)
        tail_Q = visible_Q - complete_Q * size
        first_Q = torch.where(tail_Q > 0, complete_Q * size, best_Qk[:, 0] * size)
        pools_QkP = best_Qk.unsqueeze(-1) * size + inside_P
        pools_QkP = torch.where((best_Qk < complete_Q[:, None]).unsqueeze(-1), pools_QkP, first_Q[:, None, None])
        tail_QP = torch.where(inside_P < tail_Q[:, None], (complete_Q * size)[:, None] + inside_P, first_Q[:, None])
        parts.append(torch.cat((pools_QkP.flatten(1), tail_QP[:, : size - 1]), 1))
    return torch.cat(parts)


@torch.no_grad()
def mask_unselected_pools(scores_NQp: Tensor, visible_NQ: Tensor, context: int, topk: int, size: int) -> Tensor:
    """Return which of ``context`` tokens are not selected, [N, Q, C]; each query sees the first ``visible_NQ``."""
    complete_NQ1 = (visible_NQ // size).unsqueeze(-1)
    selected_NQp = torch.zeros_like(scores_NQp, dtype=torch.bool)
    selected_NQp.scatter_(-1, _select_pools(scores_NQp, complete_NQ1.squeeze(-1), topk // size), True)
    selected_NQp &= torch.arange(scores_NQp.shape[-1], device=scores_NQp.device) < complete_NQ1
    tokens_NQC = F.pad(selected_NQp.repeat_interleave(size, -1), (0, context - size * selected_NQp.shape[-1]))
    return ~(tokens_NQC | (torch.arange(context, device=scores_NQp.device) >= complete_NQ1 * size))


def _select_pools(scores: Tensor, complete: Tensor, count: int) -> Tensor:
    """The best ``count`` pools of each query; of a query with fewer complete ones also others, which are the last."""
    number = torch.arange(scores.shape[-1], device=scores.device)
    scores = scores.masked_fill(number >= complete.unsqueeze(-1), -torch.inf)
    return scores.topk(min(count, scores.shape[-1]), dim=-1).indices
