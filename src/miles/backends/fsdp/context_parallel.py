"""Context parallelism: the tokens of a micro-batch are sharded, queries stay local, keys and values are all-gathered.

So are the keys of indexers and what compressed attention pools. Recurrent layers pass states between ranks, or
exchange whole sequences (``models.parallel.sequence_shard``).

    segment  |0|1|2|3|4|5|6|7|      with 4 ranks; rank 0 has chunks 0 and 7, rank 1 has 1 and 6, ...

Late chunks attend to many tokens and early ones to few, so that pairing them balances the load.

Shapes: T tokens of the whole micro-batch, t of this rank, padding included, equal on every rank; M = world * t keys of
all ranks; R trained tokens, r those that this rank predicts; H query heads, G key-value heads, d channels of a key, e
of a value; L MoE layers, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from miles.backends.fsdp.autograd_collectives import gather_from_sequence_region, gather_replicated
from miles.backends.fsdp.device_mesh import CommGroup
from miles.cluster.parallel_dims import assign_scans
from miles.kernels.attention.compressed import CompressorInputs
from miles.kernels.attention.indexer_replay import IndexerSelections
from miles.kernels.attention.params import (
    AttentionInputs,
    BlockIndexerInputs,
    IndexerInputs,
    RelativeBias,
    ShardedSequences,
)
from miles.kernels.attention.tree import KeyRuns, Segment, TreeAttentionBackend
from miles.kernels.attention.varlen import FreshRecurrentState
from miles.kernels.batch_invariant.packed_attention import BatchInvariantTreeBackend
from miles.kernels.numerics import Numerics
from miles.models.layers.attention_backend import AttentionBackend
from miles.models.parallel.sequence_shard import find_owner, shard_sequences
from miles.models.vision.inputs import VisionInputs
from miles.train.logprobs import ContextShard
from miles.train.packed_images import PackedImages, select_range
from miles.train.prefix_sharing import TreeNode


class PackedRows(Protocol):
    """Packed tokens, as in ``train.batch_tensors``."""

    @property
    def lengths(self) -> Sequence[int]: ...

    @property
    def tree_nodes(self) -> Sequence[TreeNode]: ...

    @property
    def tokens_T(self) -> Tensor: ...

    @property
    def positions_T(self) -> Tensor: ...

    @property
    def before_R(self) -> Tensor: ...

    @property
    def replay_TLk(self) -> Tensor | None: ...

    @property
    def indexer_TLk(self) -> Tensor | None: ...

    @property
    def images(self) -> PackedImages | None: ...


class ContextParallelAttention:
    """An AttentionBackend of one rank's queries over the keys and values of all ranks.

    Recurrent layers scan the sequences of ``lengths``, of which this rank has a ``shard``.
    """

    latent = False

    def __init__(
        self,
        segments: Sequence[Segment],
        own: int,
        group: CommGroup,
        device: torch.device,
        *,
        lengths: Sequence[int],
        shard: ShardedSequences,
        numerics: Numerics,
        selections: IndexerSelections | None = None,
    ) -> None:
        self._group = group
        self._lengths, self._shard = lengths, shard
        backend_class = BatchInvariantTreeBackend if numerics.batch_invariant else TreeAttentionBackend
        self._backend = backend_class(segments, device, keys=group.world * own, selections=selections)

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        inputs, index = self._gather_keys(inputs), inputs.indexer
        if isinstance(index, IndexerInputs | BlockIndexerInputs):
            index = replace(index, k_Td=gather_from_sequence_region(index.k_Td, self._group))
        return self._backend(layer, inputs._replace(indexer=index))

    def _gather_keys(self, inputs: AttentionInputs) -> AttentionInputs:
        """The inputs with the keys and values of all ranks, from one all-gather for both."""
        k_tGd, v_tGe = inputs.k_TGd, inputs.v_TGe
        both_MGx = gather_from_sequence_region(torch.cat((k_tGd, v_tGe), -1), self._group)
        k_MGd, v_MGe = both_MGx.split((k_tGd.shape[-1], v_tGe.shape[-1]), dim=-1)
        return inputs._replace(k_TGd=k_MGd, v_TGe=v_MGe)

    def attend_relative(self, layer: int, inputs: AttentionInputs, bias: RelativeBias) -> Tensor:
        """Attend with a relative position bias."""
        return self._backend.attend_relative(layer, self._gather_keys(inputs), bias)

    def attend_compressed(self, layer: int, inputs: AttentionInputs, compressor: CompressorInputs) -> Tensor:
        """Attend to a window of tokens and to compressed keys, computed from the states of the tokens of all ranks."""
        width = inputs.k_TGd.shape[-1]
        both_tx = torch.cat((inputs.k_TGd.flatten(1), compressor.states_Tx), -1)
        k_Md, states_Mx = gather_from_sequence_region(both_tx, self._group).tensor_split((width,), dim=1)
        k_M1d = k_Md.unsqueeze(1)
        inputs = inputs._replace(k_TGd=k_M1d, v_TGe=k_M1d)
        return self._backend.attend_compressed(layer, inputs, replace(compressor, states_Tx=states_Mx))

    def recurrent_state(self, layer: int) -> FreshRecurrentState:
        """The state of a recurrent layer: every sequence starts here, and this rank has a part of it."""
        return FreshRecurrentState(self._lengths, shard=self._shard)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextParallelTokens:
    """The ContextShard of one rank: ``where_R`` is the index of each trained token in the all-gathered rows, of which
    each rank sends ``most``.
    """

    mine_r: Tensor
    where_R: Tensor
    most: int
    group: CommGroup

    def join(self, x_r: Tensor) -> Tensor:
        missing = self.most - len(x_r)
        padded = F.pad(x_r, (*(0, 0) * (x_r.ndim - 1), 0, missing)) if missing else x_r
        return gather_replicated(padded, self.group).index_select(0, self.where_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """The tokens of one rank; the hidden states after its tokens ``at_r`` are needed.

    Under context parallelism, ``tokens`` says which of the needed ones are this rank's, and ``place_T`` where each
    token of the micro-batch is among those of all ranks. Some needed ones are ``repeated`` if samples share a prefix.
    The last ``fill`` tokens are padding. ``positions_T`` are [T], or [3, T] for M-RoPE; ``vision`` are the images of
    its own tokens, possibly none, if the batch has any. ``selections`` are those that its sparse attention replays.
    """

    tokens_T: Tensor
    positions_T: Tensor
    attn_backend: AttentionBackend
    at_r: Tensor
    replay_TLk: Tensor | None
    tokens: ContextShard | None = None
    place_T: Tensor | None = None
    repeated: bool = False
    fill: int = 0
    vision: VisionInputs | None = None
    selections: IndexerSelections | None = None


@dataclass(frozen=True, slots=True)
class _Assignment:
    """Token assignment: ``own`` tokens of each rank in order, each token's ``place_T`` among all ranks' slots of
    ``size`` each, and the chunks of each segment in those slots.
    """

    own: list[NDArray[np.int64]]
    size: int
    place_T: NDArray[np.int64]
    pieces: list[KeyRuns]


def _assign_tokens(lengths: Sequence[int], world: int, multiple: int) -> _Assignment:
    """Split every segment into 2 * world chunks and assign them forth and back (zigzag)."""
    own: list[list[NDArray[np.int64]]] = [[] for _ in range(world)]
    used = [0] * world
    found: list[list[tuple[int, int, int]]] = []
    start = 0
    for number, length in enumerate(lengths):
        # The remainder rotates with the segments.
        bounds = [(length * j + number % (2 * world)) // (2 * world) for j in range(2 * world + 1)]
        placed: list[tuple[int, int, int]] = []
        for piece, (lo, hi) in enumerate(pairwise(bounds)):
            rank = find_owner(piece, world)
            own[rank].append(np.arange(start + lo, start + hi))
            placed.append((rank, used[rank], hi - lo))
            used[rank] += hi - lo
        found.append(placed)
        start += length
    size = max(1, -(-max(used) // multiple)) * multiple
    place_T = np.empty(start, np.int64)
    joined = [np.concatenate(each) for each in own]
    for rank, tokens in enumerate(joined):
        place_T[tokens] = rank * size + np.arange(len(tokens))
    return _Assignment(joined, size, place_T, [tuple((r * size + at, n) for r, at, n in each) for each in found])


def _segments(tree_nodes: Sequence[TreeNode], assignment: _Assignment, rank: int, world: int) -> list[Segment]:
    """This rank's queries in order, padding last, which attends only to itself."""
    pasts: list[KeyRuns] = []
    out: list[Segment] = []
    for stretch, pieces in zip(tree_nodes, assignment.pieces, strict=True):
        past = () if stretch.parent is None else pasts[stretch.parent]
        pasts.append((*past, *pieces))
        for piece in (rank, 2 * world - 1 - rank):
            out.append(Segment(pieces[piece][1], (*past, *pieces[: piece + 1])))
    used = len(assignment.own[rank])
    return [*out, Segment(assignment.size - used, ((rank * assignment.size + used, assignment.size - used),))]


