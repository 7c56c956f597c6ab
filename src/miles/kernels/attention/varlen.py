"""Varlen attention backend: causal attention within each sequence of a packed batch.

Shapes: T tokens, H query heads, G key-value heads, d channels of a key, e of a value, B sequences of a block, S its
longest, P all slots of all blocks, padding included, t tokens (or blocks of keys) selected for each query.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from inspect import signature
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.attention.block_selection import select_topk_blocks
from miles.kernels.attention.compressed import (
    CompressorInputs,
    WindowTokens,
    compressed_attention,
    pack_windows,
    select_windows,
)
from miles.kernels.attention.eager import eager_attention, max_scores_at_once, select_topk_tokens
from miles.kernels.attention.index_pools import expand_pools, select_topk_pools
from miles.kernels.attention.indexer_replay import IndexerSelections
from miles.kernels.attention.params import (
    AttentionInputs,
    BlockIndexerInputs,
    IndexerInputs,
    RelativeBias,
    ShardedSequences,
)
from miles.kernels.attention.relative import relative_attention
from miles.kernels.attention.sdpa_dense import MIN_SEQUENCE_TOKENS, dense_sdpa_attention, has_dense_batch
from miles.kernels.attention.sinks import flash_attention_with_sinks
from miles.kernels.batch_invariant.attention import span_attention
from miles.kernels.batch_invariant.attention_metadata import SpanBatch, build_packed_spans
from miles.kernels.runtime.triton_compat import use_triton_training

HALF_DTYPES = (torch.bfloat16, torch.float16)
# The largest head dim of the fused CUDA kernel, and the multiple it must be of.
MAX_FUSED_HEAD_DIM, FUSED_HEAD_DIM_STEP = 256, 8
# Up to so many keys, fewer than in a dense batch, and with this head dim the kernels of exact parity are faster
# than torch's varlen kernel, whose backward expands the key-value heads.
MAX_SHORT_KEYS, _SHORT_HEAD_DIM = MIN_SEQUENCE_TOKENS - 1, 128
# Blocks up to this length take a window as a mask; longer ones skip the keys outside it.
_MAX_MASKED_LENGTH = 256


@cache
def load_varlen_kernel() -> tuple[Callable[..., Any], dict[str, bool]]:
    """Torch's varlen attention and its options: newer releases need ``enable_gqa`` to share key-value heads."""
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn, {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


class _FlashVarlen(torch.autograd.Function):
    """What ``varlen_attn`` computes, without its custom operator: the first call of one imports torch.compile."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THd: Tensor,
        k_MGd: Tensor,
        v_MGd: Tensor,
        cu_seqlens: tuple[Tensor, Tensor],
        max_lengths: tuple[int, int],
        options: dict[str, Any],
    ) -> Tensor:
        fixed_args = (*cu_seqlens, *max_lengths, 0.0, options["window_size_left"] < 0)
        outputs = torch.ops.aten._flash_attention_forward(q_THd, k_MGd, v_MGd, *fixed_args, False, **options)
        out_THd, lse_HT, seed, unused, _ = outputs
        ctx.save_for_backward(q_THd, k_MGd, v_MGd, out_THd, lse_HT, *cu_seqlens, seed, unused)
        ctx.fixed_args, ctx.options = fixed_args[2:], options
        return out_THd

    @staticmethod
    def backward(ctx: Any, grad_THd: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        *saved, seed, unused = ctx.saved_tensors
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_THd, *saved, *ctx.fixed_args, seed, unused, **ctx.options
        )
        return dq, dk, dv, None, None, None


def run_varlen_kernel(
    qkv: tuple[Tensor, Tensor, Tensor],
    cu_seqlens: tuple[Tensor, Tensor],
    max_lengths: tuple[int, int],
    scale: float,
    window: int | None,
) -> Tensor:
    """Torch's varlen kernel with a causal mask; cumulative and maximal lengths are those of queries and of keys."""
    left = -1 if window is None else window - 1
    options = {"scale": scale, "window_size_left": left, "window_size_right": 0}
    return _FlashVarlen.apply(*qkv, cu_seqlens, max_lengths, options)  # pyright: ignore[reportReturnType]


# -- padded blocks --------------------------------------------------------------------------


def group_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Group sequences of similar length, so that each padded block is less than twice its tokens."""
    blocks: list[list[int]] = []
    longest = used = 0
    for index in sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i]):
        if blocks and (len(blocks[-1]) + 1) * longest < 2 * (used + lengths[index]):
            blocks[-1].append(index)
            used += lengths[index]
        else:
            blocks.append([index])
            longest = used = lengths[index]
    for block in blocks:
        block.sort()
    return blocks


@dataclass(frozen=True, slots=True)
class _BlockLayout:
    """The sequences of each block, its (sequences, longest), the token of each slot, the slot of each token.

    Both indices are None where blocks have no padding and are in the order of the tokens.
    """

    blocks: list[list[int]]
    shapes: list[tuple[int, int]]
    token_P: Tensor | None
    slot_T: Tensor | None


class _Pad(torch.autograd.Function):
    """Tokens into slots. Padding repeats some token to the right of a sequence, where no query sees it."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, token_P: Tensor, slot_T: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.slot_T = slot_T
        return q.index_select(0, token_P), k.index_select(0, token_P), v.index_select(0, token_P)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None, None]:
        slot_T = ctx.slot_T
        return dq.index_select(0, slot_T), dk.index_select(0, slot_T), dv.index_select(0, slot_T), None, None


