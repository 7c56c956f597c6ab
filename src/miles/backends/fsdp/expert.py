"""Expert parallel: each rank has some of the experts of every layer, and rows travel to them and back.

Shapes: R rows of this rank, sorted by expert; N rows that came here; W ranks; E experts of all ranks, e of one;
D features.

    rank 0   sort by expert ─ counts ─┐ rows ─┐ sort by own expert ─ experts ─┐ rows back ─ weigh, add a token's choices
    rank 1   sort by expert ─ counts ─┘ rows ─┘ sort by own expert ─ experts ─┘ rows back ─ weigh, add a token's choices

The host waits for the device once a layer, for the counts, because how many rows come is the size of what receives
them; meanwhile the device copies the rows. Backward knows the sizes and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from miles.core.errors import UsageError
from miles.kernels.grouped import Rows, order_rows, permute
from miles.models.decoder import Decoder, Layer
from miles.models.moe import MoeMlp
from miles.models.spec import DecoderSpec, MoeSpec

__all__ = [
    "AllToAll",
    "Ring",
    "cut",
    "gathered",
    "ignored",
    "misfit",
    "names",
    "of_rank",
    "prefetch",
    "shard",
    "shard_dim",
]


class Ring(Protocol):
    """The ranks that share the experts, seen from one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Rows to everyone and from everyone: ``sent[i]`` rows of ``x`` go to rank i, ``received[i]`` come from it."""
        ...


# -- who has what ---------------------------------------------------------------------------


def names(spec: DecoderSpec) -> frozenset[str]:
    """The decoder's parameters that are cut over the expert ranks, along dimension 0."""
    return frozenset(
        f"layers.{i}.moe.{name}"
        for i, layer in enumerate(spec.layers)
        if isinstance(layer.ffn, MoeSpec)
        for name in _stacked(layer.ffn)
    )


def _stacked(spec: MoeSpec) -> tuple[str, ...]:
    biases = ("gate_up_bias", "down_bias") if spec.expert_bias else ()
    return ("gate_up" if spec.gated else "up", "down", *biases)


def misfit(spec: DecoderSpec, world: int) -> str | None:
    """Why ``world`` ranks cannot share the experts of this model, if they cannot; for a sentence to go on with."""
    if world == 1:
        return None
    if not spec.moe_layers:
        return "it has no experts"
    counts = ((i, layer.ffn.num_experts) for i, layer in enumerate(spec.layers) if isinstance(layer.ffn, MoeSpec))
    return next((f"layer {i} has {count} experts" for i, count in counts if count % world), None)


