"""Kimi Delta Attention (KDA): the gated delta rule with a decay of its own for each channel of a key.

Shapes: T tokens, H heads, k channels of a key, v of a value, B sequences, R those of a group, N chunks, C tokens of a
chunk, S tokens of a sub-block, W = v + k.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from miles.kernels.linear_attention.chunked_scan import run_recurrence, scan_deltas

# Tokens whose decays to one another are computed channel by channel; between sub-blocks they are factored.
_SUB_BLOCK = 16


def kimi_delta_rule(
    q_THk: Tensor,
    k_THk: Tensor,
    v_THv: Tensor,
    log_decay_THk: Tensor,
    beta_TH: Tensor,
    lengths: Sequence[int],
    state_BHkv: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Per token: decay each row of the state by exp(log_decay), add k x beta (v - k^T state), read it with q.

    ``log_decay`` is never positive. Computation and state are float32; the output has the values' dtype. A state of
    None: all sequences start here and no state is returned.
    """
    if len(v_THv) == 0:
        return v_THv, state_BHkv
    wide = torch.promote_types(v_THv.dtype, torch.float32)
    inputs = [x.to(wide) for x in (q_THk, k_THk, v_THv, log_decay_THk, beta_TH)]
    state_BHkv = None if state_BHkv is None else state_BHkv.to(wide)
    out_THv, state_BHkv = run_recurrence(inputs, lengths, state_BHkv, step=_step, chunks=_chunks)
    return out_THv.to(v_THv.dtype), state_BHkv


def _step(
    state_RHkv: Tensor | None, q_RHk: Tensor, k_RHk: Tensor, v_RHv: Tensor, log_decay_RHk: Tensor, beta_RH: Tensor
) -> tuple[Tensor, Tensor | None]:
    """One token of each sequence. Reading before writing, with a correction, saves a pass over the state."""
    qk_RH1 = (q_RHk * k_RHk).sum(-1, keepdim=True)
    if state_RHkv is None:
        return qk_RH1 * (v_RHv * beta_RH.unsqueeze(-1)), None
    decayed_RHkv = state_RHkv * log_decay_RHk.exp().unsqueeze(-1)
    predicted_RHv, read_RHv = (torch.stack((k_RHk, q_RHk), 2) @ decayed_RHkv).unbind(2)
    delta_RHv = (v_RHv - predicted_RHv) * beta_RH.unsqueeze(-1)
    state_RHkv = torch.addcmul(decayed_RHkv, k_RHk.unsqueeze(-1), delta_RHv.unsqueeze(-2))
    return read_RHv + qk_RH1 * delta_RHv, state_RHkv


