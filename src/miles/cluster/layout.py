"""How the ranks of a trainer share a model and a batch: the sizes, who sits where, and what fits. No torch.

    rank = (((pipeline * replicate + r) * shard + s) * context + c) * tensor + t

Ranks that differ in ``r`` and ``s`` have different rows of a batch; those that differ in ``c`` have different tokens
of the same rows, those that differ in ``t`` different heads and channels. Parameters are cut over ``s`` and ``c``
together, and experts are dealt out inside that same run of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from miles.core.errors import UsageError
from miles.models import shard
from miles.models.spec import DecoderSpec, DeltaSpec, MambaSpec, MlaSpec


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank sits, one number a dimension."""

    pipeline: int
    replicate: int
    shard: int
    context: int
    tensor: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """``world`` ranks as a grid. ``sequence`` cuts tokens over the tensor ranks between a layer's parts.

    ``expert_tensor`` is over how many of the tensor ranks an expert's channels are cut; None is all of them.

    >>> layout = Layout(world=8, shard=2, context=2, tensor=2)
    >>> layout.place(5)
    Place(pipeline=0, replicate=0, shard=1, context=0, tensor=1)
    >>> layout.groups("tensor")
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
        problem = self._broken()
        if problem is not None:
            raise UsageError(problem)

    @property
    def parts(self) -> int:
        """Into how many parts a batch is dealt out."""
        return self.replicate * self.shard

    @property
    def pieces(self) -> int:
        """Over how many ranks a parameter is cut, beside the tensor ranks."""
        return self.shard * self.context

    def place(self, rank: int) -> Place:
        """Where ``rank`` sits."""
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        rest, part = divmod(rest, self.shard)
        pipeline, replicate = divmod(rest, self.replicate)
        return Place(pipeline=pipeline, replicate=replicate, shard=part, context=context, tensor=tensor)

    def rank(self, place: Place) -> int:
        """Who sits there."""
        at = (place.pipeline * self.replicate + place.replicate) * self.shard + place.shard
        return (at * self.context + place.context) * self.tensor + place.tensor

    def part(self, rank: int) -> int:
        """Which part of a batch is ``rank``'s."""
        place = self.place(rank)
        return place.replicate * self.shard + place.shard

    def groups(self, *along: str) -> list[list[int]]:
        """The ranks that differ in nothing but these dimensions, in order: a list for each group.

        ``expert`` are the neighbours among the ranks that share parameters which have all experts together, and
        ``apart`` those that have the same experts.
        """
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world):
            found.setdefault(self._other(rank, along), []).append(rank)
        return list(found.values())

    def _other(self, rank: int, along: Iterable[str]) -> tuple[int, ...]:
        """What the members of ``rank``'s group have in common."""
        place, left = self.place(rank), set(along)
        piece = place.shard * self.context + place.context
        whole = {"pipeline": place.pipeline, "replicate": place.replicate, "tensor": place.tensor}
        if left & {"expert", "apart"}:
            assert not left & {"shard", "context"}, "experts lie within these"
            whole |= {"expert": piece % self.expert, "apart": piece // self.expert}
        else:
            whole |= {"shard": place.shard, "context": place.context}
        return tuple(at for name, at in whole.items() if name not in left)

    def _broken(self) -> str | None:
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
                return f"a layout of {size} {name} ranks is none; each number of ranks is at least 1."
        made = self.replicate * self.shard * self.context * self.tensor * self.pipeline
        if made != self.world:
            told = " x ".join(f"{size} {name}" for name, size in sizes.items() if name != "expert" and size > 1)
            return (
                f"{told or 'a layout of one rank'} makes {made} ranks, and there are {self.world}; "
                "choose parallel sizes whose product is the number of devices of the training plane."
            )
        own = self.tensor if self.expert_tensor is None else self.expert_tensor
        if own < 1 or self.tensor % own:
            return f"{own} tensor ranks of an expert do not divide the {self.tensor} tensor ranks."
        # Tensor ranks that do not cut an expert may have other experts.
        room = self.pieces * (self.tensor // own)
        if room % self.expert:
            free = f" x {self.tensor // own} tensor" if own < self.tensor else ""
            return (
                f"{self.expert} expert ranks do not divide the {room} ranks that share parameters "
                f"({self.shard} shard x {self.context} context{free}); choose a divisor of {room}."
            )
        return None

    def misfit(self, spec: DecoderSpec) -> str | None:
        """Why this model cannot be laid out so, if it cannot: a whole sentence."""
        problem = shard.misfit(spec, self.tensor)
        if problem is not None:
            return f"the model cannot be cut across {self.tensor} tensor ranks: {problem}."
        if self.sequence and self.tensor == 1:
            return (
                "sequence parallel cuts tokens over the tensor ranks, and there is one; ask for more or leave it out."
            )
        if self.context > 1:
            problem = _uncut(spec)
            if problem is not None:
                return f"sequences cannot be cut across {self.context} context ranks: {problem}."
        if self.expert > 1:
            counts = {layer.ffn.num_experts for layer in spec.layers if isinstance(layer.ffn, shard.MoeSpec)}
            if not counts:
                return f"the model has no experts to deal out over {self.expert} ranks; leave expert parallel out."
            odd = next((count for count in counts if count % self.expert), None)
            if odd is not None:
                return f"{odd} experts cannot be dealt out evenly over {self.expert} ranks; choose a divisor of {odd}."
        return None


def _uncut(spec: DecoderSpec) -> str | None:
    """Why a sequence of this model must stay on one rank."""
    for i, layer in enumerate(spec.layers):
        match layer.mixer:
            case DeltaSpec() | MambaSpec():
                return f"layer {i} carries a state from each token to the next"
            case MlaSpec() if layer.mixer.indexer is not None:
                return f"layer {i} chooses which tokens it sees among all that came before"
            case _:
                pass
    return None
