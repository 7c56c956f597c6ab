"""Context parallelism of recurrent layers: each rank scans its zigzag chunks of the sequences, states are passed on.

    sequence |0|1|2|3|4|5|6|7|      with 4 ranks; rank 0 has chunks 0 and 7, rank 1 has 1 and 6, ...

A chunk is contiguous, so that a scan needs of earlier chunks their states alone, and a convolution their last inputs.
Tokens therefore stay where attention has them: bringing them into one contiguous chunk per rank, and back, would be two
all-to-alls of all channels of all tokens in every layer, for half as many states.

Shapes: t tokens of this rank, T of all ranks in the order of the sequences; N sequences, B = 2 * N + 1 parts of this
rank: the early and the late chunk of each sequence, and padding; C channels; S rows that all ranks send.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from miles.kernels.attention.gather_rows import index_rows


class ContextGroup(Protocol):
    """The context ranks, seen from one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def send(self, x: Tensor, rank: int) -> None:
        """Send ``x`` to a rank, which receives it."""
        ...

    def receive(self, like: Tensor, rank: int) -> Tensor:
        """Return what a rank sends, of the shape and type of ``like``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSequenceShard:
    """The SequenceShard of one rank: ``place_T`` is where each token is among the slots of all ranks, ``own_t`` are the
    tokens of this rank, which has ``fill`` slots more.

    ``bounds_N`` are where the chunks of each sequence begin and end. ``gather_rows`` is a differentiable all-gather.
    """

    place_T: Tensor
    own_t: Tensor
    fill: int
    group: ContextGroup
    gather_rows: Callable[[Tensor], Tensor]
    bounds_N: Sequence[NDArray[np.int64]]
    parts: Sequence[int] | None
    neighbors: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def read_earlier(self, x_tC: Tensor, count: int) -> Tensor:
        assert self.parts is not None
        if count not in self.neighbors:
            found = _find_neighbors(self.bounds_N, self.group.rank, self.group.world, count, len(x_tC))
            sent, read = (torch.from_numpy(rows).to(x_tC.device) for rows in found)
            self.neighbors[count] = sent, read
        sent, read = self.neighbors[count]
        zero_1C = x_tC.new_zeros(1, x_tC.shape[1])
        tails_SC = self.gather_rows(index_rows(torch.cat((x_tC, zero_1C)), sent))
        rows_BkC = index_rows(torch.cat((tails_SC, zero_1C)), read).unflatten(0, (len(self.parts), count))
        return rows_BkC.transpose(1, 2)

    def pass_states(self, ends_Bx: Tensor, advance: Callable[[Tensor | None, Tensor], Tensor]) -> Tensor:
        assert self.parts is not None
        rank, world = self.group.rank, self.group.world
        # The last part is padding.
        every = self.gather_rows(ends_Bx[:-1].contiguous()).unflatten(0, (world, -1, 2))
        late = 2 * world - 1 - rank
        states: list[Tensor] = []
        for chunk in range(late):
            part_Nx = every[find_owner(chunk, world), :, int(chunk >= world)]
            states.append(advance(states[-1] if states else None, part_Nx))
        zeros_Nx = torch.zeros_like(states[0])
        early_Nx = states[rank - 1] if rank else zeros_Nx
        before_Bx = torch.stack((early_Nx, states[late - 1]), 1).flatten(0, 1)
        return torch.cat((before_Bx, zeros_Nx[:1]))

    def carry_states(self, start_Nx: Tensor, step: Callable[[int, Tensor], Tensor], *, reverse: bool = False) -> None:
        # Chunks go up the ranks and down again, in either direction.
        group, (first, last) = self.group, (1, 0) if reverse else (0, 1)
        before, behind = group.rank - 1, group.rank + 1
        state_Nx = step(first, group.receive(start_Nx, before) if before >= 0 else start_Nx)
        if behind < group.world:
            group.send(state_Nx, behind)
            state_Nx = group.receive(start_Nx, behind)
        state_Nx = step(last, state_Nx)
        if before >= 0:
            group.send(state_Nx, before)

    def gather(self, x_t: Tensor) -> Tensor:
        return self.gather_rows(x_t.contiguous()).index_select(0, self.place_T)

    def select(self, x_T: Tensor) -> Tensor:
        own = x_T.index_select(0, self.own_t)
        return F.pad(own, (*(0, 0) * (own.ndim - 1), 0, self.fill)) if self.fill else own


def find_owner(chunk: int, world: int) -> int:
    """Return the rank that has a chunk."""
    return min(chunk, 2 * world - 1 - chunk)


def list_parts(bounds_N: Sequence[NDArray[np.int64]], rank: int, world: int, fill: int) -> list[int]:
    """Return the lengths of a rank's chunks of each sequence, and of its padding."""
    chunks = (rank, 2 * world - 1 - rank)
    return [int(bounds[chunk + 1] - bounds[chunk]) for bounds in bounds_N for chunk in chunks] + [fill]


def _find_neighbors(
    bounds_N: Sequence[NDArray[np.int64]], rank: int, world: int, count: int, own: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which ``count`` last rows of each of its parts this rank sends, and which of all sent rows its parts read.

    The row behind the ``own`` ones, or behind those sent, is zeros. The last part, padding, reads only zeros.
    """
    offset_k = np.arange(count)
    sent: list[NDArray[np.int64]] = []
    read: list[NDArray[np.int64]] = []
    start, all_sent = 0, world * len(bounds_N) * 2 * count
    for number, bounds in enumerate(bounds_N):
        for chunk in (rank, 2 * world - 1 - rank):
            first, end = bounds[chunk], bounds[chunk + 1]
            row_k = start + (end - first) - count + offset_k
            sent.append(np.where(row_k >= start, row_k, own))
            start += int(end - first)
            position_k = first - count + offset_k
            chunk_k = np.searchsorted(bounds, position_k, side="right") - 1
            owner_k = np.minimum(chunk_k, 2 * world - 1 - chunk_k)
            part_k = (owner_k * len(bounds_N) + number) * 2 + (chunk_k >= world)
            slot_k = part_k * count + count - (bounds[chunk_k + 1] - position_k)
            read.append(np.where(position_k >= 0, slot_k, all_sent))
    read.append(np.full(count, all_sent))
    return np.concatenate(sent), np.concatenate(read)
