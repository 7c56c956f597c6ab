"""Launches that are compiled ahead of time: every Triton kernel, with the shapes of models that people train.

Shapes: T tokens, D features, I inner features, H query heads, G key-value heads, d channels of a head, E experts,
k of them per token, V vocabulary, S slots of a cache, P pages of a sequence, N outputs, K inputs.

A case calls the launcher that the engine or the trainer calls, with tensors that have no memory (``fake_gpu``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from tests.kernels.compiled.fake_gpu import DEVICE, NotUsed, run_program
from torch import Tensor

from miles.kernels.attention import decode_bs1, dense_prefill, gather_rows, mla, paged_decode, paged_prefill
from miles.kernels.attention.bidirectional_triton import attend_segments, has_tma
from miles.kernels.attention.params import AttentionParams, PagedAttentionParams
from miles.kernels.attention.split_kv import SplitKVPlan
from miles.kernels.attention.tile_config import max_prefix_queries
from miles.kernels.batch_invariant import attention as invariant_attention
from miles.kernels.batch_invariant import attention_paged as invariant_paged
from miles.kernels.batch_invariant import (
    expert_sort,
    grouped_gemm_triton,
    linear_triton,
    logprob_triton,
    recurrent_scan,
)
from miles.kernels.batch_invariant import rms_norm as invariant_norm
from miles.kernels.batch_invariant import topk_router as invariant_router
from miles.kernels.batch_invariant.attention_split_kv import BatchInvariantSplitKVPlan
from miles.kernels.fused import (
    activation,
    adamw,
    fused_logprob,
    gemv,
    grad_sum,
    kv_cache_fp8,
    layer_norm,
    qk_norm_rope,
    qk_norm_rope_autograd,
    rms_norm,
    rms_norm_autograd,
    vision_rope,
)
from miles.kernels.linear_attention import decode_step
from miles.kernels.lora import experts as lora_experts
from miles.kernels.lora import grouped as lora_grouped
from miles.kernels.moe import fused_moe, moe_gemv, token_permutation, topk_router
from miles.kernels.moe.grouped_gemm import SortedRows
from miles.kernels.numerics import FAST
from miles.kernels.quantized import (
    activation_quant,
    dot_scaled,
    fp8_gemm,
    fp8_moe,
    fp8_moe_backward,
    packed_weight,
    quantize_triton,
    transposed_quant,
    weight_only_gemm,
    weight_only_gemv,
)
from miles.kernels.runtime import checksum
from miles.kernels.runtime.graph_inputs import unpack_graph_inputs
from miles.kernels.runtime.kv_cache import DecodeState, KVScales
from miles.kernels.sampling import sample
from miles.precision.formats import FORMATS
from miles.precision.quantized_tensor import QuantizedActivation, QuantizedTensor

CASES: dict[str, Callable[[], None]] = {}
BF16, F32 = torch.bfloat16, torch.float32
# Qwen3-8B: features, inner features, heads, key-value heads, channels of a head, vocabulary; Qwen3-30B-A3B: experts.
D, INNER, H, G, HEAD, V = 4096, 12288, 32, 8, 128, 151_936
MOE_D, MOE_I, E, TOP_K = 2048, 768, 128, 8
PAGE = 16


def case(*variants: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register a function as a case, or one case for each of its arguments."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__.removeprefix("_")
        for arguments in variants or ((),):
            arguments = arguments if isinstance(arguments, tuple) else (arguments,)
            label = " ".join(
                [name.replace("_", " "), *(str(each).removeprefix("torch.") for each in arguments if each != "")]
            )
            CASES[label] = partial(function, *arguments)
        return function

    return register


def _empty(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def _ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
    return _empty(*shape, dtype=dtype)


def _require(used: bool, reason: str) -> None:
    if not used:
        raise NotUsed(reason)


# -- attention --------------------------------------------------------------------------------


def _paged(width: int, kv_heads: int, dtype: torch.dtype, fp8: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values, block table and request slots."""
    cached = torch.uint8 if fp8 else dtype
    shape = (1024 * PAGE, kv_heads, width)
    return _empty(*shape, dtype=cached), _empty(*shape, dtype=cached), _ints(64, 64), _ints(8, dtype=torch.int64)


