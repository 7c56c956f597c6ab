"""Batch-invariant recurrences: the gated delta rule, Kimi's delta rule and Mamba-2's SSD, token by token in order.

A sequence has the same outputs and states to the bit whether it is computed whole, in parts or token by token, alone or
among others. Gradients are those of the chunked recurrences of ``linear_attention``.

Shapes: T tokens, B sequences, N of them that have a token at a step, G key heads, H heads, k channels of a key, v of a
value; of Mamba-2: p channels of a head, n of the state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.attention.params import SequenceShard
from miles.kernels.batch_invariant.elementwise import accumulation_dtype, map_elements
from miles.kernels.linear_attention import gated_delta_rule as chunked_delta
from miles.kernels.linear_attention import kimi_delta_rule as chunked_kimi
from miles.kernels.linear_attention import mamba2_ssd as chunked_ssd
from miles.kernels.linear_attention.chunked_scan import is_decode_step
from miles.kernels.runtime.triton_compat import device_guard, jit, tl, triton, use_triton

# Channels of a value that one Triton program computes.
_VALUE_BLOCK = 32


class ScanInputs(NamedTuple):
    """The tokens of a scan: ``decay`` [T, H, k], or [T, H, 1] if it is that of a head.

    Per token the state is multiplied by the decay, k x d is added to it, and q reads it: d is v, or with ``beta``
    (v - k^T state) beta.
    """

    q_THk: Tensor
    k_THk: Tensor
    v_THv: Tensor
    decay_THx: Tensor
    beta_TH: Tensor | None


def gated_delta_rule(
    q_TGk: Tensor,
    k_TGk: Tensor,
    v_THv: Tensor,
    log_decay_TH: Tensor,
    beta_TH: Tensor,
    lengths: Sequence[int],
    state_BHkv: Tensor | None,
    shard: SequenceShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``linear_attention.gated_delta_rule``, batch-invariant; with a ``shard`` over its parts."""
    inputs = (q_TGk, k_TGk, v_THv, log_decay_TH, beta_TH)
    rule = _Rule(_scan_gated_delta, chunked_delta.gated_delta_rule, values=2)
    if shard is not None:
        return _run_chunks(rule, inputs, shard, (v_THv.shape[1], q_TGk.shape[2], v_THv.shape[2])), None
    return _run(rule, inputs, lengths, state_BHkv)


