"""Packed micro-batches for Megatron's layers: padded where ranks need equal parts, sharded under context parallelism.

A sequence is split over context-parallel ranks into twice as many equal chunks, and a rank has one from the front and
its mirror image from the back, which balances the attention work (zigzag). Padding tokens follow a sequence's own, or
are a sequence of their own: no token attends to them, and they are not trained on.

``_T`` tokens of the rows, ``_t`` slots of this rank, padding included; ``_R`` trained tokens and ``_r`` those this rank
predicts; ``L`` MoE layers, ``k`` experts per token, ``E`` all experts, ``G`` key-value heads, ``M`` slots of
all context-parallel ranks.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from numpy.typing import NDArray
from torch import Tensor

from miles.backends.megatron.parallel_state import MegatronGroup, ParallelState
from miles.backends.megatron.router import RouterBalance, RouterLoss
from miles.cluster.parallel_dims import assign_scans
from miles.core.errors import MilesError, UsageError
from miles.kernels.attention.compressed import CompressorInputs
from miles.kernels.attention.indexer_replay import IndexerSelections
from miles.kernels.attention.params import (
    AttentionInputs,
    BlockIndexerInputs,
    IndexerInputs,
    RelativeBias,
    ShardedSequences,
)
from miles.kernels.attention.tree import Segment, TreeAttentionBackend
from miles.kernels.attention.varlen import FreshRecurrentState
from miles.kernels.batch_invariant.packed_attention import BatchInvariantTreeBackend
from miles.kernels.numerics import FAST, Numerics
from miles.models.hidden_capture import HiddenCapture
from miles.models.layers.attention_backend import AttentionBackend
from miles.models.layers.rope import Positions
from miles.models.parallel.sequence_shard import shard_sequences
from miles.models.spec import DecoderSpec
from miles.models.vision.inputs import VisionInputs
from miles.train.batch_tensors import RoutedExpertsCache
from miles.train.indexer_replay import build_selections
from miles.train.packed_images import PackedImages, prepare_positions, select_range
from miles.train.prefix_sharing import TreeNode, build_attention, check_supported

# -- routing --------------------------------------------------------------------------------


class RoutingReplay:
    """The experts to replay in the slots of one rank, if any; counts those the router would not have selected.

    ``used`` is filled with the experts used if it is empty, and replayed if it is not; ``real_t`` are the slots that
    hold a token of the rows.
    """

    def __init__(
        self, spec: DecoderSpec, replay_tLk: Tensor | None, used: RoutedExpertsCache | None, real_t: Tensor
    ) -> None:
        assert spec.moe is not None
        self._real_t, self._device = real_t, real_t.device
        earlier_tLk = None if used is None else used.experts_tLk
        self.replay_tLk = replay_tLk if earlier_tLk is None else earlier_tLk
        self.used = used if earlier_tLk is None else None
        self.counts: dict[int, Tensor] = {}
        self.selected: dict[int, Tensor] = {}
        self._experts, self._layers = spec.moe.num_experts, len(spec.moe_layers)

    def total(self) -> Tensor:
        """Return flips and replayed experts over this rank's layers and slots."""
        none = torch.zeros(2, dtype=torch.int64, device=self._device)
        return torch.stack([none, *self.counts.values()]).sum(0)

    def load(self) -> Tensor:
        """Return how often each expert was selected for this rank's slots, [L, E]; zero in layers of other stages."""
        out_LE = torch.zeros(self._layers, self._experts, dtype=torch.int64, device=self._device)
        for slot, selected_tk in self.selected.items():
            out_LE[slot] = torch.bincount(selected_tk[self._real_t].flatten(), minlength=self._experts)
        return out_LE

    def store_used(self) -> None:
        """Store the experts that were used."""
        if self.used is not None and self.selected:
            some_tk = next(iter(self.selected.values()))
            none_tk = torch.full_like(some_tk, -1)
            rows = [self.selected.get(slot, none_tk) for slot in range(self._layers)]
            experts_tLk = torch.stack(rows, 1).to(torch.int32)
            self.used.experts_tLk = torch.where(self._real_t[:, None, None], experts_tLk, -1)


