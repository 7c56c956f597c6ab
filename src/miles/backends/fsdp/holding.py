"""What a rank holds of one parameter, and how the whole is made of all ranks' parts and cut into them again.

whole --tensor ranks--> heads, channels, vocabulary --expert ranks--> experts --FSDP--> rows
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from miles.backends.fsdp import expert
from miles.backends.fsdp.mesh import Mesh, Ring
from miles.backends.fsdp.tensor import copied
from miles.models.loading import cut
from miles.models.shard import Share


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One parameter: its ``whole`` shape and a rank's ``part`` before FSDP cuts dimension ``dim`` over ``pieces``.

    Where experts are dealt out, a stacked part is that of the rank's own experts. ``counts`` is false where an earlier
    rank has the same.
    """

    share: Share
    whole: torch.Size
    part: torch.Size
    tensor: Ring
    experts: Ring | None
    pieces: Ring | None
    counts: bool
    dim: int = 0

    @property
    def bounds(self) -> tuple[int, int]:
        """Of which rows of its part this rank has the values, along ``dim``."""
        if self.pieces is None:
            return 0, self.part[self.dim] if self.part else 0
        return cut(self.part[self.dim], self.pieces.rank, self.pieces.world)

    def cut(self, whole: Tensor) -> Tensor:
        """This rank's part of ``whole``, in memory of its own unless it is all of it."""
        part = self.share.of(whole, self.tensor.rank, self.tensor.world)
        if self.experts is not None:
            part = expert.of_rank(part, self.experts.rank, self.experts.world)
        first, last = self.bounds
        if self.pieces is not None:
            part = part.narrow(self.dim, first, last - first)
        return part if part is whole else part.clone(memory_format=torch.contiguous_format)

    def gather(self, local: Tensor) -> Tensor:
        """The whole, from every rank's part."""
        part = local if self.pieces is None else _joined(local, self.part[self.dim], self.dim, self.pieces)
        if self.experts is not None:
            part = self.experts.all_gather(part)
        if self.tensor.world == 1:
            return part
        if self.share.parts:
            return self.share.gathered(self.tensor.gather(part))
        return self.tensor.broadcast(part.clone()) if self.share.lone else part

    def squares(self, local: Tensor) -> Tensor:
        """The sum of the squares of what no earlier rank has."""
        wide = torch.promote_types(local.dtype, torch.float32)
        if not self.counts or not local.numel():
            return torch.zeros((), dtype=torch.float64, device=local.device)
        total = torch.linalg.vector_norm(local, dtype=wide).to(torch.float64).square()
        if self.dim == 0:
            for rows, run in copied(self.share, self.bounds[0], len(local), self.tensor):
                if not run.first:
                    total = total - torch.linalg.vector_norm(local[rows], dtype=wide).to(torch.float64).square()
        return total


def _joined(local: Tensor, size: int, dim: int, ring: Ring) -> Tensor:
    """Pieces along ``dim`` as one; the last may be smaller than the others, or empty."""
    each = -(-size // ring.world)
    if dim == 0 and len(local) == each and each * ring.world == size:
        return ring.all_gather(local)
    padded = local.new_zeros((*local.shape[:dim], each, *local.shape[dim + 1 :]))
    padded.narrow(dim, 0, local.shape[dim]).copy_(local)
    return torch.cat(ring.gather(padded), dim).narrow(dim, 0, size)


def holdings(
    shares: Mapping[str, Share],
    whole: Mapping[str, Sequence[int]],
    part: Mapping[str, Sequence[int]],
    mesh: Mesh,
    *,
    apart: frozenset[str],
) -> dict[str, Holding]:
    """How each parameter is held; those in ``apart`` FSDP does not know, and every rank of a part has all of them."""
    out: dict[str, Holding] = {}
    for name, shape in part.items():
        share = shares[name]
        dealt = share.stacked and mesh.expert.world > 1
        pieces = mesh.apart if dealt else mesh.pieces
        sized, lone = torch.Size(shape), name in apart or pieces.world == 1
        first = mesh.copies.rank == 0 and (bool(share.parts) or mesh.tensor.rank == 0)
        out[name] = Holding(
            share=share,
            whole=torch.Size(whole[name]),
            part=sized,
            tensor=mesh.tensor,
            experts=mesh.expert if dealt else None,
            pieces=None if lone else pieces,
            counts=first and (dealt or not lone or mesh.pieces.rank == 0),
            dim=expert.shard_dim(sized, pieces.world) if dealt else 0,
        )
    return out
