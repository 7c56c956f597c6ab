"""Context parallelism of recurrences: each rank scans its parts of the sequences at once, and states are passed on.

The state after a part is an affine function of the state before it. A rank scans its parts from a state of zeros, and
computes beside that how the state before a part changes its outputs and the state after it; states before all parts
then follow from those of all ranks. (Batch-invariant recurrences take turns: ``batch_invariant.recurrent_scan``.)

Shapes: t tokens of this rank, B its parts of sequences, L tokens of a part, H heads, G key heads (of Mamba-2: groups),
k channels of a key, v of a value, p channels of a head, n of a Mamba-2 state.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from miles.kernels.attention.params import SequenceShard
from miles.kernels.linear_attention.mamba2_ssd import mamba2_ssd

DeltaRule = Callable[..., tuple[Tensor, Tensor | None]]
"""``gated_delta_rule`` or ``kimi_delta_rule``."""


def split_delta_rule(
    rule: DeltaRule,
    q_tGk: Tensor,
    k_tGk: Tensor,
    v_tHv: Tensor,
    log_decay: Tensor,
    beta_tH: Tensor,
    shard: SequenceShard,
) -> Tensor:
    """A delta rule over this rank's parts of the sequences, [t, H, v].

    Every column of a state goes its own way, and how a part changes the state before it are k columns more: those of
    the identity, to which nothing is written.
    """
    wide = torch.promote_types(v_tHv.dtype, torch.float32)
    heads, channels, size = *v_tHv.shape[1:], q_tGk.shape[-1]
    columns_tHx = torch.cat((v_tHv.to(wide), v_tHv.new_zeros(len(v_tHv), heads, size, dtype=wide)), -1)
    identity_kk = torch.eye(size, dtype=wide, device=v_tHv.device)
    start_kx = torch.cat((identity_kk.new_zeros(size, channels), identity_kk), -1)
    start_BHkx = start_kx.expand(len(shard.parts), heads, -1, -1)
    out_tHx, end_BHkx = rule(q_tGk, k_tGk, columns_tHx, log_decay, beta_tH, shard.parts, start_BHkx)
    assert end_BHkx is not None

    def advance(state_BHkv: Tensor | None, part_BHkx: Tensor) -> Tensor:
        written_BHkv, carried_BHkk = part_BHkx.split((channels, size), -1)
        return written_BHkv if state_BHkv is None else written_BHkv + carried_BHkk @ state_BHkv

    before_BHkv = shard.pass_states(end_BHkx, advance)
    out_tHv, read_tHk = out_tHx.split((channels, size), -1)
    carried = [
        (read_LHk.transpose(0, 1) @ state_Hkv).transpose(0, 1)
        for read_LHk, state_Hkv in zip(read_tHk.split(list(shard.parts)), before_BHkv.unbind(0), strict=True)
    ]
    return (out_tHv + torch.cat(carried)).to(v_tHv.dtype)


def split_mamba2_ssd(
    x_tHp: Tensor, dt_tH: Tensor, a_H: Tensor, b_tGn: Tensor, c_tGn: Tensor, d_H: Tensor, shard: SequenceShard
) -> Tensor:
    """The SSD scan over this rank's parts of the sequences, [t, H, p]; a part only scales the state before it."""
    parts = list(shard.parts)
    wide = torch.promote_types(x_tHp.dtype, torch.float32)
    heads, channels, size = *x_tHp.shape[1:], b_tGn.shape[-1]
    start_BHpn = x_tHp.new_zeros(len(parts), heads, channels, size, dtype=wide)
    y_tHp, end_BHpn = mamba2_ssd(x_tHp.to(wide), dt_tH, a_H, b_tGn, c_tGn, d_H, parts, start_BHpn)
    assert end_BHpn is not None
    # Sums of logs are float64: a difference of two long ones has few digits left in float32.
    logs = [log_LH.cumsum(0) for log_LH in (dt_tH.to(wide) * a_H.to(wide)).to(torch.float64).split(parts)]
    decays = [log_LH.exp().to(wide) for log_LH in logs]
    total_BH1 = torch.stack(
        [decay_LH[-1] if len(decay_LH) else torch.ones_like(end_BHpn[0, :, 0, 0]) for decay_LH in decays]
    ).unsqueeze(-1)

    def advance(state_BHs: Tensor | None, part_BHs: Tensor) -> Tensor:
        written_BHs, decay_BH1 = part_BHs[..., :-1], part_BHs[..., -1:]
        return written_BHs if state_BHs is None else torch.addcmul(written_BHs, state_BHs, decay_BH1)

    before_BHs = shard.pass_states(torch.cat((end_BHpn.flatten(2), total_BH1), -1), advance)
    groups = b_tGn.shape[1]
    carried = [
        (state_Hs.view(groups, -1, size) @ c_LGn.permute(1, 2, 0)).view(heads, channels, -1).permute(2, 0, 1)
        * decay_LH.unsqueeze(-1)
        for state_Hs, c_LGn, decay_LH in zip(before_BHs.unbind(0), c_tGn.to(wide).split(parts), decays, strict=True)
    ]
    return (y_tHp + torch.cat(carried)).to(x_tHp.dtype)
