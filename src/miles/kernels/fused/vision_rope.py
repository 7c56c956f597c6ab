"""Vision RoPE: queries and keys of a fused QKV projection rotated in one Triton kernel, forward and backward.

Shapes: P patches, H heads, d head_dim, C = 2 H d channels of the queries and keys of a patch.

Rotated in float32 and rounded once. The gradient of a rotation is the rotation by the negative angle, so the backward
needs the cosines and sines only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.fused.qk_norm_rope import rope_partner
from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton, use_triton_inference, use_triton_training

# Channels of a program: sixteen bytes for each thread of four warps.
_BLOCK = 1024


def can_rotate_fused(qkv_P3Hd: Tensor) -> bool:
    """Whether the fused kernel applies."""
    return use_triton_inference(qkv_P3Hd) or use_triton_training(qkv_P3Hd)


def rotate_queries_keys(
    qkv_P3Hd: Tensor, cos_sin_P2d: Tensor, *, interleaved: bool, halves: bool
) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys, [P, H, d] each, both views of one tensor.

    ``cos_sin_P2d`` are cosines and signed sines. ``interleaved`` rotations pair neighbouring channels, others those
    half a head apart. With ``halves`` each half of a head has pairs of its own; the result has their channels in the
    order of one rotation over the head: quarters 0, 2, 1, 3.
    """
    assert not (interleaved and halves), "pairs of neighbours are the same in halves"
    assert qkv_P3Hd.stride()[2:] == (qkv_P3Hd.shape[3], 1), "the heads of a patch must be contiguous"
    turned_P2Hd = _VisionRope.apply(qkv_P3Hd, cos_sin_P2d.contiguous(), interleaved, halves)
    assert isinstance(turned_P2Hd, Tensor)
    q_PHd, k_PHd = turned_P2Hd.unbind(1)
    return q_PHd, k_PHd


class _VisionRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_P3Hd: Tensor, cos_sin_P2d: Tensor, interleaved: bool, halves: bool) -> Tensor:
        patches, _, heads, dim = qkv_P3Hd.shape
        ctx.save_for_backward(cos_sin_P2d)
        ctx.options = interleaved, halves
        turned_P2Hd = qkv_P3Hd.new_empty(patches, 2, heads, dim)
        _launch(qkv_P3Hd, cos_sin_P2d, turned_P2Hd, interleaved, halves, backward=False)
        return turned_P2Hd

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_P2Hd: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (cos_sin_P2d,) = ctx.saved_tensors
        grad_P2Hd = grad_P2Hd.contiguous()
        patches, _, heads, dim = grad_P2Hd.shape
        grad_qkv_P3Hd = grad_P2Hd.new_zeros(patches, 3, heads, dim)
        _launch(grad_P2Hd, cos_sin_P2d, grad_qkv_P3Hd, *ctx.options, backward=True)
        return grad_qkv_P3Hd, None, None, None


def _launch(
    source: Tensor, cos_sin_P2d: Tensor, out: Tensor, interleaved: bool, halves: bool, *, backward: bool
) -> None:
    patches, _, heads, dim = source.shape
    channels = 2 * heads * dim
    if not patches:
        return
    with device_guard(source):
        _vision_rope_kernel[(triton.cdiv(patches * channels, _BLOCK),)](
            source,
            cos_sin_P2d,
            out,
            patches,
            source.stride(0),
            out.stride(0),
            CHANNELS=channels,
            DIM=dim,
            INTERLEAVED=interleaved,
            HALVES=halves,
            BACKWARD=backward,
            BLOCK=_BLOCK,
            num_warps=4,
        )


@jit
def _vision_rope_kernel(
    source_ptr: tl.tensor,
    rotation_ptr: tl.tensor,
    out_ptr: tl.tensor,
    patches: tl.tensor,
    source_stride: tl.tensor,
    out_stride: tl.tensor,
    CHANNELS: tl.constexpr,
    DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    HALVES: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    # Channels of all patches are one row, so that no lane is idle whatever the head dim.
    at_C = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    patch_C, channel_C = at_C // CHANNELS, at_C % CHANNELS
    valid_C = patch_C < patches
    column_C = channel_C % DIM
    head_C = channel_C - column_C
    partner_C = rope_partner(column_C, DIM, INTERLEAVED)
    cos_C = tl.load(rotation_ptr + patch_C * (2 * DIM) + column_C, valid_C, other=0.0)
    sin_C = tl.load(rotation_ptr + patch_C * (2 * DIM) + DIM + column_C, valid_C, other=0.0)
    # Of both tensors one has the channels in the projection's order, the other in that of the rotation.
    own_C, other_C = column_C, partner_C
    written_C = column_C
    if BACKWARD:
        sin_C = -sin_C
        written_C = _projection_channel(column_C, DIM, HALVES)
    else:
        own_C = _projection_channel(column_C, DIM, HALVES)
        other_C = _projection_channel(partner_C, DIM, HALVES)
    source_C = source_ptr + patch_C * source_stride + head_C
    own_C = tl.load(source_C + own_C, valid_C, other=0.0).to(tl.float32)
    other_C = tl.load(source_C + other_C, valid_C, other=0.0).to(tl.float32)
    out_C = tl.fma(other_C, sin_C, own_C * cos_C)
    tl.store(out_ptr + patch_C * out_stride + head_C + written_C, out_C.to(out_ptr.dtype.element_ty), valid_C)  # pyright: ignore[reportAttributeAccessIssue]


@jit
def _projection_channel(column_C: tl.tensor, DIM: tl.constexpr, HALVES: tl.constexpr) -> tl.tensor:
    """The channel of the projection that is this channel of the rotation: the middle quarters are swapped."""
    if HALVES:
        quarter_C = column_C // (DIM // 4)
        column_C = tl.where(quarter_C == 1, column_C + DIM // 4, column_C)
        column_C = tl.where(quarter_C == 2, column_C - DIM // 4, column_C)
    return column_C
