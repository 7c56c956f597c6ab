"""Paged attention over the latent KV cache of MLA, in the absorbed form: values are the first channels of the keys.

Shapes: B rows, T new tokens, H query heads, d channels of a key, e of them its value, S slots of the KV cache.

Every tile of keys is loaded once and used for both matmuls. All heads share the keys: decode takes up to 64 heads in a
tile.
"""

from __future__ import annotations

from torch import Tensor

from miles.kernels.attention.paged_decode import decode_reference, launch_decode
from miles.kernels.attention.paged_prefill import launch_prefill, prefill_reference
from miles.kernels.attention.params import PagedAttentionParams
from miles.kernels.attention.split_kv import SplitKVPlan
from miles.kernels.attention.tile_config import build_kernel_config


def count_head_tiles(heads: int) -> int:
    """The number of tiles that decode splits the query heads into."""
    return -(-heads // 64)


def mla_decode_attention(
    q_BHd: Tensor,
    k_S1d: Tensor,
    block_table_SP: Tensor,
    req_slots_B: Tensor,
    plan: SplitKVPlan,
    params: PagedAttentionParams,
    *,
    value_dim: int,
    out: Tensor | None = None,
    has_prefixes: bool | None = None,
) -> Tensor:
    """Attention of each row's new token, [B, H, value_dim]; see ``decode_attention``.

    The plan is filled with ``kv_heads=count_head_tiles(H)`` and all H heads as queries of one.
    """
    v_S1e = k_S1d[..., :value_dim]
    config = build_kernel_config(q_BHd, k_S1d, v_S1e, params, latent=True)
    tensors = (q_BHd, k_S1d, v_S1e, block_table_SP, req_slots_B)
    return launch_decode(tensors, plan, params, config, out=out, has_prefixes=has_prefixes)


def mla_prefill_attention(
    q_THd: Tensor,
    k_S1d: Tensor,
    block_table_SP: Tensor,
    tiles: Tensor,
    params: PagedAttentionParams,
    *,
    value_dim: int,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of every new token over its sequence, [T, H, value_dim]; see ``prefill_attention``."""
    v_S1e = k_S1d[..., :value_dim]
    config = build_kernel_config(q_THd, k_S1d, v_S1e, params, latent=True)
    return launch_prefill((q_THd, k_S1d, v_S1e, block_table_SP, tiles), params, config, out)


def mla_decode_reference(
    q_BHd: Tensor,
    k_S1d: Tensor,
    block_table_SP: Tensor,
    req_slots_B: Tensor,
    lengths_B: Tensor,
    params: PagedAttentionParams,
    *,
    value_dim: int,
) -> Tensor:
    """``mla_decode_attention`` in torch, row by row."""
    return decode_reference(q_BHd, k_S1d, k_S1d[..., :value_dim], block_table_SP, req_slots_B, lengths_B, params)


def mla_prefill_reference(
    q_THd: Tensor,
    k_S1d: Tensor,
    block_table_SP: Tensor,
    tiles: Tensor,
    params: PagedAttentionParams,
    *,
    value_dim: int,
    out: Tensor | None = None,
) -> Tensor:
    """``mla_prefill_attention`` in torch, tile by tile."""
    return prefill_reference(q_THd, k_S1d, k_S1d[..., :value_dim], block_table_SP, tiles, params, out=out)