def _chunks(
    counts: Sequence[int],
    state_RHkv: Tensor | None,
    q_NCHk: Tensor,
    k_NCHk: Tensor,
    v_NCHv: Tensor,
    log_decay_NCHk: Tensor,
    beta_NCH: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Many tokens of each sequence: solved chunk by chunk as in the gated delta rule (``gated_delta_rule``)."""
    q_NHCk, k_NHCk, v_NHCv = (x.transpose(1, 2) for x in (q_NCHk, k_NCHk, v_NCHv))
    beta_NHC1 = beta_NCH.transpose(1, 2).unsqueeze(-1)
    # Sums of logs are float64: a difference of two long ones has few digits left in float32.
    total_NHCk = log_decay_NCHk.transpose(1, 2).to(torch.float64).cumsum(2)
    from_start_NHCk = total_NHCk.to(v_NCHv.dtype).exp()
    to_end_NHCk = (total_NHCk[:, :, -1:] - total_NHCk).to(v_NCHv.dtype).exp()
    rhs_NHCW = torch.cat((v_NHCv, k_NHCk * from_start_NHCk), -1) * beta_NHC1
    # The solver reads only below the diagonal and assumes ones on it.
    system_NHCC = decayed_scores(k_NHCk, k_NHCk, total_NHCk) * beta_NHC1
    solved_NHCW = torch.linalg.solve_triangular(system_NHCC, rhs_NHCW, upper=False, unitriangular=True)
    write_NHkC = (k_NHCk * to_end_NHCk).mT
    chunk_decay_NHk1 = from_start_NHCk[:, :, -1:].mT
    parts = (*solved_NHCW.split((v_NHCv.shape[-1], k_NHCk.shape[-1]), -1), write_NHkC, chunk_decay_NHk1)
    before_NHkv, delta_NHCv, final_RHkv = scan_deltas(parts, counts, state_RHkv)
    qk_NHCC = decayed_scores(q_NHCk, k_NHCk, total_NHCk)
    out_NHCv = (q_NHCk * from_start_NHCk) @ before_NHkv + qk_NHCC @ delta_NHCv
    return out_NHCv.transpose(1, 2), final_RHkv


def decayed_scores(q_NHCk: Tensor, k_NHCk: Tensor, total_NHCk: Tensor) -> Tensor:
    """Scores of each query with the keys up to its own, [N, H, C, C]; every channel decays between the two tokens.

    ``total`` is the cumulative log decay. Above the diagonal scores are zero.
    """
    return _DecayedScores.apply(q_NHCk, k_NHCk, total_NHCk)  # pyright: ignore[reportReturnType]


class _DecayedScores(torch.autograd.Function):
    """Saves its inputs and computes the decays again in backward: autograd would save C numbers per channel."""

    @staticmethod
    def forward(ctx: Any, q_NHCk: Tensor, k_NHCk: Tensor, total_NHCk: Tensor) -> Tensor:
        ctx.save_for_backward(q_NHCk, k_NHCk, total_NHCk)
        size = q_NHCk.shape[2]
        out_NHCC = q_NHCk.new_zeros(*q_NHCk.shape[:3], size)
        for start in range(0, size, _SUB_BLOCK):
            stop = min(start + _SUB_BLOCK, size)
            q_NHSk, k_NHSk, total_NHSk = (x[:, :, start:stop] for x in (q_NHCk, k_NHCk, total_NHCk))
            within_NHSSk = _decay_within(total_NHSk, q_NHCk.dtype)
            out_NHCC[:, :, start:stop, start:stop] = torch.einsum(
                "nhijk,nhjk->nhij", q_NHSk.unsqueeze(3) * within_NHSSk, k_NHSk
            )
            del within_NHSSk  # sixteen times the sub-block's keys: not beside the next one's
            if start:
                after_NHSk, before_NHPk = _decay_across(total_NHCk, start, stop, q_NHCk.dtype)
                out_NHCC[:, :, start:stop, :start] = (q_NHSk * after_NHSk) @ (k_NHCk[:, :, :start] * before_NHPk).mT
        return out_NHCC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_NHCC: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q_NHCk, k_NHCk, total_NHCk = ctx.saved_tensors
        q_grad_NHCk, k_grad_NHCk = torch.zeros_like(q_NHCk), torch.zeros_like(k_NHCk)
        size = q_NHCk.shape[2]
        for start in range(0, size, _SUB_BLOCK):
            stop = min(start + _SUB_BLOCK, size)
            q_NHSk, k_NHSk, total_NHSk = (x[:, :, start:stop] for x in (q_NHCk, k_NHCk, total_NHCk))
            within_NHSSk = _decay_within(total_NHSk, q_NHCk.dtype)
            within_NHSSk *= grad_NHCC[:, :, start:stop, start:stop].unsqueeze(-1)
            q_grad_NHCk[:, :, start:stop] += torch.einsum("nhijk,nhjk->nhik", within_NHSSk, k_NHSk)
            k_grad_NHCk[:, :, start:stop] += torch.einsum("nhijk,nhik->nhjk", within_NHSSk, q_NHSk)
            del within_NHSSk
            if start:
                after_NHSk, before_NHPk = _decay_across(total_NHCk, start, stop, q_NHCk.dtype)
                grad_NHSP = grad_NHCC[:, :, start:stop, :start]
                q_grad_NHCk[:, :, start:stop] += (grad_NHSP @ (k_NHCk[:, :, :start] * before_NHPk)) * after_NHSk
                k_grad_NHCk[:, :, :start] += (grad_NHSP.mT @ (q_NHSk * after_NHSk)) * before_NHPk
        # A score depends on the difference of two totals only, whose derivative is the term itself.
        total_grad_NHCk = q_NHCk * q_grad_NHCk - k_NHCk * k_grad_NHCk
        return q_grad_NHCk, k_grad_NHCk, total_grad_NHCk.to(total_NHCk.dtype)


def _decay_within(total_NHSk: Tensor, dtype: torch.dtype) -> Tensor:
    """Decay from each token j of a sub-block to each token i, [N, H, i, j, k]; zero where j is later."""
    size = total_NHSk.shape[2]
    future_SS1 = torch.ones(size, size, dtype=torch.bool, device=total_NHSk.device).triu(1).unsqueeze(-1)
    log_decay_NHSSk = (total_NHSk.unsqueeze(3) - total_NHSk.unsqueeze(2)).to(dtype)
    # Masked before the exponential, which would overflow above the diagonal.
    return log_decay_NHSSk.masked_fill_(future_SS1, -torch.inf).exp_()


def _decay_across(total_NHCk: Tensor, start: int, stop: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors of the decay from all tokens before ``start`` to those of a sub-block; neither can overflow."""
    origin_NH1k = total_NHCk[:, :, start : start + 1]
    after_NHSk = (total_NHCk[:, :, start:stop] - origin_NH1k).to(dtype).exp_()
    return after_NHSk, (origin_NH1k - total_NHCk[:, :, :start]).to(dtype).exp_()