def _scales(fp8: bool, heads: int) -> KVScales | None:
    return KVScales(_empty(1024, heads, PAGE, dtype=F32), _empty(1024, heads, PAGE, dtype=F32)) if fp8 else None


def _plan(plan_type: type[SplitKVPlan] = SplitKVPlan, queries: int = 64) -> SplitKVPlan:
    return plan_type(64, 1024, torch.device("cpu"), prefix_queries=queries)


def _params(fp8: bool = False, heads: int = G, **options: Any) -> PagedAttentionParams:
    return PagedAttentionParams(PAGE, 0.1, **options)._replace(kv_scales=_scales(fp8, heads))


@case((64, BF16, ""), (128, BF16, ""), (128, BF16, "fp8"), (256, BF16, ""), (512, BF16, ""), (128, F32, ""))
def _paged_decode(width: int, dtype: torch.dtype, cache: str) -> None:
    k, v, table, slots = _paged(width, G, dtype, bool(cache))
    q = _empty(8, H, width, dtype=dtype)
    params, plan = _params(bool(cache)), _plan(queries=max_prefix_queries(width))
    paged_decode.decode_attention(q, k, v, table, slots, plan, params, has_prefixes=True)


@case((64, BF16, ""), (128, BF16, ""), (128, BF16, "fp8"), (256, BF16, ""), (512, BF16, ""), (128, F32, ""))
def _paged_prefill(width: int, dtype: torch.dtype, cache: str) -> None:
    k, v, table, _ = _paged(width, G, dtype, bool(cache))
    q = _empty(512, H, width, dtype=dtype)
    paged_prefill.prefill_attention(q, k, v, table, _ints(4, 4), _params(bool(cache)))


@case("", "fp8")
def _mla_decode(cache: str) -> None:
    k, _, table, slots = _paged(576, 1, BF16, bool(cache))
    params = _params(bool(cache), 2)
    mla.mla_decode_attention(_empty(8, 16, 576), k, table, slots, _plan(), params, value_dim=512, has_prefixes=True)
    mla.mla_decode_attention(_empty(8, 128, 576), k, table, slots, _plan(), params, value_dim=512, has_prefixes=True)


@case("", "fp8")
def _mla_prefill(cache: str) -> None:
    k, _, table, _ = _paged(576, 1, BF16, bool(cache))
    mla.mla_prefill_attention(_empty(512, 16, 576), k, table, _ints(4, 4), _params(bool(cache), 2), value_dim=512)


