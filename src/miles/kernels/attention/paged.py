"""Paged attention backend in torch: writes new keys and values into their pages, attends to each sequence's own.

Shapes: T new tokens of all sequences, B of them decode tokens, H query heads, G key-value heads, r = H / G, d channels
of a key, e of a value; in a block: N rows of pages, Q queries of the longest row, q some of them, X real ones, C tokens
of the longest context, R = Q * r, h some heads of an indexer, k tokens it selects.

Layers with full attention use blocks with shared prefixes; those with a window, chunk, softcap or sinks use blocks in
which every row holds all that its queries see. While no context exceeds the window, both are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from miles.kernels.attention.block_selection import select_visible_blocks, unselected_tokens
from miles.kernels.attention.compressed import CompressorInputs
from miles.kernels.attention.compressed_paged import attend_paged
from miles.kernels.attention.index_pools import mask_unselected_pools, select_pools
from miles.kernels.attention.indexer_replay import IndexerSelections
from miles.kernels.attention.metadata import (
    AttentionBlock,
    AttentionBlocks,
    AttentionMetadata,
    build_attention_metadata,
)
from miles.kernels.attention.params import (
    AttentionInputs,
    AttentionParams,
    BlockIndexerInputs,
    IndexerInputs,
    KeyPool,
    RelativeBias,
)
from miles.kernels.attention.relative import gather_bias
from miles.kernels.attention.topk_positions import select_topk
from miles.kernels.runtime.kv_cache import (
    Ints,
    KvShape,
    LayerKVCache,
    PagedKVCache,
    PagedTensor,
    PooledRecurrentState,
    RecurrentStatePool,
    StepStates,
)

__all__ = [
    "Ints",
    "KvShape",
    "PagedAttentionBackend",
    "PagedKVCache",
    "RecurrentStatePool",
    "StepStates",
    "build_attention_metadata",
]

_SDPA_BACKENDS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
# The most scores that are materialized at once.
_MAX_SCORES = 1 << 26


class _LayerCall(NamedTuple):
    """One layer's queries, KV cache and parameters, and the step's blocks."""

    q_THd: Tensor
    cache: LayerKVCache
    heads: int
    params: AttentionParams
    sinks_H: Tensor | None
    metadata: AttentionMetadata
    bias: RelativeBias | None = None

    def read(self, block: AttentionBlock) -> tuple[Tensor, Tensor]:
        """Keys and values of a block; with MLA the values are the first channels of the keys."""
        keys, values = self.cache.keys, self.cache.values
        k_NGCd = keys.read(block.pages, block.rows, block.context).transpose(1, 2)
        if values is None:
            return k_NGCd, k_NGCd
        return k_NGCd, values.read(block.pages, block.rows, block.context).transpose(1, 2)


class PagedAttentionBackend:
    """Attention backend of one step: new tokens attend to the pages of their own sequence.

    ``states`` are the recurrent states of a model that has recurrent layers. ``recorder`` gets what indexers select.
    """

    latent = True

    def __init__(
        self,
        cache: PagedKVCache,
        metadata: AttentionMetadata,
        states: StepStates | None = None,
        recorder: IndexerSelections | None = None,
    ) -> None:
        self._cache = cache
        self._metadata = metadata
        self._states = states
        self._recorder = recorder
        self._selections: dict[int, list[Tensor] | None] = {}

    def recurrent_state(self, layer: int) -> PooledRecurrentState:
        """What a recurrent layer left behind, and where to leave it."""
        assert self._states is not None, "the model has recurrent layers, but no recurrent states were given"
        return self._states.recurrent_state(layer)

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        q_THd, k_TGd, v_TGe, params, sinks_H, index = inputs
        cache, slots_T = self._cache.layers[layer], self._metadata.slots_T
        cache.keys.write(slots_T, k_TGd)
        if cache.values is not None:
            cache.values.write(slots_T, v_TGe)
        selected = None if index is None else self._select_tokens(layer, cache, index)
        metadata = self._metadata.causal if params.ignores_spans else self._metadata
        call = _LayerCall(q_THd, cache, k_TGd.shape[1], params, sinks_H, metadata)
        # Shapes change every step, and cuDNN would build a plan for each.
        with sdpa_kernel(_SDPA_BACKENDS) if q_THd.is_cuda else nullcontext():
            out_THe = self._attend(call, selected)
        return out_THe if cache.values is not None else out_THe[..., : v_TGe.shape[-1]]

    def attend_relative(self, layer: int, inputs: AttentionInputs, bias: RelativeBias) -> Tensor:
        """Attend with a relative position bias."""
        q_THd, k_TGd, v_TGe, params, _, _ = inputs
        cache, slots_T = self._cache.layers[layer], self._metadata.slots_T
        assert cache.values is not None, "a layer with a position bias has keys and values"
        cache.keys.write(slots_T, k_TGd)
        cache.values.write(slots_T, v_TGe)
        return self._attend(_LayerCall(q_THd, cache, k_TGd.shape[1], params, None, self._metadata.causal, bias), None)

    def attend_compressed(self, layer: int, inputs: AttentionInputs, compressor: CompressorInputs) -> Tensor:
        """Attend to a window of tokens and to compressed keys."""
        return attend_paged(self._cache.layers[layer], self._metadata.causal, inputs, compressor)

    def _attend(self, call: _LayerCall, selected: list[Tensor] | None) -> Tensor:
        window, chunk = self._limit_if_exceeded(call.params.window), self._limit_if_exceeded(call.params.chunk)
        materialize = call.params.softcap is not None or call.sinks_H is not None or call.bias is not None
        # The kernel that returns log-sum-exps needs keys and values of equal width.
        if window is None and chunk is None and selected is None and not materialize and call.cache.equal_dims:
            return self._attend_full(call)
        assert selected is None or (window is None and chunk is None), (
            "sparse attention with a window or chunk is not supported"
        )
        blocks = call.metadata.get_blocks(window, chunk)
        masks = [block.mask for block in (*blocks.decode, *blocks.prefill)] if selected is None else selected
        return _attend_blocks(call, blocks, masks, materialize)

    def _limit_if_exceeded(self, limit: int | None) -> int | None:
        """The window or chunk, if some context exceeds it already."""
        return None if limit is None or limit >= self._metadata.longest else limit

    # -- full attention ----------------------------------------------------------------------

    def _attend_full(self, call: _LayerCall) -> Tensor:
        blocks = call.metadata.full_blocks
        outs = [_attend_prefill(call, block, block.mask) for block in blocks.prefill]
        if blocks.decode:
            outs.insert(0, self._attend_decode(call))
        return _concat(outs)

    def _attend_decode(self, call: _LayerCall) -> Tensor:
        blocks = call.metadata.full_blocks
        if blocks.prefix_tokens is None:
            out_BHe = _concat([_attend_shared_rows(call, block, block.mask) for block in blocks.decode])
            return out_BHe if blocks.decode_order is None else out_BHe.index_select(0, blocks.decode_order)
        suffix_BHe, suffix_BH = _attend_with_lse(call, blocks.decode)
        if blocks.decode_order is not None:
            suffix_BHe, suffix_BH = (x.index_select(0, blocks.decode_order) for x in (suffix_BHe, suffix_BH))
        prefix_XHe, prefix_XH = _attend_with_lse(call, blocks.prefix)
        tokens = blocks.prefix_tokens
        weight_XH = torch.sigmoid(prefix_XH - suffix_BH.index_select(0, tokens)).to(call.q_THd.dtype)
        merged_XHe = torch.lerp(suffix_BHe.index_select(0, tokens), prefix_XHe, weight_XH.unsqueeze(-1))
        return suffix_BHe.index_copy(0, tokens, merged_XHe)

    # -- sparse attention --------------------------------------------------------------------

    def _select_tokens(
        self, layer: int, cache: LayerKVCache, index: IndexerInputs | BlockIndexerInputs | int
    ) -> list[Tensor] | None:
        """Masks, one per block, of the tokens that the indexer selected; None while that is all of them."""
        if isinstance(index, int):
            return self._selections[index]
        assert cache.index is not None, "a layer with an indexer needs index keys in the KV cache"
        cache.index.write(self._metadata.slots_T, index.k_Td)
        self._selections[layer] = None
        if index.max_selected >= self._metadata.longest:
            return None
        blocks, keys = self._metadata.get_blocks(), cache.index
        choices = [_select(block, keys, index) for block in (*blocks.decode, *blocks.prefill)]
        if self._recorder is not None:
            count = index.max_selected // index.unit
            rows = [(choice.list_rows(count), choice.visible_X) for choice in choices]
            selected_Tk, visible_T = (_join_rows(part, blocks) for part in zip(*rows, strict=True))
            self._recorder.record(layer, selected_Tk, visible_T, index.max_selected)
        masks = [choice.mask for choice in choices]
        if isinstance(index, IndexerInputs):  # no other layer uses a selection of blocks
            self._selections[layer] = masks
        return masks


class _Choice(NamedTuple):
    """What an indexer selects of the context of a block's queries: its mask, and the numbers of tokens, pools or blocks
    of each query and group, [N, G, Q, t].
    """

    block: AttentionBlock
    mask: Tensor
    selected_NGQt: Tensor
    visible_NQ: Tensor

    def list_rows(self, count: int) -> Tensor:
        """What each real query selects, [X, G * count]; a context of fewer is all selected, and its row unused."""
        padded_NGQt = F.pad(self.selected_NGQt, (0, count - self.selected_NGQt.shape[-1]))
        return self._drop_padding(padded_NGQt.transpose(1, 2).flatten(2).flatten(0, 1))

    @property
    def visible_X(self) -> Tensor:
        """The number of tokens that each real query sees."""
        return self._drop_padding(self.visible_NQ.flatten())

    def _drop_padding(self, rows: Tensor) -> Tensor:
        return rows if self.block.real is None else rows.index_select(0, self.block.real)


def _join_rows(parts: Sequence[Tensor], blocks: AttentionBlocks) -> Tensor:
    """The rows of all blocks, in the order of the tokens."""
    if blocks.decode_order is None:
        return _concat(parts)
    num_decode = len(blocks.decode)
    return _concat([_concat(parts[:num_decode]).index_select(0, blocks.decode_order), *parts[num_decode:]])


# -- one block --------------------------------------------------------------------------------


def _attend_blocks(call: _LayerCall, blocks: AttentionBlocks, masks: Sequence[Tensor], materialize: bool) -> Tensor:
    """Attention over blocks without prefixes, under these masks."""
    prefill_fn, decode_fn = (
        (_attend_materialized, _attend_materialized) if materialize else (_attend_prefill, _attend_shared_rows)
    )
    functions = [decode_fn] * len(blocks.decode) + [prefill_fn] * len(blocks.prefill)
    work = zip(functions, (*blocks.decode, *blocks.prefill), masks, strict=True)
    outs = [function(call, block, mask) for function, block, mask in work]
    if blocks.decode_order is not None:
        num_decode = len(blocks.decode)
        outs = [_concat(outs[:num_decode]).index_select(0, blocks.decode_order), *outs[num_decode:]]
    return _concat(outs)


def _attend_shared_rows(call: _LayerCall, block: AttentionBlock, mask: Tensor) -> Tensor:
    """All queries of a row see the same tokens: the query heads of a key-value head become queries of one head."""
    out_NGRe = F.scaled_dot_product_attention(
        _fold_queries(call, block), *call.read(block), attn_mask=mask, scale=call.params.scale
    )
    return _unfold_queries(out_NGRe, block).flatten(2, 3).flatten(0, 1)


def _attend_with_lse(call: _LayerCall, blocks: Sequence[AttentionBlock]) -> tuple[Tensor, Tensor]:
    """Outputs of blocks whose queries share a row's tokens, and their log-sum-exps."""
    outs: list[Tensor] = []
    lses: list[Tensor] = []
    for block in blocks:
        out_NGRe, lse_NGR = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _fold_queries(call, block), *call.read(block), attn_mask=block.mask, scale=call.params.scale
        )
        out_XHe, lse_XH = (_unfold_queries(x, block).flatten(2, 3).flatten(0, 1) for x in (out_NGRe, lse_NGR))
        outs.append(out_XHe if block.real is None else out_XHe.index_select(0, block.real))
        lses.append(lse_XH if block.real is None else lse_XH.index_select(0, block.real))
    return _concat(outs), _concat(lses)


