"""What the host sends of a recorded step, made into what its kernels read, in one launch.

Shapes: n rows, S seats, N entries that may be new in the table [R, M] of pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from miles.kernels.device_code import jit, ready, tl, triton

# Rows, and entries, that a program takes: one a thread, so that wide and narrow numbers lie with the same one.
_BLOCK = 128


class Begun(NamedTuple):
    """The rows of a step, as int64: their tokens, where these lie in their sequences and in the cache, their seats."""

    tokens_n: Tensor
    positions_n: Tensor
    slots_n: Tensor
    seats_n: Tensor


def begin(
    tokens_n: Tensor,
    positions_n: Tensor,
    slots_n: Tensor,
    seats_n: Tensor,
    *,
    drawn_S: Tensor,
    places_N: Tensor,
    pages_N: Tensor,
    table_RM: Tensor,
) -> Begun:
    """Widen what was sent as int32; a token below 0 is the one last drawn for its seat.

    ``pages_N`` go to their places in the table, counted through all of its rows. Its last place is nobody's: what is
    sent there need not arrive.
    """
    assert table_RM.is_contiguous() and len(places_N) == len(pages_N)
    if not ready(tokens_n):
        table_RM.view(-1).index_copy_(0, places_N.long(), pages_N)
        seats_wide_n = seats_n.long()
        known_n = torch.where(tokens_n < 0, drawn_S.index_select(0, seats_wide_n), tokens_n.long())
        return Begun(known_n, positions_n.long(), slots_n.long(), seats_wide_n)
    rows, news = len(tokens_n), len(places_N)
    # Each begins where a kernel may read sixteen bytes at once.
    stride = rows + rows % 2
    out_4n = torch.empty(4, stride, dtype=torch.int64, device=tokens_n.device)
    _begin[(triton.cdiv(max(rows, news), _BLOCK),)](
        *(tokens_n, positions_n, slots_n, seats_n, drawn_S, places_N, pages_N, table_RM, out_4n),
        *(rows, news, table_RM.numel() - 1, stride),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return Begun(*out_4n[:, :rows].unbind())


@jit
def _begin(
    tokens_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    seats_ptr: tl.tensor,
    drawn_ptr: tl.tensor,
    places_ptr: tl.tensor,
    pages_ptr: tl.tensor,
    table_ptr: tl.tensor,
    out_ptr: tl.tensor,
    rows: tl.tensor,
    news: tl.tensor,
    spare: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    at_B = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row_B, new_B = at_B < rows, at_B < news
    place_B = tl.load(places_ptr + at_B, new_B, other=0)
    tl.store(table_ptr + place_B, tl.load(pages_ptr + at_B, new_B, other=0), new_B & (place_B < spare))
    token_B = tl.load(tokens_ptr + at_B, row_B, other=0).to(tl.int64)
    seat_B = tl.load(seats_ptr + at_B, row_B, other=0).to(tl.int64)
    drawn_B = tl.load(drawn_ptr + seat_B, row_B & (token_B < 0), other=0)
    out_ptr += at_B
    tl.store(out_ptr, tl.where(token_B < 0, drawn_B, token_B), row_B)
    tl.store(out_ptr + stride, tl.load(positions_ptr + at_B, row_B, other=0).to(tl.int64), row_B)
    tl.store(out_ptr + 2 * stride, tl.load(slots_ptr + at_B, row_B, other=0).to(tl.int64), row_B)
    tl.store(out_ptr + 3 * stride, seat_B, row_B)
