"""Tensor-parallel decoder: the decoder of a rank's smaller spec, with all-reduces where partial sums are added up.

Shapes: T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.batch_invariant.elementwise import tree_sum
from miles.kernels.numerics import FAST, Numerics
from miles.models.decoder import Decoder, DecoderLayer
from miles.models.layers.attention import Attention
from miles.models.layers.linear import Embedding
from miles.models.layers.ngram_embedding import NgramEmbedding
from miles.models.layers.norm import RMSNorm
from miles.models.parallel.tp_sharding import shard_spec
from miles.models.spec import DecoderSpec, MlpSpec


class TpGroup(Protocol):
    """The tensor-parallel ranks of one decoder, seen from one of them."""

    rank: int
    world: int

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, the same bits on each; ``x`` may be overwritten. All ranks call it in one order."""
        ...


Collective = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class TpCollectives:
    """The collectives of a tensor-parallel decoder.

    ``reduce_from_tp`` sums the partial outputs of the embedding, a mixer or a feed-forward part over the ranks,
    ``all_reduce`` sums inside a mixer; ``copy_to_tp``, needed in training, precedes every mixer and feed-forward part.
    Under sequence parallelism ``select_own`` returns this rank's tokens of all.
    """

    reduce_from_tp: Collective
    all_reduce: Collective
    copy_to_tp: Collective | None = None
    select_own: Collective | None = None


class VocabParallelEmbedding(Embedding):
    """Some rows of an embedding: tokens of other ranks' rows are zeros before the all-reduce."""

    def __init__(
        self,
        rows: int,
        width: int,
        first: int,
        reduce_from_tp: Collective,
        *,
        device: torch.device | str,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(rows, width, device=device, dtype=dtype)
        self.first, self.reduce_from_tp = first, reduce_from_tp

    def forward(self, input: Tensor) -> Tensor:
        local_T = input - self.first
        here_T = (local_T >= 0) & (local_T < self.num_embeddings)
        x_TD = F.embedding(local_T.clamp(0, self.num_embeddings - 1), self.weight)
        return self.reduce_from_tp(torch.where(here_T[..., None], x_TD, 0))


class ParallelRMSNorm(RMSNorm):
    """RMSNorm of this rank's channels over the channels of all ranks."""

    def __init__(self, norm: RMSNorm, world: int, all_reduce: Collective) -> None:
        super().__init__(
            *norm.shape,
            norm.eps,
            offset=norm.offset,
            device=norm.weight.device,
            dtype=norm.weight.dtype,
            numerics=norm.numerics,
        )
        self.all_reduce = all_reduce
        self.channels = norm.shape[0] * world

    def forward(self, x: Tensor) -> Tensor:
        # Replicated channels count as often in the divisor as in the sum.
        fp32 = x.to(torch.promote_types(x.dtype, torch.float32))
        square = fp32 * fp32
        invariant = self.numerics.batch_invariant
        mean = self.all_reduce(tree_sum(square) if invariant else square.sum(-1, keepdim=True)) / self.channels
        # Division and square root are correctly rounded everywhere; rsqrt is not.
        scale = torch.ones_like(mean) / (mean + self.eps).sqrt() if invariant else torch.rsqrt(mean + self.eps)
        return (fp32 * scale * self.scale()).to(x.dtype)


def split_table(ngram: NgramEmbedding, rank: int, reduce_from_tp: Collective) -> None:
    """Let the table of n-grams, built with the rows of one rank, look up those of all."""
    table = ngram.table
    rows, width, weight = table.num_embeddings, table.embedding_dim, table.weight
    ngram.table = VocabParallelEmbedding(
        rows, width, rank * rows, reduce_from_tp, device=weight.device, dtype=weight.dtype
    )


def build_tp_decoder(
    spec: DecoderSpec,
    group: TpGroup,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    numerics: Numerics = FAST,
    collectives: TpCollectives | None = None,
) -> Decoder:
    """Build the decoder of one rank, to be filled with ``shard_param`` of the full tensors.

    Its hidden states are those of the full model; its head has only this rank's rows, those beyond the vocabulary being
    zeros. Without ``collectives`` ranks use plain all-reduces without gradients.
    """
    rank_spec = shard_spec(spec, group.world)
    decoder = Decoder(rank_spec, device=device, dtype=dtype, numerics=numerics)
    if group.world == 1:
        return decoder
    if collectives is None:
        collectives = TpCollectives(reduce_from_tp=group.sum, all_reduce=group.sum)
    rows = rank_spec.vocab_size
    decoder.embedding = VocabParallelEmbedding(
        rows, rank_spec.hidden_size, group.rank * rows, collectives.reduce_from_tp, device=device, dtype=dtype
    )
    for number, layer in enumerate(decoder.layers):
        assert isinstance(layer, DecoderLayer)
        layer.copy_to_tp, layer.reduce_from_tp = collectives.copy_to_tp, collectives.reduce_from_tp
        layer.select_own = collectives.select_own
        if layer.ngram is not None:
            # Under sequence parallelism every rank has the embeddings of all tokens, and uses those of its own.
            is_split = collectives.select_own is not None
            split_table(layer.ngram, group.rank, collectives.all_reduce if is_split else collectives.reduce_from_tp)
        for module in layer.children():
            if isinstance(module, Attention) and module.spec.qk_norm == "all":
                assert module.q_norm is not None and module.k_norm is not None
                module.q_norm = ParallelRMSNorm(module.q_norm, group.world, collectives.all_reduce)
                module.k_norm = ParallelRMSNorm(module.k_norm, group.world, collectives.all_reduce)
        ffn = spec.layers[number].ffn
        if layer.mlp is not None and isinstance(ffn, MlpSpec):
            layer.mlp.all_channels = ffn.size, collectives.all_reduce
    return decoder