def _fold_queries(call: _LayerCall, block: AttentionBlock) -> Tensor:
    q_XHd = block.select_queries(call.q_THd)
    q_NQGrd = q_XHd.unflatten(1, (call.heads, -1)).unflatten(0, (block.rows, block.width))
    return q_NQGrd.transpose(1, 2).flatten(2, 3)


def _unfold_queries(x_NGR: Tensor, block: AttentionBlock) -> Tensor:
    """The queries of each row separated again, [N, Q, G, r, ...]."""
    return x_NGR.unflatten(2, (block.width, -1)).transpose(1, 2)


def _attend_prefill(call: _LayerCall, block: AttentionBlock, mask: Tensor) -> Tensor:
    """Prefill rows: every query has its own mask."""
    q_NHQd = block.select_queries(call.q_THd).unflatten(0, (block.rows, block.width)).transpose(1, 2)
    if mask.shape[1] > 1:
        return _drop_padding(_attend_by_group(q_NHQd, call.read(block), mask, call.params.scale), block)
    out_NHQe = F.scaled_dot_product_attention(
        q_NHQd,
        *call.read(block),
        attn_mask=mask,
        scale=call.params.scale,
        enable_gqa=call.q_THd.shape[1] != call.heads,
    )
    return _drop_padding(out_NHQe, block)


