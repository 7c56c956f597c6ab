"""Paged decode attention (one new token per row) with split-KV and shared-prefix items: launcher and reference.

Shapes: B rows, H query heads, G key-value heads, d channels of a key, e of a value, S slots of the KV cache (of
``block_table_SP``: request slots, with P pages each).

The context of each row is split into items (``SplitKVPlan``): one launch reads the shared prefixes, one the suffixes,
and one reduces the partial results of rows that have several. Grids are constant and the items are read on the device,
so the launches can be captured in a CUDA graph and replayed for any lengths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from miles.kernels.attention.params import PagedAttentionParams
from miles.kernels.attention.reference import paged_attention_reference
from miles.kernels.attention.split_kv import SplitKVPlan
from miles.kernels.attention.tile_config import (
    REDUCED_CHANNELS,
    REDUCED_SPLITS,
    KernelConfig,
    build_kernel_config,
    max_decode_queries,
    pad_dim,
    scale_tensors,
    select_decode_tunings,
    set_tile,
)
from miles.kernels.runtime.triton_compat import pdl_options


def decode_attention(
    q_BHd: Tensor,
    k_SGd: Tensor,
    v_SGe: Tensor,
    block_table_SP: Tensor,
    req_slots_B: Tensor,
    plan: SplitKVPlan,
    params: PagedAttentionParams,
    *,
    out: Tensor | None = None,
    has_prefixes: bool | None = None,
) -> Tensor:
    """Attention of each row's new token, [B, H, e]; zeros for rows of length 0.

    ``plan`` is filled and on the device; its lengths include the new tokens, whose keys and values are in their pages.
    ``block_table_SP`` is int32. ``has_prefixes``: whether the prefix kernel is launched (default: if the plan has any).
    """
    config = build_kernel_config(q_BHd, k_SGd, v_SGe, params)
    tensors = (q_BHd, k_SGd, v_SGe, block_table_SP, req_slots_B)
    return launch_decode(tensors, plan, params, config, out=out, has_prefixes=has_prefixes)


def launch_decode(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    plan: SplitKVPlan,
    params: PagedAttentionParams,
    config: KernelConfig,
    *,
    out: Tensor | None,
    has_prefixes: bool | None,
) -> Tensor:
    """Launch the prefix, suffix and reduction kernels; ``tensors`` as in ``decode_attention``."""
    # Imported on first use, when Triton compiles it.
    from miles.kernels.attention.paged_decode_triton import paged_decode_kernel, reduce_splits_kernel

    q_BHd, block_table_SP, req_slots_B = tensors[0], tensors[3], tensors[4]
    rows, heads = q_BHd.shape[:2]
    assert len(req_slots_B) == rows <= plan.max_rows, "one request slot per row, and no more rows than the plan allows"
    if out is None:
        out = torch.empty((rows, heads, config.e), device=q_BHd.device, dtype=q_BHd.dtype)
    assert out.is_contiguous(), "out must be contiguous"
    sinks_H = q_BHd if params.sinks_H is None else params.sinks_H
    scratch, tunings = plan.get_scratch(heads, config.e), select_decode_tunings(config, q_BHd.dtype, q_BHd.device)
    plan_arrays = (plan.counts, plan.length_B, plan.base_B, plan.items_I)
    scalars = (q_BHd.stride(0), block_table_SP.stride(0), params.scale, params.softcap or 0.0)
    pdl = pdl_options(q_BHd.device)

    def launch(queries: int, heads_per_tile: int, prefix: bool) -> None:
        tuning = tunings[queries]
        tiled = set_tile(config, queries, tuning)._replace(R=heads_per_tile)
        paged_decode_kernel[(plan.sms * tuning.resident,)](
            *tensors,
            *scale_tensors(params, q_BHd),
            *plan_arrays,
            *scratch,
            out,
            sinks_H,
            *scalars,
            tiled,
            prefix,
            num_warps=tuning.warps,
            num_stages=tuning.stages,
            **pdl,
        )

    if plan.has_prefixes if has_prefixes is None else has_prefixes:
        launch(plan.prefix_queries, config.r, True)
    queries = min(pad_dim(config.r), max_decode_queries(config, tunings))
    launch(queries, min(config.r, queries), False)
    heads_per_program = max(1, min(REDUCED_CHANNELS // config.E, 1 << (heads - 1).bit_length()))
    reduce_splits_kernel[(rows, -(-heads // heads_per_program))](
        plan.base_B,
        *scratch,
        sinks_H,
        out,
        config,
        REDUCED_SPLITS,
        heads_per_program,
        num_warps=max(1, config.E * REDUCED_SPLITS // 1024),
        **pdl,
    )
    return out


def decode_reference(
    q_BHd: Tensor,
    k_SGd: Tensor,
    v_SGe: Tensor,
    block_table_SP: Tensor,
    req_slots_B: Tensor,
    lengths_B: Tensor,
    params: PagedAttentionParams,
) -> Tensor:
    """``decode_attention`` in torch, row by row, with sums in float32."""
    out_BHe = q_BHd.new_zeros((*q_BHd.shape[:2], v_SGe.shape[2]))
    for row in lengths_B.nonzero().flatten().tolist():
        pages_P, position_1 = block_table_SP[req_slots_B[row]], lengths_B[row : row + 1] - 1
        q_1Hd = q_BHd[row : row + 1]
        out_BHe[row] = paged_attention_reference(q_1Hd, k_SGd, v_SGe, pages_P, position_1, params)[0]
    return out_BHe
