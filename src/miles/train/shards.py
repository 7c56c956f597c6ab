"""Which rank writes which tensors of a checkpoint, and into which file: worked out by every rank, alike on all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from miles.models.files import Described, Stored, shard_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Tensors on disk that are made of one of the model's, and lie in one file.

    All ranks call ``bring`` at once, one of them uses ``views`` of what it gives. What is ``stored`` is copied instead.
    """

    tensors: tuple[Described, ...]
    bring: Callable[[], Tensor] | None = None
    views: Callable[[Tensor], Sequence[Tensor]] = lambda whole: (whole,)
    stored: Stored | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class File:
    """A file, the rank that writes it, and the numbers of its loads."""

    name: str
    rank: int
    loads: tuple[int, ...]


def deal(sizes: Sequence[int], ranks: int) -> list[int]:
    """A rank for each size: the largest first, each to who has least.

    No rank's sum is above what all would have alike by more than the largest size.

    >>> deal([1, 8, 3, 4], 2)
    [1, 0, 1, 1]
    """
    owners, held = [0] * len(sizes), [0] * ranks
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        owners[number] = min(range(ranks), key=lambda rank: (held[rank], rank))
        held[owners[number]] += sizes[number]
    return owners


def files_of(lone: str, loads: Sequence[Load], ranks: int, limit: int | None) -> list[File]:
    """The files that hold ``loads``: ``lone``, or as many as the ranks that have any and ``limit`` bytes ask for.

    Within a file loads are in order, and so are a rank's files.
    """
    owners = deal([load.nbytes for load in loads], ranks)
    cut = [(rank, numbers) for rank in range(ranks) for numbers in _runs(loads, owners, rank, limit)] or [(0, ())]
    return [File(shard_of(lone, i, len(cut)), rank, tuple(numbers)) for i, (rank, numbers) in enumerate(cut)]


def _runs(loads: Sequence[Load], owners: Sequence[int], rank: int, limit: int | None) -> Iterator[list[int]]:
    run: list[int] = []
    used = 0
    for number, load in enumerate(loads):
        if owners[number] != rank:
            continue
        if run and limit is not None and used + load.nbytes > limit:
            yield run
            run, used = [], 0
        run.append(number)
        used += load.nbytes
    if run:
        yield run


def index_for(files: Sequence[File], loads: Sequence[Load]) -> dict[str, object]:
    """What the index says: which file each tensor lies in."""
    where = {tensor.name: file.name for file in files for number in file.loads for tensor in loads[number].tensors}
    return {"metadata": {"total_size": sum(load.nbytes for load in loads)}, "weight_map": where}
