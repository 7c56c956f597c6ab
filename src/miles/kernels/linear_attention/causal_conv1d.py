"""Causal depthwise conv1d within each sequence of a packed batch.

Shapes: T tokens, C channels, K taps, k earlier inputs (K - 1 times the dilation), B sequences, L = T + B * k: each
sequence's tokens after its k earlier inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from miles.kernels.linear_attention.chunked_scan import is_decode_step
from miles.kernels.numerics import Numerics


def causal_conv1d(
    x_TC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    lengths: Sequence[int],
    state_BCk: Tensor | None,
    *,
    numerics: Numerics,
    dilation: int = 1,
) -> tuple[Tensor, Tensor | None]:
    """Each token's weighted sum of itself (the last tap) and the k inputs before it, and the new state.

    ``state_BCk`` are the last k inputs of earlier tokens, zeros before the first; None: all sequences start here and no
    state is returned. Taps are ``dilation`` inputs apart.
    """
    assert len(x_TC) == sum(lengths), f"got {len(x_TC)} tokens for sequences of {sum(lengths)} in all"
    earlier = (weight_CK.shape[1] - 1) * dilation
    if state_BCk is not None and is_decode_step(lengths, len(x_TC)):
        window_BCx = torch.cat((state_BCk, x_TC.unsqueeze(-1)), -1)
        out_BC = _sum_taps(window_BCx.unbind(-1)[::dilation], weight_CK, bias_C, numerics)
        return out_BC.to(x_TC.dtype), window_BCx[..., 1:]
    index_T, head_X, tail_X = build_row_indices(tuple(lengths), earlier, x_TC.device)
    rows_LC = x_TC.new_zeros(len(x_TC) + len(lengths) * earlier, x_TC.shape[1]).index_copy_(0, index_T, x_TC)
    tail_BCk = None
    if state_BCk is not None:
        rows_LC.index_copy_(0, head_X, state_BCk.to(x_TC.dtype).transpose(1, 2).flatten(0, 1))
        tail_BCk = rows_LC.index_select(0, tail_X).unflatten(0, (len(lengths), earlier)).transpose(1, 2).contiguous()
    count = len(rows_LC) - earlier
    out_LC = _sum_taps([rows_LC[j : j + count] for j in range(0, earlier + 1, dilation)], weight_CK, bias_C, numerics)
    return out_LC.index_select(0, index_T - earlier).to(x_TC.dtype), tail_BCk


def _sum_taps(inputs_C: Sequence[Tensor], weight_CK: Tensor, bias_C: Tensor | None, numerics: Numerics) -> Tensor:
    """The sum in float32, tap by tap: one summation order for one token and for many.

    On a CPU ``addcmul`` rounds once or twice, depending on where an element is: batch-invariant sums round twice.
    """
    weight_KC = weight_CK.to(torch.promote_types(weight_CK.dtype, torch.float32)).t()
    out = inputs_C[0] * weight_KC[0]
    for x, weight_C in zip(inputs_C[1:], weight_KC[1:], strict=True):
        out = out + x * weight_C if numerics.batch_invariant else torch.addcmul(out, x, weight_C)
    return out if bias_C is None else out + bias_C


@lru_cache(maxsize=16)
def build_row_indices(lengths: tuple[int, ...], earlier: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Which of the L rows are tokens, which are earlier inputs, and which are each sequence's last ones."""
    length_B = np.asarray(lengths, dtype=np.int64)
    end_B = np.cumsum(length_B + earlier)
    index_T = np.arange(int(length_B.sum())) + earlier * (1 + np.repeat(np.arange(len(length_B)), length_B))
    head_Bk = (end_B - length_B - earlier)[:, None] + np.arange(earlier)
    tail_Bk = end_B[:, None] - earlier + np.arange(earlier)
    # Created outside inference mode, since a trainer in the same process saves it for backward.
    with torch.inference_mode(False), torch.no_grad():
        place, head, tail = (torch.from_numpy(x.ravel()).to(device) for x in (index_T, head_Bk, tail_Bk))
    return place, head, tail
