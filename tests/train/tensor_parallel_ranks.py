"""Ranks that share a vocabulary and a micro-batch's tokens: as threads of one process, or over a process group."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

from miles.train.logprobs import HeadOutput, compute_logprobs, get_vocab_size


class Exchange(Protocol):
    """What every rank of a group gives, in order."""

    def __call__(self, rank: int, x: Tensor) -> list[Tensor]: ...


class Room:
    """A meeting of threads."""

    def __init__(self, world: int) -> None:
        self._slots: list[Tensor] = [torch.empty(0)] * world
        self._barrier = threading.Barrier(world, timeout=60)

    def __call__(self, rank: int, x: Tensor) -> list[Tensor]:
        self._slots[rank] = x.detach().clone()
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found


@dataclass(frozen=True)
class Group:
    """A meeting of processes; what they bring may differ in length."""

    group: Any

    def __call__(self, rank: int, x: Tensor) -> list[Tensor]:
        world = dist.get_world_size(self.group)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(world)]
        dist.all_gather(lengths, torch.tensor([x.numel()]), group=self.group)
        flat = torch.zeros(max(int(n) for n in lengths), dtype=x.dtype)
        flat[: x.numel()] = x.detach().flatten()
        found = [torch.zeros_like(flat) for _ in range(world)]
        dist.all_gather(found, flat, group=self.group)
        rows = x.shape[1:] if x.ndim else ()
        return [part[: int(n)].view(-1, *rows) if x.ndim else part[0] for part, n in zip(found, lengths, strict=True)]


@dataclass(frozen=True)
class Shared:
    """A ``Vocabulary``."""

    first: int
    size: int
    rank: int
    exchange: Exchange

    def sum(self, x: Tensor) -> Tensor:
        return torch.stack(self.exchange(self.rank, x)).sum(0)

    def max(self, x: Tensor) -> Tensor:
        return torch.stack(self.exchange(self.rank, x)).amax(0)


def rows_of(head: Tensor, rank: int, world: int, exchange: Exchange) -> tuple[Tensor, Shared]:
    """One rank's rows of a head, filled up with rows that are no tokens."""
    held = -(-len(head) // world)
    first = min(rank * held, len(head))
    own = head.detach()[first : first + held]
    padding = torch.full((held - len(own), head.shape[1]), 7.0, dtype=head.dtype)
    return torch.cat((own, padding)).requires_grad_(), Shared(first, len(own), rank, exchange)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_r: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        whole = x_r.new_empty(sum(len(mine) for mine in cut.places), *x_r.shape[1:])
        for mine, part in zip(cut.places, cut.exchange(cut.rank, x_r), strict=True):
            whole[mine] = part
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.cut.mine_r], None


@dataclass(frozen=True)
class Cut:
    """A ``Tokens``: ``places`` are each rank's."""

    places: Sequence[Tensor]
    rank: int
    exchange: Exchange

    @property
    def mine_r(self) -> Tensor:
        return self.places[self.rank]

    def join(self, x_r: Tensor) -> Tensor:
        return _Join.apply(x_r, self)


def in_threads(world: int, work: Callable[[int], Any]) -> list[Any]:
    """What ``work`` gives on each of ``world`` ranks."""
    with ThreadPoolExecutor(world) as pool:
        return [future.result() for future in [pool.submit(work, rank) for rank in range(world)]]


def loss_of(logp, entropy, weights, used):
    return sum(scale * (w * x).sum() for scale, w, x in zip(used, weights, (logp, entropy), strict=True) if scale)


def corner(rank, world, hidden, head, target, weights):
    """Rank = 2 * which tokens + which rows."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3]), dist.new_group([0, 2]), dist.new_group([1, 3])]
    context, tensor = divmod(rank, 2)
    places = [torch.arange(0, len(hidden), 3), torch.tensor([i for i in range(len(hidden)) if i % 3])]
    own, vocabulary = rows_of(head, tensor, 2, Group(groups[context]))
    cut = Cut(places, context, Group(groups[2 + tensor]))
    mine = hidden.detach()[cut.mine_r].clone().requires_grad_()
    output = HeadOutput(hidden_RD=mine, head_VD=own, softcap=4.0, vocabulary=vocabulary, tokens=cut)
    logp, entropy = compute_logprobs(output, target, temperature=0.8, chunk=4)
    grads = torch.autograd.grad(loss_of(logp, entropy, weights, (1.0, 0.2)), (mine, own))
    return logp.detach(), entropy.detach(), get_vocab_size(output), cut.mine_r, *grads
