"""Paged prefill attention (several new tokens per sequence): launcher and reference.

Shapes: T new tokens, H query heads, G key-value heads, d channels of a key, e of a value, S slots of the KV cache, B
sequences, I tiles of their new tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miles.kernels.attention.params import PagedAttentionParams
from miles.kernels.attention.reference import paged_attention_reference
from miles.kernels.attention.tile_config import (
    KernelConfig,
    build_kernel_config,
    scale_tensors,
    select_prefill_tile,
    set_tile,
)
from miles.kernels.runtime.kv_cache import Ints

# New tokens of a tile; a kernel may split it further.
TILE = 128


def build_prefill_tiles(starts_B: Ints, counts_B: Ints, req_slots_B: Ints, first_row: int) -> NDArray[np.int32]:
    """Tiles of new tokens, [I, 4]: request slot, first query row, number of queries, position of the first.

    Sequence b has ``starts_B[b]`` cached tokens and ``counts_B[b]`` new ones; those of the first sequence begin at row
    ``first_row`` of the queries. Tiles with the longest context come first, since they take longest.
    """
    parts_B = -(-counts_B // TILE)
    owner_I = np.arange(len(counts_B)).repeat(parts_B)
    offset_I = TILE * (np.arange(len(owner_I)) - (np.cumsum(parts_B) - parts_B)[owner_I])
    first_B = first_row + np.cumsum(counts_B) - counts_B
    count_I = np.minimum(counts_B[owner_I] - offset_I, TILE)
    position_I = starts_B[owner_I] + offset_I
    tiles_I4 = np.stack((req_slots_B[owner_I], first_B[owner_I] + offset_I, count_I, position_I), 1).astype(np.int32)
    return tiles_I4[(-(position_I + count_I)).argsort(kind="stable")]


def prefill_attention(
    q_THd: Tensor,
    k_SGd: Tensor,
    v_SGe: Tensor,
    block_table_SP: Tensor,
    tiles: Tensor,
    params: PagedAttentionParams,
    *,
    visible_ends_T: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of every new token over its sequence, [T, H, e]; rows of ``out`` in no tile are left unchanged.

    ``tiles`` are those of ``build_prefill_tiles``, on the device; keys and values of new tokens are in their pages.
    Token t attends to positions before ``visible_ends_T[t]`` (int32), by default up to its own.
    """
    config = build_kernel_config(q_THd, k_SGd, v_SGe, params)
    return launch_prefill((q_THd, k_SGd, v_SGe, block_table_SP, tiles), params, config, out, visible_ends_T)


def launch_prefill(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    params: PagedAttentionParams,
    config: KernelConfig,
    out: Tensor | None,
    visible_ends_T: Tensor | None = None,
) -> Tensor:
    """Launch one program per head and tile; ``tensors`` as in ``prefill_attention``."""
    # Imported on first use, when Triton compiles it.
    from miles.kernels.attention.paged_prefill_triton import paged_prefill_kernel

    q_THd, block_table_SP, tiles = tensors[0], tensors[3], tensors[4]
    rows, heads = q_THd.shape[:2]
    if out is None:
        out = torch.empty((rows, heads, config.e), device=q_THd.device, dtype=q_THd.dtype)
    assert out.is_contiguous(), "out must be contiguous"
    config = config._replace(has_visible_ends=visible_ends_T is not None)
    queries, tuning = select_prefill_tile(config, q_THd.dtype, q_THd.device)
    if len(tiles):
        # Heads are the fastest grid axis: those of one key-value head share its keys in the L2 cache.
        paged_prefill_kernel[(heads, len(tiles), TILE // queries)](
            *tensors,
            tiles if visible_ends_T is None else visible_ends_T,
            *scale_tensors(params, q_THd),
            out,
            q_THd if params.sinks_H is None else params.sinks_H,
            q_THd.stride(0),
            block_table_SP.stride(0),
            params.scale,
            params.softcap or 0.0,
            set_tile(config, queries, tuning),
            num_warps=tuning.warps,
            num_stages=tuning.stages,
        )
    return out


def prefill_reference(
    q_THd: Tensor,
    k_SGd: Tensor,
    v_SGe: Tensor,
    block_table_SP: Tensor,
    tiles: Tensor,
    params: PagedAttentionParams,
    *,
    visible_ends_T: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """``prefill_attention`` in torch, tile by tile, with sums in float32."""
    if out is None:
        out = torch.empty((*q_THd.shape[:2], v_SGe.shape[2]), device=q_THd.device, dtype=q_THd.dtype)
    for req_slot, row, count, position in tiles.tolist():
        position_T = torch.arange(position, position + count, device=q_THd.device)
        q_tHd, pages_P = q_THd[row : row + count], block_table_SP[req_slot]
        ends_T = None if visible_ends_T is None else visible_ends_T[row : row + count]
        out[row : row + count] = paged_attention_reference(
            q_tHd, k_SGd, v_SGe, pages_P, position_T, params, visible_ends_T=ends_T
        )
    return out
