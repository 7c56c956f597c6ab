"""Gated delta rule (Gated DeltaNet): a state matrix per head that each token decays, corrects towards its value, and
reads.

Shapes: T tokens, G key heads, H value heads, s = H / G, k channels of a key, v of a value, B sequences, R those of a
group, N chunks, C tokens of a chunk, W = v + k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles.kernels.linear_attention.chunked_scan import compute_decay, run_recurrence, scan_deltas


def gated_delta_rule(
    q_TGk: Tensor,
    k_TGk: Tensor,
    v_THv: Tensor,
    log_decay_TH: Tensor,
    beta_TH: Tensor,
    lengths: Sequence[int],
    state_BHkv: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Per token: decay the state by exp(log_decay), add k x beta (v - k^T state), read it with q.

    A key head serves H / G adjacent value heads. ``log_decay`` is never positive. Computation and state are float32;
    the output has the values' dtype. A state of None: all sequences start here and no state is returned.
    """
    if len(v_THv) == 0:
        return v_THv, state_BHkv
    wide = torch.promote_types(v_THv.dtype, torch.float32)
    inputs = [x.to(wide) for x in (q_TGk, k_TGk, v_THv, log_decay_TH, beta_TH)]
    state_BHkv = None if state_BHkv is None else state_BHkv.to(wide)
    out_THv, state_BHkv = run_recurrence(inputs, lengths, state_BHkv, step=_step, chunks=_chunks)
    return out_THv.to(v_THv.dtype), state_BHkv


def _step(
    state_RHkv: Tensor | None, q_RGk: Tensor, k_RGk: Tensor, v_RHv: Tensor, log_decay_RH: Tensor, beta_RH: Tensor
) -> tuple[Tensor, Tensor | None]:
    """One token of each sequence. Reading before writing, with a correction, saves a pass over the state."""
    heads_per_key = v_RHv.shape[1] // q_RGk.shape[1]
    k_RHk, q_RHk = k_RGk.repeat_interleave(heads_per_key, 1), q_RGk.repeat_interleave(heads_per_key, 1)
    qk_RH1 = (q_RHk * k_RHk).sum(-1, keepdim=True)
    if state_RHkv is None:
        return qk_RH1 * (v_RHv * beta_RH.unsqueeze(-1)), None
    decayed_RHkv = state_RHkv * log_decay_RH.exp()[..., None, None]
    predicted_RHv, read_RHv = (torch.stack((k_RHk, q_RHk), 2) @ decayed_RHkv).unbind(2)
    delta_RHv = (v_RHv - predicted_RHv) * beta_RH.unsqueeze(-1)
    state_RHkv = torch.addcmul(decayed_RHkv, k_RHk.unsqueeze(-1), delta_RHv.unsqueeze(-2))
    return read_RHv + qk_RH1 * delta_RHv, state_RHkv


def _chunks(
    counts: Sequence[int],
    state_RHkv: Tensor | None,
    q_NCGk: Tensor,
    k_NCGk: Tensor,
    v_NCHv: Tensor,
    log_decay_NCH: Tensor,
    beta_NCH: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Many tokens of each sequence.

    What the tokens of a chunk write depends on what earlier ones wrote: a triangular system, solved for all chunks at
    once with a zero initial state, and for its dependence on that state. Then the states are scanned, and all reads are
    again one matmul.
    """
    heads_per_key = v_NCHv.shape[2] // q_NCGk.shape[2]
    q_NGCk, k_NGCk, v_NHCv = (x.transpose(1, 2) for x in (q_NCGk, k_NCGk, v_NCHv))
    beta_NHC1 = beta_NCH.transpose(1, 2).unsqueeze(-1)
    decay_NHCC, cum_log_decay_NHC = compute_decay(log_decay_NCH.transpose(1, 2))
    from_start_NHC1 = cum_log_decay_NHC.exp().to(v_NCHv.dtype).unsqueeze(-1)
    to_end_NHC1 = (cum_log_decay_NHC[..., -1:] - cum_log_decay_NHC).exp().to(v_NCHv.dtype).unsqueeze(-1)
    k_NHCk = k_NGCk.repeat_interleave(heads_per_key, 1)
    kk_NHCC = (k_NGCk @ k_NGCk.mT).repeat_interleave(heads_per_key, 1)
    rhs_NHCW = torch.cat((v_NHCv, k_NHCk * from_start_NHC1), -1) * beta_NHC1
    # The solver reads only below the diagonal and assumes ones on it.
    system_NHCC = kk_NHCC * decay_NHCC * beta_NHC1
    solved_NHCW = torch.linalg.solve_triangular(system_NHCC, rhs_NHCW, upper=False, unitriangular=True)
    write_NHkC = (k_NHCk * to_end_NHC1).mT
    chunk_decay_NH11 = from_start_NHC1[:, :, -1:]
    parts = (*solved_NHCW.split((v_NHCv.shape[-1], k_NHCk.shape[-1]), -1), write_NHkC, chunk_decay_NH11)
    before_NHkv, delta_NHCv, final_RHkv = scan_deltas(parts, counts, state_RHkv)
    read_NHCk = q_NGCk.repeat_interleave(heads_per_key, 1) * from_start_NHC1
    qk_NHCC = (q_NGCk @ k_NGCk.mT).repeat_interleave(heads_per_key, 1) * decay_NHCC
    out_NHCv = read_NHCk @ before_NHkv + qk_NHCC @ delta_NHCv
    return out_NHCv.transpose(1, 2), final_RHkv