class _Unpad(torch.autograd.Function):
    """Slots back into tokens. The gradient of a padding slot is zero."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, slot_T: Tensor) -> Tensor:
        ctx.slot_T, ctx.slots = slot_T, len(out)
        return out.index_select(0, slot_T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        padded = grad.new_zeros(ctx.slots, *grad.shape[1:])
        padded[ctx.slot_T] = grad
        return padded, None


class _Pack:
    """Packed sequences, and what all layers share of them."""

    def __init__(self, lengths: list[int], device: torch.device) -> None:
        self.lengths, self.device = lengths, device
        self.longest = max(lengths, default=0)
        self._cu_seqlens: dict[tuple[int, ...], Tensor] = {}
        if device.type == "cuda":
            self.all_cu_seqlens = self.get_cu_seqlens(lengths)
        self._layouts: dict[int, _BlockLayout] = {}
        self._masks: dict[tuple[int, int], Tensor] = {}

    @cached_property
    def spans(self) -> SpanBatch:
        """The sequences, for the kernels of short ones."""
        return SpanBatch(build_packed_spans(self.lengths))

    def get_cu_seqlens(self, lengths: Sequence[int]) -> Tensor:
        """Cumulative sequence lengths (cu_seqlens) on the device."""
        key = tuple(lengths)
        if key not in self._cu_seqlens:
            cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            self._cu_seqlens[key] = cu_seqlens.to(self.device, non_blocking=True)
        return self._cu_seqlens[key]

    def get_layout(self, max_shared: int) -> _BlockLayout:
        """Blocks in which a sequence of more than ``max_shared`` tokens is a block of its own."""
        max_shared = min(max_shared, self.longest)
        if max_shared not in self._layouts:
            blocks = group_by_length(
                [n if n <= max_shared else 0 for n in self.lengths] if max_shared < self.longest else self.lengths
            )
            blocks += [[i] for i, n in enumerate(self.lengths) if n > max_shared]
            self._layouts[max_shared] = self._lay_out(blocks)
        return self._layouts[max_shared]

    def _lay_out(self, blocks: list[list[int]]) -> _BlockLayout:
        lengths = np.asarray(self.lengths)
        starts = np.cumsum(lengths) - lengths
        shapes: list[tuple[int, int]] = []
        tokens: list[NDArray[np.int64]] = []
        slot_T = np.empty(lengths.sum(), dtype=np.int64)
        used = 0
        for block in blocks:
            index_S = np.arange(lengths[block].max())
            real_BS = index_S < lengths[block, None]
            token_BS = starts[block, None] + index_S * real_BS
            slot_T[token_BS[real_BS]] = used + np.flatnonzero(real_BS)
            shapes.append(token_BS.shape)
            tokens.append(token_BS.ravel())
            used += token_BS.size
        if used == len(slot_T) and (len(blocks) == 1 or np.array_equal(slot_T, np.arange(used))):
            return _BlockLayout(blocks, shapes, None, None)
        token_P = torch.from_numpy(np.concatenate(tokens)).to(self.device)
        return _BlockLayout(blocks, shapes, token_P, torch.from_numpy(slot_T).to(self.device))

    def get_mask(self, longest: int, window: int) -> Tensor:
        """The causal mask with a window, [S, S]."""
        if (longest, window) not in self._masks:
            every_SS = torch.ones(longest, longest, device=self.device, dtype=torch.bool)
            self._masks[longest, window] = every_SS.tril().triu_(1 - window)
        return self._masks[longest, window]


# -- attention ------------------------------------------------------------------------------


@dataclass(slots=True)
class FreshRecurrentState:
    """The recurrent state of sequences that all start here, and of which this rank may have a part (``shard``)."""

    lengths: Sequence[int]
    state: tuple[Tensor, ...] | None = None
    levels: Sequence[tuple[Tensor, FreshRecurrentState]] = ()
    shard: ShardedSequences | None = None

    def update(self, state: tuple[Tensor, ...]) -> None:
        """Nobody asks."""


@dataclass(frozen=True, slots=True)
class _TokenSelection:
    """The tokens each token attends to, [n, t], for each sequence of more than ``max_selected``.

    With ``block`` it is the blocks of that many tokens, [G, n, t].
    """

    max_selected: int
    selected: dict[int, Tensor]
    block: int | None = None


class VarlenAttentionBackend:
    """Attention backend over a packed batch of ``lengths``; built once per forward, used by every layer.

    On CUDA in half precision torch's varlen kernel computes it; otherwise sequences of similar length share a padded
    block, one SDPA call each. What neither supports is computed by ``eager_attention``. ``selections`` replace what
    indexers select.
    """

    latent = False

    def __init__(
        self, lengths: Sequence[int], device: torch.device | str, selections: IndexerSelections | None = None
    ) -> None:
        self._replay = selections
        self._lengths = [int(n) for n in lengths]
        self._total = sum(self._lengths)
        self._packed = _Pack(self._lengths, torch.device(device))
        self._chunked: dict[int, _Pack] = {}
        self._selections: dict[int, _TokenSelection | None] = {}
        self._windows: dict[tuple[int, int], WindowTokens] = {}
        self._window_selections: dict[int, list[Tensor | None]] = {}

    def drop_selection(self, layer: int) -> None:
        """Free what the indexer of a layer selected, once its backward is done."""
        self._selections.pop(layer, None)

    def list_selection(self, layer: int, top: int, pool: int) -> Tensor:
        """Return the positions that the indexer of a layer selected, [T, top + pool - 1]; -1 where all are visible."""
        selection = self._selections[layer]
        selected = {} if selection is None else selection.selected
        parts = [selected.get(i) for i in range(len(self._lengths))]
        return list_positions(parts, self._lengths, top + pool - 1, self._packed.device)

    def set_selection(self, layer: int, listed_Tt: Tensor, top: int, pool: int) -> None:
        """Let a layer that another rank has run have selected what ``list_selection`` returned there."""
        rows = enumerate(listed_Tt.split(self._lengths))
        selected = {i: rows_St for i, rows_St in rows if self._lengths[i] > top}
        self._selections[layer] = _TokenSelection(top, selected) if selected else None

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        q_THd, _, v_TGe, params, _, index = inputs
        assert len(q_THd) == self._total, f"got {len(q_THd)} tokens for sequences of {self._total} in all"
        if not self._total:
            return q_THd[..., :1].expand(-1, -1, v_TGe.shape[-1])
        pack = self._packed
        if params.chunk is not None:
            pack = self._split_chunks(params.chunk)
            inputs = inputs._replace(params=replace(params, chunk=None))
        selection = None
        if index is not None:
            assert pack is self._packed and params.window is None, "sparse attention with a window or chunk"
            selection = self._select_tokens(layer, index)
        if can_fuse(q_THd, v_TGe) and selection is None and params.softcap is None:
            return _attend_varlen(pack, inputs)
        return _attend_padded(pack, inputs, selection)

    def attend_compressed(self, layer: int, inputs: AttentionInputs, compressor: CompressorInputs) -> Tensor:
        """Attend to a window of tokens and to compressed keys, one sequence after the other."""
        q_THd, k_T1d, params = inputs.q_THd, inputs.k_TGd, inputs.params
        assert len(q_THd) == self._total, f"got {len(q_THd)} tokens for sequences of {self._total} in all"
        assert params.window is not None, "compressed attention has a window"
        windows = self._get_windows(compressor.rate, compressor.reach)
        # Without a complete window too, so that the compressor gets gradients of zero.
        states_Rx = compressor.states_Tx.index_select(0, windows.tokens_ML.flatten())
        keys_Md, index_Mi = compressor.compress(states_Rx.unflatten(0, windows.tokens_ML.shape), windows.numbers_M)
        if not self._total:
            return q_THd + k_T1d + keys_Md.unsqueeze(1)
        selections = self._select_windows(layer, compressor, index_Mi, windows.counts)
        parts = (q_THd.split(self._lengths), k_T1d.squeeze(1).split(self._lengths), keys_Md.split(windows.counts))
        options: dict[str, Any] = {"scale": params.scale, "window": params.window, "rate": compressor.rate}
        outs = [
            compressed_attention(q, k, compressed, sinks_H=inputs.sinks_H, selected_Sk=selected, **options)
            for q, k, compressed, selected in zip(*parts, selections, strict=True)
        ]
        return torch.cat(outs)

    def attend_relative(self, layer: int, inputs: AttentionInputs, bias: RelativeBias) -> Tensor:
        """Attend with a relative position bias; sequences of similar length share a padded block."""
        tensors = (*inputs[:3], bias.weights_THr)
        assert len(tensors[0]) == self._total, f"got {len(tensors[0])} tokens for sequences of {self._total} in all"
        if not self._total:
            return sum((x.sum() for x in (*tensors[1:], bias.profiles_rE)), start=inputs.q_THd)
        return _attend_relative(self._packed, inputs, bias)

    def _get_windows(self, rate: int, reach: int) -> WindowTokens:
        if (rate, reach) not in self._windows:
            self._windows[rate, reach] = pack_windows(self._lengths, rate, reach, self._packed.device)
        return self._windows[rate, reach]

    def _select_windows(
        self, layer: int, compressor: CompressorInputs, index_Mi: Tensor | None, counts: list[int]
    ) -> list[Tensor | None]:
        """The windows that an indexer selects in each sequence; None where all are visible."""
        index = compressor.indexer
        if index is None or index_Mi is None:
            return [None] * len(counts)
        if not self._is_recompute(layer, self._window_selections):
            tensors = (index.q_Thi.split(self._lengths), index.weights_Th.split(self._lengths), index_Mi.split(counts))
            self._window_selections[layer] = [
                select_windows(index._replace(q_Thi=q, weights_Th=weights), keys, compressor.rate)
                if len(keys) > index.topk
                else None
                for q, weights, keys in zip(*tensors, strict=True)
            ]
        return self._window_selections[layer]

    @staticmethod
    def _is_recompute(layer: int, selections: Mapping[int, object]) -> bool:
        """Whether a layer runs again in backward: it must select the same, even if its kernels round differently.

        Selective recomputation finds a saved matmul output by its number, so selections have only batched matmuls.
        """
        return layer in selections and torch._C._current_graph_task_id() != -1  # pyright: ignore[reportPrivateUsage]

    def recurrent_state(self, layer: int) -> FreshRecurrentState:
        """What a recurrent layer left behind: every sequence begins here."""
        return FreshRecurrentState(self._lengths)

    def _split_chunks(self, chunk: int) -> _Pack:
        """Chunks become sequences of their own, since none attends to another."""
        if chunk >= self._packed.longest:
            return self._packed
        if chunk not in self._chunked:
            lengths = [min(chunk, n - start) for n in self._lengths for start in range(0, n, chunk)]
            self._chunked[chunk] = _Pack(lengths, self._packed.device)
        return self._chunked[chunk]

    def _select_tokens(self, layer: int, index: IndexerInputs | BlockIndexerInputs | int) -> _TokenSelection | None:
        """The selected tokens, or None where all are visible."""
        if isinstance(index, int):
            assert index in self._selections, (
                f"layer {layer} reuses the selection of layer {index}, which has not run yet"
            )
            return self._selections[index]
        if not self._is_recompute(layer, self._selections):
            is_sparse = index.max_selected < self._packed.longest
            self._selections[layer] = self._run_selection(layer, index) if is_sparse else None
        return self._selections[layer]

    def _run_selection(self, layer: int, index: IndexerInputs | BlockIndexerInputs) -> _TokenSelection:
        """What each sequence of more tokens than are selected attends to."""
        selected: dict[int, Tensor] = {}
        starts = accumulate(self._lengths, initial=0)
        for i, (start, length) in enumerate(zip(starts, self._lengths, strict=False)):
            if length <= index.max_selected:
                continue
            rows = slice(start, start + length)
            if isinstance(index, BlockIndexerInputs):
                own_GSt = select_topk_blocks(index.q_TGd[rows], index.k_Td[rows], index)
                selected[i] = self._replace(layer, start, own_GSt.transpose(0, 1), index).transpose(0, 1)
                continue
            tensors = (index.q_THd[rows], index.k_Td[rows], index.weights_TH[rows])
            if index.pool is None:
                own_St = select_topk_tokens(*tensors, index.topk)
            else:
                max_scores = max_scores_at_once(index.q_THd)
                own_St = select_topk_pools(*tensors, index.topk, index.pool, max_scores=max_scores)
            own_St = self._replace(layer, start, own_St.unsqueeze(1), index).squeeze(1)
            selected[i] = own_St if index.pool is None else expand_pools(own_St, index.unit)
        block = index.block if isinstance(index, BlockIndexerInputs) else None
        return _TokenSelection(index.max_selected, selected, block)

    def _replace(self, layer: int, start: int, own_SGt: Tensor, index: IndexerInputs | BlockIndexerInputs) -> Tensor:
        """What the sequence whose first token is ``start`` selects: its own selection, or the replayed one."""
        if self._replay is None:
            return own_SGt
        visible_S = torch.arange(1, len(own_SGt) + 1, device=own_SGt.device)
        return self._replay.choose(layer, start, own_SGt, visible_S, unit=index.unit, limit=index.max_selected)


def list_positions(parts: Sequence[Tensor | None], lengths: Sequence[int], count: int, device: torch.device) -> Tensor:
    """Concatenate ``count`` positions of each token of sequences, in int32; -1 for a sequence without."""
    rows = [
        torch.full((length, count), -1, dtype=torch.int32, device=device) if part is None else part.to(torch.int32)
        for part, length in zip(parts, lengths, strict=True)
    ]
    return torch.cat(rows)


def pad_channels(x: Tensor, width: int) -> Tensor:
    """Zero-pad the channels."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))