def _attend_by_group(q_NHQd: Tensor, kv: tuple[Tensor, Tensor], mask_NGQC: Tensor, scale: float) -> Tensor:
    """Attention with a mask for each key-value head: one head at a time, whose queries then share the mask."""
    outs: list[Tensor] = []
    queries = q_NHQd.unflatten(1, (kv[0].shape[1], -1)).unbind(1)
    for g, q_NrQd in enumerate(queries):
        k_N1Cd, v_N1Ce, mask_N1QC = (x[:, g : g + 1] for x in (*kv, mask_NGQC))
        outs.append(
            F.scaled_dot_product_attention(q_NrQd, k_N1Cd, v_N1Ce, attn_mask=mask_N1QC, scale=scale, enable_gqa=True)
        )
    return torch.cat(outs, 1)


def _attend_materialized(call: _LayerCall, block: AttentionBlock, mask: Tensor) -> Tensor:
    """Softcap, sinks or a position bias: scores are materialized in float32, some queries at a time."""
    wide = torch.promote_types(call.q_THd.dtype, torch.float32)
    k_NGCd, v_NGCe = (x.to(wide) for x in call.read(block))
    q_NQHd = block.select_queries(call.q_THd).unflatten(0, (block.rows, block.width))
    q_NGrQd = q_NQHd.transpose(1, 2).unflatten(1, (call.heads, -1)).to(wide)
    bias_fn = None if call.bias is None else _bias_function(call, call.bias, block, mask, wide)
    columns = block.context if call.bias is None else max(block.context, call.bias.profiles_rE.shape[1])
    step = max(1, _MAX_SCORES // (block.rows * q_NQHd.shape[2] * columns))
    outs: list[Tensor] = []
    for lo in range(0, block.width, step):
        q_NGrqd = q_NGrQd[..., lo : lo + step, :]
        scores_NGrqC = (q_NGrqd.flatten(2, 3) @ k_NGCd.transpose(-1, -2)).view(*q_NGrqd.shape[:4], -1)
        scores_NGrqC.mul_(call.params.scale)
        if call.params.softcap is not None:
            scores_NGrqC.div_(call.params.softcap).tanh_().mul_(call.params.softcap)
        if bias_fn is not None:
            scores_NGrqC.add_(bias_fn(lo, lo + step))
        scores_NGrqC.add_(mask[:, :, None, lo : lo + step])
        lse_NGrq1 = scores_NGrqC.logsumexp(-1, keepdim=True)
        if call.sinks_H is not None:
            lse_NGrq1 = torch.logaddexp(lse_NGrq1, call.sinks_H.to(wide).view(call.heads, -1, 1, 1))
        probs_NGrqC = scores_NGrqC.sub_(lse_NGrq1).exp_()
        out_NGrqe = (probs_NGrqC.flatten(2, 3) @ v_NGCe).view(*q_NGrqd.shape[:4], -1)
        outs.append(out_NGrqe.flatten(1, 2).to(call.q_THd.dtype))
    return _drop_padding(outs[0] if len(outs) == 1 else torch.cat(outs, 2), block)


def _bias_function(
    call: _LayerCall, bias: RelativeBias, block: AttentionBlock, mask: Tensor, wide: torch.dtype
) -> Callable[[int, int], Tensor]:
    """Return what computes the bias of some queries of each row, [N, G, r, q, C]."""
    weights_NQHr = block.select_queries(bias.weights_THr).unflatten(0, (block.rows, block.width))
    weights_NGrQp = weights_NQHr.transpose(1, 2).unflatten(1, (call.heads, -1)).to(wide)
    keys_C = torch.arange(block.context, device=mask.device)
    # The last key that a query sees is its own.
    own_NQ1 = torch.where(mask.squeeze(1) == 0, keys_C, 0).amax(-1, keepdim=True)
    distance_N11QC = (own_NQ1 - keys_C)[:, None, None]
    profiles_pE = bias.profiles_rE.to(wide)

    def compute(lo: int, hi: int) -> Tensor:
        return gather_bias(weights_NGrQp[..., lo:hi, :] @ profiles_pE, distance_N11QC[..., lo:hi, :])

    return compute


def _drop_padding(out_NHQe: Tensor, block: AttentionBlock) -> Tensor:
    out_XHe = out_NHQe.transpose(1, 2).flatten(0, 1)
    return out_XHe if block.real is None else out_XHe.index_select(0, block.real)


def _select(block: AttentionBlock, keys: PagedTensor, index: IndexerInputs | BlockIndexerInputs) -> _Choice:
    """What an indexer selects for the queries of a block."""
    visible_NQC = (block.mask.squeeze(1) == 0).expand(-1, block.width, -1)
    visible_NQ = visible_NQC.sum(-1)
    if isinstance(index, BlockIndexerInputs):
        q_NQGd = block.select_queries(index.q_TGd).unflatten(0, (block.rows, block.width))
        k_NCd = keys.read(block.pages, block.rows, block.context)
        # A query sees its whole context so far, and itself last.
        positions_NQ = (visible_NQ - 1).clamp(min=0)
        selected_NGQt = select_visible_blocks(q_NQGd, k_NCd, visible_NQC, positions_NQ, index)
        unselected_NGQC = unselected_tokens(selected_NGQt, index.block, block.context)
        return _Choice(block, torch.where(unselected_NGQC, -torch.inf, block.mask), selected_NGQt, visible_NQ)
    if index.pool is not None:
        return _select_pools(block, keys, index, index.pool, visible_NQ)
    scores_NQC = block.mask.squeeze(1).float().expand(-1, block.width, -1)
    scores_NQC = _add_scores(scores_NQC, block, keys.read(block.pages, block.rows, block.context).float(), index)
    best_NQk = select_topk(scores_NQC, index.topk)
    unselected_NQC = torch.full_like(scores_NQC, -torch.inf, dtype=block.mask.dtype).scatter_(-1, best_NQk, 0.0)
    return _Choice(block, block.mask + unselected_NQC.unsqueeze(1), best_NQk.unsqueeze(1), visible_NQ)


def _add_scores(scores_NQC: Tensor, block: AttentionBlock, keys_NCd: Tensor, index: IndexerInputs) -> Tensor:
    """Add a DSA indexer's scores of these keys (of tokens or pools), some heads at a time."""
    q_NQHd, weights_NQH = (
        block.select_queries(x).unflatten(0, (block.rows, block.width)).float() for x in (index.q_THd, index.weights_TH)
    )
    k_N1dC = keys_NCd.transpose(1, 2).unsqueeze(1)
    step = max(1, _MAX_SCORES // max(1, scores_NQC.numel()))
    for q_NQhd, weights_NQh in zip(q_NQHd.split(step, 2), weights_NQH.split(step, 2), strict=True):
        scores_NQC = scores_NQC + (weights_NQh.unsqueeze(-2) @ (q_NQhd @ k_N1dC).relu_()).squeeze(-2)
    return scores_NQC


def _select_pools(
    block: AttentionBlock, keys: PagedTensor, index: IndexerInputs, pool: KeyPool, visible_NQ: Tensor
) -> _Choice:
    """``_select`` of an indexer that selects pools of tokens."""
    size = pool.size
    pool_Npd = pool(keys.read(block.pages, block.rows, block.context)).float()
    num_pools = pool_Npd.shape[1]
    zeros_NQp = torch.zeros(*visible_NQ.shape, num_pools, device=visible_NQ.device)
    scores_NQp = _add_scores(zeros_NQp, block, pool_Npd, index)
    best_NQk = select_pools(scores_NQp, visible_NQ // size, index.topk // size)
    unselected_NQC = mask_unselected_pools(best_NQk, visible_NQ, num_pools, block.context, size)
    mask = block.mask.expand(-1, -1, block.width, -1).masked_fill(unselected_NQC.unsqueeze(1), -torch.inf)
    return _Choice(block, mask, best_NQk.unsqueeze(1), visible_NQ)


def _concat(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
