"""Sharding of a checkpoint: which rank writes which tensors into which file, computed identically on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from miles.models.checkpoint.safetensors_io import StoredTensor, TensorHeader, shard_file_name


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorGroup:
    """Tensors on disk that come from one tensor of the model, and are in one file.

    All ranks call ``gather`` together, one of them writes ``views`` of the result. A ``stored`` tensor is copied.
    """

    tensors: tuple[TensorHeader, ...]
    gather: Callable[[], Tensor] | None = None
    views: Callable[[Tensor], Sequence[Tensor]] = lambda full: (full,)
    stored: StoredTensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A file, the rank that writes it, and the indices of its tensor groups."""

    name: str
    rank: int
    groups: tuple[int, ...]


def assign_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Assign a rank to each size: in decreasing order, each to the least loaded rank.

    No rank exceeds the mean by more than the largest size.

    >>> assign_owners([1, 8, 3, 4], 2)
    [1, 0, 1, 1]
    """
    owners, load = [0] * len(sizes), [0] * ranks
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        owners[number] = min(range(ranks), key=lambda rank: (load[rank], rank))
        load[owners[number]] += sizes[number]
    return owners


def plan_files(name: str, groups: Sequence[TensorGroup], ranks: int, limit: int | None) -> list[ShardFile]:
    """Plan the files of ``groups``: the single file ``name``, or shards per rank of at most ``limit`` bytes.

    Groups are in order within a file, and so are a rank's files.
    """
    owners = assign_owners([group.nbytes for group in groups], ranks)
    shards = [(rank, run) for rank in range(ranks) for run in _split_runs(groups, owners, rank, limit)] or [(0, ())]
    return [ShardFile(shard_file_name(name, i, len(shards)), rank, tuple(run)) for i, (rank, run) in enumerate(shards)]


def _split_runs(
    groups: Sequence[TensorGroup], owners: Sequence[int], rank: int, limit: int | None
) -> Iterator[list[int]]:
    run: list[int] = []
    used = 0
    for number, group in enumerate(groups):
        if owners[number] != rank:
            continue
        if run and limit is not None and used + group.nbytes > limit:
            yield run
            run, used = [], 0
        run.append(number)
        used += group.nbytes
    if run:
        yield run


def build_index(files: Sequence[ShardFile], groups: Sequence[TensorGroup]) -> dict[str, object]:
    """Return the safetensors index: the file of each tensor."""
    weight_map = {tensor.name: file.name for file in files for n in file.groups for tensor in groups[n].tensors}
    return {"metadata": {"total_size": sum(group.nbytes for group in groups)}, "weight_map": weight_map}
