"""A rank's decoder: the ordinary one of its smaller spec, joined to the others' wherever a sum over ranks is due.

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

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


class PartEmbedding(Embedding):
    """Some rows of an embedding: tokens of other ranks' rows are zeros here, until the sum."""

    def __init__(self, rows: int, width: int, ring: Ring, *, device: torch.device | str, dtype: torch.dtype) -> None:
        super().__init__(rows, width, device=device, dtype=dtype)
        self.ring = ring
        self.first = ring.rank * rows

    def forward(self, input: Tensor) -> Tensor:
        local_T = input - self.first
        here_T = (local_T >= 0) & (local_T < self.num_embeddings)
        x_TD = F.embedding(local_T.clamp(0, self.num_embeddings - 1), self.weight)
        return self.ring.sum(torch.where(here_T[..., None], x_TD, 0))


class PartNorm(RMSNorm):
    """Some channels of a vector that is normalised over the channels of all ranks."""

    def __init__(self, norm: RMSNorm, ring: Ring) -> None:
        super().__init__(*norm.shape, norm.eps, offset=norm.offset, device=norm.weight.device, dtype=norm.weight.dtype)
        self.ring = ring
        self.channels = norm.shape[0] * ring.world

    def forward(self, x: Tensor) -> Tensor:
        # Channels that several ranks have weigh as much in the count as in the sum.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        mean = self.ring.sum(wide.square().sum(-1, keepdim=True)) / self.channels
        return (wide * torch.rsqrt(mean + self.eps) * self.scale()).to(x.dtype)


def decoder_of_rank(spec: DecoderSpec, ring: Ring, *, device: torch.device | str, dtype: torch.dtype) -> Decoder:
    """The decoder of one rank, to be filled with ``shard.slice_of`` the whole one's tensors.

    Its hidden states are those of the whole; its head has this rank's rows alone, those behind the vocabulary's end
    being zeros.
    """
    small = spec_of_rank(spec, ring.world)
    decoder = Decoder(small, device=device, dtype=dtype)
    if ring.world == 1:
        return decoder
    decoder.embedding = PartEmbedding(small.vocab_size, small.hidden_size, ring, device=device, dtype=dtype)
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        layer.reduce = ring.sum
        for module in layer.children():
            if isinstance(module, Attention) and module.spec.qk_norm == "all":
                assert module.q_norm is not None and module.k_norm is not None
                module.q_norm, module.k_norm = PartNorm(module.q_norm, ring), PartNorm(module.k_norm, ring)
    return decoder
