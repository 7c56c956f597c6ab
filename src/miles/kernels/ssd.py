"""Mamba-2's recurrence: a matrix a head that fades by a step of the token's own and takes in what it brings.

Shapes: T tokens, H heads, p channels of a head, G groups of s = H / G heads, n channels of the state, B sequences,
R those of a group of chunks, N chunks, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from miles.kernels.chunks import fading, head, recur, walk


def ssd(
    x_THp: Tensor,
    dt_TH: Tensor,
    a_H: Tensor,
    b_TGn: Tensor,
    c_TGn: Tensor,
    d_H: Tensor,
    lengths: Sequence[int],
    state_BHpn: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Token by token: fade the state by exp(dt a), add dt x b, read it with c, add d x.

    Neighbouring heads share a group's b and c. ``dt`` is never negative, ``a`` never positive. The arithmetic and the
    state are float32; the output has the dtype of ``x``. A state of None says that all sequences begin here and
    nobody asks what they leave.
    """
    if len(x_THp) == 0:
        return x_THp, state_BHpn
    wide = torch.promote_types(x_THp.dtype, torch.float32)
    x, dt_TH, b, c = (t.to(wide) for t in (x_THp, dt_TH, b_TGn, c_TGn))
    inputs = (x * dt_TH.unsqueeze(-1), dt_TH * a_H.to(wide), b, c)
    state_BHpn = None if state_BHpn is None else state_BHpn.to(wide)
    y_THp, state_BHpn = recur(inputs, lengths, state_BHpn, step=_step, chunks=_chunks)
    return torch.addcmul(y_THp, x, d_H.to(wide).unsqueeze(-1)).to(x_THp.dtype), state_BHpn


def _step(
    state_RHpn: Tensor | None, x_RHp: Tensor, log_decay_RH: Tensor, b_RGn: Tensor, c_RGn: Tensor
) -> tuple[Tensor, Tensor | None]:
    """One token of each sequence; ``x`` has its step in it already."""
    share = x_RHp.shape[1] // b_RGn.shape[1]
    b_RHn, c_RHn = b_RGn.repeat_interleave(share, 1), c_RGn.repeat_interleave(share, 1)
    if state_RHpn is None:
        return x_RHp * (b_RHn * c_RHn).sum(-1, keepdim=True), None
    faded_RHpn = state_RHpn * log_decay_RH.exp()[..., None, None]
    state_RHpn = torch.addcmul(faded_RHpn, x_RHp.unsqueeze(-1), b_RHn.unsqueeze(-2))
    return (state_RHpn @ c_RHn.unsqueeze(-1)).squeeze(-1), state_RHpn


def _chunks(
    counts: Sequence[int],
    state_RHpn: Tensor | None,
    x_NCHp: Tensor,
    log_decay_NCH: Tensor,
    b_NCGn: Tensor,
    c_NCGn: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Many tokens of each sequence: what a chunk's tokens tell each other is attention without a softmax, what
    earlier chunks told is in the state before."""
    groups = b_NCGn.shape[2]
    x_NHCp = x_NCHp.transpose(1, 2)
    b_NGCn, c_NGCn = b_NCGn.transpose(1, 2), c_NCGn.transpose(1, 2)
    left_NHCC, total_NHC = fading(log_decay_NCH.transpose(1, 2))
    past_NHC1 = total_NHC.exp().to(x_NCHp.dtype).unsqueeze(-1)
    ahead_NHC1 = (total_NHC[..., -1:] - total_NHC).exp().to(x_NCHp.dtype).unsqueeze(-1)
    seen_NGsCC = (c_NGCn @ b_NGCn.mT).unsqueeze(2) * left_NHCC.unflatten(1, (groups, -1))
    near_NHCp = seen_NGsCC.flatten(1, 2) @ x_NHCp
    # The heads of a group as one: rows (head, channel) against the group's own b and c.
    lasting_NGfC = (x_NHCp * ahead_NHC1).mT.unflatten(1, (groups, -1)).flatten(2, 3)
    brought_NHpn = (lasting_NGfC @ b_NGCn).view(len(x_NHCp), *x_NCHp.shape[2:], -1)
    # Split at once: in backward a split is one join, where slices would each be a tensor of the whole size.
    brought, kept = (x.split(list(counts)) for x in (brought_NHpn, past_NHC1[:, :, -1:]))

    def advance(i: int, state: Tensor, rest: int) -> Tensor:
        return torch.addcmul(*(head(x, rest) for x in (brought[i], state, kept[i])))

    keep = state_RHpn is not None
    if state_RHpn is None:
        state_RHpn = x_NHCp.new_zeros(counts[0], *brought_NHpn.shape[1:])
    before_NHpn, final_RHpn = walk(state_RHpn, counts, advance, keep=keep)
    far_NGfC = before_NHpn.unflatten(1, (groups, -1)).flatten(2, 3) @ c_NGCn.mT
    far_NHCp = far_NGfC.view(len(x_NHCp), *x_NCHp.shape[2:], -1).mT
    return (near_NHCp + far_NHCp * past_NHC1).transpose(1, 2), final_RHpn
