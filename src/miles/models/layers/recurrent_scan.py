"""Scan of a recurrent layer over the tokens of a forward, whose sequences may continue one another (drafted tokens) or
be split over ranks (context parallelism).

Shapes: T tokens of a forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from miles.kernels.numerics import Numerics
from miles.kernels.runtime.kv_cache import DecodeState, PooledRecurrentState
from miles.models.layers.attention_backend import RecurrentState, SequenceShard, ShardedSequences

__all__ = ["ScanFn", "find_decode_state", "scan_tokens"]

ScanFn = Callable[
    [Sequence[Tensor], Sequence[int], tuple[Tensor, ...] | None, SequenceShard | None],
    tuple[Tensor, tuple[Tensor, ...] | None],
]
"""Takes the inputs of some tokens, the lengths of their sequences and the state before each; returns the outputs of the
tokens and the state after each sequence, None if it got none. With a shard they are parts of sequences, and the states
before them come from other ranks."""


def find_decode_state(recurrent: RecurrentState, numerics: Numerics) -> DecodeState | None:
    """Return where an engine keeps the states of sequences of one new token each, if a kernel may update them in place.

    Batch-invariant layers have one order of operations for a token and for a whole sequence, which ``scan_tokens`` has.
    """
    if numerics.batch_invariant or not isinstance(recurrent, PooledRecurrentState):
        return None
    return recurrent.decode


def scan_tokens(recurrent: RecurrentState, scan: ScanFn, inputs_T: Sequence[Tensor]) -> Tensor:
    """Return the outputs [T, ...] of all tokens, level by level, and store the states after them."""
    if recurrent.shard is not None:
        return _scan_sharded(recurrent.shard, scan, inputs_T)
    if recurrent.levels:
        outs = [scan_tokens(part, scan, [x.index_select(0, rows) for x in inputs_T]) for rows, part in recurrent.levels]
        out = torch.cat(outs)
        return torch.empty_like(out).index_copy_(0, torch.cat([rows for rows, _ in recurrent.levels]), out)
    out_T, state = scan(inputs_T, recurrent.lengths, recurrent.state, None)
    if state is not None:
        recurrent.update(state)
    return out_T


def _scan_sharded(shard: ShardedSequences, scan: ScanFn, inputs_T: Sequence[Tensor]) -> Tensor:
    """Return the outputs of this rank's tokens: of split sequences it scans its parts, whole ones are exchanged."""
    split_T, whole_T = inputs_T, inputs_T
    if shard.rows is not None:
        split_T, whole_T = ([x.index_select(0, rows) for x in inputs_T] for rows in shard.rows)
    outs: list[Tensor] = []
    if shard.split is not None:
        outs.append(scan(split_T, shard.split.parts, None, shard.split)[0])
    if shard.whole is not None:
        collected_S = [shard.whole.collect(x_T) for x_T in whole_T]
        outs.append(shard.whole.send_back(scan(collected_S, shard.whole.lengths, None, None)[0]))
    # Not index_copy, which saves its source.
    return outs[0] if shard.order is None else torch.cat(outs).index_select(0, shard.order)
