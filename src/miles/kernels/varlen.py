"""Causal attention within each sequence of a packed batch.

Shapes: T tokens, H query heads, G key-value heads, d head_dim, B sequences of a block, S its longest,
P all slots of all blocks, padding included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from inspect import signature
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F


def _blocks(lengths: Sequence[int]) -> list[list[int]]:
    """Sequences of like length together, so that each padded block is less than twice its tokens."""
    blocks: list[list[int]] = []
    longest = used = 0
    for index in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i]):
        if blocks and (len(blocks[-1]) + 1) * longest < 2 * (used + lengths[index]):
            blocks[-1].append(index)
            used += lengths[index]
        else:
            blocks.append([index])
            longest = used = lengths[index]
    for block in blocks:
        block.sort()
    return blocks


@cache
def _kernel() -> tuple[Callable[..., Any], dict[str, bool]]:
    """Torch's varlen attention. Newer releases share key-value heads only when told to, older ones always do."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


class _Pad(torch.autograd.Function):
    """Tokens into slots. A padding slot repeats some token: to the right of a sequence nobody looks at it."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, token_P: Tensor, slot_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.slot_T = slot_T
        return q.index_select(0, token_P), k.index_select(0, token_P), v.index_select(0, token_P)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        slot_T = ctx.slot_T
        return dq.index_select(0, slot_T), dk.index_select(0, slot_T), dv.index_select(0, slot_T), None, None


class _Unpad(torch.autograd.Function):
    """Slots back into tokens. A padding slot's gradient is zero, so it teaches no key or value."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, slot_T: Tensor) -> Tensor:
        ctx.slot_T, ctx.slots = slot_T, len(out)
        return out.index_select(0, slot_T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        padded = grad.new_zeros(ctx.slots, *grad.shape[1:])
        padded[ctx.slot_T] = grad
        return padded, None


class PackedAttend:
    """An ``Attend`` over a packed batch of ``lengths``; made once per forward, used by every layer.

    On CUDA in half precision torch's varlen kernel does it; otherwise sequences of like length share
    a padded block and each block is one call.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str) -> None:
        self._lengths = [int(n) for n in lengths]
        self._total = sum(self._lengths)
        self._device = torch.device(device)
        if self._device.type == "cuda":
            self._ends = torch.tensor([0, *accumulate(self._lengths)], dtype=torch.int32).to(
                self._device, non_blocking=True
            )
        self._plan: tuple[list[tuple[int, int]], Tensor | None, Tensor | None] | None = None

    def __call__(self, layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        assert len(q_THd) == self._total, f"{len(q_THd)} tokens for sequences of {self._total} in all"
        if q_THd.is_cuda and q_THd.dtype in (torch.bfloat16, torch.float16):
            return self._varlen(q_THd, k_TGd, v_TGd)
        return self._padded(q_THd, k_TGd, v_TGd)

    def _varlen(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        varlen, options = _kernel()
        longest = max(self._lengths)
        return varlen(q_THd, k_TGd, v_TGd, self._ends, self._ends, longest, longest, window_size=(-1, 0), **options)

    def _layout(self) -> tuple[list[tuple[int, int]], Tensor | None, Tensor | None]:
        """Each block's (sequences, longest), which token fills each slot, and where each token sits.

        A single block without padding needs no moving of rows: both indices are None.
        """
        lengths = np.asarray(self._lengths)
        starts = np.cumsum(lengths) - lengths
        shapes: list[tuple[int, int]] = []
        tokens: list[NDArray[np.int64]] = []
        slot_T = np.empty(self._total, dtype=np.int64)
        used = 0
        for block in _blocks(self._lengths):
            place_S = np.arange(lengths[block].max())
            real_BS = place_S < lengths[block, None]
            token_BS = starts[block, None] + place_S * real_BS
            slot_T[token_BS[real_BS]] = used + np.flatnonzero(real_BS)
            shapes.append(token_BS.shape)
            tokens.append(token_BS.ravel())
            used += token_BS.size
        if len(shapes) <= 1 and used == self._total:
            return shapes, None, None
        token_P = torch.from_numpy(np.concatenate(tokens)).to(self._device)
        return shapes, token_P, torch.from_numpy(slot_T).to(self._device)

    def _padded(self, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        if self._plan is None:
            self._plan = self._layout()
        shapes, token_P, slot_T = self._plan
        gqa = q_THd.shape[1] != k_TGd.shape[1]
        if token_P is None or slot_T is None:
            if not shapes:
                return q_THd
            return _block(q_THd, k_TGd, v_TGd, *shapes[0], gqa)
        q, k, v = _Pad.apply(q_THd, k_TGd, v_TGd, token_P, slot_T)  # pyright: ignore[reportGeneralTypeIssues]
        if len(shapes) == 1:
            return _Unpad.apply(_block(q, k, v, *shapes[0], gqa), slot_T)  # pyright: ignore[reportReturnType]
        sizes = [b * s for b, s in shapes]
        parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), shapes, strict=True)
        out = torch.cat([_block(qb, kb, vb, *shape, gqa) for qb, kb, vb, shape in parts])
        return _Unpad.apply(out, slot_T)  # pyright: ignore[reportReturnType]


def _block(q: Tensor, k: Tensor, v: Tensor, sequences: int, longest: int, gqa: bool) -> Tensor:
    q_BHSd, k_BGSd, v_BGSd = (x.unflatten(0, (sequences, longest)).transpose(1, 2) for x in (q, k, v))
    out_BHSd = F.scaled_dot_product_attention(q_BHSd, k_BGSd, v_BGSd, is_causal=True, enable_gqa=gqa)
    return out_BHSd.transpose(1, 2).flatten(0, 1)
