"""Which projections of a decoder may have low-rank adapters, and which have them. No torch.

Those of attention (whatever kind) and of dense MLPs, also the one beside experts. Routers, gates and the experts
themselves, which are stacks of matrices here, have none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from miles.core.errors import UsageError
from miles.models import names
from miles.models.foreign.spec import ForeignSpec
from miles.models.pieces import Piece
from miles.models.spec import DecoderSpec

ALL = "all-linear"
# Modules of a layer, by ours, and what a user may call their projections together.
_GROUPS = {"attention": "attn", "mla": "attn", "delta": "attn", "mamba": "attn", "mlp": "mlp", "moe": "mlp"}
# Small projections of a mixer that choose or scale, and are no part of what it computes with.
_LEFT_OUT = ("ba", "indexer")


@dataclass(frozen=True, slots=True)
class Target:
    """A projection with an adapter: its ``module`` as the checkpoint calls it, and where it lies in which of ours."""

    ours: str
    piece: Piece
    group: str

    @property
    def module(self) -> str:
        return self.piece.hf_name.removesuffix(".weight")

    @property
    def leaf(self) -> str:
        """The last part of its name, such as q_proj."""
        return self.module.rpartition(".")[2]

    @property
    def outputs(self) -> int:
        return self.piece.shape[0]

    @property
    def inputs(self) -> int:
        return self.piece.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    """The adapters of a model: their rank, what their products are multiplied with over it, and where they are."""

    rank: int
    alpha: float
    targets: tuple[Target, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(self.rank * (target.inputs + target.outputs) for target in self.targets)

    @property
    def covered(self) -> int:
        """How many numbers the matrices have that adapters are added to."""
        return sum(target.inputs * target.outputs for target in self.targets)


def possible(spec: DecoderSpec) -> tuple[Target, ...]:
    """Every projection that may have an adapter, in the decoder's own order."""
    if isinstance(spec, ForeignSpec):
        return ()
    found: list[Target] = []
    for ours, pieces in names.pieces(spec).items():
        group = _group(ours)
        if group is not None:
            found += [
                Target(ours, piece, group)
                for piece in pieces
                if not piece.transposed and piece.hf_name.endswith(".weight")
            ]
    return tuple(found)


def chosen(spec: DecoderSpec, wanted: str | None, unwanted: str | None) -> tuple[Target, ...]:
    """Those that ``--target-modules`` names and ``--exclude-modules`` does not; UsageError where a word names none."""
    every = possible(spec)
    if not every:
        raise UsageError("this model has no projection that adapters can be added to.")
    words = _words(wanted) or [ALL]
    refused = _words(unwanted)
    for flag, given in (("--target-modules", words), ("--exclude-modules", refused)):
        for word in given:
            if word != ALL and not any(_named(target, word) for target in every):
                raise UsageError(f"{flag} {word} names no projection of this model; there are {_told(every)}.")
    named = [t for t in every if any(word == ALL or _named(t, word) for word in words)]
    left = tuple(t for t in named if not any(_named(t, word) for word in refused))
    if not left:
        raise UsageError("--exclude-modules leaves no projection that has an adapter; name fewer.")
    return left


def of_modules(spec: DecoderSpec, modules: Iterable[str]) -> tuple[Target, ...]:
    """The targets of these names, in the decoder's own order; UsageError where one is none."""
    by_name = {target.module: target for target in possible(spec)}
    wanted = set(modules)
    unknown = sorted(wanted - by_name.keys())
    if unknown:
        raise UsageError(f"it has an adapter of {unknown[0]}, which is no projection of this model that can have one.")
    return tuple(target for module, target in by_name.items() if module in wanted)


def leaves(spec: DecoderSpec, targets: Iterable[Target]) -> list[str]:
    """What PEFT is to call ``targets``: by their last names where these name no other tensor, else in full."""
    own = {target.module for target in targets}
    short = {module.rpartition(".")[2] for module in own}
    every = {p.hf_name.removesuffix(".weight") for pieces in names.pieces(spec).values() for p in pieces}
    clear = {module for module in every if module.rpartition(".")[2] in short} == own
    return sorted(short if clear else own)


def _group(ours: str) -> str | None:
    parts = ours.split(".")
    if len(parts) < 5 or parts[0] != "layers" or parts[-1] != "weight":
        return None
    kind, inner = parts[2], parts[3:-1]
    if any(part in _LEFT_OUT or part.endswith("norm") for part in inner) or (kind == "moe" and inner[0] != "shared"):
        return None
    return _GROUPS.get(kind)


def _named(target: Target, word: str) -> bool:
    return word in (target.group, target.leaf) or target.module == word or target.module.endswith(f".{word}")


def _words(given: str | None) -> list[str]:
    return [] if given is None else [word.strip() for word in given.split(",") if word.strip()]


def _told(every: Iterable[Target]) -> str:
    return ", ".join(dict.fromkeys(word for t in every for word in (t.group, t.leaf)))
