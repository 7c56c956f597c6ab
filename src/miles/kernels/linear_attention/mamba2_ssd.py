"""Mamba-2 SSD: a state matrix per head that decays with the token's time step and accumulates its input.

Shapes: T tokens, H heads, p channels of a head, G groups of s = H / G heads, n channels of the state, B sequences, R
those of a group of chunks, N chunks, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles.kernels.linear_attention.chunked_scan import compute_decay, run_recurrence, scan_chunks, take_rows


def mamba2_ssd(
    x_THp: Tensor,
    dt_TH: Tensor,
    a_H: Tensor,
    b_TGn: Tensor,
    c_TGn: Tensor,
    d_H: Tensor,
    lengths: Sequence[int],
    state_BHpn: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Per token: decay the state by exp(dt a), add dt x b, read it with c, add d x.

    Adjacent heads share a group's b and c. ``dt`` is never negative, ``a`` never positive. Computation and state are
    float32; the output has the dtype of ``x``. A state of None: all sequences start here and no state is returned.
    """
    if len(x_THp) == 0:
        return x_THp, state_BHpn
    wide = torch.promote_types(x_THp.dtype, torch.float32)
    x, dt_TH, b, c = (t.to(wide) for t in (x_THp, dt_TH, b_TGn, c_TGn))
    inputs = (x * dt_TH.unsqueeze(-1), dt_TH * a_H.to(wide), b, c)
    state_BHpn = None if state_BHpn is None else state_BHpn.to(wide)
    y_THp, state_BHpn = run_recurrence(inputs, lengths, state_BHpn, step=_step, chunks=_chunks)
    return torch.addcmul(y_THp, x, d_H.to(wide).unsqueeze(-1)).to(x_THp.dtype), state_BHpn


def _step(
    state_RHpn: Tensor | None, x_RHp: Tensor, log_decay_RH: Tensor, b_RGn: Tensor, c_RGn: Tensor
) -> tuple[Tensor, Tensor | None]:
    """One token of each sequence; ``x`` is already multiplied by dt."""
    heads_per_group = x_RHp.shape[1] // b_RGn.shape[1]
    b_RHn, c_RHn = b_RGn.repeat_interleave(heads_per_group, 1), c_RGn.repeat_interleave(heads_per_group, 1)
    if state_RHpn is None:
        return x_RHp * (b_RHn * c_RHn).sum(-1, keepdim=True), None
    decayed_RHpn = state_RHpn * log_decay_RH.exp()[..., None, None]
    state_RHpn = torch.addcmul(decayed_RHpn, x_RHp.unsqueeze(-1), b_RHn.unsqueeze(-2))
    return (state_RHpn @ c_RHn.unsqueeze(-1)).squeeze(-1), state_RHpn


def _chunks(
    counts: Sequence[int],
    state_RHpn: Tensor | None,
    x_NCHp: Tensor,
    log_decay_NCH: Tensor,
    b_NCGn: Tensor,
    c_NCGn: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Many tokens of each sequence: attention without a softmax within a chunk, the state for earlier chunks."""
    groups = b_NCGn.shape[2]
    x_NHCp = x_NCHp.transpose(1, 2)
    b_NGCn, c_NGCn = b_NCGn.transpose(1, 2), c_NCGn.transpose(1, 2)
    decay_NHCC, cum_log_decay_NHC = compute_decay(log_decay_NCH.transpose(1, 2))
    from_start_NHC1 = cum_log_decay_NHC.exp().to(x_NCHp.dtype).unsqueeze(-1)
    to_end_NHC1 = (cum_log_decay_NHC[..., -1:] - cum_log_decay_NHC).exp().to(x_NCHp.dtype).unsqueeze(-1)
    scores_NGsCC = (c_NGCn @ b_NGCn.mT).unsqueeze(2) * decay_NHCC.unflatten(1, (groups, -1))
    within_NHCp = scores_NGsCC.flatten(1, 2) @ x_NHCp
    # The heads of a group as one: rows (head, channel) against the group's b and c.
    write_NGfC = (x_NHCp * to_end_NHC1).mT.unflatten(1, (groups, -1)).flatten(2, 3)
    written_NHpn = (write_NGfC @ b_NGCn).view(len(x_NHCp), *x_NCHp.shape[2:], -1)
    # One split: its backward is one concatenation, where slices would each be a full-size tensor.
    written, chunk_decay = (x.split(list(counts)) for x in (written_NHpn, from_start_NHC1[:, :, -1:]))

    def advance(i: int, state: Tensor, rest: int) -> Tensor:
        return torch.addcmul(*(take_rows(x, rest) for x in (written[i], state, chunk_decay[i])))

    keep = state_RHpn is not None
    if state_RHpn is None:
        state_RHpn = x_NHCp.new_zeros(counts[0], *written_NHpn.shape[1:])
    before_NHpn, final_RHpn = scan_chunks(state_RHpn, counts, advance, keep=keep)
    across_NGfC = before_NHpn.unflatten(1, (groups, -1)).flatten(2, 3) @ c_NGCn.mT
    across_NHCp = across_NGfC.view(len(x_NHCp), *x_NCHp.shape[2:], -1).mT
    return (within_NHCp + across_NHCp * from_start_NHC1).transpose(1, 2), final_RHpn
