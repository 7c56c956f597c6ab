"""Decode steps of recurrent layers in Triton: causal conv1d update, gated delta rule, Kimi's delta rule, Mamba-2 SSD.

Each sequence has one new token. States are read and written in place, in rows of the pool of recurrent states: a state
is moved twice instead of once per operation, and nothing depends on the host, so that a CUDA graph may capture a step.
The convolution has a kernel of its own, since several heads read one channel's last inputs and one program moves them.

Intermediate results are rounded where the layers in torch (``models.layers``) round them; sums have another order.

Shapes: B sequences, C convolved channels, K taps, G key heads, H value heads, k channels of a key, v of a value; of
Mamba-2: p channels of a head, n of the state, I = Hp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from miles.kernels.runtime.kv_cache import DecodeState
from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton, use_triton_inference

# Channels of a program of the convolution.
_CONV_BLOCK = 256
# The largest state of a head that one program holds in its registers, and the size from which it takes more warps.
_MAX_STATE, _WIDE_STATE = 1 << 15, 1 << 13
# The most channels that one program normalizes.
_MAX_GROUP = 1 << 14


def supports_decode_step(x_TD: Tensor, keys: int, values: int, group: int = 1) -> bool:
    """Whether the kernels take a layer: inference on a GPU, a head's state of ``keys`` x ``values`` and a norm over
    ``group`` channels small enough for one program.
    """
    if not use_triton_inference(x_TD):
        return False
    state = int(triton.next_power_of_2(keys)) * int(triton.next_power_of_2(values))
    return state <= _MAX_STATE and group <= _MAX_GROUP


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaStep:
    """The weights of a delta rule's decode step and what gates its output.

    ``log_rate_H`` and ``dt_bias`` give the decay: of a head, [H], or of each channel of a key, [H * k]. With a
    ``lower_bound`` it is ``lower_bound * sigmoid`` in place of ``-softplus``. Outputs are normalized with ``weight_v``
    and gated by a SiLU, or a sigmoid.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    log_rate_H: Tensor
    dt_bias: Tensor
    weight_v: Tensor
    eps: float
    silu_gate: bool
    lower_bound: float | None = None


