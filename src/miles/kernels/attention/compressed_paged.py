"""Compressed attention over a paged KV cache: states of tokens and keys of windows are in the pages of each sequence.

A token's state is cached beside its key. When a token completes a window, the window's keys are computed from the
states of its tokens, and written into the last one's in place of what only this window read of it. A page thus holds
all that later tokens need of its tokens, whichever sequences share it.

Shapes: T new tokens, M windows that they complete, L tokens a window reads, x channels of a state, d of a key, i of an
indexer's key; in a block N rows of Q queries with W windows, H query heads (h of an indexer), X real queries.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from miles.kernels.attention.compressed import (
    CompressorInputs,
    attend_with_lse,
    mask_windows,
    merge_attention,
    score_windows,
)
from miles.kernels.attention.metadata import AttentionBlock, AttentionBlocks, AttentionMetadata
from miles.kernels.attention.params import AttentionInputs
from miles.kernels.runtime.kv_cache import LayerKVCache, PagedTensor

# The most scores, or values of keys, that are materialized at once.
_MAX_SCORES = 1 << 26

Attended = tuple[Tensor, Tensor]
"""Outputs [X, H, d] and log-sum-exps [X, H] of some queries, in float32 or wider."""


def attend_paged(
    cache: LayerKVCache, metadata: AttentionMetadata, inputs: AttentionInputs, compressor: CompressorInputs
) -> Tensor:
    """Write new keys and states, complete windows, and attend to the last tokens and to windows, [T, H, d]."""
    assert cache.index is not None, "a layer with a compressor needs states of tokens in the KV cache"
    k_T1d, window = inputs.k_TGd, inputs.params.window
    cache.keys.write(metadata.slots_T, k_T1d)
    cache.index.write(metadata.slots_T, compressor.states_Tx)
    _complete_windows(cache.index, metadata, compressor, k_T1d.shape[-1])
    near = metadata.get_blocks(None if window is None or window >= metadata.longest else window)
    parts = [_attend_blocks(near, lambda block: _attend_tokens(block, cache.keys, inputs))]
    if metadata.longest >= compressor.rate:
        states = cache.index
        far = metadata.get_blocks()
        parts.append(_attend_blocks(far, lambda block: _attend_windows(block, states, inputs, compressor, metadata)))
    return merge_attention(parts, inputs.sinks_H).to(inputs.q_THd.dtype)


def _complete_windows(
    states: PagedTensor, metadata: AttentionMetadata, compressor: CompressorInputs, width: int
) -> None:
    """Write the keys of windows that new tokens complete into the states of their last tokens."""
    slots_ML, numbers_M = metadata.get_windows(compressor.rate, compressor.reach)
    if not len(numbers_M):
        return
    states_MLx = states.slots.index_select(0, slots_ML.flatten()).unflatten(0, slots_ML.shape)
    keys_Md, index_Mi = compressor.compress(states_MLx, numbers_M)
    last_M, start = slots_ML[:, -1], compressor.key_start
    states.slots[:, start : start + width].index_copy_(0, last_M, keys_Md.to(states.slots.dtype))
    if index_Mi is not None:
        start = compressor.index_start
        index_Mi = index_Mi.to(states.slots.dtype)
        states.slots[:, start : start + index_Mi.shape[-1]].index_copy_(0, last_M, index_Mi)


def _attend_blocks(blocks: AttentionBlocks, attend: Callable[[AttentionBlock], Attended]) -> Attended:
    """Attend block by block; the results are in the order of the new tokens."""
    decode, prefill = ([attend(block) for block in some] for some in (blocks.decode, blocks.prefill))
    if decode and blocks.decode_order is not None:
        out_BHd, lse_BH = (torch.cat(each).index_select(0, blocks.decode_order) for each in zip(*decode, strict=True))
        decode = [(out_BHd, lse_BH)]
    out_THd, lse_TH = (torch.cat(each) for each in zip(*decode, *prefill, strict=True))
    return out_THd, lse_TH


def _attend_tokens(block: AttentionBlock, keys: PagedTensor, inputs: AttentionInputs) -> Attended:
    """Attend to the tokens of a block under its mask."""
    q_NHQd = _select_queries(block, inputs.q_THd)
    k_NCd = keys.read(block.pages, block.rows, block.context).squeeze(2).to(q_NHQd.dtype)
    mask_NQC = block.mask.squeeze(1).expand(-1, block.width, -1)
    return _join([_attend_slices(q_NHQd, k_NCd, mask_NQC, inputs.params.scale)], block)


def _attend_windows(
    block: AttentionBlock,
    states: PagedTensor,
    inputs: AttentionInputs,
    compressor: CompressorInputs,
    metadata: AttentionMetadata,
) -> Attended:
    """Attend to the windows that are complete for each query of a block, or to those the indexer selects."""
    q_NHQd = _select_queries(block, inputs.q_THd)
    windows, width = block.context // compressor.rate, q_NHQd.shape[-1]
    last_W = torch.arange(1, windows + 1, device=q_NHQd.device) * compressor.rate - 1
    pages_NW = block.pages.view(block.rows, -1)[:, last_W // metadata.page_size]
    slots_NW = pages_NW * metadata.page_size + last_W % metadata.page_size
    visible_NQ = (block.mask.squeeze(1) == 0).sum(-1).expand(-1, block.width)
    complete_NQ = visible_NQ // compressor.rate

    def read(rows: slice, start: int, channels: int) -> Tensor:
        part = states.slots[:, start : start + channels].index_select(0, slots_NW[rows].flatten())
        return part.view(rows.stop - rows.start, windows, channels)

    parts: list[Attended] = []
    step = max(1, _MAX_SCORES // max(1, windows * max(width, q_NHQd.shape[1])))
    for lo in range(0, block.rows, step):
        rows = slice(lo, min(lo + step, block.rows))
        scores_NQW = _score_block(block, rows, read, compressor) if windows else None
        topk = 0 if compressor.indexer is None else compressor.indexer.topk
        mask_NQW = mask_windows(complete_NQ[rows], windows, scores_NQW, topk)
        k_NWd = read(rows, compressor.key_start, width).to(q_NHQd.dtype)
        parts.append(_attend_slices(q_NHQd[rows], k_NWd, mask_NQW, inputs.params.scale))
    return _join(parts, block)


def _score_block(
    block: AttentionBlock, rows: slice, read: Callable[[slice, int, int], Tensor], compressor: CompressorInputs
) -> Tensor | None:
    """The indexer's scores of the windows of some rows; None while all windows are selected."""
    index = compressor.indexer
    if index is None or block.context // compressor.rate <= index.topk:
        return None
    q_NQhi, weights_NQh = (
        block.select_queries(x).unflatten(0, (block.rows, block.width))[rows] for x in (index.q_Thi, index.weights_Th)
    )
    keys_NWi = read(rows, compressor.index_start, q_NQhi.shape[-1])
    return score_windows(q_NQhi, keys_NWi, weights_NQh, _MAX_SCORES)


