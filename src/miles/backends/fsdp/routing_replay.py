"""Routing replay in training: which experts a forward uses, and statistics of its routing.

Shapes: T packed input tokens of this rank, L MoE layers, E experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles.core.errors import MilesError
from miles.models.layers.moe import Routing
from miles.models.spec import DecoderSpec
from miles.train.batch_tensors import RoutedExpertsCache


@dataclass(slots=True, kw_only=True)
class ReplayRouting(Routing):
    """Counts the replayed experts that the router itself would not have selected, by layer.

    The last ``fill`` tokens are padding: their experts do not count as load.
    """

    fill: int = 0
    flips: dict[int, Tensor] = field(default_factory=dict)
    replayed: dict[int, Tensor] = field(default_factory=dict)

    def choose(self, slot: int, own_Tk: Tensor) -> Tensor:
        first = slot not in self.counted
        used_Tk = Routing.choose(self, slot, own_Tk)
        if self.fill and first and self.load_LE is not None:
            none_R = used_Tk[-self.fill :].flatten()
            self.load_LE[slot].scatter_add_(0, none_R, torch.full_like(none_R, -1))
        if self.replay_TLk is not None:
            replayed_T = (self.replay_TLk[:, slot] >= 0).all(-1)
            agreed_Tk = (used_Tk[:, :, None] == own_Tk[:, None, :]).any(-1)
            self.flips[slot] = (~agreed_Tk & replayed_T[:, None]).sum()
            self.replayed[slot] = replayed_T.sum() * own_Tk.shape[-1]
        return used_Tk


def build_routing(
    spec: DecoderSpec,
    replay_TLk: Tensor | None,
    used: RoutedExpertsCache | None,
    *,
    device: torch.device,
    fill: int = 0,
) -> ReplayRouting | None:
    """Build the routing of a forward: replay what an earlier forward ``used``, else ``replay_TLk``; None without
    experts.

    A forward with gradients counts how often each expert is selected.
    """
    moe = spec.moe
    if moe is None:
        return None
    layers = len(spec.moe_layers)
    if replay_TLk is not None and replay_TLk.shape[1:] != (layers, moe.experts_per_token):
        raise MilesError(
            f"the engine recorded {replay_TLk.shape[2]} experts per token in {replay_TLk.shape[1]} layers, but the "
            f"model in training has {moe.experts_per_token} in {layers}: use the same model in both."
        )
    earlier_tLk = None if used is None else used.experts_tLk
    load_LE = None
    if torch.is_grad_enabled():
        load_LE = torch.zeros(layers, moe.num_experts, dtype=torch.int64, device=device)
    record = used is not None and earlier_tLk is None
    return ReplayRouting(
        replay_TLk=replay_TLk if earlier_tLk is None else earlier_tLk, record=record, load_LE=load_LE, fill=fill
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStats:
    """Routing statistics of a forward over the whole micro-batch; None where not available."""

    flips: Tensor | None = None
    replayed: Tensor | None = None
    load_LE: Tensor | None = None


def collect_routing_stats(
    routing: ReplayRouting | None, used: RoutedExpertsCache | None, all_reduce: Callable[[Tensor], Tensor] | None = None
) -> RoutingStats:
    """Collect the statistics, and store recorded experts in ``used``. ``all_reduce`` sums over ranks that share the
    tokens.
    """
    if routing is None:
        return RoutingStats()
    if routing.record and used is not None:
        used.experts_tLk = torch.stack(routing.recorded, 1).to(torch.int32)
        used.experts_tLk[len(used.experts_tLk) - routing.fill :] = -1
    flips = replayed = None
    if routing.replay_TLk is not None:
        counts = [torch.stack(list(each.values())).sum() for each in (routing.flips, routing.replayed)]
        both = torch.stack(counts)
        flips, replayed = (both if all_reduce is None else all_reduce(both)).unbind()
    load_LE = routing.load_LE
    return RoutingStats(
        flips=flips,
        replayed=replayed,
        load_LE=load_LE if load_LE is None or all_reduce is None else all_reduce(load_LE),
    )