def can_fuse(q_THd: Tensor, v_TGe: Tensor) -> bool:
    """Whether the fused CUDA kernel supports these dtypes and head dims."""
    head_dim = max(q_THd.shape[-1], v_TGe.shape[-1])
    return q_THd.is_cuda and q_THd.dtype in HALF_DTYPES and head_dim <= MAX_FUSED_HEAD_DIM


def prefers_span_kernels(inputs: AttentionInputs, max_keys: int) -> bool:
    """Whether ``span_attention`` is faster than torch's varlen kernel."""
    q_THd, k_TGd, v_TGe, params, sinks_H, _ = inputs
    is_plain = params.window is None and params.softcap is None and sinks_H is None
    is_short = max_keys <= MAX_SHORT_KEYS and q_THd.shape[-1] == v_TGe.shape[-1] == _SHORT_HEAD_DIM
    return is_plain and is_short and k_TGd.dtype == q_THd.dtype and use_triton_training(q_THd)


def pad_head_dim(q_THd: Tensor, v_TGe: Tensor) -> int:
    """The head dim that the fused kernel computes in."""
    return -(-max(q_THd.shape[-1], v_TGe.shape[-1]) // FUSED_HEAD_DIM_STEP) * FUSED_HEAD_DIM_STEP


def _attend_varlen(pack: _Pack, inputs: AttentionInputs) -> Tensor:
    q_THd, k_TGd, v_TGe, params, sinks_H, _ = inputs
    if params.window is not None and params.window >= pack.longest:
        params = replace(params, window=None)
    if prefers_span_kernels(inputs._replace(params=params), pack.longest):
        return span_attention(q_THd, k_TGd, v_TGe, pack.spans, params)
    width, value_dim = pad_head_dim(q_THd, v_TGe), v_TGe.shape[-1]
    q, k, v = (pad_channels(x, width) for x in (q_THd, k_TGd, v_TGe))
    cu_seqlens, longest = pack.all_cu_seqlens, pack.longest
    window = params.window
    if sinks_H is not None:
        out = flash_attention_with_sinks(q, k, v, sinks_H, cu_seqlens, longest, scale=params.scale, window=window)
    elif window is None and has_dense_batch(pack.lengths, width):

        def varlen(rows: slice, lengths: Sequence[int]) -> Tensor:
            ends, max_length = pack.get_cu_seqlens(lengths), max(lengths)
            qkv = (q[rows], k[rows], v[rows])
            return run_varlen_kernel(qkv, (ends, ends), (max_length, max_length), params.scale, None)

        out = dense_sdpa_attention(q, k, v, pack.lengths, params.scale, varlen)
    else:
        out = run_varlen_kernel((q, k, v), (cu_seqlens, cu_seqlens), (longest, longest), params.scale, window)
    return out if width == value_dim else out[..., :value_dim]


def _attend_padded(pack: _Pack, inputs: AttentionInputs, selection: _TokenSelection | None) -> Tensor:
    layout = pack.get_layout(pack.longest if selection is None else selection.max_selected)
    q, k, v, *_ = inputs
    if layout.token_P is not None:
        q, k, v = _Pad.apply(q, k, v, layout.token_P, layout.slot_T)  # pyright: ignore[reportGeneralTypeIssues]
    sizes = [b * s for b, s in layout.shapes]
    split = (_split_blocks(x, sizes) for x in (q, k, v))
    parts = zip(*split, layout.shapes, layout.blocks, strict=True)
    outs = [
        _attend_block(
            pack, inputs._replace(q_THd=qb, k_TGd=kb, v_TGe=vb), shape, _get_block_selection(selection, block)
        )
        for qb, kb, vb, shape, block in parts
    ]
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if layout.slot_T is None else _Unpad.apply(out, layout.slot_T)  # pyright: ignore[reportReturnType]


def _attend_relative(pack: _Pack, inputs: AttentionInputs, bias: RelativeBias) -> Tensor:
    """Attention with a position bias in padded blocks."""
    layout, params = pack.get_layout(pack.longest), inputs.params
    q, k, v, weights = (*inputs[:3], bias.weights_THr)
    if layout.token_P is not None:
        q, k, v = _Pad.apply(q, k, v, layout.token_P, layout.slot_T)  # pyright: ignore[reportGeneralTypeIssues]
        weights = weights.index_select(0, layout.token_P)
    sizes = [b * s for b, s in layout.shapes]
    parts = zip(*(_split_blocks(x, sizes) for x in (q, k, v, weights)), layout.shapes, strict=True)
    outs: list[Tensor] = []
    for *block, shape in parts:
        q, k, v, weights = (x.unflatten(0, shape) for x in block)
        options: dict[str, Any] = {"scale": params.scale, "window": params.window}
        outs.append(relative_attention(q, k, v, weights, bias.profiles_rE, **options).flatten(0, 1))
    out = outs[0] if len(outs) == 1 else torch.cat(outs)
    return out if layout.slot_T is None else _Unpad.apply(out, layout.slot_T)  # pyright: ignore[reportReturnType]


def _split_blocks(x: Tensor, sizes: list[int]) -> Sequence[Tensor]:
    """The rows of each block; a single block is not split, which would copy its gradient."""
    return [x] if len(sizes) == 1 else x.split(sizes)


def _get_block_selection(selection: _TokenSelection | None, block: list[int]) -> dict[str, Any]:
    """The selection of a padded block, as ``eager_attention`` takes it: a sequence with one is a block of its own."""
    selected = None if selection is None else selection.selected.get(block[0])
    if selection is None or selected is None:
        return {}
    if selection.block is None:
        return {"selected_BSt": selected[None]}
    return {"selected_BGSt": selected[None], "block": selection.block}


def _attend_block(pack: _Pack, inputs: AttentionInputs, shape: tuple[int, int], selection: dict[str, Any]) -> Tensor:
    q_BSHd, k_BSGd, v_BSGe = (x.unflatten(0, shape) for x in inputs[:3])
    params, sinks_H = inputs.params, inputs.sinks_H
    longest = shape[1]
    window = None if params.window is None or params.window >= longest else params.window
    is_plain = sinks_H is None and not selection and params.softcap is None
    # Torch has no fused kernel for heads this wide: it would keep the probabilities of all pairs of tokens in float32.
    is_plain &= not (q_BSHd.is_cuda and q_BSHd.dtype in HALF_DTYPES) or can_fuse(q_BSHd, v_BSGe)
    if not is_plain or (window is not None and longest > _MAX_MASKED_LENGTH):
        out_BSHe = eager_attention(q_BSHd, k_BSGd, v_BSGe, params, sinks_H=sinks_H, **selection)
        return out_BSHe.flatten(0, 1)
    mask_SS = None if window is None else pack.get_mask(longest, window)
    q_BHSd, k_BGSd, v_BGSe = q_BSHd.transpose(1, 2), k_BSGd.transpose(1, 2), v_BSGe.transpose(1, 2)
    return sdpa_attention(q_BHSd, k_BGSd, v_BGSe, params.scale, mask_SS).transpose(1, 2).flatten(0, 1)


def sdpa_attention(q_BHSd: Tensor, k_BGSd: Tensor, v_BGSe: Tensor, scale: float, mask_SS: Tensor | None) -> Tensor:
    """SDPA over a block, causal or with ``mask_SS``."""
    value_dim = v_BGSe.shape[-1]
    dtype = q_BHSd.dtype
    gqa = q_BHSd.shape[1] != k_BGSd.shape[1]
    needs_padding = q_BHSd.shape[-1] != value_dim or dtype in HALF_DTYPES
    if needs_padding and not q_BHSd.is_cuda:
        # The CPU flash kernel needs equal widths, and in half precision may be a hundred times slower.
        width, wide = max(q_BHSd.shape[-1], value_dim), torch.promote_types(dtype, torch.float32)
        q_BHSd, k_BGSd, v_BGSe = (pad_channels(x.to(wide), width) for x in (q_BHSd, k_BGSd, v_BGSe))
    out_BHSe = F.scaled_dot_product_attention(
        q_BHSd, k_BGSd, v_BGSe, attn_mask=mask_SS, is_causal=mask_SS is None, scale=scale, enable_gqa=gqa
    )
    return out_BHSe[..., :value_dim].to(dtype) if needs_padding else out_BHSe
