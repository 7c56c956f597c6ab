"""CUDA-graph inputs of a decode step: widens the int32 inputs and updates the block table in one kernel.

Shapes: n rows, S request slots, N entries that may be new in the block table [R, M].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from miles.kernels.runtime.triton_compat import jit, tl, triton, use_triton_inference

# Rows, and table entries, of a program: one per thread.
_BLOCK = 128


class GraphInputs(NamedTuple):
    """Rows of a decode step as int64: tokens, positions, KV-cache slots, request slots."""

    tokens_n: Tensor
    positions_n: Tensor
    slots_n: Tensor
    req_slots_n: Tensor


def unpack_graph_inputs(
    tokens_n: Tensor,
    positions_n: Tensor,
    slots_n: Tensor,
    req_slots_n: Tensor,
    *,
    last_tokens_S: Tensor,
    table_index_N: Tensor,
    pages_N: Tensor,
    block_table_RM: Tensor,
) -> GraphInputs:
    """Widen the int32 inputs; a token below 0 is replaced by the one last sampled for its request slot.

    ``pages_N`` are written to the flat indices ``table_index_N`` of the block table. Its last entry is unused: what is
    sent there need not be written.
    """
    assert block_table_RM.is_contiguous() and len(table_index_N) == len(pages_N)
    if not use_triton_inference(tokens_n):
        block_table_RM.view(-1).index_copy_(0, table_index_N.long(), pages_N)
        req_slots_wide_n = req_slots_n.long()
        tokens_wide_n = torch.where(tokens_n < 0, last_tokens_S.index_select(0, req_slots_wide_n), tokens_n.long())
        return GraphInputs(tokens_wide_n, positions_n.long(), slots_n.long(), req_slots_wide_n)
    rows, new_entries = len(tokens_n), len(table_index_N)
    # Each row starts at a multiple of 16 bytes, for vectorized loads.
    stride = rows + rows % 2
    out_4n = torch.empty(4, stride, dtype=torch.int64, device=tokens_n.device)
    _unpack_kernel[(triton.cdiv(max(rows, new_entries), _BLOCK),)](
        tokens_n,
        positions_n,
        slots_n,
        req_slots_n,
        last_tokens_S,
        table_index_N,
        pages_N,
        block_table_RM,
        out_4n,
        rows,
        new_entries,
        block_table_RM.numel() - 1,
        stride,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return GraphInputs(*out_4n[:, :rows].unbind())


@jit
def _unpack_kernel(
    tokens_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    req_slots_ptr: tl.tensor,
    last_tokens_ptr: tl.tensor,
    table_index_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    block_table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    new_entries: tl.tensor,
    unused_index: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    offset_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row_B, new_B = offset_B < rows, offset_B < new_entries
    index_B = tl.load(table_index_ptr + offset_B, new_B, other=0)
    tl.store(block_table_ptr + index_B, tl.load(pages_ptr + offset_B, new_B, other=0), new_B & (index_B < unused_index))
    token_B = tl.load(tokens_ptr + offset_B, row_B, other=0).to(tl.int64)
    req_slot_B = tl.load(req_slots_ptr + offset_B, row_B, other=0).to(tl.int64)
    last_token_B = tl.load(last_tokens_ptr + req_slot_B, row_B & (token_B < 0), other=0)
    out_ptr += offset_B
    tl.store(out_ptr, tl.where(token_B < 0, last_token_B, token_B), row_B)
    tl.store(out_ptr + stride, tl.load(positions_ptr + offset_B, row_B, other=0).to(tl.int64), row_B)
    tl.store(out_ptr + 2 * stride, tl.load(slots_ptr + offset_B, row_B, other=0).to(tl.int64), row_B)
    tl.store(out_ptr + 3 * stride, req_slot_B, row_B)
