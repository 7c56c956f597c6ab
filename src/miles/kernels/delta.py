"""The gated delta rule: a matrix a head that each token fades, corrects towards its value, and reads.

Shapes: T tokens, G key heads, H value heads, s = H / G, k channels of a key, v of a value, B sequences, R those of a
group, N chunks, C tokens of a chunk, W = v + k.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles.kernels.chunks import fading, head, recur, walk


def gated_delta(
    q_TGk: Tensor,
    k_TGk: Tensor,
    v_THv: Tensor,
    log_decay_TH: Tensor,
    beta_TH: Tensor,
    lengths: Sequence[int],
    state_BHkv: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Token by token: fade the state by exp(log_decay), add k x beta (v - what the state says of k), read it with q.

    A key head serves H / G value heads, neighbours. ``log_decay`` is never positive. The arithmetic and the state are
    float32; the output has the values' dtype. A state of None says that all sequences begin here and nobody asks what
    they leave.
    """
    if len(v_THv) == 0:
        return v_THv, state_BHkv
    wide = torch.promote_types(v_THv.dtype, torch.float32)
    inputs = [x.to(wide) for x in (q_TGk, k_TGk, v_THv, log_decay_TH, beta_TH)]
    state_BHkv = None if state_BHkv is None else state_BHkv.to(wide)
    out_THv, state_BHkv = recur(inputs, lengths, state_BHkv, step=_step, chunks=_chunks)
    return out_THv.to(v_THv.dtype), state_BHkv


def _step(
    state_RHkv: Tensor | None, q_RGk: Tensor, k_RGk: Tensor, v_RHv: Tensor, log_decay_RH: Tensor, beta_RH: Tensor
) -> tuple[Tensor, Tensor | None]:
    """One token of each sequence. Reading before writing, and mending what was read, spares a pass over the state."""
    share = v_RHv.shape[1] // q_RGk.shape[1]
    k_RHk, q_RHk = k_RGk.repeat_interleave(share, 1), q_RGk.repeat_interleave(share, 1)
    own_RH1 = (q_RHk * k_RHk).sum(-1, keepdim=True)
    if state_RHkv is None:
        return own_RH1 * (v_RHv * beta_RH.unsqueeze(-1)), None
    faded_RHkv = state_RHkv * log_decay_RH.exp()[..., None, None]
    said_RHv, read_RHv = (torch.stack((k_RHk, q_RHk), 2) @ faded_RHkv).unbind(2)
    fresh_RHv = (v_RHv - said_RHv) * beta_RH.unsqueeze(-1)
    state_RHkv = torch.addcmul(faded_RHkv, k_RHk.unsqueeze(-1), fresh_RHv.unsqueeze(-2))
    return read_RHv + own_RH1 * fresh_RHv, state_RHkv


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
    once, first as if the state before were zero, and for how that state changes it. Then the states follow one
    another, and all reads are again one product.
    """
    share = v_NCHv.shape[2] // q_NCGk.shape[2]
    q_NGCk, k_NGCk, v_NHCv = (x.transpose(1, 2) for x in (q_NCGk, k_NCGk, v_NCHv))
    beta_NHC1 = beta_NCH.transpose(1, 2).unsqueeze(-1)
    left_NHCC, total_NHC = fading(log_decay_NCH.transpose(1, 2))
    past_NHC1 = total_NHC.exp().to(v_NCHv.dtype).unsqueeze(-1)
    ahead_NHC1 = (total_NHC[..., -1:] - total_NHC).exp().to(v_NCHv.dtype).unsqueeze(-1)
    k_NHCk = k_NGCk.repeat_interleave(share, 1)
    alike_NHCC = (k_NGCk @ k_NGCk.mT).repeat_interleave(share, 1)
    told_NHCW = torch.cat((v_NHCv, k_NHCk * past_NHC1), -1) * beta_NHC1
    # The solver looks below the diagonal only and takes ones on it.
    system_NHCC = alike_NHCC * left_NHCC * beta_NHC1
    solved_NHCW = torch.linalg.solve_triangular(system_NHCC, told_NHCW, upper=False, unitriangular=True)
    alone_NHCv, reach_NHCk = solved_NHCW.split((v_NHCv.shape[-1], k_NHCk.shape[-1]), -1)
    lasting_NHkC = (k_NHCk * ahead_NHC1).mT
    kept_NH11 = past_NHC1[:, :, -1:]
    # Split at once: in backward a split is one join, where slices would each be a tensor of the whole size.
    steps = [x.split(list(counts)) for x in (alone_NHCv, reach_NHCk, lasting_NHkC, kept_NH11)]
    fresh: list[Tensor] = []

    def advance(i: int, state: Tensor, rest: int) -> Tensor:
        alone, reach, lasting, kept = (step[i] for step in steps)
        fresh.append(alone - reach @ state)
        state, kept, lasting, now = (head(x, rest) for x in (state, kept, lasting, fresh[-1]))
        return torch.addcmul(lasting @ now, state, kept)

    keep = state_RHkv is not None
    if state_RHkv is None:
        state_RHkv = v_NHCv.new_zeros(counts[0], *v_NHCv.shape[1:2], k_NHCk.shape[-1], v_NHCv.shape[-1])
    before_NHkv, final_RHkv = walk(state_RHkv, counts, advance, keep=keep)
    read_NHCk = q_NGCk.repeat_interleave(share, 1) * past_NHC1
    seen_NHCC = (q_NGCk @ k_NGCk.mT).repeat_interleave(share, 1) * left_NHCC
    out_NHCv = read_NHCk @ before_NHkv + seen_NHCC @ torch.cat(fresh)
    return out_NHCv.transpose(1, 2), final_RHkv
