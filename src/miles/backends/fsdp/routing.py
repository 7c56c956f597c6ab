"""Which experts a forward in training is to use, and what it tells of those it used.

Shapes: T packed input tokens as this rank has them, L layers with experts, E experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from miles.core.errors import MilesError
from miles.models.moe import Routing
from miles.models.spec import DecoderSpec
from miles.train.experts import Used


@dataclass(slots=True, kw_only=True)
class Watched(Routing):
    """Counts the replayed experts that the router itself would not have chosen, by layer.

    The last ``fill`` tokens only fill up: their experts are no load.
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
            told_T = (self.replay_TLk[:, slot] >= 0).all(-1)
            agreed_Tk = (used_Tk[:, :, None] == own_Tk[:, None, :]).any(-1)
            self.flips[slot] = (~agreed_Tk & told_T[:, None]).sum()
            self.replayed[slot] = told_T.sum() * own_Tk.shape[-1]
        return used_Tk


def routing_of(
    spec: DecoderSpec, replay_TLk: Tensor | None, used: Used | None, *, device: torch.device, fill: int = 0
) -> Watched | None:
    """What a forward is told: to use what an earlier one ``used``, else what is to be replayed; None without experts.

    A forward that is to be learnt from counts how often each expert is chosen.
    """
    moe = spec.moe
    if moe is None:
        return None
    layers = len(spec.moe_layers)
    if replay_TLk is not None and replay_TLk.shape[1:] != (layers, moe.experts_per_token):
        raise MilesError(
            f"the engine recorded {replay_TLk.shape[2]} experts a token in {replay_TLk.shape[1]} layers, and the model "
            f"in training has {moe.experts_per_token} in {layers}; is it the same model?"
        )
    again = None if used is None else used.experts_tLk
    load_LE = None
    if torch.is_grad_enabled():
        load_LE = torch.zeros(layers, moe.num_experts, dtype=torch.int64, device=device)
    record = used is not None and again is None
    return Watched(replay_TLk=replay_TLk if again is None else again, record=record, load_LE=load_LE, fill=fill)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a forward says of its experts, over the whole micro-batch; None each where it has nothing to say."""

    flips: Tensor | None = None
    replayed: Tensor | None = None
    load_LE: Tensor | None = None


def told_by(routing: Watched | None, used: Used | None, joined: Callable[[Tensor], Tensor] | None = None) -> Told:
    """Also remembers in ``used`` what was to be recorded. ``joined`` adds up over ranks that share the tokens."""
    if routing is None:
        return Told()
    if routing.record and used is not None:
        used.experts_tLk = torch.stack(routing.recorded, 1).to(torch.int32)
        used.experts_tLk[len(used.experts_tLk) - routing.fill :] = -1
    flips = replayed = None
    if routing.replay_TLk is not None:
        counts = [torch.stack(list(each.values())).sum() for each in (routing.flips, routing.replayed)]
        both = torch.stack(counts)
        flips, replayed = (both if joined is None else joined(both)).unbind()
    load_LE = routing.load_LE
    return Told(
        flips=flips, replayed=replayed, load_LE=load_LE if load_LE is None or joined is None else joined(load_LE)
    )
