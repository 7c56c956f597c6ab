"""Pooled keys of a DSA indexer: it scores pools of consecutive tokens, and selects all tokens of the best pools.

A pool's key follows from its tokens' keys: with ``GatedPool`` a weighted mean, by a softmax of gates that are cached
beside the keys. The tokens behind the last complete pool are always selected.

Shapes: S tokens of a sequence, M its keys, N rows of Q queries with a context of C tokens, H indexer heads, d their
channels, x channels that a token caches (a key and its gate: 2d), P tokens of a pool, p pools, k pools selected for
each query, t tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.attention.params import KeyPool
from miles.kernels.attention.topk_positions import select_topk


@dataclass(frozen=True, slots=True)
class GatedPool:
    """Weighted means of keys, whose gates have a bias for each token of a pool."""

    bias_Pd: Tensor

    @property
    def size(self) -> int:
        """Tokens of a pool."""
        return len(self.bias_Pd)

    def __call__(self, keys_Sx: Tensor) -> Tensor:
        return pool_index_keys(keys_Sx, self.bias_Pd)


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
def select_topk_pools(
    q_SHd: Tensor, keys_Mx: Tensor, weights_SH: Tensor, topk: int, pool: KeyPool, *, max_scores: int
) -> Tensor:
    """Return the pools that each token of a sequence selects, ascending, [S, k]; a token of fewer complete pools also
    gets others. If there are more keys than queries, the queries are those of the last tokens.
    """
    length, heads, _ = q_SHd.shape
    past = len(keys_Mx) - length
    size = pool.size
    wide = torch.promote_types(q_SHd.dtype, torch.float32)
    pool_pd = pool(keys_Mx).to(wide)
    parts: list[Tensor] = []
    step = max(1, max_scores // (heads * max(1, len(pool_pd))))
    for lo in range(0, length, step):
        hi = min(lo + step, length)
        visible_Q = torch.arange(past + lo + 1, past + hi + 1, device=q_SHd.device)
        q_1Rd = q_SHd[lo:hi].to(wide).flatten(0, 1)[None]
        # A batch of one: selective recomputation counts unbatched matmuls, and a recomputed layer selects nothing.
        head_scores_QHp = torch.bmm(q_1Rd, pool_pd.T[None])[0].unflatten(0, (hi - lo, heads)).relu_()
        scores_Qp = torch.bmm(weights_SH[lo:hi, None].to(wide), head_scores_QHp)[:, 0]
        parts.append(select_pools(scores_Qp, visible_Q // size, topk // size))
    return torch.cat(parts)


def expand_pools(pools_Sk: Tensor, size: int, past: int = 0) -> Tensor:
    """Return positions of the tokens that each token of a sequence attends to, given its pools, [S, k * P + P - 1].

    Some may be there more than once. The first token has the position ``past``.
    """
    visible_S = torch.arange(past + 1, past + len(pools_Sk) + 1, device=pools_Sk.device)
    inside_P = torch.arange(size, device=pools_Sk.device)
    complete_S = visible_S // size
    tail_S = visible_S - complete_S * size
    first_S = torch.where(tail_S > 0, complete_S * size, pools_Sk[:, 0] * size)
    pools_SkP = pools_Sk.unsqueeze(-1) * size + inside_P
    pools_SkP = torch.where((pools_Sk < complete_S[:, None]).unsqueeze(-1), pools_SkP, first_S[:, None, None])
    tail_SP = torch.where(inside_P < tail_S[:, None], (complete_S * size)[:, None] + inside_P, first_S[:, None])
    return torch.cat((pools_SkP.flatten(1), tail_SP[:, : size - 1]), 1)


@torch.no_grad()
def mask_unselected_pools(pools_NQk: Tensor, visible_NQ: Tensor, num_pools: int, context: int, size: int) -> Tensor:
    """Return which of ``context`` tokens are not selected, [N, Q, C], given the pools that each query selects.

    A query sees the first ``visible_NQ`` tokens.
    """
    complete_NQ1 = (visible_NQ // size).unsqueeze(-1)
    selected_NQp = torch.zeros(*visible_NQ.shape, num_pools, dtype=torch.bool, device=visible_NQ.device)
    selected_NQp.scatter_(-1, pools_NQk, True)
    selected_NQp &= torch.arange(num_pools, device=visible_NQ.device) < complete_NQ1
    tokens_NQC = F.pad(selected_NQp.repeat_interleave(size, -1), (0, context - size * num_pools))
    return ~(tokens_NQC | (torch.arange(context, device=visible_NQ.device) >= complete_NQ1 * size))


def select_pools(scores_p: Tensor, complete: Tensor, count: int) -> Tensor:
    """Return the best ``count`` pools of each query, ascending; of a query with fewer complete ones also others."""
    number_p = torch.arange(scores_p.shape[-1], device=scores_p.device)
    return select_topk(scores_p.masked_fill(number_p >= complete.unsqueeze(-1), -torch.inf), count)
