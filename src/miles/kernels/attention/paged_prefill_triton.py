"""Triton kernel of paged prefill attention: a tile of new tokens attends to all earlier tokens of its sequence.

Shapes: as in ``tiles_triton``; T new tokens, H = G * r query heads.
"""

# CFG is a constexpr NamedTuple, whose fields the type checker does not know.
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from miles.kernels.attention.tiles_triton import (
    attend_range,
    exp2_factor,
    extend_visible,
    first_visible,
    init_state,
    join_channels,
    load_queries,
    load_sinks,
    normalize,
    store_rows,
)
from miles.kernels.runtime.triton_compat import jit_paged, tl


@jit_paged
def paged_prefill_kernel(
    q_THd: tl.tensor,
    k_SGd: tl.tensor,
    v_SGe: tl.tensor,
    block_table_SP: tl.tensor,
    tiles_I4: tl.tensor,
    visible_ends_T: tl.tensor,
    k_scales: tl.tensor,
    v_scales: tl.tensor,
    out_THe: tl.tensor,
    sinks_H: tl.tensor,
    q_stride: tl.tensor,
    block_table_stride: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    CFG: tl.constexpr,
) -> None:
    """One head, and M queries of a tile; the third grid axis selects which M."""
    head = tl.program_id(0)
    tile = tiles_I4 + tl.program_id(1) * 4
    first_query = tl.program_id(2) * CFG.M
    count = tl.load(tile + 2) - first_query
    if count > 0:
        m_M = tl.arange(0, CFG.M)
        real_M = m_M < count
        row_M = tl.load(tile + 1) + first_query + m_M
        first = tl.load(tile + 3) + first_query
        end = first + tl.minimum(count, CFG.M)
        high_M = tl.minimum(first + m_M, end - 1)
        at_M = row_M.to(tl.int64) * q_stride + head * (CFG.d + CFG.x)
        queries = load_queries(q_THd, at_M, real_M, CFG)
        group = head // CFG.r
        k, v = k_SGd + group * (CFG.d + CFG.x), v_SGe + group * CFG.e
        pages = block_table_SP + tl.load(tiles_I4 + tl.program_id(1) * 4).to(tl.int64) * block_table_stride
        low_M = first_visible(high_M, CFG)
        begin = first_visible(first, CFG) // CFG.N * CFG.N
        full_begin = (first_visible(end - 1, CFG) + CFG.N - 1) // CFG.N * CFG.N
        high_M, end = extend_visible(high_M, end, visible_ends_T, row_M, real_M, CFG)
        # Token tiles in three ranges: partly outside the window, visible to all queries, and the diagonal.
        diagonal = tl.maximum((first + 1) // CFG.N * CFG.N, begin)
        full_begin = tl.minimum(full_begin, diagonal)
        state = init_state(CFG)
        kv_inputs = (k, v, k_scales + group * CFG.page_size, v_scales + group * CFG.page_size, pages)
        mask_inputs = (low_M, high_M, scale, softcap)
        if CFG.is_windowed:
            token_range = (begin, full_begin)
            state = attend_range(*state, *queries, *kv_inputs, *token_range, *mask_inputs, CFG, False, True, False)
        else:
            full_begin = begin
        token_range = (full_begin, diagonal)
        state = attend_range(*state, *queries, *kv_inputs, *token_range, *mask_inputs, CFG, False, False, False)
        token_range = (diagonal, end)
        state = attend_range(*state, *queries, *kv_inputs, *token_range, *mask_inputs, CFG, True, CFG.is_windowed, True)
        out_ME, odd_ME, max_M, sum_M = state
        out_ME = join_channels(out_ME, odd_ME, CFG)
        sink_M = load_sinks(sinks_H, row_M * 0 + head, real_M, CFG)
        out_ME = normalize(out_ME, max_M, sum_M, sink_M, exp2_factor(scale, CFG), CFG.has_sinks)
        store_rows(out_THe, row_M * CFG.heads + head, out_ME, real_M, CFG)
