"""Batch-invariant paged attention on a GPU: launchers of decode rows (one new token) and prefill tiles.

Shapes: B rows, T new tokens, H query heads, G key-value heads, d channels of a key, e of a value, S slots of the KV
cache (of ``block_table_SP``: request slots, with P pages each), I tiles.

Grids are constant and the items are read on the device, so that decode launches can be captured in a CUDA graph and
replayed for any lengths. Nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.attention.paged_prefill import TILE
from miles.kernels.attention.params import PagedAttentionParams
from miles.kernels.attention.tile_config import pad_dim, scale_tensors
from miles.kernels.batch_invariant.attention_split_kv import BatchInvariantSplitKVPlan
from miles.kernels.batch_invariant.attention_tile_config import (
    build_invariant_config,
    build_softmax_constants,
    select_decode_tuning,
    select_prefill_tile,
)
from miles.kernels.runtime.triton_compat import pdl_options, register_limit

# The most queries of a tile.
_MAX_QUERIES = 64


def decode_attention(
    q_BHd: Tensor,
    k_SGd: Tensor,
    v_SGe: Tensor,
    block_table_SP: Tensor,
    req_slots_B: Tensor,
    plan: BatchInvariantSplitKVPlan,
    params: PagedAttentionParams,
    *,
    out: Tensor | None = None,
    has_prefixes: bool | None = None,
) -> Tensor:
    """Attention of each row's new token, [B, H, e]; zeros for rows of length 0.

    ``plan`` is filled and on the device; its lengths include the new tokens, whose keys and values are in their pages.
    ``has_prefixes``: whether the prefix kernel is launched (default: if the plan has any).
    """
    # Imported on first use, when Triton compiles it.
    from miles.kernels.batch_invariant.attention_decode import paged_decode_kernel, reduce_chunks_kernel

    config = build_invariant_config(q_BHd, k_SGd, v_SGe, params)
    rows, heads = q_BHd.shape[:2]
    assert len(req_slots_B) == rows <= plan.max_rows, "one request slot per row, and no more rows than the plan allows"
    if out is None:
        out = torch.empty((rows, heads, config.e), device=q_BHd.device, dtype=q_BHd.dtype)
    assert out.is_contiguous(), "out must be contiguous"
    partials, pdl = plan.get_partials(heads, config.e), pdl_options(q_BHd.device)
    sinks_H = q_BHd if params.sinks_H is None else params.sinks_H
    tensors = (q_BHd, k_SGd, v_SGe, block_table_SP, req_slots_B)
    plan_arrays = (plan.counts, plan.length_B, plan.base_B, plan.items_I)
    scalars = (q_BHd.stride(0), block_table_SP.stride(0), *build_softmax_constants(params))

    def launch(queries: int, heads_per_tile: int, prefix: bool) -> None:
        tiled, tuning = select_decode_tuning(config, q_BHd.dtype, queries, heads_per_tile)
        paged_decode_kernel[(plan.sms * tuning.resident,)](
            *tensors,
            *scale_tensors(params, q_BHd),
            *plan_arrays,
            *partials,
            out,
            sinks_H,
            *scalars,
            tiled,
            prefix,
            num_warps=tuning.warps,
            num_stages=tuning.stages,
            **register_limit(tuning.registers),
            **pdl,
        )

    if plan.has_prefixes if has_prefixes is None else has_prefixes:
        launch(plan.prefix_queries, config.r, True)
    queries = min(pad_dim(config.r), _MAX_QUERIES)
    launch(queries, min(config.r, queries), False)
    reduce_chunks_kernel[(rows, heads)](plan.base_B, *partials, sinks_H, out, config, num_warps=1, **pdl)
    return out


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
    if out is None:
        out = torch.empty((*q_THd.shape[:2], v_SGe.shape[2]), device=q_THd.device, dtype=q_THd.dtype)
    assert out.is_contiguous(), "out must be contiguous"
    launch_prefill((q_THd, k_SGd, v_SGe, block_table_SP, tiles), params, out, None, visible_ends_T)
    return out


def launch_prefill(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    params: PagedAttentionParams,
    out_THe: Tensor,
    lse_TH: Tensor | None,
    visible_ends_T: Tensor | None = None,
) -> None:
    """Launch one program per head, tile and part of the value channels; ``tensors`` as in ``prefill_attention``."""
    from miles.kernels.batch_invariant.attention_prefill import prefill_kernel

    q_THd, k_SGd, v_SGe, block_table_SP, tiles = tensors
    config = build_invariant_config(q_THd, k_SGd, v_SGe, params)._replace(has_visible_ends=visible_ends_T is not None)
    tiled, tile, parts = select_prefill_tile(config, q_THd.dtype)
    if len(tiles):
        # Heads are the fastest grid axis: those of one key-value head share its keys in the L2 cache.
        prefill_kernel[(q_THd.shape[1], len(tiles), TILE // tile.queries * parts)](
            *tensors,
            tiles if visible_ends_T is None else visible_ends_T,
            *scale_tensors(params, q_THd),
            out_THe,
            out_THe if lse_TH is None else lse_TH,
            q_THd if params.sinks_H is None else params.sinks_H,
            q_THd.stride(0),
            block_table_SP.stride(0) if params.page_size else 0,
            *build_softmax_constants(params),
            tiled,
            parts,
            lse_TH is not None,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
