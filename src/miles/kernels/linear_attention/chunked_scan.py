"""Chunked scan: packed sequences split into chunks, for recurrences that carry a state from chunk to chunk.

Shapes: T tokens, P all slots of all chunks, padding included, R sequences of a group, N its chunks, C tokens of a
chunk; X and Y are the shapes of a state and of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# A sequence is split by its own length alone, so that other sequences of the batch do not change its numbers.
_SIZES = (1, 16, 64)


@dataclass(frozen=True, slots=True)
class ChunkGroup:
    """Sequences with chunks of ``size``: all first chunks, then all second ones, and so on.

    ``counts`` are the numbers of sequences that have a first chunk, a second one ...; ``rows`` are the sequences, those
    with the most chunks first.
    """

    size: int
    counts: tuple[int, ...]
    rows: Tensor


@dataclass(frozen=True, slots=True)
class ChunkLayout:
    """Chunk groups one after the other, and the slot of each token (None: identity).

    ``idle`` are sequences without a token. ``order`` restores the order of the groups' rows followed by the idle ones.
    """

    groups: tuple[ChunkGroup, ...]
    slots: int
    slot_T: Tensor | None
    idle: Tensor
    order: Tensor

    def scatter_tokens(self, x_TY: Tensor) -> list[Tensor]:
        """Tokens as [N, C, Y] for each group; padding is zero."""
        x_PY = x_TY
        if self.slot_T is not None:
            x_PY = x_TY.new_zeros(self.slots, *x_TY.shape[1:]).index_copy_(0, self.slot_T, x_TY)
        parts = x_PY.split([sum(group.counts) * group.size for group in self.groups])
        return [part.unflatten(0, (-1, group.size)) for part, group in zip(parts, self.groups, strict=True)]

    def gather_tokens(self, outs_NCY: Sequence[Tensor]) -> Tensor:
        """The inverse of ``scatter_tokens``: [T, Y] again."""
        out_PY = torch.cat([out.flatten(0, 1) for out in outs_NCY])
        return out_PY if self.slot_T is None else out_PY.index_select(0, self.slot_T)


@lru_cache(maxsize=16)
def build_chunk_layout(lengths: tuple[int, ...], device: torch.device) -> ChunkLayout:
    """Split sequences of ``lengths``; cached, since all layers of a forward need the same."""
    length_B = np.asarray(lengths, dtype=np.int64)
    start_B = np.cumsum(length_B) - length_B
    slot_T = np.empty(int(length_B.sum()), dtype=np.int64)
    idle = np.flatnonzero(length_B == 0)
    rows: list[NDArray[np.int64]] = []
    shapes: list[tuple[int, tuple[int, ...]]] = []
    used = shortest = 0
    for size in _SIZES:
        longest = size if size < _SIZES[-1] else max(lengths, default=0)
        rows_of_size = np.flatnonzero((length_B > shortest) & (length_B <= longest))
        shortest = longest
        if len(rows_of_size) == 0:
            continue
        row_R = rows_of_size[np.argsort(-length_B[rows_of_size], kind="stable")]
        length_R = length_B[row_R]
        counts = (-(-length_R // size)[:, None] > np.arange(-(-int(length_R[0]) // size))).sum(0)
        first_S = np.cumsum(counts) - counts
        rank_T = np.repeat(np.arange(len(row_R)), length_R)
        index_T = np.arange(int(length_R.sum())) - np.repeat(np.cumsum(length_R) - length_R, length_R)
        slots = used + (first_S[index_T // size] + rank_T) * size + index_T % size
        slot_T[start_B[row_R][rank_T] + index_T] = slots
        rows.append(row_R)
        shapes.append((size, tuple(counts.tolist())))
        used += int(counts.sum()) * size
    is_identity = used == len(slot_T) and bool((slot_T == np.arange(used)).all())

    def to_device(values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(device)

    # Created outside inference mode, since a trainer in the same process saves it for backward.
    with torch.inference_mode(False), torch.no_grad():
        groups = tuple(ChunkGroup(*shape, to_device(row_R)) for shape, row_R in zip(shapes, rows, strict=True))
        order = np.argsort(np.concatenate((*rows, idle)), kind="stable")
        return ChunkLayout(groups, used, None if is_identity else to_device(slot_T), to_device(idle), to_device(order))


def is_decode_step(lengths: Sequence[int], total: int) -> bool:
    """Whether there is exactly one token per sequence."""
    return total == len(lengths) and 0 not in lengths


def run_recurrence(
    inputs_TY: Sequence[Tensor],
    lengths: Sequence[int],
    state_BX: Tensor | None,
    *,
    step: Callable[..., tuple[Tensor, Tensor | None]],
    chunks: Callable[..., tuple[Tensor, Tensor | None]],
) -> tuple[Tensor, Tensor | None]:
    """A recurrence over all tokens: their outputs, [T, Y], and the state after each sequence if one is given.

    ``step(state, *tokens)`` takes one token of each sequence, ``chunks(counts, state, *tokens)`` chunks of them in the
    order of a ``ChunkGroup``. A state of None is zeros, and no final state is returned.
    """
    total = len(inputs_TY[0])
    assert total == sum(lengths), f"got {total} tokens for sequences of {sum(lengths)} in all"
    if state_BX is not None and is_decode_step(lengths, total):
        return step(state_BX, *inputs_TY)
    layout = build_chunk_layout(tuple(lengths), inputs_TY[0].device)
    outs: list[Tensor] = []
    finals: list[Tensor] = []
    for group, *parts in zip(layout.groups, *(layout.scatter_tokens(x_TY) for x_TY in inputs_TY), strict=True):
        state_RX = None if state_BX is None else state_BX.index_select(0, group.rows)
        if group.size == 1:
            out_RY, final_RX = step(state_RX, *(part.squeeze(1) for part in parts))
            outs.append(out_RY.unsqueeze(1))
        else:
            out_NCY, final_RX = chunks(group.counts, state_RX, *parts)
            outs.append(out_NCY)
        if final_RX is not None:
            finals.append(final_RX)
    if state_BX is None:
        return layout.gather_tokens(outs), None
    final_RX = torch.cat((*finals, state_BX.index_select(0, layout.idle)))
    return layout.gather_tokens(outs), final_RX.index_select(0, layout.order)


def scan_chunks(
    state_RX: Tensor, counts: Sequence[int], advance: Callable[[int, Tensor, int], Tensor], *, keep: bool
) -> tuple[Tensor, Tensor | None]:
    """The state before each chunk [N, X] and, with ``keep``, the one after each sequence's last [R, X].

    ``advance(i, state, rest)`` moves the state past the i-th chunk of each sequence that has one; only the first
    ``rest`` sequences are needed.
    """
    before: list[Tensor] = []
    final: list[Tensor] = []
    for i, (count, next_count) in enumerate(zip(counts, (*counts[1:], 0), strict=True)):
        before.append(state_RX)
        state_RX = advance(i, state_RX, count if keep else next_count)
        if keep and next_count < count:
            final.append(state_RX[next_count:])
            state_RX = state_RX[:next_count]
    return torch.cat(before), torch.cat(final[::-1]) if keep else None


def scan_deltas(
    parts: tuple[Tensor, Tensor, Tensor, Tensor], counts: Sequence[int], state_RHkv: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scan the chunks of a delta rule; the state before each, what each writes [N, H, C, v], and the last states if any
    were given.

    ``parts`` of each chunk are what it would write to an empty state, how much less for each row of the state, the keys
    by which it writes, and the decay of the state over it.
    """
    # One split: its backward is one concatenation, where slices would each be a full-size tensor.
    steps = [x.split(list(counts)) for x in parts]
    deltas: list[Tensor] = []

    def advance(i: int, state: Tensor, rest: int) -> Tensor:
        zero_state, state_coef, write, chunk_decay = (step[i] for step in steps)
        deltas.append(zero_state - state_coef @ state)
        state, chunk_decay, write, delta = (take_rows(x, rest) for x in (state, chunk_decay, write, deltas[-1]))
        return torch.addcmul(write @ delta, state, chunk_decay)

    keep = state_RHkv is not None
    if state_RHkv is None:
        zero_state_NHCv, state_coef_NHCk = parts[:2]
        shape = (counts[0], zero_state_NHCv.shape[1], state_coef_NHCk.shape[-1], zero_state_NHCv.shape[-1])
        state_RHkv = zero_state_NHCv.new_zeros(shape)
    before_NHkv, final_RHkv = scan_chunks(state_RHkv, counts, advance, keep=keep)
    return before_NHkv, torch.cat(deltas), final_RHkv


def take_rows(x_RX: Tensor, count: int) -> Tensor:
    """The first rows; all of them without a copy, also in backward."""
    return x_RX if count == len(x_RX) else x_RX[:count]


def compute_decay(log_decay_NHC: Tensor) -> tuple[Tensor, Tensor]:
    """Decay from token j to token i, [N, H, C, C] with zeros above the diagonal; and cumulative log decay, [N, H, C].

    Sums of logs are float64: a difference of two long ones has few digits left in float32.
    """
    total_NHC = log_decay_NHC.to(torch.float64).cumsum(-1)
    log_decay_NHCC = (total_NHC.unsqueeze(-1) - total_NHC.unsqueeze(-2)).to(log_decay_NHC.dtype)
    size = log_decay_NHC.shape[-1]
    future_CC = torch.ones(size, size, dtype=torch.bool, device=log_decay_NHC.device).triu(1)
    # Masked before the exponential, which would overflow above the diagonal.
    return log_decay_NHCC.masked_fill(future_CC, -torch.inf).exp(), total_NHC
