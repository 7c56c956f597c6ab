"""Attention of a row that is alone in its step, in one launch: normalise, rotate, remember, look back, join.

Shapes: H query heads, G key-value heads of r each, in scratch R >= r, d channels of a head, N = (H + 2G) * d, S parts
of what is seen in scratch (the new token, and what programs take of the past), else slots of the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from miles.kernels.device_code import early
from miles.kernels.prepare import Heads
from miles.kernels.tiling import Look, how, power

# The most parts of what one key-value head sees, how many programs a processor is given, and numbers that are joined at
# once.
_PARTS, _RESIDENT, _JOINED = 64, 2, 8192
# Query heads of a key-value head beyond which a program has more warps.
_FEW = 4
# Query heads of a key-value head, and channels, up to which this is sooner done than several launches.
MOST_QUERIES, MOST_CHANNELS = 8, 256


class Scratch(NamedTuple):
    """Where programs leave what they saw until all of a key-value head have; ``done_G`` is zero between launches."""

    part_GSRd: Tensor
    sum_GSR: Tensor
    done_G: Tensor


def scratch(groups: int, each: int, width: int, *, sms: int, device: torch.device) -> Scratch:
    """Room for layers of ``groups`` key-value heads with ``each`` query heads of ``width`` channels."""
    parts = 1 << (max(2, min(_PARTS, sms * _RESIDENT // groups)).bit_length() - 1)
    shape = (groups, parts, 1 << (each - 1).bit_length())
    return Scratch(
        torch.zeros(*shape, width, device=device),
        torch.zeros(shape, device=device),
        torch.zeros(groups, dtype=torch.int32, device=device),
    )


def attend_one(
    qkv_1N: Tensor,
    heads: Heads,
    k_SGd: Tensor,
    v_SGd: Tensor,
    pages_SP: Tensor,
    seat_1: Tensor,
    slot_1: Tensor,
    look: Look,
    held: Scratch,
) -> Tensor:
    """What the heads of one new token see, [1, H * d]; its key and value go to their slot, unless that is negative.

    It lies behind all other tokens of its sequence, whose pages ``pages_SP`` has at ``seat_1``.
    """
    # Read by its compiler when it is first needed.
    from miles.kernels.alone_code import attend_alone

    assert heads.positions_T is not None and qkv_1N.is_contiguous()
    assert heads.rotation is None or heads.rotation.is_contiguous()
    compiled = how(qkv_1N.view(1, -1, heads.head_dim)[:, : heads.heads], k_SGd, v_SGd, look)
    groups, parts, room, width = held.part_GSRd.shape
    assert (groups, width) == (compiled.G, compiled.d) and compiled.r <= room
    tokens = 64 if qkv_1N.itemsize == 2 and compiled.D <= 128 else 32 if qkv_1N.itemsize == 2 else 16
    compiled = compiled._replace(M=power(room), N=tokens, R=room)
    warps = 4 if room <= _FEW else 8
    narrow = False
    if heads.q_weight_d is not None:
        scale = torch.promote_types(heads.q_weight_d.dtype, torch.float32) if heads.offset else heads.q_weight_d.dtype
        narrow = torch.promote_types(scale, qkv_1N.dtype) == qkv_1N.dtype
    out_1N = torch.empty(1, heads.heads * width, dtype=qkv_1N.dtype, device=qkv_1N.device)
    attend_alone[(groups, parts - 1)](
        *(qkv_1N, k_SGd, v_SGd, pages_SP, seat_1, slot_1, heads.positions_T, heads.rotation),
        *(heads.q_weight_d, heads.k_weight_d, qkv_1N if look.sinks_H is None else look.sinks_H, *held, out_1N),
        *(pages_SP.stride(0), look.scale, look.softcap or 0.0, heads.eps, heads.offset),
        HOW=compiled,
        PARTS=parts,
        TURNED=0 if heads.rotation is None else heads.rotation.shape[-1],
        INTERLEAVED=heads.interleaved,
        NORM=heads.q_weight_d is not None,
        NARROW=narrow,
        C=max(1, min(parts, _JOINED // (room * compiled.D))),
        Q=max(room, warps),
        num_warps=warps,
        num_stages=1,
        **early(qkv_1N.device),
    )
    return out_1N