def of_rank(whole: Tensor, rank: int, world: int) -> Tensor:
    """A rank's experts of a stacked tensor: a view."""
    assert len(whole) % world == 0
    return whole.narrow(0, rank * (len(whole) // world), len(whole) // world)


def gathered(parts: Sequence[Tensor]) -> Tensor:
    """The stacked tensor again, from the ranks' in order."""
    return torch.cat(list(parts))


def _layers(decoder: nn.Module) -> Iterable[MoeMlp]:
    """The layers' mixtures of experts, in order."""
    return (module for module in decoder.modules() if isinstance(module, MoeMlp))


def cut(decoder: Decoder, ring: Ring) -> None:
    """Leave this rank's experts in ``decoder``, and join them to the others'.

    The decoder may have no storage yet: then its experts' parameters merely become as small as they are to be. The
    tensors of one that has are copied, so that the others' experts are let go.
    """
    problem = misfit(decoder.spec, ring.world)
    if problem is not None:
        raise UsageError(
            f"the model's experts cannot be dealt out evenly to {ring.world} ranks: {problem}; "
            "choose an --expert-model-parallel-size that divides the number of experts."
        )
    if ring.world == 1:
        return
    exchange = AllToAll(ring)
    for moe in _layers(decoder):
        for name in _stacked(moe.spec):
            old = moe.get_parameter(name)
            own = of_rank(old.detach(), ring.rank, ring.world).clone()
            moe.register_parameter(name, nn.Parameter(own, requires_grad=old.requires_grad))
        moe.exchange = exchange


# -- the way of the rows --------------------------------------------------------------------


class AllToAll:
    """Takes rows to the ranks that have their experts, and what came of them back."""

    def __init__(self, ring: Ring) -> None:
        self.world = ring.world
        self._ring = ring

    def open(self, rows: Rows) -> Trip:
        count_E = torch.diff(rows.ends_E, prepend=rows.ends_E.new_zeros(1))
        each = [len(count_E) // self.world] * self.world
        coming_We = self._ring.all_to_all(count_E, each, each).unflatten(0, (self.world, -1))
        return Trip(count_E.unflatten(0, (self.world, -1)), coming_We, self._ring)


class Trip:
    """``counts_We`` rows go to each rank's experts from here, ``coming_We`` come from each rank to the experts here."""

    def __init__(self, counts_We: Tensor, coming_We: Tensor, ring: Ring) -> None:
        self._coming_We, self._ring = coming_We, ring
        # The one copy to the host. What the device is asked to do from here on, it does while the host waits for it.
        self._sizes = torch.stack((counts_We.sum(1), coming_We.sum(1))).to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream(coming_We.device).record_event() if coming_We.is_cuda else None

    def __call__(self, x_RD: Tensor, work: Callable[[Tensor, Rows], Tensor]) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        sent, came = self._sizes.tolist()
        here = _arrived(self._coming_We, sum(came))
        x_ND = permute(_travel(x_RD, sent, came, self._ring), here.order_R, here.place_R)
        out_ND = permute(work(x_ND, here), here.place_R, here.order_R)
        return _travel(out_ND, came, sent, self._ring)


def _arrived(coming_We: Tensor, count: int) -> Rows:
    """The order of ``count`` rows by this rank's experts; rows of one expert in the order of ranks, then of tokens."""
    ranks, experts = coming_We.shape
    expert_We = torch.arange(experts, device=coming_We.device).repeat(ranks)
    expert_N = expert_We.repeat_interleave(coming_We.flatten(), output_size=count)
    return order_rows(expert_N.unsqueeze(1), experts)


class _Travel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, sent: list[int], came: list[int], ring: Ring) -> Tensor:
        ctx.sent, ctx.came, ctx.ring = sent, came, ring
        return ring.all_to_all(x_RD, sent, came)

    @staticmethod
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ring: Ring = ctx.ring
        return ring.all_to_all(grad_ND, ctx.came, ctx.sent), None, None, None


def _travel(x_RD: Tensor, sent: list[int], came: list[int], ring: Ring) -> Tensor:
    """The rows that came from each rank in order, when so many are sent to each, in order too."""
    return _Travel.apply(x_RD, sent, came, ring)  # pyright: ignore[reportReturnType]


# -- experts of one rank, dealt out further -------------------------------------------------


def ignored(decoder: nn.Module) -> set[nn.Parameter]:
    """What ``fully_shard`` of a layer must leave to ``shard``."""
    return {moe.get_parameter(name) for moe in _layers(decoder) for name in _stacked(moe.spec)}


def shard(moe: MoeMlp, mesh: DeviceMesh, *, policy: MixedPrecisionPolicy, offload: OffloadPolicy) -> None:
    """Give the experts, and nothing else of ``moe``, to FSDP over ``mesh``: the ranks that have the same experts.

    The layer around it is to be given first, with these among its ``ignored_params``, because FSDP does not look into
    what it has been given already.
    """
    own = ignored(moe)
    world = mesh.size(-1)

    def placed(parameter: nn.Parameter) -> Shard:
        return Shard(shard_dim(parameter.shape, world))

    rest = {parameter for parameter in moe.parameters() if parameter not in own}
    fully_shard(
        moe, mesh=mesh, mp_policy=policy, offload_policy=offload, ignored_params=rest, shard_placement_fn=placed
    )


def shard_dim(shape: Sequence[int], world: int) -> int:
    """The dimension along which ``world`` ranks share a rank's experts: whole experts, or where these do not come out
    even, their rows if those do."""
    return 1 if shape[0] % world and shape[1] % world == 0 else 0


def prefetch(layers: Sequence[Layer]) -> None:
    """Have FSDP bring the next layer's parameters together while this one's rows travel; call it when all are given.

    It would do so by itself if the host ran ahead of the device, which waiting for counts prevents; and of the experts,
    which are all but last in a layer's forward and all but first in its backward, always too late.
    """
    for layer, behind in pairwise(layers):
        # Behind a norm, experts run again before their backward is due, and would fetch what is done with.
        if layer.mlp_post_norm is None:
            _last(layer).set_modules_to_forward_prefetch(_given(behind))
        _last(behind).set_modules_to_backward_prefetch(_given(layer))


def _given(layer: Layer) -> list[FSDPModule]:
    """The modules of a layer that FSDP was given, in the order of a forward."""
    return [module for module in (layer, layer.moe) if isinstance(module, FSDPModule)]


def _last(layer: Layer) -> FSDPModule:
    return _given(layer)[-1]
