"""Bidirectional varlen attention of vision towers: every token attends to all tokens of its segment.

Shapes: T tokens, H heads, d channels, B segments of S tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from miles.kernels.attention.bidirectional_triton import TILE_QUERIES, attend_segments, can_attend_segments
from miles.kernels.attention.varlen import HALF_DTYPES, can_fuse, load_varlen_kernel, pad_channels, pad_head_dim
from miles.kernels.numerics import Numerics

# In order of preference, for dtypes that the varlen kernel does not support.
_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Segments:
    """Consecutive segments of a packed batch of tokens, with the tensors that attention needs, built once.

    >>> Segments([2, 3, 2], "cpu").groups
    ((2, 2), (3, 1))
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str) -> None:
        self.lengths = tuple(lengths)
        self.longest = max(lengths)
        self._device = device

    @cached_property
    def cu_seqlens(self) -> Tensor:
        """Cumulative lengths, [B + 1] int32."""
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self._device)

    @cached_property
    def tiles(self) -> Tensor:
        """The first query of every tile of queries, and the begin and end of its segment, [tiles, 3] int32."""
        ends = np.cumsum(self.lengths)
        parts = [
            np.stack(np.broadcast_arrays(np.arange(end - length, end, TILE_QUERIES), end - length, end), 1)
            for end, length in zip(ends.tolist(), self.lengths, strict=True)
        ]
        return torch.from_numpy(np.concatenate(parts).astype(np.int32)).to(self._device)

    @cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The different lengths, in the order of their first segment, and how many segments have each."""
        return tuple((length, self.lengths.count(length)) for length in dict.fromkeys(self.lengths))

    @cached_property
    def order(self) -> tuple[Tensor, Tensor] | None:
        """The tokens sorted by group and the inverse, [T] each; None if they are sorted already."""
        lengths = np.array(self.lengths)
        starts = np.cumsum(lengths) - lengths
        rows = [(starts[lengths == length][:, None] + np.arange(length)).reshape(-1) for length, _ in self.groups]
        order = np.concatenate(rows)
        if (np.diff(order) == 1).all():
            return None
        return torch.from_numpy(order).to(self._device), torch.from_numpy(order.argsort()).to(self._device)


def bidirectional_attention(
    q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, segments: Segments, scale: float, *, numerics: Numerics
) -> Tensor:
    """Attention within each segment, [T, H, d].

    On a GPU in half precision all segments are one call of a Triton kernel (in inference, where a GPU has TMA) or of
    torch's varlen kernel; elsewhere those of one length are one batch of SDPA.
    """
    if not numerics.batch_invariant and can_attend_segments(q_THd, k_THd, v_THd):
        return attend_segments(q_THd, k_THd, v_THd, segments.tiles, scale)
    if can_fuse(q_THd, v_THd):
        width = pad_head_dim(q_THd, v_THd)
        ends, longest = segments.cu_seqlens, segments.longest
        q, k, v = (pad_channels(x, width) for x in (q_THd, k_THd, v_THd))
        kernel, _ = load_varlen_kernel()
        out_THd = kernel(q, k, v, ends, ends, longest, longest, scale=scale)
        return out_THd[..., : v_THd.shape[-1]]
    order = segments.order
    if order is not None:
        q_THd, k_THd, v_THd = (x.index_select(0, order[0]) for x in (q_THd, k_THd, v_THd))
    parts: list[Tensor] = []
    start = 0
    for length, count in segments.groups:
        rows = slice(start, start + length * count)
        parts.append(_attend_batch(q_THd[rows], k_THd[rows], v_THd[rows], count, scale))
        start += length * count
    out_THd = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out_THd if order is None else out_THd.index_select(0, order[1])


def _attend_batch(q_THd: Tensor, k_THd: Tensor, v_THd: Tensor, count: int, scale: float) -> Tensor:
    dtype = q_THd.dtype
    if dtype in HALF_DTYPES and not q_THd.is_cuda:  # the CPU kernel is slow in half precision
        q_THd, k_THd, v_THd = q_THd.float(), k_THd.float(), v_THd.float()
    q_BHSd, k_BHSd, v_BHSd = (x.unflatten(0, (count, -1)).transpose(1, 2) for x in (q_THd, k_THd, v_THd))
    if q_THd.is_cuda:
        with sdpa_kernel(_BACKENDS, set_priority=True):
            out_BHSd = F.scaled_dot_product_attention(q_BHSd, k_BHSd, v_BHSd, scale=scale)
    else:
        out_BHSd = F.scaled_dot_product_attention(q_BHSd, k_BHSd, v_BHSd, scale=scale)
    return out_BHSd.transpose(1, 2).flatten(0, 1).to(dtype)