@case((128, ""), (128, "fp8"), (256, ""))
def _decode_batch_1(width: int, cache: str) -> None:
    k, v, table, slots = _paged(width, G, BF16, bool(cache))
    params = qk_norm_rope.QKNormRopeParams(
        heads=H,
        kv_heads=G,
        head_dim=width,
        rotation=_empty(4096, 2, width, dtype=F32),
        positions_T=_ints(1, dtype=torch.int64),
        interleaved=False,
        q_weight_d=_empty(width),
        k_weight_d=_empty(width),
        eps=1e-6,
        offset=0.0,
    )
    scratch = decode_bs1.allocate_scratch(G, H // G, width, sms=132, device=DEVICE)
    decode_bs1.decode_bs1_attention(
        _empty(1, (H + 2 * G) * width), params, k, v, table, slots[:1], slots[:1], _params(bool(cache)), scratch
    )


@case(64, 72, 128)
def _vision_attention(width: int) -> None:
    _require(has_tma(DEVICE), "torch's attention is used: no TMA")
    qkv = _empty(1024, 3, 16, width)
    attend_segments(*qkv.unbind(1), _ints(8, 3), 0.1)


@case((64, BF16), (128, BF16), (256, BF16), (128, F32))
def _batch_invariant_decode(width: int, dtype: torch.dtype) -> None:
    k, v, table, slots = _paged(width, G, dtype, False)
    plan: Any = _plan(BatchInvariantSplitKVPlan, 32)
    q = _empty(8, H, width, dtype=dtype)
    invariant_paged.decode_attention(q, k, v, table, slots, plan, _params(), has_prefixes=True)


@case((64, BF16), (128, BF16), (256, BF16), (128, F32))
def _batch_invariant_prefill(width: int, dtype: torch.dtype) -> None:
    k, v, table, _ = _paged(width, G, dtype, False)
    invariant_paged.prefill_attention(_empty(512, H, width, dtype=dtype), k, v, table, _ints(4, 4), _params())


@case((64, BF16), (128, BF16), (256, BF16), (128, F32))
def _batch_invariant_attention_training(width: int, dtype: torch.dtype) -> None:
    keys: tuple[Any, ...] = ("queries", 32, 64, 128)
    tiles = {(DEVICE, key): _ints(8, 4 if key == "queries" else 6) for key in keys}
    batch: Any = SimpleNamespace(tiles=tiles, spans=SimpleNamespace(ends_T=None))
    q, k = _empty(512, H, width, dtype=dtype), _empty(512, G, width, dtype=dtype)
    params = AttentionParams(scale=0.1)
    out, lse = invariant_attention.launch_forward(q, k, k, batch, params, None)
    invariant_attention.launch_backward(out, (q, k, k, out, lse), batch, params)


# -- norms, rotations, activations ------------------------------------------------------------


@case(D, 1536)
def _rms_norm(width: int) -> None:
    with torch.inference_mode():
        x, weight = _empty(64, width), _empty(width)
        rms_norm.rms_norm(x, weight, 1e-6, numerics=FAST)
        rms_norm.add_rms_norm(x, x, weight, 1e-6, numerics=FAST)


@case(D, 1536)
def _rms_norm_training(width: int) -> None:
    x, weight = _empty(512, width), _empty(width)
    _, _, scale = rms_norm_autograd._launch_forward(x, x, weight, 1e-6, 0.0)
    rms_norm_autograd.rms_norm_backward(x, x, x, weight, scale, 0.0, True)


@case(D)
def _batch_invariant_rms_norm(width: int) -> None:
    invariant_norm._launch(_empty(64, width), _empty(64, width), _empty(width), 1e-6, 0.0)


@case("gated delta", "kimi delta", "mamba-2")
def _batch_invariant_scan(rule: str) -> None:
    """Qwen3-Next, Kimi-Linear and Nemotron-H: heads, channels of a key and of a value."""
    heads, keys, values = (64, 128, 64) if rule == "mamba-2" else (32, 128, 128)
    q, v = _empty(64, heads, keys, dtype=F32), _empty(64, heads, values, dtype=F32)
    decay = q if rule == "kimi delta" else _empty(64, heads, 1, dtype=F32)
    beta = None if rule == "mamba-2" else _empty(64, heads, dtype=F32)
    inputs = recurrent_scan.ScanInputs(q, q, v, decay, beta)
    recurrent_scan.launch_scan(inputs, [63, 1], _empty(2, heads, keys, values, dtype=F32))


def _decode_state(channels: int, kernel: int, *state: int) -> DecodeState:
    """Inputs of a convolution and the state of a head, in rows of a pool, for 8 sequences."""
    rows = _ints(8, dtype=torch.int64)
    tensors = (_empty(64, channels, kernel - 1), _empty(64, *state, dtype=F32))
    return DecodeState(tensors, rows, rows, _empty(8, dtype=torch.bool))


@case("", "gated")
def _conv_step(gated: str) -> None:
    """Qwen3-Next's convolution, and that of LFM2."""
    channels, kernel = (2048, 3) if gated else (8192, 4)
    state = _decode_state(channels, kernel, 1)
    x_BC, weight_CK = _empty(8, channels), _empty(channels, kernel)
    gates = (x_BC, x_BC) if gated else None
    decode_step.conv_step(x_BC, weight_CK, None, state.tensors[0], state, silu=not gated, gates=gates)


@case("gated delta", "kimi delta")
def _delta_step(rule: str) -> None:
    """Qwen3-Next's heads, and those of Kimi-Linear."""
    has_channels = rule == "kimi delta"
    key_heads, heads, size = (32, 32, 128) if has_channels else (16, 32, 128)
    decays = heads * size if has_channels else heads
    layer = decode_step.DeltaStep(
        key_heads=key_heads,
        value_heads=heads,
        key_dim=size,
        value_dim=size,
        log_rate_H=_empty(heads),
        dt_bias=_empty(decays),
        weight_v=_empty(size),
        eps=1e-6,
        silu_gate=not has_channels,
    )
    qkv_BC = _empty(8, (2 * key_heads + heads) * size)
    state = _decode_state(len(qkv_BC[0]), 4, heads, size, size)
    decode_step.delta_step(qkv_BC, _empty(8, decays), _empty(8, heads), _empty(8, heads * size), layer, state)


@case()
def _ssd_step() -> None:
    """Nemotron-3-Nano's Mamba-2 heads and norm."""
    heads, channels, groups, size = 64, 64, 8, 128
    inner = heads * channels
    xbc_BC = _empty(8, inner + 2 * groups * size)
    state = _decode_state(len(xbc_BC[0]), 4, heads, channels, size)
    rates = [_empty(heads) for _ in range(3)]
    y_BI = decode_step.ssd_step(xbc_BC, _empty(8, heads), *rates, state, groups=groups, step_limit=(0.0, 1e30))
    decode_step.gated_group_norm(y_BI, _empty(8, inner), _empty(inner), 1e-5, groups)


@case(1152)
def _layer_norm(width: int) -> None:
    with torch.inference_mode():
        x = _empty(64, width)
        layer_norm.add_layer_norm(x, x, x[0], x[0], 1e-6, numerics=FAST)


@case("", "fp8")
def _qk_norm_rope(cache: str) -> None:
    k, v, _, slots = _paged(HEAD, G, BF16, bool(cache))
    params = qk_norm_rope.QKNormRopeParams(
        heads=H,
        kv_heads=G,
        head_dim=HEAD,
        rotation=_empty(4096, 2, HEAD, dtype=F32),
        positions_T=slots,
        interleaved=False,
        q_weight_d=_empty(HEAD),
        k_weight_d=_empty(HEAD),
        eps=1e-6,
        offset=0.0,
    )
    with torch.inference_mode():
        qkv = _empty(8, (H + 2 * G) * HEAD)
        pdl = qk_norm_rope.select_pdl_options(qkv, slots)
        qk_norm_rope.launch_qk_norm_rope(qkv, params, k, v, slots, False, pdl, _scales(bool(cache), G))


@case((H, G), (14, 2))
def _qk_norm_rope_training(heads: int, kv_heads: int) -> None:
    shape = qk_norm_rope.QKVShape(heads=heads, kv_heads=kv_heads, head_dim=HEAD)
    qkv, rotation, weight = _empty(512, shape.rows * HEAD), _empty(512, 2, HEAD), _empty(HEAD)
    context = SimpleNamespace(save_for_backward=lambda *tensors: None)
    q, k, v = qk_norm_rope_autograd._QKNormRope.forward(context, qkv, rotation, weight, weight, shape)
    qk_norm_rope_autograd.qk_norm_rope_backward(q, k, v, (qkv, rotation, weight, weight), shape)


@case()
def _gathered_row_gradients() -> None:
    rows = np.array([0, 1, 0, 2, 0, 1])
    gather_rows.sum_copies(_empty(6, G, HEAD), gather_rows.RowGather(rows, 3, DEVICE))


@case()
def _gradient_sum() -> None:
    total = grad_sum.launch_add_grad(None, _empty(9000))
    grad_sum.launch_add_grad(total, _empty(9000))


@case(128, 64)
def _partial_attention(width: int) -> None:
    out, lse = _empty(4096, H, width), _empty(1, H, 4096, 1, dtype=torch.float32)
    dense_prefill.merge_partial_attention(out, lse, out.transpose(0, 1)[None], lse)


@case("", "clipped")
def _adamw(kind: str) -> None:
    wide = partial(_empty, 9000, dtype=torch.float32)
    params = adamw.AdamwParams(lr=1e-5, beta1=0.9, beta2=0.98, eps=1e-8, weight_decay=0.1, step=1)
    scale = _empty(dtype=torch.float32) if kind else None
    adamw.fused_adamw(_empty(9000), wide(), wide(), (wide(), wide()), params, scale=scale)


@case()
def _token_permutation() -> None:
    x, weights, place = _empty(64 * 8, D), _empty(64, 8), _ints(64 * 8, dtype=torch.int64)
    out = token_permutation.sum_choices(x, weights, place, 8)
    token_permutation.sum_choices(x, None, place, 8)
    token_permutation.spread_gradient(out, x, weights, place)


@case()
def _vision_rope() -> None:
    qkv, out = _empty(512, 3, 16, 72), _empty(512, 2, 16, 72)
    vision_rope._launch(qkv, _empty(512, 2, 72, dtype=F32), out, False, False, backward=False)


@case()
def _kv_cache_fp8_write() -> None:
    codes, scales = _empty(1024 * PAGE, G, HEAD, dtype=torch.uint8), _empty(1024, G, PAGE, dtype=F32)
    kv_cache_fp8.quantize_and_write(codes, scales, _ints(64, dtype=torch.int64), _empty(64, G, HEAD), (HEAD,))
    latent, scales = _empty(1024 * PAGE, 1, 576, dtype=torch.uint8), _empty(1024, 2, PAGE, dtype=F32)
    kv_cache_fp8.quantize_and_write(latent, scales, _ints(64, dtype=torch.int64), _empty(64, 1, 576), (512, 64))


@case("silu", "gelu_tanh")
def _gated_activation(kind: Any) -> None:
    inner = _empty(64, 2 * INNER)
    activation._launch_inference(inner, kind, False)
    out = _empty(64, INNER)
    activation._launch_training(activation._gated_forward_kernel, inner, (out,), kind, False)
    activation._launch_training(activation._gated_backward_kernel, inner, (out, torch.empty_like(inner)), kind, False)


# -- matmuls ----------------------------------------------------------------------------------


@case((D, D), (D, 6144))
def _gemv(outputs: int, inputs: int) -> None:
    with torch.inference_mode():
        x, weight = _empty(1, inputs), _empty(outputs, inputs)
        gemv._launch(x, weight, None, None, BF16)
        gemv._launch(x, weight, None, "silu", BF16)


@case((1, BF16), (64, BF16), (1024, BF16), (8192, BF16), (64, F32))
def _batch_invariant_gemm(rows: int, dtype: torch.dtype) -> None:
    linear_triton.launch_gemm(_empty(rows, D, dtype=dtype), _empty(1, D, D, dtype=dtype), None, None, dtype)


@case(64)
def _batch_invariant_gated_gemm(rows: int) -> None:
    linear_triton.launch_gemm(_empty(rows, D), _empty(1, 2 * INNER, D), None, None, BF16, kind="silu")


@case(64, 1024, 32768)
def _batch_invariant_grouped_gemm(rows: int) -> None:
    linear_triton.launch_gemm(_empty(rows, MOE_D), _empty(E, MOE_I, MOE_D), None, _ints(E), BF16)


@case()
def _batch_invariant_moe() -> None:
    expert_sort.launch_sort(_ints(64, TOP_K, dtype=torch.int64), E)
    weights = _empty(64, TOP_K)
    grouped_gemm_triton.launch_combine(_empty(64 * TOP_K, MOE_D), weights, _ints(64 * TOP_K, dtype=torch.int64))
    invariant_router._launch(_empty(64, E), None, (TOP_K, True, 1.0, BF16))


@case(2, 32, 256, 4096)
def _moe(tokens: int) -> None:
    x, first, down = _empty(tokens, MOE_D), _empty(E, 2 * MOE_I, MOE_D), _empty(E, MOE_D, MOE_I)
    weights, experts = _empty(tokens, TOP_K), _ints(tokens, TOP_K, dtype=torch.int64)
    with torch.inference_mode():
        fused_moe.moe_forward(x, weights, experts, first, down, activation="silu", numerics=FAST)


@case()
def _moe_batch_1() -> None:
    first, down = _empty(E, 2 * MOE_I, MOE_D), _empty(E, MOE_D, MOE_I)
    moe_gemv.moe_gemv(_empty(1, MOE_D), _empty(1, TOP_K), _ints(1, TOP_K, dtype=torch.int64), first, down, "silu")


@case(128, 512)
def _topk_router(experts: int) -> None:
    with torch.inference_mode():
        topk_router.route_topk(_empty(64, experts), TOP_K, normalise=True, scale=1.0, dtype=BF16)


# -- LoRA -------------------------------------------------------------------------------------


@case(16, 64)
def _lora(rank: int) -> None:
    slots = lora_grouped.LoraSlots(
        a_SPRI=_empty(4, 3, rank, D),
        b_SOR=_empty(4, 6144, rank),
        ranks_SP=_ints(4, 3),
        scales_SP=_empty(4, 3, dtype=F32),
        columns_C4=_ints(48, 4),
        spans=((0, 4096), (4096, 5120), (5120, 6144)),
    )
    for rows in (16, 64):
        plan = lora_grouped.LoraPlan(rows_T=_ints(256), tiles_G3=_ints(20, 3), tile_rows=rows)
        lora_grouped.launch_grouped_lora(_empty(256, 6144), _empty(256, D), slots, plan)
    gated = lora_grouped.LoraSlots(
        a_SPRI=_empty(4, 2, rank, D),
        b_SOR=_empty(4, 6144, rank),
        ranks_SP=_ints(4, 2),
        scales_SP=_empty(4, 2, dtype=F32),
        columns_C4=_ints(48, 4),
        spans=((0, 3072), (3072, 6144)),
    )
    for rows in (16, 64):
        plan = lora_grouped.LoraPlan(rows_T=_ints(256), tiles_G3=_ints(20, 3), tile_rows=rows, splits=1)
        lora_grouped.launch_gated_lora(_empty(256, 6144), _empty(256, D), gated, plan, "silu")


@case()
def _lora_experts() -> None:
    experts = _ints(64, TOP_K, dtype=torch.int64)
    plan = lora_experts.plan_expert_tiles(experts, _ints(64), num_experts=E, num_slots=2, tile_rows=16)
    factors = lora_experts.ExpertFactors(
        a_SPXRI=_empty(2, 2, E, 16, MOE_D),
        b_SPXOR=_empty(2, 2, E, MOE_I, 16),
        first_column=0,
        ranks_SP=_ints(2, 2),
        scales_SP=_empty(2, 2, dtype=F32),
    )
    y = _empty(64 * TOP_K, 2 * MOE_I)
    lora_experts.add_expert_rows(y, _empty(64, MOE_D), factors, plan, num_experts=E, per_token=TOP_K)


# -- sampling and log-probs -------------------------------------------------------------------


@case()
def _sampling() -> None:
    temperature, tokens = _empty(64, dtype=F32), _ints(64, dtype=torch.int64)
    limits = (_ints(64), temperature, temperature)
    for filters in (None, limits):
        sample.launch_sampling(_empty(64, V, dtype=F32), temperature, temperature, filters, tokens, temperature)


@case()
def _fused_logprob() -> None:
    logits, target = _empty(512, V, dtype=F32), _ints(512, dtype=torch.int64)
    transform = fused_logprob.LogitTransform(temperature=0.7, softcap=30.0, size=V)
    sums = fused_logprob.reduce_logits(logits, target, transform)
    row = sums[0]
    fused_logprob.compute_logit_grads(logits, target, row, row, row, row, transform, BF16)


@case()
def _batch_invariant_logprob() -> None:
    logits, row = _empty(512, V, dtype=F32), _empty(512, dtype=F32)
    chunks = logprob_triton.launch_reduce_chunks(logits, row, V, 4096)
    lse, _ = logprob_triton.launch_merge_chunks(*chunks)
    logprob_triton.launch_target_logprobs(logits, row, _ints(512, dtype=torch.int64), lse, torch.empty_like(row))


# -- quantized layers -------------------------------------------------------------------------


def _weight(name: str, *shape: int) -> QuantizedTensor:
    """A packed weight of a format."""
    format = FORMATS[name]
    *stack, rows, columns = shape
    dtype = {"e4m3": torch.float8_e4m3fn, "int8": torch.int8}.get(format.element, torch.uint8)
    data = _empty(*stack, rows, columns if format.bits == 8 else columns // 2, dtype=dtype)
    scale_dtype = {"e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn, "bfloat16": BF16}.get(format.scale, F32)
    scale = _empty(*stack, *format.scale_shape(rows, columns), dtype=scale_dtype)
    zero = torch.empty_like(scale, dtype=torch.uint8) if name.endswith("asym") else None
    factor = _empty(*stack, dtype=F32) if format.global_scale else None
    return QuantizedTensor(format, data, scale, format.rows or 1, zero, factor)


def _rows_fp8(tokens: int, features: int) -> QuantizedActivation:
    return QuantizedActivation(
        _empty(tokens, features, dtype=torch.float8_e4m3fn),
        _empty(features // 128, activation_quant.pad_tokens(tokens), dtype=F32).t()[:tokens],
        128,
        BF16,
    )


def _require_fp8() -> None:
    _require(activation_quant.has_fp8(DEVICE), "weights are dequantized: no E4M3 tensor cores")


@case()
def _fp8_quantize() -> None:
    _require_fp8()
    format = FORMATS["fp8"]
    activation_quant.quantize_rows_fp8(_empty(64, D), format)
    activation_quant.gated_activation_fp8(_empty(64, 2 * INNER), "silu", format)
    activation_quant.rms_norm_fp8(_empty(64, D), _empty(64, D), _empty(D), 1e-6, format)
    quantize_triton.quantize_weight(_empty(D, D), format)
    quantize_triton.quantize_weight(_empty(D, D), FORMATS["fp8_channel"])


@case(1, 16, 64, 1024)
def _fp8_gemm(tokens: int) -> None:
    _require_fp8()
    fp8_gemm.fp8_gemm(_rows_fp8(tokens, D), _weight("fp8", D, D))


@case(16, 512, 4096)
def _fp8_moe(tokens: int) -> None:
    _require_fp8()
    first, down = _weight("fp8", E, 2 * MOE_I, MOE_D), _weight("fp8", E, MOE_D, MOE_I)
    experts = _ints(tokens, TOP_K, dtype=torch.int64)
    fp8_moe.fp8_moe(_rows_fp8(tokens, MOE_D), _empty(tokens, TOP_K), experts, first, down, "silu")


@case()
def _fp8_backward() -> None:
    _require_fp8()
    transposed_quant.transpose_bytes(_weight("fp8", D, D).data)
    transposed_quant.quantize_both_fp8(_empty(512, D))
    index = _ints(4096, dtype=torch.int64)
    rows = SortedRows(index, index, index, _ints(E), TOP_K)
    fp8_moe_backward.fp8_grouped_grad_weight(_empty(4096, MOE_I), _rows_fp8(4096, MOE_D), rows, E)


@case("mxfp8", "mxfp4", "nvfp4")
def _dot_scaled(name: str) -> None:
    weight, x = _weight(name, D, D), _empty(64, D)
    _require(dot_scaled.supports_dot_scaled(x, weight), "weights are dequantized: no block-scaled tensor cores")
    dot_scaled.dot_scaled_linear(dot_scaled.quantize_rows_microscaling(x, FORMATS[name]), weight, _empty(D))


WEIGHT_ONLY = ("int4", "int4_g32_asym", "mxfp4", "nvfp4", "int8")


@case(*WEIGHT_ONLY)
def _weight_only_gemv(name: str) -> None:
    weight, experts = _weight(name, D, D), _weight(name, E, 2 * MOE_I, MOE_D)
    weight_only_gemv.weight_only_gemv(_empty(1, D), weight)
    weight_only_gemv.weight_only_gemv(_empty(1, D), weight, None, "silu")
    weight_only_gemv.expert_gemv(_empty(1, MOE_D), experts, None, _ints(TOP_K, dtype=torch.int64), "silu")


@case(*WEIGHT_ONLY)
def _weight_only_gemm(name: str) -> None:
    weight, experts = _weight(name, D, D), _weight(name, E, MOE_I, MOE_D)
    for tokens in (16, 64, 1024):
        weight_only_gemm.weight_only_gemm(_empty(tokens, D), weight)
    weight_only_gemm.weight_only_gemm(_empty(64, D), weight, None, "silu")
    weight_only_gemm.expert_gemm(_empty(512, MOE_D), experts, None, _ints(512, dtype=torch.int64))


@case(*WEIGHT_ONLY)
def _dequantize_weight(name: str) -> None:
    packed_weight.dequantize_weight(_weight(name, D, D), BF16)


# -- runtime ----------------------------------------------------------------------------------


@case(1, 2, 4)
def _weight_checksum(size: int) -> None:
    launch = checksum._Launch.__new__(checksum._Launch)
    launch.device = DEVICE
    launch._rows_T, launch._table = _ints(64), _ints(8, 4, dtype=torch.int64)
    launch._size, launch._copies, launch._aligned = size, size == 2, True
    launch._out = _ints(8, 2, dtype=torch.int64)
    launch()


@case()
def _graph_inputs() -> None:
    with torch.inference_mode():
        rows = _ints(64)
        unpack_graph_inputs(
            rows,
            rows,
            rows,
            rows,
            last_tokens_S=_ints(64, dtype=torch.int64),
            table_index_N=rows,
            pages_N=rows,
            block_table_RM=_ints(64, 64),
        )


if __name__ == "__main__":
    run_program(CASES, sys.argv[1:])