def kimi_delta_rule(
    q_THk: Tensor,
    k_THk: Tensor,
    v_THv: Tensor,
    log_decay_THk: Tensor,
    beta_TH: Tensor,
    lengths: Sequence[int],
    state_BHkv: Tensor | None,
    shard: SequenceShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``linear_attention.kimi_delta_rule``, batch-invariant; with a ``shard`` over its parts."""
    inputs = (q_THk, k_THk, v_THv, log_decay_THk, beta_TH)
    rule = _Rule(_scan_kimi_delta, chunked_kimi.kimi_delta_rule, values=2)
    if shard is not None:
        return _run_chunks(rule, inputs, shard, (v_THv.shape[1], q_THk.shape[2], v_THv.shape[2])), None
    return _run(rule, inputs, lengths, state_BHkv)


def mamba2_ssd(
    x_THp: Tensor,
    dt_TH: Tensor,
    a_H: Tensor,
    b_TGn: Tensor,
    c_TGn: Tensor,
    d_H: Tensor,
    lengths: Sequence[int],
    state_BHpn: Tensor | None,
    shard: SequenceShard | None = None,
) -> tuple[Tensor, Tensor | None]:
    """``linear_attention.mamba2_ssd``, batch-invariant; with a ``shard`` over its parts."""
    inputs = (x_THp, dt_TH, a_H, b_TGn, c_TGn, d_H)
    rule = _Rule(_scan_mamba2, chunked_ssd.mamba2_ssd, values=0, weights=(2, 5))
    if shard is not None:
        return _run_chunks(rule, inputs, shard, (*x_THp.shape[1:], b_TGn.shape[2])), None
    return _run(rule, inputs, lengths, state_BHpn)


class _Rule(NamedTuple):
    """A batch-invariant scan and the chunked recurrence that has its gradient.

    ``values`` is the input of what is written, ``weights`` are those without tokens.
    """

    scan: Callable[[tuple[Tensor, ...], Sequence[int], Tensor | None], tuple[Tensor, Tensor]]
    chunked: Callable[..., tuple[Tensor, Tensor | None]]
    values: int
    weights: tuple[int, ...] = ()


def _run(
    rule: _Rule, inputs: tuple[Tensor, ...], lengths: Sequence[int], state: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    total = len(inputs[0])
    assert total == sum(lengths), f"got {total} tokens for sequences of {sum(lengths)} in all"
    if not torch.is_grad_enabled():
        out, after = rule.scan(inputs, lengths, state)
        return out, None if state is None else after
    assert state is None, "a batch-invariant recurrence that continues a state has no gradient"
    return _Recurrence.apply(rule, tuple(lengths), *inputs), None  # pyright: ignore[reportReturnType]


class _Recurrence(torch.autograd.Function):
    """Saves its inputs; backward is that of the chunked recurrence, computed again."""

    @staticmethod
    def forward(ctx: Any, rule: _Rule, lengths: tuple[int, ...], *inputs: Tensor) -> Tensor:
        ctx.save_for_backward(*inputs)
        ctx.chunked, ctx.lengths = rule.chunked, lengths
        return rule.scan(inputs, lengths, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            out = ctx.chunked(*inputs, ctx.lengths, None)[0]
        return None, None, *torch.autograd.grad(out, inputs, grad, allow_unused=True)


# -- context parallelism ---------------------------------------------------------------------------


def _run_chunks(rule: _Rule, inputs: tuple[Tensor, ...], shard: SequenceShard, state: tuple[int, ...]) -> Tensor:
    """The outputs of this rank's parts of the sequences; ``state`` is the shape of a state.

    Ranks take turns, from the first chunks of all sequences to the last ones, so that a state is that of a scan of
    whole sequences to the last bit, and as late as there.
    """
    parts = shard.parts
    assert len(inputs[0]) == sum(parts), f"got {len(inputs[0])} tokens for parts of {sum(parts)} in all"
    *rows_Cr, order_t = _find_chunk_rows(tuple(parts), inputs[0].device)
    chunks = [x if i in rule.weights else x.index_select(0, row_r) for row_r in rows_Cr for i, x in enumerate(inputs)]
    outs: tuple[Tensor, Tensor] = _ShardedRecurrence.apply(rule, shard, state, *chunks)  # pyright: ignore[reportAssignmentType]
    padding = outs[0].new_zeros(parts[-1], *outs[0].shape[1:])
    return torch.cat((*outs, padding)).index_select(0, order_t)


class _ShardedRecurrence(torch.autograd.Function):
    """Takes the inputs of early chunks, then those of late ones; backward is that of the chunked recurrence, in which
    gradients of states are passed from the last chunks to the first.
    """

    @staticmethod
    def forward(ctx: Any, rule: _Rule, shard: SequenceShard, state: tuple[int, ...], *inputs: Tensor) -> Any:
        chunks = inputs[: len(inputs) // 2], inputs[len(inputs) // 2 :]
        lengths = shard.parts[:-1:2], shard.parts[1:-1:2]
        outs: list[Tensor] = []
        before: list[Tensor] = []

        def step(number: int, state_NHx: Tensor) -> Tensor:
            before.append(state_NHx)
            out, after_NHx = rule.scan(chunks[number], lengths[number], state_NHx)
            outs.append(out)
            return after_NHx

        values = inputs[rule.values]
        start_NHx = values.new_zeros(len(lengths[0]), *state, dtype=accumulation_dtype(values.dtype))
        shard.carry_states(start_NHx, step)
        ctx.save_for_backward(*inputs, *before)
        ctx.chunked, ctx.lengths = rule.chunked, lengths
        ctx.shard = shard
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found: list[tuple[Tensor | None, ...]] = [(), ()]
        # What does not depend on other ranks is computed before the first gradient of theirs is awaited.
        with torch.enable_grad():
            *saved, early, late = (x.detach().requires_grad_() for x in ctx.saved_tensors)
            count = len(saved) // 2
            chunks = (*saved[:count], early), (*saved[count:], late)
            ends = [
                ctx.chunked(*inputs[:-1], lengths, inputs[-1])
                for inputs, lengths in zip(chunks, ctx.lengths, strict=True)
            ]

        def step(number: int, after_NHx: Tensor) -> Tensor:
            given = torch.autograd.grad(ends[number], chunks[number], (grads[number], after_NHx), allow_unused=True)
            found[number] = given[:-1]
            return given[-1]

        ctx.shard.carry_states(torch.zeros_like(early), step, reverse=True)
        return None, None, None, *found[0], *found[1]


@lru_cache(maxsize=16)
def _find_chunk_rows(parts: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens of this rank's early chunks, those of its late ones, and the order of these and of padding, which is
    the last part.
    """
    kind_B = np.append(np.arange(len(parts) - 1) % 2, 2)
    by_kind = np.argsort(np.repeat(kind_B, parts), kind="stable")
    early = sum(parts[:-1:2])
    ends = early, early + sum(parts[1:-1:2])
    with torch.inference_mode(False), torch.no_grad():
        rows = [torch.from_numpy(x).to(device) for x in (by_kind[: ends[0]], by_kind[ends[0] : ends[1]])]
        return rows[0], rows[1], torch.from_numpy(np.argsort(by_kind)).to(device)


# -- the recurrences as one scan -------------------------------------------------------------------


def _scan_gated_delta(
    inputs: tuple[Tensor, ...], lengths: Sequence[int], state_BHkv: Tensor | None
) -> tuple[Tensor, Tensor]:
    q_TGk, k_TGk, v_THv, log_decay_TH, beta_TH = (x.to(accumulation_dtype(x.dtype)) for x in inputs)
    heads_per_key = v_THv.shape[1] // q_TGk.shape[1]
    q_THk, k_THk = (x.repeat_interleave(heads_per_key, 1) for x in (q_TGk, k_TGk))
    decay_TH1 = map_elements(torch.exp, log_decay_TH).unsqueeze(-1)
    out_THv, state_BHkv = scan_tokens(ScanInputs(q_THk, k_THk, v_THv, decay_TH1, beta_TH), lengths, state_BHkv)
    return out_THv.to(inputs[2].dtype), state_BHkv


def _scan_kimi_delta(
    inputs: tuple[Tensor, ...], lengths: Sequence[int], state_BHkv: Tensor | None
) -> tuple[Tensor, Tensor]:
    q_THk, k_THk, v_THv, log_decay_THk, beta_TH = (x.to(accumulation_dtype(x.dtype)) for x in inputs)
    decay_THk = map_elements(torch.exp, log_decay_THk)
    out_THv, state_BHkv = scan_tokens(ScanInputs(q_THk, k_THk, v_THv, decay_THk, beta_TH), lengths, state_BHkv)
    return out_THv.to(inputs[2].dtype), state_BHkv


def _scan_mamba2(
    inputs: tuple[Tensor, ...], lengths: Sequence[int], state_BHpn: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The state is kept transposed: b are its keys, c its queries, and the inputs times dt its values."""
    x_THp, dt_TH, a_H, b_TGn, c_TGn, d_H = (x.to(accumulation_dtype(x.dtype)) for x in inputs)
    heads_per_group = x_THp.shape[1] // b_TGn.shape[1]
    b_THn, c_THn = (x.repeat_interleave(heads_per_group, 1) for x in (b_TGn, c_TGn))
    decay_TH1 = map_elements(torch.exp, dt_TH * a_H).unsqueeze(-1)
    state_BHnp = None if state_BHpn is None else state_BHpn.mT
    scan = ScanInputs(c_THn, b_THn, x_THp * dt_TH.unsqueeze(-1), decay_TH1, None)
    y_THp, state_BHnp = scan_tokens(scan, lengths, state_BHnp)
    return (y_THp + x_THp * d_H.unsqueeze(-1)).to(inputs[0].dtype), state_BHnp.mT


def scan_tokens(inputs: ScanInputs, lengths: Sequence[int], state_BHkv: Tensor | None) -> tuple[Tensor, Tensor]:
    """The outputs [T, H, v] of all tokens and the state after each sequence; a state of None is zeros."""
    q_THk, _, v_THv, *_ = inputs
    shape = (len(lengths), *q_THk.shape[1:], v_THv.shape[2])
    state_BHkv = v_THv.new_zeros(shape) if state_BHkv is None else state_BHkv.to(v_THv.dtype)
    if len(v_THv) == 0:
        return v_THv, state_BHkv
    if use_triton(v_THv):
        return launch_scan(inputs, lengths, state_BHkv)
    return scan_reference(inputs, lengths, state_BHkv)


# -- torch -----------------------------------------------------------------------------------------


class _StepOrder(NamedTuple):
    """Tokens step by step: the first of all sequences, longest sequences first, then the second ones, and so on.

    ``counts`` are the numbers of sequences that have a first token, a second one ...
    """

    token_T: Tensor
    rows_B: Tensor
    counts: tuple[int, ...]


@lru_cache(maxsize=16)
def _build_step_order(lengths: tuple[int, ...], device: torch.device) -> _StepOrder:
    """Order the tokens of sequences of ``lengths``; cached, since all layers of a forward need the same."""
    length_B = np.asarray(lengths, np.int64)
    row_B = np.argsort(-length_B, kind="stable")
    first_B = (np.cumsum(length_B) - length_B)[row_B]
    count_S = (length_B[:, None] > np.arange(length_B.max(initial=0))).sum(0)
    step_T = np.repeat(np.arange(len(count_S)), count_S)
    rank_T = np.arange(len(step_T)) - np.repeat(np.cumsum(count_S) - count_S, count_S)
    # Created outside inference mode, since a trainer in the same process may use it too.
    with torch.inference_mode(False), torch.no_grad():
        token_T, rows_B = (torch.from_numpy(x).to(device) for x in (first_B[rank_T] + step_T, row_B))
    return _StepOrder(token_T, rows_B, tuple(count_S.tolist()))


def scan_reference(inputs: ScanInputs, lengths: Sequence[int], state_BHkv: Tensor) -> tuple[Tensor, Tensor]:
    """``scan_tokens`` in torch: products and sums alone, each rounded by itself wherever an element stands."""
    order = _build_step_order(tuple(lengths), state_BHkv.device)
    parts = [None if x is None else x.index_select(0, order.token_T).split(order.counts) for x in inputs]
    state_NHkv = state_BHkv.index_select(0, order.rows_B)
    outs: list[Tensor] = []
    for step, count in enumerate(order.counts):
        q_NHk, k_NHk, v_NHv, decay_NHx, beta_NH = (None if x is None else x[step] for x in parts)
        assert q_NHk is not None and k_NHk is not None and v_NHv is not None and decay_NHx is not None
        step_NHkv = state_NHkv[:count]
        step_NHkv *= decay_NHx.unsqueeze(-1)
        k_NHk1, written_NHv = k_NHk.unsqueeze(-1), v_NHv
        if beta_NH is not None:
            written_NHv = (v_NHv - _sum_channels(step_NHkv * k_NHk1)) * beta_NH.unsqueeze(-1)
        step_NHkv += k_NHk1 * written_NHv.unsqueeze(-2)
        outs.append(_sum_channels(step_NHkv * q_NHk.unsqueeze(-1)))
    out_THv = torch.empty_like(inputs.v_THv).index_copy_(0, order.token_T, torch.cat(outs))
    return out_THv, torch.empty_like(state_NHkv).index_copy_(0, order.rows_B, state_NHkv)


def _sum_channels(x_NHkv: Tensor) -> Tensor:
    """The sum over the channels of a key, halves added to halves; overwrites its argument."""
    size = x_NHkv.shape[-2]
    while size > 1:
        half = (size + 1) // 2
        x_NHkv[..., : size - half, :] += x_NHkv[..., half:size, :]
        size = half
    return x_NHkv[..., 0, :]


# -- Triton ----------------------------------------------------------------------------------------


def launch_scan(inputs: ScanInputs, lengths: Sequence[int], state_BHkv: Tensor) -> tuple[Tensor, Tensor]:
    """``scan_tokens`` by one kernel, which is the same for a token and for a whole sequence."""
    heads, keys, values = state_BHkv.shape[1:]
    q_THk, k_THk, v_THv, decay_THx = (_align(x) for x in inputs[:4])
    if is_decode_step(lengths, len(v_THv)):
        span_B2 = _build_decode_spans(len(lengths), state_BHkv.device)
    else:
        span_B2 = _build_spans(tuple(lengths), state_BHkv.device)
    beta_TH = decay_THx if inputs.beta_TH is None else _align(inputs.beta_TH)
    before_BHkv = _align(state_BHkv)
    after_BHkv, out_THv = torch.empty_like(before_BHkv), torch.empty_like(v_THv)
    with device_guard(v_THv):
        _scan_kernel[(len(lengths), heads, triton.cdiv(values, _VALUE_BLOCK))](
            q_THk,
            k_THk,
            v_THv,
            decay_THx,
            beta_TH,
            before_BHkv,
            after_BHkv,
            out_THv,
            span_B2,
            H=heads,
            K=keys,
            V=values,
            HAS_BETA=inputs.beta_TH is not None,
            HAS_CHANNEL_DECAY=decay_THx.shape[-1] > 1,
            BLOCK_K=triton.next_power_of_2(keys),
            BLOCK_V=_VALUE_BLOCK,
            num_warps=4,
        )
    return out_THv, after_BHkv


@lru_cache(maxsize=16)
def _build_spans(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """The first token of each sequence, and one past its last [B, 2]."""
    length_B = np.asarray(lengths, np.int64)
    end_B = np.cumsum(length_B)
    with torch.inference_mode(False), torch.no_grad():
        return torch.from_numpy(np.stack((end_B - length_B, end_B), 1)).to(device)


def _build_decode_spans(count: int, device: torch.device) -> Tensor:
    """The spans of sequences of one token each, built on the device: a CUDA graph may capture it."""
    return torch.div(torch.arange(1, 2 * count + 1, device=device), 2, rounding_mode="floor").view(count, 2)


def _align(x: Tensor) -> Tensor:
    """Contiguous rows that start where vectors can be loaded: Triton compiles another kernel for those that do not."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


@jit
def _scan_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    decay_ptr: tl.tensor,
    beta_ptr: tl.tensor,
    before_ptr: tl.tensor,
    after_ptr: tl.tensor,
    out_ptr: tl.tensor,
    span_ptr: tl.tensor,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    HAS_BETA: tl.constexpr,
    HAS_CHANNEL_DECAY: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """All tokens of a sequence in order, for one head and some channels of its values; the state is in registers."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    key_k = tl.arange(0, BLOCK_K)
    value_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    valid_k, valid_v = key_k < K, value_v < V
    valid_kv = valid_k[:, None] & valid_v[None, :]
    state_at_kv = (row * H + head) * K * V + key_k[:, None] * V + value_v[None, :]
    state_kv = tl.load(before_ptr + state_at_kv, valid_kv, other=0.0)
    first = tl.load(span_ptr + 2 * row)
    end = tl.load(span_ptr + 2 * row + 1)
    for token in range(first, end):
        at = token * H + head
        q_k = tl.load(q_ptr + at * K + key_k, valid_k, other=0.0)
        k_k = tl.load(k_ptr + at * K + key_k, valid_k, other=0.0)
        v_v = tl.load(v_ptr + at * V + value_v, valid_v, other=0.0)
        if HAS_CHANNEL_DECAY:
            state_kv = state_kv * tl.load(decay_ptr + at * K + key_k, valid_k, other=0.0)[:, None]
        else:
            state_kv = state_kv * tl.load(decay_ptr + at)
        if HAS_BETA:
            v_v = (v_v - tl.sum(state_kv * k_k[:, None], 0)) * tl.load(beta_ptr + at)
        state_kv = state_kv + k_k[:, None] * v_v[None, :]
        tl.store(out_ptr + at * V + value_v, tl.sum(state_kv * q_k[:, None], 0), valid_v)
    tl.store(after_ptr + state_at_kv, state_kv, valid_kv)
