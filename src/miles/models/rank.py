"""A rank's decoder: the ordinary one of its smaller spec, joined to the others' wherever a sum over ranks is due.

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.arithmetic import exact
from miles.kernels.exact.elements import summed
from miles.models.attention import Attention
from miles.models.decoder import Decoder, Layer
from miles.models.linear import Embedding
from miles.models.norm import RMSNorm
from miles.models.shard import spec_of_rank
from miles.models.spec import DecoderSpec


class Ring(Protocol):
    """The ranks that hold one decoder together, seen from one of them."""

    rank: int
    world: int

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each; ``x`` may be overwritten. All ranks call it in one order."""
        ...


Join = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joints:
    """What is done where a rank's decoder meets the others'.

    ``reduce`` makes the residual stream of what an embedding, a mixer or a feed-forward part gives on one rank,
    ``within`` adds up in the midst of a mixer what all go on with; ``enter``, which training needs, stands before
    every mixer and feed-forward part.
    """

    reduce: Join
    within: Join
    enter: Join | None = None


class PartEmbedding(Embedding):
    """Some rows of an embedding: tokens of other ranks' rows are zeros here, until the sum."""

    def __init__(
        self, rows: int, width: int, first: int, reduce: Join, *, device: torch.device | str, dtype: torch.dtype
    ) -> None:
        super().__init__(rows, width, device=device, dtype=dtype)
        self.first, self.reduce = first, reduce

    def forward(self, input: Tensor) -> Tensor:
        local_T = input - self.first
        here_T = (local_T >= 0) & (local_T < self.num_embeddings)
        x_TD = F.embedding(local_T.clamp(0, self.num_embeddings - 1), self.weight)
        return self.reduce(torch.where(here_T[..., None], x_TD, 0))


class PartNorm(RMSNorm):
    """Some channels of a vector that is normalised over the channels of all ranks."""

    def __init__(self, norm: RMSNorm, world: int, within: Join) -> None:
        super().__init__(*norm.shape, norm.eps, offset=norm.offset, device=norm.weight.device, dtype=norm.weight.dtype)
        self.within = within
        self.channels = norm.shape[0] * world

    def forward(self, x: Tensor) -> Tensor:
        # Channels that several ranks have weigh as much in the count as in the sum.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        square = wide * wide
        mean = self.within(summed(square) if exact() else square.sum(-1, keepdim=True)) / self.channels
        # A quotient and a root round alike everywhere; a reciprocal root need not.
        scale = torch.ones_like(mean) / (mean + self.eps).sqrt() if exact() else torch.rsqrt(mean + self.eps)
        return (wide * scale * self.scale()).to(x.dtype)


def decoder_of_rank(
    spec: DecoderSpec,
    ring: Ring,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    joints: Joints | None = None,
) -> Decoder:
    """The decoder of one rank, to be filled with ``shard.slice_of`` the whole one's tensors.

    Its hidden states are those of the whole; its head has this rank's rows alone, those behind the vocabulary's end
    being zeros. Without ``joints`` ranks are joined by plain sums, through which no gradient flows.
    """
    small = spec_of_rank(spec, ring.world)
    decoder = Decoder(small, device=device, dtype=dtype)
    if ring.world == 1:
        return decoder
    if joints is None:
        joints = Joints(reduce=ring.sum, within=ring.sum)
    rows = small.vocab_size
    decoder.embedding = PartEmbedding(
        rows, small.hidden_size, ring.rank * rows, joints.reduce, device=device, dtype=dtype
    )
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        layer.enter, layer.reduce = joints.enter, joints.reduce
        for module in layer.children():
            if isinstance(module, Attention) and module.spec.qk_norm == "all":
                assert module.q_norm is not None and module.k_norm is not None
                module.q_norm = PartNorm(module.q_norm, ring.world, joints.within)
                module.k_norm = PartNorm(module.k_norm, ring.world, joints.within)
    return decoder
