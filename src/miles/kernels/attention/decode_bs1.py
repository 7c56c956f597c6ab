"""Batch-size-1 decode attention in one Triton kernel: QK-norm, RoPE, KV write, split-KV attention, reduction.

Shapes: H query heads, G key-value heads of r query heads each (in scratch R >= r), d head_dim, N = (H + 2 G) * d; S
splits in scratch (the new token is one, the others share the past), elsewhere slots of the KV cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from miles.kernels.attention.params import PagedAttentionParams
from miles.kernels.attention.tile_config import build_kernel_config, pad_dim, scale_tensors
from miles.kernels.fused.qk_norm_rope import QKNormRopeParams, rounds_norm
from miles.kernels.runtime.triton_compat import pdl_options

# The most splits of one key-value head, programs per SM, and elements of partial results that are reduced at once.
_MAX_SPLITS = 64
_RESIDENT = 2
_REDUCED_ELEMENTS = 8192
# Query heads per key-value head beyond which a program has eight warps.
_FOUR_WARPS_QUERIES = 4
# Query heads per key-value head, and head dim, up to which this kernel is faster than several launches.
MAX_QUERIES_PER_KV = 8
MAX_HEAD_DIM = 256


class DecodeScratch(NamedTuple):
    """Partial results until all programs of a key-value head are done; ``done_G`` is zero between launches."""

    part_GSRd: Tensor
    sum_GSR: Tensor
    done_G: Tensor


def allocate_scratch(
    kv_heads: int, queries_per_kv: int, head_dim: int, *, sms: int, device: torch.device
) -> DecodeScratch:
    """Scratch for layers of ``kv_heads`` key-value heads with ``queries_per_kv`` query heads each."""
    splits = 1 << (max(2, min(_MAX_SPLITS, sms * _RESIDENT // kv_heads)).bit_length() - 1)
    shape = (kv_heads, splits, 1 << (queries_per_kv - 1).bit_length())
    return DecodeScratch(
        torch.zeros(*shape, head_dim, device=device),
        torch.zeros(shape, device=device),
        torch.zeros(kv_heads, dtype=torch.int32, device=device),
    )


def decode_bs1_attention(
    qkv_1N: Tensor,
    heads: QKNormRopeParams,
    k_SGd: Tensor,
    v_SGd: Tensor,
    block_table_SP: Tensor,
    req_slot_1: Tensor,
    slot_1: Tensor,
    params: PagedAttentionParams,
    scratch: DecodeScratch,
    start_1: Tensor | None = None,
) -> Tensor:
    """Attention of one new token over its sequence, [1, H * d]; writes its key and value to ``slot_1`` unless negative.

    It is behind ``start_1`` others (None: its rope position); its pages are row ``req_slot_1`` of the block table.
    """
    from miles.kernels.attention.decode_bs1_triton import decode_bs1_kernel  # on first use, when Triton compiles it

    assert heads.positions_T is not None and qkv_1N.is_contiguous()
    assert heads.rotation is None or heads.rotation.is_contiguous()
    config = build_kernel_config(qkv_1N.view(1, -1, heads.head_dim)[:, : heads.heads], k_SGd, v_SGd, params)
    kv_heads, splits, rows, head_dim = scratch.part_GSRd.shape
    assert (kv_heads, head_dim) == (config.G, config.d) and config.r <= rows
    tokens = 64 if qkv_1N.itemsize == 2 and config.D <= 128 else 32 if qkv_1N.itemsize == 2 else 16
    warps = 4 if rows <= _FOUR_WARPS_QUERIES else 8
    out_1N = torch.empty(1, heads.heads * head_dim, dtype=qkv_1N.dtype, device=qkv_1N.device)
    decode_bs1_kernel[(kv_heads, splits - 1)](
        qkv_1N,
        k_SGd,
        v_SGd,
        *scale_tensors(params, qkv_1N),
        block_table_SP,
        req_slot_1,
        slot_1,
        heads.positions_T if start_1 is None else start_1,
        heads.positions_T,
        heads.rotation,
        heads.q_weight_d,
        heads.k_weight_d,
        qkv_1N if params.sinks_H is None else params.sinks_H,
        *scratch,
        out_1N,
        block_table_SP.stride(0),
        params.scale,
        params.softcap or 0.0,
        heads.eps,
        heads.offset,
        CFG=config._replace(M=pad_dim(rows), N=tokens, R=rows),
        SPLITS=splits,
        ROTARY_DIM=0 if heads.rotation is None else heads.rotation.shape[-1],
        INTERLEAVED=heads.interleaved,
        NORM=heads.q_weight_d is not None,
        ROUND_NORM=rounds_norm(heads, qkv_1N.dtype),
        C=max(1, min(splits, _REDUCED_ELEMENTS // (rows * config.D))),
        Q=max(rows, warps),
        num_warps=warps,
        num_stages=1,
        **pdl_options(qkv_1N.device),
    )
    return out_1N