def shard_batch(
    rows: PackedRows,
    group: CommGroup,
    *,
    numerics: Numerics,
    multiple: int = 1,
    positions_T: Tensor | None = None,
    vision: VisionInputs | None = None,
    selections: IndexerSelections | None = None,
) -> RankBatch:
    """Return this rank's part of ``rows``; all ranks' parts are equally long, a ``multiple`` of so many tokens, padded
    at the end.

    ``rows`` are the same on all ranks of the group, and all call this together. ``positions_T`` are those that the
    model takes, by default those of ``rows``, and ``vision`` and ``selections`` those of all tokens.
    """
    positions_T = rows.positions_T if positions_T is None else positions_T
    tree_nodes = rows.tree_nodes or tuple(TreeNode(length) for length in rows.lengths)
    device = rows.tokens_T.device
    world = group.world
    rank = group.rank
    lengths = [node.length for node in tree_nodes]
    assignment = _assign_tokens(lengths, world, multiple)
    own_t = torch.from_numpy(assignment.own[rank]).to(device)
    more = assignment.size - len(own_t)
    place_T = torch.from_numpy(assignment.place_T).to(device)
    place_R = place_T[rows.before_R]
    owner_R = place_R // assignment.size
    mine_r = (owner_R == rank).nonzero()[:, 0]
    replay_tLk = None
    if rows.replay_TLk is not None:
        replay_tLk = F.pad(rows.replay_TLk.index_select(0, own_t), (0, 0, 0, 0, 0, more), value=-1)
    if selections is not None and selections.replay_TLk is not None:
        own_TLk = selections.replay_TLk[torch.from_numpy(assignment.own[rank])]
        selections = replace(selections, replay_TLk=F.pad(own_TLk, (0, 0, 0, 0, 0, more), value=-1))
    return RankBatch(
        tokens_T=F.pad(rows.tokens_T.index_select(0, own_t), (0, more)),
        positions_T=F.pad(positions_T.index_select(-1, own_t), (0, more)),
        attn_backend=ContextParallelAttention(
            _segments(tree_nodes, assignment, rank, world),
            assignment.size,
            group,
            device,
            lengths=lengths,
            shard=_shard_sequences(assignment, group, device),
            numerics=numerics,
            selections=selections,
        ),
        at_r=place_R[mine_r] - rank * assignment.size,
        tokens=_tokens(owner_R, mine_r, group),
        place_T=place_T,
        replay_TLk=replay_tLk,
        repeated=bool(rows.tree_nodes),
        fill=more,
        vision=None if vision is None else select_range(vision, place_T, rank * assignment.size, assignment.size),
        selections=selections,
    )


def _shard_sequences(assignment: _Assignment, group: CommGroup, device: torch.device) -> ShardedSequences:
    """Return what recurrent layers scan on this rank."""
    sizes_Nc = np.array([[size for _, size in pieces] for pieces in assignment.pieces])
    return shard_sequences(
        sizes_Nc,
        assign_scans(sizes_Nc.sum(1).tolist(), group.world),
        assignment.size - len(assignment.own[group.rank]),
        group,
        partial(gather_from_sequence_region, group=group),
        device,
    )


def _tokens(owner_R: Tensor, mine_r: Tensor, group: CommGroup) -> ContextParallelTokens:
    number = owner_R.bincount(minlength=group.world)
    most = int(number.max())
    by_owner_R = owner_R.argsort(stable=True)
    among_R = torch.empty_like(by_owner_R)
    among_R[by_owner_R] = torch.arange(len(owner_R), device=owner_R.device)
    first = number.cumsum(0) - number
    return ContextParallelTokens(
        mine_r=mine_r, where_R=owner_R * most + among_R - first[owner_R], most=most, group=group
    )
