"""Context parallelism of recurrent layers: ranks scan whole sequences, or zigzag chunks of them and pass states on.

    sequence |0|1|2|3|4|5|6|7|      with 4 ranks; rank 0 has chunks 0 and 7, rank 1 has 1 and 6, ...

Of many sequences each is scanned by one rank, which collects its tokens by all-to-all and sends outputs back: that
needs no states. Sequences that are too long for this to be even are split (``assign_scans``) into the chunks that
attention has. A chunk is contiguous, so that a scan needs of earlier chunks their states alone, and a convolution their
last inputs. To bring a split sequence into one chunk per rank first, and back, would move all channels of all its
tokens twice in every layer, for half as many states.

Shapes: t tokens of this rank, S of the sequences that it scans whole; N sequences, c = 2 * world chunks of each, B =
2 * N + 1 parts of this rank: the early and the late chunk of each sequence, and padding; C channels; R rows that all
ranks send.
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
from miles.kernels.attention.params import ShardedSequences
from miles.models.parallel.expert_dispatch import all_to_all_rows


class ContextGroup(Protocol):
    """The context ranks, seen from one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def all_to_all(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows: ``sent[i]`` rows of ``x`` go to rank i, ``received[i]`` come from it."""
        ...

    def send(self, x: Tensor, rank: int) -> None:
        """Send ``x`` to a rank, which receives it."""
        ...

    def receive(self, like: Tensor, rank: int) -> Tensor:
        """Return what a rank sends, of the shape and type of ``like``."""
        ...


def shard_sequences(
    sizes_Nc: NDArray[np.int64],
    owners: Sequence[int | None],
    fill: int,
    group: ContextGroup,
    gather_rows: Callable[[Tensor], Tensor],
    device: torch.device,
) -> ShardedSequences:
    """Return which tokens of this rank belong to sequences that are split, and which to those that a rank scans whole.

    ``sizes_Nc`` are the tokens of each chunk of each sequence. A rank has its early and its late chunk of every
    sequence, in this order, and ``fill`` tokens of padding behind them. ``owners`` are the ranks that scan whole
    sequences; None: split. ``gather_rows`` is a differentiable all-gather over the ``group``.
    """
    is_split_N = np.array([owner is None for owner in owners])
    early_N, late_N = sizes_Nc[:, group.rank], sizes_Nc[:, 2 * group.world - 1 - group.rank]
    split = whole = rows = order = None
    if is_split_N.any():
        parts = np.stack((early_N, late_N), 1)[is_split_N].ravel().tolist()
        split = ContextSequenceShard(
            group=group, gather_rows=gather_rows, sizes_Nc=sizes_Nc[is_split_N], parts=[*parts, fill]
        )
    if not is_split_N.all():
        owner_N = np.array([owner for owner in owners if owner is not None])
        whole_fill = 0 if is_split_N.any() else fill
        whole = _build_exchange(sizes_Nc[~is_split_N], owner_N, whole_fill, group, device)
    if split is not None and whole is not None:
        is_split_t = np.append(np.repeat(is_split_N, early_N + late_N), np.ones(fill, np.bool_))
        split_t, whole_t = (torch.from_numpy(np.flatnonzero(is_t)).to(device) for is_t in (is_split_t, ~is_split_t))
        rows, order = (split_t, whole_t), torch.cat((split_t, whole_t)).argsort()
    return ShardedSequences(split, whole, rows, order)


# -- split sequences ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSequenceShard:
    """The SequenceShard of one rank; ``sizes_Nc`` are the tokens of each chunk of each sequence."""

    group: ContextGroup
    gather_rows: Callable[[Tensor], Tensor]
    sizes_Nc: NDArray[np.int64]
    parts: Sequence[int]
    neighbors: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def read_earlier(self, x_tC: Tensor, count: int) -> Tensor:
        if count not in self.neighbors:
            found = _find_neighbors(self.sizes_Nc, self.group.rank, self.group.world, count, len(x_tC))
            sent, read = (torch.from_numpy(rows).to(x_tC.device) for rows in found)
            self.neighbors[count] = sent, read
        sent, read = self.neighbors[count]
        zero_1C = x_tC.new_zeros(1, x_tC.shape[1])
        tails_SC = self.gather_rows(index_rows(torch.cat((x_tC, zero_1C)), sent))
        rows_BkC = index_rows(torch.cat((tails_SC, zero_1C)), read).unflatten(0, (len(self.parts), count))
        return rows_BkC.transpose(1, 2)

    def pass_states(self, ends_Bx: Tensor, advance: Callable[[Tensor | None, Tensor], Tensor]) -> Tensor:
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


def _find_neighbors(
    sizes_Nc: NDArray[np.int64], rank: int, world: int, count: int, own: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which ``count`` last rows of each of its parts this rank sends, and which of all sent rows its parts read.

    The row behind the ``own`` ones, or behind those sent, is zeros. The last part, padding, reads only zeros.
    """
    offset_k = np.arange(count)
    sent: list[NDArray[np.int64]] = []
    read: list[NDArray[np.int64]] = []
    start, all_sent = 0, world * len(sizes_Nc) * 2 * count
    for number, bounds in enumerate(np.pad(sizes_Nc.cumsum(1), ((0, 0), (1, 0)))):
        for chunk in (rank, 2 * world - 1 - rank):
            first, end = bounds[chunk], bounds[chunk + 1]
            row_k = start + (end - first) - count + offset_k
            sent.append(np.where(row_k >= start, row_k, own))
            start += int(end - first)
            position_k = first - count + offset_k
            chunk_k = np.searchsorted(bounds, position_k, side="right") - 1
            owner_k = np.minimum(chunk_k, 2 * world - 1 - chunk_k)
            part_k = (owner_k * len(sizes_Nc) + number) * 2 + (chunk_k >= world)
            slot_k = part_k * count + count - (bounds[chunk_k + 1] - position_k)
            read.append(np.where(position_k >= 0, slot_k, all_sent))
    read.append(np.full(count, all_sent))
    return np.concatenate(sent), np.concatenate(read)


# -- whole sequences ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ContextSequenceExchange:
    """The SequenceExchange of one rank.

    ``sent_t`` are this rank's tokens in the order in which they are sent, ``sent`` and ``came`` how many go to each
    rank and come from it, and ``order_S`` sorts those that came; ``own_t`` and ``back_S`` are the inverse orders. A
    rank without a sequence of two tokens scans one of ``zeros``, so that all of its weights have a gradient, also those
    of a decay.
    """

    group: ContextGroup
    sent_t: Tensor
    sent: list[int]
    came: list[int]
    order_S: Tensor
    own_t: Tensor
    back_S: Tensor
    lengths: Sequence[int]
    zeros: int
    fill: int

    def collect(self, x_t: Tensor) -> Tensor:
        came_S = all_to_all_rows(x_t.index_select(0, self.sent_t), self.sent, self.came, self.group)
        x_S = came_S.index_select(0, self.order_S)
        return torch.cat((x_S, x_t.new_zeros(self.zeros, *x_t.shape[1:]))) if self.zeros else x_S

    def send_back(self, x_S: Tensor) -> Tensor:
        x_S = x_S[: -self.zeros] if self.zeros else x_S
        x_t = all_to_all_rows(x_S.index_select(0, self.back_S), self.came, self.sent, self.group)
        x_t = x_t.index_select(0, self.own_t)
        return F.pad(x_t, (*(0, 0) * (x_t.ndim - 1), 0, self.fill)) if self.fill else x_t


def _build_exchange(
    sizes_Nc: NDArray[np.int64], owner_N: NDArray[np.int64], fill: int, group: ContextGroup, device: torch.device
) -> ContextSequenceExchange:
    """Plan the exchange of sequences, each scanned by its owner."""
    rank, world = group.rank, group.world
    early_Nr, late_Nr = sizes_Nc[:, :world], sizes_Nc[:, : world - 1 : -1]
    size_Nr = early_Nr + late_Nr
    own_N = size_Nr[:, rank]
    start_N = own_N.cumsum() - own_N
    by_owner = np.argsort(owner_N, kind="stable")
    mine = np.flatnonzero(owner_N == rank)
    came_r = size_Nr[mine].sum(0)
    # Where this rank's sequences begin among the rows of each rank.
    begin_nr = size_Nr[mine].cumsum(0) - size_Nr[mine] + came_r.cumsum() - came_r
    lengths = sizes_Nc[mine].sum(1).tolist()
    zeros = 2 if max(lengths, default=0) < 2 else 0
    # Chunks in the order of the sequence: early ones up the ranks, late ones down.
    begin_nc = np.concatenate((begin_nr, (begin_nr + early_Nr[mine])[:, ::-1]), 1)
    sent_t, order_S = _list_ranges(start_N[by_owner], own_N[by_owner]), _list_ranges(begin_nc, sizes_Nc[mine])
    return ContextSequenceExchange(
        group=group,
        sent_t=sent_t.to(device),
        sent=[int(own_N[owner_N == owner].sum()) for owner in range(world)],
        came=came_r.tolist(),
        order_S=order_S.to(device),
        own_t=sent_t.argsort().to(device),
        back_S=order_S.argsort().to(device),
        lengths=[*lengths, zeros] if zeros else lengths,
        zeros=zeros,
        fill=fill,
    )


def _list_ranges(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> Tensor:
    """Return so many numbers from each start on, one range after the other."""
    counts = counts.ravel()
    return torch.from_numpy(np.arange(counts.sum()) + np.repeat(starts.ravel() - counts.cumsum() + counts, counts))


def find_owner(chunk: int, world: int) -> int:
    """Return the rank that has a chunk."""
    return min(chunk, 2 * world - 1 - chunk)
