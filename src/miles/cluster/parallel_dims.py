"""Parallel dimensions of a trainer: replicate, shard (FSDP), context, tensor, expert and pipeline sizes. No torch.

    rank = (((pipeline * replicate + r) * shard + s) * context + c) * tensor + t

Ranks that differ in ``r`` and ``s`` have different rows of a batch; those that differ in ``c`` have different tokens
of the same rows, those that differ in ``t`` different heads and channels. Parameters are sharded over ``s`` and ``c``
together, and experts are distributed over the same ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapreplace

from miles.core.errors import UsageError
from miles.models.parallel import tp_sharding as shard
from miles.models.spec import DecoderSpec

# Tokens of a chunk from which its state is smaller than they are: sequences with shorter chunks are not split.
MIN_SCANNED_CHUNK = 64
# How many times the mean a rank may scan before one more sequence is split.
MAX_SCAN_IMBALANCE = 1.25


def assign_scans(lengths: Sequence[int], context: int) -> list[int | None]:
    """Return which context rank scans each sequence in a recurrent layer; None: it is split, and ranks pass states on.

    Whole sequences need no states, so that as few as possible are split, the longest ones: until ranks scan about
    equally many tokens. Each rank has two chunks of a split sequence.

    >>> assign_scans([900, 1000, 1000, 900], 2)
    [0, 0, 1, 1]
    >>> assign_scans([9000, 1000, 1000], 2)
    [None, 0, 1]
    """
    total = sum(lengths)
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    long_enough = sum(length >= MIN_SCANNED_CHUNK * 2 * context for length in lengths)
    best: tuple[int, list[int | None]] | None = None
    for count in range(long_enough + 1):
        most, owners = _assign_whole(lengths, order[count:], context)
        most += sum(lengths[i] for i in order[:count])
        if best is None or most <= best[0]:
            best = most, owners
        if most <= MAX_SCAN_IMBALANCE * total:
            break
    assert best is not None
    return best[1]


def compute_scan_imbalance(tokens: int, longest: int, context: int) -> float:
    """Return how many times its share of ``tokens`` a rank may scan beside it, in sequences of at most ``longest``."""
    # The longest sequence that is not split may come last, when all ranks have equally many tokens.
    whole = min(longest, MIN_SCANNED_CHUNK * 2 * context)
    return max(whole * (context - 1) / tokens, MAX_SCAN_IMBALANCE - 1 if longest > whole else 0.0)


def _assign_whole(lengths: Sequence[int], order: Sequence[int], context: int) -> tuple[int, list[int | None]]:
    """Return the most tokens of any rank, times ``context``, if each sequence goes to the rank that has the fewest."""
    owners: list[int | None] = [None] * len(lengths)
    loads = [(0, rank) for rank in range(context)]
    for i in order:
        load, rank = loads[0]
        owners[i] = rank
        heapreplace(loads, (load + lengths[i], rank))
    return context * max(load for load, _ in loads), owners


@dataclass(frozen=True, slots=True)
class RankCoords:
    """Coordinates of a rank, one per dimension."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """``world`` ranks as a grid. ``sequence`` enables sequence parallelism over the tensor ranks.

    ``expert_tensor`` is the tensor parallel size of experts; None is that of the model.

    >>> dims = ParallelDims(world=8, shard=2, context=2, tensor=2)
    >>> dims.coords(5)
    RankCoords(pipeline=0, replicate=0, shard=1, context=0, tensor=1)
    >>> dims.groups("tensor")
    [[0, 1], [2, 3], [4, 5], [6, 7]]
    """

    world: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    pipeline: int = 1
    expert_tensor: int | None = None
    sequence: bool = False

    def __post_init__(self) -> None:
        problem = self._find_problem()
        if problem is not None:
            raise UsageError(problem)

    @property
    def data_parallel_size(self) -> int:
        """Into how many parts a batch is split."""
        return self.replicate * self.shard

    @property
    def shard_group_size(self) -> int:
        """Over how many ranks a parameter is sharded, beside the tensor ranks."""
        return self.shard * self.context

    def coords(self, rank: int) -> RankCoords:
        """The coordinates of a rank."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        rest, part = divmod(rest, self.shard)
        pipeline, replicate = divmod(rest, self.replicate)
        return RankCoords(pipeline=pipeline, replicate=replicate, shard=part, context=context, tensor=tensor)

    def data_parallel_rank(self, rank: int) -> int:
        """Which part of a batch a rank has."""
        coords = self.coords(rank)
        return coords.replicate * self.shard + coords.shard

    def groups(self, *along: str) -> list[list[int]]:
        """The groups of ranks that differ only in these dimensions, each in order.

        ``expert`` groups are neighbours among the ranks of a shard group that have all experts together;
        ``expert_data`` groups have the same experts.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            found.setdefault(self._group_key(rank, along), []).append(rank)
        return list(found.values())

    def _group_key(self, rank: int, along: Iterable[str]) -> tuple[int, ...]:
        """The coordinates that the members of a rank's group have in common."""
        coords, varying = self.coords(rank), set(along)
        index = coords.shard * self.context + coords.context
        values = {"pipeline": coords.pipeline, "replicate": coords.replicate, "tensor": coords.tensor}
        if varying & {"expert", "expert_data"}:
            assert not varying & {"shard", "context"}, "expert ranks lie within these"
            values |= {"expert": index % self.expert, "expert_data": index // self.expert}
        else:
            values |= {"shard": coords.shard, "context": coords.context}
        return tuple(value for name, value in values.items() if name not in varying)

    def _find_problem(self) -> str | None:
        sizes = {
            "replicate": self.replicate,
            "shard": self.shard,
            "context": self.context,
            "tensor": self.tensor,
            "expert": self.expert,
            "pipeline": self.pipeline,
        }
        for name, size in sizes.items():
            if size < 1:
                return f"the {name} parallel size is {size}, but must be at least 1."
        product = self.replicate * self.shard * self.context * self.tensor * self.pipeline
        if product != self.world:
            sizes_text = " x ".join(f"{size} {name}" for name, size in sizes.items() if name != "expert" and size > 1)
            return (
                f"{sizes_text or 'a single rank'} needs {product} ranks, but there are {self.world}; "
                "choose parallel sizes whose product is the number of training devices."
            )
        own = self.tensor if self.expert_tensor is None else self.expert_tensor
        if own < 1 or self.tensor % own:
            return f"the expert tensor parallel size {own} does not divide the tensor parallel size {self.tensor}."
        # Tensor ranks over which experts are not split may have other experts.
        available = self.shard_group_size * (self.tensor // own)
        if available % self.expert:
            free = f" x {self.tensor // own} tensor" if own < self.tensor else ""
            return (
                f"the expert parallel size {self.expert} does not divide the {available} ranks that share parameters "
                f"({self.shard} shard x {self.context} context{free}); choose a divisor of {available}."
            )
        return None

    def find_model_problem(self, spec: DecoderSpec, *, slices_layer_inputs: bool = False) -> str | None:
        """Why this model cannot be trained with these sizes, in a sentence; None if it can.

        Sequence parallelism may slice per-layer inputs, as that of Megatron does.
        """
        problem = shard.check_tp_size(spec, self.tensor)
        if problem is not None:
            return f"the model cannot be split over {self.tensor} tensor parallel ranks: {problem}."
        if self.sequence and self.tensor == 1:
            return "sequence parallelism needs a tensor parallel size above 1; raise that size or disable it."
        if self.sequence and spec.per_layer_input is not None and not slices_layer_inputs:
            return "sequence parallelism does not split the embeddings that each layer of this model has; disable it."
        if self.expert > 1:
            counts = {layer.ffn.num_experts for layer in spec.layers if isinstance(layer.ffn, shard.MoeSpec)}
            if not counts:
                return f"the model has no experts to distribute over {self.expert} ranks; disable expert parallelism."
            odd = next((count for count in counts if count % self.expert), None)
            if odd is not None:
                return (
                    f"{odd} experts cannot be distributed evenly over {self.expert} ranks; choose a divisor of {odd}."
                )
        return None