@dataclass(frozen=True, slots=True)
class LayerRoutingReplay:
    """A ``RoutingReplay`` of one layer, with the interface of Megatron's RouterReplay."""

    replay: RoutingReplay
    slot: int

    def get_replay_topk(
        self,
        scores_tE: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        choose: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Return the scores and indices of each token's experts; gradients flow through the scores."""
        used_tk = self.choose(choose(scores_tE.detach(), topk, num_groups, group_topk)[1])
        return scores_tE.gather(1, used_tk), used_tk

    @property
    def replays(self) -> bool:
        """Whether other experts than the router's own may be used."""
        return self.replay.replay_tLk is not None

    def choose(self, used_tk: Tensor) -> Tensor:
        """Return the experts to use, given the router's own selection, and count them."""
        replay, slot = self.replay, self.slot
        if replay.replay_tLk is not None:
            own_tk, replay_tk = used_tk, replay.replay_tLk[:, slot].to(used_tk.dtype)
            known_t = (replay_tk >= 0).all(-1)
            used_tk = torch.where(known_t[:, None], replay_tk, own_tk)
            agreed_tk = (used_tk[:, :, None] == own_tk[:, None, :]).any(-1)
            replay.counts[slot] = torch.stack(
                (((~agreed_tk) & known_t[:, None]).sum(), known_t.sum() * used_tk.shape[1])
            )
        # A recomputed layer counts once.
        replay.selected.setdefault(slot, used_tk.detach())
        return used_tk


# -- context parallelism --------------------------------------------------------------------


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_r: Tensor, mine_r: Tensor, count: int, group: MegatronGroup) -> Tensor:
        ctx.mine_r = mine_r
        out_R = x_r.new_zeros((count, *x_r.shape[1:]))
        out_R[mine_r] = x_r
        return group.sum(out_R)

    @staticmethod
    def backward(ctx: Any, grad_R: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad_R.index_select(0, ctx.mine_r), None, None, None


@dataclass(frozen=True, slots=True)
class ContextTokens:
    """The trained tokens that this context-parallel rank predicts."""

    mine_r: Tensor
    count: int
    group: MegatronGroup

    def join(self, x_r: Tensor) -> Tensor:
        """Gather the ranks' values into one [R, ...] on each rank; the gradient is sliced."""
        return _Join.apply(x_r, self.mine_r, self.count, self.group)  # pyright: ignore[reportReturnType]


class PackedAttention(AttentionBackend, Protocol):
    """An AttentionBackend of one micro-batch, which has what indexers selected until ``drop_selection``."""

    def drop_selection(self, layer: int) -> None: ...
    def list_selection(self, layer: int, top: int, pool: int) -> Tensor: ...
    def set_selection(self, layer: int, listed_Tt: Tensor, top: int, pool: int) -> None: ...

    def attend_relative(self, layer: int, inputs: AttentionInputs, bias: RelativeBias) -> Tensor: ...
    def attend_compressed(self, layer: int, inputs: AttentionInputs, compressor: CompressorInputs) -> Tensor: ...


class GatheredKVAttention:
    """An AttentionBackend of this rank's queries over the keys and values of all context-parallel ranks.

    So are the keys of an indexer, and what tokens add to compressed keys. Recurrent layers scan the padded sequences of
    ``lengths``, of which this rank has a ``shard``.
    """

    latent = False

    def __init__(
        self,
        inner: TreeAttentionBackend | BatchInvariantTreeBackend,
        group: MegatronGroup,
        lengths: Sequence[int],
        shard: ShardedSequences,
    ) -> None:
        self._inner, self._group = inner, group
        self._lengths, self._shard = lengths, shard

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        inputs, index = self._gather_keys(inputs), inputs.indexer
        if isinstance(index, IndexerInputs | BlockIndexerInputs):
            index = replace(index, k_Td=self._gather(index.k_Td))
        return self._inner(layer, inputs._replace(indexer=index))

    def attend_relative(self, layer: int, inputs: AttentionInputs, bias: RelativeBias) -> Tensor:
        """Attend with a relative position bias."""
        return self._inner.attend_relative(layer, self._gather_keys(inputs), bias)

    def attend_compressed(self, layer: int, inputs: AttentionInputs, compressor: CompressorInputs) -> Tensor:
        """Attend to a window of tokens and to compressed keys, computed from the states of the tokens of all ranks."""
        width = inputs.k_TGd.shape[-1]
        both_Mx = self._gather(torch.cat((inputs.k_TGd.flatten(1), compressor.states_Tx), -1))
        k_Md, states_Mx = both_Mx.tensor_split((width,), dim=1)
        inputs = inputs._replace(k_TGd=k_Md.unsqueeze(1), v_TGe=k_Md.unsqueeze(1))
        return self._inner.attend_compressed(layer, inputs, replace(compressor, states_Tx=states_Mx))

    def _gather_keys(self, inputs: AttentionInputs) -> AttentionInputs:
        """Return the inputs with the keys and values of all ranks, from one all-gather for both."""
        k_TGd, v_TGe = inputs.k_TGd, inputs.v_TGe
        k_MGd, v_MGe = self._gather(torch.cat((k_TGd, v_TGe), -1)).split((k_TGd.shape[-1], v_TGe.shape[-1]), -1)
        return inputs._replace(k_TGd=k_MGd, v_TGe=v_MGe)

    def _gather(self, x_t: Tensor) -> Tensor:
        return gather_from_sequence_parallel_region(x_t.contiguous(), group=self._group.process_group)

    def recurrent_state(self, layer: int) -> FreshRecurrentState:
        """The state of a recurrent layer: every sequence starts here, and this rank has a part of it."""
        return FreshRecurrentState(self._lengths, shard=self._shard)

    def drop_selection(self, layer: int) -> None:
        """Free what a layer's indexer selected."""
        self._inner.drop_selection(layer)

    def list_selection(self, layer: int, top: int, pool: int) -> Tensor:
        """Return what a layer's indexer selected for this rank's slots."""
        return self._inner.list_selection(layer, top, pool)

    def set_selection(self, layer: int, listed_Tt: Tensor, top: int, pool: int) -> None:
        """Let a layer that another stage has run have selected this."""
        self._inner.set_selection(layer, listed_Tt, top, pool)


# -- slots ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """``source_t`` is the token in each of this rank's slots, -1 for padding; ``place_t`` is its position.

    ``lengths`` are the padded sequence lengths, which divide into ``pieces`` each.
    """

    source_t: NDArray[np.int64]
    place_t: NDArray[np.int64]
    lengths: list[int]
    pieces: int


def build_slots(lengths: Sequence[int], *, rank: int, context: int, multiple: int) -> SlotLayout:
    """Build the slots of one of several ``context`` ranks, equally many on each, a ``multiple`` of so many.

    >>> build_slots([3, 5], rank=0, context=2, multiple=1).source_t.tolist()
    [0, -1, 3, 4, -1, -1]
    """
    pieces = 2 * context
    padded = [-(-n // pieces) * pieces for n in lengths]
    while sum(padded) // context % multiple:
        padded[-1] += pieces
    sources: list[NDArray[np.int64]] = []
    places: list[NDArray[np.int64]] = []
    start = 0
    for real, length in zip(lengths, padded, strict=True):
        size = length // pieces
        place = np.concatenate([np.arange(j * size, (j + 1) * size) for j in (rank, pieces - 1 - rank)])
        sources.append(np.where(place < real, start + place, -1))
        places.append(np.where(place < real, place, 0))
        start += real
    return SlotLayout(np.concatenate(sources), np.concatenate(places), padded, pieces)


def build_segments(slots: SlotLayout, *, rank: int, context: int) -> list[Segment]:
    """Return this rank's runs of queries, and the positions of their keys among all ranks' slots."""
    each = len(slots.source_t)
    out: list[Segment] = []
    offset = 0
    for length in slots.lengths:
        size = length // slots.pieces
        # Chunk j is the first of rank j's two, or the second of its mirror rank's.
        firsts = [
            min(j, slots.pieces - 1 - j) * each + offset + (0 if j < context else size) for j in range(slots.pieces)
        ]
        for j in (rank, slots.pieces - 1 - rank):
            out.append(Segment(size, tuple((first, size) for first in firsts[: j + 1])))
        offset += 2 * size
    return out


# -- micro-batch ----------------------------------------------------------------------------


@dataclass
class PackedParams(PackedSeqParams):
    """Passed to every layer of a forward, also when it is recomputed in backward.

    ``tokens_t`` are those of the slots, ``tokens_s`` of the slots whose hidden states this rank has under sequence
    parallelism.
    """

    qkv_format: str = "thd"
    positions: Positions = field(kw_only=True)
    attn_backend: PackedAttention = field(kw_only=True)
    replay: RoutingReplay | None = field(default=None, kw_only=True)
    selections: IndexerSelections | None = field(default=None, kw_only=True)
    router_loss: RouterLoss | None = field(default=None, kw_only=True)
    tokens_t: Tensor = field(kw_only=True)
    tokens_s: Tensor = field(kw_only=True)
    vision: VisionInputs | None = field(default=None, kw_only=True)
    has_images: bool = field(default=False, kw_only=True)
    """Whether tokens of any rank have features of images."""
    deepstack: tuple[Tensor, ...] = field(default=(), kw_only=True)
    """Features of ``vision`` that the first layers add, of the forward that runs."""
    sent_deepstack_sD: dict[int, Tensor] = field(default_factory=dict, kw_only=True)
    """What layers of this stage add to all slots: such features that an earlier stage has sent."""
    capture: HiddenCapture | None = field(default=None, kw_only=True)
    """Takes the output of some layers of this and earlier stages, [s, 1, D] or its residual streams [s, S, D]."""


class MegatronRows(Protocol):
    """Packed tokens: a MicroBatch, or PackedSequences."""

    @property
    def lengths(self) -> tuple[int, ...]: ...
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
    def routed_cache(self) -> RoutedExpertsCache | None: ...
    @property
    def tree_nodes(self) -> tuple[TreeNode, ...]: ...
    @property
    def images(self) -> PackedImages | None: ...
    @property
    def idle(self) -> bool: ...
    def unshare(self) -> MegatronRows: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronBatch:
    """A micro-batch of this rank: its tokens, the layers' arguments, and the slots ``at_r`` that predict.

    ``source_t`` is the row in each slot, -1 for padding, if context-parallel ranks share the rows.
    """

    tokens_1t: Tensor
    packed: PackedParams
    at_r: Tensor
    tokens: ContextTokens | None
    source_t: Tensor | None = None
    num_tokens: int = 0

    def join_slots(self, x_tD: Tensor, group: MegatronGroup) -> Tensor:
        """Return the values of all rows of the micro-batch, [T, D], from those of this rank's slots."""
        if self.source_t is None:
            return x_tD[: self.num_tokens]
        out_TD = x_tD.new_zeros((self.num_tokens, *x_tD.shape[1:]))
        real_t = self.source_t >= 0
        out_TD[self.source_t[real_t]] = x_tD[real_t]
        return group.sum(out_TD)


def build_megatron_batch(
    rows: MegatronRows,
    spec: DecoderSpec,
    state: ParallelState,
    *,
    sequence: bool,
    dtype: torch.dtype,
    numerics: Numerics = FAST,
    counted: bool = False,
    balance: RouterBalance | None = None,
    per_token: float = 0.0,
) -> MegatronBatch:
    """Build this rank's part of ``rows``; ``sequence`` says that sequence parallelism is on.

    Experts are ``counted`` even if none are replayed. With a ``balance`` that has losses, a token's weight in these is
    ``per_token``.
    """
    check_supported(spec, rows.tree_nodes)
    longest, most = max(rows.lengths), spec.max_positions
    if longest > most:
        raise MilesError(f"a sample of {longest} tokens is longer than the {most} positions of the model's config.")
    multiple = state.tp_group.world if sequence else 1
    selections = build_selections(spec, rows.indexer_TLk, tp_rank=state.tp_group.rank, tp_size=state.tp_group.world)
    if state.cp_group.world == 1:
        local = _pad(rows, multiple, numerics, selections, spec)
    else:
        rows = rows.unshare()
        if rows.images is not None:
            rows.images.check_context_parallel(spec)
        local = _shard(rows, state.cp_group, multiple, numerics, selections, spec)
    replay, router_loss = None, None
    if spec.moe is not None and balance is not None and balance.has_loss:
        router_loss = _build_router_loss(rows, local, state, balance, per_token, sequence=sequence)
    if spec.moe is not None and (local.replay_tLk is not None or rows.routed_cache is not None or counted):
        part = state.tp_group.rank if sequence else 0
        replay_tLk = None if local.replay_tLk is None else local.replay_tLk.chunk(multiple)[part]
        replay = RoutingReplay(spec, replay_tLk, rows.routed_cache, local.real_t.chunk(multiple)[part])
    positions = Positions(local.positions_t, most, dtype, numerics=numerics)
    packed = PackedParams(
        positions=positions,
        attn_backend=local.attn_backend,
        replay=replay,
        router_loss=router_loss,
        selections=selections,
        tokens_t=local.tokens_t,
        tokens_s=local.tokens_t.chunk(multiple)[state.tp_group.rank if sequence else 0],
        vision=_build_vision(rows, local, spec, state, multiple),
        has_images=rows.images is not None and not rows.images.is_empty,
    )
    return MegatronBatch(
        tokens_1t=local.tokens_t[None],
        packed=packed,
        at_r=local.at_r,
        tokens=local.tokens,
        source_t=local.source_t,
        num_tokens=len(rows.tokens_T) if local.source_t is None else sum(rows.lengths),
    )


def _build_vision(
    rows: MegatronRows, local: _LocalSlots, spec: DecoderSpec, state: ParallelState, multiple: int
) -> VisionInputs | None:
    """Return the images of the first stage: those of which this rank's residual stream has tokens."""
    if rows.images is None or rows.images.is_empty or state.pp_group.rank:
        return None
    count = len(local.tokens_t) // multiple
    vision = rows.images.build_vision_inputs(spec, rows.tokens_T.device)
    if local.slot_T is None and multiple == 1:
        return vision
    place_T = torch.arange(len(rows.tokens_T), device=rows.tokens_T.device) if local.slot_T is None else local.slot_T
    return select_range(vision, place_T, state.tp_group.rank * count if multiple > 1 else 0, count)


def _build_router_loss(
    rows: MegatronRows,
    local: _LocalSlots,
    state: ParallelState,
    balance: RouterBalance,
    per_token: float,
    *,
    sequence: bool,
) -> RouterLoss:
    if rows.tree_nodes and "seq_aux_loss" in balance.aux_coeffs:
        raise UsageError(
            "--megatron-moe-router-load-balancing-type seq_aux_loss does not work with --share-prefix, whose tokens "
            "are of several sequences; use aux_loss, or remove --share-prefix."
        )
    multiple, part = (state.tp_group.world, state.tp_group.rank) if sequence else (1, 0)

    def share(x: Tensor) -> Tensor:
        x = state.cp_group.sum(x)
        return state.tp_group.sum(x) if sequence else x

    return RouterLoss(
        balance=balance,
        real_t=local.real_t.chunk(multiple)[part],
        sequence_t=local.sequence_t.chunk(multiple)[part],
        sequences=len(rows.lengths),
        per_token=0.0 if rows.idle else per_token,
        share=share,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LocalSlots:
    """This rank's slots, which of them hold a token of the rows and of which sequence, and the slots that predict.

    ``slot_T`` is the slot of each row, -1 if another context-parallel rank has it; None if all rows are here, in order.

    Padding, and tokens that sequences share, are of sequence 0.
    """

    tokens_t: Tensor
    real_t: Tensor
    sequence_t: Tensor
    positions_t: Tensor
    replay_tLk: Tensor | None
    attn_backend: PackedAttention
    at_r: Tensor
    tokens: ContextTokens | None = None
    source_t: Tensor | None = None
    slot_T: Tensor | None = None


def _sequence_of_tokens(rows: MegatronRows) -> Tensor:
    if rows.tree_nodes:
        return torch.zeros_like(rows.tokens_T)
    return torch.from_numpy(np.repeat(np.arange(len(rows.lengths)), rows.lengths)).to(rows.tokens_T.device)


def _pad(
    rows: MegatronRows, multiple: int, numerics: Numerics, selections: IndexerSelections | None, spec: DecoderSpec
) -> _LocalSlots:
    """All of the rows, followed by a padding sequence."""
    missing = -len(rows.tokens_T) % multiple
    _select_rows(selections, rows.indexer_TLk, [*range(len(rows.tokens_T)), *[-1] * missing])
    lengths, tree_nodes, replay_tLk = rows.lengths, rows.tree_nodes, rows.replay_TLk
    if missing:
        lengths, tree_nodes = (*lengths, missing), (*tree_nodes, TreeNode(missing)) if tree_nodes else ()
        if replay_tLk is not None:
            replay_tLk = torch.cat((replay_tLk, replay_tLk.new_full((missing, *replay_tLk.shape[1:]), -1)))
    none_m = rows.tokens_T.new_zeros(missing)
    ends_T = None if rows.images is None else rows.images.build_visible_ends(spec, padding=missing)
    # No model has both compressed attention and bidirectional spans.
    attn_backend: Any = build_attention(
        lengths,
        tree_nodes,
        rows.tokens_T.device,
        numerics=numerics,
        visible_ends_T=ends_T,
        selections=selections,
    )
    return _LocalSlots(
        tokens_t=torch.cat((rows.tokens_T, none_m)),
        real_t=torch.cat((torch.ones_like(rows.tokens_T), none_m)).bool(),
        sequence_t=torch.cat((_sequence_of_tokens(rows), none_m)),
        positions_t=prepare_positions(rows.images, spec, torch.cat((rows.positions_T, none_m)), padding=missing),
        replay_tLk=replay_tLk,
        attn_backend=attn_backend,
        at_r=rows.before_R,
    )


def _select_rows(selections: IndexerSelections | None, indexer_TLk: Tensor | None, source_t: Sequence[int]) -> None:
    """Let ``selections`` replay the rows of this rank's slots; -1 is padding, which replays nothing."""
    if selections is None or indexer_TLk is None:
        return
    index_t = torch.tensor(source_t, dtype=torch.int64)
    rows_tLk = indexer_TLk.index_select(0, index_t.clamp(min=0))
    selections.replay_TLk = torch.where((index_t >= 0)[:, None, None], rows_tLk, -1)


def _shard(
    rows: MegatronRows,
    group: MegatronGroup,
    multiple: int,
    numerics: Numerics,
    selections: IndexerSelections | None,
    spec: DecoderSpec,
) -> _LocalSlots:
    """This context-parallel rank's chunks of every sequence."""
    device = rows.tokens_T.device
    slots = build_slots(rows.lengths, rank=group.rank, context=group.world, multiple=multiple)
    _select_rows(selections, rows.indexer_TLk, slots.source_t.tolist())
    source_t = torch.from_numpy(slots.source_t).to(device)
    real_t, taken_t = source_t >= 0, source_t.clamp(min=0)
    replay_tLk = rows.replay_TLk
    if replay_tLk is not None:
        replay_tLk = torch.where(real_t[:, None, None], replay_tLk.index_select(0, taken_t), -1)
    slot_T = np.full(sum(rows.lengths), -1, np.int64)
    filled = np.flatnonzero(slots.source_t >= 0)
    slot_T[slots.source_t[filled]] = filled
    slot_T = torch.from_numpy(slot_T).to(device)
    at_R = slot_T.index_select(0, rows.before_R)
    mine_r = (at_R >= 0).nonzero()[:, 0]
    segments = build_segments(slots, rank=group.rank, context=group.world)
    backend_class = BatchInvariantTreeBackend if numerics.batch_invariant else TreeAttentionBackend
    inner = backend_class(segments, device, keys=group.world * len(source_t), selections=selections)
    shard = shard_sequences(
        np.repeat(np.array(slots.lengths)[:, None] // slots.pieces, slots.pieces, 1),
        assign_scans(slots.lengths, group.world),
        0,
        group,
        partial(gather_from_sequence_parallel_region, group=group.process_group),
        device,
    )
    positions_t = torch.from_numpy(slots.place_t).to(device)
    positions_T = prepare_positions(rows.images, spec, rows.positions_T)
    if positions_T.dim() == 2:
        positions_t = torch.where(real_t, positions_T.index_select(1, taken_t), 0)
    return _LocalSlots(
        real_t=real_t,
        sequence_t=torch.where(real_t, _sequence_of_tokens(rows).index_select(0, taken_t), 0),
        tokens_t=torch.where(real_t, rows.tokens_T.index_select(0, taken_t), 0),
        positions_t=positions_t,
        replay_tLk=replay_tLk,
        attn_backend=GatheredKVAttention(inner, group, slots.lengths, shard),
        at_r=at_R.index_select(0, mine_r),
        tokens=ContextTokens(mine_r, len(at_R), group),
        source_t=source_t,
        slot_T=slot_T,
    )