def conv_step(
    x_BC: Tensor,
    weight_CK: Tensor,
    bias_C: Tensor | None,
    inputs: Tensor,
    state: DecodeState,
    *,
    silu: bool = False,
    gates: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The causal convolution of each sequence's new input, [B, C]; ``inputs`` [rows, C, K - 1] are moved on in place.

    With ``gates`` the input is multiplied by the first and the result by the second, as in a short convolution.
    """
    rows, channels = x_BC.shape
    taps = weight_CK.shape[1]
    assert inputs.is_contiguous() and weight_CK.is_contiguous() and x_BC.stride(1) == 1
    gate_in, gate_out = (x_BC, x_BC) if gates is None else gates
    assert gate_in.stride() == gate_out.stride() == x_BC.stride() or gates is None
    out_BC = torch.empty(rows, channels, dtype=x_BC.dtype, device=x_BC.device)
    fresh = state.is_fresh_B
    with device_guard(x_BC):
        _conv_step_kernel[(rows, triton.cdiv(channels, _CONV_BLOCK))](
            x_BC,
            gate_in,
            gate_out,
            inputs,
            weight_CK,
            weight_CK if bias_C is None else bias_C,
            out_BC,
            state.reads_B,
            state.writes_B,
            state.reads_B if fresh is None else fresh,
            x_BC.stride(0),
            channels,
            TAPS=taps,
            HAS_BIAS=bias_C is not None,
            HAS_FRESH=fresh is not None,
            HAS_GATES=gates is not None,
            SILU=silu,
            BLOCK=_CONV_BLOCK,
            num_warps=4,
        )
    return out_BC


def delta_step(
    qkv_BC: Tensor, decay_BX: Tensor, beta_BH: Tensor, gate_BX: Tensor, layer: DeltaStep, state: DecodeState
) -> Tensor:
    """One token of a delta rule for each sequence, its output normalized and gated, [B, H * v].

    ``qkv`` are the convolved queries, keys and values side by side, ``decay`` [B, H] or [B, H * k] the time steps
    before the softplus or sigmoid, ``beta`` [B, H] before the sigmoid, ``gate`` [B, H * v]. The state is updated in
    place.
    """
    states = state.tensors[1]
    assert states.is_contiguous() and states.dtype == torch.float32
    assert qkv_BC.is_contiguous()
    # A projection with one value head for a key head interleaves the columns.
    decay_BX, beta_BH, gate_BX = (x if x.stride(1) == 1 else x.contiguous() for x in (decay_BX, beta_BH, gate_BX))
    rows, fresh = len(qkv_BC), state.is_fresh_B
    keys, values = triton.next_power_of_2(layer.key_dim), triton.next_power_of_2(layer.value_dim)
    out_BX = torch.empty(rows, layer.value_heads * layer.value_dim, dtype=qkv_BC.dtype, device=qkv_BC.device)
    with device_guard(qkv_BC):
        _delta_step_kernel[(rows, layer.value_heads)](
            qkv_BC,
            decay_BX,
            beta_BH,
            gate_BX,
            layer.log_rate_H,
            layer.dt_bias,
            layer.weight_v,
            states,
            out_BX,
            state.reads_B,
            state.writes_B,
            state.reads_B if fresh is None else fresh,
            qkv_BC.stride(0),
            decay_BX.stride(0),
            beta_BH.stride(0),
            gate_BX.stride(0),
            layer.eps,
            0.0 if layer.lower_bound is None else layer.lower_bound,
            G=layer.key_heads,
            H=layer.value_heads,
            K=layer.key_dim,
            V=layer.value_dim,
            SCALE=layer.key_dim**-0.5,
            CHANNEL_DECAY=layer.dt_bias.numel() > layer.value_heads,
            BOUNDED=layer.lower_bound is not None,
            SILU_GATE=layer.silu_gate,
            HAS_FRESH=fresh is not None,
            BLOCK_K=keys,
            BLOCK_V=values,
            num_warps=8 if keys * values > _WIDE_STATE else 4,
        )
    return out_BX


def ssd_step(
    xbc_BC: Tensor,
    dt_BH: Tensor,
    log_rate_H: Tensor,
    dt_bias_H: Tensor,
    skip_H: Tensor,
    state: DecodeState,
    *,
    groups: int,
    step_limit: tuple[float, float],
) -> Tensor:
    """One token of Mamba-2's SSD for each sequence, [B, I]: ``xbc`` are the convolved x, b and c side by side, ``dt``
    the time steps before the softplus. The state [rows, H, p, n] is updated in place.
    """
    states = state.tensors[1]
    heads, channels, size = states.shape[1:]
    assert states.is_contiguous() and states.dtype == torch.float32
    assert xbc_BC.is_contiguous() and dt_BH.stride(1) == 1
    rows, fresh = len(xbc_BC), state.is_fresh_B
    block_p, block_n = triton.next_power_of_2(channels), triton.next_power_of_2(size)
    out_BI = torch.empty(rows, heads * channels, dtype=xbc_BC.dtype, device=xbc_BC.device)
    with device_guard(xbc_BC):
        _ssd_step_kernel[(rows, heads)](
            xbc_BC,
            dt_BH,
            log_rate_H,
            dt_bias_H,
            skip_H,
            states,
            out_BI,
            state.reads_B,
            state.writes_B,
            state.reads_B if fresh is None else fresh,
            xbc_BC.stride(0),
            dt_BH.stride(0),
            step_limit[0],
            step_limit[1],
            H=heads,
            G=groups,
            P=channels,
            N=size,
            HAS_FRESH=fresh is not None,
            BLOCK_P=block_p,
            BLOCK_N=block_n,
            num_warps=8 if block_p * block_n > _WIDE_STATE else 4,
        )
    return out_BI


def gated_group_norm(y_BI: Tensor, z_BI: Tensor, weight_I: Tensor, eps: float, groups: int) -> Tensor:
    """RMSNorm within each group of the channels of ``y * silu(z)``, in float32, [B, I] in the dtype of ``z``."""
    assert y_BI.is_contiguous() and z_BI.stride(1) == 1
    rows, inner = y_BI.shape
    size = inner // groups
    block = triton.next_power_of_2(size)
    out_BI = torch.empty(rows, inner, dtype=z_BI.dtype, device=z_BI.device)
    with device_guard(y_BI):
        _gated_group_norm_kernel[(rows, groups)](
            y_BI,
            z_BI,
            weight_I,
            out_BI,
            z_BI.stride(0),
            eps,
            G=groups,
            SIZE=size,
            BLOCK=block,
            num_warps=8 if block > 2048 else 4,
        )
    return out_BI


# -- kernels ---------------------------------------------------------------------------------------


@jit
def _softplus(x: tl.tensor) -> tl.tensor:
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-x))


@jit
def _round_like(x: tl.tensor, pointer: tl.tensor) -> tl.tensor:
    """Round to the dtype that is stored at ``pointer``, and widen again."""
    return x.to(pointer.dtype.element_ty).to(tl.float32)  # pyright: ignore[reportAttributeAccessIssue]


@jit
def _conv_step_kernel(
    x_ptr: tl.tensor,
    gate_in_ptr: tl.tensor,
    gate_out_ptr: tl.tensor,
    inputs_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    fresh_ptr: tl.tensor,
    x_stride: int,
    C: int,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FRESH: tl.constexpr,
    HAS_GATES: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = c < C
    read, write = tl.load(reads_ptr + row), tl.load(writes_ptr + row)
    continues = valid
    if HAS_FRESH:
        continues = valid & (tl.load(fresh_ptr + row) == 0)
    x = tl.load(x_ptr + row * x_stride + c, valid, other=0.0)
    if HAS_GATES:
        gate = tl.load(gate_in_ptr + row * x_stride + c, valid, other=0.0)
        x = _round_like(gate.to(tl.float32) * x.to(tl.float32), x_ptr)
    from_ptr = inputs_ptr + (read * C + c) * (TAPS - 1)
    to_ptr = inputs_ptr + (write * C + c) * (TAPS - 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(TAPS - 1):
        earlier = tl.load(from_ptr + tap, continues, other=0.0)
        weight = tl.load(weight_ptr + c * TAPS + tap, valid, other=0.0).to(tl.float32)
        total += earlier.to(tl.float32) * weight
        if tap > 0:
            tl.store(to_ptr + (tap - 1), earlier, valid)
    total += x.to(tl.float32) * tl.load(weight_ptr + c * TAPS + (TAPS - 1), valid, other=0.0).to(tl.float32)
    if TAPS > 1:
        tl.store(to_ptr + (TAPS - 2), x.to(inputs_ptr.dtype.element_ty), valid)
    if HAS_BIAS:
        total += tl.load(bias_ptr + c, valid, other=0.0).to(tl.float32)
    total = _round_like(total, out_ptr)
    if SILU:
        total = total * _sigmoid(total)
    if HAS_GATES:
        total = total * tl.load(gate_out_ptr + row * x_stride + c, valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * C + c, total.to(out_ptr.dtype.element_ty), valid)


@jit
def _delta_step_kernel(
    qkv_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    log_rate_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    states_ptr: tl.tensor,
    out_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    fresh_ptr: tl.tensor,
    qkv_stride: int,
    decay_stride: int,
    beta_stride: int,
    gate_stride: int,
    eps: float,
    lower_bound: float,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    SCALE: tl.constexpr,
    CHANNEL_DECAY: tl.constexpr,
    BOUNDED: tl.constexpr,
    SILU_GATE: tl.constexpr,
    HAS_FRESH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """One head of one sequence, its state in registers."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    k, v = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    valid_k, valid_v = k < K, v < V
    valid_kv = valid_k[:, None] & valid_v[None, :]
    read, write = tl.load(reads_ptr + row), tl.load(writes_ptr + row)
    continues = valid_kv & (tl.load(fresh_ptr + row) == 0) if HAS_FRESH else valid_kv
    at_kv = k[:, None] * V + v[None, :]
    state_kv = tl.load(states_ptr + (read * H + head) * (K * V) + at_kv, continues, other=0.0)

    query_at = row * qkv_stride + (head // (H // G)) * K + k
    q_k = tl.load(qkv_ptr + query_at, valid_k, other=0.0).to(tl.float32)
    k_k = tl.load(qkv_ptr + query_at + G * K, valid_k, other=0.0).to(tl.float32)
    v_v = tl.load(qkv_ptr + row * qkv_stride + 2 * G * K + head * V + v, valid_v, other=0.0).to(tl.float32)
    q_k = q_k * tl.rsqrt(tl.sum(q_k * q_k, 0) + 1e-6) * SCALE
    k_k = k_k * tl.rsqrt(tl.sum(k_k * k_k, 0) + 1e-6)
    beta = _round_like(_sigmoid(tl.load(beta_ptr + row * beta_stride + head).to(tl.float32)), beta_ptr)

    channel = head * K + k if CHANNEL_DECAY else head + 0 * k
    step_k = tl.load(decay_ptr + row * decay_stride + channel, valid_k, other=0.0).to(tl.float32)
    step_k += tl.load(dt_bias_ptr + channel, valid_k, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(log_rate_ptr + head).to(tl.float32))
    log_decay_k = lower_bound * _sigmoid(rate * step_k) if BOUNDED else -rate * _softplus(step_k)
    state_kv = state_kv * tl.exp(log_decay_k)[:, None]
    delta_v = (v_v - tl.sum(state_kv * k_k[:, None], 0)) * beta
    state_kv = state_kv + k_k[:, None] * delta_v[None, :]
    tl.store(states_ptr + (write * H + head) * (K * V) + at_kv, state_kv, valid_kv)

    out_v = _round_like(tl.sum(state_kv * q_k[:, None], 0), out_ptr)
    out_v = out_v * tl.rsqrt(tl.sum(out_v * out_v, 0) / V + eps)
    out_v = out_v * tl.load(weight_ptr + v, valid_v, other=0.0).to(tl.float32)
    gate_v = tl.load(gate_ptr + row * gate_stride + head * V + v, valid_v, other=0.0).to(tl.float32)
    out_v = out_v * (gate_v * _sigmoid(gate_v) if SILU_GATE else _sigmoid(gate_v))
    tl.store(out_ptr + (row * H + head) * V + v, out_v.to(out_ptr.dtype.element_ty), valid_v)


@jit
def _ssd_step_kernel(
    xbc_ptr: tl.tensor,
    dt_ptr: tl.tensor,
    log_rate_ptr: tl.tensor,
    dt_bias_ptr: tl.tensor,
    skip_ptr: tl.tensor,
    states_ptr: tl.tensor,
    out_ptr: tl.tensor,
    reads_ptr: tl.tensor,
    writes_ptr: tl.tensor,
    fresh_ptr: tl.tensor,
    xbc_stride: int,
    dt_stride: int,
    step_min: float,
    step_max: float,
    H: tl.constexpr,
    G: tl.constexpr,
    P: tl.constexpr,
    N: tl.constexpr,
    HAS_FRESH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
) -> None:
    """One head of one sequence, its state in registers."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    p, n = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_N)
    valid_p, valid_n = p < P, n < N
    valid_pn = valid_p[:, None] & valid_n[None, :]
    read, write = tl.load(reads_ptr + row), tl.load(writes_ptr + row)
    continues = valid_pn
    if HAS_FRESH:
        continues = valid_pn & (tl.load(fresh_ptr + row) == 0)
    at_pn = p[:, None] * N + n[None, :]
    state_pn = tl.load(states_ptr + (read * H + head) * (P * N) + at_pn, continues, other=0.0)

    group = head // (H // G)
    x_p = tl.load(xbc_ptr + row * xbc_stride + head * P + p, valid_p, other=0.0).to(tl.float32)
    b_n = tl.load(xbc_ptr + row * xbc_stride + H * P + group * N + n, valid_n, other=0.0).to(tl.float32)
    c_n = tl.load(xbc_ptr + row * xbc_stride + H * P + (G + group) * N + n, valid_n, other=0.0).to(tl.float32)
    step = tl.load(dt_ptr + row * dt_stride + head).to(tl.float32) + tl.load(dt_bias_ptr + head).to(tl.float32)
    step = tl.minimum(tl.maximum(_softplus(step), step_min), step_max)
    decay = tl.exp(-step * tl.exp(tl.load(log_rate_ptr + head).to(tl.float32)))
    state_pn = state_pn * decay + (x_p * step)[:, None] * b_n[None, :]
    tl.store(states_ptr + (write * H + head) * (P * N) + at_pn, state_pn, valid_pn)
    y_p = tl.sum(state_pn * c_n[None, :], 1) + x_p * tl.load(skip_ptr + head).to(tl.float32)
    tl.store(out_ptr + (row * H + head) * P + p, y_p.to(out_ptr.dtype.element_ty), valid_p)


@jit
def _gated_group_norm_kernel(
    y_ptr: tl.tensor,
    z_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    z_stride: int,
    eps: float,
    G: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    i = tl.arange(0, BLOCK)
    valid = i < SIZE
    at = group * SIZE + i
    y = tl.load(y_ptr + row * (G * SIZE) + at, valid, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + row * z_stride + at, valid, other=0.0).to(tl.float32)
    gated = y * (z * _sigmoid(z))
    gated = gated * tl.rsqrt(tl.sum(gated * gated, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + at, valid, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * (G * SIZE) + at, (gated * weight).to(out_ptr.dtype.element_ty), valid)