def _attend_slices(q_NHQd: Tensor, keys_NMd: Tensor, mask_NQM: Tensor, scale: float) -> Attended:
    """Attend some queries at a time: [N, H, Q, d] and [N, H, Q]."""
    rows, heads, width, _ = q_NHQd.shape
    step = max(1, _MAX_SCORES // max(1, rows * heads * keys_NMd.shape[1]))
    slices = [slice(lo, lo + step) for lo in range(0, width, step)]
    results = [attend_with_lse(q_NHQd[:, :, some], keys_NMd, mask_NQM[:, some], scale) for some in slices]
    out_NHQd, lse_NHQ = (torch.cat(each, 2) for each in zip(*results, strict=True))
    return out_NHQd, lse_NHQ


def _select_queries(block: AttentionBlock, q_THd: Tensor) -> Tensor:
    q_NQHd = block.select_queries(q_THd).unflatten(0, (block.rows, block.width))
    return q_NQHd.transpose(1, 2).to(torch.promote_types(q_THd.dtype, torch.float32))


def _join(parts: list[Attended], block: AttentionBlock) -> Attended:
    """Join the rows of a block, without the queries that pad them."""
    out_XHd, lse_XH = (torch.cat(each).transpose(1, 2).flatten(0, 1) for each in zip(*parts, strict=True))
    if block.real is None:
        return out_XHd, lse_XH
    return out_XHd.index_select(0, block.real), lse_XH.index_select(0, block.real)
